// An executor with its own thread: the callbacks that name it run one at a time, in the order in which their futures
// complete. Callbacks elsewhere do not delay them, and they delay no others.
//
// It is a lane in which a callback gets its place when its future completes, instead of when it is attached.
#pragma once

#include <string>

#include "core/executor.h"
#include "core/serial_queue.h"

namespace cudafuture {

class SerialExecutor final : public Executor {
 public:
  // Creates an executor that is never freed, like every lane: futures and callbacks may refer to it until the process
  // ends.
  static SerialExecutor& make(std::string name) { return *new SerialExecutor(std::move(name)); }

  void post(Continuation* c) noexcept override;
  void leave(Continuation& c) noexcept override { lane_.leave(c); }

 private:
  explicit SerialExecutor(std::string name) : lane_(std::move(name), Lane::Order::completion) {}

  Lane lane_;
};

}  // namespace cudafuture
