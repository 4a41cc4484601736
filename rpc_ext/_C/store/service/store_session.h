// The session of one client of a store service: the order of its operations, its namespace, the tensors that it
// fetches in parts, and the buffers of the answers to it.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "store/service/namespace.h"
#include "store/service/order.h"
#include "store/store_access.h"
#include "store/wire/message.h"

namespace rpc_ext::store {

using cudafuture::store::PoolAccess;

// Lock: mutex_ guards the kept reads and the requests for buffers; the order's is taken under it.
class StoreSession final : public std::enable_shared_from_this<StoreSession> {
 public:
  using Taken = PoolAccess::Taken;

  // Asks for a call of look() in so many seconds.
  using SetTimer = std::function<void(double)>;

  StoreSession(std::shared_ptr<Namespace> space, std::shared_ptr<RequestOrder> order, std::shared_ptr<PoolAccess> pool,
               SetTimer set_timer);

  const std::shared_ptr<Namespace> space;
  const std::shared_ptr<RequestOrder> order;
  std::atomic<double> heard;            // when its last request came
  std::atomic<bool> is_watched{false};  // the service learns when the client is lost
  std::uint64_t in_flight = 0;  // bytes of its requests that have not been answered; the service's lock guards it

  // ---- the tensors that the client fetches: a read takes one snapshot, whatever others write meanwhile
  // Keeps a tensor until its parts are fetched, or the deadline of the read is over.
  void keep(const KeyEntry& entry, const FoundTensor& tensor, bool has_first);
  struct Kept {
    FoundTensor tensor;
    std::string key;
    bool needs_digest;
  };
  std::optional<Kept> take(std::uint64_t sequence, std::uint32_t part);  // each part once
  void drop(std::uint64_t sequence);                                     // a read that the client gave up

  // ---- the buffers of answers
  // Calls `taken` with a tensor of so many bytes that are not initialized, now or when buffers return; with an
  // undefined tensor at the deadline, and when the session has ended.
  void take_buffer(std::uint64_t nbytes, double expires, Taken taken);

  // Drops expired reads and requests for buffers. Returns the seconds until the next deadline; none: there is none.
  std::optional<double> look();
  void clear();  // the session has ended: drops all kept reads and the Python objects

 private:
  struct KeptRead {
    Kept kept;
    std::vector<bool> is_left;  // by part
    std::size_t left;
    double expires;
  };
  struct BufferWait {
    double expires;
    std::function<void()> cancel;
  };

  void note_deadline(double expires);

  const std::shared_ptr<PoolAccess> pool_;
  std::mutex mutex_;
  std::shared_ptr<SetTimer> set_timer_;
  std::unordered_map<std::uint64_t, KeptRead> kept_;
  std::list<BufferWait> waits_;
  bool has_ended_ = false;
  double timer_at_;  // on the service's clock: when look() is called; infinity: never
};

}  // namespace rpc_ext::store
