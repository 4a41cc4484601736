// A cache of threads for tasks: a task runs on an idle thread, or on a new one. Only the system limits their number.
//
// Use it for work that may block for long and must not wait behind other such work. A thread that has finished its task
// stays for the next one; threads in excess of a few end.
//
// Lock: mutex_ guards all state; no other lock is taken under it.
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
    virtual const char* thread_name() const noexcept = 0;  // of the thread while it performs the task; 15 characters

   protected:
    ~Task() = default;
  };

  static ThreadCache& get() noexcept;

  enum class Run {
    begun,
    no_thread,  // the system refused to start one
    stopped,    // after stop(), or in a forked child
  };

  // Runs `task` on its own thread. The task must live until then.
  Run run(Task* task) noexcept;

  // Calls a function on its own thread, or on this one if no thread can be started. `name`: as Task::thread_name().
  template <class Function>
  void run_or_call(const char* name, Function function) {
    auto* const task = new Called<Function>(name, std::move(function));
    if (run(task) != Run::begun) task->perform();
  }

  // True if this thread belongs to the cache.
  static bool is_current() noexcept;

  // Tells stop() whether to wait for the calling thread: with true, it does not, because the thread blocks in an engine
  // that cannot be interrupted. Does nothing on a thread of others.
  static void set_leavable(bool leavable) noexcept;

  // Waits until running tasks finish, then joins the threads. Calls `go_on` from time to time; when it returns false,
  // the threads are left running.
  void stop(bool (*go_on)() noexcept = nullptr) noexcept;

 private:
  template <class Function>
  struct Called final : Task {
    Called(const char* name, Function function) : name(name), function(std::move(function)) {}
    void perform() noexcept override {
      function();
      delete this;
    }
    const char* thread_name() const noexcept override { return name; }

    const char* name;
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
  std::list<Worker*> idle_;  // the thread that became idle last is used first
  bool stopping_ = false;
};

}  // namespace cudafuture
