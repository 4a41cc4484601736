// The futures that cudafuture.distributed returns.
#include <nanobind/stl/shared_ptr.h>

#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "bind/errors.h"
#include "bind/executors.h"
#include "bind/future.h"
#include "bind/promise.h"
#include "bind/tensors.h"
#include "bind/work.h"
#include "core/process.h"

namespace cudafuture::bind {
namespace {

// Returns the size of the tensors in flat lists and tuples, or of one tensor.
std::int64_t bytes_of(nb::handle tensors) {
  PyObject* const object = tensors.ptr();
  if (THPVariable_Check(object)) {
    const at::Tensor& tensor = THPVariable_Unpack(object);
    return tensor.layout() == at::kStrided ? static_cast<std::int64_t>(tensor.nbytes()) : kUnknown;
  }
  if (!PyTuple_Check(object) && !PyList_Check(object)) return kUnknown;
  std::int64_t bytes = 0;
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(object); ++i) {
    bytes += std::max<std::int64_t>(bytes_of(PySequence_Fast_GET_ITEM(object, i)), 0);
  }
  return bytes == 0 ? kUnknown : bytes;
}

// `place` and `number`: of the operation, for the registry.
FuturePtr make_future(const std::string& name, const HostExecutor& callbacks, nb::object origin,
                      const OperationFacts& facts) {
  auto future = c10::make_intrusive<Future>();
  future->set_name(name);
  future->set_default_executor(callbacks.executor);
  if (!origin.is_none()) future->set_origin(foreign(std::move(origin)));
  future->set_operation(facts);
  future->start();  // the other ranks rely on it: too late to cancel
  return future;
}

// Returns the future of a collective: it follows `work`, which uses `tensors`, and completes with `value`.
nb::object collective(nb::handle work, nb::object value, const std::string& name, const HostExecutor& callbacks,
                      nb::object origin, double timeout, const OperationPlace* place, std::int64_t number,
                      std::optional<BackendsPtr> backends, nb::object tensors, std::int64_t peer) {
  const ParkingScope parking;
  refuse_after_fork();
  FuturePtr future = make_future(name, callbacks, origin, {place, number, bytes_of(tensors), peer});
  nb::object result = wrap(future);
  const WorkGroup group{timeout, backends.value_or(nullptr), std::move(origin)};
  follow_work(work, std::move(future), std::move(value), std::move(tensors), group);
  raise_kept_interrupt();
  return result;
}

// Returns a future that Python completes.
nb::object issued(const std::string& name, const HostExecutor& callbacks, nb::object origin,
                  const OperationPlace* place, std::int64_t number, std::int64_t peer) {
  const ParkingScope parking;
  refuse_after_fork();
  return wrap(make_future(name, callbacks, std::move(origin), {place, number, kUnknown, peer}));
}

// Calls `notice` with the origin of each overdue future before it fails the futures, so that the callers that see the
// failure do not use the same engine again.
void fail_overdue(double grace, nb::handle notice) {
  const ParkingScope parking;
  std::vector<FuturePtr> overdue;
  {
    const WithoutGil released;
    overdue = Promise::overdue(grace);
  }
  for (const FuturePtr& future : overdue) {
    if (future->origin() != nullptr) call(notice, nb::handle(static_cast<PyObject*>(future->origin())));
  }
  const WithoutGil released;
  for (const FuturePtr& future : overdue) {
    future->fail(Value::of_error(
        std::make_exception_ptr(std::runtime_error("the backend has not answered within its timeout"))));
  }
}

}  // namespace

void bind_collective(nb::module_& m) {
  m.def("collective", collective, nb::arg("work"), nb::arg("value").none(), nb::arg("name"), nb::arg("callbacks"),
        nb::arg("origin").none(), nb::arg("timeout"), nb::arg("place").none(), nb::arg("number"),
        nb::arg("backends").none() = nb::none(), nb::arg("tensors").none() = nb::none(), nb::arg("peer") = kUnknown);
  m.def("fail_overdue", fail_overdue, nb::arg("grace"), nb::arg("notice"));
  m.def("has_contiguous_memory", has_contiguous_memory, nb::arg("tensor"));
  m.def("expect_storage", expect_storage, nb::arg("tensor"));
  m.def("issued", issued, nb::arg("name"), nb::arg("callbacks"), nb::arg("origin").none(),
        nb::arg("place").none() = nb::none(), nb::arg("number") = kUnknown, nb::arg("peer") = kUnknown);
}

}  // namespace cudafuture::bind
