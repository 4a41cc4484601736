// Docstrings of CUDAFuture. Their examples run as tests.
#pragma once

namespace cudafuture::bind::docs {

inline constexpr const char* future =
    R"(One value that will be there later, and one device event for each device that it uses.

Made by producers (collectives, RPC, storage, copies, `submit`) or by hand. It is *complete* when the value may be used
by anyone whose streams are ordered after the future's events; the device may still be at work. The idea is that of
PyTorch's RFC 48305.

Args:
    devices: bounding set of devices on which the value's tensors may live. None (default): taken from the value when
        the future completes. The CPU is always allowed. All others must be of one type.
    priority: of the pool streams on which `then` callbacks run. Lower is more urgent: 0 (default), -1 high. Above 0 is
        refused on every device, because stream pools have no such streams.
    name: shown by repr, in errors and traces.
    lifetime: "record" (default) tells the allocator about every stream that waits (`Tensor.record_stream`), which is
        always right. "hold" relies on the future itself to keep the memory, and is right only where the waiting stream
        is the one that allocated the value, or joins it before the future is dropped. Children do not inherit it.
    executor: where callbacks run that name none: `cudafuture.executors.inline` or `.callback_thread`. None (default): in
        the thread that completes the future. For producers that complete it in a thread of an engine's.

Raises:
    DeviceMismatchError: devices of several types.
    ValueError: a priority above 0, or an unknown `lifetime`.
    TypeError: `executor` is no executor of the library's.
    InvalidStateError: in a child forked from a process that had used the library.

>>> from cudafuture import CUDAFuture
>>> future = CUDAFuture(name="answer")
>>> doubled = future.then(lambda f: 2 * f.value())
>>> future.set_result(21)
>>> doubled.wait()
42
)";

inline constexpr const char* completed = R"(A future that is complete with `value` already.

>>> from cudafuture import CUDAFuture
>>> CUDAFuture.completed("here").wait()
'here'
)";

inline constexpr const char* failed = R"(A future that has failed with the exception `exc` already.

>>> from cudafuture import CUDAFuture
>>> CUDAFuture.failed(KeyError("k")).exception()
KeyError('k')
)";

inline constexpr const char* from_torch = R"(A future that follows one of torch's own handles.

Args:
    source: a `torch.futures.Future`, or the c10d Work that a collective with `async_op=True` returns. A CUDAFuture is
        returned as it is.

The value is the source's own: for a Work the list of its output tensors. Gloo's and NCCL's threads complete the future
without the GIL. An error keeps its type, also where torch carries it as a value with an unwrap function (RPC,
`set_exception`). A Work that has no future of its own (Gloo's send and recv) gets a thread that waits for it. Where the
Work's future names no devices, as Gloo's, they are taken from its tensors.

>>> import torch
>>> from cudafuture import CUDAFuture
>>> source = torch.futures.Future()
>>> future = CUDAFuture.from_torch(source)
>>> source.set_result(7)
>>> future.wait()
7
)";

inline constexpr const char* to_torch =
    R"(A `torch.futures.Future` that follows this future, for the places that check the class.

DDP communication hooks, `torch.futures.collect_all` and `rpc.functions.async_execution` are such places. It is
completed with streams ordered after the events, and failed with the exception object itself. Torch's future of a pending
one knows the devices that have a context at the call, and those that are current. A value on any other device is
delivered when that device has finished; torch's `then` refuses to return such a value (ValueError). To avoid that, use
the device before this call. Torch's futures keep no events of a failure: a consumer that recovers from one there is
not ordered after the device work behind it.

>>> from cudafuture import CUDAFuture
>>> CUDAFuture.completed(7).to_torch().wait()
7
)";

inline constexpr const char* done =
    R"(Whether the future is completed, failed or cancelled. The device may still be at work; see `ready`.

>>> from cudafuture import CUDAFuture
>>> CUDAFuture().done(), CUDAFuture.completed(1).done()
(False, True)
)";

inline constexpr const char* ready =
    R"(Whether the future is done and the device work behind each of its events has finished.

Raises:
    the late error, where a device or the network reported one after completion.

>>> from cudafuture import CUDAFuture
>>> CUDAFuture.completed(1).ready()
True
)";

inline constexpr const char* wait = R"(Wait, and return the value.

