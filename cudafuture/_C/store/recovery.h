// The recovery of a durable store when it is opened: the journal is replayed, and the slabs are adopted.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "store/index.h"
#include "store/journal.h"
#include "store/slabs.h"

namespace cudafuture::store {

// salvage: read the rest of a store with a damaged journal.
enum class Opening : std::uint8_t { write, read, salvage };

struct Recovery {
  std::unique_ptr<Journal> journal;    // with Opening::write
  std::uint64_t torn_bytes = 0;        // dropped bytes at the end of the journal
  std::vector<std::string> torn_keys;  // keys of the valid records in them
  std::vector<std::string> removed;    // slabs that no key refers to
  std::string set_aside;               // file with those bytes; empty: the disk had no room
  bool has_lost_header = false;        // one of the two headers of the journal is damaged
  // ---- with Opening::salvage
  std::vector<JournalFindings::Gap> gaps;  // damaged bytes of the journal
  std::vector<std::string> uncertain;      // keys that a record in a gap may have replaced or deleted
};

// Throws Failure; ChecksumError in Python if the journal is damaged or missing.
Recovery recover(const std::string& folder, Opening opening, Index& index, Slabs& slabs);

}  // namespace cudafuture::store
