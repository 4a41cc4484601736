#include "fakecuda/devices/races.h"

namespace fakecuda {

void Races::enqueue(CudaStream& stream, const StreamOperation& operation) {
  if (!enabled) return;
  const Touch touch{detector_.tick(stream.clock), false, operation.site};
  for (const MemoryAccess& access : operation.accesses) detector_.touch(access, stream.clock.vector(), touch);
  detector_.shadow.take_dropped();  // under the machine's lock: torch frees their frames in a call that has Python's
}

void Races::forget(const void* begin, size_t size) {
  const MemoryAccess gone = MemoryAccess::of(begin, size, true);
  if (enabled) detector_.shadow.forget(gone.begin, gone.end);
}

}  // namespace fakecuda
