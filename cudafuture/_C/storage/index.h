// The keys of a store and what is known of them.
//
// What is written or deleted has a turn, given when it is asked for; the latest turn wins, whatever ends first.
//
// Of a durable store a key has two entries: what readers see, and what the journal says. A place is free when neither
// has it: so nothing is written over that a crash could bring back.
//
// Lock: mutex_ guards everything; nothing is taken under it, and no entry is dropped.
#pragma once

#include <array>
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
    std::optional<Entry> entry;  // for the caller to drop
  };

  enum class Reach : std::uint8_t { memory, journal };  // where it is known that something has ended
  using Dropped = std::array<std::optional<Entry>, 2>;  // for the caller to drop

  // A write begins; install() or give_up() has to follow. Returns its turn.
  std::uint64_t begin(const std::string& key);
  [[nodiscard]] Dropped install(const std::string& key, const Entry& entry, Reach reach);
  void give_up(const std::string& key) noexcept;

  // A deletion begins, if something was there: then finish_erase() or undo_erase() has to follow.
  Deleted erase(const std::string& key);
  [[nodiscard]] Dropped finish_erase(const std::string& key, std::uint64_t turn, Reach reach);
  void undo_erase(const std::string& key, std::uint64_t turn);  // what is in the journal is there again

  bool is_overtaken(const std::string& key, std::uint64_t turn) const;  // by what is in the journal

  // What a journal says, in its order.
  void replay(Record&& record);
  void finish_replay();
  template <class Adopt>
  void adopt(Adopt&& adopt) {
    for (auto& [key, known] : keys_) {
      adopt(*known.entry, replayed_.at(key));
      known.durable = known.entry;
    }
    replayed_.clear();
  }

  std::optional<Entry> find(const std::string& key) const;
  std::vector<std::string> keys() const;  // in the order of their turns
  std::vector<Record> records() const;    // what the journal says
  Statistics statistics() const;

 private:
  struct Key {
    std::optional<Entry> entry;
    std::optional<Entry> durable;
    // ---- while there are writes and deletions that have not ended
    std::size_t changing = 0;
    std::uint64_t begun = 0;    // the turn of the last write
    std::uint64_t deleted = 0;  // the turn of the last deletion
    std::uint64_t durably_deleted = 0;
  };
  using Keys = std::unordered_map<std::string, Key>;

  void ended(Keys::iterator key) noexcept;
  void count(const Entry& entry, int sign) noexcept;

  mutable std::mutex mutex_;
  Keys keys_;
  Statistics statistics_;
  std::uint64_t turn_ = 0;
  std::unordered_map<std::string, Record> replayed_;
};

}  // namespace cudafuture::storage
