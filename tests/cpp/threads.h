// Threads for the tests: an engine's thread, a thread with a small stack, and threads that start at the same time.
#pragma once

#include <functional>
#include <latch>
#include <thread>
#include <utility>

#include "fake_runtime.h"
#include "together.h"

namespace cudafuture::fake {

using native_tests::together;

// Run `body` in a thread of an engine, and return when the thread has ended.
template <class Body>
void on_engine_thread(Body&& body) {
  std::thread([&] {
    EngineThread engine;
    body();
  }).join();
}

// Run `body` in a thread whose stack is too small for recursion, and return when the thread has ended.
void on_small_stack(const std::function<void()>& body);

// A one-time event that threads can wait for.
class Signal {
 public:
  void send() { latch_.count_down(); }
  void wait() const { latch_.wait(); }
  bool sent() const { return latch_.try_wait(); }

 private:
  std::latch latch_{1};
};

}  // namespace cudafuture::fake
