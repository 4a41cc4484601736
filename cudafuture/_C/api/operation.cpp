#include "api/operation.h"

#include <utility>

#include "bind/future.h"
#include "bind/pending.h"
#include "core/future.h"
#include "core/progress.h"
#include "core/thread_activity.h"
#include "core/trace.h"

namespace cudafuture::api {

static_assert(kNone == kUnknown);

void note_issued(OperationPlace& group, const char* operation, std::int64_t number) noexcept {
  if (group.progress != nullptr) group.progress->issued(operation, number);
}

void note_ended(OperationPlace& group) noexcept {
  if (group.progress != nullptr) group.progress->ended();
}

bool is_traced() noexcept { return cudafuture::is_traced(); }

void mark_seen(_object* future) noexcept { bind::core_of(future).mark_seen(); }

namespace {

FuturePtr stand_in(const WaitedOperation& operation) {
  FuturePtr future = c10::make_intrusive<Future>();
  future->set_name(operation.name);
  future->set_operation({operation.place, operation.number, operation.bytes, operation.peer});
  return future;
}

}  // namespace

// The wait is shown through the future of the operation, or one that stands for it.
struct OperationWait::State {
  State(const WaitedOperation& operation, const CodeLine& line)
      : stands_in(operation.future == nullptr),
        future(stands_in ? stand_in(operation) : FuturePtr::reclaim_copy(&bind::core_of(operation.future))),
        activity(ThreadActivity::Kind::wait, *future, nullptr, line, operation.has_timeout) {}

  const bool stands_in;
  const FuturePtr future;
  const ThreadActivity activity;
};

OperationWait::OperationWait(const WaitedOperation& operation, bool has_line)
    : state_(std::make_unique<State>(operation, has_line ? bind::calling_line() : CodeLine())) {}

OperationWait::OperationWait(OperationWait&&) noexcept = default;

OperationWait::~OperationWait() {
  if (state_ != nullptr && state_->stands_in) state_->future->complete(Value());
}

}  // namespace cudafuture::api
