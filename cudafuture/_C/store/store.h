// A store: tensors by key, in slabs.
//
//     write    keys ──► extents ──► engine ──► [group commit] ──► index
//              small ones ──► batches ──┘
//     read     index ──► extents, side by side in one read ──► engine ──► digests
//              small ones ──► coalescer ──┘
//
// A key's entry holds its extent, and so does every read of it in flight. A key that is rewritten gets another extent,
// and the old one is freed when the last reader has finished.
//
// A request to the engine is one tensor of many blocks, or several tensors in one block, so no leaf of a checksum spans
// blocks. The engine's blocks must be as large as the largest batched tensor plus a page.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "io/checksum.h"
#include "io/counter.h"
#include "io/engine.h"
#include "io/failure.h"
#include "store/call.h"
#include "store/entry.h"
#include "store/group_commit.h"
#include "store/in_flight_tracker.h"
#include "store/index.h"
#include "store/multipart_write.h"
#include "store/read_coalescer.h"
#include "store/recovery.h"
#include "store/slabs.h"
#include "store/store_statistics.h"
#include "store/write_batcher.h"

namespace cudafuture::store {

class Store final : public std::enable_shared_from_this<Store> {
 public:
  static constexpr std::size_t kLeastBlock = 256 * 1024;  // bytes of a block of the engine

  struct Options {
    std::string folder;
    io::Direct direct = io::Direct::automatic;
    bool checksum = true;
    bool durable = false;
    Opening opening = Opening::write;  // of a durable store
    std::uint64_t capacity = 0;        // bytes; 0: any number
  };
  // Throws Failure.
  static std::shared_ptr<Store> open(std::shared_ptr<io::Engine> engine, const Options& options);
  Store(std::shared_ptr<io::Engine> engine, const Options& options);
  ~Store();
  Store(const Store&) = delete;
  Store& operator=(const Store&) = delete;

  using Full = io::Engine::Full;
  // Each throws Error if the store is closed; the call's future reports all other errors. Full::exceed: the calling
  // thread must not wait for the engine or for the file system.
  void write(WriteList&& writes, const CallPtr& call, Full when_full = Full::wait);
  void read(ReadList&& reads, const CallPtr& call, Full when_full = Full::wait);
  void link(std::vector<Index::KeyLink>&& links, const CallPtr& call);  // atomically
  void erase(const std::vector<std::string>& keys, const CallPtr& call);
  FuturePtr flush() { return in_flight_.flush(); }

  EntryPtr find(const std::string& key) const { return index_.find(key); }
  std::vector<EntryPtr> find(const std::vector<std::string>& keys) const { return index_.find(keys); }
  io::Failure no_such_key(const std::string& key) const {
    return io::no_such_key(key, options_.folder, options_.durable);
  }
  bool try_find(const std::string& key, EntryPtr& entry) const { return index_.try_find(key, entry); }
  std::vector<Index::Version> versions(const std::vector<std::string>& keys) const { return index_.versions(keys); }
  bool try_version(const std::string& key, Index::Version& version) const { return index_.try_version(key, version); }
  bool is_closed() const { return in_flight_.is_closed(); }
  io::Engine& engine() const noexcept { return *engine_; }
  const OperationPlace& place() const noexcept { return place_; }
  std::vector<std::string> keys() const { return index_.keys(); }
  std::uint64_t trim() noexcept { return slabs_->trim(); }
  void forget(const std::vector<std::string>& keys) {
    index_.forget(keys);
  }  // for a read-only store: nothing changes on the disk
  const Recovery& recovery() const noexcept { return recovery_; }

  FuturePtr retire() { return in_flight_.close(); }  // takes no more calls; completes when all have ended
  void close();
  StoreStatistics statistics() const;

 private:
  friend class GroupCommit;
  friend class MultipartWrite;
  struct WriteJob;
  struct ReadJob;
  static constexpr std::uint64_t kSmall = 128 * 1024;  // bytes from which a tensor is read and written separately

  io::Failure read_only() const;
  void refuse(const CallPtr& call) noexcept;  // refuses a change to a read-only store

  void put(Writes&& writes, bool is_batch, Full when_full);
  void grow_and_put(Writes&& writes, bool is_batch, Full when_full);
  void submit(Writes&& writes, std::vector<Extent>&& extents, bool is_batch, Full when_full);
  void written(WriteJob& writing, const std::exception_ptr& error) noexcept;
  void fail_write(Write& write, const std::exception_ptr& error) noexcept;
  void continue_batches() noexcept;
  void commit(std::vector<Change>&& changes) noexcept;
  void commit_now(std::vector<Change>&& changes) noexcept;
  void end_atomic(const CallPtr& call, std::optional<Change>&& change) noexcept;
  void install(std::vector<Change>& changes, const std::exception_ptr& error) noexcept;

  void get(Reads&& reads, bool is_coalesced, Full when_full);
  void continue_reads() noexcept;
  void was_read(ReadJob& reading, const std::exception_ptr& error) noexcept;
  std::exception_ptr check(const Read& read, std::uint64_t digest) noexcept;

  // Durability that a change must reach before it ends.
  Index::Reach reach() const noexcept {
    return group_commit_ == nullptr ? Index::Reach::memory : Index::Reach::journal;
  }
  void begin(const CallPtr& call);
  void end_part(const CallPtr& call, const std::exception_ptr& error) noexcept;

  const std::shared_ptr<io::Engine> engine_;
  const Options options_;
  const OperationPlace& place_;
  const std::uint64_t batch_size_;
  const std::shared_ptr<Slabs> slabs_;
  Index index_;
  WriteBatcher write_batcher_;
  ReadCoalescer read_coalescer_;
  InFlightTracker in_flight_;
  OpenWrites open_writes_;
  std::unique_ptr<GroupCommit> group_commit_;  // null: the store is not durable, or read-only
  Recovery recovery_;

  StoreCounters counters_;
};

}  // namespace cudafuture::store
