// The index of a store: its keys and their entries.
//
// Each write or deletion gets a sequence number when it is requested. The latest one wins, whichever
// ends first.
//
// A key of a durable store has two entries: the readers', and the journal's. An extent is freed when neither refers to
// it, so data that a crash could restore is never overwritten.
//
// Lock: mutex_ guards all fields; no other lock is taken and no entry is dropped under it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "store/change.h"
#include "store/entry.h"
#include "store/journal.h"
#include "store/key_table.h"
#include "store/write_batcher.h"

namespace cudafuture::store {

class Index {
 public:
  struct Statistics {
    std::uint64_t keys = 0;
    std::uint64_t bytes = 0;
  };
  struct Deleted {
    std::uint64_t sequence = 0;
    bool was_there = false;  // or was being written
    EntryPtr entry;          // the caller drops it
  };

  enum class Reach : std::uint8_t { memory, journal };  // how far a change is recorded when it ends

  // Begins writes, and assigns consecutive sequence numbers; finish() or abort() must follow for each.
  void begin(WriteList& writes);
  void abort(const std::string& key) noexcept;
  // Begins links: keys for the current entries of other keys. If one of those is missing, no link begins and `missing`
  // names it. Without a journal the links take effect immediately, and there are no changes to finish.
  struct KeyLink {
    std::string key;
    std::string to;
  };
  std::vector<Change> link(std::vector<KeyLink>&& links, const CallPtr& call, Reach reach, std::string& missing);
  // Begins a deletion if the key exists or is being written; then finish() must follow.
  Deleted erase(const std::string& key);
  // Applies changes, atomically for readers; if they failed, restores the journal's state. Returns entries for the
  // caller to drop.
  [[nodiscard]] std::vector<EntryPtr> finish(const std::vector<Change>& changes, bool has_failed, Reach reach);

  void forget(const std::vector<std::string>& keys);  // for a read-only store

  // False if the journal has a later record, or no record of a deleted key.
  bool needs_record(const Change& change) const;

  // Replays a record of the journal, in the journal's order.
  void replay(Record&& record);
  void finish_replay(const std::function<Extent(const Record&)>& adopt);  // for records with bytes

  EntryPtr find(const std::string& key) const;
  std::vector<EntryPtr> find(const std::vector<std::string>& keys) const;  // a consistent snapshot
  bool try_find(const std::string& key, EntryPtr& entry) const;            // false: it would have to block
  // The entry of a key, and the sequence number of its write or link; null if there is no such key.
  struct Version {
    EntryPtr entry;
    std::uint64_t sequence = 0;
  };
  std::vector<Version> versions(const std::vector<std::string>& keys) const;  // a consistent snapshot
  bool try_version(const std::string& key, Version& version) const;           // false: it would have to block
  std::vector<std::string> keys() const;                                      // in the order of their sequence numbers
  std::vector<Record> records() const;                                        // of the durable entries
  Statistics statistics() const;

 private:
  struct Known {
    EntryPtr entry;              // null: none
    std::uint64_t sequence = 0;  // sequence number of its write or link
    std::uint64_t bytes = 0;     // of the entry, which is often not in the processor's cache
  };
  struct Key {
    Known current;
    Known durable;
    // ---- while writes or deletions of the key are in flight
    std::size_t changing = 0;
    std::uint64_t begun = 0;    // sequence number of the last write
    std::uint64_t deleted = 0;  // sequence number of the last deletion
    std::uint64_t durably_deleted = 0;
  };
  using Keys = KeyTable<Key>;

  void install(Key& at, Known written, Reach reach, std::vector<EntryPtr>& dropped);
  void finish_erase(Key& at, std::uint64_t sequence, Reach reach, std::vector<EntryPtr>& dropped);
  void undo_erase(Key& at, std::uint64_t sequence);
  Version look_up(std::string_view key) const;
  void ended(Keys::Node* key) noexcept;
  void count(const Known& known, int sign) noexcept;  // does nothing without an entry

  mutable std::mutex mutex_;
  Keys keys_;
  Statistics statistics_;
  std::uint64_t sequence_ = 0;
  std::unordered_map<std::string, Record> replayed_;
};

}  // namespace cudafuture::store
