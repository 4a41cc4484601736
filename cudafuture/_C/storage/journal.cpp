#include "storage/journal.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <stdexcept>
#include <system_error>
#include <type_traits>
#include <utility>

#include "storage/checksum.h"
#include "storage/failure.h"
#include "storage/folder.h"

namespace cudafuture::storage {
namespace {

// How a file begins. So much of it was there when it got its name, and cannot be torn.
struct Preamble {
  std::array<char, 24> text = {"cudafuture store 1\n"};
  std::uint64_t whole = 0;   // bytes
  std::uint64_t digest = 0;  // of what is before

  std::uint64_t right_digest() const noexcept { return hash_of(this, offsetof(Preamble, digest)); }
};

constexpr std::uint64_t kBatch = 0x68637461'42664443;  // how a batch begins: "CDfBatch"

struct BatchHeader {
  std::uint64_t magic;
  std::uint64_t number;  // of the batch in its file
  std::uint64_t size;    // of what follows, bytes
  std::uint64_t digest;  // of that, seeded with the number
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

// ---- records as bytes, little-endian as the machines are that this runs on

template <class T>
void put(std::string& into, const T& value) {
  static_assert(std::is_trivially_copyable_v<T>);
  into.append(reinterpret_cast<const char*>(&value), sizeof value);
}

class Reader {
 public:
  explicit Reader(std::string_view bytes) : left_(bytes) {}

  template <class T>
  T get() {
    T value{};
    std::memcpy(&value, take(sizeof value).data(), sizeof value);
    return value;
  }
  std::string_view take(std::size_t size) {
    if (size > left_.size()) throw std::out_of_range("a record is longer than its batch");
    const std::string_view taken = left_.substr(0, size);
    left_.remove_prefix(size);
    return taken;
  }
  bool empty() const noexcept { return left_.empty(); }

