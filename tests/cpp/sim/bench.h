// Shared parts of the tests: an accelerator that is started for one test, named work, and the order in which work ran.
#pragma once

#include <doctest/doctest.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "sim/runtime/accelerator.h"

namespace sim::test {

struct NamedSite final : Site {
  explicit NamedSite(std::string name) : name(std::move(name)) {}
  std::string operation() const override { return name; }
  std::string stack() const override { return "the stack of " + name; }
  const std::string name;
};

inline SitePtr site(std::string name) { return std::make_shared<NamedSite>(std::move(name)); }

inline MemoryAccess access(const void* pointer, std::size_t bytes, bool writes) {
  const auto begin = reinterpret_cast<std::uintptr_t>(pointer);
  return {begin, begin + bytes, writes};
}
inline MemoryAccess reads(const void* pointer, std::size_t bytes) { return access(pointer, bytes, false); }
inline MemoryAccess writes(const void* pointer, std::size_t bytes) { return access(pointer, bytes, true); }

inline constexpr StreamName kDefault{0, 0};
inline constexpr WorkSchedule kSchedules[] = {WorkSchedule::free, WorkSchedule::jitter, WorkSchedule::lazy};

// Numbers of work items in the order in which they ran.
using Order = std::vector<int>;

// A test bench: starts the accelerator for one test, and stops it afterwards.
class Bench {
 public:
  explicit Bench(WorkSchedule schedule = WorkSchedule::free, std::uint64_t seed = 0) : Bench(with(schedule, seed)) {}
  explicit Bench(const Settings& settings) { sim().start(settings); }
  ~Bench() {
    for (void* pointer : std::exchange(held().pointers, {}))
      sim().deallocate(pointer);  // memory that the test freed is ignored
    sim().stop();
  }
  Bench(const Bench&) = delete;
  Bench& operator=(const Bench&) = delete;

  static Settings with(WorkSchedule schedule, std::uint64_t seed = 0) {
    Settings settings;
    settings.devices = 2;
    settings.schedule = schedule;
    settings.seed = seed;
    settings.memory = std::size_t{64} << 20;
    return settings;
  }
  static Accelerator& sim() { return Accelerator::get(); }
  Accelerator* operator->() const { return &sim(); }

  static StreamName stream(int device = 0) { return sim().new_stream(device, 0); }
  static void work(StreamName stream, std::function<void()> run, std::vector<MemoryAccess> accesses = {},
                   const char* name = "work") {
    sim().submit(stream, {std::move(run), std::move(accesses), site(name), {}});
  }
  static void touch(StreamName stream, std::vector<MemoryAccess> accesses, const char* name = "work") {
    work(stream, [] {}, std::move(accesses), name);
  }
  static void spend(StreamName stream, const Cost& cost) {
    sim().submit(stream, {[] {}, {}, nullptr, cost});
  }
  // Allocate memory that is freed at the end of the test at the latest.
  static void* memory(std::size_t bytes, StreamName stream = kDefault) {
    void* const pointer = sim().allocate(stream.device, bytes, stream, site("allocation"));
    const std::lock_guard lock(held().mutex);
    return held().pointers.emplace_back(pointer);
  }
  static void order(StreamName later, StreamName earlier) { sim().wait(later, sim().record(earlier)); }

 private:
  struct Held {
    std::mutex mutex;
    std::vector<void*> pointers;
  };
  static Held& held() {
    static Held held;
    return held;
  }
};

inline unsigned char* bytes_of(const void* pointer) { return static_cast<unsigned char*>(Accelerator::alias(pointer)); }

}  // namespace sim::test
