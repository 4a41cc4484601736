// The threads that are blocked in a wait, and the futures that depend on others, for cudafuture.debug.
#pragma once

#include "bind/python.h"
#include "core/future.h"
#include "core/intrusive_list.h"

namespace cudafuture::bind {

// A thread that is about to block until a future is done. The list of them is guarded by the GIL.
class BlockedThread {
 public:
  explicit BlockedThread(Future& future) noexcept;
  ~BlockedThread();
  BlockedThread(const BlockedThread&) = delete;
  BlockedThread& operator=(const BlockedThread&) = delete;

 private:
  friend void bind_pending(nb::module_& m);

  Future& future_;
  const unsigned long thread_;
  BlockedThread* next_;
  BlockedThread** link_;  // that points at this one
};

}  // namespace cudafuture::bind
