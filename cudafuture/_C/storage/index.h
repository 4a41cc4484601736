// The keys of a store and what is known of them.
//
// What is written or deleted has a turn, given when it is asked for; the latest turn wins, whatever ends first.
//
// Lock: mutex_ guards everything; nothing is taken under it, and no entry is dropped.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "storage/entry.h"
#include "storage/journal.h"

namespace cudafuture::storage {

class Index {
 public:
  struct Statistics {
    std::uint64_t keys = 0;
    std::uint64_t bytes = 0;
  };
  struct Deleted {
    std::uint64_t turn = 0;
    bool was_there = false;      // or is being written
    std::optional<Entry> entry;  // what it was
  };

  // A write begins; install() or give_up() has to follow. Returns its turn.
  std::uint64_t begin(const std::string& key);
  // Returns what has to be dropped: the old entry, or this one, where a later turn has won.
  std::optional<Entry> install(const std::string& key, Entry&& entry);
  void give_up(const std::string& key) noexcept;
  bool is_beaten(const std::string& key, std::uint64_t turn) const;  // by a later turn
  Deleted erase(const std::string& key);

  // What a journal says, in its order.
  void replay(Record&& record);
  void finish_replay();
  template <class Adopt>
  void adopt(Adopt&& adopt) {
    for (auto& [key, known] : keys_) adopt(key, *known.entry, replayed_.at(key));
    replayed_.clear();
  }

  std::optional<Entry> find(const std::string& key) const;
  std::vector<std::string> keys() const;  // in the order of their turns
  std::vector<Record> records() const;
  Statistics statistics() const;

 private:
  struct Key {
    std::optional<Entry> entry;
    std::size_t writing = 0;    // writes that have not ended
    std::uint64_t begun = 0;    // the turn of the last one of them
    std::uint64_t deleted = 0;  // the turn of the last deletion, while there are such writes
  };
  using Keys = std::unordered_map<std::string, Key>;

  void forget_if_empty(Keys::iterator key) noexcept;

  mutable std::mutex mutex_;
  Keys keys_;
  Statistics statistics_;
  std::uint64_t turn_ = 0;
  std::unordered_map<std::string, Record> replayed_;
};

}  // namespace cudafuture::storage
