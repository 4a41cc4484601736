// Operations of a module outside the core that have no futures: the progress of a process group, and the threads that
// wait for an operation, as cudafuture.debug and `ps` show them.
#pragma once

#include <cstdint>
#include <memory>

#include "api/export.h"

namespace cudafuture {

struct OperationPlace;

namespace api {

constexpr std::int64_t kNone = -1;

// Notes in the progress of a group that an operation was issued. `number`: its place in the order of the group, from 0.
CUDAFUTURE_API void note_issued(OperationPlace& group, const char* operation, std::int64_t number) noexcept;
// Notes that an operation has ended.
CUDAFUTURE_API void note_ended(OperationPlace& group) noexcept;

struct WaitedOperation {
  const char* name;
  OperationPlace* place = nullptr;  // null: none
  std::int64_t number = kNone;
  std::int64_t bytes = kNone;
  std::int64_t peer = kNone;  // of a message: the rank of its other end in the group
  bool has_timeout = false;
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
