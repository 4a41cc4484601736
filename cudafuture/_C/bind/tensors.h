// Python's tensors as memory for the I/O engine's reads and writes.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

#include <cstddef>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bind/python.h"
#include "io/aligned.h"
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

// A tensor that can be read or written, and the object that owns its memory.
struct CheckedTensor {
  at::Tensor tensor;
  nb::object owner;
};
// Throws TensorError, TypeError and ValueError.
CheckedTensor check_tensor(nb::handle object, io::Direction direction);

// The memory of a host tensor for a thread without the GIL. Throws TypeError. For a read, it bumps the tensor's
// version.
class HostMemory {
 public:
  HostMemory(const at::Tensor& tensor, io::Direction direction);
  const io::Memory& memory() const noexcept { return memory_; }
  // Returns the reason why the memory cannot be used any more; none: it can.
  std::optional<std::string> fault() const;

 private:
  c10::Storage storage_;
  const void* data_ = nullptr;  // of the storage
  std::size_t needed_ = 0;      // bytes of the storage
  io::Memory memory_;
};

// Returns the reason why a stored tensor cannot be read into another, to follow "key 'k' is ".
std::string differ(const io::Shape& stored, const io::Shape& target);

// Throws TypeError and ValueError. For a read, it bumps the tensors' versions, so that autograd knows of the change.
Tensors take_tensors(nb::handle tensors, io::Direction direction, int priority);

}  // namespace cudafuture::bind
