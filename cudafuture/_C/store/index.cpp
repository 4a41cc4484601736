#include "store/index.h"

#include <algorithm>
#include <map>
#include <utility>

namespace cudafuture::store {
namespace {

// Returns true if a record at the extent of an entry belongs to a key that shares the entry.
bool is_of(const Record& record, const Entry& entry) {
  return record.size == entry.size() && record.shape == entry.shape && record.seed == entry.seed &&
         record.digest == entry.digest && record.has_digest == entry.has_digest;
}

// See KeyTable::Batch.
constexpr auto load_nothing = [](const auto&) {};
constexpr auto load_current = [](const auto& known) { prefetch_entry(known.value.current.entry); };

}  // namespace

void Index::begin(WriteList& writes) {
  std::lock_guard lock(mutex_);
  for (Write& write : writes) {
    Key& at = keys_.find_or_add(write.key).value;
    ++at.changing;
    write.sequence = at.begun = ++sequence_;
  }
}

void Index::count(const Known& known, int sign) noexcept {
  if (!known.entry) return;
  statistics_.keys += static_cast<std::uint64_t>(sign);
  statistics_.bytes += static_cast<std::uint64_t>(sign) * known.bytes;
}

void Index::ended(Keys::Node* key) noexcept {
  Key& at = key->value;
  if (--at.changing != 0) return;
  at.begun = at.deleted = at.durably_deleted = 0;
  if (!at.current.entry && !at.durable.entry) keys_.erase(key);
}

std::vector<EntryPtr> Index::finish(const std::vector<Change>& changes, bool has_failed, Reach reach) {
  std::lock_guard lock(mutex_);
  std::vector<EntryPtr> dropped;
  dropped.reserve(changes.size());
  Keys::Batch batch(
      keys_, changes.size(), [&](std::size_t i) { return std::string_view(changes[i].key); }, load_nothing);
  for (std::size_t i = 0; i < changes.size(); ++i) {
    const Change& change = changes[i];
    Keys::Node* const known = keys_.find(change.key, batch.hash(i));
    Key& at = known->value;
    if (change.entry != nullptr && !has_failed) {
      install(at, {change.entry, change.sequence, change.entry->size()}, reach, dropped);
    } else if (change.entry == nullptr && !has_failed) {
      finish_erase(at, change.sequence, reach, dropped);
    } else if (change.entry == nullptr) {
      undo_erase(at, change.sequence);
    }
    ended(known);
  }
  return dropped;
}

void Index::install(Key& at, Known written, Reach reach, std::vector<EntryPtr>& dropped) {
  const std::uint64_t sequence = written.sequence;
  if (reach == Reach::journal && sequence > at.durably_deleted &&
      (!at.durable.entry || sequence > at.durable.sequence)) {
    dropped.push_back(std::exchange(at.durable, written).entry);
  }
  if (sequence > at.deleted && (!at.current.entry || sequence > at.current.sequence)) {
    count(at.current, -1);
    count(written, 1);
    dropped.push_back(std::exchange(at.current, std::move(written)).entry);
  }
}

void Index::abort(const std::string& key) noexcept {
  std::lock_guard lock(mutex_);
  ended(keys_.find(key));
}

std::vector<Change> Index::link(std::vector<KeyLink>&& links, const CallPtr& call, Reach reach, std::string& missing) {
  std::vector<EntryPtr> dropped;
  std::vector<Known> found;  // declared here to outlive the lock
  found.reserve(links.size());
  dropped.reserve(links.size());
  std::vector<Change> changes;
  std::unique_lock lock(mutex_);
  Keys::Batch others(keys_, links.size(), [&](std::size_t i) { return std::string_view(links[i].to); }, load_current);
  for (std::size_t i = 0; i < links.size(); ++i) {
    const Keys::Node* const other = keys_.find(links[i].to, others.hash(i));
    if (other == nullptr || !other->value.current.entry) {
      missing = std::move(links[i].to);
      return {};
    }
    found.push_back(other->value.current);
  }
  Keys::Batch keys(keys_, links.size(), [&](std::size_t i) { return std::string_view(links[i].key); }, load_nothing);
  for (std::size_t i = 0; i < links.size(); ++i) {
    Key& at = keys_.find_or_add(links[i].key, keys.hash(i)).value;
    const std::uint64_t sequence = ++sequence_;
    if (reach == Reach::memory) {
      found[i].sequence = sequence;
      install(at, std::move(found[i]), reach, dropped);
    } else {
      ++at.changing;
      at.begun = sequence;
      changes.push_back({call, std::move(links[i].key), sequence, std::move(found[i].entry)});
    }
  }
  lock.unlock();
  drop(std::move(dropped));
  return changes;
}

void Index::forget(const std::vector<std::string>& keys) {
  for (const std::string& key : keys) {
    const Deleted deleted = erase(key);
    if (!deleted.was_there) continue;
    const std::vector<EntryPtr> dropped = finish({{nullptr, key, deleted.sequence, nullptr}}, false, Reach::memory);
  }
}

Index::Deleted Index::erase(const std::string& key) {
  std::lock_guard lock(mutex_);
  Deleted deleted;
  deleted.sequence = ++sequence_;
  Keys::Node* const known = keys_.find(key);
  if (known == nullptr) return deleted;
  Key& at = known->value;
  deleted.was_there = at.current.entry != nullptr || at.begun > at.deleted;
  if (!deleted.was_there) return deleted;
  ++at.changing;
  at.deleted = deleted.sequence;
  count(at.current, -1);
  deleted.entry = std::exchange(at.current, {}).entry;
  return deleted;
}

void Index::finish_erase(Key& at, std::uint64_t sequence, Reach reach, std::vector<EntryPtr>& dropped) {
  if (reach != Reach::journal) return;
  at.durably_deleted = std::max(at.durably_deleted, sequence);
  if (at.durable.entry && at.durable.sequence < sequence) dropped.push_back(std::exchange(at.durable, {}).entry);
}

void Index::undo_erase(Key& at, std::uint64_t sequence) {
  if (at.deleted != sequence) return;
  at.deleted = at.durably_deleted;
  if (at.current.entry || !at.durable.entry) return;
  at.current = at.durable;
  count(at.current, 1);
}

bool Index::needs_record(const Change& change) const {
  std::lock_guard lock(mutex_);
  const Key& at = keys_.find(change.key)->value;
  if (change.entry == nullptr && !at.durable.entry) return false;
  return at.durably_deleted <= change.sequence && (!at.durable.entry || at.durable.sequence <= change.sequence);
}

// Batches are in the order in which writes ended, not in the order of their sequence numbers.
void Index::replay(Record&& record) {
  sequence_ = std::max(sequence_, record.sequence);
  const auto [known, is_new] = replayed_.try_emplace(record.key);
  if (is_new || record.sequence > known->second.sequence) known->second = std::move(record);
}

void Index::finish_replay(const std::function<Extent(const Record&)>& adopt) {
  std::map<std::pair<std::uint64_t, std::uint64_t>, EntryPtr> linked;  // by slab and offset: possible targets of links
  for (const auto& [key, record] : replayed_) {
    if (!record.is_deletion && record.is_link() && record.size != 0) linked[{record.slab, record.offset}] = nullptr;
  }
  const auto install = [&](const std::string& key, Record& record) {
    const auto known = linked.find({record.slab, record.offset});
    const bool may_share = record.size != 0 && known != linked.end();
    EntryPtr entry = may_share ? known->second : nullptr;
    if (entry == nullptr || !is_of(record, *entry)) {
      Extent extent = record.size == 0 ? Extent() : adopt(record);
      entry = std::make_shared<const Entry>(
          Entry{std::move(record.shape), std::move(extent), record.seed, record.digest, record.has_digest});
      if (may_share && known->second == nullptr) known->second = entry;
    }
    Key& at = keys_.find_or_add(key).value;
    const std::uint64_t bytes = entry->size();
    at.current = at.durable = {std::move(entry), record.sequence, bytes};
    count(at.current, 1);
  };
  for (auto& [key, record] : replayed_) {  // targets of links before the links
    if (!record.is_deletion && !record.is_link()) install(key, record);
  }
  for (auto& [key, record] : replayed_) {
    if (!record.is_deletion && record.is_link()) install(key, record);
  }
  replayed_ = {};
}

EntryPtr Index::find(const std::string& key) const {
  std::lock_guard lock(mutex_);
  return look_up(key).entry;
}

std::vector<EntryPtr> Index::find(const std::vector<std::string>& keys) const {
  std::vector<EntryPtr> entries;
  entries.reserve(keys.size());
  std::lock_guard lock(mutex_);
  Keys::Batch batch(keys_, keys.size(), [&](std::size_t i) { return std::string_view(keys[i]); }, load_current);
  for (std::size_t i = 0; i < keys.size(); ++i) {
    const Keys::Node* const known = keys_.find(keys[i], batch.hash(i));
    entries.push_back(known == nullptr ? nullptr : known->value.current.entry);
  }
  return entries;
}

bool Index::try_find(const std::string& key, EntryPtr& entry) const {
  std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock) return false;
  entry = look_up(key).entry;
  return true;
}

