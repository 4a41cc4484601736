// Operations of a module outside the core: the progress of a process group, and the threads that wait for an operation,
// as cudafuture.debug, `ps` and traces show them. Such an operation need not have a future.
#pragma once

#include <cstdint>
#include <memory>

#include "api/export.h"

struct _object;  // of Python

namespace cudafuture {

struct OperationPlace;

namespace api {

constexpr std::int64_t kNone = -1;

// Notes in the progress of a group that an operation was issued. `number`: its place in the order of the group, from 0.
CUDAFUTURE_API void note_issued(OperationPlace& group, const char* operation, std::int64_t number) noexcept;
// Notes that an operation has ended.
CUDAFUTURE_API void note_ended(OperationPlace& group) noexcept;

// Returns true while a trace is recorded.
CUDAFUTURE_API bool is_traced() noexcept;
// Lets no failure of a CUDAFuture be logged as unseen: its caller learns of the failure in another way.
CUDAFUTURE_API void mark_seen(_object* future) noexcept;

struct WaitedOperation {
  const char* name;
  OperationPlace* place = nullptr;  // null: none
  std::int64_t number = kNone;
  std::int64_t bytes = kNone;
  std::int64_t peer = kNone;  // of a message: the rank of its other end in the group
  bool has_timeout = false;
  _object* future = nullptr;  // the CUDAFuture of the operation; null: another one stands for it while it is waited for
};

// While it lives, the thread that made it is shown as waiting for an operation. `has_line`: with the line of Python
// that waits; the constructor then runs with the GIL.
class CUDAFUTURE_API OperationWait {
 public:
  OperationWait(const WaitedOperation& operation, bool has_line);
  ~OperationWait();
  OperationWait(OperationWait&&) noexcept;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace api
}  // namespace cudafuture
