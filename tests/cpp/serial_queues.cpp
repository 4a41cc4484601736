#include "serial_queues.h"

#include <deque>
#include <utility>

namespace cudafuture::fake {

SerialQueue& new_serial_queue(std::string name) {
  static auto* const queues = new std::deque<SerialQueue>;
  return queues->emplace_back(std::move(name));
}

void settle(Executor& queue) {
  Signal reached;
  completed()->attach(call_inside([&](Future&) { reached.send(); }, &queue));
  reached.wait();
}

void wait_outside(const Signal& signal) {
  void* const state = foreign_runtime().step_out();
  signal.wait();
  foreign_runtime().step_in(state);
}

}  // namespace cudafuture::fake
