#include "storage/journal.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <optional>
#include <utility>

#include "storage/checksum.h"
#include "storage/failure.h"
#include "storage/folder.h"
#include "storage/page.h"

namespace cudafuture::storage {

struct Journal::Header {
  std::array<char, 24> text = {"cudafuture store 2\n"};
  std::uint64_t generation = 0;  // the greater one is the newer one
  std::uint64_t whole = 0;       // bytes of the file that a crash cannot have torn
  std::uint64_t snapshot = 0;    // the end of the first batch, which has each key once
  std::uint64_t hash = 0;        // of what precedes

  std::uint64_t right_hash() const noexcept { return hash_of(this, offsetof(Header, hash)); }
  std::uint64_t page() const noexcept { return generation % 2 * kPage; }
};

namespace {

constexpr std::uint64_t kContent = 2 * kPage;          // where the batches begin
constexpr std::uint64_t kBatch = 0x68637461'42664443;  // how a batch begins: "CDfBatch"
constexpr std::uint64_t kLeastRoom = 64 * 1024;        // bytes that are allocated at a time, at least

struct BatchHeader {
  std::uint64_t magic;
  std::uint64_t number;  // of the batch in its file
  std::uint64_t size;    // of the records, bytes
  std::uint64_t hash;    // of the records, seeded with the number
};

void write_all(int file, std::string_view bytes, std::uint64_t offset, const std::string& path) {
  while (!bytes.empty()) {
    const ssize_t written = ::pwrite(file, bytes.data(), bytes.size(), static_cast<off_t>(offset));
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) throw_errno("cannot write", path, errno);
    bytes.remove_prefix(static_cast<std::size_t>(written));
    offset += static_cast<std::uint64_t>(written);
  }
}

std::string read_all(int file, const std::string& path) {
  struct stat status = {};
  if (::fstat(file, &status) != 0) throw_errno("cannot read", path, errno);
  std::string content(static_cast<std::size_t>(status.st_size), '\0');
  std::size_t done = 0;
  while (done < content.size()) {
    const ssize_t got = ::pread(file, content.data() + done, content.size() - done, static_cast<off_t>(done));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) throw_errno("cannot read", path, errno);
    if (got == 0) break;
    done += static_cast<std::size_t>(got);
  }
  content.resize(done);
  return content;
}

void sync(int file, const std::string& path) {
  if (::fdatasync(file) != 0) throw_errno("cannot sync", path, errno);
}

// Gets blocks for so many bytes of a file whose size stays as it is; a file system without them counts as one that has
// given them.
void allocate(int file, std::uint64_t size, const std::string& path) {
  int code;
  do {
    code = ::fallocate(file, FALLOC_FL_KEEP_SIZE, 0, static_cast<off_t>(size)) == 0 ? 0 : errno;
  } while (code == EINTR);
  if (code != 0 && code != EOPNOTSUPP && code != ENOSYS) throw_errno("cannot allocate", path, code);
}

std::string batch_of(const std::vector<Record>& records, std::uint64_t number) {
  std::string bytes(sizeof(BatchHeader), '\0');
  for (const Record& record : records) append_record(bytes, record);
  BatchHeader header = {kBatch, number, bytes.size() - sizeof header, 0};
  header.hash = hash_of(bytes.data() + sizeof header, header.size, header.number);
  std::memcpy(bytes.data(), &header, sizeof header);
  return bytes;
}

struct Batch {
  std::uint64_t number;
  std::string_view records;
};

// The batch at an offset, if it is whole.
std::optional<Batch> batch_at(std::string_view content, std::uint64_t at) {
  BatchHeader header;
  if (content.size() - at < sizeof header) return std::nullopt;
  std::memcpy(&header, content.data() + at, sizeof header);
  const std::size_t left = content.size() - at - sizeof header;
  if (header.magic != kBatch || header.size > left) return std::nullopt;
  const std::string_view records = content.substr(at + sizeof header, header.size);
  if (hash_of(records.data(), records.size(), header.number) != header.hash) return std::nullopt;
  return Batch{header.number, records};
}

bool batch_magic_at(std::string_view content, std::uint64_t at) {
  return content.substr(at, sizeof kBatch) == std::string_view(reinterpret_cast<const char*>(&kBatch), sizeof kBatch);
}

// The offset of the next whole batch that is not older than `number`; the end if there is none.
std::uint64_t find_batch(std::string_view content, std::uint64_t from, std::uint64_t number) {
  const std::string_view magic(reinterpret_cast<const char*>(&kBatch), sizeof kBatch);
  for (std::size_t at = content.find(magic, from); at != std::string_view::npos; at = content.find(magic, at + 1)) {
    const std::optional<Batch> batch = batch_at(content, at);
    if (batch && batch->number >= number) return at;
  }
  return content.size();
}

