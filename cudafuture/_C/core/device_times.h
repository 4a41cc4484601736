// The times at which devices reach the events of futures that are done. Any thread adds an event; one thread asks.
//
// An event has a time only after it was reached, and the host learns that by asking. The time is that of the device
// since the first of these events that it has reached.
#pragma once

#include <c10/core/Device.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

#include "core/event_pool.h"

namespace cudafuture {

class DeviceTimes {
 public:
  struct Expected {
    std::uint64_t future;
    std::int64_t done;     // the time of its completion
    DeviceEventPtr event;  // with timing
    Expected* next = nullptr;
  };

  ~DeviceTimes();

  // Takes no lock. False: there are too many, or no memory, and the event is forgotten.
  bool add(std::uint64_t future, std::int64_t done, const DeviceEventPtr& event) noexcept;

  // Calls reached(expected, seconds) for each event that its device has reached, and forgets it, as it does those of
  // devices that have failed. Does not block.
  template <class Reached>
  void ask(Reached&& reached) {
    take_added();
    std::vector<const DeviceEvent*> stalled;  // an event for each stream that has not reached it
    std::erase_if(expected_, [&](const std::unique_ptr<Expected>& each) {
      if (is_behind(*each->event, stalled)) return false;
      double seconds = 0;
      switch (look_at(each->event, seconds)) {
        case State::expected:
          stalled.push_back(each->event.get());
          return false;
        case State::reached:
          reached(*each, seconds);
          break;
        case State::failed:
          break;
      }
      count_.fetch_sub(1, std::memory_order_relaxed);
      return true;
    });
  }

  void clear() noexcept;

 private:
  static constexpr std::size_t kMost = 1 << 16;

  enum class State : std::uint8_t { expected, reached, failed };

  struct Base {  // the first event, or a later one
    DeviceEventPtr event;
    double seconds = 0;
  };

  void take_added();
  static bool is_behind(const DeviceEvent& event, const std::vector<const DeviceEvent*>& stalled) noexcept;
  State look_at(const DeviceEventPtr& event, double& seconds) noexcept;

  std::atomic<Expected*> added_{nullptr};
  std::atomic<std::size_t> count_{0};
  std::vector<std::unique_ptr<Expected>> expected_;  // in the order in which they were added
  std::unordered_map<c10::Device, Base> bases_;
};

}  // namespace cudafuture
