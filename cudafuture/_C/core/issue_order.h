// The order in which a program and its callbacks issue operations on communicators of one device (NCCL).
//
// Such communicators need one order of execution on all ranks: a kernel occupies the device until the other ranks
// arrive, and only then can a kernel behind it begin. A program and its callbacks run concurrently, so their operations
// interleave differently on every rank. All ranks can agree, without communication, on the order of the program text:
// operations that a callback issues take the position at which the callback was attached.
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
  // The position at which a callback was attached: the position of the attaching callback, then a count. Compared from
  // the front.
  using Position = std::vector<std::uint64_t>;

  static IssueOrder& get() noexcept;

  // Returns the next position of the calling thread. The callback that the thread attaches is pending there until
  // leave(). Empty if the thread runs a callback that has no position itself.
  Position enter();
  void leave(const Position& position) noexcept;

  // Waits until every callback attached before the thread's current point has run, except the callbacks that the thread
  // is running. False: the deadline was reached first.
  bool wait_until(Clock::time_point deadline);

  // A scope in which the thread runs the callback of a position.
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
