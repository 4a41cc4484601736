#include "core/capture.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <array>
#include <atomic>

#include "core/device_runtime.h"

namespace cudafuture {
namespace {

constexpr int kRelaxed = 2;  // cudaStreamCaptureModeRelaxed

using IsCapturing = int (*)(void* stream, int* status);

std::array<std::atomic<ExchangeCaptureMode>, c10::COMPILE_TIME_MAX_DEVICE_TYPES> exchange_of{};

ExchangeCaptureMode exchange_mode(c10::DeviceType type) noexcept {
  if (type == c10::DeviceType::CUDA) {
    static const auto found = find_in_device_runtime<ExchangeCaptureMode>("cudaThreadExchangeStreamCaptureMode",
                                                                          "hipThreadExchangeStreamCaptureMode");
    return found;
  }
  return exchange_of[static_cast<std::size_t>(type)].load(std::memory_order_acquire);
}

// Not every supported torch has `isStreamCapturing` in its guard interface.
template <class Guard>
bool ask(const Guard& guard, const c10::Stream& stream) {
  if constexpr (requires { guard.isStreamCapturing(stream); }) {
    return guard.isStreamCapturing(stream);
  } else if constexpr (requires { guard.getStreamNativeHandle(stream); }) {
    static const auto is_capturing =
        find_in_device_runtime<IsCapturing>("cudaStreamIsCapturing", "hipStreamIsCapturing");
    if (stream.device_type() != c10::DeviceType::CUDA || is_capturing == nullptr) return false;
    int status = 0;
    return is_capturing(guard.getStreamNativeHandle(stream), &status) == 0 && status != 0;
  } else {
    return false;
  }
}

}  // namespace

bool is_capturing(const c10::Stream& stream) {
  return ask(*c10::impl::getDeviceGuardImpl(stream.device_type()), stream);
}

void set_exchange_capture_mode(c10::DeviceType type, ExchangeCaptureMode exchange) noexcept {
  exchange_of[static_cast<std::size_t>(type)].store(exchange, std::memory_order_release);
}

BesideCaptures::BesideCaptures(c10::DeviceType type) noexcept : type_(type) {
  const ExchangeCaptureMode exchange = exchange_mode(type);
  int mode = kRelaxed;
  if (exchange != nullptr && exchange(&mode) == 0) before_ = mode;
}

BesideCaptures::~BesideCaptures() {
  if (before_ >= 0) exchange_mode(type_)(&before_);
}

}  // namespace cudafuture
