// The order in which a program and its callbacks issue on communicators of one device (NCCL).
//
// Such communicators need one order of execution on all ranks: a kernel occupies the device until the other ranks have
// come, and a kernel behind it can only then begin. A program and its callbacks run side by side, so their operations
// meet in another order on every rank. The order that all ranks can agree on without talking is that of the program
// text: whatever a callback issues comes where the callback was attached.
//
//     program    all_reduce  then(a)  then(b)  all_gather       attached at      1        2
//     a              broadcast  then(c)                         inside a         1.1
//     order      all_reduce, broadcast (a), what c issues, what b issues, all_gather
//
// A thread that issues therefore blocks, on the host, until all callbacks attached before that point have run.
// A callback runs when its future is complete; on NCCL that is when the operation is enqueued, so the wait is short.
//
// Lock: mutex_ guards the pending positions; nothing is taken under it.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <set>
#include <vector>

namespace cudafuture {

class IssueOrder {
 public:
  using Clock = std::chrono::steady_clock;
  // Where a callback was attached: the position of the attaching callback, and a count. Compared from the front.
  using Position = std::vector<std::uint64_t>;

  static IssueOrder& get() noexcept;

  // Returns the next position of the calling thread: the callback that it attaches is pending there until leave().
  // Empty if the thread runs a callback that has no position itself.
  Position enter();
  void leave(const Position& position) noexcept;

  // Returns true once no callback is pending that was attached before the point at which the calling thread is, except
  // those inside which it runs. False: the deadline came first.
  bool wait_until(Clock::time_point deadline);

  // The thread runs the callback of a position, for a scope.
  class Running {
   public:
    explicit Running(const Position& position) noexcept;
    ~Running();
    Running(const Running&) = delete;
    Running& operator=(const Running&) = delete;

   private:
    friend class IssueOrder;
    const Position& position_;
    std::uint64_t attached_ = 0;
    Running* const outer_;
  };

 private:
  bool is_turn(const Position& here) const;  // under the lock

  std::mutex mutex_;
  std::condition_variable left_;
  std::set<Position> pending_;
  std::uint64_t attached_ = 0;         // by the program
  std::atomic<std::size_t> count_{0};  // of pending_
};

}  // namespace cudafuture
