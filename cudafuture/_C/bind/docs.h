// Docstrings of CUDAFuture. Their examples run as tests.
#pragma once

namespace cudafuture::bind::docs {

inline constexpr const char* future =
    R"(Result that becomes available later, with one device event for each device that the value uses.

Producers (collectives, RPC, storage, copies, `submit`) make futures, and user code may too. A future is *complete* when
the value may be used on every stream that is ordered after the future's events; the device may still be at work. The
idea is that of PyTorch's RFC 48305.

Args:
    devices: bounding set of devices on which the value's tensors may live. None (default): taken from the value when
        the future completes. The CPU is always allowed. All others must be of one type.
    priority: of the pool streams on which `then` callbacks run. Lower is more urgent: 0 (default), -1 high. A priority
        above 0 raises ValueError on every device, because stream pools have no such streams.
    name: shown by repr, in errors and traces.
    lifetime: "record" (default) tells the allocator about every stream that waits (`Tensor.record_stream`), which is
        always right. "hold" relies on the future itself to keep the memory, and is right only if the waiting stream
        allocated the value, or joins the allocating stream before the future is dropped. Children do not inherit it.
    executor: executor of callbacks that name none: `cudafuture.executors.inline` or `.callback_thread`. None (default):
        callbacks run in the thread that completes the future. Set it in producers that complete the future in a
        thread of an engine.

Raises:
    DeviceMismatchError: devices of several types.
    ValueError: a priority above 0, or an unknown `lifetime`.
    TypeError: `executor` is not an executor of this library.
    InvalidStateError: in a child forked from a process that had used the library.

>>> from cudafuture import CUDAFuture
>>> future = CUDAFuture(name="answer")
>>> doubled = future.then(lambda f: 2 * f.value())
>>> future.set_result(21)
>>> doubled.wait()
42
)";

inline constexpr const char* completed = R"(Return a future that is complete with `value`.

>>> from cudafuture import CUDAFuture
>>> CUDAFuture.completed("here").wait()
'here'
)";

inline constexpr const char* failed = R"(Return a future that has failed with the exception `exc`, of any type.

>>> from cudafuture import CUDAFuture
>>> CUDAFuture.failed(KeyError("k")).exception()
KeyError('k')
)";

inline constexpr const char* from_torch = R"(Return a future that follows one of torch's own handles.

Args:
    source: a `torch.futures.Future`, or the c10d Work that a collective with `async_op=True` returns. A CUDAFuture is
        returned as it is.

The value is the source's own: for a Work the list of its output tensors. Gloo's and NCCL's threads complete the future
without the GIL. An error keeps its type, even if torch carries it as a value with an unwrap function (RPC,
`set_exception`). If a Work has no future of its own (Gloo's send and recv), a thread waits for it. If the Work's future
names no devices (Gloo's does not), the devices are taken from its tensors.

>>> import torch
>>> from cudafuture import CUDAFuture
>>> source = torch.futures.Future()
>>> future = CUDAFuture.from_torch(source)
>>> source.set_result(7)
>>> future.wait()
7
)";

inline constexpr const char* to_torch =
    R"(Return a `torch.futures.Future` that follows this future, for callers that check the class.

DDP communication hooks, `torch.futures.collect_all` and `rpc.functions.async_execution` are such callers. The torch
future is completed with streams ordered after the events, and failed with the exception object itself. If this future
is pending, the torch future knows the devices that have a context at the call, and the current device of each type. A
value on any other device is delivered when that device has finished; torch's `then` then raises ValueError. To avoid
that, use the device before this call. Torch's futures keep no events of a failure: a consumer that recovers from a
failure there is not ordered after the device work behind it. The torch future fails with TypeError if the value is a
CUDAFuture: a callback that returns a future is attached by `then_async`.

>>> from cudafuture import CUDAFuture
>>> CUDAFuture.completed(7).to_torch().wait()
7
)";

inline constexpr const char* done =
    R"(Return True if the future is completed, failed or cancelled. The device may still be at work; see `ready`.

>>> from cudafuture import CUDAFuture
>>> CUDAFuture().done(), CUDAFuture.completed(1).done()
(False, True)
)";

inline constexpr const char* ready =
    R"(Return True if the future is done and the device work behind each of its events has finished.

Raises:
    the late error, if a device or the network reported one after completion.

>>> from cudafuture import CUDAFuture
>>> CUDAFuture.completed(1).ready()
True
)";

inline constexpr const char* wait = R"(Wait, and return the value.

