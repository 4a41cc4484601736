// Reads of a store service: snapshots in the order of the operations, then bytes in one answer.
//
// A tensor that does not fit into the answer is kept for its client, which fetches it in parts. So a read returns one
// tensor as a whole, whatever others write meanwhile.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "store/service/service.h"

namespace rpc_ext::store {

// One GET or FETCH, from its arrival to the answer.
//
//     GET    order ──► queue of the key ──► snapshot ─┐
//     FETCH  kept reads ──────────────────────────────┴──► places ──► window ──► buffer ──► store ──► answer
//
// Lock: mutex_ guards the errors and the count of pending entries; nothing is taken under it.
class Reading final : public std::enable_shared_from_this<Reading> {
 public:
  Reading(std::shared_ptr<Service> service, Service::SessionPtr session, StoreRequest&& request,
          Service::ReplyPtr reply);

  void begin();

 private:
  // A part of a tensor, and where its bytes go in the data of the answer.
  struct Place {
    std::size_t entry;  // its index
    std::string key;
    FoundTensor tensor;
    std::uint64_t begin;  // in the tensor
    std::uint64_t at;
    std::uint64_t length;
    bool needs_digest;  // it is sent: the client cannot verify the bytes by that of the store, or asks for it
    std::uint64_t digest = 0;
    std::optional<Problem> problem = std::nullopt;
  };

  void look_up(std::size_t i, std::optional<Problem> problem);
  void place_found();
  void place_kept();
  void take_buffer(double expires);
  void read();
  api::PartRead part_of(Place& place) const;
  void read_one(std::size_t at);
  void one_was_read();
  void answer();
  void answer_with(const Problem& problem);
  void move_together();
  void clear_gaps();

  const std::shared_ptr<Service> service_;
  const Service::SessionPtr session_;
  const StoreRequest request_;
  const Service::ReplyPtr reply_;
  std::mutex mutex_;
  Errors errors_;
  std::size_t left_;
  std::vector<std::optional<FoundTensor>> found_;
  std::vector<Place> places_;
  std::vector<std::size_t> filled_;  // the places that have bytes to be read
  std::uint64_t nbytes_ = 0;         // of the data
  std::optional<Service::Counted> counted_;
  at::Tensor data_;
};

}  // namespace rpc_ext::store
