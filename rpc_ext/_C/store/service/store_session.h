// The session of one client of a store service: the order of its operations, its namespace, the tensors that it
// writes and fetches in parts, and the buffers of the answers to it.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "api/buffer_pool.h"
#include "store/service/namespace.h"
#include "store/service/order.h"
#include "store/service/upload.h"
#include "store/wire/message.h"

namespace rpc_ext::store {

// Lock: mutex_ guards the kept reads and the requests for buffers; those of the uploads and the order are taken under
// it.
class StoreSession final : public std::enable_shared_from_this<StoreSession> {
 public:
  using Taken = api::BufferPool::Taken;

  // Asks for a call of look() in so many seconds. Calls `failed` if there is no thread that can call it.
  using SetTimer = std::function<void(double seconds, const std::function<void()>& failed)>;

  // `buffered`: most bytes of the answers that have not been sent.
  StoreSession(std::shared_ptr<Namespace> space, std::shared_ptr<RequestOrder> order, std::uint64_t buffered,
               SetTimer set_timer);

  const std::shared_ptr<Namespace> space;
  const std::shared_ptr<RequestOrder> order;
  std::atomic<double> heard;            // when its last request came
  std::atomic<bool> is_watched{false};  // the service learns when the client is lost
  std::uint64_t in_flight = 0;  // bytes of its requests that have not been answered; the service's lock guards it

  void put(const KeyEntry& entry, at::Tensor data, Uploads::Ended ended);  // writes a part of a tensor
  void abandon(const KeyEntry& entry);  // drops an operation, so that no other operation waits for it

  // ---- the tensors that the client fetches: a read takes one snapshot, whatever others write meanwhile
  // Keeps a tensor until its parts are fetched, or the deadline of the read is over.
  void keep(const KeyEntry& entry, const FoundTensor& tensor, bool has_first);
  struct Kept {
    FoundTensor tensor;
    std::string key;
    bool needs_digest;
  };
  std::optional<Kept> take(std::uint64_t sequence, std::uint32_t part);  // each part once

  // ---- the buffers of answers
  // Calls `taken` with a tensor of so many bytes that are not initialized, now or when buffers return; with an
  // undefined tensor at the deadline, and when the session has ended.
  void take_buffer(std::uint64_t nbytes, double expires, Taken taken);

  // Ends expired uploads, reads and requests for buffers. Returns the seconds until the next deadline; none: there is
  // none.
  std::optional<double> look();
  void end();  // aborts unfinished operations, and drops the Python objects

 private:
  struct KeptRead {
    Kept kept;
    std::vector<bool> is_left;  // by part
    std::size_t left;
    double expires;
  };
  using KeptReads = std::unordered_map<std::uint64_t, KeptRead>;
  struct BufferWait {
    double expires;
    std::function<void()> cancel = {};
    bool is_over = false;
  };
  using BufferWaitPtr = std::shared_ptr<BufferWait>;

  void end_wait(const BufferWaitPtr& wait);
  void note_deadline(double expires);

  const std::shared_ptr<Uploads> uploads_;
  const std::shared_ptr<api::BufferPool> pool_;
  std::mutex mutex_;
  std::shared_ptr<SetTimer> set_timer_;
  KeptReads kept_;
  std::unordered_set<BufferWaitPtr> waits_;
  bool has_ended_ = false;
  double timer_at_;  // on the service's clock: when look() is called; infinity: no timer is set
};

}  // namespace rpc_ext::store
