// Reads of a store client: requests and their messages.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "api/checksum.h"
#include "store/client/window.h"

namespace rpc_ext::store::client {

// Read of one tensor. The service replies with its first part, and keeps the tensor until the rest is fetched.
//
// Lock: filling_ is taken by copies into the target and by the end of the request, after which no thread fills it.
class ReadRequest final : public KeyRequest {
 public:
  // `is_second`: an earlier request received other bytes than those that were written, so the service sends digests of
  // the bytes that it reads this time.
  ReadRequest(OperationPtr operation, std::size_t index, bool is_second = false);

  std::vector<MessagePtr> messages(const WindowPtr& window) override;
  MessagePtr batch(const WindowPtr& window, std::vector<RequestPtr> requests) override;
  void drop() override;  // releases the target
  KeyEntry entry() const override;

  // Takes the first part of the tensor; returns the parts to fetch.
  std::vector<std::uint32_t> take_first(Window& window, const Found& found, const at::Tensor& data);

  // Takes a part; ends the request with the last one. `expected`: the part's digest; none: the service did not hash it.
  void take_part(Window& window, std::uint32_t part, const at::Tensor& data, std::optional<std::uint64_t> expected);

  std::uint64_t size_of_part(std::uint32_t part) const;

  const std::optional<std::uint64_t> nbytes;  // none: not known before the reply

 private:
  template <class Fill>
  bool fill(Fill fill);
  void begin(api::Targets& targets) const;
  void take_whole(Window& window, const at::Tensor& data);
  void end(Window& window, std::uint64_t digest);
  void expect_digest(const std::optional<std::uint64_t>& digest) const;
  void end_with_parts(Window& window);
  void read_again(Window& window);

  const bool needs_digest_;
  Found found_;                          // of the first reply
  std::shared_ptr<api::Digest> digest_;  // of the parts so far; null: it is not needed
  std::atomic<std::uint32_t> left_{0};
  std::mutex filling_;
  OperationPtr fills_;  // null: the request is done
};

}  // namespace rpc_ext::store::client
