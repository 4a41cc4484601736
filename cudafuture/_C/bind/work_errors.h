// Operations of a c10d backend (NCCL) between their issue and the end of their device work: the failures that the
// backend reports meanwhile, and the tensors that the device uses.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <atomic>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "bind/kept_work.h"
#include "bind/python.h"
#include "core/async_error_source.h"

namespace cudafuture::bind {

// Backends that report failures. Not kept alive.
class Backends {
 public:
  // `own`: they all belong to the group of one operation. Otherwise only some of them may, and it is unknown which.
  Backends(std::vector<c10::weak_intrusive_ptr<c10d::Backend>> backends, bool own)
      : backends_(std::move(backends)), own_(own) {}

  bool are_own() const noexcept { return own_; }
  c10d::ErrorType error() const noexcept;  // the first failure

 private:
  const std::vector<c10::weak_intrusive_ptr<c10d::Backend>> backends_;
  const bool own_;
};
using BackendsPtr = std::shared_ptr<Backends>;

// Becomes a CollectiveError in Python; `origin`, if any, rephrases it.
class WorkError final : public std::runtime_error {
 public:
  WorkError(const std::string& message, std::shared_ptr<const Foreign> origin)
      : std::runtime_error(message), origin_(std::move(origin)) {}
  nb::object as_exception() const;

 private:
  std::shared_ptr<const Foreign> origin_;
};

// The failure of one operation, and its Work.
//
// ProcessGroupNCCL's watchdog works on copies of a Work, so the caller's Work never changes. The copies share the
// future of getFutureResult(). The watchdog checks the pending operations of a group in order. For each failed one it
// sets that future, then the backend's error, then aborts all communicators of the group. It reaches the next operation
// up to a minute later. Meanwhile the streams continue, and the events of the later operations complete. So an
// operation has succeeded if its event is complete while the backend, asked afterwards, has no error: the abort comes
// after the error.
class WorkErrors final : public AsyncErrorSource {
 public:
  static std::shared_ptr<WorkErrors> of(KeptWork&& work, BackendsPtr backends, const nb::object& origin);

  WorkErrors(KeptWork&& work, c10::intrusive_ptr<c10::ivalue::Future> result, BackendsPtr backends,
             std::shared_ptr<const Foreign> origin)
      : result_(std::move(result)),
        backends_(std::move(backends)),
        origin_(std::move(origin)),
        kept_(std::move(work)) {}

  // Sets the events of the operation's device work, before its future completes. Only then can it be consumed.
  void set_events(const EventSet& events);

  std::exception_ptr error() noexcept override;
  bool confirm() noexcept override;
  bool has_succeeded() const noexcept override { return has_succeeded_.load(std::memory_order_acquire); }
  void consumed() override;

 private:
  void decide() noexcept;
  void fail(const char* what);
  void fail_with_group(c10d::ErrorType error);

  const c10::intrusive_ptr<c10::ivalue::Future> result_;  // a WorkResult; null: the backend reports no such errors
  const BackendsPtr backends_;                            // null: unknown
  const std::shared_ptr<const Foreign> origin_;           // null: none
  std::mutex mutex_;  // guards the fields below; errorMutex_ of the backend is taken under it
  EventSet events_;
  bool is_enqueued_ = false;  // the events are set
  std::exception_ptr error_;
  std::optional<KeptWork> kept_;
  std::atomic<bool> has_succeeded_{false};
};

}  // namespace cudafuture::bind
