// The future: one value, one outcome, one event per device.
//
//                    start()                     complete() / fail()
//     pending ─────────────────► started ─────────────────────────────► completed | failed
//        │  ▲                       │
//        │  └──── give_back() ──────┘          complete() and fail() also go straight from pending
//        │
//        └── cancel(), if the producer agrees ──► cancelled
//
// "started" is pending to the outside; it only means that cancel() is refused, because an engine or a device owns the
// user's memory or a callback is running. Done is for ever: completed, failed or cancelled.
//
// Who owns what
//   while pending   producers and consumers own the future; the future owns its continuations (run by whoever completes
//                   it) and its Producer; waiters live on the stacks of the threads that wait.
//   once done       the future owns its value and its events. Nothing of it changes any more, but for late_error.
//
// Completing publishes the state, then releases the waiters, then hands out the continuations in the order in which
// they were attached.
//
// Lock: mutex_ guards the continuations, the waiters, the rare fields and the step from pending to done. Nothing is
// allocated in the embedding language, dropped or called under it, and nobody takes the interpreter's lock under it.
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
#include "core/edge.h"
#include "core/event_set.h"
#include "core/executor.h"
#include "core/host_clock.h"
#include "core/value.h"
#include "core/waiter.h"

namespace cudafuture {

enum class State : std::uint8_t { pending, completed, failed, cancelled };
const char* name_of(State state) noexcept;

// Whether waiting tells the allocator (`record_stream`), or relies on the future to hold the memory.
enum class Lifetime : std::uint8_t { record, hold };

// Who will complete a future, as far as the future needs to know: asked before it is cancelled, dropped once it is
// done.
class Producer {
 public:
  virtual ~Producer() = default;
  virtual bool cancel(Future&) { return true; }  // may be asked twice; false: it is too late
  virtual void finished(Future&) noexcept {}     // the future is done, however it came about
  virtual int visit(ForeignVisitor) const { return 0; }
};

class Future final : public c10::intrusive_ptr_target {
 public:
  using Clock = std::chrono::steady_clock;

  explicit Future(int priority = 0, Lifetime lifetime = Lifetime::record) noexcept;
  ~Future() override;

  // ---- facts, set by who makes the future, before anybody else sees it
  int priority() const noexcept { return priority_; }
  Lifetime lifetime() const noexcept { return lifetime_; }
  const std::string& name() const noexcept { return name_; }
  void set_name(std::string name) { name_ = std::move(name); }
  // The bounding set: sorted, without duplicates. Not bounded: taken from the value.
  bool is_bounded() const noexcept;
  const std::vector<c10::Device>& bounding_set() const noexcept;
  void set_bounding_set(std::vector<c10::Device> devices);
  // Where the user's callbacks run that name no executor; null: where the future is completed.
  Executor* default_executor() const noexcept;
  void set_default_executor(Executor* executor);
  OrderedExecutor* ordered_executor() const noexcept {
    Executor* const executor = default_executor();
    return executor == nullptr ? nullptr : executor->ordered();
  }
  // An object of the embedding language that says what made the future; dropped with it.
  void* origin() const noexcept;
  void set_origin(Foreign origin);
  // An object of the embedding language that owns memory which this future's operation uses; dropped with the future.
  void keep(Foreign owner);
  // Adds an engine that may report a failure of this future's value later. Ignored once the future is done.
  void add_async_errors(std::shared_ptr<AsyncErrorSource> source);
  // Adds those of a future that is done, from whose value this one's value is made.
  void inherit_async_errors(const Future& parent);
  // In virtual time this future is completed no earlier than `parent`, which is done. Ignored once this one is done.
  void inherit_host_time(const Future& parent) noexcept;
  void set_producer(std::shared_ptr<Producer> producer);
  // Of what reads memory: a future that is done when it has read it; null: it reads none. It is another's, or this
  // one's own: promised first, made when somebody asks for it, and completed by release().
  FuturePtr released();
  void set_released(FuturePtr released);
  void promise_release();
  void release() noexcept;
  std::chrono::nanoseconds age() const noexcept;

  // ---- consumer
  State state() const noexcept { return state_.load(std::memory_order_acquire); }
  bool done() const noexcept { return state() != State::pending; }

  // Blocks until the future is done or the deadline (null: none) has come. Returns done().
  bool wait_until(const Clock::time_point* deadline);

