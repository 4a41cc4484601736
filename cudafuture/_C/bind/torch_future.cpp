// The only file that looks behind torch's pybind11 objects, through pybind11's conduit.
#include "bind/torch_future.h"

#include <pybind11/conduit/pybind11_conduit_v1.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <algorithm>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>

#include "bind/errors.h"
#include "bind/forward.h"
#include "bind/future.h"
#include "bind/order.h"
#include "bind/promise.h"
#include "core/error.h"
#include "core/process.h"
#include "core/stream_pool.h"

namespace cudafuture::bind {
namespace {

using TorchFuture = c10::ivalue::Future;
using TorchFuturePtr = c10::intrusive_ptr<TorchFuture>;
using torch::jit::PythonFutureWrapper;

// The C++ object behind a pybind11 one, which is of the class. The conduit is the way that pybind11 promises to keep,
// and takes microseconds: it calls a method. It is asked once whether the pointer is where torch's own pybind11 headers
// have it, and from then on only if it is not.
template <class T>
T* behind(nb::handle object) {
  enum { unknown, right, wrong };
  static int layout = unknown;
  const auto* instance = reinterpret_cast<pybind11::detail::instance*>(object.ptr());
  void* const at_hand = instance->simple_layout ? instance->simple_value_holder[0] : nullptr;
  if (layout == right && at_hand != nullptr) return static_cast<T*>(at_hand);
  T* const found = pybind11_conduit_v1::get_type_pointer_ephemeral<T>(object.ptr());
  if (found == nullptr) throw nb::python_error();
  if (layout == unknown) layout = found == at_hand ? right : wrong;
  return found;
}

// Asked before the conduit: a conduit that leads nowhere costs more than all the rest.
bool is_torch_future(nb::handle object) {
  static Imported future_class{"torch._C", "Future"};
  return PyObject_TypeCheck(object.ptr(), reinterpret_cast<PyTypeObject*>(future_class().ptr())) != 0;
}

// Null where torch was built without torch.distributed.
PyTypeObject* work_class() {
  static Imported is_available{"torch.distributed", "is_available"};
  static const bool available = nb::cast<bool>(is_available()());
  if (!available) return nullptr;
  static Imported work{"torch._C._distributed_c10d", "Work"};
  return reinterpret_cast<PyTypeObject*>(work().ptr());
}

bool is_work(nb::handle object) {
  PyTypeObject* const type = work_class();
  return type != nullptr && PyObject_TypeCheck(object.ptr(), type) != 0;
}

// Runs inside torch's callback: the current streams are ordered after the value. Of a failure torch keeps no events.
EventSet record_devices(const TorchFuture& source) {
  if (source.devices().empty() || source.hasError() || !stands(Edge::from_torch_record)) return {};
  return EventSet::record(source.devices());
}

void add_tensors(const c10::IValue& value, std::vector<at::Tensor>& tensors) {
  if (value.isTensor()) {
    tensors.push_back(value.toTensor());
  } else if (value.isList()) {
    for (const c10::IValue& item : value.toList()) add_tensors(item, tensors);
  } else if (value.isTuple()) {
    for (const c10::IValue& item : value.toTupleRef().elements()) add_tensors(item, tensors);
  }
}

// The thread has just left the interpreter to complete torch's future with an object of Python's.
std::vector<c10::Device> devices_of_object(const c10::IValue& value) {
  if (is_finalizing()) return {};
  const Entry entry;
  const PyGILState_STATE state = PyGILState_Ensure();
  std::vector<c10::Device> devices;
  std::exception_ptr error;
  try {
    devices = find_tensors(object_of(value), false).devices;
  } catch (...) {
    error = std::make_exception_ptr(
        std::runtime_error(std::string(nb::str(exception_of(std::current_exception())).c_str())));
  }
  PyGILState_Release(state);
  if (error != nullptr) std::rethrow_exception(error);
  return devices;
}

std::vector<c10::Device> devices_of(const c10::IValue& value) {
  if (!any_device_with_streams()) return {};
  if (value.isPyObject()) return devices_of_object(value);
  std::vector<at::Tensor> tensors;
  add_tensors(value, tensors);
  return cudafuture::devices_of(tensors);
}

// Records events on the current streams of devices that a Work's future does not name.
EventSet record_work(const std::vector<c10::Device>& devices) {
  return stands(Edge::work_record) ? EventSet::record(devices) : EventSet();
}

// The value stays as it is in C++; no interpreter is needed.
void follow_natively(const TorchFuturePtr& source, std::shared_ptr<Promise> promise) {
  source->addCallback([promise = std::move(promise)](TorchFuture& done) {
    if (done.hasError()) {
      promise->fail(done.exception_ptr(), record_devices(done));
    } else {
      promise->complete(done.constValue(), record_devices(done));
    }
  });
}

// The same for the future of a Work that names no devices, although its tensors may be on some: Gloo's, which has made
// the current streams of its thread wait for its copies. The devices are taken from the value.
void follow_without_devices(const TorchFuturePtr& source, std::shared_ptr<Promise> promise) {
  source->addCallback([promise = std::move(promise)](TorchFuture& done) {
    if (done.hasError()) {
      promise->fail(done.exception_ptr(), {});
      return;
    }
    try {
      std::vector<c10::Device> devices = devices_of(done.constValue());
      if (devices.empty()) devices = promise->devices();
      promise->complete(done.constValue(), record_work(devices));
    } catch (...) {
      promise->fail(std::current_exception(), {});
    }
  });
}

// A torch.futures.Future can carry an unwrap function, which turns a value into the exception that it stands for. RPC
// sets it at once, set_exception() only when it completes the future. It is Python, so it runs where Python runs.
class Unwrap final : public Continuation {
 public:
  using UnwrapFunction = PythonFutureWrapper::UnwrapFunc;

