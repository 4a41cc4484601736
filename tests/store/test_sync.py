"""A disk that fails to sync: the durable store acknowledges no later write, and its errors name the cause."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from store.shims import compile_shim
from support.child import Child

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("on_the_host")]

# Syncs, or with ALLOCATION allocations, fail for files whose path has the text in the file FAILS, while that is there.
SHIM = r"""
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int fails(int fd) {
  char wanted[64] = "", link[64], path[4096] = "";
  int file = open(getenv("FAILS"), O_RDONLY);
  if (file < 0) return 0;
  if (read(file, wanted, sizeof wanted - 1) <= 0) wanted[0] = '?';
  close(file);
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  if (readlink(link, path, sizeof path - 1) <= 0 || !strstr(path, wanted)) return 0;
  errno = getenv("ERRNO") ? atoi(getenv("ERRNO")) : EIO;
  return 1;
}
static int sync_fails(int fd) { return !getenv("ALLOCATION") && fails(fd); }
int fdatasync(int fd) { return sync_fails(fd) ? -1 : ((int (*)(int))dlsym(RTLD_NEXT, "fdatasync"))(fd); }
int fallocate(int fd, int mode, off_t offset, off_t size) {
  if (getenv("ALLOCATION") && fails(fd)) return -1;
  return ((int (*)(int, int, off_t, off_t))dlsym(RTLD_NEXT, "fallocate"))(fd, mode, offset, size);
}
int fsync(int fd) { return sync_fails(fd) ? -1 : ((int (*)(int))dlsym(RTLD_NEXT, "fsync"))(fd); }
"""

SCRIPT = """
import os, sys, torch
from pathlib import Path
from cudafuture import CUDAFuture
from cudafuture.store import DiskStore
folder, what = sys.argv[1:]
fails = Path(os.environ["FAILS"])

def outcome(call):
    try:
        return repr(call().wait())
    except BaseException as e:
        return f"{type(e).__name__} {e.errno} {e}"

def opened():
    with DiskStore(folder, durable=True) as store:
        return CUDAFuture.completed(store.keys())

store = DiskStore(folder, durable=True)
say(outcome(lambda: store.write("before", torch.ones(3))))
fails.write_text(what)
say(outcome(lambda: store.write("meanwhile", torch.ones(3))))
fails.unlink()
say(outcome(lambda: store.write("after", torch.ones(3))))
say(outcome(lambda: store.delete("before")))
say(outcome(lambda: store.read("before")))
say(sorted(store.keys()))
store.close()
fails.write_text(what)
say(outcome(opened))
fails.unlink()
with DiskStore(folder, durable=True) as store:
    say(outcome(lambda: store.read("before")))
    say(sorted(store.keys()))
    say(outcome(lambda: store.write("after", torch.ones(3))))
"""


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_shim(SHIM, tmp_path_factory.mktemp("shim"))


@pytest.mark.parametrize("what", ["slab-", "journal"])
def test_failed_sync_is_never_retried(what: str, shim: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_PRELOAD", str(shim))
    monkeypatch.setenv("FAILS", str(tmp_path / "fails"))
    with Child(SCRIPT, str(tmp_path / "store"), what) as child:
        assert child.hear() == "12"
        for _ in range(3):  # the unsynced write and all later ones, though the disk would sync again
            error = child.hear()
            assert error.startswith("StorageError 5 ")
            assert what in error
        assert child.hear() == "tensor([1., 1., 1.])"
        assert child.hear() == "['before']"
        opening = child.hear()  # the store syncs the journal before it acts on it
        assert opening.startswith("StorageError 5 " if what == "journal" else "['before'"), opening
        assert child.hear() == "tensor([1., 1., 1.])"
        assert child.hear() in ("['before']", "['before', 'meanwhile']")  # the failed write may be there, as a whole
        assert child.hear() == "12"
        assert (child.end(), child.errors()) == (0, "")


FULL = """
import os, sys, torch
from pathlib import Path
from cudafuture.store import DiskStore
fails = Path(os.environ["FAILS"])

def outcome(future):
    error = future.exception()
    return f"{type(error).__name__} {error.errno} {error}" if error else "done"

with DiskStore(sys.argv[1], durable=True) as store:
    store.writev({"first": torch.ones(3), "second": torch.ones(3)}).wait()
    fails.write_text("slab-")
    say(outcome(store.writev({"first": torch.zeros(3), "meanwhile": torch.ones(3)}, atomic=True)))
    say(outcome(store.delete("second")))
    fails.unlink()
    say(store.statistics().slabs)
    say(outcome(store.write("after", torch.full((3,), 2.0))))
    say(store.statistics().slabs)
    say(f"{store.keys()} {store.readv(store.keys()).wait()}")
with DiskStore(sys.argv[1], durable=True) as store:
    say(f"{store.keys()} {store.readv(store.keys()).wait()}")
"""


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_unsynced_slab_fails_its_writes(code: int, shim: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on thin volumes and network file systems, which promise blocks that they do not have."""
    monkeypatch.setenv("LD_PRELOAD", str(shim))
    monkeypatch.setenv("FAILS", str(tmp_path / "fails"))
    monkeypatch.setenv("ERRNO", f"{code}")
    with Child(FULL, str(tmp_path / "store")) as child:
        error = child.hear()
        assert error.startswith(f"StorageError {code} cannot sync ")
        assert "slab-" in error
        assert [child.hear() for _ in range(4)] == ["done", "1", "done", "2"]
        for _ in range(2):
            assert child.hear() == "['first', 'after'] [tensor([1., 1., 1.]), tensor([2., 2., 2.])]"
        assert (child.end(), child.errors()) == (0, "")


NO_ROOM = """
import os, sys, torch
from pathlib import Path
from cudafuture.store import DiskStore
fails = Path(os.environ["FAILS"])

def outcome(future):
    error = future.exception()
    return f"{type(error).__name__} {error.errno} {error}" if error else "done"

many = {f"{i:0>1000}": torch.ones(3) for i in range(2000)}  # a record has its key
with DiskStore(sys.argv[1], durable=True) as store:
    store.writev({"first": torch.ones(3), "second": torch.ones(3)}).wait()
    fails.write_text("journal")
    say(outcome(store.writev(many)))
    say(store.keys())
    say(outcome(store.delete("second")))
    fails.unlink()
    say(outcome(store.writev(many)))
with DiskStore(sys.argv[1], durable=True) as store:
    say(store.keys() == ["first", *many])
"""


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_full_journal_fails_writes_not_deletions(
    code: int, shim: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LD_PRELOAD", str(shim))
    monkeypatch.setenv("FAILS", str(tmp_path / "fails"))
    monkeypatch.setenv("ERRNO", f"{code}")
    monkeypatch.setenv("ALLOCATION", "1")
    with Child(NO_ROOM, str(tmp_path / "store")) as child:
        error = child.hear()
        assert error.startswith(f"StorageError {code} cannot allocate "), error
        assert [child.hear() for _ in range(4)] == ["['first', 'second']", "done", "done", "True"]
        assert (child.end(), child.errors()) == (0, "")
