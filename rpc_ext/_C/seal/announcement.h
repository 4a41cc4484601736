// The announcement of a message: the number, lengths and devices of its parts, as TensorPipe's descriptor has them.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/rpc/tensorpipe_utils.h>

#include <cstdint>
#include <unordered_map>
#include <vector>

#include "seal/seal.h"

namespace rpc_ext {

namespace rpc = torch::distributed::rpc;

struct OwnedParts {
  std::vector<MessagePart> payloads, tensors;
  Parts view() const { return {payloads, tensors}; }
};

// The parts of a message that is to be sent, that is announced, and that has been received.
OwnedParts parts_of(const tensorpipe::Message& message);
OwnedParts parts_of(const tensorpipe::Descriptor& descriptor);
OwnedParts parts_of(const tensorpipe::Descriptor& descriptor, const rpc::TensorpipeReadBuffers& buffers);

// Returns false for an announcement over which torch's engine or TensorPipe would end the process: another number of
// payloads, other lengths of the first two, or a device that does not exist.
bool is_readable(const Parts& announced);

// Returns true for an announcement of at most 1 MiB, all on the host. Such a message is read and refused by itself
// where its seal is not valid. Of a larger one nothing is allocated, and its connection is closed.
bool is_small(const Parts& announced);

bool is_on_host(const Parts& announced);

// The memory that has been received for the tensors of a message.
class ReceivedMemory {
 public:
  ReceivedMemory(const tensorpipe::Descriptor& descriptor, const rpc::TensorpipeReadBuffers& buffers);

  // Throws Refused unless each tensor lies in it.
  void expect(const std::vector<at::Tensor>& tensors, const Admitted& admitted) const;

 private:
  std::unordered_map<const void*, std::uint64_t> lengths_;
};

}  // namespace rpc_ext
