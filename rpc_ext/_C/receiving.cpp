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
  Converter(const rpc::TensorpipeDeviceTypeConverter* usual, c10::Allocator& allocator, std::size_t smallest,
            std::size_t largest)
      : usual_(usual), allocator_(allocator), smallest_(smallest), largest_(largest) {}

  std::optional<std::vector<char>> prepareTensorForSending(const c10::Storage& storage,
                                                           const std::vector<c10::Stream>& streams,
                                                           tensorpipe::Message& message) const override {
    return usual_->prepareTensorForSending(storage, streams, message);
  }

  at::DataPtr allocateTensorForReceiving(c10::DeviceIndex index, std::size_t length,
                                         const std::vector<c10::Stream>& streams,
                                         tensorpipe::Allocation& allocation) const override {
    if (length < smallest_ || length > largest_) {
      return usual_->allocateTensorForReceiving(index, length, streams, allocation);
    }
    at::DataPtr memory = allocator_.allocate(length);
    tensorpipe::Allocation::Tensor tensor;
    tensor.buffer = tensorpipe::CpuBuffer{memory.get()};
    allocation.tensors.push_back(std::move(tensor));
    return memory;
  }

 private:
  const rpc::TensorpipeDeviceTypeConverter* usual_;
  c10::Allocator& allocator_;
  const std::size_t smallest_, largest_;
};

}  // namespace

void receive_into(c10::Allocator* allocator, std::size_t smallest, std::size_t largest) {
  static const auto* const usual = rpc::getDeviceTypeConverter(c10::kCPU);
  // Never destroyed: agents' threads use it until the process has ended.
  const auto* converter = allocator == nullptr ? usual : new Converter(usual, *allocator, smallest, largest);
  const rpc::TensorpipeDeviceTypeConverterRegistrar now(c10::kCPU, converter);
}

}  // namespace rpc_ext
