// A Work whose device work has been enqueued, and the tensors that it uses.
#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <utility>
#include <vector>

#include "bind/python.h"
#include "core/event_set.h"

namespace cudafuture::bind {

// Keeps a Work until a consumer is ordered after it or the device has finished.
//
// ProcessGroupNCCL stashes the tensors of an operation in its Work, and copies of the Work share the stash. Nothing
// empties it but a call of the Work's synchronize(), or the watchdog together with a later operation of the group. Some
// Works have no stash that outlives them: those in a capture, under TORCH_NCCL_BLOCKING_WAIT, and those that this
// library had to synchronize to get their events. So the tensors that the caller gave are kept here as well.
class KeptWork {
 public:
  // `tensors`: a Python object that owns them, or none. `streams`: the current streams of the issue. Memory that the
  // operation uses belongs to them, or is ordered before them.
  KeptWork(c10::intrusive_ptr<c10d::Work> work, Foreign tensors, std::vector<c10::Stream> streams);
  KeptWork(KeptWork&&) = default;
  KeptWork& operator=(KeptWork&&) = delete;
  // Leaves what the device still uses to the watcher; inside a capture, until the capture has ended.
  ~KeptWork();

  c10d::Work& work() const noexcept { return *work_; }
  // Sets the events that follow the Work.
  void set_events(const EventSet& events) { events_ = events; }
  // True if the streams of the issue are this thread's current ones.
  bool is_issued_here() const;
  // Makes this thread's current streams wait for the Work, which empties its stash, and drops the tensors. Leaves the
  // interpreter meanwhile. Keeps the Work if the device reports an error.
  void release() noexcept;
  // Does the same when the device has finished, with streams of the pool: the current ones may be captured.
  void release_finished() noexcept;

 private:
  class Release;

  void release_on(c10::ArrayRef<c10::Stream> streams) noexcept;
  bool has_finished() const noexcept;
  bool is_captured() const noexcept;
  void drop() noexcept;
  static void drop_captured() noexcept;

  c10::intrusive_ptr<c10d::Work> work_;  // null: released
  Foreign tensors_;
  EventSet events_;
  std::vector<c10::Stream> streams_;
};

}  // namespace cudafuture::bind
