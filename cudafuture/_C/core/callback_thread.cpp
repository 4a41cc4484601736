#include "core/callback_thread.h"

#include <pthread.h>

#include <system_error>
#include <utility>

#include "core/capture.h"
#include "core/completion_queue.h"
#include "core/ending.h"
#include "core/error.h"
#include "core/future.h"
#include "core/process.h"
#include "core/reaper.h"

namespace cudafuture {
// Wakes the callback thread when the future that help() waits for is done.
class CallbackThread::Waker final : public Continuation {
 public:
  void run(Future&) noexcept override {
    CallbackThread& thread = get();
    {
      std::lock_guard lock(thread.mutex_);
    }
    thread.wake_.notify_all();
    delete this;
  }
  void abandon() noexcept override { delete this; }
};

CallbackThread& CallbackThread::get() noexcept {
  static auto* thread = new CallbackThread;  // leaked: engines may post until the end of the process
  return *thread;
}

bool CallbackThread::is_current() const noexcept {
  return id_.load(std::memory_order_relaxed) == std::this_thread::get_id();
}

CallbackThread::Run CallbackThread::start() noexcept {
  if (is_forked_child()) return Run::stopped;  // the lock may be held by a thread that does not exist in the child
  std::lock_guard lock(mutex_);
  return start_locked();
}

CallbackThread::Run CallbackThread::start_locked() noexcept {
  if (stopping_) return Run::stopped;  // a post from now on would keep the process alive
  if (thread_.joinable()) return Run::begun;
  mark_used();
  try {
    thread_ = std::thread([this] { loop(); });
  } catch (const std::system_error&) {
    is_starved_ = true;
    return Run::no_thread;
  }
  is_starved_ = false;
  return Run::begun;
}

template <class Put>
bool CallbackThread::put(Put&& put) noexcept {
  if (is_forked_child()) return false;
  {
    std::lock_guard lock(mutex_);
    if (start_locked() == Run::stopped) return false;
    put(inbox_);
  }
  wake_.notify_one();
  return true;
}

// A continuation that is posted too late is abandoned if possible, so that no caller waits for it; otherwise it is
// leaked.
void CallbackThread::post(Continuation* c) noexcept {
  bool is_refused = false;
  const auto put_or_refuse = [&](Inbox& inbox) {
    if (thread_.joinable()) {
      inbox.due.push(c);
    } else {
      is_refused = true;
    }
  };
  if (put(put_or_refuse)) {
    if (is_refused) refuse(c);
    return;
  }
  if (foreign_runtime().inside()) {
    c->abandon();
  } else {
    lose();
  }
}

// Fails `c`, because the system refused a thread to run it.
void CallbackThread::refuse(Continuation* c) noexcept {
  if (c->refuse(std::make_exception_ptr(no_thread("the library's callbacks")))) {
    post_abandon(c);
  } else {
    put([c](Inbox& inbox) { inbox.due.push(c); });
  }
}

void CallbackThread::post_release(void* object) noexcept {
  put([object](Inbox& inbox) { inbox.released.push_back(object); });
}

void CallbackThread::post_abandon(Continuation* list) noexcept {
  put([list](Inbox& inbox) { inbox.abandoned.push_back(list); });
}

void CallbackThread::accept(Inbox&& inbox) noexcept {
  while (Continuation* c = inbox.due.pop()) batch_.push(c);
  for (Continuation* list : inbox.abandoned) reap_continuations(list);
  for (void* object : inbox.released) reap_foreign(object);
}

void CallbackThread::run_one() noexcept {
  CompletionQueue& queue = CompletionQueue::current();
  queue.push(batch_.pop());
  callbacks_run_.fetch_add(1, std::memory_order_relaxed);
  queue.drain(true);
}

void CallbackThread::loop() noexcept {
  id_ = std::this_thread::get_id();
  pthread_setname_np(pthread_self(), "cudafuture-cb");
  mark_library_thread();
  const ForeignRuntime& runtime = foreign_runtime();
  std::unique_lock lock(mutex_);
  for (;;) {
    wake_.wait(lock, [this] { return stopping_ || !inbox_.empty(); });
    if (inbox_.empty()) break;  // stopping, and the inbox is empty
    Inbox inbox = std::exchange(inbox_, {});
    lock.unlock();
    if (!runtime.enter()) {  // the interpreter is gone: leak the inbox's contents; the inbox itself owns nothing
      lock.lock();
      break;
    }
    accept(std::move(inbox));
    while (!batch_.empty()) run_one();
    runtime.leave();
    lock.lock();
  }
  ended_ = true;
  wake_.notify_all();
}

void CallbackThread::help(Future& awaited, const std::chrono::steady_clock::time_point* deadline) noexcept {
  if (awaited.done() || CompletionQueue::current().is_deepest()) return;
  auto* waker = new Waker;
  awaited.attach(waker);
  const ForeignRuntime& runtime = foreign_runtime();
  bool going = true;
  while (going && !awaited.done()) {
    if (!batch_.empty()) {
      run_one();
      continue;
    }
    Inbox inbox;
    runtime.leave();
    {
      std::unique_lock lock(mutex_);
      const auto something = [&] { return stopping_ || !inbox_.empty() || awaited.done(); };
      if (deadline == nullptr) {
        wake_.wait(lock, something);
      } else {
        going = wake_.wait_until(lock, *deadline, something);
      }
      if (stopping_ && inbox_.empty()) going = false;
      inbox = std::exchange(inbox_, {});
    }
    if (!runtime.enter()) break;
    accept(std::move(inbox));
  }
  if (awaited.detach(waker)) waker->abandon();
}

void CallbackThread::stop(bool (*go_on)() noexcept) noexcept {
  {
    std::unique_lock lock(mutex_);
    stopping_ = true;
    wake_.notify_all();
    if (!thread_.joinable()) return;
    if (!wait_for_end(lock, wake_, go_on, [this] { return ended_; })) {
      thread_.detach();
      return;
    }
  }
  thread_.join();
}

}  // namespace cudafuture
