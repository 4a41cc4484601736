// Group commit: makes many changes durable at a time, on a thread that exists only while there are changes.
//
//     changes ──► fdatasync of their slabs ──► batch in the journal ──► fdatasync ──► index, futures
//
// Changes that arrive during a sync form the next batch. A failed sync is never retried, because the kernel may count
// the lost data as written afterwards: the store then takes no more changes. A full disk fails only the writes of the
// batch. The journal has blocks reserved for deletions, and a slab that could not be synced takes no more writes.
//
// Lock: mutex_ guards the changes, the task and the failure; no other lock is taken under it.
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
#include "io/checksum.h"
#include "store/change.h"
#include "store/entry.h"
#include "store/journal.h"
#include "store/write_batcher.h"

namespace cudafuture::store {

class Store;

// Returns the change of a write whose bytes are at `extent`. `checksum`: null, or the request's, in which it is part
// `part`.
Change change_of(Write&& write, Extent&& extent, const io::Checksum* checksum, std::size_t part);

class GroupCommit final : private ThreadCache::Task {
 public:
  GroupCommit(Store& store, std::unique_ptr<Journal> journal) : store_(store), journal_(std::move(journal)) {}

  void commit(std::vector<Change>&& changes) noexcept;
  void compact_if_worth_it() noexcept;  // while no commit is in flight
  std::uint64_t journal_bytes() const noexcept;
  void join() noexcept;                        // returns when no commit or compaction is in flight
  void close() noexcept;                       // join(), then marks the journal as whole
  std::exception_ptr broken() const noexcept;  // the reason why the store is not durable any more; null: it is

 private:
  void perform() noexcept override;
  const char* thread_name() const noexcept override { return "cudafuture-sync"; }
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

  std::vector<EntryPtr> in_doubt_;  // entries that the journal may or may not name: their extents are never freed

  mutable std::mutex mutex_;
  std::condition_variable idle_;
  std::exception_ptr broken_;
  std::vector<Change> changes_;
  std::shared_ptr<Store> working_for_;  // set while the task runs
};

}  // namespace cudafuture::store
