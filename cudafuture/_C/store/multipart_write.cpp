#include "store/multipart_write.h"

#include <algorithm>
#include <utility>

#include "core/error.h"
#include "core/process.h"
#include "io/failure.h"
#include "io/page.h"
#include "store/function_continuation.h"
#include "store/store.h"

namespace cudafuture::store {

using namespace io;

namespace {

constexpr std::uint64_t kLeaf = Checksum::kLeaf;

Extent reserve_and_take(Slabs& slabs, std::uint64_t size) {
  if (size == 0) return {};
  slabs.reserve(Slabs::charge_of(size));
  try {
    return std::move(slabs.take({size}).front());
  } catch (...) {
    slabs.cancel_reservation(Slabs::charge_of(size));
    throw;
  }
}

}  // namespace

struct MultipartWrite::Part {
  CallPtr call;
  std::uint64_t at;
  std::optional<std::uint64_t> digest;
  std::shared_ptr<Checksum> checksum;
};

std::shared_ptr<MultipartWrite> MultipartWrite::begin(const std::shared_ptr<Store>& store, const std::string& key,
                                                      const Shape& shape, std::uint64_t size) {
  Call call;
  call.kind = Call::Kind::read;  // Store::close() waits for this function, and flush() does not
  store->in_flight_.begin(call);
  std::shared_ptr<MultipartWrite> write;
  try {
    if (store->options_.opening != Opening::write) throw store->read_only();
    if (store->group_commit_ != nullptr && store->group_commit_->broken() != nullptr) {
      std::rethrow_exception(store->group_commit_->broken());
    }
    write = std::make_shared<MultipartWrite>(store, Write{nullptr, key, shape, {}}, size,
                                             reserve_and_take(*store->slabs_, size));
    store->open_writes_.add(write);
  } catch (...) {
    store->in_flight_.end(call);
    throw;
  }
  store->in_flight_.end(call);
  return write;
}

MultipartWrite::MultipartWrite(std::shared_ptr<Store> store, Write&& write, std::uint64_t size, Extent&& extent)
    : store_(std::move(store)),
      key_(write.key),
      size_(size),
      extent_(std::move(extent)),
      missing_(size),
      claimed_((size + kLeaf - 1) / kLeaf),
      write_(std::move(write)) {
  checksum_.add(0, size);
}

MultipartWrite::~MultipartWrite() {
  if (!is_forked_child()) store_->open_writes_.remove(this);
}

Engine& MultipartWrite::engine() const noexcept { return store_->engine(); }

void MultipartWrite::expect_open() const {
  if (state_ == State::open) return;
  const std::string how = state_ == State::committing ? "was committed" : "was aborted";
  throw Error(ErrorKind::invalid_state, "the multipart write of key '" + key_ + "' " + how);
}

bool MultipartWrite::has_part(std::uint64_t at, std::uint64_t size) const noexcept {
  if (at > size_ || size > size_ - at) return false;
  return at % kLeaf == 0 && ((at + size) % kLeaf == 0 || at + size == size_);
}

std::string MultipartWrite::not_a_part(const std::string& at, std::uint64_t size) const {
  return "a part of " + std::to_string(size) + " bytes at byte " + at + " of a tensor of " + std::to_string(size_) +
         " must lie in the tensor, begin at a multiple of 64 KiB, and end at one or with the tensor";
}

std::string MultipartWrite::put_before(std::uint64_t at, std::uint64_t size) {
  return "some of the " + std::to_string(size) + " bytes at byte " + std::to_string(at) + " belong to an earlier part";
}

bool MultipartWrite::claim(std::uint64_t at, std::uint64_t size) {
  const auto begin = claimed_.begin() + static_cast<std::ptrdiff_t>(at / kLeaf);
  const auto end = begin + static_cast<std::ptrdiff_t>((size + kLeaf - 1) / kLeaf);
  if (std::find(begin, end, true) != end) return false;
  std::fill(begin, end, true);
  missing_ -= size;
  return true;
}

// Notes that a part, or commit(), is not in flight any more. Returns true if finish() must follow.
bool MultipartWrite::leave(const std::exception_ptr& error, Extent& dropped) noexcept {
  std::lock_guard lock(mutex_);
  if (failure_ == nullptr) failure_ = error;
  if (--in_flight_ != 0) return false;
  if (state_ == State::aborted) dropped = std::move(extent_);
  return state_ == State::committing;
}

bool MultipartWrite::put(std::uint64_t at, Memory&& memory, std::optional<std::uint64_t> digest, const CallPtr& call,
                         Engine::Full when_full) {
  {
    std::lock_guard lock(mutex_);
    expect_open();
    if (!claim(at, memory.size())) return false;
    ++in_flight_;
  }
  try {
    store_->begin(call);
  } catch (...) {  // the store is closed
    abort();
    Extent dropped;
    if (leave(std::current_exception(), dropped)) finish();
    throw;
  }
  call->expect(1);
  call->bytes = memory.size();
  const auto part = std::make_shared<Part>(Part{call, at, digest, std::make_shared<Checksum>()});
  part->checksum->add(0, memory.size());
  if (memory.size() == 0) {
    ended(*part, nullptr);
  } else {
    submit(part, std::move(memory), when_full);
  }
  return true;
}

void MultipartWrite::submit(const std::shared_ptr<Part>& part, Memory&& memory, Engine::Full when_full) {
  const CallPtr& call = part->call;
  Request request;
  request.direction = Direction::write;
  request.file = extent_.slab().file;
  request.offset = extent_.offset() + part->at;
  request.is_part = true;
  request.checksum = part->checksum;
  request.memory = std::move(memory);
  request.memory.skip((kPage - request.memory.size() % kPage) % kPage);  // whole pages: nothing goes through the cache
  request.future = c10::make_intrusive<Future>(call->future->priority());
  request.future->promise_release();
  then(request.future->released(), [call](Future&) { call->part_released(); });
  then(request.future, [self = shared_from_this(), part](Future& done) { self->ended(*part, error_of(done)); });
  add(store_->counters_.transfers);
  try {
    store_->engine_->submit(std::move(request), when_full);
  } catch (...) {
    call->part_released();
    ended(*part, std::current_exception());
  }
}

void MultipartWrite::ended(const Part& part, std::exception_ptr error) noexcept {
  if (error == nullptr && part.digest && *part.digest != part.checksum->digest(0)) {
    error = std::make_exception_ptr(not_as_given(key_));
  }
  if (error == nullptr) checksum_.copy(part.at, *part.checksum);  // no leaf belongs to two parts
  Extent dropped;
  const bool finishes = leave(error, dropped);
  dropped = Extent();  // the extent must be free before the call ends
  store_->end_part(part.call, error);
  if (finishes) finish();
}

void MultipartWrite::commit(std::optional<std::uint64_t> digest, const CallPtr& call) {
  {
    std::lock_guard lock(mutex_);
    expect_open();
    state_ = State::committing;
    ++in_flight_;
    if (missing_ != 0 && failure_ == nullptr) {
      failure_ = std::make_exception_ptr(
          Error(ErrorKind::invalid_state, "the multipart write of key '" + key_ +
                                              "' cannot be committed: " + std::to_string(missing_) + " of " +
                                              std::to_string(size_) + " bytes were not put"));
    }
  }
  Extent dropped;
  try {
    store_->begin(call);
  } catch (...) {  // the store is closed
    {
      std::lock_guard lock(mutex_);
      state_ = State::aborted;
    }
    leave(nullptr, dropped);
    throw;
  }
  call->expect(1);
  call->bytes = size_;
  write_.call = call;
  write_.digest = digest;
  WriteList one;
  one.push_back(std::move(write_));
  store_->index_.begin(one);
  write_ = std::move(one.front());
  if (leave(nullptr, dropped)) finish();
}

void MultipartWrite::finish() noexcept {
  std::exception_ptr error = failure_;
  if (error == nullptr && write_.digest && *write_.digest != checksum_.digest(0)) {
    error = std::make_exception_ptr(not_as_given(key_));
  }
  Extent extent = std::move(extent_);
  Write write = std::move(write_);
  if (error != nullptr) {
    extent = Extent();  // the extent must be free before the call ends
    store_->fail_write(write, error);
    return;
  }
  const bool has_digest = size_ != 0 && store_->options_.checksum;
  std::vector<Change> changes;
  changes.push_back(change_of(std::move(write), std::move(extent), has_digest ? &checksum_ : nullptr, 0));
  store_->commit_now(std::move(changes));
}

void MultipartWrite::abort() noexcept {
  if (is_forked_child()) return;
  Extent dropped;
  std::lock_guard lock(mutex_);
  if (state_ != State::open) return;
  state_ = State::aborted;
  if (in_flight_ == 0) dropped = std::move(extent_);
}

// ---- the multipart writes of a store

void OpenWrites::add(const std::shared_ptr<MultipartWrite>& write) {
  std::lock_guard lock(mutex_);
  writes_.emplace(write.get(), write);
}

void OpenWrites::remove(const MultipartWrite* write) noexcept {
  std::lock_guard lock(mutex_);
  writes_.erase(write);
}

void OpenWrites::abort_all() noexcept {
  std::vector<std::shared_ptr<MultipartWrite>> writes;
  {
    std::lock_guard lock(mutex_);
    for (const auto& [address, write] : writes_) writes.push_back(write.lock());
  }
  for (const std::shared_ptr<MultipartWrite>& write : writes) {
    if (write != nullptr) write->abort();
  }
}

}  // namespace cudafuture::store