Args:
    non_blocking: False (default): block until the future is done and its device work has finished. True: block only
        until it is done, then make the calling thread's current streams wait for the events; what is enqueued on them
        afterwards sees the value.
    timeout: seconds for all of it; None (default) waits for ever.

Raises:
    TimeoutError: in time it was not done, or its devices were not. The future stays good.
    ValueError: a negative timeout.
    CancelledError: the future was cancelled.
    InvalidStateError: a callback that waits for its own result, or a blocking wait inside a stream capture.
    any exception: the one with which the future failed, as the object it was; or its late error.

Ctrl-C gets through within 100 ms.

>>> from cudafuture import CUDAFuture
>>> future = CUDAFuture(name="slow")
>>> try:
...     future.wait(timeout=0.01)
... except TimeoutError as e:
...     print(e)
timeout: 'slow' is still pending; it stays valid, so wait() may be called again
)";

inline constexpr const char* result = R"(`wait(timeout=timeout)`, under the name that concurrent.futures gives it.

>>> from cudafuture import CUDAFuture
>>> CUDAFuture.completed(3).result()
3
)";

inline constexpr const char* value =
    R"(The value, without waiting and without ordering any stream; the same object each time.

Raises:
    InvalidStateError: while pending.
    any exception: the one with which the future failed, or CancelledError.

>>> from cudafuture import CUDAFuture
>>> future = CUDAFuture.completed([1, 2])
>>> future.value() is future.value()
True
)";

inline constexpr const char* exception =
    R"(Wait as `wait` does, and return the exception with which the future failed, or None.

Args:
    timeout: seconds; None (default) waits for ever.

Raises:
    TimeoutError: not done in time.
    CancelledError: the future was cancelled.

>>> from cudafuture import CUDAFuture
>>> CUDAFuture.failed(ValueError("no")).exception()
ValueError('no')
)";

inline constexpr const char* then =
    R"(A future for what `fn(self)` returns, called when this future is done, whatever its outcome.

Args:
    fn: called with this future; what it returns completes the child, what it raises fails it, as the same object.
    priority: of the child and of the pool streams on which `fn` runs. None (default): this future's.
    stream: "pool" (default): a pool stream for each device of the future. "caller": the streams that are current now.
        Or a torch.Stream, or several; devices without one get a pool stream. They wait for this future's events and are
        current in `fn`; the child's events are recorded on the streams that are current when `fn` returns.
    executor: where `fn` runs. None (default): in the thread that completes the future when that is a Python thread, and
        at once when it is done already; on the library's callback thread when a C++ thread completes it. Or
        `cudafuture.executors.inline`, `.callback_thread`, or any concurrent.futures.Executor of threads. A callback
        that blocks belongs on an executor of its own.
    non_blocking: True (default): run when the future is done. False: only when its device work has finished as well.

The callback runs with its caller's grad mode, inference mode, autocast and contextvars. Cancelling the child before it
began keeps `fn` from running, and never cancels this future. A child whose parent is dropped while pending fails.

Raises:
    TypeError: `fn` cannot be called, or `executor` cannot submit.
    ValueError: an unknown `stream`.
    DeviceMismatchError: a stream of a device outside the bounding set.

>>> from cudafuture import CUDAFuture
>>> future = CUDAFuture()
>>> length = future.then(lambda f: len(f.value()))
>>> future.set_result("four")
>>> length.wait()
4
)";

inline constexpr const char* then_async =
    R"(Like `then`, for a callback that returns a future: the child takes that future's outcome.

Args and errors are those of `then`. A callback that returns anything but a CUDAFuture fails the child with TypeError.
While the child waits for the returned future, cancelling it leaves that future alone.

>>> from cudafuture import CUDAFuture
>>> inner = CUDAFuture()
>>> child = CUDAFuture.completed(1).then_async(lambda f: inner)
>>> inner.set_result("inner")
>>> child.wait()
'inner'
)";

inline constexpr const char* add_done_callback = R"(Call `fn(self)` when this future is done, whatever its outcome.

Args:
    fn: called with this future. What it returns is dropped; what it raises is logged.
    executor: as for `then`.

It carries no context, unlike `then`. Callbacks run in the order in which they were added, after waiters were released.

Raises:
    TypeError: `fn` cannot be called, or `executor` cannot submit.

