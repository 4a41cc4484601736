// Writes and deletions of a store client: requests, and the messages in which they travel.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "store/client/window.h"

namespace rpc_ext::store::client {

// A tensor to be written.
class WriteRequest final : public KeyRequest {
 public:
  // `source`: of the bytes, in Python. `expected`: the digest that they must have, or None.
  WriteRequest(std::string key, py::object source, py::object expected, OperationPtr operation, std::size_t index);

  std::vector<MessagePtr> messages(const WindowPtr& window) override;
  MessagePtr batch(const WindowPtr& window, std::vector<RequestPtr> requests) override;
  void drop() override { release(); }

  // Copies a small tensor from its device, which the request waits for. Called once it was submitted.
  void copy_to_host(const WindowPtr& window);

  void release();  // of the tensor: it was copied, or is not needed any more

  // Returns the entry of a part whose bytes are at a place of the message's data.
  KeyEntry put(std::uint32_t part, std::uint64_t at, std::uint64_t length, std::uint64_t found) const;

  std::shared_ptr<WriteRequest> shared() { return std::static_pointer_cast<WriteRequest>(shared_from_this()); }

  const c10::ScalarType dtype;
  const std::vector<std::int64_t> sizes;
  const std::uint64_t nbytes;
  std::uint32_t left;  // parts that the service has not acknowledged
  const py::object source, expected;
  py::object due = py::none();  // the ExpectedDigest of Python of a tensor in parts; None: any digest
  at::Tensor data;              // all bytes on the host; undefined: they are on a device, or were released

 private:
  const bool is_on_device_;
};

using WriteRequestPtr = std::shared_ptr<WriteRequest>;

// A key to be deleted.
class DeleteRequest final : public KeyRequest {
 public:
  DeleteRequest(std::string key, OperationPtr operation, std::size_t index)
      : KeyRequest(Verb::erase, std::move(key), std::move(operation), index, 0) {}

  MessagePtr batch(const WindowPtr& window, std::vector<RequestPtr> requests) override;
};

}  // namespace rpc_ext::store::client