// Shows the valid records of a stretch of the file that has no whole batch, and notes the gaps between them.
void scan(std::string_view content, std::uint64_t at, std::uint64_t end, const Journal::Show& show,
          std::vector<Findings::Gap>& gaps) {
  const std::uint64_t begin = at;
  std::uint64_t gap = at;
  const auto note_gap = [&](std::uint64_t until) {
    if (gap == until) return;
    // Where only the header of a batch is damaged no record is missing.
    const bool begins_batch = gap == begin || batch_magic_at(content, gap);
    if (!begins_batch || until == end || until - gap != sizeof(BatchHeader)) gaps.push_back({gap, until - gap});
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
  return {path + " is damaged" + where + "; Offloader.salvage() reads what is left",
          0,
          path,
          at,
          0,
          0,
          FailureKind::checksum};
}

}  // namespace

bool Journal::exists(const std::string& folder) { return ::access(path_in(folder).c_str(), F_OK) == 0; }

// The newer of the valid headers.
std::optional<Journal::Header> Journal::header_of(std::string_view content, bool& has_lost_header) {
  std::optional<Header> newer;
  for (std::uint64_t page = 0; page < kContent; page += kPage) {
    Header header;
    if (content.size() >= page + sizeof header) std::memcpy(&header, content.data() + page, sizeof header);
    if (header.text != Header().text || header.hash != header.right_hash()) {
      has_lost_header = true;
    } else if (!newer || header.generation > newer->generation) {
      newer = header;
    }
  }
  return newer;
}

