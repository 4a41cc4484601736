// The future: one value, one outcome, one event per device.
//
//                    start()                     complete() / fail()
//     pending ─────────────────► started ─────────────────────────────► completed | failed
//        │  ▲                       │
//        │  └──── give_back() ──────┘          complete() and fail() also go straight from pending
//        │
//        └── cancel(), if the producer agrees ──► cancelled
//
// "started" is pending to the outside. It only means that cancel() is refused, because an engine or a device owns the
// user's memory, or a callback is running. Done is final: completed, failed or cancelled.
//
// Ownership
//   while pending   producers and consumers own the future. The future owns its Producer and its continuations, which
//                   the completing thread runs. Waiters live on the stacks of the threads that wait.
//   once done       the future owns its value and its events. Nothing in it changes any more except late_error.
//
// Completion publishes the state, then releases the waiters, then dispatches the continuations in attachment order.
//
// Lock: mutex_ guards the continuations, the waiters, the rare fields and the transition from pending to done. Under
// it, no foreign object is allocated, dropped or called, and the interpreter's lock is not taken.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "core/async_error_source.h"
#include "core/continuation.h"
#include "core/event_set.h"
#include "core/executor.h"
#include "core/host_clock.h"
#include "core/registered_operation.h"
#include "core/sync_edge.h"
#include "core/trace.h"
#include "core/value.h"
#include "core/waiter.h"
#include "core/weak_future.h"

namespace cudafuture {

enum class State : std::uint8_t { pending, completed, failed, cancelled };
const char* name_of(State state) noexcept;

// The function that made a future, for messages.
enum class Maker : std::uint8_t { none, submit, then, then_async, gather, collect_all, collect_any };
const char* name_of(Maker maker) noexcept;  // empty: none

// Protection of the memory during a wait: a call of the allocator's `record_stream`, or the future, which holds it.
enum class Lifetime : std::uint8_t { record, hold };

struct CombinationPart {
  WeakFuture future;
  std::int64_t references;  // to its foreign object
};

// The party that will complete a future, as the future sees it: asked before cancellation, and dropped once the future
// is done.
class Producer {
 public:
  virtual ~Producer() = default;
  virtual bool cancel(Future&) { return true; }  // may be called twice; false: too late to cancel
  virtual void finished(Future&) noexcept {}     // the future is done, in whatever way
  virtual int visit(ForeignVisitor) const { return 0; }
  // Adds the futures that a combination is made of, in their order. Called under the future's lock.
  virtual void add_parts(std::vector<CombinationPart>&) const {}
};

class Future final : public c10::intrusive_ptr_target {
 public:
  using Clock = std::chrono::steady_clock;

  explicit Future(int priority = 0, Lifetime lifetime = Lifetime::record) noexcept;
  ~Future() override;

