"""Which requests in the queue of an engine are read ahead, without vLLM."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvclient import BlockKey, Lookup
from kvclient.engines.vllm.plan import READ_AHEAD_S
from kvclient.engines.vllm.scheduler.prefix_lookup import NOTHING, PrefixMatch
from kvclient.engines.vllm.scheduler.reads_ahead import ReadsAhead
from samples import sample

NAMESPACE = b"n" * 16
FOUND = PrefixMatch(2, [{NAMESPACE: Lookup([BlockKey(bytes([at]) * 16) for at in range(3)], 3)}])
TWO_GROUPS = PrefixMatch(2, [*FOUND.by_group, *FOUND.by_group])
LIMIT = 3
ids = st.sampled_from([f"r{number}" for number in range(8)])


def planned(made: ReadsAhead, match: PrefixMatch | None = FOUND, now_s: float = 0.0) -> tuple[list[str], list[str]]:
    jobs, ended = made.plan(lambda _: match, now_s)
    return [job.request_id for job in jobs], ended


def test_request_passed_over_twice_is_read_ahead() -> None:
    made = ReadsAhead(LIMIT)
    made.arrived("r")
    assert planned(made, None) == ([], [])
    assert planned(made) == ([], []), "the next step may take it"
    jobs, _ = made.plan(lambda _: FOUND, 0.0)
    assert [job.request_id for job in jobs] == ["r"]
    assert jobs[0].lookups[NAMESPACE].hit_blocks == FOUND.hit_blocks
    assert planned(made) == ([], []), "once"


def test_request_that_leaves_without_load_is_ended() -> None:
    made = ReadsAhead(LIMIT)
    for name in ("aborted", "loaded", "waiting"):
        made.arrived(name)
    planned(made)
    assert planned(made)[0] == ["aborted", "loaded", "waiting"]
    made.left("aborted")
    made.left("loaded", loads=True)
    assert planned(made) == ([], ["aborted"])
    made.clear()
    assert planned(made) == ([], ["waiting"])


def test_request_that_waits_longer_is_read_ahead_again() -> None:
    made = ReadsAhead(2)
    for name in ("first", "second", "third", "fourth"):
        made.arrived(name)
    planned(made)
    assert planned(made) == (["first", "second"], [])
    made.left("second")
    assert planned(made, now_s=READ_AHEAD_S - 1) == (["third"], ["second"])
    assert planned(made, now_s=READ_AHEAD_S) == (["first"], ["first"])
    assert planned(made, NOTHING, 3 * READ_AHEAD_S) == ([], ["third", "first"]), "the slots are free"
    assert planned(made, now_s=3 * READ_AHEAD_S) == ([], [])


def test_nothing_found_or_several_groups_is_not_read_ahead() -> None:
    for match in (NOTHING, TWO_GROUPS):
        made = ReadsAhead(LIMIT)
        made.arrived("r")
        assert planned(made, match) == planned(made, match) == ([], [])
        assert planned(made) == ([], []), "it is decided"


def test_limit_of_zero_reads_nothing_ahead() -> None:
    made = ReadsAhead(0)
    made.arrived("r")
    assert planned(made) == planned(made) == ([], [])


class ReadsAheadMachine(RuleBasedStateMachine):
    """Every read that was begun is ended once: by its request's load, or by the plan; never more than the limit at once.

    A read whose time is over is ended and begun again in the same plan.
    """

    def __init__(self) -> None:
        super().__init__()
        self.made = ReadsAhead(LIMIT)
        self.answered: set[str] = set()
        self.waiting: set[str] = set()
        self.held: dict[str, float] = {}
        """Until when."""
        self.now_s = 0.0
        self.due: set[str] = set()

    @rule(name=ids)
    def arrives(self, name: str) -> None:
        if name not in self.waiting | self.held.keys() | self.due:
            self.waiting.add(name)
            self.made.arrived(name)

    @rule(name=ids)
    def is_answered(self, name: str) -> None:
        self.answered.add(name)

    @rule(name=ids, loads=st.booleans())
    def leaves(self, name: str, loads: bool) -> None:
        self.made.left(name, loads=loads)
        self.waiting.discard(name)
        self.answered.discard(name)
        if name in self.held:
            del self.held[name]
            if not loads:
                self.due.add(name)

    @rule()
    def weights_change(self) -> None:
        self.made.clear()
        self.due |= self.held.keys()
        self.held, self.waiting = {}, set()

    @rule(seconds=st.sampled_from([1.0, READ_AHEAD_S / 2, READ_AHEAD_S]))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds

    @rule()
    def step(self) -> None:
        jobs, ended = self.made.plan(lambda name: FOUND if name in self.answered else None, self.now_s)
        begun = {job.request_id for job in jobs}
        over = {name for name, until_s in self.held.items() if until_s <= self.now_s}
        assert over <= begun <= over | self.waiting & self.answered
        assert sorted(ended) == sorted(self.due | over)
        self.held |= dict.fromkeys(begun, self.now_s + READ_AHEAD_S)
        self.waiting -= begun
        self.due = set()

    @invariant()
    def is_bounded(self) -> None:
        assert len(self.held) <= LIMIT


TestReadsAhead = ReadsAheadMachine.TestCase
TestReadsAhead.settings = settings(max_examples=sample(100, of=2_000), stateful_step_count=40)
