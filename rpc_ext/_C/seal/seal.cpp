#include "seal/seal.h"

#include <bit>
#include <cstring>
#include <stdexcept>

namespace rpc_ext {
namespace {

static_assert(std::endian::native == std::endian::little, "seals are little-endian");

struct SealHead {
  std::array<std::uint8_t, 4> magic{0xCF, 'R', 'P', 'C'};
  std::uint8_t version = 2;
  std::uint8_t direction = 0;
  std::uint16_t contents = 0;
  std::uint32_t sender = 0;
  std::uint32_t receiver = 0;
  std::uint64_t counter = 0;
  std::int64_t number = 0;
  Tag tag{};
};
static_assert(sizeof(SealHead) == 48 && std::is_trivially_copyable_v<SealHead>);
static_assert(sizeof(SealHead) + sizeof(Digest) == Sealer::size);

template <class T>
void append(std::string& to, T value) {
  to.append(reinterpret_cast<const char*>(&value), sizeof value);
}

template <class T>
std::string_view bytes_of(const T& value) {
  return {reinterpret_cast<const char*>(&value), sizeof value};
}

std::string announcement(const Parts& parts) {
  std::string text;
  text.reserve(8 * (2 + parts.payloads.size()) + 16 * parts.tensors.size());
  append<std::uint64_t>(text, parts.payloads.size());
  for (const MessagePart& payload : parts.payloads) append<std::uint64_t>(text, payload.length);
  append<std::uint64_t>(text, parts.tensors.size());
  for (const MessagePart& tensor : parts.tensors) {
    append<std::uint64_t>(text, tensor.length);
    append<std::int32_t>(text, tensor.source);
    append<std::int32_t>(text, tensor.target);
  }
  return text;
}

Digest derived(std::string_view key, std::string_view purpose) { return HmacKey(key).of({purpose}); }

std::size_t index_of(MessageDirection direction) { return direction == MessageDirection::request ? 0 : 1; }

}  // namespace

Sealer::Sealer(std::string_view key, int rank, int world_size)
    : heads_(bytes_of(derived(key, "cudafuture seal: head"))),
      bodies_(derived(key, "cudafuture seal: body")),
      rank_(rank),
      world_size_(world_size),
      peers_(std::make_unique<Peer[]>(world_size)) {
  if (world_size > most_workers) throw std::invalid_argument("a session with a secret has at most 65,536 workers");
}

Tag Sealer::tag_of(MessageDirection direction, int sender, int receiver, std::uint64_t counter, const Parts& parts,
                   bool with_contents) const {
  Nonce nonce;
  nonce[0] = static_cast<std::uint8_t>(direction);
  std::memcpy(&nonce[1], &sender, 2);
  std::memcpy(&nonce[3], &receiver, 2);
  std::memcpy(&nonce[5], &counter, 7);
  GmacKey::Message message(bodies_, nonce);
  for (const MessagePart& payload : parts.payloads) message.add(payload.data, payload.length);
  if (with_contents) {
    for (const MessagePart& tensor : parts.tensors) message.add(tensor.data, tensor.length);
  }
  return message.tag();
}

std::string Sealer::seal(MessageDirection direction, int receiver, std::int64_t number, const Parts& parts,
                         bool with_contents) {
  if (receiver < 0 || receiver >= world_size_) throw std::out_of_range("there is no such worker");
  SealHead head;
  head.direction = static_cast<std::uint8_t>(direction);
  head.contents = with_contents ? 1 : 0;
  head.sender = static_cast<std::uint32_t>(rank_);
  head.receiver = static_cast<std::uint32_t>(receiver);
  head.counter = peers_[receiver].sent[index_of(direction)].fetch_add(1, std::memory_order_relaxed) + 1;
  head.number = number;
  head.tag = tag_of(direction, rank_, receiver, head.counter, parts, with_contents);
  std::string seal(bytes_of(head));
  seal.append(bytes_of(heads_.of({bytes_of(head), announcement(parts)})));
  return seal;
}

Admitted Sealer::admit(std::string_view seal, const Parts& announced) const {
  SealHead head;
  if (seal.size() != size || std::memcmp(seal.data(), head.magic.data(), head.magic.size()) != 0) {
    throw Refused{"it is not signed", -1};
  }
  std::memcpy(&head, seal.data(), sizeof head);
  const bool known = head.sender < static_cast<std::uint32_t>(world_size_);
  const int sender = known ? static_cast<int>(head.sender) : -1;
  const Digest mac = heads_.of({seal.substr(0, sizeof head), announcement(announced)});
  if (!same(bytes_of(mac), seal.substr(sizeof head))) throw Refused{"its signature is wrong", sender};
  const bool has_direction = head.direction == 1 || head.direction == 2;
  if (head.version != 2 || !has_direction || head.contents > 1 || !known ||
      head.receiver != static_cast<std::uint32_t>(rank_)) {
    throw Refused{"it was signed as another message", sender};
  }
  return {
      static_cast<MessageDirection>(head.direction), sender, head.counter, head.number, head.contents == 1, head.tag};
}

void Sealer::expect_new(const Admitted& admitted) {
  if (!peers_[admitted.sender].seen[index_of(admitted.direction)].insert(admitted.counter)) {
    throw Refused{"it was received before", admitted.sender};
  }
}

void Sealer::check(const Admitted& admitted, const Parts& received) const {
  const Tag tag = tag_of(admitted.direction, admitted.sender, rank_, admitted.counter, received, admitted.has_contents);
  if (!same(bytes_of(tag), bytes_of(admitted.tag))) {
    throw Refused{"its signature is wrong", admitted.sender};
  }
}

}  // namespace rpc_ext
