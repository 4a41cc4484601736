#include "store/client/request.h"

#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>
#include <pybind11/stl.h>

#include <new>
#include <stdexcept>
#include <utility>

#include "store/client/window.h"
#include "store/wire/bind.h"
#include "store/wire/parser.h"

namespace rpc_ext::store::client {

py::object error_of(const std::exception_ptr& error) {
  py::object found;
  try {
    std::rethrow_exception(error);
  } catch (py::error_already_set& e) {
    found = e.value();
    PyException_SetTraceback(found.ptr(), Py_None);
  } catch (const std::bad_alloc&) {
    found = py::reinterpret_borrow<py::object>(PyExc_MemoryError)();
  } catch (const std::invalid_argument& e) {
    found = py::reinterpret_borrow<py::object>(PyExc_ValueError)(e.what());
  } catch (const c10::Error& e) {
    found = py::reinterpret_borrow<py::object>(PyExc_RuntimeError)(e.what_without_backtrace());
  } catch (const std::exception& e) {
    found = py::reinterpret_borrow<py::object>(PyExc_RuntimeError)(e.what());
  }
  return found;
}

// ---- StoreOperation

StoreOperation::StoreOperation(std::size_t count, bool has_values, py::object complete, py::object join)
    : left_(count),
      written_(count, '\0'),
      values_(has_values ? count : 0, py::none()),
      complete_(std::move(complete)),
      join_(std::move(join)) {}

void StoreOperation::set_digest(std::size_t index, std::uint64_t digest) {
  digests_.resize(written_.size());
  digests_[index] = digest;
}

void StoreOperation::end(std::size_t index, const py::object& value, const py::object& error) {
  if (error.is_none()) {
    written_[index] = '\1';
    if (!values_.empty()) values_[index] = value;
  } else if (error_.is_none()) {
    error_ = error;
    failed_ = index;
  }
  if (--left_ > 0) return;
  const py::object complete = std::exchange(complete_, {});
  join_ = {};
  call(complete, std::move(values_), std::move(digests_), py::bytes(written_), std::exchange(error_, py::none()),
       failed_);
}

// ---- KeyRequest

KeyRequest::KeyRequest(Verb verb, std::string key, OperationPtr operation, std::size_t index, std::uint64_t weight)
    : verb(verb), key(std::move(key)), index(index), weight(weight), operation(std::move(operation)) {}

KeyEntry KeyRequest::entry() const {
  const KeyRequest* before = previous.get();
  while (before != nullptr && before->is_done()) before = before->previous.get();  // it was dropped, and not sent
  KeyEntry entry;
  entry.sequence = sequence;
  entry.after = before == nullptr ? 0 : before->sequence;
  entry.expires = deadline;
  entry.key = key;
  return entry;
}

// ---- StoreMessage

StoreMessage::StoreMessage(WindowPtr window, Verb verb, std::vector<RequestPtr> requests, std::uint64_t nbytes,
                           bool is_batch)
    : window(std::move(window)), verb(verb), is_batch(is_batch), requests(std::move(requests)), nbytes(nbytes) {}

bool StoreMessage::expects_answer() {
  std::erase_if(requests, [](const RequestPtr& request) { return request->is_done(); });
  if (requests.empty()) window->release(*this);
  return !requests.empty();
}

void StoreMessage::send_entries() {
  if (!expects_answer()) return;
  window->mark_sent(requests);
  std::vector<KeyEntry> entries;
  for (const RequestPtr& request : requests) entries.push_back(request->entry());
  window->send(*this, std::move(entries), no_data());
}

std::vector<py::object> StoreMessage::errors_of(const Answer& answer) const {
  std::vector<py::object> errors(requests.size(), py::none());
  for (const auto& [index, problem] : answer.errors) errors[index] = call(window->error_from, to_python(problem));
  return errors;
}

void StoreMessage::end_all(const Answer& answer) {
  const auto errors = errors_of(answer);
  for (std::size_t i = 0; i < requests.size(); ++i) window->end(requests[i], py::none(), errors[i]);
}

// Each request ends, even if Ctrl-C comes between.
void StoreMessage::fail_all(const py::object& error) {
  std::exception_ptr met;
  for (const RequestPtr& request : std::vector(requests)) {
    try {
      window->end(request, py::none(), error, false);
    } catch (...) {
      met = std::current_exception();
    }
  }
  if (met) std::rethrow_exception(met);
}

void StoreMessage::answered(std::string_view body, const std::vector<at::Tensor>& tensors) {
  window->release(*this);
  try {
    const c10::InferenceMode plain(false);
    take(parse_answer(verb, requests.size(), body, tensors));
  } catch (...) {
    fail_all(error_of(std::current_exception()));
  }
}

void StoreMessage::failed(const py::object& error) {
  PyException_SetTraceback(error.ptr(), Py_None);
  window->release(*this);
  fail_all(error);
}

}  // namespace rpc_ext::store::client
