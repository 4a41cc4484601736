#include "store/client/request.h"

#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>

#include <chrono>
#include <cstring>
#include <new>
#include <stdexcept>
#include <utility>

#include "api/error.h"
#include "api/thread.h"
#include "store/client/window.h"
#include "store/wire/parser.h"

namespace rpc_ext::store::client {
namespace {

std::int64_t nanoseconds() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

const char* name_of(StoreOperation::Kind kind) {
  switch (kind) {
    case StoreOperation::Kind::write:
      return "write";
    case StoreOperation::Kind::read:
      return "read";
    case StoreOperation::Kind::erase:
      return "delete";
  }
  return "";
}

std::string title_of(StoreOperation::Kind kind, const std::vector<std::string>& keys) {
  const std::string operand = keys.size() == 1 ? keys.front() : std::to_string(keys.size()) + " keys";
  return std::string(name_of(kind)) + " " + operand;
}

PyObject* new_reference(const Held& object) { return object.get().inc_ref().ptr(); }

}  // namespace

py::object to_python(const std::exception_ptr& error) {
  const auto make = [](PyObject* type, const char* message) {
    return py::reinterpret_borrow<py::object>(type)(
        py::reinterpret_steal<py::object>(PyUnicode_DecodeUTF8(message, std::strlen(message), "backslashreplace")));
  };
  if (PyErr_Occurred() != nullptr) {  // torch throws some errors of Python without their objects
    const py::error_already_set raised;
    PyException_SetTraceback(raised.value().ptr(), Py_None);
    return raised.value();
  }
  try {
    std::rethrow_exception(error);
  } catch (const PythonException& e) {
    return e.get();
  } catch (py::error_already_set& e) {
    PyException_SetTraceback(e.value().ptr(), Py_None);
    return e.value();
  } catch (const api::Failure& e) {
    api::set_error(e.problem());
    const py::error_already_set made;
    PyException_SetTraceback(made.value().ptr(), Py_None);
    return made.value();
  } catch (const std::bad_alloc&) {
    return py::reinterpret_borrow<py::object>(PyExc_MemoryError)();
  } catch (const std::invalid_argument& e) {
    return make(PyExc_ValueError, e.what());
  } catch (const c10::Error& e) {
    return make(PyExc_RuntimeError, e.what_without_backtrace());
  } catch (const std::exception& e) {
    return make(PyExc_RuntimeError, e.what());
  }
}

// ---- StoreOperation

StoreOperation::StoreOperation(OperationsPtr operations, Kind kind, std::vector<std::string> keys, Options options)
    : operations_(std::move(operations)),
      kind_(kind),
      keys_(std::move(keys)),
      options_(std::move(options)),
      promise_(api::make_promise(title_of(kind, keys_), options_.priority, kind == Kind::write, operations_->worker())),
      since_(nanoseconds()),
      left_(keys_.size()),
      unreleased_(keys_.size()) {
  if (options_.results != nullptr && kind_ == Kind::write) {
    written_.resize(keys_.size(), '\0');
    options_.results->set(written_.data(), written_.size());
  }
  if (needs_digests()) digests_.resize(keys_.size());
  operations_->begin(*this);
}

// Its keys have not all ended where its call has thrown.
StoreOperation::~StoreOperation() { operations_->end(*this, nullptr); }

void StoreOperation::release_source() {
  {
    const std::lock_guard lock(mutex_);
    if (--unreleased_ > 0) return;
  }
  promise_->release();
}

void StoreOperation::end(std::size_t index, const std::exception_ptr& error, std::uint64_t nbytes,
                         std::uint64_t digest) {
  {
    const std::lock_guard lock(mutex_);
    if (error == nullptr) {
      read_ += nbytes;
      if (!written_.empty()) written_[index] = '\1';
      if (!digests_.empty()) digests_[index] = digest;
    } else if (error_ == nullptr) {
      error_ = error;
      failed_ = index;
    }
    if (--left_ > 0) return;
  }
  std::exception_ptr failure = error_;
  if (const std::exception_ptr resized = store_results(); failure == nullptr) failure = resized;
  if (failure == nullptr) {
    complete();
  } else {
    fail(failure);
  }
}

// Returns the error of a tensor for results that the caller has resized.
std::exception_ptr StoreOperation::store_results() noexcept {
  try {
    if (!written_.empty()) options_.results->set(written_.data(), written_.size());
    if (!digests_.empty() && error_ == nullptr) options_.results->set(digests_.data(), 8 * digests_.size());
  } catch (...) {
    return std::current_exception();
  }
  return nullptr;
}

void StoreOperation::complete() {
  operations_->count(*this, kind_ == Kind::read ? read_ : options_.nbytes, false);
  switch (kind_) {
    case Kind::write:
      promise_->complete(static_cast<std::int64_t>(options_.nbytes));
      break;
    case Kind::read:
      options_.targets->complete(*promise_, options_.gives_list);
      break;
    case Kind::erase:
      promise_->complete({});
      break;
  }
  operations_->end(*this, nullptr);
}

void StoreOperation::fail(const std::exception_ptr& error) {
  const Gil gil;
  if (!gil) return;
  const auto exception = operations_->named(error, std::string(name_of(kind_)) + " " + keys_[failed_]);
  operations_->count(*this, 0, true);
  if (options_.targets != nullptr) {
    options_.targets->fail(*promise_, new_reference(*exception));
  } else {
    promise_->fail(new_reference(*exception));
  }
  operations_->end(*this, exception);
}

// ---- Operations

struct Operations::Flush {
  void complete() const {
    if (error == nullptr) {
      promise->complete({});
    } else if (const Gil gil; gil) {
      promise->fail(new_reference(*error));
    }
  }

