#include "storage/committer.h"

#include <algorithm>
#include <set>
#include <utility>

#include "storage/failure.h"
#include "storage/store.h"

namespace cudafuture::storage {
namespace {

constexpr std::uint64_t kSmallestCompaction = 1 << 20;  // bytes: no journal is made anew before

}  // namespace

void Committer::commit(std::vector<Change>&& changes) noexcept {
  {
    std::lock_guard lock(mutex_);
    for (Change& change : changes) changes_.push_back(std::move(change));
    if (working_for_ != nullptr) return;
    working_for_ = store_.shared_from_this();
  }
  if (ThreadCache::get().run(this) != ThreadCache::Run::begun) perform();
}

void Committer::perform() noexcept {
  while (true) {
    std::vector<Change> changes;
    {
      std::unique_lock lock(mutex_);
      changes.swap(changes_);
      if (changes.empty()) {
        const std::shared_ptr<Store> store = std::move(working_for_);
        idle_.notify_all();
        lock.unlock();
        return;  // and perhaps the store ends here, and this with it
      }
    }
    store_.install(changes, make_durable(changes));
    changes.clear();
    compact_if_worth_it();
  }
}

void Committer::join() noexcept {
  std::unique_lock lock(mutex_);
  idle_.wait(lock, [this] { return working_for_ == nullptr; });
}

std::exception_ptr Committer::make_durable(const std::vector<Change>& changes) noexcept {
  if (std::exception_ptr error = broken()) return error;
  std::set<std::shared_ptr<File>> files;
  std::vector<Record> records;
  for (const Change& change : changes) {
    // A record that was overtaken before could come to stand in a journal that knows nothing of that any more.
    if (store_.index_.is_overtaken(change.key, change.turn)) continue;
    if (change.entry == nullptr) {
      records.push_back(deletion_of(change.key, change.turn));
    } else {
      records.push_back(record_of(change.key, *change.entry));
      if (change.entry->place) files.insert(change.entry->place.slab().file);
    }
  }
  if (records.empty()) return nullptr;
  try {
    for (const std::shared_ptr<File>& file : files) file->sync();
  } catch (...) {
    return note_broken(std::current_exception());
  }
  return append(changes, records);
}

std::exception_ptr Committer::append(const std::vector<Change>& changes, const std::vector<Record>& records) noexcept {
  try {
    journal_->append(records);
  } catch (...) {
    if (!journal_->is_broken()) return std::current_exception();
    for (const Change& change : changes) in_doubt_.push_back(change.entry);
    return note_broken(std::current_exception());
  }
  journal_bytes_.store(journal_->size(), std::memory_order_relaxed);
  return nullptr;
}

std::exception_ptr Committer::note_broken(std::exception_ptr error) noexcept {
  std::lock_guard lock(mutex_);
  return broken_ = std::move(error);
}

std::exception_ptr Committer::broken() const noexcept {
  std::lock_guard lock(mutex_);
  return broken_;
}

void Committer::compact() {
  journal_->replace(store_.index_.records());
  compact_at_ = std::max(kSmallestCompaction, 4 * journal_->size());
  journal_bytes_.store(journal_->size(), std::memory_order_relaxed);
}

void Committer::compact_if_worth_it() noexcept {
  if (broken() != nullptr || journal_->size() < compact_at_) return;
  try {
    compact();
  } catch (...) {  // the one there is goes on, unless it is not known which one that is
    if (journal_->is_broken()) note_broken(std::current_exception());
    compact_at_ = 2 * journal_->size();
  }
}

std::uint64_t Committer::journal_bytes() const noexcept { return journal_bytes_.load(std::memory_order_relaxed); }

}  // namespace cudafuture::storage
