#include "seal/announcement.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <tensorpipe/tensorpipe.h>
#include <torch/csrc/distributed/rpc/message.h>

#include <algorithm>

namespace rpc_ext {
namespace {

constexpr std::size_t payload_count = 4;            // of a message of torch's; see Parts
constexpr std::uint64_t most_unverified = 1 << 20;  // bytes

constexpr std::int32_t host = -1, unknown_device = -2;

// The number of a device in an announcement.
std::int32_t number_of(const tensorpipe::Device& device) {
  if (device.type == tensorpipe::kCpuDeviceType && device.index == 0) return host;
  if (device.type == tensorpipe::kCudaDeviceType && device.index >= 0) return device.index;
  return unknown_device;
}

template <class T>
std::int32_t target_of(const T& tensor) {
  return tensor.targetDevice.has_value() ? number_of(*tensor.targetDevice) : unknown_device;
}

bool has_device(std::int32_t number) {
  if (number == host) return true;
  return number >= 0 && c10::impl::hasDeviceGuardImpl(c10::kCUDA) &&
         number < c10::impl::getDeviceGuardImpl(c10::kCUDA)->deviceCount();
}

bool is_within_its_storage(const at::Tensor& tensor) {
  std::int64_t last = tensor.storage_offset();
  if (last < 0) return false;
  if (tensor.numel() == 0) return true;
  for (std::int64_t i = 0; i < tensor.dim(); i++) {
    std::int64_t reach = 0;
    if (tensor.stride(i) < 0 || __builtin_mul_overflow(tensor.size(i) - 1, tensor.stride(i), &reach) ||
        __builtin_add_overflow(last, reach, &last)) {
      return false;
    }
  }
  return static_cast<std::uint64_t>(last) < tensor.storage().nbytes() / tensor.itemsize();
}

}  // namespace

OwnedParts parts_of(const tensorpipe::Message& message) {
  OwnedParts parts;
  for (const auto& payload : message.payloads) parts.payloads.push_back({payload.length, host, host, payload.data});
  for (const auto& tensor : message.tensors) {
    const std::int32_t source = number_of(tensor.buffer.device());
    const void* data = source == host ? tensor.buffer.unwrap<tensorpipe::CpuBuffer>().ptr : nullptr;
    parts.tensors.push_back({tensor.length, source, target_of(tensor), data});
  }
  return parts;
}

OwnedParts parts_of(const tensorpipe::Descriptor& descriptor) {
  OwnedParts parts;
  for (const auto& payload : descriptor.payloads) parts.payloads.push_back({payload.length});
  for (const auto& tensor : descriptor.tensors) {
    parts.tensors.push_back({tensor.length, number_of(tensor.sourceDevice), target_of(tensor)});
  }
  return parts;
}

OwnedParts parts_of(const tensorpipe::Descriptor& descriptor, const rpc::TensorpipeReadBuffers& buffers) {
  OwnedParts parts = parts_of(descriptor);
  const void* const data[payload_count] = {buffers.type.get(), buffers.id.get(), buffers.payload.data(),
                                           buffers.pickle.data()};
  for (std::size_t i = 0; i < payload_count; i++) parts.payloads[i].data = data[i];
  for (std::size_t i = 0; i < parts.tensors.size(); i++) {
    if (parts.tensors[i].target == host) parts.tensors[i].data = buffers.tensors[i].get();
  }
  return parts;
}

bool is_readable(const Parts& announced) {
  return announced.payloads.size() == payload_count && announced.payloads[0].length == sizeof(rpc::MessageType) &&
         announced.payloads[1].length == sizeof(std::int64_t) &&
         std::all_of(announced.tensors.begin(), announced.tensors.end(),
                     [](const MessagePart& tensor) { return tensor.source >= host && has_device(tensor.target); });
}

bool is_small(const Parts& announced) {
  std::uint64_t total = 0;
  for (const auto parts : {announced.payloads, announced.tensors}) {
    for (const MessagePart& part : parts) {
      if (part.source != host || part.target != host || part.length > most_unverified) return false;
      if ((total += part.length + 64) > most_unverified) return false;
    }
  }
  return true;
}

bool is_on_host(const Parts& announced) {
  return std::all_of(announced.tensors.begin(), announced.tensors.end(),
                     [](const MessagePart& tensor) { return tensor.target == host; });
}

ReceivedMemory::ReceivedMemory(const tensorpipe::Descriptor& descriptor, const rpc::TensorpipeReadBuffers& buffers) {
  for (std::size_t i = 0; i < buffers.tensors.size(); i++) {
    lengths_[buffers.tensors[i].get()] = descriptor.tensors[i].length;
  }
}

void ReceivedMemory::expect(const std::vector<at::Tensor>& tensors, const Admitted& admitted) const {
  for (const at::Tensor& tensor : tensors) {
    if (!tensor.defined()) continue;
    if (tensor.layout() != c10::kStrided) {  // its indices are contents, and reach into memory
      if (!admitted.has_contents) throw Refused{"the indices of a sparse tensor are not signed", admitted.sender};
      continue;
    }
    const std::size_t size = tensor.storage().nbytes();
    const auto found = lengths_.find(tensor.storage().data());
    if (size > 0 && (found == lengths_.end() || found->second < size)) {
      throw Refused{"a tensor is larger than the memory that came for it", admitted.sender};
    }
    if (!is_within_its_storage(tensor)) throw Refused{"a tensor reaches beyond its memory", admitted.sender};
  }
}

}  // namespace rpc_ext
