// Captures: the numbers of the captures of streams.
#include "core/capture.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "core/device_functions.h"
#include "fake_device.h"
#include "rules.h"

using namespace cudafuture;
using namespace cudafuture::fake;

namespace {

// False for the supported versions of torch whose guards cannot tell whether a stream is capturing.
template <class Guard>
constexpr bool torch_knows_captures =
    requires(const Guard& guard, const c10::Stream& stream) { guard.isStreamCapturing(stream); };

// A scope in which the accelerator has no function that returns the numbers of captures.
class WithoutNumbers {
 public:
  WithoutNumbers() { set_device_functions(c10::DeviceType::PrivateUse1, {}); }
  ~WithoutNumbers() { set_device_functions(c10::DeviceType::PrivateUse1, before_); }
  WithoutNumbers(const WithoutNumbers&) = delete;
  WithoutNumbers& operator=(const WithoutNumbers&) = delete;

 private:
  const DeviceFunctions before_ = device_functions(c10::DeviceType::PrivateUse1);
};

}  // namespace

TEST_SUITE_BEGIN("capture");

TEST_CASE_FIXTURE(DeviceRules, "capture_of() returns the capture number of a stream, or 0") {
  accelerator.capture(stream(1, 3), 7);
  accelerator.capture(stream(0, 3), 8);
  CHECK(capture_of(stream(1, 3)) == 7);
  CHECK(capture_of(stream(0, 3)) == 8);
  CHECK(capture_of(stream(1, 0)) == 0);
  CHECK(is_capturing(stream(1, 3)));
  CHECK_FALSE(is_capturing(stream(1, 0)));
}

TEST_CASE_FIXTURE(DeviceRules, "capture_of() asks the guard where the accelerator has no function for it") {
  if (!torch_knows_captures<c10::impl::DeviceGuardImplInterface>) return;
  const WithoutNumbers without;
  accelerator.capture(stream(1, 3), 7);
  CHECK(capture_of(stream(1, 3)) == 1);
  CHECK(capture_of(stream(1, 0)) == 0);
}

TEST_SUITE_END();