Args:
    non_blocking: False (default): block until the future is done and its device work has finished. True: block only
        until it is done, then make the calling thread's current streams wait for the events; work that is enqueued on
        them afterwards sees the value.
    timeout: seconds for the whole call. None (default): no limit.

Raises:
    TimeoutError: the future was not done in time, or its device work had not finished. The future stays valid.
    ValueError: a negative timeout.
    CancelledError: the future was cancelled.
    InvalidStateError: a callback that waits for its own result, or a blocking wait inside a stream capture.
    any exception: the exception object with which the future failed, or its late error.

Ctrl-C interrupts the wait within 100 ms. A wait that blocks inside a running event loop issues a RuntimeWarning: use
`await` there.

>>> from cudafuture import CUDAFuture
>>> future = CUDAFuture(name="slow")
>>> try:
...     future.wait(timeout=0.01)
... except TimeoutError as e:
...     print(e)
timeout: 'slow' is still pending; it stays valid, so wait() may be called again
)";

inline constexpr const char* result = R"(Call `wait(timeout=timeout)`; concurrent.futures has this name for it.

>>> from cudafuture import CUDAFuture
>>> CUDAFuture.completed(3).result()
3
)";

inline constexpr const char* value =
    R"(Return the value, without waiting and without ordering any stream; the same object each time.

Raises:
    InvalidStateError: the future is pending.
    any exception: the exception with which the future failed, or CancelledError.

>>> from cudafuture import CUDAFuture
>>> future = CUDAFuture.completed([1, 2])
>>> future.value() is future.value()
True
)";

inline constexpr const char* exception =
    R"(Wait as `wait` does, and return the exception with which the future failed, or None.

Args:
    timeout: seconds. None (default): no limit.

Raises:
    TimeoutError: the future was not done in time.
    CancelledError: the future was cancelled.

>>> from cudafuture import CUDAFuture
>>> CUDAFuture.failed(ValueError("no")).exception()
ValueError('no')
)";

inline constexpr const char* then =
    R"(Call `fn(self)` when this future is done, whatever its outcome, and return a future of its result, the child.

Args:
    fn: called with this future. The child completes with its return value, or fails with the exception that it raises.
        It fails with TypeError if `fn` returns a coroutine or another future, of any library: see `then_async`.
    priority: of the child and of the pool streams on which `fn` runs. None (default): this future's.
    stream: "pool" (default): a pool stream for each device of the future. "caller": the streams that are current now.
        Or a torch.Stream, or several; devices without one get a pool stream. They wait for this future's events and are
        current in `fn`; the child's events are recorded on the streams that are current when `fn` returns.
    executor: executor that runs `fn`. None (default): the thread that completes the future runs it if that is a Python
        thread, and the library's callback thread if a C++ thread completes the future; if the future is done already,
        `fn` runs before `then` returns. Or `cudafuture.executors.inline`, `.callback_thread`, or any
        concurrent.futures.Executor of threads. A callback that blocks belongs on an executor of its own.
    non_blocking: True (default): run when the future is done. False: only when its device work has finished as well.

The callback runs with the grad mode, inference mode, autocast and contextvars of the caller of `then`. If the child is
cancelled before `fn` begins, `fn` does not run; this future is never cancelled. If this future is dropped while it is
pending, the child fails.

Raises:
    TypeError: `fn` is not callable, or `executor` has no `submit`.
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
    R"(Call `fn(self)` as `then` does, and return a future that takes the outcome of the future that `fn` returns.

Args and errors are those of `then`. If the callback returns anything but a CUDAFuture, the child fails with TypeError:
convert torch's handles with `from_torch`.
Cancelling the child while it waits for the returned future does not cancel that future.

>>> from cudafuture import CUDAFuture
>>> inner = CUDAFuture()
>>> child = CUDAFuture.completed(1).then_async(lambda f: inner)
>>> inner.set_result("inner")
>>> child.wait()
'inner'
)";

inline constexpr const char* add_done_callback = R"(Call `fn(self)` when this future is done, whatever its outcome.

Args:
    fn: called with this future. Its return value is dropped; an exception that it raises is logged.
    executor: as for `then`. But with None (default) inside a running event loop of asyncio, that loop calls `fn`, in
        the context variables of the caller, when the device work has finished as well.

Unlike `then`, this carries no context elsewhere. Callbacks run in the order in which they were added, after the waiters
are released.

Raises:
    TypeError: `fn` is not callable, or `executor` has no `submit`.

