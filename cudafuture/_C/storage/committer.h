// Makes what was written durable: many changes at a time, on a thread that is there while there are some.
//
//     changes ──► fdatasync of their slabs ──► batch in the journal ──► fdatasync ──► index, futures
//
// Those that come while the disk syncs are the next batch. When a sync fails nothing is tried again, as what failed may
// count as written then: the store takes no more changes. A disk that is full fails the writes of the batch, and no
// more: the journal has blocks for deletions, and a slab that could not be synced gets no more writes.
//
// Lock: mutex_ guards the changes, the task and the failure; nothing is taken under it.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "core/thread_cache.h"
#include "storage/change.h"
#include "storage/checksum.h"
#include "storage/entry.h"
#include "storage/journal.h"
#include "storage/packs.h"

namespace cudafuture::storage {

class Store;

// Of a write whose bytes are at a place. `checksum`: null, or that of the request, of which it is one part.
Change change_of(Write&& write, Place&& place, const Checksum* checksum, std::size_t part);

class Committer final : private ThreadCache::Task {
 public:
  Committer(Store& store, std::unique_ptr<Journal> journal) : store_(store), journal_(std::move(journal)) {}

  void commit(std::vector<Change>&& changes) noexcept;
  void compact_if_worth_it() noexcept;  // while nothing is committed
  std::uint64_t journal_bytes() const noexcept;
  void join() noexcept;                        // returns when nothing is committed, and no journal made anew
  void close() noexcept;                       // join(), then marks the journal as whole
  std::exception_ptr broken() const noexcept;  // why nothing is durable any more; null: it is

 private:
  void perform() noexcept override;
  void commit_batch(std::vector<Change>&& changes) noexcept;
  std::vector<Record> records_of(const std::vector<Change>& changes) const;
  std::exception_ptr make_room(const std::vector<Record>& records) noexcept;
  std::exception_ptr sync_slabs(const std::vector<Change>& changes) noexcept;
  std::exception_ptr append(const std::vector<Change>& changes, const std::vector<Record>& records) noexcept;
  std::exception_ptr note_broken(std::exception_ptr error) noexcept;
  void compact();

  Store& store_;
  std::unique_ptr<Journal> journal_;
  std::uint64_t compact_at_ = 0;  // bytes of the journal
  std::atomic<std::uint64_t> journal_bytes_{0};

  std::vector<EntryPtr> in_doubt_;  // the journal may name them, or not: their places are never free again

  mutable std::mutex mutex_;
  std::condition_variable idle_;
  std::exception_ptr broken_;
  std::vector<Change> changes_;
  std::shared_ptr<Store> working_for_;  // while the task runs
};

}  // namespace cudafuture::storage
