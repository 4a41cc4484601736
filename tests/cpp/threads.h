// Threads for the tests: one with a small stack, one of an engine, and many that start together.
#pragma once

#include <functional>
#include <latch>
#include <thread>
#include <utility>

#include "fake_runtime.h"
#include "together.h"

namespace cudafuture::fake {

using native_tests::together;

// Runs `body` in a thread of an engine, and returns when it has ended.
template <class Body>
void on_engine_thread(Body&& body) {
  std::thread([&] {
    EngineThread engine;
    body();
  }).join();
}

// Runs `body` in a thread whose stack has no room for recursion, and returns when it has ended.
void on_small_stack(const std::function<void()>& body);

// Says that something has happened, once, to whoever waits for it.
class Signal {
 public:
  void send() { latch_.count_down(); }
  void wait() const { latch_.wait(); }
  bool sent() const { return latch_.try_wait(); }

 private:
  std::latch latch_{1};
};

}  // namespace cudafuture::fake
