// The Work of a collective that has a CUDAFuture, which is made when Python asks for it.
#pragma once

#include <ATen/core/ivalue.h>
#include <c10/core/Stream.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "api/operation.h"
#include "holder.h"

namespace cudafuture::c10d_backend {

using WorkPtr = c10::intrusive_ptr<c10d::Work>;

constexpr int kAnyRank = -1;

// A group: names are used again after a group was destroyed, numbers are not.
struct GroupIdentity {
  std::string name;
  std::uint64_t number;  // of the backend, in this process
};

// One operation, as it was issued.
struct IssuedOperation {
  const char* name;        // of cudafuture.distributed's function
  std::uint64_t sequence;  // among the group's operations, from 0
  std::shared_ptr<const GroupIdentity> group;
  c10::IValue value;                  // of the future: the output, or none
  std::optional<c10::Stream> stream;  // the current one of the tensors' device; nullopt: no device with streams
  OperationPlace* place = nullptr;    // null: none
  std::int64_t number = api::kNone;   // among the group's collectives, from 0; none: a message, or on another group
  int peer = kAnyRank;                // of a message: the rank of its other end in the group
  std::int64_t bytes = api::kNone;    // of a message; of others those of `value`
  bool blocks_host = true;            // wait() blocks the thread; false: a stream waits
};

// A Work that forwards all calls to another one.
class ForwardingWork : public c10d::Work {
 public:
  explicit ForwardingWork(WorkPtr inner);

  const WorkPtr& inner() const noexcept { return inner_; }

  bool isCompleted() override { return inner_->isCompleted(); }
  bool isSuccess() const override { return inner_->isSuccess(); }
  std::exception_ptr exception() const override { return inner_->exception(); }
  int sourceRank() const override { return inner_->sourceRank(); }
  std::vector<at::Tensor> result() override { return inner_->result(); }
  void synchronize() override { inner_->synchronize(); }
  bool wait(std::chrono::milliseconds timeout) override { return inner_->wait(timeout); }
  void blockCurrentStream() override { inner_->blockCurrentStream(); }
  void abort() override { inner_->abort(); }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return inner_->getFuture(); }
  c10::intrusive_ptr<c10::ivalue::Future> getFutureResult() override { return inner_->getFutureResult(); }
  float getDuration() const override { return inner_->getDuration(); }
  std::uint64_t getSequencenumber() const override { return inner_->getSequencenumber(); }

 private:
  const WorkPtr inner_;
};

// A Work around the Work of the wrapped backend. It adds one allocation to the issue of a collective, and nothing else:
// no future exists until future() is called.
class FutureWork final : public ForwardingWork {
 public:
  [[gnu::hot, gnu::flatten]] FutureWork(WorkPtr inner, IssuedOperation operation);
  [[gnu::hot, gnu::flatten]] ~FutureWork() override;

  const IssuedOperation& operation() const noexcept { return operation_; }

  // Returns the CUDAFuture, always the same one. With the GIL.
  pybind11::object future(pybind11::handle self);
  // The future that exists already, or None. With the GIL.
  pybind11::object made() const;
  // `is_compared`: the future also waits for the comparison with the other ranks, and so do wait() and isCompleted().
  void keep(pybind11::object future, bool is_compared);

  bool wait(std::chrono::milliseconds timeout) override;
  // As wait(), called by a line of Python, with the GIL.
  bool wait_inside(std::chrono::milliseconds timeout);
  bool isCompleted() override;

 private:
  // The wait of the calling thread, for those who ask; none: it does not block.
  std::optional<api::OperationWait> shown_wait(std::chrono::milliseconds timeout, bool has_line);
  void note_end() noexcept;
  [[gnu::cold, gnu::noinline]] void note_end_later() noexcept;

  const IssuedOperation operation_;
  std::atomic<bool> has_ended_{false};      // noted in the progress of the group
  std::atomic<PyObject*> future_{nullptr};  // set with the GIL
  std::atomic<bool> is_compared_{false};    // set before the Work is returned to its caller
};

// The Work of a message over a backend whose Works may be waited for once only, such as Gloo: a second wait() for a
// send or a recv blocks until its timeout. Here one thread waits, and the others wait for that thread.
class MessageWork final : public ForwardingWork {
 public:
  using ForwardingWork::ForwardingWork;

  bool isCompleted() override;
  bool wait(std::chrono::milliseconds timeout) override;

 private:
  std::timed_mutex waiting_;   // held by the thread in the inner wait(), which takes no other lock of ours
  std::optional<bool> ended_;  // the result of the inner wait(); guarded by waiting_
  std::exception_ptr error_;   // the exception of the inner wait(); guarded by waiting_
  std::atomic<bool> has_ended_{false};
};

// Several Works that were issued as one.
class WorkList final : public c10d::Work {
 public:
  explicit WorkList(std::vector<WorkPtr> works);

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  std::vector<at::Tensor> result() override;
  void synchronize() override;
  bool wait(std::chrono::milliseconds timeout) override;
  void abort() override;

 private:
  const std::vector<WorkPtr> works_;
};

// Makes the future of a FutureWork, of which a trace then has the operation whether or not a thread waits for it. Other
// Works stay as they are. Throws only what a handler of a signal has raised, such as KeyboardInterrupt.
[[gnu::cold, gnu::noinline]] void follow_for_trace(const WorkPtr& work);

void bind_work(pybind11::module_& m);

}  // namespace cudafuture::c10d_backend
