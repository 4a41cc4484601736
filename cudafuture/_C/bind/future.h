// The Python class CUDAFuture: one wrapper object for each core future.
//
// Whatever a future keeps for Python (callbacks, children, parts, value) it keeps as references to Python objects, and
// shows them to the cyclic collector when nothing but its wrapper owns the core future. An engine that also owns it
// will complete it, so then it counts as reachable.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bind/python.h"
#include "core/context.h"
#include "core/device_memory.h"

namespace cudafuture::bind {

struct PyFuture {
  FuturePtr core;
  PyObject* self;
  bool is_garbage = false;  // the collector found nobody who could ever look at it

  PyFuture(FuturePtr core, PyObject* self) : core(std::move(core)), self(self) { this->core->wrapper = self; }
  ~PyFuture() {
    if (core->wrapper == self) core->wrapper = nullptr;
  }
  PyFuture(const PyFuture&) = delete;
  PyFuture& operator=(const PyFuture&) = delete;
};

// The Python object of a future: always the same one while it lives.
nb::object wrap(FuturePtr core);
Future& core_of(nb::handle future);                         // of a CUDAFuture
Future* core_of_or_null(nb::handle object) noexcept;        // null when it is none
Future& expect_future(nb::handle object, const char* who);  // TypeError when it is none

// ---- once done
nb::object result_of(Future& future);     // of a completed one
nb::object exception_of(Future& future);  // of a failed or cancelled one; marks it seen
[[noreturn]] void raise_outcome(Future& future);
nb::object value_or_raise(Future& future);

// ---- completing, with the events of the value's devices recorded on `streams` or on the current ones
// Both return false when the future was done already. A value outside the bounding set fails the future, and so does
// one whose tensors cannot be searched, unless its producer has named tensors (`named`).
bool complete(Future& future, nb::object value, const std::vector<c10::Stream>& streams = {},
              std::optional<std::vector<at::Tensor>> named = {}, Edge record = Edge::result_record);
bool fail(Future& future, nb::object exception, const std::vector<c10::Stream>& streams = {},
          Edge record = Edge::failure_record);
// Fails it behind device work that has events already.
bool fail_after(Future& future, nb::object exception, EventSet events);
// What is wrong with `used` for a future with a bounding set; empty: nothing.
std::string outside_bounding_set(const Future& future, const std::vector<c10::Device>& used);
[[noreturn]] void raise_done_already(const Future& future, const char* verb);

// ---- waiting
bool try_wait_until_done(Future& future, const Deadline& deadline);  // false: the deadline has passed
void wait_until_done(Future& future, const Deadline& deadline);      // TimeoutError
// Raises InvalidStateError where the host cannot ask about the device work of a completed future; `what` is the
// operation that would. A failed future has an error of its own to raise.
void refuse_captured(const Future& future, const char* what);
// Raises what a device or an engine reported after completion. Not of a failed future: that would hide its own error.
void raise_late_error(Future& future);
void wait_for_devices(Future& future, bool non_blocking, const Deadline& deadline);

// A callback of which a thread is inside, so that waiting for its own child is an error and not a deadlock.
class RunningChild {
 public:
  explicit RunningChild(const Future& child) noexcept;
  ~RunningChild();
  static bool is_on_this_thread(const Future& future) noexcept;

 private:
  const Future& child_;
  RunningChild* outer_;
};

// KeyboardInterrupt and SystemExit out of a callback wait here until the outermost completion of the main thread
// returns to Python, and are raised there.
void keep_interrupt(nb::object exception);
void raise_kept_interrupt();
void raise_kept_interrupt_soon() noexcept;

// ---- Python arguments
int expect_priority(int priority);  // ValueError above 0, which no device's stream pool has
std::vector<c10::Device> devices_from(nb::handle devices);
std::vector<c10::Stream> streams_from(nb::handle streams);
std::vector<c10::Device> devices_of_streams(const std::vector<c10::Stream>& streams);
at::Tensor tensor_from(nb::handle object);
nb::object device_object(c10::Device device);
c10::Device device_from(nb::handle object);  // with an index, if it has streams
nb::object stream_object(const c10::Stream& stream);
std::string device_set(c10::ArrayRef<c10::Device> devices);

// ---- tensors of a value that live on devices with streams
struct FoundTensors {
  std::vector<c10::Device> devices;
  c10::IValue search;  // kept in Value::native, so that waiting does not search Python objects again; None: not needed
};
bool may_use_devices(nb::handle value);  // false: there is nothing to search for
// Where the search gives up or raises, that is an error unless it `may_stop`.
FoundTensors find_tensors(nb::handle value, bool may_stop);
c10::IValue searches_of(c10::ArrayRef<PyObject*> parts);  // of the values of futures, for a list of those values
std::vector<at::Tensor> tensors_of(Future& future);
std::vector<DeviceMemory> memory_of(Future& future);

// ---- the rest of the binding, each in the file of its name
nb::object then(nb::handle future, nb::handle fn, std::optional<int> priority, nb::handle stream, nb::handle executor,
                bool non_blocking, bool async);
nb::object submit(nb::object call, nb::handle executor, int priority, const std::string& name);
// An engine's exception in the words of what made the future.
nb::object as_origin_says(void* origin, nb::object exception);
// The late error as the Python object that waiting raises; None: there is none.
nb::object late_error_of(Future& future);
void add_done_callback(nb::handle future, nb::object fn, nb::handle executor);
// Runs `fn` when the device work has finished, in no order with the future's other callbacks: for waiting, which takes
// no place in a serial queue.
void add_ready_callback(nb::handle future, nb::object fn);
int remove_done_callback(nb::handle future, nb::handle fn);
PyObject* await_slot(PyObject* self) noexcept;

void bind_future(nb::module_& m);
void bind_events(nb::module_& m);
void bind_streams(nb::module_& m);
void bind_executors(nb::module_& m);
void bind_order(nb::module_& m);
void bind_collective(nb::module_& m);
void bind_work_errors(nb::module_& m);
void bind_gloo(nb::module_& m);
void bind_combine(nb::module_& m);
void bind_arrivals(nb::module_& m);
void bind_await(nb::module_& m);
void bind_edges(nb::module_& m);
void bind_host_clock(nb::module_& m);
void bind_storage(nb::module_& m);
void bind_digests(nb::module_& m);
void bind_buffer_pool(nb::module_& m);
void bind_batch_copy(nb::module_& m);
void bind_store(nb::module_& m);

}  // namespace cudafuture::bind