  // Has `waiter` released when the future is done. False: it is done, and the waiter was not added.
  bool add(Waiter& waiter);
  // Afterwards nothing uses the waiter any more: it was taken back, or its release has ended.
  void remove(Waiter& waiter) noexcept;

  // Runs `c` once the future is done: now, if it is.
  void attach(Continuation* c);
  // Takes back a continuation that has not been handed out. True: it belongs to the caller again.
  bool detach(const Continuation* c) noexcept;
  template <class Predicate>
  Continuation* detach_if(Predicate&& predicate) {
    std::lock_guard lock(mutex_);
    return continuations_.remove_if(predicate);
  }

  // ---- once done; before that, the thread that completes the future may be writing what these return
  Value& value() noexcept { return value_; }
  const Value& value() const noexcept { return value_; }
  const EventSet& events() const noexcept { return events_; }
  // When it was completed, in the virtual time of host threads: no earlier than it was made.
  const HostTime& completed_at() const noexcept { return completed_at_; }
  // The devices that the value uses or may use: the bounding set, else those of the events. Empty while the future is
  // pending and has no bounding set; any thread may call this at any time.
  std::vector<c10::Device> devices() const;
  // Tensors that the producer named because they cannot be found in the value.
  const std::vector<at::Tensor>& named_tensors() const noexcept;
  // Has the device work behind every event finished, and do the async error sources know how it ended? What a device or
  // a source reports instead becomes the late error, and counts as finished: nothing more will come. False while
  // pending. Work of a stream capture counts as finished, because the host cannot query it: a caller that needs it to
  // be finished looks at events().is_captured() first.
  bool device_work_finished() noexcept;
  std::exception_ptr late_error();
  void set_late_error(std::exception_ptr error) noexcept;
  // Somebody has seen how it ended. A failure that nobody has seen is reported when the future dies.
  bool is_unseen_failure() const noexcept { return state() == State::failed && !seen_.load(std::memory_order_relaxed); }
  void mark_seen() noexcept { seen_.store(true, std::memory_order_relaxed); }

  // ---- producer
  // Each makes the future done and returns true, or returns false when it was done already.
  bool complete(Value&& value, EventSet&& events = {}, std::vector<at::Tensor>&& named = {});
  bool fail(Value&& error, EventSet&& events = {});
  // From here on cancel() is refused. False when the future is done (cancelled, as a rule): do not begin.
  bool start() noexcept;
  void give_back() noexcept;  // undoes start()
  bool cancel();              // true when the future is cancelled now

  // ---- for the binding
  // The object of the embedding language that stands for this future, not owned; guarded by the interpreter's lock.
  void* wrapper = nullptr;
  // Shows every foreign reference that this future owns.
  int visit(ForeignVisitor visitor);
  // Gives up what keeps reference cycles alive: continuations (abandoned without a word), producer, value.
  void clear() noexcept;

 private:
  struct Rare;
  static constexpr std::uint32_t kFirstSweep = 64;

  bool finish(State outcome, Value&& value, EventSet&& events, std::vector<at::Tensor>&& named);
  Rare& rare();
  Rare* find_rare() const noexcept { return rare_.load(std::memory_order_acquire); }
  void leak_tensors() noexcept;
  const AsyncErrors* async_errors() const noexcept;
  bool poll_async_errors() noexcept;
  ContinuationList sweep() noexcept;

  mutable std::mutex mutex_;
  std::atomic<State> state_{State::pending};
  std::atomic<bool> seen_{false};
  std::atomic<bool> has_late_error_{false};
  bool started_ = false;
  bool releases_ = false;  // there is a promise to call release()
  bool is_released_ = false;
  Lifetime lifetime_;
  std::int32_t priority_;
  ContinuationList continuations_;
  std::uint32_t attached_ = 0;  // since the last sweep, and what that left
  std::uint32_t sweep_at_ = kFirstSweep;
  Waiter* waiters_ = nullptr;
  Value value_;
  EventSet events_;
  std::string name_;
  std::atomic<Rare*> rare_{nullptr};  // owned; made when it is first needed, under the lock once others see the future
  std::uint64_t born_;                // CLOCK_MONOTONIC_COARSE, nanoseconds
  HostTime completed_at_;             // while pending: no earlier than this
};

// Called with what is left of a failed future that dies before anybody has seen its error.
using UnseenFailureHook = void (*)(Value&& error, const std::string& name, Foreign&& origin);
void set_unseen_failure_hook(UnseenFailureHook hook) noexcept;

}  // namespace cudafuture
