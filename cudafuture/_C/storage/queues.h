// The operations of an engine that wait for blocks, and the order in which they get them.
//
// Operations wait by whether they need devices and whether they are more than a block: in each queue first in, first
// out, and the queues take turns, a block each. So a small operation never waits for all of a large one. Urgent
// operations (of a negative priority) have queues of their own, which go before the others; those get one block of
// some.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "storage/line.h"
#include "storage/operation.h"

namespace cudafuture::storage {

class Queues {
 public:
  void push(Operation* operation, std::size_t block_size) noexcept;

  // The blocks that operations with devices may have now. Later: the free blocks are for none but them, once all are
  // free, since the engine takes other buffers then.
  enum class ForDevices : std::uint8_t { none, some, later };

  // The queue whose first operation gets the next block; null: none does now.
  Line* next(ForDevices blocks) noexcept;

 private:
  static constexpr std::size_t kUrgentInARow = 7;  // blocks, while others wait

  struct Turns {
    std::array<Line, 4> queues;  // bit 0: more than a block; bit 1: with devices
    std::size_t turn = 0;
  };

  static Line* next_of(Turns& turns, ForDevices blocks, bool& must_wait) noexcept;

  Turns ordinary_;
  Turns urgent_;
  std::size_t urgent_in_a_row_ = 0;  // blocks
};

}  // namespace cudafuture::storage
