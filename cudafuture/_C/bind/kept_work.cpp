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
    work_.release();
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

// Makes the current streams wait, and empties the stash. False: the device reports an error.
bool KeptWork::synchronize() noexcept {
  try {
    std::optional<c10::DeviceGuard> guard;
    if (!streams_.empty()) guard.emplace(streams_.front().device());
    work_->synchronize();
    return true;
  } catch (const std::exception&) {  // the next call that uses the tensors raises it
    return false;
  }
}

void KeptWork::release() noexcept {
  if (work_ == nullptr) return;
  {
    const WithoutGil released;  // the stash has a lock, and its tensors take the GIL
    if (!synchronize()) return;
    work_.reset();
  }
  tensors_ = Foreign();
  drop_captured();
}

bool KeptWork::is_captured() const noexcept {
  try {
    const c10::DeviceGuard guard(streams_.front().device());
    return capture_of(streams_.front()) == events_.capture();
  } catch (const std::exception&) {
    return true;
  }
}

// Returns true if the device may use the tensors.
bool KeptWork::is_in_use() noexcept {
  if (events_.empty()) {  // following the Work failed: the streams of the issue wait instead
    void* const state = foreign_runtime().step_out();
    const StreamScope scope(streams_);
    synchronize();
    foreign_runtime().step_in(state);
    return false;
  }
  try {
    return !events_.query();
  } catch (const std::exception&) {  // a broken device uses nothing
    return false;
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
  if (!is_in_use()) {
    drop();
    return;
  }
  const auto finished = c10::make_intrusive<Future>();
  finished->complete(Value(), EventSet(events_));
  finished->attach(new Release(std::move(*this)));
}

}  // namespace cudafuture::bind
