"""Model-based tests of liveness: clocks, pauses and outages of the index do not change which nodes count as alive."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstore.core.clock import ManualClock
from kvstore.core.types import BootId, NodeId
from kvstore.index.contract import Beat
from kvstore.metadata.membership.liveness import Liveness, LivenessChange
from kvstore.metadata.membership.pause import PauseWatch
from samples import sample

TTL_S = 2.5
NODES = [NodeId(name) for name in ("a", "b", "c")]
BOOTS = [BootId(bytes([number]) * 16) for number in (1, 2)]
SKEWS_S = (0.0, -(2.0**20), 2.0**30)
"""Start of each server's clock. Steps of time are multiples of 1/64 s, so that sums are exact."""

nodes = st.sampled_from(NODES)
boots = st.sampled_from(BOOTS)
steps_s = st.integers(0, 256).map(lambda number: number / 64)


@dataclass
class History:
    """All events of one registered boot, and the last judgement."""

    boot: BootId
    heard_s: list[float]
    left: bool = False
    said_alive: bool = True
    records: list[Beat] = field(default_factory=list)


class LivenessMachine(RuleBasedStateMachine):
    """The same events for servers whose clocks differ, against a model that looks through the whole history at each tick."""

    def __init__(self) -> None:
        super().__init__()
        self.servers = [Liveness(TTL_S) for _ in SKEWS_S]
        self.now_s = 0.0
        self.histories: dict[NodeId, History] = {}
        self.excuses_s: list[float] = []
        """When the server could hear again."""
        self.index_failed = False

    def say(self, event: str, *arguments: object, timed: bool = True) -> list[LivenessChange]:
        """Tell all servers of an event, each by its own clock. All must answer the same."""
        answers = []
        for server, skew_s in zip(self.servers, SKEWS_S, strict=True):
            times = [self.now_s + skew_s] if timed else []
            answers.append(getattr(server, event)(*arguments, *times))
        assert answers.count(answers[0]) == len(answers), "the clock makes no difference"
        return answers[0] or []

    def expect(self, changes: list[LivenessChange], *nodes_changed: NodeId, alive: bool) -> None:
        assert sorted(changes) == sorted(LivenessChange(node_id, alive) for node_id in nodes_changed)
        for node_id in nodes_changed:
            self.histories[node_id].said_alive = alive

    def tell_registrations(self) -> list[LivenessChange]:
        registered = {node_id: history.boot for node_id, history in self.histories.items()}
        left = {node_id for node_id, history in self.histories.items() if history.left}
        return self.say("registered", registered, left)

    @rule(step_s=steps_s)
    def time_passes(self, step_s: float) -> None:
        self.now_s += step_s

    @rule(node_id=nodes, boot=boots)
    def register(self, node_id: NodeId, boot: BootId) -> None:
        before = self.histories.get(node_id)
        if before is not None and before.boot == boot and not before.left:
            assert self.tell_registrations() == [], "registered again, nothing changes until it is heard"
            return
        was_alive = before is not None and before.said_alive
        self.histories[node_id] = History(boot, [self.now_s])
        self.expect(self.tell_registrations(), *([] if was_alive else [node_id]), alive=True)

    @precondition(lambda self: self.histories)
    @rule(node_id=nodes)
    def unregister(self, node_id: NodeId) -> None:
        history = self.histories.get(node_id)
        if history is not None:
            history.left = True
            self.expect(self.tell_registrations(), *([node_id] if history.said_alive else []), alive=False)

    @rule(node_id=nodes)
    def forget(self, node_id: NodeId) -> None:
        self.histories.pop(node_id, None)
        assert self.tell_registrations() == []

    def hear(self, node_id: NodeId, boot: BootId) -> list[NodeId]:
        """Note in the model that a boot was heard. Returns the nodes that become alive."""
        history = self.histories.get(node_id)
        if history is None or history.boot != boot:
            return []
        history.heard_s.append(self.now_s)
        return [] if history.said_alive or history.left else [node_id]

    @rule(node_id=nodes, boot=boots)
    def heartbeat_arrives(self, node_id: NodeId, boot: BootId) -> None:
        appeared = self.hear(node_id, boot)
        self.expect(self.say("heartbeat_arrived", node_id, boot), *appeared, alive=True)

    @rule(beats=st.dictionaries(nodes, st.builds(Beat, boots, st.integers(0, 3), st.just(0))))
    def records_are_read(self, beats: dict[NodeId, Beat]) -> None:
        appeared = []
        for node_id, beat in beats.items():
            history = self.histories.get(node_id)
            if history is not None and history.records[-1:] != [beat]:
                history.records.append(beat)
                appeared += self.hear(node_id, beat.boot_id)
        self.expect(self.say("beats_read", beats), *appeared, alive=True)

    @rule(step_s=steps_s)
    def pause(self, step_s: float) -> None:
        self.now_s += step_s
        self.excuses_s.append(self.now_s)
        self.say("paused")

    @rule()
    def index_fails(self) -> None:
        self.index_failed = True
        self.say("index_failed", timed=False)

    @rule()
    def index_answers(self) -> None:
        if self.index_failed:
            self.excuses_s.append(self.now_s)
        self.index_failed = False
        self.say("index_answered")

    @rule()
    def tick(self) -> None:
        silent = []
        for node_id, history in self.histories.items():
            signs = [time_s for time_s in [*history.heard_s, *self.excuses_s] if self.now_s - time_s <= TTL_S]
            if history.said_alive and not signs and not self.index_failed:
                silent.append(node_id)
        self.expect(self.say("tick"), *silent, alive=False)

    @invariant()
    def answers_are_as_said(self) -> None:
        alive = {node_id for node_id, history in self.histories.items() if history.said_alive}
        for server, skew_s in zip(self.servers, SKEWS_S, strict=True):
            assert server.alive() == alive
            for node_id in NODES:
                history = self.histories.get(node_id)
                now_s = self.now_s + skew_s
                expected = None if history is None else self.now_s - max(history.heard_s)
                assert server.heard_s(node_id) == (None if expected is None else now_s - expected)
                heard_or_excused = [] if history is None else [*history.heard_s, *self.excuses_s]
                silence_s = self.now_s - max(heard_or_excused) if heard_or_excused else None
                assert server.silence_s(node_id, now_s) == silence_s


TestLivenessAgainstModel = LivenessMachine.TestCase
TestLivenessAgainstModel.settings = settings(max_examples=sample(200, of=2_000), stateful_step_count=40)


def test_pause_is_noticed_once_by_whoever_checks_first() -> None:
    pauses: list[float] = []
    clock = ManualClock()
    watch = PauseWatch(TTL_S, lambda: pauses.append(clock.now_s()), clock)
    for _ in range(20):
        clock.advance(TTL_S / 8)
        watch.check()
    assert pauses == []
    clock.advance(5.0)
    watch.check()
    watch.check()
    assert pauses == [clock.now_s()]
