// Writes of whole tensors and deletions, from their arrival to the answer.
#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <optional>

#include "offload/service.h"

namespace rpc_ext::offload {

// A request that changes keys, each one in its turn in the per-key queue.
//
// Lock: mutex_ guards the errors and the count of pending entries; nothing is taken under it.
class Changing final : public std::enable_shared_from_this<Changing> {
 public:
  Changing(std::shared_ptr<Service> service, Service::SessionPtr session, OffloadRequest&& request,
           Service::ReplyPtr reply, Service::Counted counted);

  void begin();

 private:
  void enter(std::size_t i);
  void take_turn(std::size_t i);
  void write(std::size_t i);
  void erase(std::size_t i);
  void leave(std::size_t i, std::optional<Problem> problem);
  void end(std::size_t i, std::optional<Problem> problem);

  const std::shared_ptr<Service> service_;
  const Service::SessionPtr session_;
  OffloadRequest request_;
  const Service::ReplyPtr reply_;
  const Service::Counted counted_;
  std::mutex mutex_;
  Errors errors_;
  std::size_t left_;
};

}  // namespace rpc_ext::offload
