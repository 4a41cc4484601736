#include "core/capture.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <utility>

#include "core/device_functions.h"
#include "core/device_runtime.h"

namespace cudafuture {
namespace {

constexpr int kRelaxed = 2;  // cudaStreamCaptureModeRelaxed
constexpr int kActive = 1;   // cudaStreamCaptureStatusActive
constexpr std::uint64_t kSomeCapture = 1;

// All versions of the function have the first three parameters. The others are outputs that may be null; versions with
// fewer parameters ignore the surplus arguments, since the caller owns the arguments on every platform of CUDA and HIP.
using CaptureInfo = int (*)(void* stream, int* status, unsigned long long* id, void* graph, void* dependencies,
                            void* edges, void* count);
using GetLastError = int (*)();
using ExchangeCaptureMode = decltype(DeviceFunctions::exchange_capture_mode);

// Removes the error that a failed call left: otherwise the next check of a kernel launch raises it (pytorch's
// C10_CUDA_KERNEL_LAUNCH_CHECK).
void clear_last_error() noexcept {
  static const auto get_last_error = find_in_device_runtime<GetLastError>("cudaGetLastError", "hipGetLastError");
  if (get_last_error != nullptr) get_last_error();
}

ExchangeCaptureMode exchange_mode(c10::DeviceType type) noexcept {
  if (type == c10::DeviceType::CUDA) {
    static const auto found = find_in_device_runtime<ExchangeCaptureMode>("cudaThreadExchangeStreamCaptureMode",
                                                                          "hipThreadExchangeStreamCaptureMode");
    return found;
  }
  return device_functions(type).exchange_capture_mode;
}

CaptureInfo find_capture_info() noexcept {
  constexpr const char* kNames[][2] = {{"cudaStreamGetCaptureInfo_v2", "hipStreamGetCaptureInfo_v2"},
                                       {"cudaStreamGetCaptureInfo_v3", "hipStreamGetCaptureInfo_v3"},
                                       {"cudaStreamGetCaptureInfo", "hipStreamGetCaptureInfo"}};
  for (const auto& [cuda_name, hip_name] : kNames) {
    if (const auto found = find_in_device_runtime<CaptureInfo>(cuda_name, hip_name)) return found;
  }
  return nullptr;
}

std::uint64_t capture_in_runtime(CaptureInfo info, void* stream) {
  int status = 0;
  unsigned long long id = 0;
  if (info(stream, &status, &id, nullptr, nullptr, nullptr, nullptr) != 0) {
    clear_last_error();
    return 0;
  }
  if (status == 0) return 0;
  return status == kActive && id != 0 ? id : kSomeCapture;
}

// Not every supported torch has `isStreamCapturing` in its guard interface.
template <class Guard>
std::uint64_t ask(const Guard& guard, const c10::Stream& stream) {
  const c10::DeviceType type = stream.device_type();
  if constexpr (requires { guard.getStreamNativeHandle(stream); }) {
    static const CaptureInfo info = find_capture_info();
    if (type == c10::DeviceType::CUDA && info != nullptr) {
      return capture_in_runtime(info, guard.getStreamNativeHandle(stream));
    }
  }
  if (const auto capture = device_functions(type).capture_of) {
    return capture(stream.device_index(), stream.id());
  }
  if constexpr (requires { guard.isStreamCapturing(stream); }) {
    return guard.isStreamCapturing(stream) ? kSomeCapture : 0;
  } else {
    return 0;
  }
}

}  // namespace

std::uint64_t capture_of(const c10::Stream& stream) {
  return ask(*c10::impl::getDeviceGuardImpl(stream.device_type()), stream);
}

namespace {

thread_local bool is_unrelaxed = false;  // true in threads of the library

}  // namespace

void mark_library_thread() noexcept {
  thread_local bool is_marked = false;
  if (!std::exchange(is_marked, true)) is_unrelaxed = true;
}

bool may_end_captures() noexcept { return is_unrelaxed; }

void relax_captures(c10::DeviceType type) noexcept {
  if (!std::exchange(is_unrelaxed, false)) return;
  const ExchangeCaptureMode exchange = exchange_mode(type);
  int mode = kRelaxed;
  if (exchange != nullptr && exchange(&mode) != 0 && type == c10::DeviceType::CUDA) clear_last_error();
}

BesideCaptures::BesideCaptures(c10::DeviceType type) noexcept : exchange_(exchange_mode(type)) {
  int mode = kRelaxed;
  if (exchange_ == nullptr) return;
  if (exchange_(&mode) == 0) {
    before_ = mode;
  } else if (type == c10::DeviceType::CUDA) {
    clear_last_error();
  }
}

BesideCaptures::~BesideCaptures() {
  if (before_ >= 0) exchange_(&before_);
}

}  // namespace cudafuture
