// A thread of its own for the callbacks that name this executor: one at a time, in the order in which their futures
// were completed. Neither a callback that blocks elsewhere holds them up, nor do they hold up others.
//
// It is a lane in which a callback gets its place when its future completes, instead of when it is attached.
#pragma once

#include <string>

#include "core/executor.h"
#include "core/lane.h"

namespace cudafuture {

class SerialExecutor final : public Executor {
 public:
  // One that is never freed, as no lane is: futures and callbacks may refer to it to the end of the process.
  static SerialExecutor& make(std::string name) { return *new SerialExecutor(std::move(name)); }

  void post(Continuation* c) noexcept override;
  void leave(Continuation& c) noexcept override { lane_.leave(c); }

 private:
  explicit SerialExecutor(std::string name) : lane_(std::move(name), Lane::Order::completion) {}

  Lane lane_;
};

}  // namespace cudafuture
