// Threads for the tests: many that start together, one with a small stack, one of an engine.
#pragma once

#include <functional>
#include <latch>
#include <thread>
#include <utility>
#include <vector>

#include "fake_runtime.h"

namespace cudafuture::fake {

// Runs body(0), ..., body(count - 1), each in a thread of its own, and returns when all have ended. They start
// together.
template <class Body>
void together(int count, Body&& body) {
  std::latch start(count);
  std::vector<std::thread> threads;
  threads.reserve(static_cast<std::size_t>(count));
  for (int i = 0; i < count; ++i) {
    threads.emplace_back([&, i] {
      start.arrive_and_wait();
      body(i);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

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
