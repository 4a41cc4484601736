#include "fakecuda/devices/races.h"

namespace fakecuda {

void Races::note_accesses(CudaStream& stream, const StreamOperation& operation) {
  if (!enabled) return;
  detector_.enqueue(stream.clock, operation.accesses, operation.site);
  detector_.shadow.take_dropped();  // under the machine's lock: torch frees their frames in a call that has Python's
}

void Races::forget(const void* begin, size_t size) {
  const MemoryAccess gone = MemoryAccess::of(begin, size, true);
  if (enabled) detector_.shadow.forget(gone.begin, gone.end);
}

}  // namespace fakecuda