  // ---- facts, set by the creator of the future before any other thread sees it
  int priority() const noexcept { return priority_; }
  Lifetime lifetime() const noexcept { return lifetime_; }
  const std::string& name() const noexcept { return name_; }
  void set_name(std::string name) { name_ = std::move(name); }
  Maker maker() const noexcept { return maker_; }
  void set_maker(Maker maker) noexcept { maker_ = maker; }
  // True if a function on the pool of submit completes the future. Set inside the interpreter only.
  bool is_pooled() const noexcept { return is_pooled_.load(std::memory_order_relaxed); }
  // True from the moment at which the callback that completes this future is queued for another thread.
  bool is_dispatched() const noexcept { return is_dispatched_.load(std::memory_order_relaxed); }
  void set_dispatched() noexcept { is_dispatched_.store(true, std::memory_order_relaxed); }
  void set_pooled(bool is_pooled) noexcept { is_pooled_.store(is_pooled, std::memory_order_relaxed); }
  // The line of code that made the future; kept for messages if CUDAFUTURE_DEBUG asks for it. Only the first one stays.
  std::string site() const;
  void set_site(std::string site);
  // The bounding set: sorted, without duplicates. An unbounded future takes its devices from the value.
  bool is_bounded() const noexcept;
  const std::vector<c10::Device>& bounding_set() const noexcept;
  void set_bounding_set(std::vector<c10::Device> devices);
  // The executor of callbacks that name none; null: the thread that completes the future.
  Executor* default_executor() const noexcept;
  void set_default_executor(Executor* executor);
  OrderedExecutor* ordered_executor() const noexcept {
    Executor* const executor = default_executor();
    return executor == nullptr ? nullptr : executor->ordered();
  }
  // A foreign object that describes the call that made the future; dropped with the future.
  void* origin() const noexcept;
  void set_origin(Foreign origin);
  // Keeps a foreign object that owns memory used by this future's operation; dropped with the future.
  void keep(Foreign owner);
  // Adds an engine that may report a failure of this future's value later. Ignored once the future is done.
  void add_async_errors(std::shared_ptr<AsyncErrorSource> source);
  // Adds the sources of `parent`, a done future from whose value this one's value is made.
  void inherit_async_errors(const Future& parent);
  // In virtual time this future is completed no earlier than `parent`, which is done. Ignored once this one is done.
  void inherit_host_time(const Future& parent) noexcept;
  void set_producer(std::shared_ptr<Producer> producer);
  // For an operation that reads memory: returns a future that is done when the memory has been read; null: it reads
  // none. It is either another operation's future or this future's own. The own one is promised first, created on the
  // first request and completed by release().
  FuturePtr released();
  void set_released(FuturePtr released);
  void promise_release();
  void release() noexcept;
  std::chrono::nanoseconds age() const noexcept;
  // Puts the operation that this future stands for into the registry, until the future is done. Null: there is none.
  void set_operation(const OperationFacts& facts);
  const OperationFacts* operation() const noexcept;

  // ---- consumer
  State state() const noexcept { return state_.load(std::memory_order_acquire); }
  bool done() const noexcept { return state() != State::pending; }
  bool running() const noexcept;  // started, and pending: cancel() is refused

  // Blocks until the future is done or the deadline (null: none) is reached. Returns done().
  bool wait_until(const Clock::time_point* deadline);

  // Adds `waiter`, which is released when the future is done. False: the future is done already, and nothing was added.
  bool add(Waiter& waiter);
  // Removes `waiter`. Afterwards nothing uses it any more: it was removed, or its release has returned.
  void remove(Waiter& waiter) noexcept;

  // Runs `c` once the future is done; immediately if it is done already.
  void attach(Continuation* c);
  // Removes a continuation that was not dispatched yet. True: the caller owns it again.
  bool detach(const Continuation* c) noexcept;
  template <class Predicate>
  Continuation* detach_if(Predicate&& predicate) {
    std::lock_guard lock(mutex_);
    return continuations_.remove_if(predicate);
  }

  // ---- once done; before that, the completing thread may be writing the objects that these return
  Value& value() noexcept { return value_; }
  const Value& value() const noexcept { return value_; }
  const EventSet& events() const noexcept { return events_; }
  // The time of completion, in the virtual time of host threads: no earlier than the future's creation.
  const HostTime& completed_at() const noexcept { return completed_at_; }
  // Orders the calling thread, which has seen that the future is done, after its completion in virtual time.
  void observe() const noexcept { join_host_time(completed_at_); }
  // Returns the devices that the value may use: the bounding set, otherwise the devices of the events. Empty while the
  // future is pending and unbounded. Any thread may call this at any time.
  std::vector<c10::Device> devices() const;
  // Tensors that the producer named because a search of the value cannot find them.
  const std::vector<at::Tensor>& named_tensors() const noexcept;
  // Returns true once the device work behind every event has finished and the async error sources have decided the
  // outcome. An error of a device or a source becomes the late error, and counts as finished. False while pending.
  // Captured work counts as finished, because the host cannot query it: callers that need it to be finished check
  // events().is_captured() first.
  bool device_work_finished() noexcept;
  std::exception_ptr late_error();
  // Tells the engines behind this future's value that the calling thread's current streams are ordered after it.
  void consumed() const;
  void set_late_error(std::exception_ptr error) noexcept;
  // A failure that no caller has seen is reported when the future is destroyed, or at exit. Returns true if the caller
  // has to report it now; the failure counts as seen afterwards.
  bool claim_failure_report() noexcept { return state() == State::failed && claim_report_of_failure(); }
  // Lets the failures of both futures, and of those that share a report with them, count as one: one is reported.
  static void share_failure_report(Future& one, Future& other);
  bool shares_failure_report() const;
  static bool any_has_failed() noexcept;  // since the process began
  void mark_seen() noexcept { seen_.store(true, std::memory_order_relaxed); }

