"""Reports of the processes of a job, merged: who holds up whom, and what only seems so."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from cudafuture._progress import GroupProgress, ProcessProgress
from cudafuture.debug import JobReport, ProcessReport
from cudafuture.debug._trees import trees_of


def facts(name: str, number: int | None = None, peer: int | None = None) -> dict[str, Any]:
    found: dict[str, Any] = {"name": name, "place": "group", "of": "0", "group": "g"}
    return found | ({} if number is None else {"number": number}) | ({} if peer is None else {"peer": peer})


def report(
    rank: int,
    operation: dict[str, Any] | None = None,
    *,
    issued: int | None = 0,
    ended: int = 0,
    seconds: float = 3.0,
    more: list[dict[str, Any]] | None = None,
    **wait: Any,
) -> ProcessReport:
    """Return the report of a rank of two, whose main thread waits for an operation; None: it waits for nothing.

    `issued`: None: it has no progress in the group. `more`: futures behind the operation.
    """
    futures = [] if operation is None else [{"text": operation["name"], "age": seconds, "operation": operation}]
    futures += more or []
    awaited = {"kind": "wait", "future": wait.pop("future", 0), "subject": "", "line": f"r{rank}.py:1", **wait}
    threads = [{"thread": 1, "name": "", "is_main": True, "activities": [awaited | {"seconds": seconds}]}]
    graph = {"futures": futures, "threads": threads if futures else [], "roots": []}
    groups = () if issued is None else (GroupProgress("0", "g", rank, 2, issued, ended, 0, "all_reduce"),)
    return ProcessReport(100 + rank, "", trees_of(graph), ProcessProgress(100 + rank, rank, 2, "", groups))


def test_messages_to_each_other_are_a_deadlock() -> None:
    job = JobReport((report(0, facts("recv", peer=1)), report(1, facts("recv", peer=0))))
    assert job.verdicts()[0].startswith("deadlock")


def test_message_whose_other_end_is_pending_holds_up_nobody() -> None:
    job = JobReport((report(0, facts("send", peer=1)), report(1, facts("recv", peer=0))))
    assert job.verdicts() == []


def test_recv_from_any_rank_matches_a_send() -> None:
    job = JobReport((report(0, facts("send", peer=1)), report(1, facts("recv"))))
    assert job.verdicts() == []


def test_wait_that_ends_by_itself_closes_no_deadlock() -> None:
    ranks = report(0, facts("recv", peer=1), has_timeout=True), report(1, facts("recv", peer=0))
    assert not any(line.startswith("deadlock") for line in JobReport(ranks).verdicts())


def test_one_of_several_parts_holds_up_nobody() -> None:
    parts = [{"text": "collect_any of 2", "age": 1.0, "needs_one": True, "waits_for": [0]}]
    ranks = report(0, facts("recv", peer=1), more=parts, future=1), report(1, facts("recv", peer=0))
    assert not any(line.startswith("deadlock") for line in JobReport(ranks).verdicts())


def test_rank_without_progress_has_issued_none() -> None:
    (verdict,) = JobReport((report(0, facts("all_reduce", 0), issued=1), report(1, issued=None))).verdicts()
    assert "rank 1 (process 101) holds up rank 0 (process 100)" in verdict
    assert "it has issued none" in verdict
    assert verdict.endswith("no wait is known there")


def test_rank_that_waits_elsewhere_is_shown_with_its_line() -> None:
    elsewhere = {"name": "read", "place": "store", "of": "/nvme"}
    job = JobReport((report(0, facts("all_reduce", 0), issued=1), report(1, elsewhere)))
    (verdict,) = job.verdicts()
    assert verdict.endswith("it waits for read at r1.py:1")


def test_rank_is_behind_where_nothing_waits() -> None:
    (verdict,) = JobReport((report(0, issued=8, ended=7), report(1, issued=7, ended=7))).verdicts()
    assert "rank 1 (process 101) is behind rank 0 (process 100) on group '0': #7 is not issued there" in verdict


def test_rank_is_not_behind_where_the_others_have_ended() -> None:
    assert JobReport((report(0, issued=8, ended=8), report(1, issued=7, ended=7))).verdicts() == []


def test_wait_that_is_new_in_the_second_report_does_not_count() -> None:
    ranks = report(0, facts("recv", peer=1)), report(1, facts("recv", peer=0))
    first = JobReport(ranks)
    again = tuple(replace(one) for one in ranks)
    assert JobReport(again, first).verdicts() == []  # the same seconds: it is another wait
    later = report(0, facts("recv", peer=1), seconds=3.5), report(1, facts("recv", peer=0), seconds=3.5)
    assert JobReport(later, first).verdicts()[0].startswith("deadlock")


def test_process_of_another_job_holds_up_nobody() -> None:
    waiting, late = report(0, facts("all_reduce", 3), issued=4, ended=3), report(1, issued=3, ended=3)
    others = [replace(report(rank, issued=None), process=200 + rank, problem="it is dead") for rank in (0, 1)]
    (line,) = JobReport((waiting, late, *others)).verdicts()
    assert line.startswith("rank 1 (process 101) holds up rank 0 (process 100)")
    (line,) = JobReport((waiting, *others)).verdicts()  # rank 1 of this job has left no trace, or is that one
    assert line.startswith("rank 1 (process 201) holds up rank 0 (process 100)")
