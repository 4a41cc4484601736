// Reads of a store client: requests and their messages.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "store/client/window.h"

namespace rpc_ext::store::client {

// A tensor on the host, to be filled or new.
//
//     received bytes ──► out, or a new tensor        one copy
class HostTarget final {
 public:
  explicit HostTarget(std::optional<at::Tensor> out) : out_(std::move(out)) {}

  const std::optional<at::Tensor>& out() const noexcept { return out_; }

  // Throws std::invalid_argument unless dtype and shape match the tensor to be filled.
  void expect(const std::string& key, const Found& found) const;
  at::Tensor whole(const Found& found, const at::Tensor& data);  // all bytes are in `data`

  // ---- a tensor that is received in parts
  void begin(const Found& found);
  void fill(std::uint64_t at, const at::Tensor& data);
  at::Tensor finish(const Found& found) { return is_filled_in_place_ ? whole_ : whole(found, bytes_); }

 private:
  std::optional<at::Tensor> out_;
  bool is_filled_in_place_ = false;
  at::Tensor whole_, bytes_;
};

// Read of one tensor. The service replies with its first part, and keeps the tensor until the rest is fetched.
//
// Lock: filling_ is taken without the GIL, by copies into the target and by the end of the request, after which no
// thread fills it.
class ReadRequest final : public KeyRequest {
 public:
  // `target`: a DeviceTarget of Python; None: on the host. `out`: the tensor to be filled; none: a new one.
  // `has_digest`: computes the digest of the tensor for the caller. `is_second`: an earlier request received other
  // bytes than those that were written, so the service sends digests of what it reads this time.
  ReadRequest(std::string key, py::object target, std::optional<at::Tensor> out, bool has_digest,
              OperationPtr operation, std::size_t index, bool is_second = false);

  std::vector<MessagePtr> messages(const WindowPtr& window) override;
  MessagePtr batch(const WindowPtr& window, std::vector<RequestPtr> requests) override;
  void drop() override;  // releases the target
  bool gives_future() const noexcept override { return is_on_device_; }
  KeyEntry entry() const override;

  // Takes the first part of the tensor; returns the parts to fetch. `digest`: of a whole tensor, as of digests_of().
  std::vector<std::uint32_t> found(Window& window, const Found& found, const at::Tensor& data, std::uint64_t digest);

  // Takes a part; ends the request with the last one. `expected`: the part's digest; none: the service did not hash it.
  void take_part(Window& window, std::uint32_t part, const at::Tensor& data, std::optional<std::uint64_t> expected);

  std::uint64_t size_of_part(std::uint32_t part) const;

  const std::optional<std::uint64_t> nbytes;  // none: not known before the reply

 private:
  template <class Fill>
  bool fill(std::uint64_t nbytes, Fill fill);
  void end(Window& window, const py::object& value, std::uint64_t digest);
  void expect_digest(const std::optional<std::uint64_t>& digest, bool has_kept) const;
  void end_with_parts(Window& window);
  void read_again(Window& window);

  const bool has_digest_, needs_digest_, is_on_device_;
  py::object target_;  // of Python, on a device
  HostTarget host_;
  std::mutex filling_;
  bool is_dropped_ = false;
  Found found_;
  std::uint32_t left_ = 0;
  py::object digest_ = py::none();  // of the parts so far, in Python; None: it is not needed
};

}  // namespace rpc_ext::store::client
