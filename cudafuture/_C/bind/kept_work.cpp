#include "bind/kept_work.h"

#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <list>
#include <memory>
#include <mutex>
#include <optional>

#include "core/capture.h"
#include "core/executor.h"
#include "core/process.h"
#include "core/stream_pool.h"

namespace cudafuture::bind {
namespace {

// The Works of captures, which the host cannot query: each is kept until its capture has ended. The lock guards the
// list; no device call is made under it.
std::mutex captured_mutex;
std::list<KeptWork>& captured() {
  static auto* const works = new std::list<KeptWork>;
  return *works;
}

}  // namespace

// Releases a Work when its device work has finished, on the callback thread.
class KeptWork::Release final : public Continuation {
 public:
  explicit Release(KeptWork&& work)
      : Continuation(foreign | when_ready, &InlineExecutor::get()), work_(std::move(work)) {}
  void run(Future&) noexcept override {
    work_.release_finished();
    delete this;
  }
  // No thread can tell when the device has finished, so what it may use is leaked.
  void abandon() noexcept override {}

 private:
  KeptWork work_;
};

KeptWork::KeptWork(c10::intrusive_ptr<c10d::Work> work, Foreign tensors, std::vector<c10::Stream> streams)
    : work_(std::move(work)), tensors_(std::move(tensors)), streams_(std::move(streams)) {
  drop_captured();
}

bool KeptWork::is_issued_here() const {
  return std::all_of(streams_.begin(), streams_.end(), [](const auto& s) { return current_stream(s.device()) == s; });
}

void KeptWork::release() noexcept { release_on({}); }

void KeptWork::release_finished() noexcept {
  try {
    std::vector<c10::Device> devices;
    for (const c10::Stream& stream : streams_) devices.push_back(stream.device());
    release_on(pool_streams(devices, 0));
  } catch (const std::exception&) {  // the device reports an error
  }
}

void KeptWork::release_on(c10::ArrayRef<c10::Stream> streams) noexcept {
  if (work_ == nullptr) return;
  void* const state = foreign_runtime().step_out();  // the stash has a lock, and its tensors take the GIL
  try {
    const StreamScope scope(streams);
    std::optional<c10::DeviceGuard> guard;
    if (!streams_.empty()) guard.emplace(streams_.front().device());
    work_->synchronize();
    work_.reset();
  } catch (const std::exception&) {  // the next call that uses the tensors raises it
  }
  foreign_runtime().step_in(state);
  if (work_ != nullptr) return;
  tensors_ = Foreign();
  drop_captured();
}

bool KeptWork::is_captured() const noexcept {
  try {
    const c10::DeviceGuard guard(streams_.front().device());
    return capture_of(streams_.front()) == events_.captured()->capture();
  } catch (const std::exception&) {
    return true;
  }
}

bool KeptWork::has_finished() const noexcept {
  try {
    return events_.query();
  } catch (const std::exception&) {  // a broken device uses nothing
    return true;
  }
}

void KeptWork::drop() noexcept {
  work_.reset();
  tensors_ = Foreign();
}

// Drops the Works whose captures have ended. Later operations do it, whatever they are.
void KeptWork::drop_captured() noexcept {
  std::list<KeptWork> works;
  {
    std::lock_guard lock(captured_mutex);
    if (captured().empty()) return;
    works.swap(captured());
  }
  std::list<KeptWork> still;
  for (auto work = works.begin(); work != works.end();) {
    const auto one = work++;
    if (one->is_captured()) {
      still.splice(still.end(), works, one);
    } else {
      one->drop();
    }
  }
  std::lock_guard lock(captured_mutex);
  captured().splice(captured().end(), still);
}

KeptWork::~KeptWork() {
  if (work_ == nullptr) return;
  if (is_forked_child() || is_shut_down()) {
    static_cast<void>(work_.release());
    static_cast<void>(tensors_.take());
    return;
  }
  if (events_.is_captured()) {
    std::list<KeptWork> mine;
    mine.push_back(std::move(*this));
    {
      std::lock_guard lock(captured_mutex);
      captured().splice(captured().end(), mine);
    }
    drop_captured();
    return;
  }
  if (events_.empty()) {  // following the Work failed: the streams of the issue wait instead
    release_on(streams_);
    return;
  }
  if (has_finished()) {
    release_finished();
    return;
  }
  const auto finished = c10::make_intrusive<Future>();
  finished->complete(Value(), EventSet(events_));
  finished->attach(new Release(std::move(*this)));
}

}  // namespace cudafuture::bind
