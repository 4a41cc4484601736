#include "refusals.h"

#include <thread>

namespace rpc_ext {

void Refusals::add(const Refused& refused) {
  {
    const std::lock_guard lock(mutex_);
    if (++counts_[refused.sender] > 1) return;
    telling_++;
  }
  std::thread([self = shared_from_this(), refused] {
    self->tell(refused);
    const std::lock_guard lock(self->mutex_);
    self->telling_--;
    self->told_.notify_all();
  }).detach();
}

void Refusals::tell(const Refused& refused) {
  const Gil gil;
  if (!gil) return;
  try {
    call_python(tell_.get(), py::int_(refused.sender), py::str(refused.reason));
  } catch (py::error_already_set& e) {
    e.discard_as_unraisable("rpc_ext: reporting a message that was refused");
  }
}

std::map<int, std::uint64_t> Refusals::counts() {
  std::unique_lock lock(mutex_);
  told_.wait(lock, [this] { return telling_ == 0; });
  return counts_;
}

}  // namespace rpc_ext