  const std::shared_ptr<api::Promise> promise = api::make_promise("flush", 0, false);
  std::size_t left = 0;         // operations that are pending
  std::shared_ptr<Held> error;  // of the first operation that failed
};

void Operations::begin(const StoreOperation& operation) {
  const std::lock_guard lock(mutex_);
  pending_.try_emplace(&operation);
}

void Operations::count(const StoreOperation& operation, std::uint64_t nbytes, bool has_failed) {
  const std::lock_guard lock(mutex_);
  ++counted_;
  latencies_.add(nanoseconds() - operation.since_);
  failed_ += has_failed ? 1 : 0;
  bytes_.at(static_cast<std::size_t>(operation.kind_)) += nbytes;
}

void Operations::end(const StoreOperation& operation, const std::shared_ptr<Held>& error) {
  std::vector<FlushPtr> ready;
  {
    const std::lock_guard lock(mutex_);
    const auto found = pending_.find(&operation);
    if (found == pending_.end()) return;
    for (const FlushPtr& flush : found->second) {
      if (flush->error == nullptr) flush->error = error;
      if (--flush->left == 0) ready.push_back(flush);
    }
    pending_.erase(found);
    --counted_;
  }
  for (const FlushPtr& flush : ready) flush->complete();
}

std::shared_ptr<Held> Operations::named(const std::exception_ptr& error, const std::string& what) const {
  py::object exception;
  try {
    exception = to_python(error);
    exception = call(name_error_.get(), exception, what, worker_);
  } catch (...) {
    report_unraisable("rpc_ext: the error of a store operation");
  }
  if (!exception) {
    const std::string message = what + " on worker '" + worker_ + "' failed, and its error could not be made";
    exception = py::reinterpret_borrow<py::object>(PyExc_RuntimeError)(message);
  }
  return std::make_shared<Held>(std::move(exception));
}

py::object Operations::flush(bool with_reads) {
  const auto flush = std::make_shared<Flush>();
  auto future = py::reinterpret_steal<py::object>(flush->promise->future());
  bool is_done = true;
  {
    const std::lock_guard lock(mutex_);
    for (auto& [operation, flushes] : pending_) {
      if (!with_reads && operation->kind_ == StoreOperation::Kind::read) continue;
      flushes.push_back(flush);
      ++flush->left;
      is_done = false;
    }
  }
  if (is_done) flush->complete();
  return future;
}

Operations::Statistics Operations::statistics() const {
  const std::lock_guard lock(mutex_);
  return {pending_.size() - counted_, bytes_[0], bytes_[1], latencies_.total(), failed_, latencies_.quantile(0.5),
          latencies_.quantile(0.99)};
}

// ---- KeyRequest

KeyEntry KeyRequest::entry() const {
  const KeyRequest* before = previous.get();
  while (before != nullptr && before->state == State::done) before = before->previous.get();  // it was not sent
  KeyEntry entry;
  entry.sequence = sequence;
  entry.after = before == nullptr ? 0 : before->sequence;
  entry.expires = deadline;
  entry.key = key;
  return entry;
}

// ---- StoreMessage

void StoreMessage::go_on(const std::function<void()>& step) {
  try {
    step();
  } catch (...) {
    fail(std::current_exception());
  }
}

void StoreMessage::go_on_elsewhere(std::function<void()> step) {
  const auto self = shared_from_this();
  try {
    api::call_elsewhere([self, step = std::move(step)] { self->go_on(step); });
  } catch (...) {  // the system has no more threads
    fail(std::current_exception());
  }
}

void StoreMessage::answered(std::string_view body, const std::vector<at::Tensor>& tensors) {
  data.reset();
  window->release(*this);
  go_on([&] {
    const PlainTensors plain;
    take(parse_answer(verb, entries.size(), body, tensors));
  });
}

void StoreMessage::failed(const py::object& error) {
  PyException_SetTraceback(error.ptr(), Py_None);
  fail(std::make_exception_ptr(PythonException(error)));
}

void StoreMessage::fail(const std::exception_ptr& error) {
  data.reset();
  window->release(*this);
  for (const SentEntry& each : std::vector(entries)) window->end(each.request, {.error = error, .is_answered = false});
}

void StoreMessage::end_all(const Answer& answer) {
  const auto errors = errors_of(*this, answer);
  for (std::size_t i = 0; i < entries.size(); ++i) window->end(entries[i].request, {.error = errors[i]});
}

std::vector<SentEntry> entries_of(std::vector<RequestPtr> requests) {
  std::vector<SentEntry> entries;
  for (RequestPtr& request : requests) entries.push_back({std::move(request)});
  return entries;
}

std::vector<std::exception_ptr> errors_of(const StoreMessage& message, const Answer& answer) {
  std::vector<std::exception_ptr> errors(message.entries.size());
  for (const auto& [index, problem] : answer.errors) errors[index] = std::make_exception_ptr(api::Failure(problem));
  return errors;
}

}  // namespace rpc_ext::store::client
