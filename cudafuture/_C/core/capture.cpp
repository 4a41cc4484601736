#include "core/capture.h"

#include <dlfcn.h>

namespace cudafuture {
namespace {

// Functions of the CUDA runtime that c10 has no word for. They come with torch's own runtime, or not at all.
using ExchangeMode = int (*)(int* mode);
using IsCapturing = int (*)(void* stream, int* status);
constexpr int kRelaxed = 2;  // cudaStreamCaptureModeRelaxed

template <class Function>
Function find(const char* name) noexcept {
  void* const torch_cuda = dlopen("libc10_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
  return torch_cuda == nullptr ? nullptr : reinterpret_cast<Function>(dlsym(torch_cuda, name));
}

ExchangeMode exchange_mode() noexcept {
  static const auto found = find<ExchangeMode>("cudaThreadExchangeStreamCaptureMode");
  return found;
}

}  // namespace

BesideCaptures::BesideCaptures(c10::DeviceType type) noexcept {
  if (type != c10::DeviceType::CUDA || exchange_mode() == nullptr) return;
  int mode = kRelaxed;
  if (exchange_mode()(&mode) == 0) before_ = mode;
}

BesideCaptures::~BesideCaptures() {
  if (before_ >= 0) exchange_mode()(&before_);
}

bool is_cuda_stream_capturing(void* cuda_stream) noexcept {
  static const auto is_capturing = find<IsCapturing>("cudaStreamIsCapturing");
  int status = 0;
  return is_capturing != nullptr && is_capturing(cuda_stream, &status) == 0 && status != 0;
}

}  // namespace cudafuture
