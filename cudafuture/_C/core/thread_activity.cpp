#include "core/thread_activity.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <utility>

#include "core/coarse_clock.h"
#include "core/context.h"
#include "core/debug_socket.h"
#include "core/foreign.h"
#include "core/process.h"
#include "core/serial_queue.h"
#include "core/spin_lock.h"

namespace cudafuture {

struct ThreadRecord {
  SpinLock lock;
  std::atomic<const ThreadActivity*> innermost{nullptr};
  std::atomic<const SerialQueue*> queue{nullptr};  // of the outermost callback
  std::string name;
  const pid_t thread = static_cast<pid_t>(syscall(SYS_gettid));

  ThreadRecord() {
    std::lock_guard held(list_mutex());
    list().push_back(this);
  }
  ~ThreadRecord() {
    if (is_forked_child()) return;
    std::lock_guard held(list_mutex());
    list().erase(std::find(list().begin(), list().end(), this));
  }

  // Both are leaked: threads run until the end of the process.
  static std::mutex& list_mutex() noexcept {
    static auto* mutex = new std::mutex;
    return *mutex;
  }
  static std::vector<ThreadRecord*>& list() noexcept {
    static auto* records = new std::vector<ThreadRecord*>;
    return *records;
  }
  static ThreadRecord* of_thread();

  ThreadActivities state(std::int64_t now) {
    ThreadActivities found{thread, {}, thread == getpid(), {}, {}};
    std::lock_guard held(lock);
    found.name = name;
    const ThreadActivity* one = innermost.load(std::memory_order_acquire);
    if (one == nullptr) return found;
    if (const SerialQueue* const of = queue.load(std::memory_order_relaxed)) found.queue = of->name();
    for (; one != nullptr; one = one->outer_) {
      found.activities.push_back({one->kind_, WeakFuture(one->future_), text_of(one->line_),
                                  one->function_ == nullptr ? "" : foreign_runtime().describe(one->function_),
                                  static_cast<double>(now - one->begun_) * 1e-9, one->has_timeout_});
    }
    std::reverse(found.activities.begin(), found.activities.end());
    return found;
  }
};

namespace {

[[gnu::tls_model("initial-exec")]] thread_local constinit ThreadRecord* record_of_thread = nullptr;
thread_local constinit bool has_ended = false;  // a thread that ends may still run callbacks; they are not recorded

struct RecordOwner {
  ~RecordOwner() {
    has_ended = true;
    delete std::exchange(record_of_thread, nullptr);
  }
};

}  // namespace

[[gnu::cold]] ThreadRecord* ThreadRecord::of_thread() {
  if (record_of_thread == nullptr && !has_ended) {
    static thread_local RecordOwner owner;
    record_of_thread = new ThreadRecord;
  }
  return record_of_thread;
}

std::string text_of(const CodeLine& line) {
  if (line.file == nullptr) return {};
  return std::string(line.file) + ":" + std::to_string(line.line) + " in " + line.function + "()";
}

ThreadActivity::ThreadActivity(Kind kind, Future& future, void* function, const CodeLine& line,
                               bool has_timeout) noexcept
    : kind_(kind),
      future_(future),
      function_(function),
      line_(line),
      has_timeout_(has_timeout),
      begun_(coarse_time()),
      outer_(nullptr) {
  if (kind == Kind::wait) DebugSocket::require();
  trace(kind == Kind::wait ? TraceEvent::wait_begin : TraceEvent::callback_begin, future, {nullptr, &line_, function});
  if (kind == Kind::wait || CallerContext::profiled.load(std::memory_order_relaxed) > 0) begin_profiled();
  ThreadRecord* const record = record_of_thread != nullptr ? record_of_thread : ThreadRecord::of_thread();
  if (record == nullptr) return;
  outer_ = record->innermost.load(std::memory_order_relaxed);
  if (outer_ == nullptr) record->queue.store(SerialQueue::current(), std::memory_order_relaxed);
  record->innermost.store(this, std::memory_order_release);
}

void ThreadActivity::begin_profiled() noexcept {
  std::optional<at::StepCallbacks> observers = at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE);
  if (!observers) return;
  profiled_.emplace(std::move(*observers));
  const bool is_wait = kind_ == Kind::wait;
  const std::string what = is_wait ? future_.name() : function_ == nullptr ? "" : foreign_runtime().describe(function_);
  profiled_->before((is_wait ? "cudafuture::wait " : "cudafuture::callback ") + what);
}

ThreadActivity::~ThreadActivity() {
  trace(kind_ == Kind::wait ? TraceEvent::wait_end : TraceEvent::callback_end, future_);
  ThreadRecord* const record = record_of_thread;
  if (record == nullptr || record->innermost.load(std::memory_order_relaxed) != this) return;
  std::lock_guard lock(record->lock);  // a walk may read this object
  record->innermost.store(outer_, std::memory_order_relaxed);
}

const ThreadActivity* ThreadActivity::innermost() noexcept {
  return record_of_thread == nullptr ? nullptr : record_of_thread->innermost.load(std::memory_order_relaxed);
}

std::vector<ThreadActivities> thread_states() {
  std::vector<ThreadActivities> states;
  const std::int64_t now = coarse_time();
  std::lock_guard held(ThreadRecord::list_mutex());
  for (ThreadRecord* record : ThreadRecord::list()) {
    ThreadActivities state = record->state(now);
    if (!state.activities.empty()) states.push_back(std::move(state));
  }
  return states;
}

void set_thread_name(std::string name) {
  ThreadRecord* const record = ThreadRecord::of_thread();
  if (record == nullptr) return;
  std::lock_guard lock(record->lock);
  record->name = std::move(name);
}

bool has_thread_name() noexcept {
  const ThreadRecord* const record = ThreadRecord::of_thread();
  return record == nullptr || !record->name.empty();
}

}  // namespace cudafuture
