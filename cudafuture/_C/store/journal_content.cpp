#include "store/journal_content.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "io/checksum.h"
#include "io/failure.h"

namespace cudafuture::store {

using namespace io;

namespace {

constexpr std::uint64_t kSector = 512;                 // minimum bytes that a disk writes atomically
constexpr std::uint64_t kBatch = 0x68637461'42664443;  // the first bytes of a batch: "CDfBatch"

struct JournalBatchHeader {
  std::uint64_t magic;
  std::uint64_t number;  // of the batch in its file
  std::uint64_t size;    // of the records, bytes
  std::uint64_t hash;    // of the records, seeded with the number
};

static_assert(sizeof(JournalBatchHeader) == kBatchHeader);

struct JournalBatch {
  std::uint64_t number;
  std::string_view records;
};

// Returns the batch at an offset, if it is whole.
std::optional<JournalBatch> batch_at(std::string_view content, std::uint64_t at) {
  JournalBatchHeader header;
  if (content.size() - at < sizeof header) return std::nullopt;
  std::memcpy(&header, content.data() + at, sizeof header);
  const std::size_t left = content.size() - at - sizeof header;
  if (header.magic != kBatch || header.size > left) return std::nullopt;
  const std::string_view records = content.substr(at + sizeof header, header.size);
  if (hash_of(records.data(), records.size(), header.number) != header.hash) return std::nullopt;
  return JournalBatch{header.number, records};
}

const std::string_view kMagic(reinterpret_cast<const char*>(&kBatch), sizeof kBatch);

bool batch_magic_at(std::string_view content, std::uint64_t at) { return content.substr(at, kMagic.size()) == kMagic; }

// Returns the offset of the next whole batch with a number of at least `number`; the end if there is none.
std::uint64_t find_batch(std::string_view content, std::uint64_t from, std::uint64_t number) {
  for (std::size_t at = content.find(kMagic, from); at != std::string_view::npos; at = content.find(kMagic, at + 1)) {
    const std::optional<JournalBatch> batch = batch_at(content, at);
    if (batch && batch->number >= number) return at;
  }
  return content.size();
}

// Returns true if the header of a batch after `number` follows.
bool has_later_batch(std::string_view content, std::uint64_t at, std::uint64_t number) {
  JournalBatchHeader header;
  for (std::size_t next = content.find(kMagic, at + 1); next != std::string_view::npos;
       next = content.find(kMagic, next + 1)) {
    if (content.size() - next < sizeof header) return false;
    std::memcpy(&header, content.data() + next, sizeof header);
    const std::uint64_t most = number + (next - at) / sizeof header;  // text in a key usually has a greater one
    if (header.number > number && header.number <= most) return true;
  }
  return false;
}

// Returns true if a crash can have left this end of the file, where batch `number` should begin: the batch is cut off,
// or one of its sectors was not written and contains zeros.
bool is_torn(std::string_view content, std::uint64_t at, std::uint64_t number) {
  if (has_later_batch(content, at, number)) return false;
  const std::string_view end = content.substr(at);
  JournalBatchHeader header = {};
  std::memcpy(&header, end.data(), std::min(sizeof header, end.size()));
  const bool has_magic = end.starts_with(kMagic.substr(0, end.size()));
  if (end.size() < sizeof header && has_magic) return true;
  const std::string_view records = end.substr(std::min(sizeof header, end.size()));
  if (has_magic && header.number == number) {
    if (header.size < records.size()) return false;  // other bytes follow it
    const bool is_size_wrong = hash_of(records.data(), records.size(), number) == header.hash;
    if (header.size > records.size() && !is_size_wrong) return true;
  }
  for (std::uint64_t begin = at, next; begin < content.size(); begin = next) {
    next = begin / kSector * kSector + kSector;
    if (content.substr(begin, next - begin).find_first_not_of('\0') == std::string_view::npos) return true;
  }
  return false;
}

// Passes on the valid records in a range that has no whole batch, and notes the gaps between them.
void scan(std::string_view content, std::uint64_t at, std::uint64_t end, const ShowRecord& show,
          std::vector<JournalFindings::Gap>& gaps) {
  const std::uint64_t begin = at;
  std::uint64_t gap = at;
  const auto note_gap = [&](std::uint64_t until) {
    if (gap == until) return;
    // If only the header of a batch is damaged, no record is missing.
    const bool begins_batch = gap == begin || batch_magic_at(content, gap);
    if (!begins_batch || until == end || until - gap != sizeof(JournalBatchHeader)) gaps.push_back({gap, until - gap});
  };
  while (at < end) {
    std::string_view rest = content.substr(at, end - at);
    std::optional<Record> record = take_record(rest);
    if (!record) {
      ++at;
      continue;
    }
    note_gap(at);
    show(std::move(*record), at);
    gap = at = end - rest.size();
  }
  note_gap(end);
}

Failure damaged(const std::string& path, std::uint64_t at, const std::string& where) {
  return {path + " is damaged" + where + "; DiskStore.salvage() reads what is left",
          0,
          path,
          at,
          0,
          0,
          FailureKind::checksum};
}

}  // namespace

std::uint64_t JournalHeader::right_hash() const noexcept { return hash_of(this, offsetof(JournalHeader, hash)); }

std::string batch_of(const std::vector<Record>& records, std::uint64_t number) {
  std::string bytes(sizeof(JournalBatchHeader), '\0');
  for (const Record& record : records) append_record(bytes, record);
  JournalBatchHeader header = {kBatch, number, bytes.size() - sizeof header, 0};
  header.hash = hash_of(bytes.data() + sizeof header, header.size, header.number);
  std::memcpy(bytes.data(), &header, sizeof header);
  return bytes;
}

std::optional<JournalHeader> newer_header(std::string_view content, bool& has_lost_header) {
  std::optional<JournalHeader> newer;
  for (std::uint64_t page = 0; page < kJournalContent; page += kPage) {
    JournalHeader header;
    if (content.size() >= page + sizeof header) std::memcpy(&header, content.data() + page, sizeof header);
    if (header.text != JournalHeader().text || header.hash != header.right_hash()) {
      has_lost_header = true;
    } else if (!newer || header.generation > newer->generation) {
      newer = header;
    }
  }
  return newer;
}

JournalFindings parse_journal(std::string_view content, const std::string& path, Damage damage,
                              const ShowRecord& show) {
  JournalFindings found;
  const std::optional<JournalHeader> header = newer_header(content, found.has_lost_header);
  if (damage == Damage::refuse) {
    if (!header) throw damaged(path, 0, ", or not the journal of a store of this version");
    if (header->whole > content.size()) throw damaged(path, content.size(), ": its end is missing");
  }
  found.has_no_header = !header;
  found.snapshot = header ? header->snapshot : 0;
  std::uint64_t at = std::min<std::uint64_t>(kJournalContent, content.size());
  found.end = at;
  while (at < content.size()) {
    const std::optional<JournalBatch> batch = batch_at(content, at);
    if (batch && (batch->number == found.batches || damage == Damage::skip)) {
      for (std::string_view rest = batch->records; !rest.empty();) {
        std::optional<Record> record = take_record(rest);
        if (!record && damage == Damage::skip) {
          const auto from = static_cast<std::uint64_t>(rest.data() - content.data());
          scan(content, from, from + rest.size(), show, found.gaps);
          break;
        }
        if (!record) throw damaged(path, at, " at byte " + std::to_string(at) + ": a record is not valid");
        show(std::move(*record), at);
      }
      found.end = at += sizeof(JournalBatchHeader) + batch->records.size();
      found.batches = batch->number + 1;
      continue;
    }
    const std::uint64_t next = find_batch(content, at + 1, found.batches);
    if (damage == Damage::skip) {
      scan(content, at, next, show, found.gaps);
      at = next;
      continue;
    }
    if (next != content.size() || at < header->whole || !is_torn(content, at, found.batches)) {
      throw damaged(path, at, " at byte " + std::to_string(at) + ", which cannot be the effect of a crash");
    }
    found.gaps.push_back({at, content.size() - at});
    std::vector<JournalFindings::Gap> inside;
    scan(
        content, at, next, [&](Record&& record, std::uint64_t) { found.keys.push_back(std::move(record.key)); },
        inside);
    break;
  }
  if (damage == Damage::skip && header && header->whole > content.size()) {  // it was cut off
    found.gaps.push_back({content.size(), header->whole - content.size()});
  }
  return found;
}

}  // namespace cudafuture::store
