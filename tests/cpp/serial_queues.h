// Serial queues for the tests, and how to wait in one and for one.
#pragma once

#include <string>
#include <vector>

#include "callback.h"
#include "core/serial_queue.h"
#include "threads.h"

namespace cudafuture::fake {

// Never freed, as no serial queue is: the thread that ran the last callback may look into the line once more.
SerialQueue& new_serial_queue(std::string name = "queue");

// Returns when everything that stands in the line now has run.
void settle(Executor& line);

// Waits as a callback should: outside the runtime, where others can go on.
void wait_outside(const Signal& signal);

inline Callback::Run mark(Order& order, int number) {
  return [&order, number](Future&) { order.push_back(number); };
}

}  // namespace cudafuture::fake
