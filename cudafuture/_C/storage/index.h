// The keys of a store and what is known of them.
//
// What is written or deleted has a turn, given when it is asked for; the latest turn wins, whatever ends first.
//
// Of a durable store a key has two entries: that of readers, and that of the journal. A place is free when neither
// has it: so nothing is written over that a crash could bring back.
//
// Lock: mutex_ guards everything; nothing is taken under it, and no entry is dropped.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "storage/change.h"
#include "storage/entry.h"
#include "storage/journal.h"
#include "storage/key_table.h"
#include "storage/packs.h"

namespace cudafuture::storage {

class Index {
 public:
  struct Statistics {
    std::uint64_t keys = 0;
    std::uint64_t bytes = 0;
  };
  struct Deleted {
    std::uint64_t turn = 0;
    bool was_there = false;  // or is being written
    EntryPtr entry;          // for the caller to drop
  };

  enum class Reach : std::uint8_t { memory, journal };  // where it is known that something has ended

  // Writes begin, and get their turns; finish() or give_up() has to follow for each. Nothing comes between their turns.
  void begin(WriteList& writes);
  void give_up(const std::string& key) noexcept;
  // Links begin: keys for what others have now. None does where one of those is not there; then `missing` names it.
  // Where no journal has to know of them they take effect at once, and there are no changes to finish.
  struct Link {
    std::string key;
    std::string to;
  };
  std::vector<Change> link(std::vector<Link>&& links, const CallPtr& call, Reach reach, std::string& missing);
  // A deletion begins, if something was there: then finish() has to follow.
  Deleted erase(const std::string& key);
  // Changes take effect, all at once for readers; or they have failed, and what is in the journal is there again.
  // Returns entries for the caller to drop.
  [[nodiscard]] std::vector<EntryPtr> finish(const std::vector<Change>& changes, bool has_failed, Reach reach);

  void forget(const std::vector<std::string>& keys);  // of a store that is only read

  // False where the journal has a later record, or no record of a key that was deleted.
  bool needs_record(const Change& change) const;

  // What a journal says, in its order.
  void replay(Record&& record);
  void finish_replay(const std::function<Place(const Record&)>& adopt);  // of records of bytes

  EntryPtr find(const std::string& key) const;
  std::vector<EntryPtr> find(const std::vector<std::string>& keys) const;  // all at one time
  bool try_find(const std::string& key, EntryPtr& entry) const;            // false: it would have to wait
  // The entry of a key, and the turn of the write or link that it is of; null where there is no such key.
  struct Version {
    EntryPtr entry;
    std::uint64_t turn = 0;
  };
  std::vector<Version> versions(const std::vector<std::string>& keys) const;  // all at one time
  bool try_version(const std::string& key, Version& version) const;           // false: it would have to wait
  std::vector<std::string> keys() const;                                      // in the order of their turns
  std::vector<Record> records() const;                                        // of the durable entries
  Statistics statistics() const;

 private:
  struct Known {
    EntryPtr entry;           // null: none
    std::uint64_t turn = 0;   // of the write or link that it is of
    std::uint64_t bytes = 0;  // of the entry, which is often not in the processor's cache
  };
  struct Key {
    Known current;
    Known durable;
    // ---- while there are writes and deletions that have not ended
    std::size_t changing = 0;
    std::uint64_t begun = 0;    // the turn of the last write
    std::uint64_t deleted = 0;  // the turn of the last deletion
    std::uint64_t durably_deleted = 0;
  };
  using Keys = KeyTable<Key>;

  void install(Key& at, Known written, Reach reach, std::vector<EntryPtr>& dropped);
  void finish_erase(Key& at, std::uint64_t turn, Reach reach, std::vector<EntryPtr>& dropped);
  void undo_erase(Key& at, std::uint64_t turn);
  Version look_up(std::string_view key) const;
  void ended(Keys::Entry* key) noexcept;
  void count(const Known& known, int sign) noexcept;  // nothing where there is no entry

  mutable std::mutex mutex_;
  Keys keys_;
  Statistics statistics_;
  std::uint64_t turn_ = 0;
  std::unordered_map<std::string, Record> replayed_;
};

}  // namespace cudafuture::storage
