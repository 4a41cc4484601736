#include "store/store.h"

#include <cerrno>
#include <exception>
#include <optional>
#include <utility>

#include "core/error.h"
#include "core/thread_cache.h"
#include "io/page.h"
#include "store/function_continuation.h"

namespace cudafuture::store {

using namespace io;

// One write request to the engine.
struct Store::WriteJob {
  Writes writes;
  std::vector<Extent> extents;
  std::shared_ptr<Checksum> checksum;
  bool is_batch;
};

struct Store::ReadJob {
  Reads reads;
  std::shared_ptr<Checksum> checksum;
  bool is_coalesced;
};

// ---- begin and end

std::shared_ptr<Store> Store::open(std::shared_ptr<Engine> engine, const Options& options) {
  auto store = std::make_shared<Store>(std::move(engine), options);
  if (!options.durable) return store;
  store->recovery_ = recover(options.folder, options.opening, store->index_, *store->slabs_);
  if (options.opening != Opening::write) return store;
  store->group_commit_ = std::make_unique<GroupCommit>(*store, std::move(store->recovery_.journal));
  store->group_commit_->compact_if_worth_it();
  return store;
}

Store::Store(std::shared_ptr<Engine> engine, const Options& options)
    : engine_(std::move(engine)),
      options_(options),
      place_(OperationPlace::find("store", options.folder, "of")),
      batch_size_(engine_->options().block_size),
      slabs_(std::make_shared<Slabs>(Slabs::Options{options.folder, options.direct, options.durable,
                                                    options.opening != Opening::write, options.capacity})),
      write_batcher_(batch_size_),
      read_coalescer_(engine_->options().queue_depth, batch_size_) {}

Store::~Store() { slabs_->close(options_.durable ? Slabs::Files::stay : Slabs::Files::go); }

Failure Store::read_only() const {
  return {"the store in " + options_.folder + " is read-only", EROFS, options_.folder};
}

void Store::refuse(const CallPtr& call) noexcept {
  call->expect(1);
  end_part(call, std::make_exception_ptr(read_only()));
}

void Store::close() {
  in_flight_.close()->wait_until(nullptr);
  open_writes_.abort_all();
  if (group_commit_ != nullptr) group_commit_->close();  // from now on another process may open the journal
  slabs_->trim();
  slabs_->close(options_.durable ? Slabs::Files::stay : Slabs::Files::go);
}

void Store::begin(const CallPtr& call) {
  call->future->set_operation({&place_});  // unless its size is known: then it is registered
  in_flight_.begin(*call);
  add(counters_.pending);
  call->future->start();
}

void Store::end_part(const CallPtr& call, const std::exception_ptr& error) noexcept {
  if (error != nullptr) call->note_failure(error);
  if (!call->part_ended()) return;
  const CallPtr ended = call;
  counters_.pending.fetch_sub(1, std::memory_order_relaxed);
  ended->finish();
  in_flight_.end(*ended);
}

// ---- writing

void Store::write(WriteList&& writes, const CallPtr& call, Full when_full) {
  begin(call);
  if (options_.opening != Opening::write) return refuse(call);
  call->expect(writes.size() + 1);  // plus one for this function
  std::uint64_t charge = 0;
  for (const Write& write : writes) charge += Slabs::charge_of(write.memory.size());
  try {
    if (group_commit_ != nullptr && group_commit_->broken() != nullptr) std::rethrow_exception(group_commit_->broken());
    slabs_->reserve(charge);
  } catch (...) {
    call->expect(1);
    return end_part(call, std::current_exception());
  }
  index_.begin(writes);
  std::vector<Change> empty;
  for (Write& write : writes) {
    call->bytes += write.memory.size();
    if (write.memory.size() == 0) {
      call->part_released();
      if (write.digest && *write.digest != digest_of(nullptr, 0)) {
        fail_write(write, std::make_exception_ptr(not_as_given(write.key)));
      } else {
        empty.push_back(change_of(std::move(write), Extent(), nullptr, 0));
      }
      write.call = nullptr;
    } else if (write.memory.size() >= kSmall) {
      Writes one;
      one.push_back(std::move(write));
      put(std::move(one), false, when_full);
    }
  }
  std::erase_if(writes, [](const Write& write) { return write.call == nullptr; });  // keep the small ones
  if (call->device != nullptr) {  // not batched with tensors of other calls: each call has its own streams
    for (Writes& batch : WriteBatcher::cut(std::move(writes), batch_size_)) put(std::move(batch), false, when_full);
  } else if (!writes.empty()) {
    for (Writes& batch : write_batcher_.add(std::move(writes))) put(std::move(batch), true, when_full);
  }
  if (!empty.empty()) commit(std::move(empty));
  call->part_released();
  end_part(call, nullptr);
}

// Full::exceed: called on the engine's thread, which must not create a slab unless no other thread can be started.
void Store::put(Writes&& writes, bool is_batch, Full when_full) {
  if (std::vector<Extent> extents = slabs_->try_take(sizes_of(writes)); !extents.empty()) {
    return submit(std::move(writes), std::move(extents), is_batch, when_full);
  }
  if (when_full == Full::wait) return grow_and_put(std::move(writes), is_batch, when_full);
  ThreadCache::get().run_or_call("cudafuture-grow",
                                 [self = shared_from_this(), writes = std::move(writes), is_batch]() mutable {
                                   self->grow_and_put(std::move(writes), is_batch, Full::exceed);
                                 });
}

void Store::grow_and_put(Writes&& writes, bool is_batch, Full when_full) {
  std::vector<Extent> extents;
  try {
    extents = slabs_->take(sizes_of(writes));
  } catch (...) {
    if (writes.size() == 1) {
      slabs_->cancel_reservation(Slabs::charge_of(writes.front().memory.size()));
      fail_write(writes.front(), std::current_exception());
    } else {  // there may be room for some of them
      for (Write& write : writes) {
        Writes one;
        one.push_back(std::move(write));
        grow_and_put(std::move(one), false, when_full);
      }
    }
    if (is_batch) continue_batches();
    return;
  }
  submit(std::move(writes), std::move(extents), is_batch, when_full);
}

void Store::submit(Writes&& writes, std::vector<Extent>&& extents, bool is_batch, Full when_full) {
  const auto writing = std::make_shared<WriteJob>(WriteJob{std::move(writes), std::move(extents), nullptr, is_batch});
  const Extent& first = writing->extents.front();
  Request request;
  request.direction = Direction::write;
  request.file = first.slab().file;
  request.offset = first.offset();
  request.device = writing->writes.front().call->device;
  request.is_part = true;
  request.checksum = writing->checksum = checksum_of(writing->writes, options_.checksum);
  request.memory.reserve(writing->writes.size() + 1);  // plus the rest of the last page
  for (std::size_t i = 0; i < writing->writes.size(); ++i) {
    const Extent& extent = writing->extents[i];
    request.memory.skip(extent.offset() - first.offset() - request.memory.size());
    if (writing->checksum != nullptr) writing->checksum->add(request.memory.size(), extent.size());
    request.memory.add(std::move(writing->writes[i].memory));
  }
  request.memory.skip((kPage - request.memory.size() % kPage) % kPage);  // whole pages: nothing goes through the cache
  request.future = c10::make_intrusive<Future>(writing->writes.front().call->future->priority());
  request.future->promise_release();
  // Attach before submitting: later, attaching could have to wait for callbacks of this thread.
  then(request.future->released(), [writing](Future&) {
    for (const Write& write : writing->writes) write.call->part_released();
  });
  then(request.future, [self = shared_from_this(), writing](Future& done) { self->written(*writing, error_of(done)); });
  add(counters_.transfers);
  try {
    engine_->submit(std::move(request), when_full);
  } catch (...) {
    for (const Write& write : writing->writes) write.call->part_released();
    written(*writing, std::current_exception());
  }
}

void Store::written(WriteJob& writing, const std::exception_ptr& error) noexcept {
  std::vector<Change> changes;
  for (std::size_t i = 0; i < writing.writes.size(); ++i) {
    Write& write = writing.writes[i];
    const bool is_wrong = error == nullptr && write.digest && *write.digest != writing.checksum->digest(i);
    if (error != nullptr || is_wrong) {
      writing.extents[i] = Extent();
      fail_write(write, is_wrong ? std::make_exception_ptr(not_as_given(write.key)) : error);
      continue;
    }
    const Checksum* const kept = options_.checksum ? writing.checksum.get() : nullptr;
    changes.push_back(change_of(std::move(write), std::move(writing.extents[i]), kept, i));
  }
  writing.extents.clear();
  if (!changes.empty()) commit(std::move(changes));
  if (writing.is_batch) continue_batches();
}

void Store::continue_batches() noexcept {
  for (Writes& batch : write_batcher_.ended()) put(std::move(batch), true, Full::exceed);
}

void Store::fail_write(Write& write, const std::exception_ptr& error) noexcept {
  add(counters_.writes);
  index_.abort(write.key);
  if (write.call->atomic != nullptr) end_atomic(write.call, std::nullopt);
  end_part(write.call, error);
}

void Store::commit(std::vector<Change>&& changes) noexcept {
  std::vector<Change> ready;
  for (Change& change : changes) {
    if (const CallPtr call = change.call; call->atomic != nullptr) {
      end_atomic(call, std::move(change));
    } else {
      ready.push_back(std::move(change));
    }
  }
  if (!ready.empty()) commit_now(std::move(ready));
}

void Store::commit_now(std::vector<Change>&& changes) noexcept {
  if (group_commit_ != nullptr) {
    group_commit_->commit(std::move(changes));
  } else {
    install(changes, nullptr);
  }
}

// Ends one write of an atomic call. The last one makes all of them take effect, or none.
void Store::end_atomic(const CallPtr& call, std::optional<Change>&& change) noexcept {
  std::optional<AtomicWrite::Outcome> outcome = call->atomic->end(std::move(change));
  if (!outcome || outcome->changes.empty()) return;
  if (!outcome->has_failed) return commit_now(std::move(outcome->changes));
  for (Change& written : outcome->changes) {
    add(counters_.writes);
    index_.abort(written.key);
    written.entry = nullptr;
    end_part(written.call, nullptr);  // the error belongs to another part
  }
}

// Finishes each write, link and deletion: this is their last step.
void Store::install(std::vector<Change>& changes, const std::exception_ptr& error) noexcept {
  std::vector<EntryPtr> dropped = index_.finish(changes, error != nullptr, reach());
  for (Change& change : changes) {
    if (change.entry != nullptr && change.call->kind == Call::Kind::write) add(counters_.writes);
    change.entry = nullptr;
  }
  drop(std::move(dropped));  // their extents must be free before the calls end
  for (Change& change : changes) {
    if (change.written != nullptr) *change.written = error == nullptr;
    end_part(change.call, error);
  }
}

void Store::link(std::vector<Index::KeyLink>&& links, const CallPtr& call) {
  begin(call);
  if (options_.opening != Opening::write) return refuse(call);
  std::string missing;
  std::vector<Change> changes = index_.link(std::move(links), call, reach(), missing);
  if (!missing.empty()) call->note_failure(std::make_exception_ptr(no_such_key(missing)));
  call->expect(changes.size() + 1);
  if (!changes.empty()) commit_now(std::move(changes));
  end_part(call, nullptr);
}

void Store::erase(const std::vector<std::string>& keys, const CallPtr& call) {
  begin(call);
  if (options_.opening != Opening::write) return refuse(call);
  std::vector<Change> changes;
  std::string missing;
  for (const std::string& key : keys) {
    const Index::Deleted deleted = index_.erase(key);
    if (!deleted.was_there && missing.empty()) missing = key;
    if (deleted.was_there) changes.push_back({call, key, deleted.sequence, nullptr, nullptr});
  }
  if (!missing.empty()) call->note_failure(std::make_exception_ptr(no_such_key(missing)));
  call->expect(changes.size() + 1);
  if (!changes.empty()) commit(std::move(changes));
  end_part(call, nullptr);
}

// ---- reading

void Store::read(ReadList&& reads, const CallPtr& call, Full when_full) {
  begin(call);
  call->expect(reads.size() + 1);
  for (const Read& read : reads) {
    if (read.size() != 0) continue;
    if (read.digest != nullptr) *read.digest = digest_of(nullptr, 0);
    end_part(call, nullptr);
  }
  std::erase_if(reads, [](const Read& read) { return read.size() == 0; });
  // An urgent read does not wait in the coalescer, nor does a read of an engine that blocks callers.
  const bool may_wait = engine_->options().max_pending == 0 && call->future->priority() == 0;
  if (may_wait && reads.size() == 1 && reads.front().size() < kSmall && call->device == nullptr) {
    for (Reads& merged : read_coalescer_.add(std::move(reads.front()))) get(std::move(merged), true, when_full);
  } else {
    for (Reads& merged : ReadCoalescer::join(std::move(reads), batch_size_)) get(std::move(merged), false, when_full);
  }
  end_part(call, nullptr);
}

void Store::get(Reads&& reads, bool is_coalesced, Full when_full) {
  auto reading = std::make_shared<ReadJob>();
  reading->is_coalesced = is_coalesced;
  const Slab& slab = reads.front().entry->extent.slab();
  const std::uint64_t begin = reads.front().offset();
  if (slab.file == nullptr) {
    for (const Read& read : reads) end_part(read.call, slab.failure);
    if (is_coalesced) continue_reads();
    return;
  }
  Request request;
  request.direction = Direction::read;
  request.file = slab.file;
  request.offset = begin;
  request.device = reads.front().call->device;
  request.is_part = true;
  request.checksum = reading->checksum = checksum_of(reads, options_.checksum && any_verified(reads));
  request.memory.reserve(reads.size());
  for (Read& read : reads) {
    request.memory.skip(read.offset() - begin - request.memory.size());
    if (reading->checksum != nullptr) reading->checksum->add(request.memory.size(), read.size());
    request.memory.add(Memory(read.memory));
  }
  request.future = c10::make_intrusive<Future>(reads.front().call->future->priority());
  reading->reads = std::move(reads);
  then(request.future,
       [self = shared_from_this(), reading](Future& done) { self->was_read(*reading, error_of(done)); });
  add(counters_.transfers);
  try {
    engine_->submit(std::move(request), when_full);
  } catch (...) {
    was_read(*reading, std::current_exception());
  }
}

void Store::was_read(ReadJob& reading, const std::exception_ptr& error) noexcept {
  if (error != nullptr && reading.reads.size() > 1) {  // retry separately to find the read at fault
    for (Read& read : reading.reads) {
      Reads one;
      one.push_back(std::move(read));
      get(std::move(one), false, Full::exceed);
    }
    if (reading.is_coalesced) continue_reads();
    return;
  }
  for (std::size_t i = 0; i < reading.reads.size(); ++i) {
    Read& read = reading.reads[i];
    add(counters_.reads);
    const CallPtr call = std::move(read.call);
    const bool is_verified = read.is_verified && read.size() == read.entry->size();
    read.memory = Memory();  // before the call ends: device memory is freed with the call
    std::exception_ptr wrong = error;
    if (wrong == nullptr && reading.checksum != nullptr) {
      if (is_verified) wrong = check(read, reading.checksum->digest(i, read.entry->seed));
      if (read.digest != nullptr) *read.digest = reading.checksum->digest(i);
    }
    read.entry = nullptr;
    end_part(call, wrong);
  }
  if (reading.is_coalesced) continue_reads();
}

void Store::continue_reads() noexcept {
  for (Reads& merged : read_coalescer_.ended()) get(std::move(merged), true, Full::exceed);
}

std::exception_ptr Store::check(const Read& read, std::uint64_t digest) noexcept {
  const Entry& entry = *read.entry;
  if (!entry.has_digest || !options_.checksum || entry.digest == digest) return nullptr;
  add(counters_.checksum_errors);
  const Extent& extent = entry.extent;
  return std::make_exception_ptr(not_as_written(read.key, extent.slab().file->path(), extent.offset(), entry.size()));
}

StoreStatistics Store::statistics() const {
  const std::uint64_t journal_bytes = group_commit_ == nullptr ? 0 : group_commit_->journal_bytes();
  return statistics_of(counters_, index_.statistics(), slabs_->statistics(), journal_bytes);
}

}  // namespace cudafuture::store
