#include "destination.h"

#include "clock.h"

namespace rpc_ext {

bool Destination::fits(std::uint64_t size) const noexcept {
  const Counts& now = counts_;
  return now.in_flight == 0 || (now.in_flight < max_calls && now.bytes_in_flight + size <= max_bytes);
}

bool Destination::take_room(std::uint64_t size) {
  const std::lock_guard lock(mutex_);
  if (!fits(size)) return false;
  ++counts_.calls;
  ++counts_.in_flight;
  counts_.bytes_in_flight += size;
  counts_.bytes_sent += size;
  return true;
}

void Destination::give_back(std::uint64_t size) {
  std::unique_lock lock(mutex_);
  --counts_.calls;
  --counts_.in_flight;
  counts_.bytes_in_flight -= size;
  counts_.bytes_sent -= size;
  const bool is_idle = counts_.in_flight == 0;
  lock.unlock();
  note_room(is_idle);
}

void Destination::finish(std::uint64_t size, double started, std::uint64_t received, bool has_failed) {
  const auto latency = static_cast<std::int64_t>((now() - started) * 1e9);
  std::unique_lock lock(mutex_);
  --counts_.in_flight;
  counts_.bytes_in_flight -= size;
  counts_.bytes_received += received;
  counts_.failed += has_failed ? 1 : 0;
  latencies_.add(latency);
  const bool is_idle = counts_.in_flight == 0;
  lock.unlock();
  note_room(is_idle);
}

Destination::Counts Destination::counts() const {
  const std::lock_guard lock(mutex_);
  return counts_;
}

Histogram Destination::latencies() const {
  const std::lock_guard lock(mutex_);
  return latencies_;
}

// Python keeps the destination while a call or a thread waits.
void Destination::note_room(bool is_idle) {
  if (waiting == 0 && !(is_idle && is_awaited)) return;
  run_with_gil("rpc_ext: admitting calls", [this] { call(py::cast(shared_from_this()).attr("note_room")); });
}

}  // namespace rpc_ext
