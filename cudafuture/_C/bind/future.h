// The Python class CUDAFuture: one wrapper object for each core future.
//
// A future keeps Python data (callbacks, children, parts, value) as references to Python objects. It shows them to the
// cyclic collector only if its wrapper is the sole owner of the core future. An engine that also owns the core future
// will complete it, so then the references count as reachable.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bind/python.h"
#include "core/context.h"
#include "core/stream_order.h"

namespace cudafuture::bind {

struct PyFuture {
  FuturePtr core;
  PyObject* self;
  bool is_garbage = false;  // the collector found it unreachable

  PyFuture(FuturePtr core, PyObject* self) : core(std::move(core)), self(self) { this->core->wrapper = self; }
  ~PyFuture() {
    if (core->wrapper == self) core->wrapper = nullptr;
  }
  PyFuture(const PyFuture&) = delete;
  PyFuture& operator=(const PyFuture&) = delete;
};

// Returns the Python object of a future: always the same one while it is alive.
nb::object wrap(FuturePtr core);
Future& core_of(nb::handle future);                         // of a CUDAFuture
Future* core_of_or_null(nb::handle object) noexcept;        // null if it is not a CUDAFuture
Future& expect_future(nb::handle object, const char* who);  // TypeError if it is not a CUDAFuture

// ---- once done
nb::object result_of(Future& future);                          // of a completed future
nb::object exception_of(Future& future);                       // of a failed or cancelled future; marks it seen
nb::object unseen_exception_of(Future& future);                // the same, without marking it seen
void add_note(nb::handle exception, const std::string& name);  // adds the name of the failed operation, once
[[noreturn]] void raise_outcome(Future& future);
nb::object value_or_raise(Future& future);

// ---- completion, with the events of the value's devices recorded on `streams` or on the current ones
// Both return false if the future was done already. A value outside the bounding set fails the future. So does a value
// whose tensors cannot be searched, unless its producer has named the tensors (`named`).
bool complete(Future& future, nb::object value, const std::vector<c10::Stream>& streams = {},
              std::optional<std::vector<at::Tensor>> named = {}, SyncEdge record = SyncEdge::result_record);
bool fail(Future& future, nb::object exception, const std::vector<c10::Stream>& streams = {},
          SyncEdge record = SyncEdge::failure_record);
// Fails the future behind device work that already has events.
bool fail_after(Future& future, nb::object exception, EventSet events);
// Returns a message if `used` violates the future's bounding set; otherwise an empty string.
std::string outside_bounding_set(const Future& future, const std::vector<c10::Device>& used);
[[noreturn]] void raise_done_already(const Future& future, const char* verb);

// ---- waiting
bool try_wait_until_done(Future& future, const Deadline& deadline);  // false: the deadline has passed
void wait_until_done(Future& future, const Deadline& deadline);      // TimeoutError
// Raises InvalidStateError if the host cannot query the device work of a completed future; `what` names the operation
// that needs it. A failed future raises its own error instead.
void refuse_captured(const Future& future, const char* what);
// Raises the error that a device or an engine reported after completion. Does nothing for a failed future, whose own
// error must not be hidden.
void raise_late_error(Future& future);
void wait_for_devices(Future& future, bool non_blocking, const Deadline& deadline);
// Orders the thread's current streams after a completed future, outside the interpreter: a driver call blocks where the
// device's queue is full, or where another thread frees memory.
void order_callers_streams(Future& future, OrderingSyncEdges edges = {});

// KeyboardInterrupt and SystemExit from a callback are kept until the outermost completion of the main thread returns
// to Python, and are raised there.
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
c10::Device device_from(nb::handle object);  // with an index, if the device has streams
nb::object stream_object(const c10::Stream& stream);
std::string device_set(c10::ArrayRef<c10::Device> devices);

// ---- tensors of a value that live on devices with streams
struct FoundTensors {
  std::vector<c10::Device> devices;
  c10::IValue search;  // kept in Value::native, so that waits do not search Python objects again; None: not needed
};
bool may_use_devices(nb::handle value);  // false: no search is needed
// An incomplete or failed search is an error unless it `may_stop`.
FoundTensors find_tensors(nb::handle value, bool may_stop);
c10::IValue searches_of(c10::ArrayRef<PyObject*> parts);  // for a list of the values of these futures
std::vector<at::Tensor> tensors_of(Future& future);
std::vector<DeviceMemory> memory_of(Future& future);

// ---- other functions of the binding
nb::object then(nb::handle future, nb::handle fn, std::optional<int> priority, nb::handle stream, nb::handle executor,
                bool non_blocking, bool async);
nb::object submit(nb::object call, nb::handle executor, int priority, const std::string& name);
// Lets the future's origin rephrase an engine's exception.
nb::object as_origin_says(void* origin, nb::object exception);
// Returns the late error as the Python object that waiting raises; None: there is no late error.
nb::object late_error_of(Future& future);
// Without an executor, and inside a running event loop, that loop calls `fn`.
void add_done_callback(nb::handle future, nb::object fn, nb::handle executor);
// Runs `fn` when the device work has finished, unordered with the future's other callbacks. Waits use it, because they
// take no place in a serial queue.
void add_ready_callback(nb::handle future, nb::object fn);
// Removes the callbacks that equal `fn` and have not been dispatched. Returns their number.
int remove_done_callback(nb::handle future, nb::handle fn);
// Returns the event loop of asyncio that runs in this thread, or None. Throws nothing.
nb::object running_loop();
PyObject* await_slot(PyObject* self) noexcept;

// Creates a continuation that gives `child` the outcome of the future it is attached to.
std::string repr(Future& future);

// Logs the failures that no caller has retrieved of the futures that are alive; called at exit.
void log_unseen_failures();
[[gnu::cold]] void log_unseen_failure(Future& future) noexcept;  // after claim_failure_report()

// Keeps the line of code that makes the future, if CUDAFUTURE_DEBUG asks for it.
inline bool keeps_sites = false;
[[gnu::cold]] void keep_site(Future& future);

Continuation* make_forward(nb::object child);

// Fails `child`, which would stay pending: the future that it depends on was dropped while pending, or the process is
// exiting.
void break_promise(const nb::object& child) noexcept;

nb::object events_of(const Future& future);  // a read-only mapping from torch.device to EventView

void bind_future(nb::module_& m);
void bind_unseen_failure(nb::module_& m);
void bind_events(nb::module_& m);
void bind_streams(nb::module_& m);
void bind_executors(nb::module_& m);
void bind_order(nb::module_& m);
void bind_collective(nb::module_& m);
void bind_pending(nb::module_& m);
void bind_trace(nb::module_& m);
void bind_work_errors(nb::module_& m);
void bind_gloo(nb::module_& m);
void bind_messages(nb::module_& m);
void bind_combine(nb::module_& m);
void bind_arrivals(nb::module_& m);
void bind_await(nb::module_& m);
void bind_sync_edges(nb::module_& m);
void bind_host_clock(nb::module_& m);
void bind_storage(nb::module_& m);
void bind_digests(nb::module_& m);
void bind_buffer_pool(nb::module_& m);
void bind_batch_copy(nb::module_& m);
void bind_store(nb::module_& m);

}  // namespace cudafuture::bind
