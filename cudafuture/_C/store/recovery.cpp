#include "store/recovery.h"

#include <unistd.h>

#include <cerrno>
#include <optional>
#include <unordered_map>
#include <utility>

#include "io/failure.h"
#include "store/folder.h"

namespace cudafuture::store {

using namespace io;

namespace {

void adopt_slabs(Index& index, Slabs& slabs) {
  index.finish_replay([&slabs](const Record& record) { return slabs.adopt(record.slab, record.offset, record.size); });
}

constexpr char kSetAside[] = "set-aside.";  // prefix of the names of files that no store reads

// Keeps the torn end of the journal, which may be damaged instead, and the slabs that no key refers to. Removes the
// files that were kept for another torn end. A crash may have interrupted this function for the same one. Notes the
// file with the torn end, unless a full disk has no room for it.
void set_aside(const std::string& folder, const Journal& journal, Slabs& slabs, Recovery& recovery) {
  const std::string prefix = kSetAside + std::to_string(journal.findings().end) + ".";
  for (const std::string& name : names_in(folder)) {
    if (name.starts_with(kSetAside) && !name.starts_with(prefix)) ::unlink((folder + "/" + name).c_str());
  }
  slabs.remove_orphans(prefix);
  const std::string path = folder + "/" + prefix + "journal-end";
  ::unlink(path.c_str());
  try {
    write_file(path, journal.torn_end());
    recovery.set_aside = path;
  } catch (const Failure& failure) {
    ::unlink(path.c_str());
    if (failure.code() != ENOSPC && failure.code() != EDQUOT) throw;
  }
  sync_folder(folder);
}

Recovery recover_to_write(const std::string& folder, Index& index, Slabs& slabs) {
  Recovery recovery;
  recovery.journal =
      std::make_unique<Journal>(folder, [&index](Record&& record, std::uint64_t) { index.replay(std::move(record)); });
  adopt_slabs(index, slabs);
  Journal& journal = *recovery.journal;
  recovery.torn_bytes = journal.torn_end().size();
  recovery.torn_keys = journal.findings().keys;
  recovery.has_lost_header = journal.findings().has_lost_header;
  slabs.finish_adoption();
  if (recovery.torn_bytes == 0) {
    recovery.removed = slabs.remove_orphans(std::nullopt);
  } else {
    set_aside(folder, journal, slabs, recovery);
  }
  journal.drop_torn_end();
  return recovery;
}

Recovery recover_to_read(const std::string& folder, Index& index, Slabs& slabs) {
  Recovery recovery;
  JournalFindings found = Journal::read(folder, Damage::refuse,
                                        [&index](Record&& record, std::uint64_t) { index.replay(std::move(record)); });
  adopt_slabs(index, slabs);
  for (const JournalFindings::Gap& gap : found.gaps) recovery.torn_bytes += gap.size;
  recovery.torn_keys = std::move(found.keys);
  recovery.has_lost_header = found.has_lost_header;
  return recovery;
}

Recovery salvage(const std::string& folder, Index& index, Slabs& slabs) {
  struct Last {
    std::uint64_t sequence = 0;
    std::uint64_t offset = 0;  // of the record
  };
  Recovery recovery;
  std::unordered_map<std::string, Last> last;
  JournalFindings found = Journal::read(folder, Damage::skip, [&](Record&& record, std::uint64_t offset) {
    Last& known = last[record.key];
    if (record.sequence >= known.sequence) known = {record.sequence, offset};
    index.replay(std::move(record));
  });
  adopt_slabs(index, slabs);
  recovery.has_lost_header = found.has_lost_header;
  recovery.gaps = std::move(found.gaps);
  // A record in the snapshot replaces no other one, so a gap there makes no key uncertain.
  const std::uint64_t gap = recovery.gaps.empty() ? 0 : recovery.gaps.back().offset + recovery.gaps.back().size;
  for (std::string& key : index.keys()) {
    const EntryPtr entry = index.find(key);
    const bool may_be_old = gap > found.snapshot && last[key].offset < gap;
    const bool has_no_checksum = !entry->has_digest && entry->size() != 0;
    if (may_be_old || has_no_checksum || found.has_no_header) recovery.uncertain.push_back(std::move(key));
  }
  return recovery;
}

}  // namespace

Recovery recover(const std::string& folder, Opening opening, Index& index, Slabs& slabs) {
  if (!Journal::exists(folder) && (opening != Opening::write || slabs.has_files())) {
    throw Failure("the journal of the store in " + folder + " is missing", 0, folder, 0, 0, 0, FailureKind::checksum);
  }
  if (opening == Opening::write) return recover_to_write(folder, index, slabs);
  return opening == Opening::read ? recover_to_read(folder, index, slabs) : salvage(folder, index, slabs);
}

}  // namespace cudafuture::store
