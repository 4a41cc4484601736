#include "destination.h"

#include "clock.h"

namespace rpc_ext {

bool Destination::fits(std::uint64_t size) const noexcept {
  const Counts& now = counts_;
  return now.in_flight == 0 || (now.in_flight < max_calls && now.bytes_in_flight + size <= max_bytes);
}

bool Destination::take_room(std::uint64_t size) {
  if (!fits(size)) return false;
  ++counts_.calls;
  ++counts_.in_flight;
  counts_.bytes_in_flight += size;
  counts_.bytes_sent += size;
  return true;
}

void Destination::give_back(std::uint64_t size) {
  --counts_.calls;
  --counts_.in_flight;
  counts_.bytes_in_flight -= size;
  counts_.bytes_sent -= size;
  note_room();
}

void Destination::finish(std::uint64_t size, double started, std::uint64_t received, bool has_failed) {
  --counts_.in_flight;
  counts_.bytes_in_flight -= size;
  counts_.bytes_received += received;
  counts_.failed += has_failed ? 1 : 0;
  latencies_.add(static_cast<std::int64_t>((now() - started) * 1e9));
  note_room();
}

// Python keeps the destination while a call or a thread waits.
void Destination::note_room() {
  if (waiting > 0 || (is_awaited && counts_.in_flight == 0)) call(py::cast(shared_from_this()).attr("note_room"));
}

}  // namespace rpc_ext
