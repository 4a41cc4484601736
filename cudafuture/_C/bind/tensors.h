// Tensors that Python gives to be read or written, as memory for the storage engine.
#pragma once

#include <ATen/core/Tensor.h>

#include <deque>
#include <memory>
#include <vector>

#include "bind/python.h"
#include "storage/block.h"
#include "storage/device.h"
#include "storage/memory.h"

namespace cudafuture::bind {

struct Tensors {
  std::deque<storage::Memory> memory;           // of each
  std::shared_ptr<storage::DeviceSide> device;  // null: all are on the host
  nb::list keep;                                // what owns the memory

  nb::object kept() const { return keep.size() == 1 ? nb::object(keep[0]) : nb::object(keep); }
};

// A contiguous tensor on the host that has the memory of its elements. Throws TypeError and ValueError.
at::Tensor take_on_host(nb::handle object);

// Throws TypeError and ValueError. Of a read the tensors are noted as changed.
Tensors take_tensors(nb::handle tensors, storage::Direction direction, int priority);

}  // namespace cudafuture::bind