std::vector<Index::Version> Index::versions(const std::vector<std::string>& keys) const {
  std::vector<Version> versions;
  versions.reserve(keys.size());
  std::lock_guard lock(mutex_);
  Keys::Batch batch(keys_, keys.size(), [&](std::size_t i) { return std::string_view(keys[i]); }, load_current);
  for (std::size_t i = 0; i < keys.size(); ++i) {
    const Keys::Node* const known = keys_.find(keys[i], batch.hash(i));
    versions.push_back(known == nullptr ? Version()
                                        : Version{known->value.current.entry, known->value.current.sequence});
  }
  return versions;
}

bool Index::try_version(const std::string& key, Version& version) const {
  std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock) return false;
  version = look_up(key);
  return true;
}

Index::Version Index::look_up(std::string_view key) const {
  const Keys::Node* const known = keys_.find(key);
  return known == nullptr ? Version() : Version{known->value.current.entry, known->value.current.sequence};
}

std::vector<std::string> Index::keys() const {
  std::vector<std::pair<std::uint64_t, std::string>> by_sequence;
  {
    std::lock_guard lock(mutex_);
    keys_.for_each([&](const Keys::Node& known) {
      const Known& current = known.value.current;
      if (current.entry) by_sequence.emplace_back(current.sequence, std::string(known.key()));
    });
  }
  std::sort(by_sequence.begin(), by_sequence.end());
  std::vector<std::string> keys;
  keys.reserve(by_sequence.size());
  for (auto& [sequence, key] : by_sequence) keys.push_back(std::move(key));
  return keys;
}

std::vector<Record> Index::records() const {
  std::lock_guard lock(mutex_);
  std::vector<Record> records;
  records.reserve(keys_.size());
  keys_.for_each([&](const Keys::Node& known) {
    const Known& durable = known.value.durable;
    if (durable.entry) records.push_back(record_of(std::string(known.key()), durable.sequence, *durable.entry));
  });
  return records;
}

Index::Statistics Index::statistics() const {
  std::lock_guard lock(mutex_);
  return statistics_;
}

}  // namespace cudafuture::store
