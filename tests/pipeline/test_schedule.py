"""Schedules as data: built-in tables, CSV files, the check of a table and its numbers."""

from __future__ import annotations

import contextlib
import io
import pickle
import random
import sys
from pathlib import Path
from typing import Any

import pytest

from cudafuture.errors import ScheduleError
from cudafuture.pipeline.analysis import Costs
from cudafuture.pipeline.schedule import Cell, Schedule
from pipeline.tables import EventSimulation, random_costs, random_table, torch_schedule, torch_table
from support.soak import soak_count

SIZES = [(p, m) for p in range(1, 6) for m in (1, 2, 3, 4, 5, 8, 11)]


def cells_of(row: tuple[Cell | None, ...]) -> list[str]:
    return [str(cell) for cell in row if cell is not None]


def test_cell_text_matches_torch() -> None:
    assert str(Cell(12, "W", 3)) == "12W3"
    assert Cell.parse("12W3") == Cell(12, "W", 3)
    assert len({Cell(0, "F", 0), Cell.parse("0F0")}) == 1


@pytest.mark.parametrize("text", ["", "F0", "0F", "0X0", "0F0F1", "-1F0", "0f0", "0 F0", "\u0661F0"])
def test_malformed_cell_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no cell"):
        Cell.parse(text)


def test_table_knows_stages_microbatches_devices() -> None:
    schedule = Schedule([["1F0", None, "1B0"], [], ["0F0", "", Cell(0, "B", 0)]])
    assert (schedule.stages, schedule.microbatches, schedule.device_of) == (2, 1, (2, 0))
    assert schedule.rows[1] == ()
    assert schedule.rows[2] == (Cell(0, "F", 0), None, Cell(0, "B", 0))
    assert schedule.name == "table"


