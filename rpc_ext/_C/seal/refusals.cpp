#include "seal/refusals.h"

#include <system_error>
#include <thread>

namespace rpc_ext {
namespace {

thread_local bool is_telling = false;  // a log handler may ask for the counts

}  // namespace

void Refusals::add(const Refused& refused) {
  {
    const std::lock_guard lock(mutex_);
    if (++counts_[refused.sender] > 1) return;
    telling_++;
  }
  try {
    std::thread([self = shared_from_this(), refused] {
      is_telling = true;
      self->tell(refused);
      self->end_telling();
    }).detach();
  } catch (const std::system_error&) {  // the system has no more threads: the message is only counted
    end_telling();
  }
}

void Refusals::end_telling() {
  const std::lock_guard lock(mutex_);
  telling_--;
  told_.notify_all();
}

void Refusals::tell(const Refused& refused) {
  run_with_gil("rpc_ext: reporting a message that was refused",
               [&] { call_python(tell_.get(), py::int_(refused.sender), py::str(refused.reason)); });
}

std::map<int, std::uint64_t> Refusals::counts() {
  std::unique_lock lock(mutex_);
  told_.wait(lock, [this] { return is_telling || telling_ == 0; });
  return counts_;
}

}  // namespace rpc_ext
