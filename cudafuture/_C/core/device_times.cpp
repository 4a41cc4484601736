#include "core/device_times.h"

#include <algorithm>
#include <new>
#include <utility>

namespace cudafuture {
namespace {

constexpr double kLongestSinceBase = 4.0;  // seconds: CUDA's float has 0.25 us there

}  // namespace

DeviceTimes::~DeviceTimes() { clear(); }

bool DeviceTimes::add(std::uint64_t future, std::int64_t done, const DeviceEventPtr& event) noexcept {
  if (count_.load(std::memory_order_relaxed) >= kMost) return false;
  auto* const expected = new (std::nothrow) Expected{future, done, event};
  if (expected == nullptr) return false;
  count_.fetch_add(1, std::memory_order_relaxed);
  expected->next = added_.load(std::memory_order_relaxed);
  while (!added_.compare_exchange_weak(expected->next, expected, std::memory_order_release)) {
  }
  return true;
}

void DeviceTimes::take_added() {
  std::vector<std::unique_ptr<Expected>> last_first;
  for (Expected* each = added_.exchange(nullptr, std::memory_order_acquire); each != nullptr;) {
    std::unique_ptr<Expected> owned(each);
    each = each->next;
    last_first.push_back(std::move(owned));
  }
  for (auto each = last_first.rbegin(); each != last_first.rend(); ++each) {
    Stream& stream = stream_of(*(*each)->event);
    stream.events.push_back(std::move(*each));
  }
}

DeviceTimes::Stream& DeviceTimes::stream_of(const DeviceEvent& event) {
  const c10::StreamId id = event.stream_id().value_or(0);
  const auto known = std::find_if(streams_.begin(), streams_.end(), [&](const Stream& stream) {
    return stream.device == event.device() && stream.id == id;
  });
  return known != streams_.end() ? *known : streams_.emplace_back(Stream{event.device(), id, {}});
}

// Counts what it forgets: a thread may be adding an event, which it has counted already.
void DeviceTimes::clear() noexcept {
  std::size_t forgotten = 0;
  for (Expected* each = added_.exchange(nullptr, std::memory_order_acquire); each != nullptr; ++forgotten) {
    delete std::exchange(each, each->next);
  }
  for (const Stream& stream : streams_) forgotten += stream.events.size();
  streams_.clear();
  bases_.clear();
  count_.fetch_sub(forgotten, std::memory_order_relaxed);
}

DeviceTimes::State DeviceTimes::look_at(const DeviceEventPtr& event, double& seconds) noexcept {
  try {
    if (!event->query()) return State::expected;
    Base& base = bases_[event->device()];
    if (base.event == nullptr) base.event = event;
    const double since_base = event->seconds_since(*base.event);
    seconds = base.seconds + since_base;
    if (since_base > kLongestSinceBase) base = {event, seconds};
    return State::reached;
  } catch (...) {
    return State::failed;
  }
}

}  // namespace cudafuture
