#include "bind/work.h"

#include <c10/core/DeviceGuard.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "bind/conduit.h"
#include "bind/errors.h"
#include "bind/future.h"
#include "bind/promise.h"
#include "bind/torch_future.h"
#include "bind/work_errors.h"
#include "core/capture.h"
#include "core/context.h"
#include "core/error.h"
#include "core/process.h"
#include "core/stream_pool.h"

namespace cudafuture::bind {
namespace {

// Returns null if torch was built without torch.distributed.
PyTypeObject* work_class() {
  static Imported is_available{"torch.distributed", "is_available"};
  static const bool available = nb::cast<bool>(is_available()());
  if (!available) return nullptr;
  static Imported work{"torch._C._distributed_c10d", "Work"};
  return reinterpret_cast<PyTypeObject*>(work().ptr());
}

bool is_python_work(nb::handle work) { return Py_TYPE(work.ptr()) != work_class(); }

// Returns true for a Work of the backend "cudafuture".
bool is_future_work(nb::handle work) {
  static Imported type{"cudafuture._c10d", "FutureWork"};
  return is_python_work(work) && nb::isinstance(work, type());
}

// Returns the Work that a Work of the backend "cudafuture" forwards to; any other Work as it is.
nb::object wrapped_work(nb::handle work) { return is_future_work(work) ? work.attr("inner") : nb::borrow(work); }

void add_tensors(const c10::IValue& value, std::vector<at::Tensor>& tensors) {
  if (value.isTensor()) {
    tensors.push_back(value.toTensor());
  } else if (value.isList()) {
    for (const c10::IValue& item : value.toList()) add_tensors(item, tensors);
  } else if (value.isTuple()) {
    for (const c10::IValue& item : value.toTupleRef().elements()) add_tensors(item, tensors);
  }
}

// Enters the interpreter again: the thread has just left it to complete torch's future with a Python object.
std::vector<c10::Device> devices_of_object(const c10::IValue& value) {
  if (is_finalizing()) return {};
  const ParkingScope parking;
  const nb::gil_scoped_acquire inside;
  return find_tensors(object_of(value), false).devices;
}

std::vector<c10::Device> devices_of(const c10::IValue& value) {
  if (!any_device_with_streams()) return {};
  if (value.isPyObject()) return devices_of_object(value);
  std::vector<at::Tensor> tensors;
  add_tensors(value, tensors);
  return cudafuture::devices_of(tensors);
}

// Returns the stream capture of this thread's current stream, in which a Work has just been enqueued; 0: none.
std::uint64_t capture_on(c10::Device device) {
  const c10::DeviceGuard guard(device);
  return capture_of(current_stream(device));
}

// Records events on the current streams of devices that a Work's future does not name.
EventSet record_work(const std::vector<c10::Device>& devices) {
  return stands(SyncEdge::work_record) ? EventSet::record(devices) : EventSet();
}

// Follows the pending future of a Work on devices, without the interpreter: the value stays in C++.
void follow_natively(const TorchFuturePtr& source, std::shared_ptr<Promise> promise,
                     std::shared_ptr<WorkErrors> errors) {
  when_done(*source, [promise = std::move(promise), errors = std::move(errors)](TorchFuture& done) {
    EventSet events = record_devices(done);
    errors->set_events(events);
    if (done.hasError()) {
      promise->fail(done.exception_ptr(), std::move(events));
    } else {
      promise->complete(done.constValue(), std::move(events));
    }
  });
}

// Records events after a Work whose future is no proof of completion, although the Work is enqueued: it holds no
// tensors. ProcessGroupNCCL returns two kinds of them:
//   - the end of a coalesced batch, also under the name of another operation (an uneven all_gather or reduce_scatter):
//     the future holds an empty list;
//   - a gather, on every rank except the root: the future fails immediately, because it cannot hold the undefined
//     tensor that represents the missing output.
//
// Synchronizing it empties its stash. If nothing else keeps the tensors, that is right only on the streams that own
// them: they are taken to be the current ones, which then wait for the Work.
EventSet record_after(c10d::Work& work, const std::vector<c10::Device>& devices, bool keeps_tensors) {
  const WithoutGil released;
  const StreamScope scope(keeps_tensors ? pool_streams_here(devices, 0) : current_streams(devices));
  const c10::DeviceGuard guard(devices.front());
  work.synchronize();  // makes the current streams wait
  return record_work(devices);
}

// Follows a Work that is enqueued on devices. `is_ours`: this library issued it, so no other code uses its future.
void follow_enqueued(c10d::Work& work, const TorchFuturePtr& native, std::shared_ptr<Promise> promise,
                     std::shared_ptr<WorkErrors> errors, bool is_ours) {
  const std::vector<c10::Device>& devices = native->devices();
  const bool has_proof = !native->hasError() && !native->storages().empty();
  if (has_proof && !is_ours) return follow_natively(native, std::move(promise), std::move(errors));
  try {
    EventSet events = has_proof ? kept(take_events(*native, capture_on(devices.front())), SyncEdge::work_events)
                                : record_after(work, devices, is_ours);
    errors->set_events(events);
    promise->complete(native->hasError() ? c10::IValue() : native->constValue(), std::move(events));
  } catch (...) {
    promise->fail(std::current_exception(), {});
  }
}

// Follows the future of a Work that names no devices although its tensors may be on some. Gloo's has made the current
// streams of its thread wait for its copies. The devices are taken from the value.
void follow_without_devices(const TorchFuturePtr& source, std::shared_ptr<Promise> promise) {
  when_done(*source, [promise = std::move(promise)](TorchFuture& done) {
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

std::vector<at::Tensor> output_of(c10d::Work& work) {
  try {
    return work.result();
  } catch (const c10::Error&) {  // it has no result
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

// Follows a Work without a future (Gloo's send and recv): only a thread blocked in its wait() learns of its completion.
// Each has its own thread, since a bounded pool would deadlock. The thread is detached, since nothing can wake it.
void follow_by_waiting(c10::intrusive_ptr<c10d::Work> work, std::shared_ptr<Promise> promise) {
  try {
    std::thread([work = std::move(work), promise, context = CallerContext::capture()]() mutable {
      const ParkingScope parking;                 // the last owner of a tensor takes the GIL
      const CallerContext::Scope scope(context);  // wait() may copy into the caller's tensors
      wait_for(*work, *promise);
      promise.reset();
      work.reset();
    }).detach();
  } catch (const std::system_error&) {
    promise->fail(std::make_exception_ptr(no_thread("following a send or recv")), {});
  }
}

// Returns the backends that may carry a Work if the caller names no group: all that torch knows.
BackendsPtr all_backends() {
  static Imported known{"cudafuture.distributed._backends", "of_all_groups"};
  const nb::object backends = call(known());
  return backends.is_none() ? nullptr : nb::cast<BackendsPtr>(backends);
}

TorchFuturePtr future_of(c10d::Work& work) {
  try {
    return work.getFuture();
  } catch (const c10::Error&) {  // not implemented for this kind of work
    return nullptr;
  }
}

// Adds what the operation is until its device work has finished: NCCL's futures are complete when the work is enqueued.
// Failures come later, and the device uses the tensors until then.
std::shared_ptr<WorkErrors> add_operation(Future& future, KeptWork&& work, const std::optional<WorkGroup>& group) {
  const nb::object origin = group ? group->origin : nb::none();
  auto errors = WorkErrors::of(std::move(work), group ? group->backends : all_backends(), origin);
  future.add_async_errors(errors);
  return errors;
}

void follow_native_work(c10d::Work& work, FuturePtr future, Foreign value, Foreign tensors,
                        const std::optional<WorkGroup>& group) {
  auto owned = c10::intrusive_ptr<c10d::Work>::unsafe_reclaim_from_nonowning(&work);
  const TorchFuturePtr native = future_of(work);
  std::shared_ptr<WorkErrors> errors;
  if (native != nullptr && !native->devices().empty()) {
    errors = add_operation(*future, KeptWork(owned, std::move(tensors), current_streams(native->devices())), group);
  }
  std::vector<c10::Device> devices;
  if (value) devices = find_tensors(nb::handle(static_cast<PyObject*>(value.get())), true).devices;
  const double timeout = group ? group->timeout : kNoTimeout;
  auto promise = std::make_shared<Promise>(std::move(future), std::move(value), timeout, std::move(devices));
  if (native == nullptr) {
    follow_by_waiting(std::move(owned), std::move(promise));
  } else if (native->devices().empty()) {
    follow_without_devices(native, std::move(promise));
  } else if (!native->completed() || (native->hasError() && owned->exception() != nullptr)) {
    follow_natively(native, std::move(promise), std::move(errors));
  } else {
    follow_enqueued(*owned, native, std::move(promise), std::move(errors), group.has_value());
  }
}

// Follows a Work whose class is written in Python: its C++ side can neither unwrap an error nor tell when Python ends.
void follow_python_work(nb::handle object, FuturePtr future) {
  nb::object followed;
  try {
    followed = object.attr("get_future")();
  } catch (nb::python_error& e) {
    if (!e.matches(PyExc_RuntimeError)) throw;  // RuntimeError and NotImplementedError: it has no future
  }
  if (followed.is_valid() && is_torch_future(followed)) {
    follow_torch_future(followed, std::move(future), std::make_shared<Foreign>(nb::borrow(object).release().ptr()));
  } else {
    static Imported follow{"cudafuture._work", "follow"};
    call(follow(), object, wrap(std::move(future)));
  }
}

// Completes a future with a known value when the future of a Work written in Python (`parent`) is done.
class Substitute final : public Continuation {
 public:
  Substitute(FuturePtr future, nb::object value, nb::object tensors)
      : Continuation(foreign),
        future_(std::move(future)),
        value_(bind::foreign(std::move(value))),
        tensors_(bind::foreign(std::move(tensors))) {}

  void run(Future& work) noexcept override {
    future_->inherit_host_time(work);
    if (work.state() == State::completed) {
      future_->complete(Value::of_object(std::move(value_)), kept(work.events(), SyncEdge::work_events));
    } else {
      fail(*future_, as_origin_says(future_->origin(), exception_of(work)));
    }
    delete this;
  }
  void abandon() noexcept override {
    const Promise told(std::move(future_));
    delete this;
  }
  int visit(ForeignVisitor visitor) const override {
    const int stop = visitor(value_.get());
    return stop != 0 ? stop : visitor(tensors_.get());
  }

 private:
  FuturePtr future_;
  Foreign value_;
  Foreign tensors_;  // that the operation uses until it is done
};

}  // namespace

bool is_work(nb::handle object) {
  PyTypeObject* const type = work_class();
  return type != nullptr && PyObject_TypeCheck(object.ptr(), type) != 0;
}

nb::object future_of_work(nb::handle object) {
  if (!is_work(object) || !is_future_work(object)) return {};
  return object.attr("future");
}

void follow(nb::handle given, FuturePtr future) {
  const nb::object work = wrapped_work(given);
  if (is_python_work(work)) {
    follow_python_work(work, std::move(future));
  } else {
    follow_native_work(*behind<c10d::Work>(work), std::move(future), {}, {}, std::nullopt);
  }
}

nb::object from_torch(nb::handle source) {
  const ParkingScope parking;
  refuse_after_fork();
  if (core_of_or_null(source) != nullptr) return nb::borrow(source);
  if (is_torch_future(source)) {
    auto* wrapper = behind<PythonFutureWrapper>(source);
    const TorchFuturePtr native = wrapper->fut;
    auto future = c10::make_intrusive<Future>();
    if (!native->devices().empty()) future->set_bounding_set(native->devices());
    future->set_operation({&OperationPlace::find("engine", "torch", "of")});
    nb::object result = wrap(future);
    follow_torch_future(source, std::move(future));
    return result;
  }
  if (is_work(source)) {
    auto future = c10::make_intrusive<Future>();
    future->set_operation({&OperationPlace::find("engine", "torch", "of")});
    nb::object result = wrap(future);
    future->start();  // it owns the tensors: too late to cancel
    follow(source, std::move(future));
    return result;
  }
  const std::string message =
      "from_torch() takes a torch.futures.Future or a c10d Work (which a collective with async_op=True returns), not " +
      repr_of(source);
  throw nb::type_error(message.c_str());
}

void follow_work(nb::handle given, FuturePtr future, nb::object value, nb::object tensors, const WorkGroup& group) {
  if (!is_work(given)) {
    const std::string message = "expected a c10d Work, not " + repr_of(given);
    throw nb::type_error(message.c_str());
  }
  const nb::object work = wrapped_work(given);
  if (!is_python_work(work)) {
    follow_native_work(*behind<c10d::Work>(work), std::move(future), bind::foreign(std::move(value)),
                       bind::foreign(std::move(tensors)), group);
    return;
  }
  const nb::object followed = from_torch(work);
  core_of(followed).attach(new Substitute(std::move(future), std::move(value), std::move(tensors)));
}

}  // namespace cudafuture::bind
