#include "store/service/upload.h"

#include <algorithm>
#include <exception>
#include <limits>
#include <string>
#include <utility>

#include "api/thread.h"

namespace rpc_ext::store {
namespace {

constexpr std::size_t kRemembered = 4096;  // uploads that failed

Problem session_has_ended() { return {.kind = Problem::Kind::invalid_state, .message = "the session has ended"}; }

}  // namespace

// ---- Uploads

bool Uploads::put(const KeyEntry& entry, at::Tensor data, Ended ended) {
  std::shared_ptr<Upload> upload;
  std::optional<Problem> problem;
  bool is_new = false;
  {
    const std::lock_guard lock(mutex_);
    if (has_ended_) {
      problem = session_has_ended();
    } else if (const auto failed = failures_.find(entry.sequence); failed != failures_.end()) {
      problem = failed->second;
    } else {
      std::shared_ptr<Upload>& found = uploads_[entry.sequence];
      is_new = found == nullptr;
      if (is_new) found = std::make_shared<Upload>(shared_from_this(), entry);
      upload = found;
    }
  }
  if (problem) {
    data.reset();
    ended(&*problem, false);
    return false;
  }
  upload->put(entry, std::move(data), std::move(ended));
  if (is_new) upload->begin();
  return is_new;
}

void Uploads::fail(std::uint64_t sequence, const Problem& problem) {
  std::shared_ptr<Upload> upload;
  {
    const std::lock_guard lock(mutex_);
    const auto found = uploads_.find(sequence);
    if (found == uploads_.end()) return note_failure(sequence, problem);
    upload = found->second;
  }
  upload->fail(problem);
}

void Uploads::end() {
  std::vector<std::shared_ptr<Upload>> uploads;
  {
    const std::lock_guard lock(mutex_);
    has_ended_ = true;
    for (const auto& [sequence, upload] : uploads_) uploads.push_back(upload);
  }
  for (const auto& upload : uploads) upload->fail(session_has_ended());
}

double Uploads::find_expired(UploadList& expired) const {
  double due = std::numeric_limits<double>::infinity();
  const std::lock_guard lock(mutex_);
  for (const auto& [sequence, upload] : uploads_) {
    const double left = order->left(upload->expires());
    if (left > 0) {
      due = std::min(due, left);
    } else {
      expired.push_back(upload);
    }
  }
  return due;
}

void Uploads::forget(std::uint64_t sequence, const Problem* problem) {
  std::shared_ptr<Upload> forgotten;  // dropped without the lock
  const std::lock_guard lock(mutex_);
  if (const auto found = uploads_.find(sequence); found != uploads_.end()) {
    forgotten = std::move(found->second);
    uploads_.erase(found);
  }
  if (problem != nullptr) note_failure(sequence, *problem);
}

void Uploads::note_failure(std::uint64_t sequence, const Problem& problem) {
  if (failures_.insert_or_assign(sequence, problem).second) failed_.push_back(sequence);
  if (failed_.size() <= kRemembered) return;
  failures_.erase(failed_.front());
  failed_.pop_front();
}

// ---- Upload

void Upload::begin() {
  if (const auto problem = uploads_->order->late(first_.expires)) return never_begin(*problem);
  try {
    api::call_elsewhere([self = shared_from_this()] { self->begin_now(); });
  } catch (...) {
    never_begin(api::problem_of(std::current_exception()));
  }
}

void Upload::never_begin(const Problem& problem) {
  fail(problem);
  uploads_->order->pass_on(first_.key, first_.sequence);
}

// Begins the write of the store, and enters the order of the key's operations.
void Upload::begin_now() {
  if (const auto problem = begin_write()) return never_begin(*problem);
  uploads_->order->enqueue(
      first_, uploads_->space->queues, true,
      [self = shared_from_this()](const std::optional<Problem>& problem) { self->take_turn(problem); });
  std::vector<Part> parts;
  {
    const std::lock_guard lock(mutex_);
    parts.swap(waiting_);
  }
  for (Part& part : parts) write(std::move(part));
}

// Takes quota, and room in the store. An upload that was aborted meanwhile keeps neither.
std::optional<Problem> Upload::begin_write() {
  Namespace& space = *uploads_->space;
  if (auto problem = space.take(first_.nbytes)) return problem;
  try {
    auto write = space.store()->begin_write(space.name_of(first_.key), first_.dtype, first_.sizes);
    const std::lock_guard lock(mutex_);
    if (!is_over_) {
      write_ = std::move(write);
      return std::nullopt;
    }
  } catch (...) {
    space.give_back(first_.nbytes);
    return api::problem_of(std::current_exception());
  }
  space.give_back(first_.nbytes);
  return error_;
}

void Upload::take_turn(const std::optional<Problem>& problem) {
  if (problem) return fail(*problem);
  bool is_over = false;
  {
    const std::lock_guard lock(mutex_);
    has_turn_ = true;
    is_over = is_over_;
  }
  if (is_over) {
    uploads_->space->queues.leave(first_.key);
  } else {
    commit_if_whole();
  }
}

void Upload::put(const KeyEntry& entry, at::Tensor data, Uploads::Ended ended) {
  Part part{entry, std::move(data), std::move(ended)};
  std::optional<Problem> problem;
  const bool matches = entry.key == first_.key && entry.dtype == first_.dtype && entry.sizes == first_.sizes;
  if (!matches) {
    problem = Problem{.kind = Problem::Kind::value,
                      .message = "key '" + entry.key + "': other parts of that tensor are of key '" + first_.key + "'"};
  } else {
    const std::lock_guard lock(mutex_);
    if (write_ == nullptr && !is_over_) return waiting_.push_back(std::move(part));
    problem = error_;
  }
  if (problem) return refuse(part, *problem, !matches);
  write(std::move(part));
}

void Upload::write(Part&& part) {
  const auto held = std::make_shared<Part>(std::move(part));
  const KeyEntry& entry = held->entry;
  const auto* const from = static_cast<const std::byte*>(held->data.const_data_ptr()) + entry.at;
  try {
    write_->put(std::uint64_t{entry.part} * kPart, from, entry.length, entry.digest,
                [self = shared_from_this(), held](const Problem* problem) { self->end_part(*held, problem); });
  } catch (...) {
    const Problem problem = api::problem_of(std::current_exception());
    const bool is_refused = problem.kind == Problem::Kind::value;  // it is a duplicate
    refuse(*held, is_refused ? problem : error().value_or(problem), is_refused);
  }
}

void Upload::end_part(Part& part, const Problem* problem) {
  part.data.reset();  // the memory is free before the client learns of it
  if (problem != nullptr) {
    const bool is_refused = problem->kind == Problem::Kind::checksum;
    const Problem told = is_refused ? bytes_differ(part.entry.key, part.entry.length) : *problem;
    fail(told);
    return refuse(part, error().value_or(told), is_refused);
  }
  std::optional<Problem> aborted;
  bool is_last = false;
  {
    const std::lock_guard lock(mutex_);
    is_last = --left_ == 0 && !is_over_;
    if (is_last) last_ = std::move(part.ended);
    aborted = error_;  // the store has written the part even so
  }
  if (is_last) return commit_if_whole();
  part.ended(aborted ? &*aborted : nullptr, false);
}

void Upload::commit_if_whole() {
  {
    const std::lock_guard lock(mutex_);
    if (!has_turn_ || !last_ || is_over_) return;
    is_over_ = true;
  }
  if (const auto problem = uploads_->order->late(first_.expires)) {
    write_->abort();
    return settle(&*problem);
  }
  try {
    write_->commit([self = shared_from_this()](const Problem* problem) { self->settle(problem); });
  } catch (...) {
    const Problem problem = api::problem_of(std::current_exception());
    settle(&problem);
  }
}

// Ends the upload, which has all of its parts and was at the head of the key's queue.
void Upload::settle(const Problem* problem) {
  Namespace& space = *uploads_->space;
  uploads_->forget(first_.sequence, problem);
  space.settle(first_.key, first_.nbytes, problem == nullptr, space.next_order());
  last_(problem, false);
  space.queues.leave(first_.key);
}

void Upload::fail(const Problem& problem) {
  std::shared_ptr<api::MultipartWrite> write;
  std::vector<Part> waiting;
  Uploads::Ended last;
  bool has_turn = false;
  {
    const std::lock_guard lock(mutex_);
    if (is_over_) return;
    is_over_ = true;
    error_ = problem;
    write = write_;
    waiting.swap(waiting_);
    last.swap(last_);
    has_turn = has_turn_;
  }
  if (write != nullptr) write->abort();
  uploads_->forget(first_.sequence, &problem);
  if (write != nullptr) uploads_->space->give_back(first_.nbytes);
  for (Part& part : waiting) refuse(part, problem, false);
  if (last) last(&problem, false);
  if (has_turn) uploads_->space->queues.leave(first_.key);
}

void Upload::expire() {
  fail({.kind = Problem::Kind::timeout,
        .message = "the write of key '" + first_.key + "' was not complete before its deadline"});
}

std::optional<Problem> Upload::error() {
  const std::lock_guard lock(mutex_);
  return error_;
}

// Ends a part that was not written.
void Upload::refuse(Part& part, const Problem& problem, bool is_refused) {
  part.data.reset();
  part.ended(&problem, is_refused);
}

}  // namespace rpc_ext::store
