// Python's tensors as memory for the I/O engine's reads and writes.
#pragma once

#include <ATen/core/Tensor.h>

#include <deque>
#include <memory>
#include <vector>

#include "bind/python.h"
#include "io/block.h"
#include "io/device.h"
#include "io/memory.h"

namespace cudafuture::bind {

struct Tensors {
  std::deque<io::Memory> memory;           // of each tensor
  std::shared_ptr<io::DeviceSide> device;  // null: all are on the host
  nb::list keep;                           // the owners of the memory

  nb::object kept() const { return keep.size() == 1 ? nb::object(keep[0]) : nb::object(keep); }
};

// Returns true if a tensor's memory holds its values, one after the other. Throws TensorError if its storage was freed
// or shrunk.
bool has_contiguous_memory(nb::handle object);
// Throws TensorError for a tensor whose storage was freed or shrunk.
void expect_storage(nb::handle object);

// Returns a contiguous host tensor that owns its elements' memory. Throws TypeError and ValueError.
at::Tensor take_on_host(nb::handle object);

// Throws TypeError and ValueError. For a read, it bumps the tensors' versions, so that autograd knows of the change.
Tensors take_tensors(nb::handle tensors, io::Direction direction, int priority);

}  // namespace cudafuture::bind
