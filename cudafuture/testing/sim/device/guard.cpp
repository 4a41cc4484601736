#include "sim/device/guard.h"

#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>

#include <stdexcept>
#include <utility>

#include "sim/device/current.h"
#include "sim/device/event.h"

namespace sim {
namespace {

void expect_device(c10::Device device) {
  TORCH_CHECK(device.is_privateuseone(), "expected a simulated device, not ", device);
  TORCH_CHECK_INDEX(device.index() < Accelerator::get().device_count(), "there is no ", device, ": sim.enable() made ",
                    Accelerator::get().device_count(), " devices");
}

int index_of(c10::Device device) noexcept { return device.has_index() ? device.index() : current_device(); }

// Overrides that older versions of torch declare noexcept are so here, whatever this one says.
struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::DeviceType::PrivateUse1; }

  c10::Device exchangeDevice(c10::Device device) const override {
    const int before = current_device();
    if (device.index() != before) setDevice(device);
    return torch_device(before);
  }
  c10::Device getDevice() const override { return torch_device(current_device()); }
  void setDevice(c10::Device device) const override {
    expect_device(device);
    set_current_device(index_of(device));
    Accelerator::get().make_context(current_device());  // as cudaSetDevice does from CUDA 12 on
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override { set_current_device(index_of(device)); }
  c10::DeviceIndex deviceCount() const noexcept override {
    return static_cast<c10::DeviceIndex>(Accelerator::get().device_count());
  }

  c10::Stream getStream(c10::Device device) const noexcept override {
    return torch_stream(current_stream(index_of(device)));
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return torch_stream({index_of(device), 0}); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool is_high_priority) const override {
    return getNewStream(device, is_high_priority ? -1 : 0);
  }
  c10::Stream getNewStream(c10::Device device, int priority) const override {
    expect_device(device);
    return torch_stream(Accelerator::get().new_stream(index_of(device), priority));
  }
  c10::Stream exchangeStream(c10::Stream stream) const noexcept override {
    const StreamName before = current_stream(stream.device_index());
    set_current_stream(stream_name(stream));
    return torch_stream(before);
  }
  bool queryStream(const c10::Stream& stream) const override { return Accelerator::get().query(stream_name(stream)); }
  void synchronizeStream(const c10::Stream& stream) const override {
    Accelerator::get().synchronize(stream_name(stream));
  }
  void synchronizeDevice(c10::DeviceIndex device) const override {
    Accelerator::get().synchronize(device < 0 ? current_device() : static_cast<int>(device));
  }

  void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag) const override {
    auto* box = static_cast<Event*>(*event);
    if (box != nullptr) {
      TORCH_CHECK(box->device == stream.device_index(), "an event of sim:", box->device,
                  " cannot be recorded on a stream of ", stream.device());
    }
    Event recorded{Accelerator::get().record(stream_name(stream)), stream.device_index()};
    check_device(recorded.device, "record()");
    if (box == nullptr) {
      *event = new Event(std::move(recorded));
    } else {
      box->recording = std::move(recorded.recording);
    }
  }
  bool isStreamCapturing(const c10::Stream& stream) const {
    return Accelerator::get().capture_of(stream_name(stream)) != 0;
  }

  // CUDA's guard selects the stream's device for this call, and the thread's own device afterwards.
  void block(void* event, const c10::Stream& stream) const override {
    if (event == nullptr) return;
    check_device(stream.device_index(), "block()");
    try {
      Accelerator::get().wait(stream_name(stream), static_cast<Event*>(event)->recording);
    } catch (const std::runtime_error& error) {  // of torch's own type, as a call of CUDA's guard has
      TORCH_CHECK(false, error.what());
    }
  }
  bool queryEvent(void* event) const override {
    if (event == nullptr) return true;
    check_device(static_cast<Event*>(event)->device, "query()");
    return Accelerator::get().query(static_cast<Event*>(event)->recording);
  }
  void synchronizeEvent(void* event) const override {
    if (event == nullptr) return;
    check_device(static_cast<Event*>(event)->device, "synchronize()");
    Accelerator::get().synchronize(static_cast<Event*>(event)->recording);
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override {
    if (event == nullptr) return;
    check_device(static_cast<Event*>(event)->device, "the destruction");
    delete static_cast<Event*>(event);
  }
  // In milliseconds of virtual time.
  double elapsedTime(void* begin, void* end, c10::DeviceIndex) const override {
    const Accelerator& accelerator = Accelerator::get();
    return 1e3 * (accelerator.time_of(static_cast<Event*>(end)->recording) -
                  accelerator.time_of(static_cast<Event*>(begin)->recording));
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    Accelerator::get().record_use(data.get(), stream_name(stream));
  }
};

}  // namespace

void install_guard() {
  static Guard guard;
  c10::impl::device_guard_impl_registry[static_cast<std::size_t>(c10::DeviceType::PrivateUse1)].store(&guard);
}

}  // namespace sim
