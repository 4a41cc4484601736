#include "bind/tensors.h"

#include <ATen/EmptyTensor.h>
#include <ATen/MemoryOverlap.h>
#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/python_variable.h>

#include <string>
#include <utility>

#include "bind/errors.h"
#include "core/future.h"
#include "core/stream_pool.h"
#include "core/tensor_memory.h"

namespace cudafuture::bind {
namespace {

using io::DeviceSide;
using io::Direction;
using io::Memory;

std::string described(const at::Tensor& tensor) {
  return "a tensor of layout " + c10::str(tensor.layout()) + " on " + tensor.device().str();
}

at::Tensor expect_tensor(nb::handle object) {
  if (THPVariable_Check(object.ptr())) return THPVariable_Unpack(object.ptr());
  throw nb::type_error(("expected a torch.Tensor, not " + repr_of(object)).c_str());
}

void expect_memory(const at::Tensor& tensor, Direction direction) {
  if (const auto fault = memory_fault(tensor)) raise_error("TensorError", *fault);
  if (!tensor.is_cpu() && !has_streams(tensor.device())) {
    throw nb::type_error(
        (described(tensor) + " cannot be read or written: copy it to the host or to a device with streams first")
            .c_str());
  }
  if (direction == Direction::write) return;
  if (tensor.is_conj() || tensor.is_neg()) {
    throw nb::value_error(
        "a view that conjugates or negates cannot be read into; read into a tensor of its own, and copy that");
  }
  if (!tensor.is_contiguous() && at::has_internal_overlap(tensor) == at::MemOverlap::Yes) {
    throw nb::value_error(
        "the tensor cannot be read into: some of its elements share memory; read into a contiguous tensor");
  }
}

void add_on_host(Memory& memory, const at::Tensor& tensor, Direction direction) {
  if (tensor.numel() == 0) return;
  const bool reads = direction == Direction::read;
  void* const data = reads ? tensor.mutable_data_ptr() : const_cast<void*>(tensor.const_data_ptr());
  if (data == nullptr) throw nb::type_error((described(tensor) + " has no memory").c_str());
  if (tensor.is_contiguous()) {
    memory.add(data, tensor.nbytes());
    return;
  }
  memory.add_strided(data, tensor.itemsize(), tensor.sizes().data(), tensor.strides().data(),
                     static_cast<std::size_t>(tensor.dim()));
}

// Tells autograd that a tensor changes.
void note_change(const at::Tensor& tensor) {
  if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
}

// Objects that must not be freed on a thread without the GIL: if only Python's reference remains after them, torch
// takes the GIL.
struct Owned {
  std::vector<at::Tensor> bytes;
  std::shared_ptr<DeviceSide> device;
};

}  // namespace

bool has_contiguous_memory(nb::handle object) {
  const at::Tensor tensor = expect_tensor(object);
  const bool is_strided = tensor.layout() == at::kStrided && !tensor.is_nested();
  if (const auto fault = is_strided ? memory_fault(tensor) : storage_fault(tensor)) raise_error("TensorError", *fault);
  return is_strided && tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg();
}

void expect_storage(nb::handle object) {
  if (const auto fault = storage_fault(expect_tensor(object))) raise_error("TensorError", *fault);
}

at::Tensor take_on_host(nb::handle object) {
  const at::Tensor tensor = expect_tensor(object);
  expect_memory(tensor, Direction::write);
  if (!tensor.is_cpu() || !tensor.is_contiguous() || tensor.is_conj() || tensor.is_neg() || tensor.is_quantized()) {
    throw nb::value_error((described(tensor) + " does not fit: give a contiguous one on the host").c_str());
  }
  if (tensor.numel() != 0 && tensor.const_data_ptr() == nullptr) {
    throw nb::type_error((described(tensor) + " has no memory").c_str());
  }
  return tensor;
}

CheckedTensor check_tensor(nb::handle object, Direction direction) {
  at::Tensor tensor = expect_tensor(object);
  expect_memory(tensor, direction);
  if (!tensor.is_cpu() || !(tensor.is_conj() || tensor.is_neg())) return {std::move(tensor), nb::borrow(object)};
  tensor = tensor.resolve_conj().resolve_neg();  // the resolved values are stored
  nb::object owner = nb::steal(THPVariable_Wrap(tensor));
  return {std::move(tensor), std::move(owner)};
}

HostMemory::HostMemory(const at::Tensor& tensor, Direction direction)
    : storage_(tensor.storage()),
      needed_(at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.itemsize(),
                                               static_cast<std::size_t>(tensor.storage_offset()))) {
  add_on_host(memory_, tensor, direction);
  if (direction == Direction::read) note_change(tensor);
  data_ = storage_.data();
}

std::optional<std::string> HostMemory::fault() const {
  if (memory_.size() == 0 || (storage_.data() == data_ && storage_.nbytes() >= needed_)) return std::nullopt;
  return "the storage of the tensor was freed, shrunk or allocated anew while the tensor was in use";
}

std::string differ(const io::Shape& stored, const io::Shape& target) {
  const auto text = [](const io::Shape& s) {
    return std::string(c10::toString(s.dtype)) + " " + c10::str(c10::IntArrayRef(s.sizes));
  };
  return "a tensor of " + text(stored) + ", but the tensor to read into is one of " + text(target);
}

Tensors take_tensors(nb::handle tensors, Direction direction, int priority) {
  Tensors taken;
  std::vector<at::Tensor> all;
  for (nb::handle object : tensors) {
    CheckedTensor checked = check_tensor(object, direction);
    taken.keep.append(checked.owner);
    all.push_back(std::move(checked.tensor));
  }
  auto owned = std::make_unique<Owned>();
  const std::vector<c10::Device> devices = devices_of(all);
  if (!devices.empty()) {
    taken.keep.append(nb::capsule(owned.get(), [](void* p) noexcept { delete static_cast<Owned*>(p); }));
  }
  Owned* const keeps = devices.empty() ? owned.get() : owned.release();
  const WithoutGil released;
  if (!devices.empty()) keeps->device = taken.device = std::make_shared<DeviceSide>(devices, direction, priority);
  taken.memory.resize(all.size());
  for (std::size_t i = 0; i < all.size(); ++i) {
    if (all[i].is_cpu()) {
      add_on_host(taken.memory[i], all[i], direction);
    } else {
      keeps->bytes.push_back(taken.device->bytes_of(all[i]));
      taken.memory[i].add_on_device(keeps->bytes.back());
    }
    if (direction == Direction::read) note_change(all[i]);
  }
  return taken;
}

}  // namespace cudafuture::bind