  Unwrap(std::optional<UnwrapFunction> unwrap, TorchFuturePtr source, EventSet events)
      : Continuation(foreign, &InlineExecutor::get()),
        unwrap_(std::move(unwrap)),
        source_(std::move(source)),
        events_(std::move(events)) {}

  // The future that it completes stands in the place of the parent.
  void run(Future& future) noexcept override {
    try {
      outcome(future);
    } catch (nb::python_error& e) {
      fail(future, nb::borrow(e.value()));
    } catch (...) {
      fail(future, exception_of(std::current_exception()));
    }
    delete this;
  }
  bool refuse(const std::exception_ptr& error) noexcept override {
    parent->fail(Value::of_error(error));
    return true;
  }
  void abandon() noexcept override {
    break_promise(wrap(parent));
    delete this;
  }

 private:
  void outcome(Future& future) {
    if (source_->hasError()) {
      future.fail(Value::of_error(source_->exception_ptr()), std::move(events_));
      return;
    }
    nb::object value = object_of(source_->constValue());
    if (unwrap_.has_value()) (*unwrap_)(pybind11::reinterpret_borrow<pybind11::object>(value.ptr()));
    future.complete(Value::of_object(bind::foreign(std::move(value))), std::move(events_));
  }

  std::optional<UnwrapFunction> unwrap_;
  TorchFuturePtr source_;
  EventSet events_;
};

// `producer`: what must live until it is done.
void follow_wrapper(PythonFutureWrapper& wrapper, FuturePtr future, std::shared_ptr<Foreign> producer = {}) {
  const TorchFuturePtr source = wrapper.fut;
  source->addCallback([weak = wrapper.weak_from_this(), unwrap = wrapper.unwrap_func, producer = std::move(producer),
                       promise = std::make_shared<Promise>(std::move(future))](TorchFuture& done) {
    // Here the wrapper that completes it is still alive; later, on the callback thread, it may be gone.
    const auto alive = weak.lock();
    auto* c = new Unwrap(alive != nullptr ? alive->unwrap_func : unwrap,
                         TorchFuturePtr::unsafe_reclaim_from_nonowning(&done), record_devices(done));
    c->parent = promise->take();
    InlineExecutor::get().post(c);
  });
}

std::vector<at::Tensor> output_of(c10d::Work& work) {
  try {
    return work.result();
  } catch (const c10::Error&) {  // it has none to show
    return {};
  }
}

// Blocks until the Work is done, and completes the promise with its result.
void wait_for(c10d::Work& work, Promise& promise) noexcept {
  try {
    std::vector<at::Tensor> result = output_of(work);  // the tensors are known before their contents
    std::vector<c10::Device> devices =
        any_device_with_streams() ? cudafuture::devices_of(result) : std::vector<c10::Device>();
    if (devices.empty()) devices = promise.devices();
    const StreamScope scope(pool_streams(devices, 0));
    work.wait();  // makes the current streams wait
    result = output_of(work);
    promise.complete(c10::IValue(std::move(result)), record_work(devices));
  } catch (...) {
    promise.fail(std::current_exception(), {});
  }
}

// A Work without a future (Gloo's send and recv): only a thread blocked in its wait() learns of the end. Each has a
// thread of its own, since a bounded pool would deadlock; it is detached, since nothing can wake it.
void follow_by_waiting(c10::intrusive_ptr<c10d::Work> work, std::shared_ptr<Promise> promise) {
  try {
    std::thread([work, promise] { wait_for(*work, *promise); }).detach();
  } catch (const std::system_error&) {
    promise->fail(std::make_exception_ptr(no_thread("following a send or recv")), {});
  }
}

// NCCL's futures are complete when the work is enqueued; what goes wrong with it later, only the Work learns.
class WorkAftermath final : public Aftermath {
 public:
  explicit WorkAftermath(c10::intrusive_ptr<c10d::Work> work) : work_(std::move(work)) {}
  std::exception_ptr error() noexcept override { return work_->exception(); }

