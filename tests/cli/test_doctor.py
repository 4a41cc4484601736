"""``cudafuture doctor``: on this machine, and on one that has nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cudafuture.cli import main
from cudafuture.doctor import CHECKS, Diagnosis, examine
from support.child import Child
from support.mounts import small_disk

pytestmark = pytest.mark.usefixtures("on_the_host")

# Lets io_uring_setup and the creation of network addresses fail, by an empty network namespace and a seccomp filter.
NOTHING = """
import ctypes, struct
libc = ctypes.CDLL(None, use_errno=True)
if libc.unshare(0x40000000):  # CLONE_NEWNET: loopback is down
    say("cannot")
    raise SystemExit
instructions = [(0x20, 0, 0, 0), (0x15, 0, 1, 425), (0x06, 0, 0, 0x00050001), (0x06, 0, 0, 0x7FFF0000)]
program = b"".join(struct.pack("HBBI", *one) for one in instructions)
buffer = ctypes.create_string_buffer(program)
filter = struct.pack("HxxxxxxP", len(instructions), ctypes.addressof(buffer))
assert libc.prctl(38, 1, 0, 0, 0) == 0
assert libc.prctl(22, 2, ctypes.create_string_buffer(filter)) == 0
say("nothing")
import json, socket, sys
socket.gethostname = lambda: "no-such-name.invalid"
from cudafuture.doctor import examine
say(json.dumps([finding.as_json() for finding in examine(sys.argv[1])]))
"""


def test_each_check_has_a_finding(tmp_path: Path) -> None:
    found = list(examine(tmp_path))
    names = {finding.name for finding in found}
    assert {"torch", "devices", "gloo", "ports", "io_uring", "locked memory", "disk", "rpc"} <= names
    assert all(finding.advice for finding in found if finding.state != "ok")
    assert list(tmp_path.iterdir()) == []


def test_command_prints_json_and_fails_where_something_is_broken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cudafuture.doctor.CHECKS", CHECKS[:1])
    assert main(["doctor", "--json", "--folder", str(tmp_path)]) == 0
    assert json.loads(capsys.readouterr().out)[0]["name"] == "torch"

    def broken(_: Path) -> list[Diagnosis]:
        raise OSError("no such thing")

    monkeypatch.setattr("cudafuture.doctor.CHECKS", (broken,))
    assert main(["doctor"]) == 1
    assert "broken  broken: OSError: no such thing" in capsys.readouterr().out


def test_machine_with_nothing_gets_advice(tmp_path: Path) -> None:
    with small_disk(tmp_path / "small", 1 << 20) as folder, Child(NOTHING, str(folder)) as child:
        if child.hear() == "cannot":
            pytest.skip("network namespaces cannot be made here")
        found = {one["name"]: one for one in json.loads(child.hear())}
    assert found["io_uring"]["state"] == "slow"
    assert "seccomp" in found["io_uring"]["advice"]
    assert found["name no-such-name.invalid"]["state"] == "broken"
    assert "/etc/hosts" in found["name no-such-name.invalid"]["advice"]
    assert found["ports"]["state"] == "broken"
    assert found["disk"]["state"] == "broken"
    assert "free" in found["disk"]["found"]


def test_folder_that_does_not_exist_is_named(tmp_path: Path) -> None:
    found = {finding.name: finding for finding in examine(tmp_path / "absent")}
    assert found["disk"].state == "broken"
    assert "--folder" in found["disk"].advice
