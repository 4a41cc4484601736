// The queues of an engine's operations that wait for blocks, and the order in which they get them.
//
// There is a first-in-first-out queue for each combination of "needs devices" and "larger than a block". The queues are
// served round-robin, one block at a time, so a small operation never waits for all of a large one. Urgent operations
// (of a negative priority) have their own queues, which come first; the other queues still get one block of every few.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "core/intrusive_list.h"
#include "io/operation.h"

namespace cudafuture::io {

using OperationList = IntrusiveList<Operation, &Operation::next_in_queue>;

class Queues {
 public:
  void push(Operation* operation, std::size_t block_size) noexcept;

  // Removes the first operation of a queue.
  static Operation* pop(OperationList& queue) noexcept;

  // The blocks that operations with devices may have now. Later: free blocks are reserved for them until all blocks are
  // free, because the engine then replaces the buffers.
  enum class ForDevices : std::uint8_t { none, some, later };

  // Returns the queue whose first operation gets the next block; null: none does now.
  OperationList* next(ForDevices blocks) noexcept;

 private:
  static constexpr std::size_t kUrgentInARow = 7;  // blocks, while others wait

  struct RoundRobin {
    std::array<OperationList, 4> queues;  // bit 0: more than a block; bit 1: with devices
    std::size_t next = 0;
  };

  static OperationList* next_of(RoundRobin& queues, ForDevices blocks, bool& must_wait) noexcept;

  RoundRobin ordinary_;
  RoundRobin urgent_;
  std::size_t urgent_in_a_row_ = 0;  // blocks
};

}  // namespace cudafuture::io
