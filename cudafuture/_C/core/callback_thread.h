// The one thread that runs Python callbacks of futures which C++ threads complete.
//
// States: not started -> running -> stopping. It starts with the first post and is joined by shut_down(). Where the
// system refuses to start it, the post fails what it was to complete; whatever else was posted stays in the inbox, and
// the next post or the main thread's next wait tries again. Lock: mutex_ guards the inbox and the state; nothing else
// is taken under it.
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
  void post_release(void* object) noexcept;        // drop a foreign reference there
  void post_abandon(Continuation* list) noexcept;  // abandon continuations there

  bool is_current() const noexcept;

  // Starts the thread. Throws where the system has none.
  void require() {
    if (start() == Run::no_thread) throw no_thread("the library's callbacks");
  }

  // Starts the thread if something waits for it that was posted while the system had no thread.
  void retry() noexcept {
    if (is_starved_.load(std::memory_order_relaxed)) start();
  }

  // For a callback that waits on this very thread: runs others until `awaited` is done, the deadline has come (null:
  // none) or the process is going away. Called, and returns, inside the interpreter. Does nothing at the deepest of the
  // thread's queue.
  void help(Future& awaited, const std::chrono::steady_clock::time_point* deadline) noexcept;

  // Runs what was posted so far, then joins. What comes later does not run. `go_on` is asked now and then while that
  // takes time; when it says no the thread is left to itself.
  void stop(bool (*go_on)() noexcept = nullptr) noexcept;

  // Something came too late from outside the interpreter: whoever waits for what it would have completed waits for
  // ever.
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
  ContinuationList batch_;  // of the thread itself: taken out of the inbox, not run yet
  std::thread thread_;
  bool stopping_ = false;
  bool ended_ = false;
  std::atomic<bool> lost_{false};
  std::atomic<bool> is_starved_{false};  // posted to, and not started
  std::atomic<std::thread::id> id_{};
  std::atomic<std::uint64_t> callbacks_run_{0};
};

}  // namespace cudafuture
