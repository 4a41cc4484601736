// A namespace of a store service: its keys in the store, their order of writing, and its quota.
//
// A key of a namespace is `<prefix><key>` in the store.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "api/store.h"
#include "store/service/order.h"
#include "store/wire/message.h"

namespace rpc_ext::store {

namespace api = cudafuture::api;
using api::FoundTensor;
using StorePtr = std::shared_ptr<api::Store>;

// Lock: mutex_ guards what follows it; nothing is taken under it.
class Namespace final : public std::enable_shared_from_this<Namespace> {
 public:
  using Done = api::Done;

  // `sizes`: the keys that the store has of it from before, with their bytes, in the order of writing. `capacity`:
  // bytes that its tensors may have, unfinished writes included; none: no limit.
  Namespace(StorePtr store, std::string prefix, std::optional<std::uint64_t> capacity,
            const std::vector<std::pair<std::string, std::uint64_t>>& sizes);

  const StorePtr& store() const noexcept { return store_; }
  const std::string& prefix() const noexcept { return prefix_; }
  bool is_empty() const;                  // no tensors, and no unfinished writes
  std::vector<std::string> keys() const;  // in the order in which they were written last
  std::string name_of(const std::string& key) const { return prefix_ + key; }  // of a key in the store

  // ---- quota
  // Counts a tensor that is to be written. Returns the problem where there is no room for it.
  std::optional<Problem> take(std::uint64_t nbytes);
  void give_back(std::uint64_t nbytes);  // counts it no more
  // Counts a write that has ended, and the tensor that it has replaced. `order`: of the beginnings of writes.
  void settle(const std::string& key, std::uint64_t nbytes, bool has_succeeded, std::uint64_t order);
  std::uint64_t next_order();

  // ---- the store; `done` as of api::Store
  std::optional<FoundTensor> find(const std::string& key) const { return store_->find(name_of(key)); }
  // Writes a tensor, with its quota. The caller keeps its bytes and the entry.
  void write(const KeyEntry& entry, const std::byte* from, Done done);
  void erase(const std::string& key, Done done);  // not_found where there is no such key
  void clear();                                   // deletes all keys for good, also those that are being written

  KeyQueues queues;

 private:
  struct Size {
    std::uint64_t nbytes;
    std::uint64_t order;  // of writing
  };

  void remove(std::vector<std::string> names);

  const StorePtr store_;
  const std::string prefix_;
  const std::optional<std::uint64_t> capacity_;
  mutable std::mutex mutex_;
  std::unordered_map<std::string, Size> sizes_;
  std::vector<std::string> left_over_;  // names that the disk failed to remove
  std::uint64_t writes_ = 0;
  std::uint64_t used_ = 0, tensors_ = 0;  // bytes and number, unfinished writes included
  bool is_gone_ = false;
};

// ---- the problems of requests
Problem bytes_differ(const std::string& key, std::uint64_t length);
Problem no_such_key(const std::string& key);

// The problem of a store in the words of a client, with its key, and the bytes of its tensor where they are given.
Problem for_client(const std::string& key, const Problem& problem, std::optional<std::uint64_t> nbytes = std::nullopt);

}  // namespace rpc_ext::store
