#include "core/future.h"

#include <time.h>

#include <algorithm>
#include <utility>

#include "core/callback_thread.h"
#include "core/completion_queue.h"
#include "core/process.h"
#include "core/reaper.h"

namespace cudafuture {
namespace {

UnseenFailureHook unseen_failure = nullptr;

std::uint64_t coarse_now() noexcept {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC_COARSE, &t);
  return static_cast<std::uint64_t>(t.tv_sec) * 1'000'000'000u + static_cast<std::uint64_t>(t.tv_nsec);
}

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

// Fields that most futures do not need.
struct Future::Rare {
  std::unique_ptr<std::vector<c10::Device>> bounding_set;  // null: unbounded
  Executor* executor = nullptr;
  std::shared_ptr<Producer> producer;
  Foreign origin;
  Foreign kept;
  AsyncErrors async_errors;
  std::exception_ptr late_error;
  FuturePtr released;
  std::unique_ptr<std::vector<at::Tensor>> named_tensors;  // null: none
};

const char* name_of(State state) noexcept {
  switch (state) {
    case State::pending:
      return "pending";
    case State::completed:
      return "completed";
    case State::failed:
      return "failed";
    case State::cancelled:
      return "cancelled";
  }
  return "?";
}

void set_unseen_failure_hook(UnseenFailureHook hook) noexcept { unseen_failure = hook; }

Future::Future(int priority, Lifetime lifetime) noexcept
    : lifetime_(lifetime), priority_(priority), born_(coarse_now()), completed_at_(host_time()) {
  mark_used();
  trace(TraceEvent::created, *this);
}

Future::~Future() {
  if (state() == State::failed && !seen_.load(std::memory_order_relaxed) && unseen_failure != nullptr) {
    Rare* const rare = find_rare();
    unseen_failure(std::move(value_), name(), rare == nullptr ? Foreign() : std::move(rare->origin));
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

Future::Rare& Future::rare() {
  if (rare_.load(std::memory_order_relaxed) == nullptr) rare_.store(new Rare, std::memory_order_release);
  return *rare_.load(std::memory_order_relaxed);
}

// ---- facts

bool Future::is_bounded() const noexcept {
  const Rare* rare = find_rare();
  return rare != nullptr && rare->bounding_set != nullptr;
}

const std::vector<c10::Device>& Future::bounding_set() const noexcept {
  static const std::vector<c10::Device> none;
  const Rare* rare = find_rare();
  return rare == nullptr || rare->bounding_set == nullptr ? none : *rare->bounding_set;
}

void Future::set_bounding_set(std::vector<c10::Device> devices) {
  const auto key = [](c10::Device d) { return std::pair(static_cast<int>(d.type()), d.index()); };
  std::sort(devices.begin(), devices.end(), [&](auto a, auto b) { return key(a) < key(b); });
  devices.erase(std::unique(devices.begin(), devices.end()), devices.end());
  rare().bounding_set = std::make_unique<std::vector<c10::Device>>(std::move(devices));
}

Executor* Future::default_executor() const noexcept {
  const Rare* rare = find_rare();
  return rare == nullptr ? nullptr : rare->executor;
}
void Future::set_default_executor(Executor* executor) { rare().executor = executor; }
void* Future::origin() const noexcept {
  const Rare* rare = find_rare();
  return rare == nullptr ? nullptr : rare->origin.get();
}
void Future::set_origin(Foreign origin) { rare().origin = std::move(origin); }

void Future::keep(Foreign owner) { rare().kept = std::move(owner); }
void Future::add_async_errors(std::shared_ptr<AsyncErrorSource> source) {
  std::lock_guard lock(mutex_);
  if (!done()) rare().async_errors.add(std::move(source));
}
void Future::inherit_async_errors(const Future& parent) {
  const AsyncErrors* const inherited = parent.async_errors();
  if (inherited == nullptr) return;
  const AsyncErrors undecided = inherited->undecided();
  std::lock_guard lock(mutex_);
  if (!done() && !undecided.empty()) rare().async_errors.add(undecided);
}
void Future::inherit_host_time(const Future& parent) noexcept {
  if (parent.completed_at_.generation == 0) return;
  std::lock_guard lock(mutex_);
  if (!done()) completed_at_ = later_of(completed_at_, parent.completed_at_);
}
void Future::set_producer(std::shared_ptr<Producer> producer) { rare().producer = std::move(producer); }
FuturePtr Future::released() {
  FuturePtr released;
  bool is_over;
  {
    std::lock_guard lock(mutex_);
    if (find_rare() == nullptr && !releases_) return nullptr;
    if (releases_ && rare().released == nullptr) rare().released = c10::make_intrusive<Future>(priority_);
    released = rare().released;
    is_over = is_released_;
  }
  if (is_over) released->complete(Value());
  return released;
}
void Future::set_released(FuturePtr released) { rare().released = std::move(released); }
void Future::promise_release() { releases_ = true; }
void Future::release() noexcept {
  FuturePtr released;
  {
    std::lock_guard lock(mutex_);
    if (!releases_ || std::exchange(is_released_, true)) return;
    if (Rare* const rare = find_rare()) released = rare->released;
  }
  if (released != nullptr) released->complete(Value());
}

std::chrono::nanoseconds Future::age() const noexcept { return std::chrono::nanoseconds(coarse_now() - born_); }

// ---- consumer

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
    return true;
  }
  const AsyncErrors* const errors = async_errors();
  if (errors == nullptr) return true;
  const bool is_decided = errors->confirm();  // after the query: an abort ends device work, too
  return poll_async_errors() || is_decided;
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

// ---- producer

bool Future::finish(State outcome, Value&& value, EventSet&& events, std::vector<at::Tensor>&& named) {
  Continuation* list;
  Waiter* waiters;
  std::shared_ptr<Producer> producer;  // dropped after the lock is released
  const HostTime now = host_time();
  {
    std::lock_guard lock(mutex_);
    if (done() || (outcome == State::cancelled && started_)) return false;
    value_ = std::move(value);
    events_ = std::move(events);
    if (now.generation != 0) completed_at_ = later_of(completed_at_, now);
    if (!named.empty()) rare().named_tensors = std::make_unique<std::vector<at::Tensor>>(std::move(named));
    if (Rare* rare = find_rare()) producer = std::move(rare->producer);
    list = continuations_.take_all();
    waiters = std::exchange(waiters_, nullptr);
    state_.store(outcome, std::memory_order_release);
  }
  if (waiters != nullptr) release_all(waiters);
  if (producer != nullptr) producer->finished(*this);
  trace(TraceEvent::done, *this);
  if (list != nullptr) CompletionQueue::dispatch(*this, list);
  return true;
}

bool Future::complete(Value&& value, EventSet&& events, std::vector<at::Tensor>&& named) {
  return finish(State::completed, std::move(value), std::move(events), std::move(named));
}

bool Future::fail(Value&& error, EventSet&& events) {
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

bool Future::cancel() {
  std::shared_ptr<Producer> producer;
  {
    std::lock_guard lock(mutex_);
    if (done() || started_) return false;
    if (Rare* rare = find_rare()) producer = rare->producer;
  }
  if (producer != nullptr && !producer->cancel(*this)) return false;
  return finish(State::cancelled, {}, {}, {}) || state() == State::cancelled;
}

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