Findings Journal::parse(std::string_view content, const std::string& path, Damage damage, const Show& show) {
  Findings found;
  const std::optional<Header> header = header_of(content, found.has_lost_header);
  if (damage == Damage::refuse) {
    if (!header) throw damaged(path, 0, ", or not the journal of a store of this version");
    if (header->whole > content.size()) throw damaged(path, content.size(), ": its end is missing");
  }
  found.snapshot = header ? header->snapshot : 0;
  std::uint64_t at = std::min<std::uint64_t>(kContent, content.size());
  found.end = at;
  while (at < content.size()) {
    const std::optional<Batch> batch = batch_at(content, at);
    if (batch && (batch->number == found.batches || damage == Damage::skip)) {
      for (std::string_view rest = batch->records; !rest.empty();) {
        std::optional<Record> record = take_record(rest);
        if (!record) throw damaged(path, at, " at byte " + std::to_string(at) + ": a record is not valid");
        show(std::move(*record), at);
      }
      found.end = at += sizeof(BatchHeader) + batch->records.size();
      found.batches = batch->number + 1;
      continue;
    }
    const std::uint64_t next = find_batch(content, at + 1, found.batches);
    if (damage == Damage::skip) {
      scan(content, at, next, show, found.gaps);
      at = next;
      continue;
    }
    if (next != content.size() || at < header->whole) {
      throw damaged(path, at, " at byte " + std::to_string(at) + ", where no crash can have torn it");
    }
    found.gaps.push_back({at, content.size() - at});
    std::vector<Findings::Gap> inside;
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

Findings Journal::read(const std::string& folder, Damage damage, const Show& show) {
  const std::string path = path_in(folder);
  const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (file < 0) throw_errno("cannot open", path, errno);
  std::string content;
  try {
    content = read_all(file, path);
  } catch (...) {
    ::close(file);
    throw;
  }
  ::close(file);
  return parse(content, path, damage, show);
}

Journal::Journal(std::string folder, const Show& show) : folder_(std::move(folder)) {
  try {
    if (exists(folder_)) {
      recover(show);
    } else {
      replace({});
    }
    if (torn_end_.empty()) reserve_if_possible();
  } catch (...) {
    close_files();
    throw;
  }
}

void Journal::recover(const Show& show) {
  file_ = ::open(path().c_str(), O_RDWR | O_CLOEXEC);
  if (file_ < 0) throw_errno("cannot open", path(), errno);
  const std::string content = read_all(file_, path());
  bool is_lost = false;
  findings_ = parse(content, path(), Damage::refuse, [&](Record&& record, std::uint64_t at) {
    count(record);
    show(std::move(record), at);
  });
  generation_ = header_of(content, is_lost)->generation;
  snapshot_ = findings_.snapshot;
  batches_ = findings_.batches;
  size_ = findings_.end;
  if (findings_.gaps.empty()) return;
  torn_end_ = content.substr(size_);
  ::unlink(spare_path().c_str());  // so there are blocks for a copy of the torn end
}

void Journal::drop_torn_end() {
  if (torn_end_.empty()) return;
  torn_end_.clear();
  if (::ftruncate(file_, static_cast<off_t>(size_)) != 0) throw_errno("cannot truncate", path(), errno);
  sync(file_, path());
  reserve_if_possible();
}

Journal::~Journal() { close_files(); }

void Journal::close_files() noexcept {
  if (file_ >= 0) ::close(file_);
  if (spare_ >= 0) ::close(spare_);
}

void Journal::count(const Record& record) noexcept {
  ++records_;
  const std::uint64_t deletion = sizeof(BatchHeader) + size_of_deletion(record.key);
  if (record.is_deletion) {
    deletions_ -= std::min(deletions_, deletion);
  } else {
    deletions_ += deletion;
  }
}

void Journal::open_spare() {
  const std::string path = spare_path();
  spare_ = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666);
  if (spare_ < 0) throw_errno("cannot open", path, errno);
  struct stat status = {};
  if (::fstat(spare_, &status) == 0 && status.st_size == 0) return;  // its blocks are kept: there may be no others
  if (::ftruncate(spare_, 0) != 0) throw_errno("cannot truncate", path, errno);
}

void Journal::reserve(const std::vector<Record>& records) {
  std::uint64_t needed = size_ + deletions_ + sizeof(BatchHeader);
  for (const Record& record : records) {
    needed += size_of(record) + (record.is_deletion ? 0 : sizeof(BatchHeader) + size_of_deletion(record.key));
  }
  if (spare_ >= 0 && needed <= allocated_) return;
  if (spare_ < 0) open_spare();
  const auto get = [this](std::uint64_t size) {
    allocate(file_, size, path());
    allocate(spare_, size, spare_path());
    allocated_ = size;
  };
  try {
    get(needed + std::max(kLeastRoom, needed / 4));
  } catch (const Failure&) {
    get(needed);
  }
}

void Journal::reserve_if_possible() noexcept {
  try {
    reserve({});
  } catch (const Failure&) {  // the next write tries again
  }
}

void Journal::append(const std::vector<Record>& records) {
  const std::string bytes = batch_of(records, batches_);
  try {
    write_all(file_, bytes, size_, path());
  } catch (...) {
    is_broken_ = ::ftruncate(file_, static_cast<off_t>(size_)) != 0;
    allocated_ = 0;  // the blocks beyond the end went, too
    reserve_if_possible();
    throw;
  }
  if (::fdatasync(file_) != 0) {  // never tried again: what failed may count as written then
    is_broken_ = true;
    throw_errno("cannot sync", path(), errno);
  }
  for (const Record& record : records) count(record);
  size_ += bytes.size();
  ++batches_;
}

void Journal::write_header(int file, std::uint64_t generation, std::uint64_t whole, std::uint64_t snapshot,
                           const std::string& path) {
  Header header;
  header.generation = generation;
  header.whole = whole;
  header.snapshot = snapshot;
  header.hash = header.right_hash();
  write_all(file, {reinterpret_cast<const char*>(&header), sizeof header}, header.page(), path);
}

void Journal::replace(const std::vector<Record>& records) {
  const std::string bytes = batch_of(records, 0);
  const std::uint64_t size = kContent + bytes.size();
  if (spare_ < 0) open_spare();
  try {
    write_all(spare_, bytes, kContent, spare_path());
    for (const std::uint64_t generation : {1, 2}) write_header(spare_, generation, size, size, spare_path());
    sync(spare_, spare_path());
    if (::rename(spare_path().c_str(), path().c_str()) != 0) throw_errno("cannot rename", spare_path(), errno);
  } catch (...) {
    ::unlink(spare_path().c_str());
    ::close(std::exchange(spare_, -1));
    throw;
  }
  if (file_ >= 0) ::close(file_);
  file_ = std::exchange(spare_, -1);
  size_ = snapshot_ = size;
  allocated_ = deletions_ = records_ = 0;
  batches_ = 1;
  generation_ = 2;
  for (const Record& record : records) count(record);
  is_broken_ = true;
  sync_folder(folder_);
  is_broken_ = false;
}

void Journal::close() {
  if (is_broken_) return;
  write_header(file_, generation_ + 1, size_, snapshot_, path());
  sync(file_, path());
  ++generation_;
}

}  // namespace cudafuture::storage
