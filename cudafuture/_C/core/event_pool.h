// Device events from a pool. The thread that completes a future records them, and all consumers of the future share
// them.
//
// Creating an event can cost a driver call, and destroying one can block when the device's queue is full. So events are
// kept per device. An event is destroyed only with its own device current; otherwise CUDA creates a context on device
// 0. The pool is never destroyed, so it cannot dangle at the exit of a thread or of the process.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/util/intrusive_ptr.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <vector>

namespace cudafuture {

// One recording of an event on one device. Immutable once it is shared. While a trace is recorded, events have timing.
//
// An event that was recorded inside a stream capture is a node of a graph: streams can wait for it, the host cannot.
// CUDA ends the capture when the host queries such an event, so query() and synchronize() throw for it.
class DeviceEvent final : public c10::intrusive_ptr_target {
 public:
  static c10::intrusive_ptr<DeviceEvent> record(const c10::Stream& stream);
  ~DeviceEvent() override;

  c10::Device device() const noexcept { return device_; }
  // Returns the capture in which the event was recorded, as capture_of() does; 0: none.
  std::uint64_t capture() const noexcept { return capture_; }
  bool is_captured() const noexcept { return capture_ != 0; }
  void block(const c10::Stream& stream) const;  // makes the stream wait for the event
  bool query() const;                           // true once the device has reached the event; throws the device's error
  void synchronize() const;                     // blocks the calling thread

  // Returns the stream; none: torch has recorded the event.
  std::optional<c10::StreamId> stream_id() const noexcept { return stream_id_; }
  // Returns the nanoseconds of CLOCK_MONOTONIC at which an event with timing was recorded; 0: it has no timing.
  std::int64_t recorded_at() const noexcept { return recorded_at_; }
  // Returns the device's seconds from an event to this one. Both have timing, and have been reached.
  double seconds_since(const DeviceEvent& earlier) const;
  // Returns the virtual time, in seconds, at which the device reaches the event; none: on a device with real time.
  std::optional<double> virtual_time() const;

  DeviceEvent(c10::Event&& event, c10::Device device, std::uint64_t capture)
      : event_(std::move(event)), device_(device), capture_(capture) {}
  DeviceEvent(c10::Event&& event, const c10::Stream& stream, std::uint64_t capture, std::int64_t recorded_at)
      : event_(std::move(event)),
        device_(stream.device()),
        stream_id_(stream.id()),
        capture_(capture),
        recorded_at_(recorded_at) {}

 private:
  void refuse_captured() const;

  c10::Event event_;
  c10::Device device_;
  std::optional<c10::StreamId> stream_id_;
  std::uint64_t capture_;
  std::int64_t recorded_at_ = 0;
};
using DeviceEventPtr = c10::intrusive_ptr<DeviceEvent>;

// Lock: mutex_ guards the free lists; no device call is made under it.
class EventPool {
 public:
  struct Statistics {
    std::uint64_t made = 0;
    std::uint64_t reused = 0;
    std::uint64_t destroyed = 0;
    std::size_t idle = 0;
  };

  static EventPool& get() noexcept;

  c10::Event acquire(c10::Device device, c10::EventFlag flag = c10::EventFlag::PYTORCH_DEFAULT);
  void release(c10::Event&& event, c10::Device device) noexcept;
  Statistics statistics() const;

 private:
  static constexpr std::size_t kMaxIdlePerDevice = 1024;

  struct Idle {
    std::vector<c10::Event> plain;
    std::vector<c10::Event> timed;

    std::vector<c10::Event>& with(c10::EventFlag flag) noexcept {
      return flag == c10::EventFlag::BACKEND_DEFAULT ? timed : plain;
    }
  };

  bool keep(c10::Event&& event, c10::Device device, std::size_t most) noexcept;  // unless it holds `most`

  mutable std::mutex mutex_;
  std::unordered_map<c10::Device, Idle> idle_;
  Statistics statistics_;
};

}  // namespace cudafuture
