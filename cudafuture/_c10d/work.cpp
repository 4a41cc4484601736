#include "work.h"

#include <pybind11/chrono.h>
#include <torch/csrc/jit/python/pybind_utils.h>

#include <algorithm>
#include <string>
#include <utility>

namespace cudafuture::c10d_backend {
namespace {

namespace py = pybind11;

bool is_python_ending() {
#if PY_VERSION_HEX >= 0x030D0000
  return Py_IsInitialized() == 0 || Py_IsFinalizing() != 0;
#else
  return Py_IsInitialized() == 0 || _Py_IsFinalizing() != 0;
#endif
}

std::int64_t bytes_of(const at::Tensor& tensor) {
  return tensor.defined() && tensor.layout() == c10::kStrided ? static_cast<std::int64_t>(tensor.nbytes()) : api::kNone;
}

std::int64_t bytes_of(const c10::IValue& value) {
  if (value.isTensor()) return bytes_of(value.toTensor());
  if (!value.isList()) return api::kNone;
  std::int64_t bytes = 0;
  for (const c10::IValue& one : value.toListRef()) bytes += std::max<std::int64_t>(bytes_of(one), 0);
  return bytes;
}

}  // namespace

ForwardingWork::ForwardingWork(WorkPtr inner) : Work(-1, inner->retrieveOpType()), inner_(std::move(inner)) {}

FutureWork::FutureWork(WorkPtr inner, IssuedOperation operation)
    : ForwardingWork(std::move(inner)), operation_(std::move(operation)) {}

FutureWork::~FutureWork() {
  if (operation_.number != api::kNone && !has_ended_) note_end_later();
  PyObject* const future = future_.load(std::memory_order_relaxed);
  if (future == nullptr || is_python_ending()) return;
  const py::gil_scoped_acquire inside;
  Py_DECREF(future);
}

py::object FutureWork::future(py::handle self) {
  if (future_.load(std::memory_order_relaxed) != nullptr) return made();
  return py::module_::import("cudafuture.distributed._backend").attr("make_future")(self);  // which calls keep()
}

py::object FutureWork::made() const {
  PyObject* const future = future_.load(std::memory_order_acquire);
  return future == nullptr ? py::none() : py::reinterpret_borrow<py::object>(future);
}

void FutureWork::keep(py::object future, bool is_compared) {
  if (future_.load(std::memory_order_relaxed) != nullptr) return;
  is_compared_ = is_compared;
  future_.store(future.release().ptr(), std::memory_order_release);
}

void FutureWork::note_end() noexcept {
  if (operation_.number != api::kNone && !has_ended_.exchange(true)) api::note_ended(*operation_.place);
}

// A caller that drops a Work early, such as DDP, waits for the future of torch.
void FutureWork::note_end_later() noexcept {
  if (!operation_.blocks_host || inner()->isCompleted()) return note_end();
  try {
    inner()->getFuture()->addCallback([place = operation_.place](c10::ivalue::Future&) { api::note_ended(*place); });
  } catch (const std::exception&) {  // a backend without futures
    note_end();
  }
}

std::optional<api::OperationWait> FutureWork::shown_wait(std::chrono::milliseconds timeout, bool has_line) {
  std::optional<api::OperationWait> shown;
  if (!operation_.blocks_host || inner()->isCompleted()) return shown;
  shown.emplace(api::WaitedOperation{operation_.name, operation_.place, operation_.number,
                                     operation_.bytes == api::kNone ? bytes_of(operation_.value) : operation_.bytes,
                                     operation_.peer, timeout != kNoTimeout, future_.load(std::memory_order_acquire)},
                has_line);
  return shown;
}

bool FutureWork::wait(std::chrono::milliseconds timeout) {
  if (!is_compared_) {
    const std::optional<api::OperationWait> shown = shown_wait(timeout, false);
    const bool ended = ForwardingWork::wait(timeout);
    note_end();
    return ended;
  }
  const py::gil_scoped_acquire inside;
  const py::object seconds = timeout == kNoTimeout ? py::none() : py::object(py::float_(timeout.count() / 1e3));
  py::module_::import("cudafuture.distributed._backend").attr("wait_compared")(made(), seconds);
  return true;
}

bool FutureWork::wait_inside(std::chrono::milliseconds timeout) {
  if (is_compared_) return wait(timeout);  // the future shows its line
  const std::optional<api::OperationWait> shown = shown_wait(timeout, true);
  const py::gil_scoped_release outside;
  const bool ended = ForwardingWork::wait(timeout);
  note_end();
  return ended;
}

bool FutureWork::isCompleted() {
  if (!is_compared_ || !inner()->isCompleted()) return inner()->isCompleted();
  const py::gil_scoped_acquire inside;
  return made().attr("done")().cast<bool>();
}

bool MessageWork::isCompleted() { return has_ended_.load() || inner()->isCompleted(); }

bool MessageWork::wait(std::chrono::milliseconds timeout) {
  std::unique_lock lock(waiting_, std::defer_lock);
  if (timeout == kNoTimeout) {
    lock.lock();
  } else {
    TORCH_CHECK(lock.try_lock_for(timeout), "Timed out waiting ", timeout.count(), "ms for a send or recv");
  }
  if (error_ != nullptr) std::rethrow_exception(error_);
  if (ended_) return *ended_;
  try {
    ended_ = inner()->wait(timeout);
  } catch (...) {
    error_ = std::current_exception();
    throw;
  }
  has_ended_.store(true);
  return *ended_;
}

WorkList::WorkList(std::vector<WorkPtr> works) : Work(-1, c10d::OpType::COALESCED), works_(std::move(works)) {}

bool WorkList::isCompleted() {
  return std::all_of(works_.begin(), works_.end(), [](const WorkPtr& work) { return work->isCompleted(); });
}

bool WorkList::isSuccess() const {
  return std::all_of(works_.begin(), works_.end(), [](const WorkPtr& work) { return work->isSuccess(); });
}

std::exception_ptr WorkList::exception() const {
  for (const WorkPtr& work : works_) {
    if (std::exception_ptr error = work->exception()) return error;
  }
  return nullptr;
}

std::vector<at::Tensor> WorkList::result() {
  std::vector<at::Tensor> all;
  for (const WorkPtr& work : works_) {
    for (at::Tensor& tensor : work->result()) all.push_back(std::move(tensor));
  }
  return all;
}

void WorkList::synchronize() {
  for (const WorkPtr& work : works_) work->synchronize();
}

bool WorkList::wait(std::chrono::milliseconds timeout) {
  bool ended = true;
  for (const WorkPtr& work : works_) ended = work->wait(timeout) && ended;
  return ended;
}

void WorkList::abort() {
  for (const WorkPtr& work : works_) work->abort();
}

// A failure is the caller's to see, on the Work.
void follow_for_trace(const WorkPtr& work) {
  if (dynamic_cast<FutureWork*>(work.get()) == nullptr || is_python_ending()) return;
  const py::gil_scoped_acquire inside;
  try {
    const py::object future = py::module_::import("cudafuture.distributed._backend").attr("trace")(py::cast(work));
    if (!future.is_none()) api::mark_seen(future.ptr());
  } catch (py::error_already_set& e) {
    if (!e.matches(PyExc_Exception)) throw;
    e.discard_as_unraisable("cudafuture");  // the operation goes on without a place in the trace
  }
}

void bind_work(py::module_& m) {
  py::class_<FutureWork, c10d::Work, Holder<FutureWork>> work(m, "FutureWork", R"(
Work of torch.distributed that has a CUDAFuture: what collectives on a group with the backend "cudafuture" return.

It is a ``torch.distributed.Work`` in every respect: ``wait()`` orders the current stream after the operation, or blocks
the thread for tensors on the host, as the wrapped backend does. Beside that it has the methods of its :attr:`future`.
)");
  work.def_property_readonly(
          "future", [](py::object self) { return self.cast<FutureWork&>().future(self); },
          "CUDAFuture of the operation, always the same one; its value is the output, None for an operation without.")
      .def_property_readonly(
          "inner", [](const FutureWork& self) { return self.inner(); }, "Work of the wrapped backend.")
      .def_property_readonly(
          "name", [](const FutureWork& self) { return self.operation().name; },
          "Name of the operation, that of the function in cudafuture.distributed.")
      .def_property_readonly(
          "group_name", [](const FutureWork& self) { return self.operation().group->name; }, "Name of the group.")
      .def_property_readonly(
          "group",
          [](const FutureWork& self) {
            return py::module_::import("cudafuture.distributed._backend")
                .attr("group_of_backend")(self.operation().group->name, self.operation().group->number);
          },
          "Process group; RuntimeError: it was destroyed.")
      .def_property_readonly(
          "sequence", [](const FutureWork& self) { return self.operation().sequence; },
          "Number of operations that this rank issued on the group before this one.")
      .def("wait", &FutureWork::wait_inside, py::arg("timeout") = kNoTimeout,
           R"(Wait as the Work of the wrapped backend does.

>>> import torch
>>> import torch.distributed as dist
>>> import cudafuture.distributed as cfd
>>> dist.all_reduce(torch.ones(2), group=cfd.wrap(), async_op=True).wait()
True
)")
      .def_property_readonly("_number", [](const FutureWork& self) { return self.operation().number; })
      .def_property_readonly("_group_number", [](const FutureWork& self) { return self.operation().group->number; })
      .def_property_readonly("_made", [](const FutureWork& self) { return self.made(); })
      .def(
          "_keep",
          [](FutureWork& self, py::object future, bool is_compared) { self.keep(std::move(future), is_compared); },
          py::arg("future"), py::arg("is_compared") = false)
      .def_property_readonly("_peer", [](const FutureWork& self) { return self.operation().peer; })
      .def_property_readonly("_value",
                             [](const FutureWork& self) { return torch::jit::toPyObject(self.operation().value); })
      .def_property_readonly("_stream", [](const FutureWork& self) { return self.operation().stream; });
  const std::pair<const char*, const char*> methods[] = {
      {"then", R"(Call ``future.then()``.

>>> import torch
>>> import torch.distributed as dist
>>> import cudafuture.distributed as cfd
>>> work = dist.all_reduce(torch.ones(2), group=cfd.wrap(), async_op=True)
>>> work.then(lambda f: f.value() / 2).wait()
tensor([0.5000, 0.5000])
)"},
      {"then_async", R"(Call ``future.then_async()``.

>>> import torch
>>> import torch.distributed as dist
>>> import cudafuture.distributed as cfd
>>> work = dist.all_reduce(torch.ones(2), group=cfd.wrap(), async_op=True)
>>> work.then_async(lambda f: dist.all_reduce(f.value(), async_op=True)).wait()
tensor([1., 1.])
)"},
      {"add_done_callback", R"(Call ``future.add_done_callback()``.

>>> import torch
>>> import torch.distributed as dist
>>> import cudafuture.distributed as cfd
>>> work = dist.all_reduce(torch.ones(2), group=cfd.wrap(), async_op=True)
>>> work.add_done_callback(lambda f: None)
)"},
      {"done", R"(Return ``future.done()``.

>>> import torch
>>> import torch.distributed as dist
>>> import cudafuture.distributed as cfd
>>> work = dist.all_reduce(torch.ones(2), group=cfd.wrap(), async_op=True)
>>> work.wait(), work.future.wait(), work.done()
(True, tensor([1., 1.]), True)
)"},
      {"ready", R"(Return ``future.ready()``.

>>> import torch
>>> import torch.distributed as dist
>>> import cudafuture.distributed as cfd
>>> work = dist.all_reduce(torch.ones(2), group=cfd.wrap(), async_op=True)
>>> work.future.wait(), work.ready()
(tensor([1., 1.]), True)
)"},
      {"__await__", "Await the future."},
  };
  for (const auto& [method, doc] : methods) {
    work.attr(method) = py::cpp_function(
        [method = method](const py::object& self, const py::args& args, const py::kwargs& named) {
          const py::object bound = self.attr("future").attr(method);
          PyObject* const keywords = named.size() == 0 ? nullptr : named.ptr();  // nanobind takes no empty ones
          PyObject* const result = PyObject_Call(bound.ptr(), args.ptr(), keywords);
          if (result == nullptr) throw py::error_already_set();
          return py::reinterpret_steal<py::object>(result);
        },
        py::name(method), py::is_method(work), py::doc(doc));
  }
  work.def("__repr__", [](FutureWork& self) {
    const IssuedOperation& operation = self.operation();
    return std::string("<FutureWork ") + operation.name + " #" + std::to_string(operation.sequence) + " on group '" +
           operation.group->name + "', " + (self.isCompleted() ? "completed" : "pending") + ">";
  });
}

}  // namespace cudafuture::c10d_backend