 private:
  c10::intrusive_ptr<c10d::Work> work_;
};

void follow_native_work(c10d::Work& work, FuturePtr future, Foreign value, double timeout) {
  auto owned = c10::intrusive_ptr<c10d::Work>::unsafe_reclaim_from_nonowning(&work);
  TorchFuturePtr native;
  try {
    native = owned->getFuture();
  } catch (const c10::Error&) {  // not implemented for this kind of work
  }
  if (native != nullptr && !native->devices().empty()) {
    future->set_aftermath(std::make_unique<WorkAftermath>(owned));
  }
  std::vector<c10::Device> devices;
  if (value) devices = find_tensors(nb::handle(static_cast<PyObject*>(value.get())), true).devices;
  auto promise = std::make_shared<Promise>(std::move(future), std::move(value), timeout, std::move(devices));
  if (native == nullptr) {
    follow_by_waiting(std::move(owned), std::move(promise));
  } else if (native->devices().empty()) {
    follow_without_devices(native, std::move(promise));
  } else {
    follow_natively(native, std::move(promise));
  }
}

// A Work whose class is written in Python: its C++ side knows neither how to unwrap an error nor how long Python lives.
void follow_python_work(nb::handle object, FuturePtr future) {
  nb::object followed;
  try {
    followed = object.attr("get_future")();
  } catch (nb::python_error& e) {
    if (!e.matches(PyExc_RuntimeError)) throw;  // RuntimeError and NotImplementedError: it has none
  }
  if (followed.is_valid() && is_torch_future(followed)) {
    follow_wrapper(*behind<PythonFutureWrapper>(followed), std::move(future),
                   std::make_shared<Foreign>(nb::borrow(object).release().ptr()));
  } else {
    static Imported follow{"cudafuture._work", "follow"};
    call(follow(), object, wrap(std::move(future)));
  }
}

// Completes torch's future when ours is done.
class Deliver final : public Continuation {
 public:
  explicit Deliver(nb::object target) : Continuation(foreign), target_(std::move(target)) {}

