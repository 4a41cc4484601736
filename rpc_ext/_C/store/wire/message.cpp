#include "store/wire/message.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>
#include <type_traits>

namespace rpc_ext::store {
namespace {

class Writer {
 public:
  explicit Writer(std::size_t expected) { bytes_.reserve(expected); }

  template <class Number>
  void number(Number value) {
    static_assert(std::is_arithmetic_v<Number>);
    const char* const from = reinterpret_cast<const char*>(&value);
    bytes_.insert(bytes_.end(), from, from + sizeof value);
  }
  void text(std::string_view text) { bytes_.insert(bytes_.end(), text.begin(), text.end()); }
  // Numbers with the length of a text, and the text.
  void short_text(std::string_view text) {
    const std::string_view cut = text.substr(0, std::numeric_limits<std::uint16_t>::max());
    number(static_cast<std::uint16_t>(cut.size()));
    this->text(cut);
  }
  void tensor(c10::ScalarType dtype, const std::vector<std::int64_t>& sizes, std::uint64_t nbytes) {
    const auto found = std::find(dtypes().begin(), dtypes().end(), dtype);
    if (found == dtypes().end())
      throw std::invalid_argument(std::string("tensors of ") + c10::toString(dtype) + " cannot be sent");
    number(static_cast<std::uint8_t>(found - dtypes().begin()));
    number(static_cast<std::uint8_t>(sizes.size()));
    number(nbytes);
    for (const std::int64_t size : sizes) number(size);
  }
  void place(std::uint32_t part, std::uint32_t at, std::uint32_t length, std::uint64_t digest) {
    number(part);
    number(at);
    number(length);
    number(digest);
  }

  Packed with_data(const at::Tensor& data) && {
    const std::size_t size = data.nbytes();
    if (size > kInline) return {std::move(bytes_), {data}};
    text({static_cast<const char*>(data.const_data_ptr()), size});
    return {std::move(bytes_), {}};
  }

 private:
  std::vector<char> bytes_;
};

}  // namespace

std::optional<std::string> key_fault(std::string_view key) {
  if (key.empty() || key.size() > kLongestKey) {
    return "a key has 1 to " + std::to_string(kLongestKey) + " bytes of UTF-8, not " + std::to_string(key.size());
  }
  if (key.find('\0') != std::string_view::npos) return "a key has no NUL";
  return std::nullopt;
}

const std::vector<c10::ScalarType>& dtypes() {
  using enum c10::ScalarType;
  static const std::vector<c10::ScalarType> all{Byte,
                                                Char,
                                                Short,
                                                Int,
                                                Long,
                                                Half,
                                                BFloat16,
                                                Float,
                                                Double,
                                                Bool,
                                                ComplexHalf,
                                                ComplexFloat,
                                                ComplexDouble,
                                                Float8_e4m3fn,
                                                Float8_e5m2,
                                                Float8_e4m3fnuz,
                                                Float8_e5m2fnuz,
                                                UInt16,
                                                UInt32,
                                                UInt64};
  return all;
}

std::uint32_t parts_of(std::uint64_t nbytes) noexcept {
  return static_cast<std::uint32_t>(std::max<std::uint64_t>(1, (nbytes + kPart - 1) / kPart));
}

std::uint64_t part_length(std::uint64_t nbytes, std::uint32_t part) noexcept {
  return std::min<std::uint64_t>(kPart, nbytes - part * kPart);
}

std::uint64_t next_line(std::uint64_t end) noexcept { return (end + kLine - 1) / kLine * kLine; }

at::Tensor bytes_of(std::size_t size) {
  const c10::InferenceMode plain(false);
  return at::empty({static_cast<std::int64_t>(size)}, at::TensorOptions().dtype(at::kByte).device(c10::kCPU));
}

at::Tensor no_data() { return bytes_of(0); }

at::Tensor alone(const at::Tensor& data, std::int64_t at, std::int64_t length) {
  if (!data.is_cpu() || data.scalar_type() != at::kByte || data.dim() != 1 || !data.is_contiguous()) {
    throw std::invalid_argument("expected a contiguous, one-dimensional tensor of torch.uint8 on the host");
  }
  if (at < 0 || length < 0 || at > data.numel() || length > data.numel() - at) {
    throw std::out_of_range("the part does not lie within the tensor");
  }
  return at::from_blob(data.mutable_data_ptr<std::uint8_t>() + at, {length}, [data](void*) {}, at::kByte);
}

Packed pack_request(const StoreRequest& request) {
  std::size_t expected = 64 + request.service.size() + std::min(request.data.nbytes(), kInline);
  for (const KeyEntry& entry : request.entries) expected += 64 + entry.key.size() + 8 * entry.sizes.size();
  Writer writer(expected);
  writer.number(kVersion);
  writer.number(static_cast<std::uint8_t>(request.verb));
  writer.text(request.token);
  writer.number(request.sent);
  writer.number(request.oldest);
  writer.number(static_cast<std::uint16_t>(request.entries.size()));
  writer.number(static_cast<std::uint8_t>(request.service.size()));
  writer.text(request.service);
  for (const KeyEntry& entry : request.entries) {
    writer.number(entry.sequence);
    if (request.verb == Verb::fetch) {
      writer.number(entry.part);
      continue;
    }
    writer.number(entry.after);
    writer.number(entry.expires);
    writer.short_text(entry.key);
    if (request.verb == Verb::get) writer.number(static_cast<std::uint8_t>(entry.needs_digest));
    if (request.verb != Verb::put) continue;
    writer.tensor(entry.dtype, entry.sizes, entry.nbytes);
    writer.place(entry.part, entry.at, entry.length, entry.digest);
  }
  return std::move(writer).with_data(request.data);
}

Packed pack_answer(std::string_view header, std::size_t count, const Errors& errors, Verb verb,
                   const std::vector<Found>& entries, const at::Tensor& data) {
  Writer writer(header.size() + 16 + 128 * errors.size() + 80 * entries.size() + std::min(data.nbytes(), kInline));
  writer.text(header);
  writer.number(kVersion);
  writer.number(static_cast<std::uint16_t>(count));
  writer.number(static_cast<std::uint16_t>(errors.size()));
  for (const auto& [index, problem] : errors) {
    writer.number(static_cast<std::uint16_t>(index));
    writer.number(static_cast<std::uint8_t>(problem.kind));
    writer.number(problem.code);
    writer.number(problem.offset);
    writer.number(problem.wanted);
    writer.number(problem.got);
    writer.short_text(problem.message);
    writer.short_text(problem.path);
  }
  for (const Found& entry : entries) {
    if (verb == Verb::get) writer.tensor(entry.dtype, entry.sizes, entry.nbytes);
    writer.place(0, entry.at, entry.length, entry.digest.value_or(0));
    writer.number(static_cast<std::uint8_t>(entry.digest.has_value()));
    if (verb != Verb::get) continue;
    writer.number(static_cast<std::uint8_t>(entry.has_kept));
    writer.number(entry.kept);
    writer.number(entry.seed);
  }
  return std::move(writer).with_data(data);
}

}  // namespace rpc_ext::store