 private:
  std::string_view left_;
};

void put(std::string& into, const Record& record) {
  put(into, record.is_deletion);
  put(into, record.turn);
  put(into, static_cast<std::uint32_t>(record.key.size()));
  into.append(record.key);
  if (record.is_deletion) return;
  put(into, static_cast<std::int8_t>(record.shape.dtype));
  put(into, static_cast<std::uint32_t>(record.shape.sizes.size()));
  for (const std::int64_t size : record.shape.sizes) put(into, size);
  put(into, record.size);
  put(into, record.slab);
  put(into, record.offset);
  put(into, record.digest);
  put(into, record.has_digest);
}

Record get(Reader& reader) {
  Record record;
  record.is_deletion = reader.get<bool>();
  record.turn = reader.get<std::uint64_t>();
  record.key = reader.take(reader.get<std::uint32_t>());
  if (record.is_deletion) return record;
  record.shape.dtype = static_cast<c10::ScalarType>(reader.get<std::int8_t>());
  for (auto dims = reader.get<std::uint32_t>(); dims > 0; --dims) {
    record.shape.sizes.push_back(reader.get<std::int64_t>());
  }
  record.size = reader.get<std::uint64_t>();
  record.slab = reader.get<std::uint64_t>();
  record.offset = reader.get<std::uint64_t>();
  record.digest = reader.get<std::uint64_t>();
  record.has_digest = reader.get<bool>();
  return record;
}

// The batch that begins there, when it is whole.
std::string_view whole_batch(std::string_view content, std::size_t at, BatchHeader& header) {
  if (content.size() - at < sizeof header) return {};
  std::memcpy(&header, content.data() + at, sizeof header);
  const std::size_t left = content.size() - at - sizeof header;
  if (header.magic != kBatch || header.size > left) return {};
  const std::string_view payload = content.substr(at + sizeof header, header.size);
  return hash_of(payload.data(), payload.size(), header.number) == header.digest ? payload : std::string_view();
}

bool has_later_batch(std::string_view content, std::size_t from, std::uint64_t number) {
  BatchHeader header;
  const std::string_view magic(reinterpret_cast<const char*>(&kBatch), sizeof kBatch);
  for (std::size_t at = content.find(magic, from + 1); at != std::string_view::npos; at = content.find(magic, at + 1)) {
    if (!whole_batch(content, at, header).empty() && header.number > number) return true;
  }
  return false;
}

}  // namespace

Record record_of(const std::string& key, const Entry& entry) {
  Record record;
  record.key = key;
  record.turn = entry.turn;
  record.shape = entry.shape;
  record.size = entry.size();
  record.digest = entry.digest;
  record.has_digest = entry.has_digest;
  if (entry.place) {
    record.slab = entry.place.slab().number;
    record.offset = entry.place.offset();
  }
  return record;
}

Record deletion_of(const std::string& key, std::uint64_t turn) {
  Record record;
  record.key = key;
  record.turn = turn;
  record.is_deletion = true;
  return record;
}

bool Journal::exists(const std::string& folder) { return ::access(path_in(folder).c_str(), F_OK) == 0; }

Journal::Journal(std::string folder, const std::function<void(Record&&)>& show) : folder_(std::move(folder)) {
  if (!exists(folder_)) {
    replace({});
    return;
  }
  file_ = ::open(path().c_str(), O_RDWR | O_CLOEXEC);
  if (file_ < 0) throw_errno("cannot open", path(), errno);
  try {
    replay(read_all(file_, path()), show);
  } catch (...) {
    ::close(file_);
    throw;
  }
}

Journal::~Journal() {
  if (file_ >= 0) ::close(file_);
}

void Journal::replay(std::string_view content, const std::function<void(Record&&)>& show) {
  const auto damaged = [this](std::size_t at, const std::string& what) {
    return Failure(what, 0, path(), at, 0, 0, FailureKind::checksum);
  };
  Preamble preamble;
  if (content.size() >= sizeof preamble) std::memcpy(&preamble, content.data(), sizeof preamble);
  if (preamble.text != Preamble().text || preamble.digest != preamble.right_digest() ||
      preamble.whole > content.size()) {
    throw damaged(0, path() + " is damaged, or not the journal of a store");
  }
  std::size_t at = sizeof preamble;
  while (at < content.size()) {
    BatchHeader header;
    const std::string_view payload = whole_batch(content, at, header);
    if (payload.empty() || header.number != batches_) {
      if (at >= preamble.whole && !has_later_batch(content, at, batches_)) break;
      throw damaged(at, path() + " is damaged at byte " + std::to_string(at) + ", where it cannot be torn");
    }
    try {
      for (Reader reader(payload); !reader.empty();) show(get(reader));
    } catch (const std::out_of_range& e) {
      throw damaged(at, path() + " is damaged at byte " + std::to_string(at) + ": " + e.what());
    }
    at += sizeof header + payload.size();
    ++batches_;
  }
  if (at < content.size()) {  // what a crash has torn
    if (::ftruncate(file_, static_cast<off_t>(at)) != 0) throw_errno("cannot truncate", path(), errno);
    if (::fdatasync(file_) != 0) throw_errno("cannot sync", path(), errno);
  }
  size_ = at;
}

std::string Journal::batch(const std::vector<Record>& records, std::uint64_t number) {
  std::string bytes(sizeof(BatchHeader), '\0');
  for (const Record& record : records) put(bytes, record);
  BatchHeader header = {kBatch, number, bytes.size() - sizeof header, 0};
  header.digest = hash_of(bytes.data() + sizeof header, header.size, header.number);
  std::memcpy(bytes.data(), &header, sizeof header);
  return bytes;
}

void Journal::append(const std::vector<Record>& records) {
  const std::string bytes = batch(records, batches_);
  try {
    write_all(file_, bytes, size_, path());
  } catch (...) {
    is_broken_ = ::ftruncate(file_, static_cast<off_t>(size_)) != 0;
    throw;
  }
  if (::fdatasync(file_) != 0) {  // never tried again: what failed may count as written then
    is_broken_ = true;
    throw_errno("cannot sync", path(), errno);
  }
  size_ += bytes.size();
  ++batches_;
}

void Journal::replace(const std::vector<Record>& records) {
  const std::string bytes = records.empty() ? std::string() : batch(records, 0);
  Preamble preamble;
  preamble.whole = sizeof preamble + bytes.size();
  preamble.digest = preamble.right_digest();
  const std::string fresh = path() + ".new";
  const int file = ::open(fresh.c_str(), O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  if (file < 0) throw_errno("cannot open", fresh, errno);
  try {
    write_all(file, {reinterpret_cast<const char*>(&preamble), sizeof preamble}, 0, fresh);
    write_all(file, bytes, sizeof preamble, fresh);
    if (::fdatasync(file) != 0) throw_errno("cannot sync", fresh, errno);
    if (::rename(fresh.c_str(), path().c_str()) != 0) throw_errno("cannot rename", fresh, errno);
  } catch (...) {
    ::close(file);
    ::unlink(fresh.c_str());
    throw;
  }
  if (file_ >= 0) ::close(file_);
  file_ = file;
  size_ = preamble.whole;
  batches_ = records.empty() ? 0 : 1;
  is_broken_ = true;
  sync_folder(folder_);
  is_broken_ = false;
}

}  // namespace cudafuture::storage