  // ---- producer
  // Each makes the future done and returns true; returns false if it was done already.
  bool complete(Value&& value, EventSet&& events = {}, std::vector<at::Tensor>&& named = {});
  bool fail(Value&& error, EventSet&& events = {});
  // Makes cancel() refuse from now on. False: the future is done (usually cancelled), and the producer must not begin.
  bool start() noexcept;
  void give_back() noexcept;  // undoes start()
  // True if this call cancelled the future. `reason`: the error that callers get; empty: made on request.
  bool cancel(Value&& reason = {});

  // ---- for the binding
  // The foreign object that represents this future, not owned; guarded by the interpreter's lock.
  void* wrapper = nullptr;
  // Visits every foreign reference that this future owns.
  int visit(ForeignVisitor visitor);
  // The futures that wait for this one: its callbacks' children, and the combinations that it is a part of.
  std::vector<WeakFuture> dependents() const;
  // The parts of a pending combination.
  std::vector<CombinationPart> parts() const;
  // Drops everything that can keep reference cycles alive: continuations (abandoned without a report), producer, value.
  void clear() noexcept;

  // The last owner is gone: ends the operation's weak reference, which would keep the destructor from running.
  void release_resources() override;

 private:
  struct Rare;
  static constexpr std::uint32_t kFirstSweep = 64;

  bool finish(State outcome, Value&& value, EventSet&& events, std::vector<at::Tensor>&& named);
  [[gnu::cold]] bool claim_report_of_failure() noexcept;
  static void end_operation(Rare* rare) noexcept;
  Rare& rare();
  Rare& locked_rare();
  Rare* find_rare() const noexcept { return rare_.load(std::memory_order_acquire); }
  void leak_tensors() noexcept;
  const AsyncErrors* async_errors() const noexcept;
  bool poll_async_errors() noexcept;
  bool note_ready() noexcept;
  ContinuationList sweep() noexcept;

  mutable std::mutex mutex_;
  std::atomic<State> state_{State::pending};
  std::atomic<bool> seen_{false};
  std::atomic<bool> has_late_error_{false};
  bool started_ = false;
  bool releases_ = false;  // release() will be called
  bool is_released_ = false;
  std::atomic<bool> is_pooled_{false};
  std::atomic<bool> is_dispatched_{false};
  std::atomic<bool> is_ready_traced_{false};
  Maker maker_ = Maker::none;
  Lifetime lifetime_;
  std::int32_t priority_;
  ContinuationList continuations_;
  std::uint32_t attached_ = 0;  // since the last sweep, plus those that the sweep left
  std::uint32_t sweep_at_ = kFirstSweep;
  Waiter* waiters_ = nullptr;
  Value value_;
  EventSet events_;
  std::string name_;
  std::atomic<Rare*> rare_{nullptr};  // owned; created on first use, under the lock once other threads see the future
  std::int64_t born_;                 // coarse_time()
  HostTime completed_at_;             // while pending: the lower bound
};

// Called with a failed future that is being destroyed before any caller has seen its error, and with its error.
using UnseenFailureHook = void (*)(const Future& future, Value&& error, Foreign&& origin);
void set_unseen_failure_hook(UnseenFailureHook hook) noexcept;

}  // namespace cudafuture
