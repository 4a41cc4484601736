#include "bind/work_errors.h"

#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>

#include "bind/conduit.h"
#include "bind/errors.h"
#include "bind/future.h"

namespace cudafuture::bind {
namespace {

const char* name_of(c10d::ErrorType error) {
  switch (error) {
    case c10d::ErrorType::SUCCESS:
      return "no error";
    case c10d::ErrorType::TIMEOUT:
      return "an operation has not finished within its timeout";
    case c10d::ErrorType::COMM_ERROR:
      return "a communicator has failed";
    case c10d::ErrorType::REMOTE_ERROR:
      return "another rank has reported a failure";
  }
  return "an unknown error";
}

constexpr char kNoResult[] = ". Its outputs hold no result; go on with a new group, without ranks that are lost";

// Returns the backends that can report failures.
BackendsPtr backends_of(const std::vector<nb::object>& list, bool own) {
  std::vector<c10::weak_intrusive_ptr<c10d::Backend>> backends;
  for (const nb::object& one : list) {
    auto backend = c10::intrusive_ptr<c10d::Backend>::unsafe_reclaim_from_nonowning(behind<c10d::Backend>(one));
    try {
      backend->getError();
      backends.emplace_back(backend);
    } catch (const c10::Error&) {  // not implemented for this backend
    }
  }
  return backends.empty() ? nullptr : std::make_shared<Backends>(std::move(backends), own);
}

}  // namespace

c10d::ErrorType Backends::error() const noexcept {
  for (const auto& weak : backends_) {
    const c10::intrusive_ptr<c10d::Backend> backend = weak.lock();
    if (backend == nullptr) continue;
    try {
      if (const c10d::ErrorType error = backend->getError(); error != c10d::ErrorType::SUCCESS) return error;
    } catch (const std::exception&) {
      return c10d::ErrorType::COMM_ERROR;
    }
  }
  return c10d::ErrorType::SUCCESS;
}

nb::object WorkError::as_exception() const {
  if (origin_ == nullptr) return make_error("CollectiveError", what());
  static Imported type{"torch._C", "_DistBackendError"};
  return as_origin_says(origin_->get(), call(type(), nb::str(what())));
}

std::shared_ptr<WorkErrors> WorkErrors::of(KeptWork&& work, BackendsPtr backends, const nb::object& origin) {
  c10::intrusive_ptr<c10::ivalue::Future> result;
  try {
    result = work.work().getFutureResult();
  } catch (const c10::Error&) {  // not implemented for this kind of work
  }
  std::shared_ptr<const Foreign> named;
  if (origin.is_valid() && !origin.is_none()) named = std::make_shared<const Foreign>(bind::foreign(origin));
  return std::make_shared<WorkErrors>(std::move(work), std::move(result), std::move(backends), std::move(named));
}

void WorkErrors::set_events(const EventSet& events) {
  std::lock_guard lock(mutex_);
  events_ = events;
  kept_->set_events(events);
  is_enqueued_ = true;
}

// Memory that the streams of the issue own may be freed once they are ordered after the operation. Another consumer's
// streams prove nothing for it, unless the host has seen the device finish. Nor does an error.
void WorkErrors::consumed() {
  std::unique_lock lock(mutex_);
  if (!kept_ || !is_enqueued_ || !(has_succeeded() || kept_->is_issued_here())) return;
  KeptWork work(std::move(*kept_));
  kept_.reset();
  lock.unlock();
  has_succeeded() ? work.release_finished() : work.release();
}

void WorkErrors::fail(const char* what) {
  error_ = std::make_exception_ptr(WorkError(std::string(what) + kNoResult, origin_));
}

void WorkErrors::fail_with_group(c10d::ErrorType error) {
  const std::string what = std::string("the group failed before this operation was known to have finished: ");
  fail((what + name_of(error)).c_str());
}

// Takes over the watchdog's result for this operation.
void WorkErrors::decide() noexcept {
  if (error_ != nullptr || has_succeeded() || result_ == nullptr || !result_->completed()) return;
  try {
    switch (static_cast<c10d::WorkResult>(result_->constValue().toInt())) {
      case c10d::WorkResult::SUCCESS:
        has_succeeded_.store(true, std::memory_order_release);
        break;
      case c10d::WorkResult::TIMEOUT:
        fail("the operation was enqueued and has not finished within the timeout of its group");
        break;
      case c10d::WorkResult::COMM_ERROR:
        fail("the communicator failed after the operation was enqueued");
        break;
      default:
        fail("the backend reported an unknown failure after the operation was enqueued");
    }
  } catch (const std::exception&) {
    error_ = std::current_exception();
  }
}

std::exception_ptr WorkErrors::error() noexcept {
  if (has_succeeded()) return nullptr;
  std::lock_guard lock(mutex_);
  decide();
  if (error_ == nullptr && !has_succeeded() && backends_ != nullptr && backends_->are_own()) {
    if (const auto failure = backends_->error(); failure != c10d::ErrorType::SUCCESS) fail_with_group(failure);
  }
  return error_;
}

bool WorkErrors::confirm() noexcept {
  if (has_succeeded()) return true;
  std::lock_guard lock(mutex_);
  if (error_ != nullptr) return true;
  try {
    if (!events_.query()) return true;  // the caller's events do not follow this operation
  } catch (const std::exception&) {
    error_ = std::current_exception();
    return true;
  }
  decide();
  if (error_ != nullptr || has_succeeded()) return true;
  const auto failure = backends_ == nullptr ? c10d::ErrorType::SUCCESS : backends_->error();
  if (failure == c10d::ErrorType::SUCCESS) {
    has_succeeded_.store(true, std::memory_order_release);
  } else if (backends_->are_own()) {
    fail_with_group(failure);
  } else {
    return false;  // the watchdog of its group will decide
  }
  return true;
}

void bind_work_errors(nb::module_& m) {
  nb::class_<Backends>(m, "Backends");
  m.def("backends", backends_of, nb::arg("backends"), nb::arg("own"));
}

}  // namespace cudafuture::bind