def test_equal_tables_are_equal_and_immutable() -> None:
    one, other = Schedule.gpipe(2, 3), Schedule(Schedule.gpipe(2, 3).rows, "mine")
    assert (one == other, len({one, other})) == (True, 1)
    assert one != Schedule.one_f_one_b(2, 3)
    assert pickle.loads(pickle.dumps(one)) == one
    with pytest.raises(AttributeError):
        one.rows = ()  # type: ignore[misc]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([["0F0"], ["1F0", "1X0"]], "device 1, position 1: '1X0' is no cell"),
        ([["0F0", None, Cell(0, "Z", 0)]], r"device 0, position 2: Cell\(stage=0, kind='Z', microbatch=0\): the kind"),
        ([[Cell(0, "F", -1)]], "device 0, position 0: .* from 0 up"),
        ([[Cell(True, "F", 0)]], "device 0, position 0: .* ints"),
        ([[("0", "F", 0)]], "device 0, position 0: .* is no cell"),
        ([["0F0", "0B0"], ["2F0", "2B0"]], "device 1, position 1: 2B0 is of stage 2, but stage 1 has no cell"),
        ([["9999999999999F0"]], "stage 0 has no cell"),
        ([[], [None]], "no cell"),
        ([], "no cell"),
        (["0F0"], "device 0: '0F0' is one cell"),
        ("0F0", "one sequence of cells per device"),
    ],
)
def test_malformed_table_names_device_and_position(rows: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Schedule(rows)


def test_printed_table_shows_slots_and_idle() -> None:
    lines = str(Schedule.one_f_one_b(11, 1)).splitlines()
    assert len(lines) == 11
    assert lines[0].split() == ["device", "0", "0F0", *["."] * 20, "0B0"]
    assert lines[10].split()[:13] == ["device", "10", *["."] * 10, "10F0"]
    assert repr(Schedule.gpipe(2, 3)) == "Schedule(name='gpipe', devices=2, stages=2, microbatches=3)"


def test_built_in_cells_follow_their_needs() -> None:
    for schedule in (Schedule.one_f_one_b(4, 6), Schedule.zb1p(4, 6), Schedule.interleaved_1f1b(2, 3, 5)):
        slots = {cell: i for row in schedule.rows for i, cell in enumerate(row) if cell is not None}
        for cell, slot in slots.items():
            if cell.kind == "F" and cell.stage:
                assert slots[Cell(cell.stage - 1, "F", cell.microbatch)] < slot
            if cell.kind in "BI" and cell.stage + 1 < schedule.stages:
                assert slots[Cell(cell.stage + 1, cell.kind, cell.microbatch)] < slot


@pytest.mark.parametrize(("stages", "microbatches"), SIZES)
def test_gpipe_and_1f1b_match_formulas(stages: int, microbatches: int) -> None:
    costs = Costs(forward=1.5, backward=2.5)
    fill_drain = Schedule.gpipe(stages, microbatches).check(costs)
    alternating = Schedule.one_f_one_b(stages, microbatches).check(costs)
    for analysis in (fill_drain, alternating):
        assert analysis.seconds == (microbatches + stages - 1) * 4
        assert analysis.busy == (microbatches * 4.0,) * stages
        assert analysis.bubble == pytest.approx((stages - 1) / (microbatches + stages - 1))
    assert fill_drain.peak_activations == (microbatches,) * stages
    assert alternating.peak_activations == tuple(min(microbatches, stages - d) for d in range(stages))


@pytest.mark.parametrize(("stages", "microbatches"), SIZES)
def test_undelayed_zb1p_has_1f1b_peaks(stages: int, microbatches: int) -> None:
    split = Schedule.zb1p(stages, microbatches, delay_weights=False).check()
    whole = Schedule.one_f_one_b(stages, microbatches).check()
    assert split.seconds == 3 * microbatches + 2 * (stages - 1)
    assert split.seconds < whole.seconds or stages == 1
    assert split.bubble <= whole.bubble
    assert split.peak_activations == whole.peak_activations


@pytest.mark.parametrize(("stages", "microbatches"), SIZES)
def test_zb1p_bubble_matches_paper(stages: int, microbatches: int) -> None:
    analysis = Schedule.zb1p(stages, microbatches).check()
    if microbatches >= stages:
        assert analysis.seconds == 3 * microbatches + (stages - 1)  # forward + input - weight per device
    assert analysis.seconds <= Schedule.zb1p(stages, microbatches, delay_weights=False).check().seconds
    assert analysis.peak_activations == (min(stages, microbatches),) * stages


@pytest.mark.parametrize("per_device", [1, 2, 3, 4])
@pytest.mark.parametrize("devices", [1, 2, 3, 4])
def test_interleaving_divides_bubble(devices: int, per_device: int) -> None:
    costs = Costs(forward=12 / per_device, backward=24 / per_device)
    for microbatches in range(1, 14):
        schedule = Schedule.interleaved_1f1b(devices, per_device, microbatches)
        assert schedule.device_of == tuple(s % devices for s in range(devices * per_device))
        seconds = schedule.check(costs).seconds
        assert seconds <= Schedule.one_f_one_b(devices, microbatches).check(Costs(12, 24)).seconds
        if microbatches % devices == 0:
            assert seconds == 36 * microbatches + 36 * (devices - 1) / per_device


@pytest.mark.parametrize("devices", [1, 2, 3, 4, 7])
def test_zbv_leaves_next_to_no_idle_time(devices: int) -> None:
    for microbatches in range(devices, 3 * devices + 2):
        table = Schedule.zbv(devices, microbatches)
        assert table.device_of == (*range(devices), *reversed(range(devices)))
        analysis = table.check(Costs(forward=1, backward=2))
        assert analysis.seconds <= 6 * microbatches + devices - 1 + devices // 2
        assert max(analysis.peak_activations) <= 2 * devices
        if devices > 1:
            theirs = torch_table("ZBVZeroBubble", devices, 2, microbatches).check(Costs(forward=1, backward=2))
            assert analysis.seconds <= theirs.seconds + ((devices, microbatches) == (7, 10))


@pytest.mark.parametrize("per_device", [1, 2, 3])
@pytest.mark.parametrize("devices", [1, 2, 3, 4])
def test_looped_tables_shorten_step(devices: int, per_device: int) -> None:
    costs = Costs(forward=1, backward=2)
    for microbatches in range(1, 12):
        plain = Schedule.interleaved_1f1b(devices, per_device, microbatches).check(costs)
        split = Schedule.interleaved_zero_bubble(devices, per_device, microbatches)
        broad = Schedule.looped_bfs(devices, per_device, microbatches)
        assert split.device_of == broad.device_of == tuple(s % devices for s in range(devices * per_device))
        assert split.check(costs).seconds <= plain.seconds
        assert max(split.check(costs).peak_activations) <= plain.peak_activations[0]
        if microbatches >= devices:
            assert broad.check(costs).seconds == per_device * (3 * microbatches) + 3 * (devices - 1)


@pytest.mark.parametrize("seed", range(soak_count(400, 40)))
def test_found_table_is_not_slower_than_named_ones(seed: int) -> None:
    rng = random.Random(seed)
    devices = rng.randrange(1, 5)
    stages, microbatches = devices * rng.randrange(1, 3), rng.randrange(1, 9)
    costs = random_costs(seed, stages)
    named = []
    for name in ("gpipe", "1f1b", "zb1p", "interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble", "zbv"):
        with contextlib.suppress(ValueError):
            named.append(Schedule.build(name, stages, microbatches, devices).check(costs))
    found = Schedule.search(stages, microbatches, devices, costs)
    assert (found.stages, found.microbatches, len(found.rows)) == (stages, microbatches, devices)
    assert found.check(costs).seconds <= min(each.seconds for each in named)
    limit = min(max(each.peak_activations) for each in named)
    small = Schedule.search(stages, microbatches, devices, costs, most_activations=limit)
    assert max(small.check(costs).peak_activations) <= limit
    whole = Schedule.search(stages, microbatches, devices, costs, splits=False)
    assert all(cell is None or cell.kind in "FB" for row in whole.rows for cell in row)
    assert whole.check(costs).seconds >= found.check(costs).seconds


def test_search_finds_better_table_for_slow_stage() -> None:
    costs = Costs(forward=[1, 1, 4, 1], backward=[2, 2, 8, 2])
    found = Schedule.search(4, 8, 4, costs).check(costs)
    assert found.seconds < Schedule.one_f_one_b(4, 8).check(costs).seconds
    assert found.seconds >= 8 * 12  # of the slow stage alone
    with pytest.raises(ScheduleError, match="keeps at most 1 activations"):
        Schedule.search(4, 8, 2, costs, most_activations=1)
    with pytest.raises(ValueError, match="2 stages cannot lie on 3 devices"):
        Schedule.search(2, 8, 3, Costs())


def test_schedule_is_built_by_name() -> None:
    assert Schedule.build("gpipe", 3, 4) == Schedule.gpipe(3, 4)
    assert Schedule.build("1f1b", 3, 4, devices=3) == Schedule.one_f_one_b(3, 4)
    assert Schedule.build("interleaved_1f1b", 6, 4, devices=2) == Schedule.interleaved_1f1b(2, 3, 4)
    assert Schedule.build("zb1p", 3, 4).name == "zb1p"
    assert Schedule.build("looped_bfs", 6, 4, 2) == Schedule.looped_bfs(2, 3, 4)
    assert Schedule.build("interleaved_zero_bubble", 6, 4, 2) == Schedule.interleaved_zero_bubble(2, 3, 4)
    assert Schedule.build("zbv", 6, 4, 3) == Schedule.zbv(3, 4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("2f2b", 2, 2), "unknown schedule '2f2b': pass one of gpipe, 1f1b, zb1p, interleaved_1f1b, looped_bfs"),
        (("zbv", 4, 2, 4), "two stages per device, but has 4 stages and 4 devices"),
        (("looped_bfs", 5, 2, 2), "multiple of 2 stages for 2 devices, but has 5"),
        (("gpipe", 4, 2, 2), "one device per stage, but has 4 stages and 2 devices"),
        (("interleaved_1f1b", 5, 2, 2), "multiple of 2 stages for 2 devices, but has 5"),
        (("1f1b", 0, 2), "stages=0"),
        (("1f1b", 2, 0), "microbatches=0"),
        (("1f1b", 2, 1.0), "microbatches=1.0"),
        (("interleaved_1f1b", 2, 2, -1), "devices=-1"),
    ],
)
def test_impossible_schedule_is_refused(arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Schedule.build(*arguments)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([["0F0", "0F0", "0B0"]], "0F0 appears twice: device 0, position 0 and device 0, position 1"),
        ([["0F0", "0B0"], [None, "0B0"]], "0B0 appears twice: device 0, position 1 and device 1, position 1"),
        (
            [["0F0"], ["0B0"]],
            r"stage 0 lies on two devices: 0F0 \(device 0, position 0\) and 0B0 \(device 1, position 0",
        ),
        ([["0F0"]], r"stage 0, micro-batch 0 is not complete: device 0 has 0F0 \(device 0, position 0\). Add 0B0"),
        ([["0F0", "0I0"]], r"has 0F0 .*, 0I0 \(device 0, position 1\). Add 0W0"),
        ([["0F0", "0W0"]], "Add 0I0"),
        ([["0B0"]], "Add 0F0"),
        ([["0W0"]], "Add 0F0 and 0I0"),
        ([["0F0", "0B0", "0W0"]], "Keep either B, or I and W"),
        ([["0F1", "0B1"]], "micro-batch 0 is not complete: device 0 has no cell. Add 0F0 and 0B0"),
        ([["0F0", "0B0", "0F1", "0B1"], ["1F0", "1B0"]], "stage 1, micro-batch 1 .* device 1 has no cell"),
        ([["0B0", "0F0"]], r"deadlock: 0B0 \(device 0, position 0\) waits for 0F0, which is behind 0B0\. Change"),
        ([["0F0", None, "0W0", "0I0"]], r"deadlock: 0W0 \(device 0, position 2\) waits for 0I0, which is behind 0W0"),
        (
            [["0F0", "0B0", "0F1", "0B1"], ["1F0", None, "1F1", "1B0", "1B1"]],
            r"0B0 \(device 0, position 1\) waits for 1B0, which is behind 1F1; "
            r"1F1 \(device 1, position 2\) waits for 0F1, which is behind 0B0\.",
        ),
        (  # device 0 only waits for the two others
            [["0F0", "0B0"], ["2B0", "2F0"], ["1F0", "1B0"]],
            r"deadlock: 2B0 \(device 1, position 0\) waits for 2F0, which is behind 2B0\.",
        ),
    ],
)
def test_stuck_table_names_its_cells(rows: Any, message: str) -> None:
    with pytest.raises(ScheduleError, match=message) as caught:
        Schedule(rows).check()
    assert isinstance(caught.value, ValueError)


