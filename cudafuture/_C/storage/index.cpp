#include "storage/index.h"

#include <algorithm>
#include <map>
#include <tuple>
#include <utility>

namespace cudafuture::storage {
namespace {

// Returns whether a record at the place of an entry belongs to a key that shares the entry.
bool is_of(const Record& record, const Entry& entry) {
  return record.size == entry.size() && record.shape == entry.shape && record.seed == entry.seed &&
         record.digest == entry.digest && record.has_digest == entry.has_digest;
}

}  // namespace

void Index::begin(WriteList& writes) {
  std::lock_guard lock(mutex_);
  for (Write& write : writes) {
    Key& at = make(write.key);
    ++at.changing;
    write.turn = at.begun = ++turn_;
  }
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
  if (!at.current.entry && !at.durable.entry) keys_.erase(key);
}

std::vector<EntryPtr> Index::finish(const std::vector<Change>& changes, bool has_failed, Reach reach) {
  std::lock_guard lock(mutex_);
  std::vector<EntryPtr> dropped;
  for (const Change& change : changes) {
    const auto known = keys_.find(std::string_view(change.key));
    Key& at = known->second;
    if (change.entry != nullptr && !has_failed) {
      install(at, {change.entry, change.turn}, reach, dropped);
    } else if (change.entry == nullptr && !has_failed) {
      finish_erase(at, change.turn, reach, dropped);
    } else if (change.entry == nullptr) {
      undo_erase(at, change.turn);
    }
    ended(known);
  }
  return dropped;
}

void Index::install(Key& at, Known written, Reach reach, std::vector<EntryPtr>& dropped) {
  const std::uint64_t turn = written.turn;
  if (reach == Reach::journal && turn > at.durably_deleted && (!at.durable.entry || turn > at.durable.turn)) {
    dropped.push_back(std::exchange(at.durable, written).entry);
  }
  if (turn > at.deleted && (!at.current.entry || turn > at.current.turn)) {
    if (at.current.entry) count(*at.current.entry, -1);
    count(*written.entry, 1);
    dropped.push_back(std::exchange(at.current, std::move(written)).entry);
  }
}

void Index::give_up(const std::string& key) noexcept {
  std::lock_guard lock(mutex_);
  ended(keys_.find(std::string_view(key)));
}

std::vector<Change> Index::link(std::vector<Link>&& links, const CallPtr& call, Reach reach, std::string& missing) {
  std::vector<EntryPtr> found, dropped;  // which outlive the lock
  found.reserve(links.size());
  std::vector<Change> changes;
  std::lock_guard lock(mutex_);
  for (Link& link : links) {
    found.push_back(look_up(link.to));
    if (found.back() != nullptr) continue;
    missing = std::move(link.to);
    return {};
  }
  for (std::size_t i = 0; i < links.size(); ++i) {
    Key& at = make(links[i].key);
    const std::uint64_t turn = ++turn_;
    if (reach == Reach::memory) {
      install(at, {std::move(found[i]), turn}, reach, dropped);
    } else {
      ++at.changing;
      at.begun = turn;
      changes.push_back({call, std::move(links[i].key), turn, std::move(found[i])});
    }
  }
  return changes;
}

void Index::forget(const std::vector<std::string>& keys) {
  for (const std::string& key : keys) {
    const Deleted deleted = erase(key);
    if (!deleted.was_there) continue;
    const std::vector<EntryPtr> dropped = finish({{nullptr, key, deleted.turn, nullptr}}, false, Reach::memory);
  }
}

Index::Deleted Index::erase(const std::string& key) {
  std::lock_guard lock(mutex_);
  Deleted deleted;
  deleted.turn = ++turn_;
  const auto known = keys_.find(std::string_view(key));
  if (known == keys_.end()) return deleted;
  Key& at = known->second;
  deleted.was_there = at.current.entry != nullptr || at.begun > at.deleted;
  if (!deleted.was_there) return deleted;
  ++at.changing;
  at.deleted = deleted.turn;
  if (at.current.entry) count(*at.current.entry, -1);
  deleted.entry = std::exchange(at.current, {}).entry;
  return deleted;
}

void Index::finish_erase(Key& at, std::uint64_t turn, Reach reach, std::vector<EntryPtr>& dropped) {
  if (reach != Reach::journal) return;
  at.durably_deleted = std::max(at.durably_deleted, turn);
  if (at.durable.entry && at.durable.turn < turn) dropped.push_back(std::exchange(at.durable, {}).entry);
}

void Index::undo_erase(Key& at, std::uint64_t turn) {
  if (at.deleted != turn) return;
  at.deleted = at.durably_deleted;
  if (at.current.entry || !at.durable.entry) return;
  at.current = at.durable;
  count(*at.current.entry, 1);
}

bool Index::needs_record(const Change& change) const {
  std::lock_guard lock(mutex_);
  const Key& at = keys_.find(std::string_view(change.key))->second;
  if (change.entry == nullptr && !at.durable.entry) return false;
  return at.durably_deleted <= change.turn && (!at.durable.entry || at.durable.turn <= change.turn);
}

// Batches are in the order in which writes ended, which is not that of their turns.
void Index::replay(Record&& record) {
  turn_ = std::max(turn_, record.turn);
  const auto [known, is_new] = replayed_.try_emplace(record.key);
  if (is_new || record.turn > known->second.turn) known->second = std::move(record);
}

void Index::finish_replay(const std::function<Place(const Record&)>& adopt) {
  std::map<std::pair<std::uint64_t, std::uint64_t>, EntryPtr> linked;  // by slab and offset: what links may be to
  for (const auto& [key, record] : replayed_) {
    if (!record.is_deletion && record.is_link() && record.size != 0) linked[{record.slab, record.offset}] = nullptr;
  }
  const auto install = [&](const std::string& key, Record& record) {
    const auto known = linked.find({record.slab, record.offset});
    const bool may_share = record.size != 0 && known != linked.end();
    EntryPtr entry = may_share ? known->second : nullptr;
    if (entry == nullptr || !is_of(record, *entry)) {
      Place place = record.size == 0 ? Place() : adopt(record);
      entry = std::make_shared<const Entry>(
          Entry{std::move(record.shape), std::move(place), record.seed, record.digest, record.has_digest});
      if (may_share && known->second == nullptr) known->second = entry;
    }
    Key& at = make(key);
    at.current = at.durable = {std::move(entry), record.turn};
    count(*at.current.entry, 1);
  };
  for (auto& [key, record] : replayed_) {  // what links are to, before them
    if (!record.is_deletion && !record.is_link()) install(key, record);
  }
  for (auto& [key, record] : replayed_) {
    if (!record.is_deletion && record.is_link()) install(key, record);
  }
  replayed_ = {};
}

EntryPtr Index::find(const std::string& key) const {
  std::lock_guard lock(mutex_);
  return look_up(key);
}

std::vector<EntryPtr> Index::find(const std::vector<std::string>& keys) const {
  std::vector<EntryPtr> entries;
  entries.reserve(keys.size());
  std::lock_guard lock(mutex_);
  for (const std::string& key : keys) entries.push_back(look_up(key));
  return entries;
}

bool Index::try_find(const std::string& key, EntryPtr& entry) const {
  std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock) return false;
  entry = look_up(key);
  return true;
}

EntryPtr Index::look_up(std::string_view key) const {
  const auto known = keys_.find(key);
  return known == keys_.end() ? nullptr : known->second.current.entry;
}

std::vector<std::string> Index::keys() const {
  std::vector<std::pair<std::uint64_t, std::string>> by_turn;
  {
    std::lock_guard lock(mutex_);
    for (const auto& [key, at] : keys_) {
      if (at.current.entry) by_turn.emplace_back(at.current.turn, std::string(key));
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
    if (at.durable.entry) records.push_back(record_of(std::string(key), at.durable.turn, *at.durable.entry));
  }
  return records;
}

Index::Statistics Index::statistics() const {
  std::lock_guard lock(mutex_);
  return statistics_;
}

}  // namespace cudafuture::storage
