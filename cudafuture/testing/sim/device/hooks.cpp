#include "sim/device/hooks.h"

#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Storage.h>

#include <algorithm>
#include <cstring>

#include "sim/device/current.h"
#include "sim/device/generator.h"
#include "sim/device/here.h"
#include "sim/device/memory.h"

namespace sim {
namespace {

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return Accelerator::get().device_count() > 0; }
  bool hasPrimaryContext(c10::DeviceIndex device) const override { return Accelerator::get().has_context(device); }
  void init() const override {}

  c10::DeviceIndex deviceCount() const override {
    return static_cast<c10::DeviceIndex>(Accelerator::get().device_count());
  }
  void setCurrentDevice(c10::DeviceIndex device) const override {
    TORCH_CHECK_INDEX(device >= 0 && device < deviceCount(), "there is no sim:", static_cast<int>(device));
    set_current_device(device);
    Accelerator::get().make_context(device);
  }
  c10::DeviceIndex getCurrentDevice() const override { return static_cast<c10::DeviceIndex>(current_device()); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    const int before = current_device();
    if (device >= 0) setCurrentDevice(device);
    return static_cast<c10::DeviceIndex>(before);
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }

  bool isPinnedPtr(const void* data) const override { return Accelerator::get().is_pinned(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  c10::Device getDeviceFromPtr(void* data) const override {
    const auto device = Accelerator::get().device_of(data);
    TORCH_CHECK_VALUE(device.has_value(), data, " is not memory of a simulated device");
    return torch_device(*device);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override { return default_generator(device); }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override { return new_generator(device); }

  void resizePrivateUse1Bytes(const c10::Storage& storage, std::size_t bytes) const override {
    const int device = storage.device().index();
    const c10::DeviceGuard guard(storage.device());
    c10::DataPtr grown = device_allocator()->allocate(bytes);
    const std::size_t kept = std::min(bytes, storage.nbytes());
    if (kept > 0) {
      const auto from = reinterpret_cast<std::uintptr_t>(storage.data());
      const auto to = reinterpret_cast<std::uintptr_t>(grown.get());
      void* const source = Accelerator::alias(storage.data());
      void* const target = Accelerator::alias(grown.get());
      Work work;
      work.run = [=] { std::memcpy(target, source, kept); };
      work.accesses = {{from, from + kept, false}, {to, to + kept, true}};
      work.site = here("resize_");
      work.cost.bytes = 2.0 * static_cast<double>(kept);
      Accelerator::get().submit(current_stream(device), std::move(work));
    }
    storage.set_data_ptr_noswap(std::move(grown));
    storage.set_nbytes(bytes);
  }
};

}  // namespace

void install_hooks() {
  static auto* hooks = new Hooks;
  at::RegisterPrivateUse1HooksInterface(hooks);
}

}  // namespace sim