  void run(Future& source) noexcept override {
    try {
      if (has_to_wait_for_devices(source)) {
        flags |= when_ready;
        source.attach(this);
        return;
      }
      deliver(source);
    } catch (...) {
      fail_target(exception_of(std::current_exception()));
    }
    delete this;
  }

  // Torch's future may have got callbacks and children of its own meanwhile, which nobody else would ever run.
  void abandon() noexcept override {
    if (!is_finalizing() && !is_forked_child()) {
      const nb::error_scope raised_already;  // this may be inside the destructor of any object
      fail_target(make_error("InvalidStateError",
                             "the CUDAFuture that this one follows was dropped before anybody completed it"));
    }
    delete this;
  }

  int visit(ForeignVisitor visitor) const override { return visitor(target_.ptr()); }

 private:
  bool has_to_wait_for_devices(Future& source) {
    if (source.state() != State::completed || has_waited_ || is_known_to_torch(source)) return false;
    refuse_captured(source, "to_torch() of a pending future without devices");
    return has_waited_ = true;
  }

  void deliver(Future& source) {
    const CallbackOrder order(CallbackOrder::by_completion());  // of the callbacks that torch's future has
    if (source.state() != State::completed) {                   // torch's future can have no events then
      fail_target(exception_of(source));
      return;
    }
    // Torch records its events here, and tells the allocator itself who waits for the value.
    const StreamScope scope(pool_streams(source.events().devices(), source.priority()));
    if (stands(Edge::to_torch_stream)) source.events().block_current_streams();
    if (is_known_to_torch(source)) {
      target_.attr("set_result")(result_of(source));
    } else {
      set_result_on_known_devices(source);
    }
  }

  bool is_known_to_torch(const Future& source) const {
    const std::vector<c10::Device>& known = behind<PythonFutureWrapper>(target_)->fut->devices();
    const std::vector<c10::Device> used = source.events().devices();
    return std::all_of(used.begin(), used.end(),
                       [&](c10::Device d) { return std::find(known.begin(), known.end(), d) != known.end(); });
  }

  // A device got its context after torch's future was made, which therefore does not know it. Torch refuses such a
  // value, unless it is given the storages that it has to order: those on the other devices, because here the host has
  // waited.
  void set_result_on_known_devices(Future& source) {
    const TorchFuturePtr native = behind<PythonFutureWrapper>(target_)->fut;
    const std::vector<c10::Device>& known = native->devices();
    std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> storages;
    for (const at::Tensor& tensor : tensors_of(source)) {
      if (std::find(known.begin(), known.end(), tensor.device()) != known.end() && tensor.has_storage()) {
        storages.emplace_back(tensor.storage().getWeakStorageImpl());
      }
    }
    c10::IValue value = torch::jit::toIValue(result_of(source).ptr(), c10::PyObjectType::get());
    const WithoutGil released;
    native->markCompleted(std::move(value), std::move(storages));
  }

  void fail_target(const nb::object& exception) noexcept {
    try {
      TorchFuturePtr native = behind<PythonFutureWrapper>(target_)->fut;
      python_error error;
      PyErr_SetObject(exception.type().ptr(), exception.ptr());
      error.persist();
      const std::exception_ptr carried = std::make_exception_ptr(std::move(error));
      const WithoutGil released;
      native->setErrorIfNeeded(carried);
    } catch (...) {
      log_error("to_torch() could not complete %r", target_, exception_of(std::current_exception()));
    }
  }

  nb::object target_;
  bool has_waited_ = false;
};

// Completes a future with a value that was known before, when the Work behind `parent`, written in Python, is done.
class Substitute final : public Continuation {
 public:
  Substitute(FuturePtr future, nb::object value)
      : Continuation(foreign), future_(std::move(future)), value_(bind::foreign(std::move(value))) {}

