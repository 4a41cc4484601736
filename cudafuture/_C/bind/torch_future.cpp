// The bridges to torch.futures.Future, both ways.
#include "bind/torch_future.h"

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <optional>
#include <string>

#include "bind/conduit.h"
#include "bind/errors.h"
#include "bind/future.h"
#include "bind/order.h"
#include "bind/promise.h"
#include "core/process.h"
#include "core/stream_pool.h"

namespace cudafuture::bind {
namespace {

// Converts a value with torch's unwrap function, which a torch.futures.Future can carry to turn a value into the
// exception that it represents. RPC sets it at once, set_exception() only on completion. It is Python, so it runs
// inside the interpreter.
class Unwrap final : public Continuation {
 public:
  using UnwrapFunction = PythonFutureWrapper::UnwrapFunc;

  Unwrap(std::optional<UnwrapFunction> unwrap, TorchFuturePtr source, EventSet events)
      : Continuation(foreign, &InlineExecutor::get()),
        unwrap_(std::move(unwrap)),
        source_(std::move(source)),
        events_(std::move(events)) {}

  // `future` is the one that this completes, in the place of the parent.
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

// Completes torch's future when this library's future is done.
class Deliver final : public Continuation {
 public:
  explicit Deliver(nb::object target)
      : Continuation(foreign), target_(std::move(target)), native_(behind<PythonFutureWrapper>(target_)->fut) {}

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

  // Fails torch's future, which may have callbacks and children of its own by now: otherwise they would never run.
  void abandon() noexcept override {
    if (!is_finalizing() && !is_forked_child()) {
      const nb::error_scope raised_already;  // this may run inside the destructor of any object
      fail_target(make_error("InvalidStateError",
                             "the CUDAFuture that this one follows was dropped before it completed; keep it alive "
                             "until it is done"));
    }
    delete this;
  }

  bool refuse(const std::exception_ptr& error) noexcept override {
    native_->setErrorIfNeeded(error);
    return true;
  }

  int visit(ForeignVisitor visitor) const override { return visitor(target_.ptr()); }

 private:
  bool has_to_wait_for_devices(Future& source) {
    if (source.state() != State::completed || has_waited_ || is_known_to_torch(source)) return false;
    refuse_captured(source, "to_torch() of a pending future without devices");
    return has_waited_ = true;
  }

  void deliver(Future& source) {
    const CallbackOrder order(CallbackOrder::by_completion());  // for the callbacks of torch's future
    if (source.state() != State::completed) {                   // torch's future cannot have events then
      fail_target(exception_of(source));
      return;
    }
    if (core_of_or_null(result_of(source)) != nullptr) {
      fail_target(
          nb::handle(PyExc_TypeError)("the value of the future is a CUDAFuture, which torch's code cannot wait for: a "
                                      "callback that returns a future is attached by then_async(), not by then()"));
      return;
    }
    // Here torch records its events, and tells the allocator about consumers of the value.
    const EventSet& events = source.events();
    const StreamScope scope(pool_streams_after(events, events.devices(), source.priority()));
    if (stands(SyncEdge::to_torch_stream)) events.block_current_streams();
    if (is_known_to_torch(source)) {
      target_.attr("set_result")(result_of(source));
    } else {
      set_result_on_known_devices(source);
    }
  }

  bool is_known_to_torch(const Future& source) const {
    const std::vector<c10::Device>& known = native_->devices();
    const std::vector<c10::Device> used = source.events().devices();
    return std::all_of(used.begin(), used.end(),
                       [&](c10::Device d) { return std::find(known.begin(), known.end(), d) != known.end(); });
  }

  // Completes torch's future when a device got its context after that future was created, so the future does not know
  // the device. Torch refuses such a value unless it gets the storages to order. These are the storages on the other
  // devices, because the host has waited here.
  void set_result_on_known_devices(Future& source) {
    const std::vector<c10::Device>& known = native_->devices();
    std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> storages;
    for (const at::Tensor& tensor : tensors_of(source)) {
      if (std::find(known.begin(), known.end(), tensor.device()) != known.end() && tensor.has_storage()) {
        storages.emplace_back(tensor.storage().getWeakStorageImpl());
      }
    }
    c10::IValue value = torch::jit::toIValue(result_of(source).ptr(), c10::PyObjectType::get());
    const WithoutGil released;
    native_->markCompleted(std::move(value), std::move(storages));
  }

