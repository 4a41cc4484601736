"""prefetch() of a DataLoader whose worker is killed."""

from __future__ import annotations

from support.child import run_script

# A process of its own: until the iterator of the DataLoader is gone, torch raises the death of a worker in the main
# thread, whatever that is doing.
SCRIPT = """
import signal, sys, torch
from cudafuture import prefetch
from cudafuture.errors import CUDAFutureError

class Rows(torch.utils.data.Dataset):
    dies_at = 7
    def __len__(self):
        return 12
    def __getitem__(self, index):
        if index == self.dies_at:
            signal.raise_signal(signal.SIGKILL)
        return torch.full((4,), float(index))

def epoch():
    try:
        return [x.mean().item() for x in batches]
    except (RuntimeError, OSError) as error:
        assert not isinstance(error, CUDAFutureError), error
        return None  # and the error is dropped, with the frames that have the iterator

sys.unraisablehook = lambda _: None  # torch raises in __del__, too
rows = Rows()
batches = prefetch(torch.utils.data.DataLoader(rows, 3, num_workers=1, multiprocessing_context="fork"), "cpu")
assert epoch() is None
rows.dies_at = -1
while (means := epoch()) is None:  # torch may raise the worker's death once more
    pass
assert means == [1, 4, 7, 10], means
print("used again")
"""


def test_killed_worker_leaves_prefetcher_usable() -> None:
    finished = run_script(SCRIPT)
    assert finished.stdout == "used again\n", finished.stderr
