#include "core/serial_executor.h"

#include "core/process.h"

namespace cudafuture {

void SerialExecutor::post(Continuation* c) noexcept {
  if (is_forked_child()) return;  // no thread may be left that unlocks it
  lane_.enrol(*c);
  c->executor = this;  // its order is not the order of attachment, which is the same on every rank
  lane_.post(c);
}

}  // namespace cudafuture
