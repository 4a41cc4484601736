#include "sim/device/memory.h"

#include <cstring>

#include "sim/device/current.h"
#include "sim/device/here.h"

namespace sim {
namespace {

void release_device(void* pointer) { Accelerator::get().deallocate(pointer); }
constexpr auto kAllPools = static_cast<std::size_t>(c10::CachingAllocator::StatType::AGGREGATE);

c10::CachingAllocator::Stat torch_stat(const ByteCount& bytes) {
  c10::CachingAllocator::Stat stat;
  stat.current = static_cast<std::int64_t>(bytes.current);
  stat.peak = static_cast<std::int64_t>(bytes.peak);
  stat.allocated = static_cast<std::int64_t>(bytes.added);
  stat.freed = static_cast<std::int64_t>(bytes.removed);
  return stat;
}

void release_pinned(void* pointer) { Accelerator::get().deallocate_pinned(pointer); }

struct SimDeviceAllocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(std::size_t bytes) override {
    const int device = current_device();
    void* pointer = nullptr;
    try {
      pointer = Accelerator::get().allocate(device, bytes, current_stream(device), here("allocation"));
    } catch (const OutOfMemory& error) {
      TORCH_CHECK_WITH(OutOfMemoryError, false, error.what());
    }
    return {pointer, pointer, &release_device, torch_device(device)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release_device; }
  void copy_data(void* target, const void* source, std::size_t bytes) const override {
    Accelerator::get().synchronize(current_device());
    std::memcpy(Accelerator::alias(target), Accelerator::alias(source), bytes);
  }

  bool initialized() override { return Accelerator::get().device_count() > 0; }
  void emptyCache(c10::MempoolId_t) override { Accelerator::get().empty_cache(); }
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    Accelerator::get().record_use(data.get(), stream_name(stream));
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    const MemoryStatistics memory = Accelerator::get().memory_statistics(device);
    c10::CachingDeviceAllocator::DeviceStats all;
    all.allocated_bytes[kAllPools] = torch_stat(memory.allocated);
    all.reserved_bytes[kAllPools] = torch_stat(memory.reserved);
    return all;
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override { Accelerator::get().reset_memory_totals(device); }
  void resetPeakStats(c10::DeviceIndex device) override { Accelerator::get().reset_memory_peak(device); }
};

// A scope like that in which torch's pinned allocator for CUDA works: in relaxed mode if the current stream is in a
// capture, and in the thread's own mode otherwise. So an allocation in another thread can end the capture.
class CaptureScope {
 public:
  CaptureScope() {
    if (Accelerator::get().capture_of(current_stream(current_device())) != 0) capture_mode = CaptureMode::relaxed;
  }
  ~CaptureScope() { capture_mode = before_; }
  CaptureScope(const CaptureScope&) = delete;
  CaptureScope& operator=(const CaptureScope&) = delete;

 private:
  const CaptureMode before_ = capture_mode;
};

struct PinnedMemory final : at::HostAllocator {
  c10::DataPtr allocate(std::size_t bytes) override {
    const CaptureScope scope;
    void* const pointer = Accelerator::get().allocate_pinned(bytes);
    return {pointer, pointer, &release_pinned, c10::DeviceType::CPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release_pinned; }
  void copy_data(void* target, const void* source, std::size_t bytes) const override {
    std::memcpy(target, source, bytes);
  }
  // The accelerator knows which work uses which pinned memory.
  bool record_event(void* pointer, void*, c10::Stream) override { return Accelerator::get().is_pinned(pointer); }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};

SimDeviceAllocator& device_memory() {
  static auto* memory = new SimDeviceAllocator;
  return *memory;
}
PinnedMemory& pinned_memory() {
  static auto* memory = new PinnedMemory;
  return *memory;
}

}  // namespace

c10::Allocator* device_allocator() noexcept { return &device_memory(); }
at::HostAllocator* pinned_allocator() noexcept { return &pinned_memory(); }

void install_allocators() {
  c10::SetAllocator(c10::DeviceType::PrivateUse1, &device_memory());
  at::setHostAllocator(c10::DeviceType::PrivateUse1, &pinned_memory());
}

}  // namespace sim
