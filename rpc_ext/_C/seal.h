#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "counters.h"
#include "hmac.h"

namespace rpc_ext {

using Bytes = std::vector<char>;

// What is wrong with a message. `sender` is the rank that it claims, or -1; of a reply, the rank that was asked.
struct Refused {
  std::string reason;
  int sender;
};

// Signs the messages of one session, and checks them.
//
// A sealed message is a frame, all integers little-endian:
//
//     0  magic      4 bytes  CF 52 50 43
//     4  version    1        1
//     5  direction  1        1: request, 2: reply
//     6  type       2        of torch's message
//     8  sender     4        rank
//    12  receiver   4        rank
//    16  counter    8        of the sender's requests to the receiver, from 1; a reply has its request's
//    24  mac       32        HMAC-SHA256 under the session's key, of bytes 0 to 23, of the description of the tensors
//                            (their number; of each dtype, sizes, and the type of device), and of the payload
//    56  payload
//
// What the tensors contain is not signed. One that reaches beyond its memory is refused.
class Sealer {
 public:
  static constexpr std::size_t header_size = 56;

  Sealer(std::string_view key, int rank, int world_size);

  struct Sealed {
    Bytes frame;
    std::uint64_t counter;
  };
  struct Opened {
    int sender;
    std::uint64_t counter;
  };

  Sealed seal_request(int receiver, int type, const Bytes& payload, const std::vector<at::Tensor>& tensors);
  Bytes seal_reply(int receiver, std::uint64_t counter, int type, const Bytes& payload,
                   const std::vector<at::Tensor>& tensors) const;

  // Both throw Refused. What was opened is the frame's bytes from header_size on.
  Opened open_request(int type, const Bytes& frame, const std::vector<at::Tensor>& tensors);
  void open_reply(int sender, std::uint64_t counter, int type, const Bytes& frame,
                  const std::vector<at::Tensor>& tensors) const;

 private:
  struct Peer {
    std::atomic<std::uint64_t> sent{0};
    SeenCounters seen;
  };

  Bytes seal(int direction, int receiver, std::uint64_t counter, int type, const Bytes& payload,
             const std::vector<at::Tensor>& tensors) const;
  void check_mac(const Bytes& frame, const std::vector<at::Tensor>& tensors, int sender) const;

  const HmacKey key_;
  const int rank_;
  const int world_size_;
  const std::unique_ptr<Peer[]> peers_;
};

}  // namespace rpc_ext
