// Reads of a store: of whole tensors, and of parts of them.
#include <exception>
#include <optional>
#include <utility>

#include "storage/counter.h"
#include "storage/failure.h"
#include "storage/store.h"
#include "storage/then.h"

namespace cudafuture::storage {

// What the engine is asked to read at once.
struct Store::Reading {
  Reads reads;
  std::shared_ptr<Checksum> checksum;
  bool is_gated;
};

void Store::read(ReadList&& reads, const CallPtr& call) {
  begin(call);
  call->expect(reads.size() + 1);
  for (const Read& read : reads) {
    if (read.size() != 0) continue;
    if (read.digest != nullptr) *read.digest = digest_of(nullptr, 0);
    end_part(call, nullptr);
  }
  std::erase_if(reads, [](const Read& read) { return read.size() == 0; });
  // Neither an urgent read waits in the gate, nor one of an engine that blocks callers.
  const bool may_wait = engine_->options().max_pending == 0 && call->future->priority() == 0;
  if (may_wait && reads.size() == 1 && reads.front().size() < kSmall && call->device == nullptr) {
    for (Reads& together : gate_.add(std::move(reads.front()))) get(std::move(together), true, Full::wait);
  } else {
    for (Reads& together : Gate::join(std::move(reads), pack_size_)) get(std::move(together), false, Full::wait);
  }
  end_part(call, nullptr);
}

void Store::get(Reads&& reads, bool is_gated, Full when_full) {
  auto reading = std::make_shared<Reading>();
  reading->is_gated = is_gated;
  const Slab& slab = reads.front().entry->place.slab();
  const std::uint64_t begin = reads.front().offset();
  if (slab.file == nullptr) {
    for (const Read& read : reads) end_part(read.call, slab.failure);
    if (is_gated) go_on_with_reads();
    return;
  }
  Request request;
  request.direction = Direction::read;
  request.file = slab.file;
  request.offset = begin;
  request.device = reads.front().call->device;
  request.is_part = true;
  request.checksum = reading->checksum = checksum_of(reads, options_.checksum);
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

void Store::was_read(Reading& reading, const std::exception_ptr& error) noexcept {
  if (error != nullptr && reading.reads.size() > 1) {  // whose fault was it?
    for (Read& read : reading.reads) {
      Reads one;
      one.push_back(std::move(read));
      get(std::move(one), false, Full::exceed);
    }
    if (reading.is_gated) go_on_with_reads();
    return;
  }
  for (std::size_t i = 0; i < reading.reads.size(); ++i) {
    Read& read = reading.reads[i];
    add(counters_.reads);
    const CallPtr call = std::move(read.call);
    const bool is_whole = read.size() == read.entry->size();
    read.memory = Memory();  // before the call ends: what is on a device has to die with what the call keeps
    std::exception_ptr wrong = error;
    if (wrong == nullptr && reading.checksum != nullptr) {
      if (is_whole) wrong = check(read, reading.checksum->digest(i, read.entry->seed));
      if (read.digest != nullptr) *read.digest = reading.checksum->digest(i);
    }
    read.entry = nullptr;
    end_part(call, wrong);
  }
  if (reading.is_gated) go_on_with_reads();
}

void Store::go_on_with_reads() noexcept {
  for (Reads& together : gate_.ended()) get(std::move(together), true, Full::exceed);
}

std::exception_ptr Store::check(const Read& read, std::uint64_t digest) noexcept {
  const Entry& entry = *read.entry;
  if (!entry.has_digest || !options_.checksum || entry.digest == digest) return nullptr;
  add(counters_.checksum_errors);
  const Place& place = entry.place;
  return std::make_exception_ptr(not_as_written(read.key, place.slab().file->path(), place.offset(), entry.size()));
}

}  // namespace cudafuture::storage
