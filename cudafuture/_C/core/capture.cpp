#include "core/capture.h"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <dlfcn.h>

#include <array>
#include <atomic>

namespace cudafuture {
namespace {

constexpr int kRelaxed = 2;  // cudaStreamCaptureModeRelaxed

// Functions of the CUDA runtime that c10 does not wrap. They come with torch's own runtime, or not at all.
using IsCapturing = int (*)(void* stream, int* status);

template <class Function>
Function find(const char* name) noexcept {
  void* const torch_cuda = dlopen("libc10_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
  return torch_cuda == nullptr ? nullptr : reinterpret_cast<Function>(dlsym(torch_cuda, name));
}

std::array<std::atomic<ExchangeCaptureMode>, c10::COMPILE_TIME_MAX_DEVICE_TYPES> exchange_of{};

ExchangeCaptureMode exchange_mode(c10::DeviceType type) noexcept {
  if (type == c10::DeviceType::CUDA) {
    static const auto found = find<ExchangeCaptureMode>("cudaThreadExchangeStreamCaptureMode");
    return found;
  }
  return exchange_of[static_cast<std::size_t>(type)].load(std::memory_order_acquire);
}

// `isStreamCapturing` is not in the guard interface of every torch that is supported.
template <class Guard>
bool ask(const Guard& guard, const c10::Stream& stream) {
  if constexpr (requires { guard.isStreamCapturing(stream); }) {
    return guard.isStreamCapturing(stream);
  } else if constexpr (requires { guard.getStreamNativeHandle(stream); }) {
    static const auto is_capturing = find<IsCapturing>("cudaStreamIsCapturing");
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