>>> from cudafuture import CUDAFuture
>>> CUDAFuture.completed(5).add_done_callback(lambda f: print("got", f.value()))
got 5
)";

inline constexpr const char* remove_done_callback =
    R"(Remove every callback of `add_done_callback` that equals `fn` and has not begun. Return the number removed.

>>> from cudafuture import CUDAFuture
>>> future = CUDAFuture()
>>> future.add_done_callback(print)
>>> future.remove_done_callback(print), future.remove_done_callback(print)
(1, 0)
)";

inline constexpr const char* cancel =
    R"(Cancel the future, unless it is done or its producer can no longer stop. Return True if it is cancelled now.

Args:
    msg: argument of the CancelledError that waiting raises. None (default): a text with the future's name.

The result is False once an engine or a device owns the user's memory (a started collective, submitted I/O), or once the
callback that will complete the future has begun: the future then completes as if `cancel` had not been called. A
cancelled future is done: its callbacks run.

>>> from cudafuture import CUDAFuture
>>> future = CUDAFuture()
>>> future.cancel(), future.cancel(), future.cancelled()
(True, False, True)
)";

inline constexpr const char* cancelled = R"(Return True if the future was cancelled.

>>> from cudafuture import CUDAFuture
>>> CUDAFuture.completed(1).cancelled()
False
)";

inline constexpr const char* running =
    R"(Return True if the future is pending and can no longer be cancelled, because its work has begun.

>>> from cudafuture import CUDAFuture
>>> future = CUDAFuture()
>>> future.set_running_or_notify_cancel(), future.running()
(True, True)
)";

inline constexpr const char* set_running_or_notify_cancel =
    R"(Mark the future as running, so that `cancel` returns False from now on.

For producers, as in ``concurrent.futures``: call it before an engine or a device gets the caller's memory.

Returns:
    False if the future is done already, for instance cancelled: then do not begin the work.

>>> from cudafuture import CUDAFuture
>>> future = CUDAFuture()
>>> future.set_running_or_notify_cancel(), future.cancel()
(True, False))";

inline constexpr const char* set_result = R"(Complete the future, release its waiters and run its callbacks.

Args:
    value: any object. Its tensors are found in lists, tuples, dicts, dataclasses, classes registered with
        torch.utils._pytree, and in the attributes of other objects. Modules are not searched.
    stream: a torch.Stream or several: the events are recorded on them. None (default): on the streams that are current
        in this thread. A producer that enqueued its work on other streams must name them.
    tensors: the tensors of the value, for values that cannot be searched. If they are given, even as an empty list, a
        search that cannot finish is no error.

A value that cannot be ordered fails the future, so that its consumers do not hang: with DeviceMismatchError if the
value has tensors outside the bounding set; with TensorSearchError if there are more than a million objects to search;
with the exception itself if an attribute raises one during the search, or a device records no event. Values are
searched only if the process has a device with streams.

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
    R"(Fail the future with `exc`, release its waiters and run its callbacks.

Args:
    exc: any BaseException, or a class of one, which is called. No StopIteration: it would end a generator or a
        coroutine that waits.

`wait` raises the same object, with a note that names the future. If the exception is never retrieved, it is logged when
the future is destroyed.

Raises:
    InvalidStateError: the future is done already.
    TypeError: `exc` is not an exception, or is a StopIteration.

>>> from cudafuture import CUDAFuture
>>> future = CUDAFuture()
>>> future.set_exception(OSError("disk"))
>>> future.exception()
OSError('disk')
)";

inline constexpr const char* devices =
    R"(Sorted tuple of torch.device: the bounding set if the future has one, otherwise the devices of the events.)";

inline constexpr const char* events =
    R"(Read-only mapping from torch.device to EventView: the event of each device that the value uses.

Empty while the future is pending, and for values on the CPU.)";

inline constexpr const char* priority = R"(Priority of the pool streams for callbacks: 0 is the default, -1 high.)";

inline constexpr const char* name = R"(Name that the future was made with; children made by `then` inherit it.)";

inline constexpr const char* late_error =
    R"(Error that a device or the network reported after the future was complete, or None.

It changes no state; `ready` and a blocking `wait` raise it.)";

inline constexpr const char* released =
    R"(Future of a write's source: it completes when the source may be overwritten. None for all other operations.

The producer of a write sets it, before it hands out the future of the write.

>>> from cudafuture import CUDAFuture
>>> future = CUDAFuture()
>>> future.released = CUDAFuture(name="source")
>>> future.released.name
'source')";

}  // namespace cudafuture::bind::docs
