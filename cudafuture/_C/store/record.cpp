#include "store/record.h"

#include <cstddef>
#include <cstring>
#include <stdexcept>
#include <type_traits>

#include "io/checksum.h"

namespace cudafuture::store {

using namespace io;

namespace {

struct RecordFrame {
  std::uint64_t hash;  // of the body
  std::uint32_t size;  // of the body, bytes
};
constexpr std::size_t kFrame = sizeof(RecordFrame::hash) + sizeof(RecordFrame::size);

// Values are little-endian, as on every machine that the library supports.
template <class T>
void put(std::string& into, const T& value) {
  static_assert(std::is_trivially_copyable_v<T>);
  into.append(reinterpret_cast<const char*>(&value), sizeof value);
}

class RecordReader {
 public:
  explicit RecordReader(std::string_view bytes) : left_(bytes) {}

  template <class T>
  T get() {
    T value{};
    std::memcpy(&value, take(sizeof value).data(), sizeof value);
    return value;
  }
  bool get_bool() {
    const auto value = get<std::uint8_t>();
    if (value > 1) throw std::out_of_range("no bool");
    return value == 1;
  }
  std::uint32_t get_count(std::uint32_t most) {
    const auto count = get<std::uint32_t>();
    if (count > most) throw std::out_of_range("too many");
    return count;
  }
  std::string_view take(std::size_t size) {
    if (size > left_.size()) throw std::out_of_range("a record ends before its last field");
    const std::string_view taken = left_.substr(0, size);
    left_.remove_prefix(size);
    return taken;
  }
  bool empty() const noexcept { return left_.empty(); }

 private:
  std::string_view left_;
};

void put_body(std::string& into, const Record& record) {
  put(into, record.is_deletion);
  put(into, record.sequence);
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
  if (record.is_link()) put(into, record.seed);
}

Record body_of(RecordReader& reader) {
  Record record;
  record.is_deletion = reader.get_bool();
  record.sequence = reader.get<std::uint64_t>();
  record.key = reader.take(reader.get_count(kLongestKey));
  if (record.is_deletion) return record;
  record.shape.dtype = static_cast<c10::ScalarType>(reader.get<std::int8_t>());
  for (auto dims = reader.get_count(kMostDims); dims > 0; --dims) {
    record.shape.sizes.push_back(reader.get<std::int64_t>());
  }
  record.size = reader.get<std::uint64_t>();
  record.slab = reader.get<std::uint64_t>();
  record.offset = reader.get<std::uint64_t>();
  record.digest = reader.get<std::uint64_t>();
  record.has_digest = reader.get_bool();
  record.seed = reader.empty() ? hash_of(record.key) : reader.get<std::uint64_t>();
  return record;
}

}  // namespace

Record record_of(const std::string& key, std::uint64_t sequence, const Entry& entry) {
  Record record;
  record.key = key;
  record.sequence = sequence;
  record.shape = entry.shape;
  record.size = entry.size();
  record.digest = entry.digest;
  record.has_digest = entry.has_digest;
  record.seed = entry.seed;
  if (const Extent& extent = entry.extent) {
    record.slab = extent.slab().number;
    record.offset = extent.offset();
  }
  return record;
}

Record deletion_of(const std::string& key, std::uint64_t sequence) {
  Record record;
  record.key = key;
  record.sequence = sequence;
  record.is_deletion = true;
  return record;
}

void append_record(std::string& bytes, const Record& record) {
  const std::size_t begin = bytes.size();
  bytes.append(kFrame, '\0');
  put_body(bytes, record);
  const std::size_t body = begin + kFrame;
  const auto size = static_cast<std::uint32_t>(bytes.size() - body);
  const std::uint64_t hash = hash_of(bytes.data() + body, size);
  std::memcpy(bytes.data() + begin, &hash, sizeof hash);
  std::memcpy(bytes.data() + begin + sizeof hash, &size, sizeof size);
}

std::optional<Record> take_record(std::string_view& bytes) {
  if (bytes.size() < kFrame) return std::nullopt;
  RecordFrame frame;
  std::memcpy(&frame.hash, bytes.data(), sizeof frame.hash);
  std::memcpy(&frame.size, bytes.data() + sizeof frame.hash, sizeof frame.size);
  const std::size_t least = size_of_deletion({}) - kFrame;  // of a body
  if (frame.size < least || frame.size > bytes.size() - kFrame) return std::nullopt;
  const std::string_view body = bytes.substr(kFrame, frame.size);
  try {  // parse the fields first: that is faster than a hash if there is no record
    RecordReader reader(body);
    Record record = body_of(reader);
    if (!reader.empty() || hash_of(body.data(), body.size()) != frame.hash) return std::nullopt;
    bytes.remove_prefix(kFrame + frame.size);
    return record;
  } catch (const std::out_of_range&) {
    return std::nullopt;
  }
}

std::uint64_t size_of_deletion(const std::string& key) noexcept {
  return kFrame + sizeof(Record::is_deletion) + sizeof(Record::sequence) + sizeof(std::uint32_t) + key.size();
}

std::uint64_t size_of(const Record& record) noexcept {
  const std::uint64_t deletion = size_of_deletion(record.key);
  if (record.is_deletion) return deletion;
  const std::uint64_t shape = sizeof(std::int8_t) + sizeof(std::uint32_t) + 8 * record.shape.sizes.size();
  return deletion + shape + sizeof record.size + sizeof record.slab + sizeof record.offset + sizeof record.digest +
         sizeof record.has_digest + (record.is_link() ? sizeof record.seed : 0);
}

}  // namespace cudafuture::store
