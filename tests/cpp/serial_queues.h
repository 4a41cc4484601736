// Serial queues for the tests, and functions that wait for a queue or inside one.
#pragma once

#include <string>
#include <vector>

#include "callback.h"
#include "core/serial_queue.h"
#include "threads.h"

namespace cudafuture::fake {

// Return a new serial queue. Serial queues are never freed, because the thread that ran the last callback may read the
// queue once more.
SerialQueue& new_serial_queue(std::string name = "queue");

// Return when all callbacks that are in the queue now have run.
void settle(Executor& queue);

// Wait outside the runtime, as a callback should, so that other threads can enter it.
void wait_outside(const Signal& signal);

// Return a function that appends `number` to `order`.
inline Callback::Run mark(Order& order, int number) {
  return [&order, number](Future&) { order.push_back(number); };
}

}  // namespace cudafuture::fake
