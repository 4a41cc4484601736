// The times at which devices reach the events of futures that are done. Any thread adds an event; one thread asks.
//
// An event has a time only after it was reached, and the host learns that by asking. The time is that of the device
// since the first of these events that it has reached.
#pragma once

#include <c10/core/Device.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
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

  bool empty() const noexcept { return count_.load(std::memory_order_relaxed) == 0; }

  // Calls reached(expected, seconds) for at most `most` events that their devices have reached, and forgets them, as it
  // does those of devices that have failed. Returns how many it has called it for. Does not block.
  template <class Reached>
  std::size_t ask(std::size_t most, Reached&& reached) {
    take_added();
    std::size_t calls = 0;
    for (Stream& stream : streams_) {
      while (!stream.events.empty() && calls < most) {
        const std::unique_ptr<Expected>& first = stream.events.front();
        double seconds = 0;
        const State state = look_at(first->event, seconds);
        if (state == State::expected) break;  // so are those behind it
        if (state == State::reached) {
          reached(*first, seconds);
          ++calls;
        }
        stream.events.pop_front();
        count_.fetch_sub(1, std::memory_order_relaxed);
      }
    }
    return calls;
  }

  void clear() noexcept;

 private:
  static constexpr std::size_t kMost = 1 << 16;

  enum class State : std::uint8_t { expected, reached, failed };

  struct Stream {
    c10::Device device;
    c10::StreamId id;
    std::deque<std::unique_ptr<Expected>> events;  // in the order in which they were added
  };

  struct Base {  // the first event, or a later one
    DeviceEventPtr event;
    double seconds = 0;
  };

  void take_added();
  Stream& stream_of(const DeviceEvent& event);
  State look_at(const DeviceEventPtr& event, double& seconds) noexcept;

  std::atomic<Expected*> added_{nullptr};
  std::atomic<std::size_t> count_{0};
  std::deque<Stream> streams_;
  std::unordered_map<c10::Device, Base> bases_;
};

}  // namespace cudafuture
