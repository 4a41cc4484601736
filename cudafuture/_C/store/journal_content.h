// The content of a journal's file: two headers, then batches of records.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "io/page.h"
#include "store/record.h"

namespace cudafuture::store {

struct JournalHeader {
  std::array<char, 24> text = {"cudafuture store 2\n"};
  std::uint64_t generation = 0;  // the greater one is newer
  std::uint64_t whole = 0;       // bytes of the file that were synced before this header was written
  std::uint64_t snapshot = 0;    // the end of the first batch, which has each key once
  std::uint64_t hash = 0;        // of the preceding fields

  std::uint64_t right_hash() const noexcept;
  std::uint64_t page() const noexcept { return generation % 2 * io::kPage; }  // its offset
};
constexpr std::uint64_t kJournalContent = 2 * io::kPage;  // where the batches begin
constexpr std::size_t kBatchHeader = 32;                  // bytes before the records of a batch

std::string batch_of(const std::vector<Record>& records, std::uint64_t number);

// Returns the newer of the valid headers; none: both are damaged.
std::optional<JournalHeader> newer_header(std::string_view content, bool& has_lost_header);

enum class Damage : std::uint8_t { refuse, skip };

// Damage and torn batches found in a journal.
struct JournalFindings {
  struct Gap {
    std::uint64_t offset;
    std::uint64_t size;
  };
  std::vector<Gap> gaps;          // bytes that are not records. With Damage::refuse at most one: the torn end
  std::vector<std::string> keys;  // of valid records in the torn end, which were dropped
  bool has_lost_header = false;   // one of the two is damaged
  bool has_no_header = false;     // both are damaged
  std::uint64_t end = 0;          // of the last whole batch
  std::uint64_t snapshot = 0;     // the end of the first batch, which has each key once; 0: unknown
  std::uint64_t batches = 0;
};

// Takes a record and its offset in the file, or the offset of its batch.
using ShowRecord = std::function<void(Record&&, std::uint64_t offset)>;

// Passes the records to `show` in the order of the file. With Damage::skip it includes the valid records of damaged
// batches. `path` is used in messages. Throws Failure.
JournalFindings parse_journal(std::string_view content, const std::string& path, Damage damage, const ShowRecord& show);

}  // namespace cudafuture::store
