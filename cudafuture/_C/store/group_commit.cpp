#include "store/group_commit.h"

#include <algorithm>
#include <cerrno>
#include <iterator>
#include <set>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "io/failure.h"
#include "store/store.h"

namespace cudafuture::store {

using namespace io;

namespace {

constexpr std::uint64_t kSmallestCompaction = 1 << 20;  // bytes: smaller journals are not compacted

bool is_full(const Failure& failure) noexcept { return failure.code() == ENOSPC || failure.code() == EDQUOT; }

}  // namespace

Change change_of(Write&& write, Extent&& extent, const Checksum* checksum, std::size_t part) {
  Entry entry = {std::move(write.shape), std::move(extent), hash_of(write.key)};
  if (checksum != nullptr) {
    entry.has_digest = true;
    entry.digest = checksum->digest(part, entry.seed);
  }
  auto known = std::make_shared<const Entry>(std::move(entry));
  return {write.call, std::move(write.key), write.sequence, std::move(known), write.written};
}

void GroupCommit::commit(std::vector<Change>&& changes) noexcept {
  {
    std::lock_guard lock(mutex_);
    for (Change& change : changes) changes_.push_back(std::move(change));
    if (working_for_ != nullptr) return;
    working_for_ = store_.shared_from_this();
  }
  if (ThreadCache::get().run(this) != ThreadCache::Run::begun) perform();
}

void GroupCommit::perform() noexcept {
  while (true) {
    std::vector<Change> changes;
    {
      std::unique_lock lock(mutex_);
      changes.swap(changes_);
      if (changes.empty()) {
        const std::shared_ptr<Store> store = std::move(working_for_);
        idle_.notify_all();
        lock.unlock();
        return;  // the store, and this object with it, may be destroyed here
      }
    }
    commit_batch(std::move(changes));
    compact_if_worth_it();
  }
}

void GroupCommit::join() noexcept {
  std::unique_lock lock(mutex_);
  idle_.wait(lock, [this] { return working_for_ == nullptr; });
}

void GroupCommit::close() noexcept {
  join();
  journal_->close();
}

void GroupCommit::commit_batch(std::vector<Change>&& changes) noexcept {
  const auto is_deletion = [](const Change& change) { return change.entry == nullptr; };
  std::vector<Record> records = records_of(changes);
  std::exception_ptr full;
  if (std::all_of(changes.begin(), changes.end(), is_deletion)) {
    journal_->reserve_if_possible();  // deletions have their blocks already
  } else {
    full = make_room(records);
    if (full == nullptr && !records.empty()) full = sync_slabs(changes);
  }
  if (full != nullptr) {
    const auto first = std::stable_partition(changes.begin(), changes.end(), is_deletion);
    std::vector<Change> writes(std::make_move_iterator(first), std::make_move_iterator(changes.end()));
    changes.erase(first, changes.end());
    store_.install(writes, full);
    records = records_of(changes);
  }
  store_.install(changes, append(changes, records));
}

std::vector<Record> GroupCommit::records_of(const std::vector<Change>& changes) const {
  std::unordered_map<std::string_view, const Change*> last;  // by key
  for (const Change& change : changes) {
    const Change*& known = last[change.key];
    if (known == nullptr || known->sequence < change.sequence) known = &change;
  }
  std::vector<Record> records;
  for (const Change& change : changes) {
    if (last[change.key] != &change) continue;
    // A record that was overtaken could otherwise enter a new journal that does not have the later one.
    if (!store_.index_.needs_record(change)) continue;
    records.push_back(change.entry == nullptr ? deletion_of(change.key, change.sequence)
                                              : record_of(change.key, change.sequence, *change.entry));
  }
  return records;
}

// Returns the reason why there is no room for these records; null: there is room. append() reports a broken journal.
std::exception_ptr GroupCommit::make_room(const std::vector<Record>& records) noexcept {
  if (broken() != nullptr) return nullptr;
  std::exception_ptr full;
  for (int attempt = 0;; ++attempt) {
    try {
      if (attempt == 1 && journal_->records() > store_.index_.statistics().keys) compact();
      if (attempt == 2) store_.slabs_->trim();
      journal_->reserve(records);
      return nullptr;
    } catch (const Failure& failure) {
      if (journal_->is_broken()) note_broken(std::current_exception());
      if (journal_->is_broken()) return nullptr;
      if (full == nullptr) full = std::current_exception();
      if (!is_full(failure) || attempt == 2) return full;
    }
  }
}

// Returns the reason why a full disk fails the writes of this batch; null: it does not. Any other error breaks the
// store.
std::exception_ptr GroupCommit::sync_slabs(const std::vector<Change>& changes) noexcept {
  std::set<const Slab*> slabs;
  for (const Change& change : changes) {
    const bool is_write = change.call->kind == Call::Kind::write;  // a link shares an entry whose write was synced
    if (is_write && change.entry->extent) slabs.insert(&change.entry->extent.slab());
  }
  std::exception_ptr full;
  for (const Slab* slab : slabs) {
    if (broken() != nullptr) break;
    try {
      if (const std::exception_ptr failure = store_.slabs_->failure_of(*slab)) std::rethrow_exception(failure);
      slab->file->sync();
    } catch (const Failure& failure) {
      full = std::current_exception();
      if (!is_full(failure)) note_broken(full);
      store_.slabs_->retire(*slab, full);
    }
  }
  return broken() != nullptr ? nullptr : full;
}

std::exception_ptr GroupCommit::append(const std::vector<Change>& changes,
                                       const std::vector<Record>& records) noexcept {
  if (std::exception_ptr error = broken()) return error;
  if (records.empty()) return nullptr;
  try {
    try {
      journal_->append(records);
    } catch (const Failure& failure) {  // a file system that reserves no blocks is full
      if (journal_->is_broken() || !is_full(failure)) throw;
      compact();
      journal_->append(records);
    }
  } catch (...) {
    if (!journal_->is_broken()) return std::current_exception();
    for (const Change& change : changes) in_doubt_.push_back(change.entry);
    return note_broken(std::current_exception());
  }
  journal_bytes_.store(journal_->size(), std::memory_order_relaxed);
  return nullptr;
}

std::exception_ptr GroupCommit::note_broken(std::exception_ptr error) noexcept {
  std::lock_guard lock(mutex_);
  return broken_ = std::move(error);
}

std::exception_ptr GroupCommit::broken() const noexcept {
  std::lock_guard lock(mutex_);
  return broken_;
}

void GroupCommit::compact() {
  journal_->replace(store_.index_.records());
  journal_->reserve_if_possible();
  compact_at_ = std::max(kSmallestCompaction, 4 * journal_->size());
  journal_bytes_.store(journal_->size(), std::memory_order_relaxed);
}

void GroupCommit::compact_if_worth_it() noexcept {
  if (broken() != nullptr || journal_->size() < compact_at_) return;
  try {
    compact();
  } catch (...) {  // the old journal stays in use, unless it is unclear which one is current
    if (journal_->is_broken()) note_broken(std::current_exception());
    compact_at_ = 2 * journal_->size();
  }
}

std::uint64_t GroupCommit::journal_bytes() const noexcept { return journal_bytes_.load(std::memory_order_relaxed); }

}  // namespace cudafuture::store
