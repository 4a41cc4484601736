#include "store/call.h"

#include <utility>

#include "core/sync_edge.h"

namespace cudafuture::store {

void Call::note_failure(std::exception_ptr error) noexcept {
  if (!has_failed_.exchange(true, std::memory_order_acq_rel)) failure_ = std::move(error);
}

void Call::part_released() noexcept {
  if (using_memory_.fetch_sub(1, std::memory_order_acq_rel) == 1) future->release();
}

Value Call::value() {
  if (kind == Kind::link || kind == Kind::deletion) return {};
  if (kind == Kind::write) return Value::of_native(static_cast<std::int64_t>(bytes));
  return Value::of_object(std::move(result));
}

void Call::finish() noexcept {
  EventSet events;
  if (kind == Kind::read && device != nullptr) {
    std::exception_ptr error = failure();
    events = device->end_read(error);
    if (error != nullptr) note_failure(std::move(error));
  }
  future->release();
  if (std::exception_ptr error = failure()) {
    future->fail(Value::of_error(std::move(error)), std::move(events));
  } else {
    future->complete(value(), std::move(events));
  }
}

}  // namespace cudafuture::store
