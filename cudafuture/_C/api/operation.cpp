#include "api/operation.h"

#include <utility>

#include "bind/pending.h"
#include "core/future.h"
#include "core/progress.h"
#include "core/thread_activity.h"

namespace cudafuture::api {

static_assert(kNone == kUnknown);

void note_issued(OperationPlace& group, const char* operation, std::int64_t number) noexcept {
  if (group.progress != nullptr) group.progress->issued(operation, number);
}

void note_ended(OperationPlace& group) noexcept {
  if (group.progress != nullptr) group.progress->ended();
}

// The wait is shown through a future that stands for the operation.
struct OperationWait::State {
  State(FuturePtr operation, const CodeLine& line, bool has_timeout)
      : future(std::move(operation)), activity(ThreadActivity::Kind::wait, *future, nullptr, line, has_timeout) {}

  const FuturePtr future;
  const ThreadActivity activity;
};

OperationWait::OperationWait(const WaitedOperation& operation, bool has_line) {
  FuturePtr future = c10::make_intrusive<Future>();
  future->set_name(operation.name);
  future->set_operation({operation.place, operation.number, operation.bytes, operation.peer});
  state_ =
      std::make_unique<State>(std::move(future), has_line ? bind::calling_line() : CodeLine(), operation.has_timeout);
}

OperationWait::OperationWait(OperationWait&&) noexcept = default;

OperationWait::~OperationWait() {
  if (state_ != nullptr) state_->future->complete(Value());
}

}  // namespace cudafuture::api
