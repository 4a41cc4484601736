#include "core/future.h"

#include <algorithm>
#include <utility>

#include "core/callback_thread.h"
#include "core/coarse_clock.h"
#include "core/completion_queue.h"
#include "core/facts.h"
#include "core/process.h"
#include "core/reaper.h"

namespace cudafuture {
namespace {

std::atomic<UnseenFailureHook> unseen_failure{nullptr};
std::atomic<bool> has_failed{false};

// Abandons continuations that will not run. Foreign ones are destroyed inside the interpreter.
void abandon_all(Continuation* list) noexcept {
  if (list == nullptr) return;
  if (foreign_runtime().inside()) {
    reap_continuations(list);
  } else {
    CallbackThread::get().post_abandon(list);
  }
}

// Releases waiters outside the interpreter, because the woken threads need its lock at once.
void release_all(Waiter* waiters) noexcept {
  const ForeignRuntime& runtime = foreign_runtime();
  void* const state = runtime.step_out();
  while (waiters != nullptr) {
    Waiter* const next = waiters->next;
    waiters->release();
    waiters = next;
  }
  runtime.step_in(state);
}

}  // namespace

void set_unseen_failure_hook(UnseenFailureHook hook) noexcept { unseen_failure.store(hook, std::memory_order_relaxed); }

Future::Future(int priority, Lifetime lifetime) noexcept
    : lifetime_(lifetime), priority_(priority), born_(coarse_time()), completed_at_(host_time()) {
  mark_used();
  trace(TraceEvent::created, *this);
}

void Future::release_resources() { end_operation(find_rare()); }

Future::~Future() {
  const UnseenFailureHook report = unseen_failure.load(std::memory_order_relaxed);
  if (report != nullptr && claim_failure_report()) {
    Rare* const rare = find_rare();
    report(*this, std::move(value_), rare == nullptr ? Foreign() : std::move(rare->origin));
  }
  if (is_shut_down()) leak_tensors();
  abandon_all(continuations_.take_all());
  delete find_rare();
}

// The thread that drops the last reference to a tensor may have to enter the interpreter, which now ends threads that
// enter. That thread must not be an engine's that still works on these tensors, so the tensors are leaked.
void Future::leak_tensors() noexcept {
  if (!value_.native.isNone()) static_cast<void>(new c10::IValue(std::move(value_.native)));
  Rare* const rare = find_rare();
  if (rare != nullptr) static_cast<void>(rare->named_tensors.release());
}

std::chrono::nanoseconds Future::age() const noexcept { return std::chrono::nanoseconds(coarse_time() - born_); }

// ---- consumer

bool Future::running() const noexcept {
  std::lock_guard lock(mutex_);
  return started_ && !done();
}

bool Future::wait_until(const Clock::time_point* deadline) {
  if (done()) return true;
  Waiter waiter;
  if (!add(waiter) || waiter.wait(deadline)) return true;
  remove(waiter);
  return done();
}

bool Future::add(Waiter& waiter) {
  std::lock_guard lock(mutex_);
  if (done()) return false;
  waiter.next = waiters_;
  waiters_ = &waiter;
  return true;
}

void Future::remove(Waiter& waiter) noexcept {
  std::unique_lock lock(mutex_);
  for (Waiter** link = &waiters_; *link != nullptr; link = &(*link)->next) {
    if (*link == &waiter) {
      *link = waiter.next;
      return;
    }
  }
  lock.unlock();
  // The completing thread may still use the waiter: wait for its release before the memory goes away.
  waiter.wait(nullptr);
}

// Removes moot continuations. A future that stays pending for long would otherwise keep the continuations of all
// children that were created and cancelled. A sweep each time the list has doubled costs constant time per
// continuation.
ContinuationList Future::sweep() noexcept {
  ContinuationList moot;
  if (++attached_ < sweep_at_) return moot;
  attached_ =
      static_cast<std::uint32_t>(continuations_.take_if([](const Continuation& c) { return c.is_moot(); }, moot));
  sweep_at_ = std::max(kFirstSweep, 2 * attached_);
  return moot;
}

void Future::attach(Continuation* c) {
  if (c->executor != nullptr) c->executor->enrol(*c);
  if (is_traced()) [[unlikely]] {
    if (const Future* const dependent = c->dependent()) trace(TraceEvent::follows, *dependent, {this});
  }
  if (!done()) {
    std::unique_lock lock(mutex_);
    if (!done()) {
      continuations_.push(c);
      ContinuationList moot = sweep();
      lock.unlock();
      abandon_all(moot.take_all());
      return;
    }
  }
  c->next = nullptr;
  CompletionQueue::dispatch(*this, c);
}

bool Future::detach(const Continuation* c) noexcept {
  return detach_if([c](const Continuation& other) { return &other == c; }) != nullptr;
}

// ---- once done

std::vector<c10::Device> Future::devices() const {
  if (is_bounded()) return bounding_set();
  return done() ? events_.devices() : std::vector<c10::Device>();
}

const std::vector<at::Tensor>& Future::named_tensors() const noexcept {
  static const std::vector<at::Tensor> none;
  const Rare* rare = find_rare();
  return rare == nullptr || rare->named_tensors == nullptr ? none : *rare->named_tensors;
}

// Returns the sources, or null while more may be added.
const AsyncErrors* Future::async_errors() const noexcept {
  const Rare* rare = done() ? find_rare() : nullptr;
  return rare == nullptr || rare->async_errors.empty() ? nullptr : &rare->async_errors;
}

// Returns true if there is a late error. The host learns nothing about captured work.
bool Future::poll_async_errors() noexcept {
  const AsyncErrors* const errors = async_errors();
  if (errors != nullptr && !events_.is_captured()) {
    if (std::exception_ptr error = errors->error()) set_late_error(std::move(error));
  }
  return has_late_error_.load(std::memory_order_acquire);
}

bool Future::device_work_finished() noexcept {
  if (!done()) return false;
  if (poll_async_errors() || events_.empty() || events_.is_captured() || !stands(SyncEdge::host_query)) return true;
  try {
    if (!events_.query()) return false;
  } catch (...) {
    set_late_error(std::current_exception());
    return note_ready();
  }
  const AsyncErrors* const errors = async_errors();
  if (errors == nullptr) return note_ready();
  const bool is_decided = errors->confirm();  // after the query: an abort ends device work, too
  return (poll_async_errors() || is_decided) && note_ready();
}

// Returns true, and lets a tracer know, once.
bool Future::note_ready() noexcept {
  if (is_traced() && !is_ready_traced_.exchange(true)) trace(TraceEvent::ready, *this);
  return true;
}

std::exception_ptr Future::late_error() {
  if (!poll_async_errors()) return nullptr;
  std::lock_guard lock(mutex_);
  return find_rare()->late_error;
}

void Future::consumed() const {
  if (const AsyncErrors* const errors = async_errors()) errors->consumed();
}

void Future::set_late_error(std::exception_ptr error) noexcept {
  std::lock_guard lock(mutex_);
  if (rare().late_error == nullptr) rare().late_error = std::move(error);
  has_late_error_.store(true, std::memory_order_release);
}

bool Future::any_has_failed() noexcept { return has_failed.load(std::memory_order_relaxed); }

// ---- producer

bool Future::finish(State outcome, Value&& value, EventSet&& events, std::vector<at::Tensor>&& named) {
  Continuation* list;
  Waiter* waiters;
  std::shared_ptr<Producer> producer;  // dropped after the lock is released
  Rare* rare;
  const HostTime now = host_time();
  {
    std::lock_guard lock(mutex_);
    if (done() || (outcome == State::cancelled && started_)) return false;
    value_ = std::move(value);
    events_ = std::move(events);
    if (now.generation != 0) completed_at_ = later_of(completed_at_, now);
    if (!named.empty()) this->rare().named_tensors = std::make_unique<std::vector<at::Tensor>>(std::move(named));
    rare = find_rare();
    if (rare != nullptr) producer = std::move(rare->producer);
    list = continuations_.take_all();
    waiters = std::exchange(waiters_, nullptr);
    state_.store(outcome, std::memory_order_release);
  }
  trace(TraceEvent::done, *this);  // before the waiters go on: they may end the recording
  end_operation(rare);
  if (waiters != nullptr) release_all(waiters);
  if (producer != nullptr) producer->finished(*this);
  if (list != nullptr) CompletionQueue::dispatch(*this, list);
  return true;
}

bool Future::complete(Value&& value, EventSet&& events, std::vector<at::Tensor>&& named) {
  return finish(State::completed, std::move(value), std::move(events), std::move(named));
}

bool Future::fail(Value&& error, EventSet&& events) {
  has_failed.store(true, std::memory_order_relaxed);
  return finish(State::failed, std::move(error), std::move(events), {});
}

bool Future::start() noexcept {
  std::lock_guard lock(mutex_);
  if (done()) return false;
  started_ = true;
  return true;
}

void Future::give_back() noexcept {
  std::lock_guard lock(mutex_);
  started_ = false;
}

bool Future::cancel(Value&& reason) {
  std::shared_ptr<Producer> producer;
  {
    std::lock_guard lock(mutex_);
    if (done() || started_) return false;
    if (Rare* rare = find_rare()) producer = rare->producer;
  }
  if (producer != nullptr && !producer->cancel(*this)) return false;
  return finish(State::cancelled, std::move(reason), {}, {}) || state() == State::cancelled;
}

// ---- the pointer that keeps the memory only

WeakFuture::WeakFuture(Future& future) noexcept : future_(&future) { c10::raw::weak_intrusive_ptr::incref(future_); }
WeakFuture::~WeakFuture() {
  if (future_ != nullptr) c10::raw::weak_intrusive_ptr::decref(future_);
}
std::size_t WeakFuture::owners() const noexcept { return c10::raw::weak_intrusive_ptr::use_count(future_); }

// ---- for the binding

int Future::visit(ForeignVisitor visitor) {
  std::lock_guard lock(mutex_);
  for (Continuation* c = continuations_.head(); c != nullptr; c = c->next) {
    if (const int stop = c->visit(visitor)) return stop;
  }
  const Rare* rare = find_rare();
  if (rare != nullptr) {
    if (const int stop = rare->producer == nullptr ? 0 : rare->producer->visit(visitor)) return stop;
    if (const int stop = visitor(rare->kept.get())) return stop;
  }
  if (const int stop = visitor(origin())) return stop;
  if (const int stop = visitor(value_.object.get())) return stop;
  return visitor(value_.traceback.get());
}

std::vector<WeakFuture> Future::dependents() const {
  std::vector<WeakFuture> futures;
  std::lock_guard lock(mutex_);
  for (Continuation* c = continuations_.head(); c != nullptr; c = c->next) {
    if (Future* const dependent = c->dependent()) futures.emplace_back(*dependent);
  }
  return futures;
}

std::vector<CombinationPart> Future::parts() const {
  std::vector<CombinationPart> parts;
  std::lock_guard lock(mutex_);
  const Rare* const rare = find_rare();
  if (rare != nullptr && rare->producer != nullptr) rare->producer->add_parts(parts);
  return parts;
}

void Future::clear() noexcept {
  Continuation* list;
  std::shared_ptr<Producer> producer;
  Foreign object;
  Foreign traceback;
  Foreign origin;
  Foreign kept;
  {
    std::lock_guard lock(mutex_);
    list = continuations_.take_all();
    if (Rare* rare = find_rare()) {
      producer = std::move(rare->producer);
      origin = std::move(rare->origin);
      kept = std::move(rare->kept);
    }
    object = std::move(value_.object);
    traceback = std::move(value_.traceback);
    seen_ = true;
  }
  reap_continuations(list);
}

}  // namespace cudafuture
