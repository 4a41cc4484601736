#include "storage/committer.h"

#include <algorithm>
#include <set>
#include <utility>

#include "storage/failure.h"
#include "storage/store.h"

namespace cudafuture::storage {
namespace {

constexpr std::uint64_t kWorthIt = 1 << 20;  // bytes: no journal is made anew before

}  // namespace

void Committer::commit(std::vector<Change>&& changes) noexcept {
  {
    std::lock_guard lock(mutex_);
    for (Change& change : changes) changes_.push_back(std::move(change));
    if (working_for_ != nullptr) return;
    working_for_ = store_.shared_from_this();
  }
  if (!ThreadCache::get().run(this)) perform();  // the process goes away
}

void Committer::perform() noexcept {
  while (true) {
    std::vector<Change> changes;
    {
      std::unique_lock lock(mutex_);
      changes.swap(changes_);
      if (changes.empty()) {
        const std::shared_ptr<Store> store = std::move(working_for_);
        lock.unlock();
        return;  // and perhaps the store ends here, and this with it
      }
    }
    store_.install(changes, make_durable(changes));
    changes.clear();
    compact_if_worth_it();
  }
}

std::exception_ptr Committer::make_durable(const std::vector<Change>& changes) noexcept {
  if (broken_ != nullptr) return broken_;
  std::set<std::shared_ptr<File>> files;
  std::vector<Record> records;
  for (const Change& change : changes) {
    // Not what was deleted meanwhile: its record could come to stand in a journal that knows nothing of that any more.
    if (!change.is_deletion && store_.index_.is_beaten(change.key, change.entry.turn)) continue;
    records.push_back(record_of(change.key, change.entry));
    records.back().is_deletion = change.is_deletion;
    if (!change.is_deletion && change.entry.place != nullptr) files.insert(change.entry.place->slab().file);
  }
  try {
    for (const std::shared_ptr<File>& file : files) file->sync();
  } catch (...) {
    return broken_ = std::current_exception();
  }
  if (records.empty()) return nullptr;
  try {
    journal_->append(records);
  } catch (...) {
    if (journal_->is_broken()) broken_ = std::current_exception();
    return std::current_exception();
  }
  journal_bytes_.store(journal_->size(), std::memory_order_relaxed);
  return nullptr;
}

void Committer::compact() {
  journal_->replace(store_.index_.records());
  compact_at_ = std::max(kWorthIt, 4 * journal_->size());
  journal_bytes_.store(journal_->size(), std::memory_order_relaxed);
}

void Committer::compact_if_worth_it() noexcept {
  if (broken_ != nullptr || journal_->size() < compact_at_) return;
  try {
    compact();
  } catch (...) {  // the one there is goes on, unless it is not known which one that is
    if (journal_->is_broken()) broken_ = std::current_exception();
    compact_at_ = 2 * journal_->size();
  }
}

std::uint64_t Committer::journal_bytes() const noexcept { return journal_bytes_.load(std::memory_order_relaxed); }

}  // namespace cudafuture::storage
