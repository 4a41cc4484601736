// Statistics of a store, as dicts.
#include "bind/store.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "core/process.h"

namespace cudafuture::bind {
namespace {

store::StoreStatistics statistics_without_gil(const store::Store& self) {
  refuse_after_fork();
  const WithoutGil released;  // a thread that creates a file holds the lock for a while
  return self.statistics();
}

}  // namespace

nb::dict store_statistics(const store::Store& self) {
  const store::StoreStatistics s = statistics_without_gil(self);
  nb::dict d;
  d["keys"] = s.keys;
  d["bytes"] = s.bytes;
  d["used"] = s.used;
  d["slabs"] = s.slabs;
  d["slab_bytes"] = s.slab_bytes;
  d["journal_bytes"] = s.journal_bytes;
  d["reads"] = s.reads;
  d["writes"] = s.writes;
  d["transfers"] = s.transfers;
  d["checksum_errors"] = s.checksum_errors;
  d["pending"] = s.pending;
  return d;
}

nb::dict recovery_of(const store::Store& self) {
  const store::Recovery& recovery = self.recovery();
  nb::list gaps;
  for (const store::JournalFindings::Gap& gap : recovery.gaps) gaps.append(nb::make_tuple(gap.offset, gap.size));
  nb::dict d;
  d["torn_bytes"] = recovery.torn_bytes;
  d["torn_keys"] = nb::cast(recovery.torn_keys);
  d["removed"] = nb::cast(recovery.removed);
  d["set_aside"] = nb::cast(recovery.set_aside);
  d["has_lost_header"] = recovery.has_lost_header;
  d["gaps"] = gaps;
  d["uncertain"] = nb::cast(recovery.uncertain);
  return d;
}

}  // namespace cudafuture::bind