  void run(Future& work) noexcept override {
    if (work.state() == State::completed) {
      future_->complete(Value::of_object(std::move(value_)), kept(work.events(), Edge::work_events));
    } else {
      fail(*future_, as_origin_says(future_->origin(), exception_of(work)));
    }
    delete this;
  }
  void abandon() noexcept override {
    const Promise told(std::move(future_));
    delete this;
  }
  int visit(ForeignVisitor visitor) const override { return visitor(value_.get()); }

 private:
  FuturePtr future_;
  Foreign value_;
};

}  // namespace

void follow_work(nb::handle work, FuturePtr future, nb::object value, double timeout) {
  if (!is_work(work)) {
    const std::string message = "expected a c10d Work, not " + std::string(nb::repr(work).c_str());
    throw nb::type_error(message.c_str());
  }
  if (Py_TYPE(work.ptr()) == work_class()) {
    follow_native_work(*behind<c10d::Work>(work), std::move(future), bind::foreign(std::move(value)), timeout);
    return;
  }
  const nb::object followed = from_torch(work);
  core_of(followed).attach(new Substitute(std::move(future), std::move(value)));
}

nb::object from_torch(nb::handle source) {
  const Entry entry;
  refuse_after_fork();
  if (core_of_or_null(source) != nullptr) return nb::borrow(source);
  if (is_torch_future(source)) {
    auto* wrapper = behind<PythonFutureWrapper>(source);
    const TorchFuturePtr native = wrapper->fut;
    auto future = c10::make_intrusive<Future>();
    if (!native->devices().empty()) future->set_bounding_set(native->devices());
    nb::object result = wrap(future);
    follow_wrapper(*wrapper, std::move(future));
    return result;
  }
  if (is_work(source)) {
    auto future = c10::make_intrusive<Future>();
    nb::object result = wrap(future);
    future->start();  // it owns the tensors: too late to cancel
    if (Py_TYPE(source.ptr()) == work_class()) {
      follow_native_work(*behind<c10d::Work>(source), std::move(future), {}, kNoTimeout);
    } else {
      follow_python_work(source, std::move(future));
    }
    return result;
  }
  const std::string message =
      "from_torch() takes a torch.futures.Future or a c10d Work (what async_op=True returns), not " +
      std::string(nb::repr(source).c_str());
  throw nb::type_error(message.c_str());
}

nb::object to_torch(nb::handle future) {
  static Imported future_class{"torch.futures", "Future"};
  const Entry entry;
  refuse_after_fork();
  Future& core = expect_future(future, "to_torch()");
  // Torch takes a stream of every device that it is given, which would make a context there: so it gets the devices
  // that are in use, and those that are current.
  nb::list devices;
  if (core.done()) {
    for (c10::Device device : core.events().devices()) devices.append(device_object(device));
  } else {
    const std::vector<c10::Device> current = current_devices();
    for (c10::Device device : core.is_bounded() ? core.bounding_set() : all_devices_with_streams()) {
      const bool is_current = std::find(current.begin(), current.end(), device) != current.end();
      if (has_streams(device) && (is_current || has_context(device))) devices.append(device_object(device));
    }
  }
  nb::object target = future_class()(nb::arg("devices") = devices);
  core.attach(new Deliver(target));
  raise_kept_interrupt();
  return target;
}

nb::object object_of(const c10::IValue& value) {
  if (value.isNone()) return nb::none();
  if (value.isTensor()) return nb::steal(THPVariable_Wrap(value.toTensor()));
  if (value.isTensorList()) return nb::steal(THPVariable_WrapList(value.toTensorVector()));
  return nb::steal(torch::jit::toPyObject(value).release().ptr());
}

nb::object exception_of_pybind(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const pybind11::error_already_set& e) {
    return nb::borrow(nb::handle(e.value().ptr()));
  } catch (const pybind11::builtin_exception& e) {  // value_error, type_error, ...
    e.set_error();
    return take_current_exception();
  } catch (...) {
    return {};
  }
}

}  // namespace cudafuture::bind
