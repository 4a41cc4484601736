// Large tensors that a client writes in parts: multipart writes of the store.
//
//     first part ──► quota, begin_write ──► order and queue of the key ──► turn ─┐
//     each part  ──► put ──────────────────────────────────► all are written ────┴──► commit ──► end of the last part
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include "store/service/namespace.h"
#include "store/service/order.h"
#include "store/wire/message.h"

namespace rpc_ext::store {

class Upload;
using UploadList = std::vector<std::shared_ptr<Upload>>;

// The uploads of one client, by sequence number.
//
// Lock: mutex_ guards what follows it; the order's is taken under it.
class Uploads final : public std::enable_shared_from_this<Uploads> {
 public:
  // Called once, when a part has ended: the last part after the tensor was committed. Null: it was written.
  // `is_refused`: the part has other bytes than were sent, or does not match the other parts. It must not throw.
  using Ended = std::function<void(const Problem*, bool is_refused)>;

  Uploads(std::shared_ptr<Namespace> space, std::shared_ptr<RequestOrder> order)
      : space(std::move(space)), order(std::move(order)) {}

  const std::shared_ptr<Namespace> space;
  const std::shared_ptr<RequestOrder> order;

  // Writes a part. True: an upload has begun with it.
  bool put(const KeyEntry& entry, at::Tensor data, Ended ended);
  // Aborts an upload unless it is done, and refuses its later parts.
  void fail(std::uint64_t sequence, const Problem& problem);
  void end();  // aborts all uploads: the session has ended

  // Finds the uploads that have expired. Returns the seconds until the next deadline; infinity: there is none.
  double find_expired(UploadList& expired) const;

  // Removes an upload that is done; null: it has succeeded.
  void forget(std::uint64_t sequence, const Problem* problem);

 private:
  void note_failure(std::uint64_t sequence, const Problem& problem);

  mutable std::mutex mutex_;
  std::unordered_map<std::uint64_t, std::shared_ptr<Upload>> uploads_;
  std::unordered_map<std::uint64_t, Problem> failures_;  // of the last uploads that failed
  std::deque<std::uint64_t> failed_;                     // their sequence numbers, the oldest first
  bool has_ended_ = false;
};

// The upload of one tensor.
//
// Lock: mutex_ guards what follows it; nothing is taken under it.
class Upload final : public std::enable_shared_from_this<Upload> {
 public:
  Upload(std::shared_ptr<Uploads> uploads, const KeyEntry& first)
      : uploads_(std::move(uploads)), first_(first), left_(parts_of(first.nbytes)) {}

  double expires() const noexcept { return first_.expires; }

  void begin();  // on another thread: to begin the write of the store may block on the file system
  void put(const KeyEntry& entry, at::Tensor data, Uploads::Ended ended);  // parts wait until the write has begun
  void fail(const Problem& problem);                                       // aborts the upload, unless it is done
  void expire();                                                           // fails it at its deadline

 private:
  struct Part {
    KeyEntry entry;
    at::Tensor data;
    Uploads::Ended ended;
  };

  void begin_now();
  void never_begin(const Problem& problem);
  std::optional<Problem> begin_write();
  void take_turn(const std::optional<Problem>& problem);
  void write(Part&& part);
  void end_part(Part& part, const Problem* problem);
  void refuse(Part& part, const Problem& problem, bool is_refused);
  void commit_if_whole();
  void settle(const Problem* problem);
  std::optional<Problem> error();

  const std::shared_ptr<Uploads> uploads_;
  const KeyEntry first_;
  std::mutex mutex_;
  std::shared_ptr<api::MultipartWrite> write_;  // null: it has not begun. Then quota was taken
  std::vector<Part> waiting_;                   // parts that have arrived before
  std::size_t left_;                            // parts that are not written
  bool has_turn_ = false, is_over_ = false;
  Uploads::Ended last_;           // of the last part, which waits for the commit
  std::optional<Problem> error_;  // the reason of the abort
};

}  // namespace rpc_ext::store
