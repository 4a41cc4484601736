// Many threads that start together, for the tests of both native modules.
#pragma once

#include <latch>
#include <thread>
#include <vector>

namespace native_tests {

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

}  // namespace native_tests
