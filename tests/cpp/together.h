// Threads that start at the same time, for all native tests.
#pragma once

#include <latch>
#include <thread>
#include <vector>

namespace native_tests {

// Run body(0), ..., body(count - 1), each in its own thread, and return when all threads have ended. The threads start
// at the same time.
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
