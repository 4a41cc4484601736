#include "io/queues.h"

namespace cudafuture::io {

void Queues::push(Operation* operation, std::size_t block_size) noexcept {
  operation->is_queued = true;
  const std::size_t queue = (operation->size() > block_size ? 1 : 0) + (operation->device() != nullptr ? 2 : 0);
  (operation->is_urgent() ? urgent_ : ordinary_).queues[queue].push(operation);
}

Operation* Queues::pop(OperationList& queue) noexcept {
  Operation* const operation = queue.pop();
  operation->is_queued = false;
  return operation;
}

OperationList* Queues::next(ForDevices blocks) noexcept {
  const bool is_turn_of_others = urgent_in_a_row_ >= kUrgentInARow;
  bool must_wait = false;
  for (const bool is_urgent : {!is_turn_of_others, is_turn_of_others}) {
    OperationList* const queue = next_of(is_urgent ? urgent_ : ordinary_, blocks, must_wait);
    if (queue != nullptr) urgent_in_a_row_ = is_urgent ? urgent_in_a_row_ + 1 : 0;
    if (queue != nullptr || must_wait) return queue;
  }
  return nullptr;
}

OperationList* Queues::next_of(RoundRobin& queues, ForDevices blocks, bool& must_wait) noexcept {
  for (std::size_t i = 0; i < queues.queues.size(); ++i) {
    const std::size_t queue = queues.next;
    queues.next = (queues.next + 1) % queues.queues.size();
    if (queues.queues[queue].empty()) continue;
    if ((queue & 2) == 0 || blocks == ForDevices::some) return &queues.queues[queue];
    if (blocks == ForDevices::none) continue;
    queues.next = queue;  // once: the buffers are replaced when no block is in use
    must_wait = true;
    return nullptr;
  }
  return nullptr;
}

}  // namespace cudafuture::io
