"""Plans, layer progress and reports of planned loads, without servers."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvclient.load.layerwise import LayerBarrier
from kvclient.load.paths import Paths, Plan, PlannedPart, largest_ranges, plan_from_proto, replan_from_proto
from kvclient.load.plan_progress import MAX_PLANS, PlanProgressReporter
from kvclient.load.sink import BlockSink, LayerTracker, spans
from kvclient.results import PATH_DECODE, NodeRef
from kvproto.v1 import metadata_pb2 as pb
from kvstore.core.errors import Internal, InvalidArgument, Unavailable
from kvstore.core.limits import MAX_REPLAN_RANGES
from kvstore.core.types import NodeId, Outcome, Tier
from kvstore.observe.limited_log import LimitedLog
from support.wait import wait_until

LAYERS = 6
WAIT_S = 10.0
DECODE = pb.READ_SIDE_DECODE


def answer(*parts: tuple[int, int], plan_id: int = 7, attempt: int = 0, side: pb.ReadSide = DECODE) -> pb.LoadPlan:
    made = pb.LoadPlan(plan_id=plan_id, attempt=attempt)
    for index, (start, count) in enumerate(parts):
        made.parts.add(index=index, start=start, count=count, side=side, node_id="d", control_address="c", data_address="a")
    return made


# ---- plans ----
def test_plan_for_all_or_no_blocks_is_accepted() -> None:
    assert [(part.start, part.count) for part in plan_from_proto(answer((3, 2), (0, 3)), 5).parts] == [(3, 2), (0, 3)]
    assert plan_from_proto(answer(), 5).parts == ()


def test_plan_keeps_the_predicted_time() -> None:
    made = answer((0, 5))
    made.predicted_seconds = 1.5
    assert plan_from_proto(made, 5).predicted_s == 1.5
    assert plan_from_proto(answer((0, 5)), 5).predicted_s == 0.0, "an older server"


@pytest.mark.parametrize(
    "parts",
    [
        [(0, 4)],
        [(1, 4)],
        [(0, 6)],
        [(0, 3), (2, 3)],
        [(0, 5), (5, 0)],
        [(0, 5), (4_000_000_000, 1)],
        [(0, 4_294_967_295)],
        [(4_294_967_295, 4_294_967_295)],
        [(0, 0)],
    ],
)
def test_plan_impossible_is_refused(parts: list[tuple[int, int]]) -> None:
    with pytest.raises(Internal):
        plan_from_proto(answer(*parts), 5)


def test_plan_part_without_side_is_refused() -> None:
    with pytest.raises(Internal):
        plan_from_proto(answer((0, 5), side=pb.READ_SIDE_UNSPECIFIED), 5)


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), max_size=6), st.integers(0, 12))
def test_plan_check_matches_naive_check(parts: list[tuple[int, int]], blocks: int) -> None:
    named = [position for start, count in parts for position in range(start, start + count)]
    good = not parts or (sorted(named) == list(range(blocks)) and all(count for _, count in parts))
    try:
        plan_from_proto(answer(*parts), blocks)
        assert good
    except Internal:
        assert not good


BEFORE = Plan(7, 0, (), "split", "")
PART = PlannedPart(1, 10, 10, PATH_DECODE, NodeRef(NodeId("d"), "c", "a"))


def test_replan_covers_exactly_the_missing_blocks() -> None:
    arrived = [(10, 3), (15, 1)]
    good = replan_from_proto(answer((13, 2), (16, 4), attempt=1), BEFORE, PART, arrived)
    assert [(part.start, part.count) for part in good.parts] == [(13, 2), (16, 4)]
    wrong = [
        answer((13, 2), (16, 4), attempt=1, plan_id=8),
        answer((13, 2), (16, 4), attempt=0),
        answer((13, 2), attempt=1),
        answer((12, 3), (16, 4), attempt=1),
        answer((13, 7), attempt=1),
        answer((0, 6), attempt=1),
        answer((13, 2), (16, 5), attempt=1),
        answer(attempt=1),
    ]
    for one in wrong:
        with pytest.raises(Internal):
            replan_from_proto(one, BEFORE, PART, arrived)


def test_replan_ranges_are_bounded() -> None:
    few = [(10, 3), (15, 1)]
    assert largest_ranges(few) == few
    many = [(3 * at, 2 if at % 4 else 1) for at in range(MAX_REPLAN_RANGES * 4 // 3 + 1)]
    assert largest_ranges(many) == [span for span in many if span[1] == 2], "the largest, in order"
    assert len(largest_ranges(many)) == MAX_REPLAN_RANGES


def test_paths_with_bad_values_raise() -> None:
    Paths()
    Paths(decode_node="hôte 2", policy="x" * 512)
    for wrong in (
        {"layer_group": -1}, {"layer_group": 1.5}, {"layer_group": True}, {"attempts": -1}, {"stall_s": 0}, {"stall_s": "x"},
        {"decode_node": 3}, {"policy": 3}, {"relays": "yes"}, {"decode_node": "d\udc80"}, {"policy": "split\ud800"},
        {"decode_node": "d\n"}, {"policy": "x" * 513}, {"decode_node": b"d"},
    ):  # fmt: skip
        with pytest.raises(InvalidArgument):
            Paths(**wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="an integer of at least 0"):
        Paths(layer_group=-1)


# ---- layers ----
class NaiveTracker:
    """Leading layers of each block, tracked one by one."""

    def __init__(self, blocks: int) -> None:
        self.ready = [0] * blocks
        self.promised = blocks
        self.announced = 0

    def arrived(self, positions: Sequence[int], first: int, count: int) -> None:
        for position in positions:
            if self.ready[position] >= first:
                self.ready[position] = max(self.ready[position], first + count)
        self.look()

    def lost(self, position: int) -> None:
        self.promised = min(self.promised, position)
        self.look()

    def restart(self, positions: Sequence[int]) -> bool:
        for position in positions if not self.announced else ():
            self.ready[position] = 0
        return not self.announced

    def look(self) -> None:
        if self.promised:
            self.announced = max(self.announced, min(self.ready[: self.promised]))


STEPS = st.one_of(
    st.tuples(st.sets(st.integers(0, 7), min_size=1), st.integers(0, LAYERS - 1), st.integers(1, LAYERS)),
    st.integers(0, 7),
    st.frozensets(st.integers(0, 7)),
)


@given(st.lists(STEPS, max_size=40))
def test_layer_tracker_matches_naive_tracker(steps: list[tuple[set[int], int, int] | int | frozenset[int]]) -> None:
    gate = LayerBarrier(8)
    board, naive = LayerTracker(8, LAYERS, gate), NaiveTracker(8)
    for step in steps:
        if isinstance(step, int):
            board.mark_failed(np.array([step]))
            naive.lost(step)
        elif isinstance(step, frozenset):
            positions = sorted(step)
            assert board.restart(np.array(positions, np.intp)) == naive.restart(positions)
        else:
            positions, first, count = sorted(step[0]), step[1], min(step[2], LAYERS - step[1])
            board.arrived(np.array(positions), first, count)
            naive.arrived(positions, first, count)
        assert board.ready(np.arange(8)).tolist() == naive.ready
        assert gate.promised_blocks == naive.promised
        for layer in range(LAYERS):
            assert gate.wait(layer, 0.0) == (layer < naive.announced)
            if layer < naive.announced:
                assert all(ready > layer for ready in naive.ready[: gate.promised_blocks])
    assert board.complete().tolist() == [ready == LAYERS for ready in naive.ready]


# ---- the sink ----
def test_sink_result_adds_up_bytes_by_source() -> None:
    sink = BlockSink(6, 1)
    sink.record(np.array([0, 1]), Outcome.HIT, Tier.NVME, "a", "prefill")
    sink.record(np.array([3, 5]), Outcome.HIT, Tier.DRAM, "b", "local")
    error = Unavailable("x")
    sink.record_error(error)
    sink.record_error(Unavailable("later"))
    result = sink.result(10)
    assert result.outcomes.tolist() == [1, 1, *[int(Outcome.MISS)], 1, *[int(Outcome.MISS)], 1]
    assert result.bytes_by_node == {"a": 20, "b": 20}
    assert result.bytes_by_path == {"prefill": 20, "local": 20}
    assert result.bytes_by_tier == {Tier.NVME: 20, Tier.DRAM: 20}
    assert result.error is error


@given(blocks=st.integers(0, 12), data=st.data())
def test_sink_missing_excludes_hits_and_given_up_blocks(blocks: int, data: st.DataObject) -> None:
    some = st.sets(st.integers(0, blocks - 1)) if blocks else st.just(set[int]())
    hits, lost, among = data.draw(some), data.draw(some), data.draw(some)
    sink = BlockSink(blocks, 1)
    sink.record(np.array(sorted(hits), np.intp), Outcome.HIT, Tier.DRAM, "a", "local")
    sink.give_up(np.array(sorted(lost), np.intp))
    assert sink.missing().tolist() == sorted(set(range(blocks)) - hits - lost)
    assert sink.missing(np.array(sorted(among), np.intp)).tolist() == sorted(among - hits - lost)


@given(st.sets(st.integers(0, 30)))
def test_spans_cover_exactly_the_positions(positions: set[int]) -> None:
    found = spans(np.array(sorted(positions), np.intp))
    assert [position for start, stop in found for position in range(start, stop)] == sorted(positions)
    assert all(before[1] < after[0] for before, after in pairwise(found))


# ---- reports ----
class Server:
    """Accepts reports, or fails."""

    def __init__(self) -> None:
        self.seen: list[pb.ReportLoadsRequest] = []
        self.forgotten: list[int] = []
        self.fail = False
        self.hold = threading.Event()
        self.hold.set()
        self.changed = threading.Condition()

    def __call__(self, request: pb.ReportLoadsRequest) -> pb.ReportLoadsResponse:
        self.hold.wait(WAIT_S)
        with self.changed:
            self.seen.append(request)
            self.changed.notify_all()
        if self.fail:
            raise Unavailable("gone")
        return pb.ReportLoadsResponse(forgotten=self.forgotten)

    def wait(self, reports: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.seen) >= reports, WAIT_S)


def told(request: pb.ReportLoadsRequest) -> Mapping[int, tuple[dict[int, int], bool]]:
    return {load.plan_id: ({part.index: part.blocks_done for part in load.parts}, load.finished) for load in request.loads}


def test_plan_reports_are_merged() -> None:
    server, incidents = Server(), LimitedLog(logging.getLogger("kvclient"))
    reporter = PlanProgressReporter(server, incidents)
    reporter.tell({1: [(0, 3)]}, finished=False)
    reporter.tell({1: [(0, 5), (1, 2)], 2: [(0, 1)]}, finished=False)
    reporter.tell({2: []}, finished=True)
    server.wait(1)
    assert told(server.seen[0]) == {1: ({0: 5, 1: 2}, False), 2: ({0: 1}, True)}
    reporter.close()


def test_plan_reports_continue_after_failure() -> None:
    server, incidents = Server(), LimitedLog(logging.getLogger("kvclient"))
    reporter = PlanProgressReporter(server, incidents)
    server.fail = True
    reporter.tell({1: [(0, 3)]}, finished=False)
    server.wait(1)
    server.fail = False
    reporter.tell({1: [(0, 4)]}, finished=True)
    server.wait(2)
    assert told(server.seen[1]) == {1: ({0: 4}, True)}
    assert incidents.counters.get("client_reports_failed_total") == 1
    reporter.close()


def test_plan_report_without_thread_is_sent_by_next(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    server, incidents = Server(), LimitedLog(logging.getLogger("kvclient"))
    reporter = PlanProgressReporter(server, incidents)
    with monkeypatch.context() as exhausted:
        exhausted.setattr(threading.Thread, "start", refuse)
        reporter.tell({1: [(0, 3)]}, finished=True)
    assert incidents.counters.get("client_reports_failed_total") == 1
    reporter.tell({2: [(0, 1)]}, finished=False)
    server.wait(1)
    assert told(server.seen[0]) == {1: ({0: 3}, True), 2: ({0: 1}, False)}
    reporter.close()


def test_plan_forgotten_is_told_until_it_ends() -> None:
    server = Server()
    reporter = PlanProgressReporter(server, LimitedLog(logging.getLogger("kvclient")))
    server.forgotten = [1, 2, 9]
    reporter.tell({1: [(0, 3)]}, finished=False)
    reporter.tell({2: []}, finished=True)
    wait_until(lambda: reporter.take_forgotten([1, 2, 9]) == {1})
    assert reporter.take_forgotten([1]) == set()
    server.forgotten = []
    described = pb.PlanInProgress(parts=[pb.PlanPart(index=0, count=4, node_id="a")])
    reporter.tell({1: [(0, 3)]}, finished=False, restored={1: described})
    wait_until(lambda: any(load.HasField("restored_plan") for request in server.seen for load in request.loads))
    restored = [load for request in server.seen for load in request.loads if load.HasField("restored_plan")]
    assert [load.restored_plan for load in restored] == [described]
    reporter.close()


def test_plan_forgotten_does_not_outlive_a_dropped_report() -> None:
    """The end of a load that the full queue drops is not reported. Nothing of its plan stays."""
    server = Server()
    reporter = PlanProgressReporter(server, LimitedLog(logging.getLogger("kvclient")))
    server.forgotten = [1, 2]
    reporter.tell({1: [(0, 3)], 2: [(0, 3)]}, finished=False)
    wait_until(lambda: reporter.take_forgotten([2]) == {2}, "the answer has arrived")
    server.hold.clear()
    reporter.tell({3: []}, finished=False)
    reporter.tell({plan: [] for plan in range(4, MAX_PLANS + 4)}, finished=False)
    reporter.tell({1: [], **{plan: [] for plan in range(MAX_PLANS + 4, 3 * MAX_PLANS)}}, finished=True)
    server.hold.set()
    assert reporter.take_forgotten([1]) == set()
    reporter.close()


def test_plan_report_queue_is_bounded() -> None:
    server, incidents = Server(), LimitedLog(logging.getLogger("kvclient"))
    server.hold.clear()
    reporter, before = PlanProgressReporter(server, incidents), set(threading.enumerate())
    for plan in range(3 * MAX_PLANS):
        reporter.tell({plan: [(0, 1)]}, finished=False)
    assert incidents.counters.get("client_reports_dropped_total") > 0
    [thread] = {one for one in threading.enumerate() if one.name == "kvclient-report"} - before
    reporter.close()
    server.hold.set()
    thread.join(WAIT_S)
    assert not thread.is_alive()
    assert all(len(request.loads) <= MAX_PLANS for request in server.seen)
