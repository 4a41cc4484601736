#pragma once

#include <torch/csrc/distributed/rpc/request_callback_impl.h>

#include <memory>
#include <vector>

#include "message_handler.h"
#include "python.h"

namespace rpc_ext {

// Dispatches requests whose seals were checked: a message of a channel to its native handler, a call of ours to Python,
// torch's own to torch. A refused request fails.
class RequestCallback final : public rpc::RequestCallbackImpl {
 public:
  explicit RequestCallback(py::object serve) : serve_(std::move(serve)) {}

  c10::intrusive_ptr<rpc::JitFuture> processMessage(rpc::Message& request,
                                                    std::vector<c10::Stream> streams) const override;

 private:
  // Handles a request of torch's own.
  c10::intrusive_ptr<rpc::JitFuture> process(rpc::Message& request, std::vector<c10::Stream> streams) const;
  // Passes a call of ours, or a message of a channel without a native handler, to Python.
  void serve(const rpc::Message& request, const std::vector<c10::Stream>& streams,
             const std::shared_ptr<Reply>& reply) const;

  const Held serve_;
};

}  // namespace rpc_ext