  void fail_target(const nb::object& exception) noexcept {
    try {
      python_error error;
      PyErr_SetObject(exception.type().ptr(), exception.ptr());
      error.persist();
      const std::exception_ptr carried = std::make_exception_ptr(std::move(error));
      const WithoutGil released;
      native_->setErrorIfNeeded(carried);
    } catch (...) {
      log_error("to_torch() could not complete %r", target_, exception_of(std::current_exception()));
    }
  }

  nb::object target_;
  TorchFuturePtr native_;  // behind the target
  bool has_waited_ = false;
};

}  // namespace

// Checked before the conduit: a conduit for an unrelated object costs more than everything else.
bool is_torch_future(nb::handle object) {
  static Imported future_class{"torch._C", "Future"};
  return PyObject_TypeCheck(object.ptr(), reinterpret_cast<PyTypeObject*>(future_class().ptr())) != 0;
}

// torch hides the events of a completed future: its callbacks run on other streams, which wait for the events, and it
// tells the allocator that those streams use the value. The name of a private member may be given in an explicit
// instantiation, so this file reaches them.
std::vector<c10::Event>& hidden_events(TorchFuture& future);
template <auto events>
struct HiddenEvents {
  friend std::vector<c10::Event>& hidden_events(TorchFuture& future) { return future.*events; }
};
template struct HiddenEvents<&TorchFuture::events_>;

EventSet take_events(TorchFuture& source, std::uint64_t capture) {
  if (source.hasError()) return EventSet();
  std::vector<DeviceEventPtr> events;
  for (c10::Event& event : hidden_events(source)) {
    const c10::Device device = event.device();
    events.push_back(c10::make_intrusive<DeviceEvent>(std::move(event), device, capture));
  }
  hidden_events(source).clear();
  return EventSet(std::move(events));
}

// Torch would run the callback on streams of its own pool, which captures of the program use too.
void when_done(TorchFuture& source, std::function<void(TorchFuture&)> callback) {
  source.addCallback(
      [callback = std::move(callback)](TorchFuture& done) {
        if (done.devices().empty()) return callback(done);
        const StreamScope scope(pool_streams_here(done.devices(), 0));
        done.wait();  // makes the streams wait, and tells the allocator that they use the value
        callback(done);
      },
      /*uses_future=*/false);
}

// The current streams are ordered after the value. Torch keeps no events of a failure.
EventSet record_devices(const TorchFuture& source) {
  if (source.devices().empty() || source.hasError() || !stands(SyncEdge::from_torch_record)) return {};
  return EventSet::record(source.devices());
}

void follow_torch_future(nb::handle torch_future, FuturePtr future, std::shared_ptr<Foreign> producer) {
  PythonFutureWrapper& wrapper = *behind<PythonFutureWrapper>(torch_future);
  const TorchFuturePtr source = wrapper.fut;
  when_done(*source, [weak = wrapper.weak_from_this(), unwrap = wrapper.unwrap_func, producer = std::move(producer),
                      promise = std::make_shared<Promise>(std::move(future))](TorchFuture& done) {
    // The wrapper that completes it is still alive here; later, on the callback thread, it may be gone.
    const auto alive = weak.lock();
    auto* c = new Unwrap(alive != nullptr ? alive->unwrap_func : unwrap,
                         TorchFuturePtr::unsafe_reclaim_from_nonowning(&done), record_devices(done));
    c->parent = promise->take();
    InlineExecutor::get().post(c);
  });
}

nb::object to_torch(nb::handle future) {
  static Imported future_class{"torch.futures", "Future"};
  const ParkingScope parking;
  refuse_after_fork();
  Future& core = expect_future(future, "to_torch()");
  // Torch takes a stream of every device that it gets, which would create a context there. So it gets only the devices
  // in use and the current ones.
  nb::list devices;
  if (core.done()) {
    for (c10::Device device : core.events().devices()) devices.append(device_object(device));
  } else {
    const CurrentDevices current = current_devices();
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
