// The single thread that runs Python callbacks of futures that C++ threads complete.
//
// States: not started -> running -> stopping. The first post starts the thread, and shut_down() joins it. If the system
// refuses to start it, the post fails the future that its continuation would complete. Anything else that was posted
// stays in the inbox; the next post, or the main thread's next wait, tries again.
//
// Lock: mutex_ guards the inbox and the state; no other lock is taken under it.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

#include "core/error.h"
#include "core/executor.h"

namespace cudafuture {

class CallbackThread final : public Executor {
 public:
  static CallbackThread& get() noexcept;

  void post(Continuation* c) noexcept override;
  void post_release(void* object) noexcept;        // drops a foreign reference on this thread
  void post_abandon(Continuation* list) noexcept;  // abandons continuations on this thread

  bool is_current() const noexcept;

  // Starts the thread. Throws if the system refuses one.
  void require() {
    if (start() == Run::no_thread) throw no_thread("the library's callbacks");
  }

  // Starts the thread if continuations were posted while the system refused one.
  void retry() noexcept {
    if (is_starved_.load(std::memory_order_relaxed)) start();
  }

  // Runs other callbacks while a callback on this thread waits. Returns when `awaited` is done, at the deadline (null:
  // none) or when the process shuts down. Is called, and returns, inside the interpreter. Does nothing at the maximum
  // depth of the thread's queue.
  void help(Future& awaited, const std::chrono::steady_clock::time_point* deadline) noexcept;

  // Runs everything posted so far, then joins the thread. Later posts do not run. Calls `go_on` from time to time; when
  // it returns false, stop() leaves the thread running and returns.
  void stop(bool (*go_on)() noexcept = nullptr) noexcept;

  // True if a continuation was posted too late from outside the interpreter: the future that it would have completed
  // stays pending.
  bool has_lost() const noexcept { return lost_.load(std::memory_order_acquire); }
  void lose() noexcept { lost_.store(true, std::memory_order_release); }

  std::uint64_t callbacks_run() const noexcept { return callbacks_run_.load(std::memory_order_relaxed); }

 private:
  struct Inbox {
    ContinuationList due;
    std::vector<Continuation*> abandoned;
    std::vector<void*> released;
    bool empty() const noexcept { return due.empty() && abandoned.empty() && released.empty(); }
  };

  class Waker;

  enum class Run { begun, no_thread, stopped };

  Run start() noexcept;
  Run start_locked() noexcept;
  template <class Put>
  bool put(Put&& put) noexcept;
  void refuse(Continuation* c) noexcept;
  void loop() noexcept;
  void accept(Inbox&& inbox) noexcept;
  void run_one() noexcept;

  std::mutex mutex_;
  std::condition_variable wake_;
  Inbox inbox_;
  ContinuationList batch_;  // used by the thread only: taken out of the inbox, not run yet
  std::thread thread_;
  bool stopping_ = false;
  bool ended_ = false;
  std::atomic<bool> lost_{false};
  std::atomic<bool> is_starved_{false};  // something was posted, and the thread is not started
  std::atomic<std::thread::id> id_{};
  std::atomic<std::uint64_t> callbacks_run_{0};
};

}  // namespace cudafuture
