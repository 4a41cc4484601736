// The seal of a message: its format, and the checks of a receiver.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "seal/counters.h"
#include "seal/crypto.h"

namespace rpc_ext {

// Why a receiver refuses a message. `sender` is the rank that the message claims, or -1; for a reply, the rank that was
// called.
struct Refused {
  std::string reason;
  int sender;
};

enum class MessageDirection : std::uint8_t { request = 1, reply = 2 };

// A part of a message as its sender announces it, and its memory once that is there.
struct MessagePart {
  std::uint64_t length = 0;
  std::int32_t source = -1;    // the sender's device that it comes from; -1: the host
  std::int32_t target = -1;    // the receiver's device that it is for
  const void* data = nullptr;  // on the host; null where only the length is known, or the memory is a device's
};

// A message as TensorPipe carries it. torch puts four payloads into it: the type of the message, its number, the bytes
// of the call, and a pickle that describes the tensors, with their dtypes, shapes, strides, offsets and storage sizes.
// `tensors` are the storages.
struct Parts {
  std::span<const MessagePart> payloads;
  std::span<const MessagePart> tensors;
};

// A message whose seal belongs to this session and whose lengths are those that its sender has announced.
struct Admitted {
  MessageDirection direction;
  int sender;
  std::uint64_t counter;
  std::int64_t number;  // of the call
  bool has_contents;    // the seal covers the contents of the tensors too
  Tag tag;
};

// Seals the messages of one session, and checks them.
//
// A seal travels in TensorPipe's descriptor of the message, which a receiver reads before it allocates anything. All
// integers are little-endian.
//
//     0  magic      4 bytes  CF 52 50 43
//     4  version    1        2
//     5  direction  1        1: request, 2: reply
//     6  contents   2        1: the tag covers the contents of the tensors too, 0: it does not
//     8  sender     4        rank
//    12  receiver   4        rank
//    16  counter    8        of the sender's messages to the receiver in this direction, from 1
//    24  number     8        torch's, of the call: a reply has that of its request
//    32  tag        16       AES-256-GMAC of the payloads, and of the tensors if `contents` is 1. The nonce is made of
//                            bytes 5, 8 to 9, 12 to 13 and 16 to 22
//    48  mac        32       HMAC-SHA256 of bytes 0 to 47 and of the announcement: the number of payloads, the length
//                            of each, the number of tensors, and of each the length and the two devices: 8 bytes for
//                            each number and length, 4 for each device
//
// The two keys are derived from the session's by HMAC-SHA256. A receiver checks the mac when it has the announcement,
// and the tag when it has the message.
class Sealer {
 public:
  static constexpr std::size_t size = 80;
  static constexpr int most_workers = 1 << 16;

  // Throws std::invalid_argument where there are more than `most_workers` workers.
  Sealer(std::string_view key, int rank, int world_size);

  // The seal of a message to `receiver`. Each seal has a counter of its own.
  std::string seal(MessageDirection direction, int receiver, std::int64_t number, const Parts& parts,
                   bool with_contents);

  // Checks the seal against the announcement. Throws Refused.
  Admitted admit(std::string_view seal, const Parts& announced) const;

  // Notes the arrival of an admitted message. Throws Refused if the same message arrived before.
  void expect_new(const Admitted& admitted);

  // Checks the message against its seal. Throws Refused.
  void check(const Admitted& admitted, const Parts& received) const;

 private:
  struct Peer {
    std::atomic<std::uint64_t> sent[2] = {0, 0};
    SeenCounters seen[2];
  };

  Tag tag_of(MessageDirection direction, int sender, int receiver, std::uint64_t counter, const Parts& parts,
             bool with_contents) const;

  const HmacKey heads_;
  const GmacKey bodies_;
  const int rank_;
  const int world_size_;
  const std::unique_ptr<Peer[]> peers_;
};

}  // namespace rpc_ext
