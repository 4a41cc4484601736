#include "storage/index.h"

#include <algorithm>
#include <tuple>
#include <utility>

namespace cudafuture::storage {

std::uint64_t Index::begin(const std::string& key) {
  std::lock_guard lock(mutex_);
  Key& at = make(key);
  ++at.changing;
  return at.begun = ++turn_;
}

void Index::count(const Entry& entry, int sign) noexcept {
  statistics_.keys += static_cast<std::uint64_t>(sign);
  statistics_.bytes += static_cast<std::uint64_t>(sign) * entry.size();
}

Index::Key& Index::make(std::string_view key) {
  const auto known = keys_.find(key);
  if (known != keys_.end()) return known->second;
  return keys_.emplace(std::piecewise_construct, std::tuple(key), std::tuple()).first->second;
}

void Index::ended(Keys::iterator key) noexcept {
  Key& at = key->second;
  if (--at.changing != 0) return;
  at.begun = at.deleted = at.durably_deleted = 0;
  if (!at.entry && !at.durable) keys_.erase(key);
}

Index::Dropped Index::install(const std::string& key, const EntryPtr& entry, Reach reach) {
  std::lock_guard lock(mutex_);
  Dropped dropped;
  const auto known = keys_.find(std::string_view(key));
  Key& at = known->second;
  if (entry->turn > at.deleted && (!at.entry || entry->turn > at.entry->turn)) {
    if (at.entry) count(*at.entry, -1);
    count(*entry, 1);
    dropped[0] = std::exchange(at.entry, entry);
  }
  if (reach == Reach::journal && entry->turn > at.durably_deleted && (!at.durable || entry->turn > at.durable->turn)) {
    dropped[1] = std::exchange(at.durable, entry);
  }
  ended(known);
  return dropped;
}

void Index::give_up(const std::string& key) noexcept {
  std::lock_guard lock(mutex_);
  ended(keys_.find(std::string_view(key)));
}

Index::Deleted Index::erase(const std::string& key) {
  std::lock_guard lock(mutex_);
  Deleted deleted;
  deleted.turn = ++turn_;
  const auto known = keys_.find(std::string_view(key));
  if (known == keys_.end()) return deleted;
  Key& at = known->second;
  deleted.was_there = at.entry != nullptr || at.begun > at.deleted;
  if (!deleted.was_there) return deleted;
  ++at.changing;
  at.deleted = deleted.turn;
  if (at.entry) count(*at.entry, -1);
  deleted.entry = std::exchange(at.entry, nullptr);
  return deleted;
}

Index::Dropped Index::finish_erase(const std::string& key, std::uint64_t turn, Reach reach) {
  std::lock_guard lock(mutex_);
  Dropped dropped;
  const auto known = keys_.find(std::string_view(key));
  Key& at = known->second;
  if (reach == Reach::journal) {
    at.durably_deleted = std::max(at.durably_deleted, turn);
    if (at.durable && at.durable->turn < turn) dropped[0] = std::exchange(at.durable, nullptr);
  }
  ended(known);
  return dropped;
}

void Index::undo_erase(const std::string& key, std::uint64_t turn) {
  std::lock_guard lock(mutex_);
  const auto known = keys_.find(std::string_view(key));
  Key& at = known->second;
  if (at.deleted == turn) {
    at.deleted = at.durably_deleted;
    if (!at.entry && at.durable) {
      at.entry = at.durable;
      count(*at.entry, 1);
    }
  }
  ended(known);
}

bool Index::is_overtaken(const std::string& key, std::uint64_t turn) const {
  std::lock_guard lock(mutex_);
  const Key& at = keys_.find(std::string_view(key))->second;
  return at.durably_deleted > turn || (at.durable && at.durable->turn > turn);
}

// Batches are in the order in which writes ended, which is not that of their turns.
void Index::replay(Record&& record) {
  turn_ = std::max(turn_, record.turn);
  const auto [known, is_new] = replayed_.try_emplace(record.key);
  if (is_new || record.turn > known->second.turn) known->second = std::move(record);
}

void Index::finish_replay(const std::function<Place(const Record&)>& adopt) {
  for (auto& [key, record] : replayed_) {
    if (record.is_deletion) continue;
    Place place = record.size == 0 ? Place() : adopt(record);
    Key& at = make(key);
    at.entry = at.durable = std::make_shared<const Entry>(
        Entry{std::move(record.shape), std::move(place), record.turn, record.digest, record.has_digest});
    count(*at.entry, 1);
  }
  replayed_ = {};
}

EntryPtr Index::find(const std::string& key) const {
  std::lock_guard lock(mutex_);
  return look_up(key);
}

bool Index::try_find(const std::string& key, EntryPtr& entry) const {
  std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock) return false;
  entry = look_up(key);
  return true;
}

EntryPtr Index::look_up(std::string_view key) const {
  const auto known = keys_.find(key);
  return known == keys_.end() ? nullptr : known->second.entry;
}

std::vector<std::string> Index::keys() const {
  std::vector<std::pair<std::uint64_t, std::string>> by_turn;
  {
    std::lock_guard lock(mutex_);
    for (const auto& [key, at] : keys_) {
      if (at.entry) by_turn.emplace_back(at.entry->turn, std::string(key));
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
    if (at.durable) records.push_back(record_of(std::string(key), *at.durable));
  }
  return records;
}

Index::Statistics Index::statistics() const {
  std::lock_guard lock(mutex_);
  return statistics_;
}

}  // namespace cudafuture::storage
