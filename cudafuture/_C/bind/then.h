// A callback in a future's list of continuations, with a child future (then, submit) or without one.
#pragma once

#include <exception>
#include <vector>

#include "bind/future.h"
#include "bind/job.h"
#include "bind/order.h"
#include "bind/stream_choice.h"
#include "core/context.h"
#include "core/continuation.h"

namespace cudafuture::bind {

class Then final : public Continuation, public Deferred {
 public:
  Then(nb::object fn, nb::object child) : Continuation(foreign), fn_(std::move(fn)), child_(std::move(child)) {}

  void capture_context();
  // executor=: an executor of this library goes into the continuation, one of concurrent.futures into the callback.
  // None: `usual`.
  void choose_executor(nb::handle chosen, Executor* usual);

  void run(Future& parent) noexcept override;
  void abandon() noexcept override;
  bool is_moot() const noexcept override { return child_.is_valid() && core_of(child_).done(); }
  Future* dependent() const noexcept override { return child_.is_valid() ? &core_of(child_) : nullptr; }
  int visit(ForeignVisitor visitor) const override;

  // The function, if there is no child: borrowed, and valid under the parent's lock.
  nb::handle callback() const noexcept { return child_.is_valid() ? nb::handle() : nb::handle(fn_); }

  // Runs the callback itself, on any thread.
  void execute(Future& parent) noexcept override;
  void dispose() noexcept override { delete this; }
  bool refuse(const std::exception_ptr& error) noexcept override;
  // Called when the executor will not run it: the executor was shut down, or (with an error) could not.
  void refuse() noexcept override;
  void refuse(Future& parent, nb::object error) noexcept override;

  nb::object python_executor;
  StreamChoice choice;
  bool async = false;
  bool plain_call = false;      // submit(): call fn(), not fn(parent)
  bool is_wake_up = false;      // fn uses no device: a stream that waited for it would join a capture needlessly
  bool names_executor = false;  // of concurrent.futures: the caller that chose it answers for the order
  bool is_unordered = false;    // attached in a callback that has no order
  bool after_devices = false;   // non_blocking=False

 private:
  void join_host_clock_of(Future& parent) const noexcept;
  void call(Future& parent, Future* child);
  CallbackOrder::Kind order_in(const Future& parent) const noexcept;
  nb::object invoke(Future& parent, Future* child);
  void deliver(Future& parent, Future* child, nb::object result);
  void failed(Future& parent, Future* child, nb::object exception, const std::vector<c10::Stream>& streams) noexcept;

  nb::object fn_;
  nb::object child_;
  nb::object contextvars_;
  CallerContext caller_;
  const HostTime attached_at_ = host_time();
  std::exception_ptr refusal_;  // of a callback without a child: no thread could be started to run it
};

}  // namespace cudafuture::bind