def test_costs_differ_by_stage_and_cell() -> None:
    rows = [["0F0", "0F1", "0I0", "0W0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]]
    analysis = Schedule(rows).check(Costs(forward=[1, 2], backward=(4, 3), input=[1, 9], weight=0.5))
    assert analysis.end[Cell(0, "F", 1)] == 2
    assert analysis.end[Cell(1, "B", 0)] == 1 + 2 + 3
    assert analysis.start[Cell(0, "I", 0)] == 6
    assert analysis.start[Cell(0, "B", 1)] == analysis.end[Cell(1, "B", 1)] == 11
    assert analysis.seconds == 15
    assert analysis.busy == (1 + 1 + 1 + 0.5 + 4, 10)
    assert analysis.bubble == pytest.approx(1 - 17.5 / 30)
    assert analysis.peak_activations == (2, 1)


def test_link_copies_queue_and_overlap_cells() -> None:
    rows = [["0F0", "0F1", "0F2", "0B0", "0B1", "0B2"], ["1F0", "1F1", "1F2", "1B0", "1B1", "1B2"]]
    analysis = Schedule(rows).check(Costs(forward=1, backward=1, copy=3))
    assert [analysis.start[Cell(1, "F", m)] for m in range(3)] == [4, 7, 10]
    assert [analysis.end[Cell(1, "B", m)] for m in range(3)] == [12, 13, 14]
    assert [analysis.start[Cell(0, "B", m)] for m in range(3)] == [15, 18, 21]


def test_stages_on_one_device_skip_copy() -> None:
    assert Schedule([["0F0", "1F0", "1B0", "0B0"]]).check(Costs(copy=100)).seconds == 6
    assert Schedule([["0F0", "0B0"], ["1F0", "1B0"]]).check(Costs(copy=100)).seconds == 206


def test_device_without_cells_is_idle() -> None:
    analysis = Schedule([["0F0", "0B0"], []]).check()
    assert (analysis.busy, analysis.bubble, analysis.peak_activations) == ((3, 0), 0.5, (1, 0))


def test_free_table_has_order_without_bubble() -> None:
    analysis = Schedule.zb1p(3, 2).check(Costs(0, 0))
    assert (analysis.seconds, analysis.bubble) == (0, 0)
    assert analysis.order.index(Cell(2, "F", 1)) < analysis.order.index(Cell(2, "I", 1))
    assert len(analysis.order) == 18


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"forward": -1}, "forward has -1"),
        ({"weight": [1, float("nan")]}, "weight has nan"),
        ({"copy": [1, 2]}, "copy=.*one number"),
        ({"backward": None}, "backward=None"),
    ],
)
def test_invalid_costs_are_refused(arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Costs(**arguments)


def test_costs_of_other_stage_count_are_refused() -> None:
    with pytest.raises(ValueError, match="backward has seconds for 3 stages, but the schedule has 2"):
        Schedule.gpipe(2, 2).check(Costs(backward=[1, 2, 3]))


@pytest.mark.parametrize("seed", range(150))
def test_random_table_matches_event_simulation(seed: int) -> None:
    rng = random.Random(seed)
    stages, microbatches, devices = rng.randint(1, 6), rng.randint(1, 6), rng.randint(1, 4)
    schedule, costs = random_table(seed, stages, microbatches, devices), random_costs(seed, stages)
    analysis, simulation = schedule.check(costs), EventSimulation(schedule, costs)
    assert not simulation.is_stuck
    assert analysis.start == simulation.start
    assert analysis.end == simulation.end
    assert analysis.seconds == max(simulation.end.values())
    assert analysis.peak_activations == tuple(simulation.peak)
    assert set(analysis.order) == set(simulation.start)
    rank = {cell: i for i, cell in enumerate(analysis.order)}
    assert all(analysis.start[a] <= analysis.start[b] for a, b in zip(analysis.order, analysis.order[1:], strict=False))
    for row in schedule.rows:
        ranks = [rank[cell] for cell in row if cell is not None]
        assert ranks == sorted(ranks)


def test_shuffled_table_sticks_like_event_simulation() -> None:
    stuck = 0
    for seed in range(300):
        rng = random.Random(seed)
        rows = [list(row) for row in random_table(seed, 3, 3, 3).rows]
        row = max(rows, key=len)
        i, j = rng.randrange(len(row)), rng.randrange(len(row))
        row[i], row[j] = row[j], row[i]
        schedule = Schedule(rows)
        simulation = EventSimulation(schedule, Costs())
        stuck += simulation.is_stuck
        if simulation.is_stuck:
            with pytest.raises(ScheduleError, match="deadlock"):
                schedule.check()
        else:
            assert schedule.check().seconds == max(simulation.end.values())
    assert 50 < stuck < 250


@pytest.mark.parametrize("seed", range(20))
def test_csv_round_trip_keeps_table(seed: int, tmp_path: Path) -> None:
    schedule = random_table(seed, stages=4, microbatches=3, devices=5)  # one device or more may have no cell
    text = schedule.to_csv(tmp_path / "mine.csv")
    file = io.StringIO()
    assert schedule.to_csv(file) == file.getvalue() == text
    assert Schedule.from_csv(io.StringIO(text)) == schedule
    loaded = Schedule.from_csv(str(tmp_path / "mine.csv"))
    assert loaded == schedule
    assert loaded.name == "mine"


@pytest.mark.parametrize("end", ["\n\n", "\r\n\r\n", "\n\n \n\t\n"])
def test_trailing_blank_lines_are_no_devices(end: str) -> None:
    assert Schedule.from_csv(io.StringIO("0F0,0B0" + end)) == Schedule([["0F0", "0B0"]])


@pytest.mark.parametrize("line", ["", " ", ",,", '""'])
def test_inner_empty_line_is_device(line: str) -> None:
    for text in (f"{line}\n0F0,0B0\n1F0,1B0\n", f"0F0,0B0\n{line}\n1F0,1B0\n"):
        assert [len(row) for row in Schedule.from_csv(io.StringIO(text)).rows].count(0) == 1


@pytest.mark.parametrize("row", [[], [None], [None, None]])
def test_trailing_empty_device_survives_file(row: list[None]) -> None:
    schedule = Schedule([["0F0", "0B0"], row])
    assert schedule.rows[1] == ()
    assert Schedule.from_csv(io.StringIO(schedule.to_csv())) == schedule


def test_byte_order_mark_is_skipped(tmp_path: Path) -> None:
    (tmp_path / "mine.csv").write_text('"0F0",0B0\n', encoding="utf-8-sig")
    expected = Schedule([["0F0", "0B0"]])
    assert Schedule.from_csv(tmp_path / "mine.csv") == expected
    assert Schedule.from_csv(io.StringIO('\ufeff"0F0",0B0\n')) == expected
    with pytest.raises(ValueError, match="line 2, column 1"):
        Schedule.from_csv(io.StringIO("0F0,0B0\n\ufeff1F0,1B0\n"))


def test_communication_is_skipped_and_overlap_split() -> None:
    text = "0UNSHARD, 0F0 ,0SEND_F0,0F1,(0F2;0B0)OVERLAP_F_B,0B1,0RECV_B0,0B2,0RESHARD,0REDUCE_GRAD,\r\n"
    (row,) = Schedule.from_csv(io.StringIO(text)).rows
    assert cells_of(row) == ["0F0", "0F1", "0F2", "0B0", "0B1", "0B2"]
    assert row[-1] is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0\n,1X0\n", "line 2, column 2: '1X0'"),
        ("0F0,0SEND\n", "line 1, column 2: '0SEND'"),
        ("0F0,(0F1;0Q0)OVERLAP_F_B\n", "line 1, column 2: '0Q0'"),
        ("0F0,(0F1;0B0)OVERLAP\n", "line 1, column 2: "),
        ("0F0,0F\n", "line 1, column 2: '0F'"),
    ],
)
def test_unknown_field_names_line_and_column(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Schedule.from_csv(io.StringIO(text))


TORCH = [
    ("GPipe", 4, 1, 6),
    ("Interleaved1F1B", 2, 2, 4),
    ("Interleaved1F1B", 4, 3, 10),
    ("InterleavedZeroBubble", 4, 1, 8),
    ("InterleavedZeroBubble", 2, 2, 4),
    ("ZBVZeroBubble", 3, 2, 8),
    ("DualPipeV", 3, 2, 8),
]


@pytest.mark.parametrize(("name", "devices", "per_device", "microbatches"), TORCH)
def test_torch_table_is_read_and_checked(name: str, devices: int, per_device: int, microbatches: int) -> None:
    schedule = torch_table(name, devices, per_device, microbatches)
    stages = devices * per_device
    assert (schedule.stages, schedule.microbatches, len(schedule.rows)) == (stages, microbatches, devices)
    is_v = name in ("ZBVZeroBubble", "DualPipeV")
    way = [*range(devices), *reversed(range(devices))] if is_v else [s % devices for s in range(stages)]
    assert schedule.device_of == tuple(way)
    analysis = schedule.check()
    assert analysis.seconds >= 3 * microbatches * per_device
    assert analysis.end == EventSimulation(schedule, Costs()).end


def test_built_in_tables_match_torch_order() -> None:
    pairs = [
        (Schedule.gpipe(4, 6), torch_table("GPipe", 4, 1, 6)),
        (Schedule.interleaved_1f1b(4, 3, 8), torch_table("Interleaved1F1B", 4, 3, 8)),
        (Schedule.interleaved_1f1b(4, 2, 10), torch_table("Interleaved1F1B", 4, 2, 10)),
        (Schedule.zb1p(4, 8), torch_table("InterleavedZeroBubble", 4, 1, 8)),
    ]
    for ours, theirs in pairs:
        assert [cells_of(row) for row in ours.rows] == [cells_of(row) for row in theirs.rows]


def test_torch_1f1b_with_short_row_is_refused() -> None:
    # torch 2.13 numbers the forward passes of the last rank from 1.
    theirs, ours = torch_table("1F1B", 4, 1, 6), Schedule.one_f_one_b(4, 6)
    assert [cells_of(row) for row in theirs.rows[:3]] == [cells_of(row) for row in ours.rows[:3]]
    if cells_of(theirs.rows[3]) != cells_of(ours.rows[3]):
        with pytest.raises(ScheduleError, match="is not complete"):
            theirs.check()


OURS = [Schedule.gpipe(4, 3), Schedule.one_f_one_b(4, 6), Schedule.interleaved_1f1b(4, 2, 7), Schedule.zb1p(4, 6)]
OURS += [Schedule.looped_bfs(4, 3, 5), Schedule.interleaved_zero_bubble(4, 2, 9), Schedule.zbv(4, 7)]
OURS.append(random_table(6, stages=8, microbatches=3, devices=4))  # torch needs a cell on each device


@pytest.mark.parametrize("schedule", OURS, ids=lambda schedule: schedule.name)
def test_tables_exchange_with_torch_loader(schedule: Schedule, tmp_path: Path) -> None:
    schedule.to_csv(tmp_path / "ours.csv")
    theirs = torch_schedule("Runtime", len(schedule.rows), schedule.stages // 4, schedule.microbatches)
    theirs._load_csv(tmp_path / "ours.csv")
    assert tuple(theirs.stage_index_to_group_rank[s] for s in range(schedule.stages)) == schedule.device_of
    theirs._dump_csv(tmp_path / "theirs.csv", format="compute_only")
    assert Schedule.from_csv(tmp_path / "theirs.csv") == schedule
    theirs._dump_csv(tmp_path / "lowered.csv", format="compute_comms")
    lowered = Schedule.from_csv(tmp_path / "lowered.csv")
    assert lowered.check().peak_activations == schedule.check().peak_activations
    assert [sorted(cells_of(row)) for row in lowered.rows] == [sorted(cells_of(row)) for row in schedule.rows]


def test_picture_without_matplotlib_suggests_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        Schedule.gpipe(2, 2).picture(tmp_path / "a.svg")


@pytest.mark.parametrize("name", ["picture.svg", "picture.png"])
def test_picture_format_follows_name(name: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    Schedule.zb1p(3, 4).picture(tmp_path / name, Costs(forward=[1, 2, 3], copy=0.5))
    start = (tmp_path / name).read_bytes()[:600]
    assert b"<svg" in start if name.endswith("svg") else start.startswith(b"\x89PNG")
