#include "seal.h"

#include <c10/core/Device.h>

#include <bit>
#include <cstring>

namespace rpc_ext {
namespace {

static_assert(std::endian::native == std::endian::little, "frames are little-endian");

enum Direction : std::uint8_t { request = 1, reply = 2 };

struct Header {
  std::array<std::uint8_t, 4> magic{0xCF, 'R', 'P', 'C'};
  std::uint8_t version = 1;
  std::uint8_t direction = 0;
  std::uint16_t type = 0;
  std::uint32_t sender = 0;
  std::uint32_t receiver = 0;
  std::uint64_t counter = 0;
};
static_assert(sizeof(Header) == 24 && std::is_trivially_copyable_v<Header>);

constexpr std::size_t mac_at = sizeof(Header);
static_assert(mac_at + sizeof(Digest) == Sealer::header_size);

template <class T>
void append(std::string& to, T value) {
  to.append(reinterpret_cast<const char*>(&value), sizeof value);
}

std::string described(const std::vector<at::Tensor>& tensors) {
  std::string description;
  append<std::uint64_t>(description, tensors.size());
  for (const at::Tensor& tensor : tensors) {
    if (!tensor.defined()) {
      append<std::int32_t>(description, -1);
      continue;
    }
    append<std::int32_t>(description, static_cast<int>(tensor.scalar_type()));
    append<std::int32_t>(description, static_cast<int>(tensor.device().type()));
    append<std::uint64_t>(description, tensor.dim());
    for (const std::int64_t size : tensor.sizes()) append(description, size);
  }
  return description;
}

// Strides and offsets are not signed, since the engine may change them; it makes a tensor of whatever it is told.
bool is_within_its_storage(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.has_storage() || tensor.numel() == 0) return true;
  std::int64_t last = tensor.storage_offset();
  if (last < 0) return false;
  for (std::int64_t i = 0; i < tensor.dim(); i++) {
    std::int64_t reach = 0;
    if (tensor.stride(i) < 0 || __builtin_mul_overflow(tensor.size(i) - 1, tensor.stride(i), &reach) ||
        __builtin_add_overflow(last, reach, &last)) {
      return false;
    }
  }
  return static_cast<std::uint64_t>(last) < tensor.storage().nbytes() / tensor.itemsize();
}

Header header_of(const Bytes& frame, int from) {
  const Header wanted;
  Header header;
  if (frame.size() < Sealer::header_size || std::memcmp(frame.data(), wanted.magic.data(), wanted.magic.size()) != 0) {
    throw Refused{"it is not signed", from};
  }
  std::memcpy(&header, frame.data(), sizeof header);
  return header;
}

std::string_view view(const Bytes& bytes, std::size_t from, std::size_t length) {
  return {bytes.data() + from, length};
}

}  // namespace

Sealer::Sealer(std::string_view key, int rank, int world_size)
    : key_(key), rank_(rank), world_size_(world_size), peers_(std::make_unique<Peer[]>(world_size)) {}

Bytes Sealer::seal(int direction, int receiver, std::uint64_t counter, int type, const Bytes& payload,
                   const std::vector<at::Tensor>& tensors) const {
  Header header;
  header.direction = static_cast<std::uint8_t>(direction);
  header.type = static_cast<std::uint16_t>(type);
  header.sender = static_cast<std::uint32_t>(rank_);
  header.receiver = static_cast<std::uint32_t>(receiver);
  header.counter = counter;
  Bytes frame(header_size + payload.size());
  std::memcpy(frame.data(), &header, sizeof header);
  std::memcpy(frame.data() + header_size, payload.data(), payload.size());
  const Digest mac = key_.of({view(frame, 0, mac_at), described(tensors), view(payload, 0, payload.size())});
  std::memcpy(frame.data() + mac_at, mac.data(), mac.size());
  return frame;
}

Sealer::Sealed Sealer::seal_request(int receiver, int type, const Bytes& payload,
                                    const std::vector<at::Tensor>& tensors) {
  if (receiver < 0 || receiver >= world_size_) throw std::out_of_range("no such worker");
  const std::uint64_t counter = peers_[receiver].sent.fetch_add(1, std::memory_order_relaxed) + 1;
  return {seal(Direction::request, receiver, counter, type, payload, tensors), counter};
}

Bytes Sealer::seal_reply(int receiver, std::uint64_t counter, int type, const Bytes& payload,
                         const std::vector<at::Tensor>& tensors) const {
  return seal(Direction::reply, receiver, counter, type, payload, tensors);
}

void Sealer::check_mac(const Bytes& frame, const std::vector<at::Tensor>& tensors, int sender) const {
  const Digest mac =
      key_.of({view(frame, 0, mac_at), described(tensors), view(frame, header_size, frame.size() - header_size)});
  if (!HmacKey::same(mac, view(frame, mac_at, mac.size()))) throw Refused{"its signature is wrong", sender};
  for (const at::Tensor& tensor : tensors) {
    if (!is_within_its_storage(tensor)) throw Refused{"a tensor reaches beyond its memory", sender};
  }
}

Sealer::Opened Sealer::open_request(int type, const Bytes& frame, const std::vector<at::Tensor>& tensors) {
  const Header header = header_of(frame, -1);
  const bool known = header.sender < static_cast<std::uint32_t>(world_size_);
  const int sender = known ? static_cast<int>(header.sender) : -1;
  check_mac(frame, tensors, sender);
  if (header.version != 1 || header.direction != Direction::request || header.type != type || !known ||
      header.receiver != static_cast<std::uint32_t>(rank_)) {
    throw Refused{"it was signed as another message", sender};
  }
  if (!peers_[sender].seen.insert(header.counter)) throw Refused{"it was received before", sender};
  return {sender, header.counter};
}

void Sealer::open_reply(int sender, std::uint64_t counter, int type, const Bytes& frame,
                        const std::vector<at::Tensor>& tensors) const {
  const Header header = header_of(frame, sender);
  check_mac(frame, tensors, sender);
  if (header.version != 1 || header.direction != Direction::reply || header.type != type ||
      header.sender != static_cast<std::uint32_t>(sender) || header.receiver != static_cast<std::uint32_t>(rank_) ||
      header.counter != counter) {
    throw Refused{"it was signed as another message", sender};
  }
}

}  // namespace rpc_ext
