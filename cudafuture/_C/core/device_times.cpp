#include "core/device_times.h"

#include <algorithm>
#include <iterator>
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
  std::move(last_first.rbegin(), last_first.rend(), std::back_inserter(expected_));
}

void DeviceTimes::clear() noexcept {
  for (Expected* each = added_.exchange(nullptr, std::memory_order_acquire); each != nullptr;) {
    delete std::exchange(each, each->next);
  }
  expected_.clear();
  bases_.clear();
  count_.store(0, std::memory_order_relaxed);
}

bool DeviceTimes::is_behind(const DeviceEvent& event, const std::vector<const DeviceEvent*>& stalled) noexcept {
  return std::any_of(stalled.begin(), stalled.end(), [&](const DeviceEvent* earlier) {
    return earlier->device() == event.device() && earlier->stream_id() == event.stream_id() &&
           earlier->recorded_at() <= event.recorded_at();
  });
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
