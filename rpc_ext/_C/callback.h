#pragma once

#include <torch/csrc/distributed/rpc/request_callback_impl.h>

#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "python.h"
#include "reply.h"
#include "seal.h"

namespace rpc_ext {

// Counts the messages that were refused, by the rank that they claim to come from (-1: none), and tells Python of the
// first of each.
class Refusals {
 public:
  explicit Refusals(py::object tell) : tell_(std::move(tell)) {}

  void add(const Refused& refused);
  std::map<int, std::uint64_t> counts() const;

 private:
  mutable std::mutex mutex_;  // guards counts_; a leaf
  std::map<int, std::uint64_t> counts_;
  const Held tell_;
};

// How a payload of ours begins: no pickle does.
inline constexpr std::string_view magic(
    "\xCF"
    "cf1",
    4);

// What an agent does with a request: checks its seal if the session has a key, before anything of it is looked at;
// hands a call of ours to Python; leaves torch's own to torch. The answer is sealed as well.
class RequestCallback final : public rpc::RequestCallbackImpl {
 public:
  RequestCallback(std::shared_ptr<Sealer> sealer, std::shared_ptr<Refusals> refusals, py::object serve);

  c10::intrusive_ptr<rpc::JitFuture> processMessage(rpc::Message& request,
                                                    std::vector<c10::Stream> streams) const override;

 private:
  // A request of torch's own.
  c10::intrusive_ptr<rpc::JitFuture> process(rpc::Message& request, std::vector<c10::Stream> streams) const;
  // A call of ours; its payload begins there.
  c10::intrusive_ptr<rpc::JitFuture> serve(const rpc::Message& request, std::size_t from,
                                           const std::vector<c10::Stream>& streams) const;

  const std::shared_ptr<Sealer> sealer_;  // none: nothing is signed
  const std::shared_ptr<Refusals> refusals_;
  const Held serve_;
};

// The storages of a message, as torch's futures keep them to order streams.
using Storages = std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>>;

// A copy of a message without its seal.
c10::intrusive_ptr<rpc::Message> without_seal(const rpc::Message& sealed);

}  // namespace rpc_ext
