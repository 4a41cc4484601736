#include "receiving.h"

#include <tensorpipe/tensorpipe.h>
#include <torch/csrc/distributed/rpc/tensorpipe_utils.h>

#include <optional>
#include <utility>

namespace rpc_ext {
namespace {

namespace rpc = torch::distributed::rpc;

// torch's own way for tensors on the host, but for the memory that they are received into.
class Converter final : public rpc::TensorpipeDeviceTypeConverter {
 public:
  Converter(const rpc::TensorpipeDeviceTypeConverter* usual, std::vector<std::shared_ptr<Pieces>> pieces)
      : usual_(usual), pieces_(std::move(pieces)) {}

  std::optional<std::vector<char>> prepareTensorForSending(const c10::Storage& storage,
                                                           const std::vector<c10::Stream>& streams,
                                                           tensorpipe::Message& message) const override {
    return usual_->prepareTensorForSending(storage, streams, message);
  }

  at::DataPtr allocateTensorForReceiving(c10::DeviceIndex index, std::size_t length,
                                         const std::vector<c10::Stream>& streams,
                                         tensorpipe::Allocation& allocation) const override {
    for (const auto& pieces : pieces_) {
      c10::DataPtr memory = pieces->receive(length);
      if (!memory) continue;
      tensorpipe::Allocation::Tensor tensor;
      tensor.buffer = tensorpipe::CpuBuffer{memory.get()};
      allocation.tensors.push_back(std::move(tensor));
      return memory;
    }
    return usual_->allocateTensorForReceiving(index, length, streams, allocation);
  }

 private:
  const rpc::TensorpipeDeviceTypeConverter* usual_;
  std::vector<std::shared_ptr<Pieces>> pieces_;
};

}  // namespace

void receive_into(std::vector<std::shared_ptr<Pieces>> pieces) {
  const auto* usual = rpc::getDeviceTypeConverter(c10::kCPU);
  // Never destroyed: agents' threads use it until the process has ended.
  const rpc::TensorpipeDeviceTypeConverterRegistrar now(c10::kCPU, new Converter(usual, std::move(pieces)));
}

}  // namespace rpc_ext