>>> from cudafuture import CUDAFuture
>>> CUDAFuture.completed(5).add_done_callback(lambda f: print("got", f.value()))
got 5
)";

inline constexpr const char* cancel =
    R"(Cancel the future, unless it is done or its producer cannot stop any more. Returns whether it is cancelled now.

False once an engine or a device owns the user's memory (a started collective, submitted I/O) or the callback that will
complete it has begun: it then completes as if nothing had been asked. A cancelled future is done: its callbacks run.

>>> from cudafuture import CUDAFuture
>>> future = CUDAFuture()
>>> future.cancel(), future.cancel(), future.cancelled()
(True, False, True)
)";

inline constexpr const char* cancelled = R"(Whether the future was cancelled.

>>> from cudafuture import CUDAFuture
>>> CUDAFuture.completed(1).cancelled()
False
)";

inline constexpr const char* set_running_or_notify_cancel =
    R"(Say that the work behind this future begins, so that `cancel` returns False from now on.

For producers, as in ``concurrent.futures``: call it before you hand memory of the caller's to an engine or a device.

Returns:
    False where the future is done already, as it is when it was cancelled: then leave the work.

>>> from cudafuture import CUDAFuture
>>> future = CUDAFuture()
>>> future.set_running_or_notify_cancel(), future.cancel()
(True, False))";

inline constexpr const char* set_result = R"(Complete the future, release who waits, run the callbacks.

Args:
    value: anything. Its tensors are found in lists, tuples, dicts, dataclasses, classes registered with
        torch.utils._pytree, and in the attributes of other objects. Modules are not searched.
    stream: a torch.Stream or several: the events are recorded on them. None (default): on the streams that are current
        in this thread. A producer whose work was enqueued elsewhere must say where.
    tensors: the tensors of a value in which they cannot be found. Where they are given, also as an empty list, a search
        that cannot finish is no error.

A value that cannot be ordered fails the future, so that its consumers do not hang: with DeviceMismatchError where it has
tensors outside the bounding set; with TensorSearchError where it has more than a million objects to search; with
the exception itself where an attribute raises one during the search, or a device records no event. A search takes place only where the process has
a device with streams.

Raises:
    InvalidStateError: the future is done already.
    DeviceMismatchError: a stream outside the bounding set.
    KeyboardInterrupt, SystemExit: raised by a callback, in the main thread.

>>> from cudafuture import CUDAFuture
>>> future = CUDAFuture()
>>> future.set_result(None)
>>> future.set_result(None)
Traceback (most recent call last):
    ...
cudafuture.errors.InvalidStateError: set_result(): the future is completed already, and a future is completed once; ask done() first where a cancellation or another producer can be quicker
)";

inline constexpr const char* set_exception =
    R"(Fail the future with the exception `exc`, which may be any BaseException; release who waits, run the callbacks.

The same object comes out of `wait`, with a note that names the future. A failed future that nobody looked at logs its
error when it dies.

Raises:
    InvalidStateError: the future is done already.
    TypeError: `exc` is no exception.

>>> from cudafuture import CUDAFuture
>>> future = CUDAFuture()
>>> future.set_exception(OSError("disk"))
>>> future.exception()
OSError('disk')
)";

inline constexpr const char* devices =
    R"(The bounding set where one was given, else the devices of the events: a sorted tuple of torch.device.)";

inline constexpr const char* events =
    R"(The event of each device that the value uses: a read-only mapping from torch.device to EventView.

Empty while pending, and for values on the CPU.)";

inline constexpr const char* priority = R"(Of the pool streams for callbacks: 0 is the default, -1 high.)";

inline constexpr const char* name = R"(The name that it was made with; children made by `then` inherit it.)";

inline constexpr const char* late_error =
    R"(An error that a device or the network reported after the future was complete, or None.

It changes no state; `ready` and a blocking `wait` raise it.)";

inline constexpr const char* released =
    R"(Of a write: a future that completes when the source may be overwritten. None for everything else.

Who makes the future of a write sets it, before anyone else has that.

>>> from cudafuture import CUDAFuture
>>> future = CUDAFuture()
>>> future.released = CUDAFuture(name="source")
>>> future.released.name
'source')";

}  // namespace cudafuture::bind::docs
