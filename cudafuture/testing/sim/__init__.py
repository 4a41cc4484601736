"""Simulated accelerator: devices with streams, events, pinned memory and a race detector, on any machine.

Code that orders streams wrongly nearly always works on a GPU, and its failures cannot be reproduced. On the simulated
accelerator it fails at once, on a laptop or in CI, with an explanation::

    sim.enable(devices=2, schedule="lazy")
    with sim.detect_races():
        side = torch.Stream("sim")
        with side:
            x = torch.ones(1000, device="sim")
        x.sum()                      # RaceError: no stream waits for `side`

Tensors on "sim" behave as on "cuda": operations return before they have run, streams run concurrently, freed memory is
reused in the order of its stream, and copies from pinned memory are asynchronous. The device is torch's PrivateUse1;
``torch.Stream``, ``torch.Event`` and ``torch.accelerator`` work, and so does autograd.

There are no threads: device work runs inside the calls of the host, at the times that the schedule chooses. A program
with one host thread therefore does the same each time that it gets the same seed. A ``Schedule`` is one of these words:

==========  =========================================================================================================
schedule    time at which device work runs
==========  =========================================================================================================
``free``    as early as streams and events allow: as on a device that is faster than the host
``lazy``    as late as possible: when the host waits, and then only the work that it waits for. Code that forgot to
            wait reads NaN, which fresh memory is filled with
``jitter``  in between: at each call the seed chooses how much work of which stream runs
==========  =========================================================================================================

Races are found when work is enqueued, from the order of waits (vector clocks, as in FastTrack by Flanagan and Freund,
2009), so they are found under every schedule, unless the program polls: a query that returns True counts as a wait.
``clock()`` is a virtual clock, which measures the overlap of copies and
kernels exactly. Each host thread has its own clock, and joins another thread's when that thread passes work on with a
CUDAFuture, so a loader beside a trainer can be modelled too.

``capture()`` models a stream capture. Its ``CaptureMode`` is torch's ``capture_error_mode``: "global", "thread_local"
or "relaxed".

Not supported: graphs, IPC between processes, sparse tensors; autocast has no effect. The race detector has one vector
clock for all host threads, so a race between two of them can be missed; a strided view counts as all bytes from its
first to its last.
"""

from cudafuture.testing.sim._accelerator import (
    DeviceError,
    Schedule,
    Settings,
    Statistics,
    clear_error,
    contexts,
    disable,
    enable,
    is_enabled,
    settings,
    statistics,
    synchronize,
)
from cudafuture.testing.sim._prepare import prepare
from cudafuture.testing.sim._races import RaceError, Report, Site, detect_races, races
from cudafuture.testing.sim._streams import CaptureMode, Hold, capture, fail, finish, hold, priority, release, sleep
from cudafuture.testing.sim._virtual_time import Speeds, clock, set_speeds, spend

__all__ = [
    "CaptureMode",
    "DeviceError",
    "Hold",
    "RaceError",
    "Report",
    "Schedule",
    "Settings",
    "Site",
    "Speeds",
    "Statistics",
    "capture",
    "clear_error",
    "clock",
    "contexts",
    "detect_races",
    "disable",
    "enable",
    "fail",
    "finish",
    "hold",
    "is_enabled",
    "prepare",
    "priority",
    "races",
    "release",
    "set_speeds",
    "settings",
    "sleep",
    "spend",
    "statistics",
    "synchronize",
]
