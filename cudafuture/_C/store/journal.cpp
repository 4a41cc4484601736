#include "store/journal.h"

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

#include "io/checksum.h"
#include "io/failure.h"
#include "io/page.h"
#include "store/folder.h"

namespace cudafuture::store {

using namespace io;

namespace {

constexpr std::uint64_t kLeastRoom = 64 * 1024;  // minimum bytes of one allocation

void write_all(int file, std::string_view bytes, std::uint64_t offset, const std::string& path) {
  while (!bytes.empty()) {
    const ssize_t written = ::pwrite(file, bytes.data(), bytes.size(), static_cast<off_t>(offset));
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) throw_errno("cannot write", path, errno);
    bytes.remove_prefix(static_cast<std::size_t>(written));
    offset += static_cast<std::uint64_t>(written);
  }
}

// Reads a whole file. With Damage::skip, zeros replace pages that cannot be read.
std::string read_all(int file, const std::string& path, Damage damage) {
  struct stat status = {};
  if (::fstat(file, &status) != 0) throw_errno("cannot read", path, errno);
  std::string content(static_cast<std::size_t>(status.st_size), '\0');
  std::size_t done = 0;
  while (done < content.size()) {
    const std::size_t left = content.size() - done;
    const std::size_t wanted = damage == Damage::skip ? std::min<std::size_t>(left, kPage - done % kPage) : left;
    const ssize_t got = ::pread(file, content.data() + done, wanted, static_cast<off_t>(done));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && errno == EIO && damage == Damage::skip) {
      done += wanted;
      continue;
    }
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

// Allocates blocks for `size` bytes without changing the file's size. A file system without preallocation counts as a
// success.
void allocate(int file, std::uint64_t size, const std::string& path) {
  int code;
  do {
    code = ::fallocate(file, FALLOC_FL_KEEP_SIZE, 0, static_cast<off_t>(size)) == 0 ? 0 : errno;
  } while (code == EINTR);
  if (code != 0 && code != EOPNOTSUPP && code != ENOSYS) throw_errno("cannot allocate", path, code);
}

}  // namespace

bool Journal::exists(const std::string& folder) {
  struct stat status = {};
  if (::stat(path_in(folder).c_str(), &status) == 0) return true;
  if (errno != ENOENT && errno != ENOTDIR) throw_errno("cannot get the status of", path_in(folder), errno);
  return false;
}

JournalFindings Journal::read(const std::string& folder, Damage damage, const Show& show) {
  const std::string path = path_in(folder);
  const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (file < 0) throw_errno("cannot open", path, errno);
  std::string content;
  try {
    content = read_all(file, path, damage);
  } catch (...) {
    ::close(file);
    throw;
  }
  ::close(file);
  return parse_journal(content, path, damage, show);
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
  sync(file_, path());  // a killed process may have left a batch in the cache, and recovery relies on the content
  const std::string content = read_all(file_, path(), Damage::refuse);
  bool is_lost = false;
  findings_ = parse_journal(content, path(), Damage::refuse, [&](Record&& record, std::uint64_t at) {
    count(record);
    show(std::move(record), at);
  });
  generation_ = newer_header(content, is_lost)->generation;
  snapshot_ = findings_.snapshot;
  batches_ = findings_.batches;
  size_ = findings_.end;
  if (findings_.gaps.empty()) return;
  torn_end_ = content.substr(size_);
  ::unlink(spare_path().c_str());  // frees blocks for a copy of the torn end
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
  if (file_ >= 0) ::close(std::exchange(file_, -1));
  if (spare_ >= 0) ::close(std::exchange(spare_, -1));
}

void Journal::count(const Record& record) noexcept {
  ++records_;
  const std::uint64_t deletion = kBatchHeader + size_of_deletion(record.key);
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
  if (::fstat(spare_, &status) == 0 && status.st_size == 0) return;  // keep its blocks: the disk may have no others
  if (::ftruncate(spare_, 0) != 0) throw_errno("cannot truncate", path, errno);
}

void Journal::reserve(const std::vector<Record>& records) {
  std::uint64_t needed = size_ + deletions_ + kBatchHeader;
  for (const Record& record : records) {
    needed += size_of(record) + (record.is_deletion ? 0 : kBatchHeader + size_of_deletion(record.key));
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
    write_header(file_, generation_ + 1, size_, snapshot_, path());
    ++generation_;
  } catch (...) {  // the cut-off bytes must not end up beside the next batch
    is_broken_ = ::ftruncate(file_, static_cast<off_t>(size_)) != 0 || ::fdatasync(file_) != 0;
    allocated_ = 0;  // the truncation freed the blocks beyond the end, too
    reserve_if_possible();
    throw;
  }
  if (::fdatasync(file_) != 0) {  // never retried: the kernel may count the lost data as written afterwards
    is_broken_ = true;
    throw_errno("cannot sync", path(), errno);
  }
  for (const Record& record : records) count(record);
  size_ += bytes.size();
  ++batches_;
}

void Journal::write_header(int file, std::uint64_t generation, std::uint64_t whole, std::uint64_t snapshot,
                           const std::string& path) {
  JournalHeader header;
  header.generation = generation;
  header.whole = whole;
  header.snapshot = snapshot;
  header.hash = header.right_hash();
  write_all(file, {reinterpret_cast<const char*>(&header), sizeof header}, header.page(), path);
}

void Journal::replace(const std::vector<Record>& records) {
  const std::string bytes = batch_of(records, 0);
  const std::uint64_t size = kJournalContent + bytes.size();
  if (spare_ < 0) open_spare();
  try {
    write_all(spare_, bytes, kJournalContent, spare_path());
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

void Journal::close() noexcept {
  try {
    if (!is_broken_) write_header(file_, generation_ + 1, size_, snapshot_, path());
    if (!is_broken_) sync(file_, path());
  } catch (const Failure&) {  // everything is durable, but damage at the end would look like a torn batch
  }
  close_files();
}

}  // namespace cudafuture::store
