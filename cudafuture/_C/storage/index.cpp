#include "storage/index.h"

#include <algorithm>
#include <utility>

namespace cudafuture::storage {

std::uint64_t Index::begin(const std::string& key) {
  std::lock_guard lock(mutex_);
  Key& at = keys_[key];
  ++at.writing;
  return at.begun = ++turn_;
}

std::optional<Entry> Index::install(const std::string& key, Entry&& entry) {
  std::lock_guard lock(mutex_);
  const auto known = keys_.find(key);
  Key& at = known->second;
  std::optional<Entry> dropped = std::move(entry);
  --at.writing;
  if (dropped->turn > at.deleted && (!at.entry || dropped->turn > at.entry->turn)) {
    statistics_.bytes += dropped->size;
    if (at.entry) {
      statistics_.bytes -= at.entry->size;
    } else {
      ++statistics_.keys;
    }
    dropped.swap(at.entry);
  }
  forget_if_empty(known);
  return dropped;
}

bool Index::is_beaten(const std::string& key, std::uint64_t turn) const {
  std::lock_guard lock(mutex_);
  const auto known = keys_.find(key);
  if (known == keys_.end()) return true;
  return known->second.deleted > turn || (known->second.entry && known->second.entry->turn > turn);
}

void Index::give_up(const std::string& key) noexcept {
  std::lock_guard lock(mutex_);
  const auto known = keys_.find(key);
  --known->second.writing;
  forget_if_empty(known);
}

void Index::forget_if_empty(Keys::iterator key) noexcept {
  if (key->second.writing == 0) key->second.deleted = 0;
  if (key->second.writing == 0 && !key->second.entry) keys_.erase(key);
}

Index::Deleted Index::erase(const std::string& key) {
  std::lock_guard lock(mutex_);
  Deleted deleted;
  deleted.turn = ++turn_;
  const auto known = keys_.find(key);
  if (known == keys_.end()) return deleted;
  Key& at = known->second;
  deleted.was_there = at.entry.has_value() || (at.writing != 0 && at.begun > at.deleted);
  at.deleted = deleted.turn;
  if (at.entry) {
    statistics_.bytes -= at.entry->size;
    --statistics_.keys;
    deleted.entry = std::exchange(at.entry, std::nullopt);
  }
  forget_if_empty(known);
  return deleted;
}

// Batches are in the order in which writes ended, which is not that of their turns.
void Index::replay(Record&& record) {
  turn_ = std::max(turn_, record.turn);
  const auto [known, is_new] = replayed_.try_emplace(record.key);
  if (is_new || record.turn > known->second.turn) known->second = std::move(record);
}

void Index::finish_replay() {
  std::erase_if(replayed_, [](const auto& known) { return known.second.is_deletion; });
  for (const auto& [key, record] : replayed_) {
    Entry entry;
    entry.shape = record.shape;
    entry.size = record.size;
    entry.digest = record.digest;
    entry.has_digest = record.has_digest;
    entry.turn = record.turn;
    keys_[key].entry = std::move(entry);
    ++statistics_.keys;
    statistics_.bytes += record.size;
  }
}

std::optional<Entry> Index::find(const std::string& key) const {
  std::lock_guard lock(mutex_);
  const auto known = keys_.find(key);
  return known == keys_.end() ? std::nullopt : known->second.entry;
}

std::vector<std::string> Index::keys() const {
  std::vector<std::pair<std::uint64_t, std::string>> by_turn;
  {
    std::lock_guard lock(mutex_);
    for (const auto& [key, at] : keys_) {
      if (at.entry) by_turn.emplace_back(at.entry->turn, key);
    }
  }
  std::sort(by_turn.begin(), by_turn.end());
  std::vector<std::string> keys;
  keys.reserve(by_turn.size());
  for (auto& [turn, key] : by_turn) keys.push_back(std::move(key));
  return keys;
}

std::vector<Record> Index::records() const {
  std::lock_guard lock(mutex_);
  std::vector<Record> records;
  records.reserve(keys_.size());
  for (const auto& [key, at] : keys_) {
    if (at.entry) records.push_back(record_of(key, *at.entry));
  }
  return records;
}

Index::Statistics Index::statistics() const {
  std::lock_guard lock(mutex_);
  return statistics_;
}

}  // namespace cudafuture::storage
