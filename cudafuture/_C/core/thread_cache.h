// Threads for tasks: an idle one, or a new one. There is no bound but the system's.
//
// For work that may block for long and must not wait behind other work that does. A thread that is done stays for the
// next task; what is more than a few of them ends.
//
// Lock: mutex_ guards everything; nothing is taken under it.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <list>
#include <mutex>
#include <thread>
#include <utility>

namespace cudafuture {

class ThreadCache {
 public:
  class Task {
   public:
    virtual void perform() noexcept = 0;

   protected:
    ~Task() = default;
  };

  static ThreadCache& get() noexcept;

  enum class Run {
    begun,
    no_thread,  // the system refused to start one
    stopped,    // after stop(), or in a forked child
  };

  // Runs `task`, which must live until then, on a thread of its own.
  Run run(Task* task) noexcept;

  // Calls a function on a thread of its own; on this one where there is none.
  template <class Function>
  void run_or_call(Function function) {
    auto* const task = new Called<Function>(std::move(function));
    if (run(task) != Run::begun) task->perform();
  }

  // Is this thread one of the cache's?
  static bool is_current() noexcept;

  // From here on, and until it is taken back, stop() does not wait for the calling thread: it blocks in an engine that
  // nobody can interrupt. Does nothing in a thread of others.
  static void set_leavable(bool leavable) noexcept;

  // Lets the tasks that run come to their end, then joins. `go_on` is asked now and then while that takes time; when it
  // says no the threads are left to themselves.
  void stop(bool (*go_on)() noexcept = nullptr) noexcept;

 private:
  template <class Function>
  struct Called final : Task {
    explicit Called(Function function) : function(std::move(function)) {}
    void perform() noexcept override {
      function();
      delete this;
    }
    Function function;
  };
  struct Worker {
    std::thread thread;
    std::condition_variable wake;
    Task* task = nullptr;
    bool ended = false;
    std::atomic<bool> leavable{false};
  };
  using Workers = std::list<Worker>;

  void loop(Workers::iterator self) noexcept;
  bool may_leave() const noexcept;
  void leave_others() noexcept;
  void join_ended() noexcept;

  std::mutex mutex_;
  std::condition_variable ended_;
  Workers workers_;
  std::list<Worker*> idle_;  // the last one to become idle is the first to be used
  bool stopping_ = false;
};

}  // namespace cudafuture
