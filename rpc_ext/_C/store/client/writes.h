// Writes and deletions of a store client: requests, and the messages in which they travel.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "api/checksum.h"
#include "api/tensors.h"
#include "store/client/window.h"

namespace rpc_ext::store::client {

// A tensor to be written.
//
// Lock: mutex_ guards the source and its bytes on the host; nothing is taken under it.
class WriteRequest final : public KeyRequest {
 public:
  using SourcePtr = std::shared_ptr<api::Source>;

  // `expected`: the digest that the bytes must have; none: any.
  WriteRequest(SourcePtr source, std::optional<std::uint64_t> expected, OperationPtr operation, std::size_t index);

  std::vector<MessagePtr> messages(const WindowPtr& window) override;
  MessagePtr batch(const WindowPtr& window, std::vector<RequestPtr> requests) override;
  void drop() override { release(); }
  KeyEntry entry() const override;

  // Copies a small tensor from its device, which the request waits for. Called once it was submitted.
  void copy_to_host(const WindowPtr& window);

  void release();            // the tensor was copied, or is not needed any more
  SourcePtr source() const;  // null: it was released

  // Copies the bytes of a small tensor. False: it was released.
  bool gather(std::byte* into) const;

  // Returns the digest of bytes that are about to be sent, from `at` on; each is taken once. Throws Failure if all were
  // taken, and the tensor has another digest than it must have.
  std::uint64_t digest_of(std::uint64_t at, const at::Tensor& bytes);
  void expect_digest(std::uint64_t found) const;  // of the whole tensor; throws Failure

  // True: it was the last one.
  bool part_was_copied() noexcept { return uncopied_.fetch_sub(1) == 1; }  // from a device
  bool part_was_written() noexcept { return left_.fetch_sub(1) == 1; }

  const c10::ScalarType dtype;
  const std::vector<std::int64_t> sizes;
  const std::uint64_t nbytes;

 private:
  const std::optional<std::uint64_t> expected_;
  std::shared_ptr<api::Digest> digest_;  // of a tensor in parts with an expected digest
  std::atomic<std::uint64_t> undigested_;
  std::atomic<std::uint32_t> left_;      // parts that the service has not acknowledged
  std::atomic<std::uint32_t> uncopied_;  // parts that have not reached the host from a device
  mutable std::mutex mutex_;
  OperationPtr releases_;
  SourcePtr source_;
  at::Tensor on_host_;  // bytes of a small tensor on a device
};

using WriteRequestPtr = std::shared_ptr<WriteRequest>;

// A key to be deleted.
class DeleteRequest final : public KeyRequest {
 public:
  DeleteRequest(OperationPtr operation, std::size_t index) : KeyRequest(Verb::erase, std::move(operation), index, 0) {}
  MessagePtr batch(const WindowPtr& window, std::vector<RequestPtr> requests) override;
};

}  // namespace rpc_ext::store::client
