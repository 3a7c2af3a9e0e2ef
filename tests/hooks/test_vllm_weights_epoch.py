"""The weights epoch of an engine: no block is stored under a name that other weights have, in any order of events.

The model knows which weights computed each page. Its user changes weights between a reset and the next step that computes, or
before a reset, as vLLM demands; a reset may fail, and names in a file may come late.
"""

from __future__ import annotations

import os
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from kvclient import InvalidArgument
from kvclient.engines.vllm.identity.epoch_machine import TRANSITIONS, EpochDecision, EpochEvent, EpochMachine, EpochPhase
from kvclient.engines.vllm.identity.weights_check import CHECK_DEADLINE_S, WeightsCheck, combined_digest
from kvclient.engines.vllm.identity.weights_epoch import WeightsEpoch, given_name
from kvclient.engines.vllm.options import ConnectorOptions

Weights = tuple[int, ...]
"""The weights of this engine's ranks, and of other data-parallel ranks that compute with them."""
STATES = st.tuples(*[st.integers(0, 2)] * 3)


@dataclass
class Running:
    """A request that computes one page with each step."""

    made_by: set[Weights] = field(default_factory=set)
    unstored: list[frozenset[Weights]] = field(default_factory=list)
    dropped: bool = False


class Histories(RuleBasedStateMachine):
    """An engine with one cache, and its user."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.file = Path(self.folder.name) / "epoch"
        self.now_s = 0.0
        self.draws = 0
        self.loses = False
        self.owner: dict[str, Weights] = {}
        """By name: the weights that it means, in this engine and in others."""
        self.used: set[str] = set()
        self.running: list[Running] = []
        self.cached: list[frozenset[Weights]] = []
        self.answers: list[dict[tuple[int, int], str]] = []

    def teardown(self) -> None:
        self.folder.cleanup()

    @initialize(naming=st.sampled_from(["digest", "fixed", "file"]), ranks=st.integers(1, 2), spread=st.booleans())
    def start(self, naming: str, ranks: int, spread: bool) -> None:
        self.ranks, self.spread, self.uses_file = ranks, spread, naming == "file"
        self.weights: Weights = (0,) * (ranks + spread)
        self.write_name()
        options = {"digest": {}, "fixed": {"weights_epoch": "fixed"}, "file": {"weights_epoch_file": str(self.file)}}[naming]
        made = ConnectorOptions.from_mapping(options)
        self.epoch = WeightsEpoch(made, ranks, clock=lambda: self.now_s)
        self.epoch.start(given_name(made) or self.digest_name(), combined_digest(self.rank_digests()))
        self.owner["fixed"] = self.weights
        self.used.add(self.epoch.name)

    # ---- what is true ----
    def rank_digests(self) -> list[str]:
        return [f"rank {rank}: {self.weights[rank]}" for rank in range(self.ranks)]

    def digest_name(self) -> str:
        """As any engine with these weights names them at its start."""
        name = combined_digest([*self.rank_digests(), *map(str, self.weights[self.ranks :])])
        self.owner[name] = self.weights
        return name

    def write_name(self) -> None:
        name = "v" + "-".join(map(str, self.weights))
        self.file.write_text(name)
        self.owner[name] = self.weights

    def change(self, weights: Weights, *, names: bool) -> None:
        """Change the weights, and their name in the file. If that is forgotten, the file has a name that this engine has used."""
        self.weights = (*weights, *self.weights)[: len(self.weights)]
        self.digest_name()
        if names or self.file.read_text() not in self.used:
            self.write_name()

    # ---- the engine ----
    def apply(self, decision: EpochDecision) -> None:
        if decision is EpochDecision.BEGIN:
            self.used.add(self.epoch.name)
            for one in self.running:
                one.dropped = True

    def reset(self, *, preempts: bool, renews: bool) -> bool:
        """As vLLM does it. If ``preempts``, it always succeeds."""
        if preempts:
            self.running = [Running() for _ in self.running]
        cleared = not self.running or preempts
        if cleared:
            self.cached.clear()
        self.apply(self.epoch.reset_ended(cleared=cleared))
        if renews:
            self.apply(self.epoch.renew())
            assert cleared is not self.epoch.is_closed
        return cleared

    def schedule(self, *, new: bool, hits: bool, computes: bool) -> list[Running]:
        """Return the requests that this step computes."""
        self.now_s += 1.0
        self.apply(self.epoch.end_checks())
        computed = list(self.running) if computes else []
        if new and not self.epoch.hold_back():
            one = Running(set(self.cached[-1])) if hits and self.cached else Running()
            if not one.made_by and hits and self.epoch.is_open:  # a load: nothing is there that was not stored
                one.made_by = {self.owner[self.epoch.name]} if self.epoch.name in self.owner else set()
            self.running.append(one)
            computed.append(one)
        return computed

    @rule(
        requests=st.lists(st.sampled_from(["", "new", "hit"]), min_size=1, max_size=4),
        late=st.integers(0, 2),
        loses=st.sampled_from([False, False, False, True]),
    )
    def compute(self, requests: list[str], late: int, loses: bool) -> None:
        """Compute some steps. Answers come ``late`` steps later; ``loses``: never, and time passes."""
        self.loses = loses
        for request in requests:
            self.step(new=bool(request), hits=request == "hit", computes=True, late=late)
        self.now_s += loses * (CHECK_DEADLINE_S + 1)

    def step(self, *, new: bool, hits: bool, computes: bool, late: int) -> None:
        computed = self.schedule(new=new, hits=hits, computes=computes)
        if check := self.epoch.plan_check(computes=bool(computed)):
            self.draws += 1
            unknown = f" drawn {self.draws}" if self.spread else ""
            digests = {(check, rank): digest + unknown for rank, digest in enumerate(self.rank_digests())}
            self.answers.append({} if self.loses else digests)
        stores = self.epoch.is_open
        for one in computed:
            one.made_by.add(self.weights)
            one.unstored.append(frozenset(one.made_by))
            self.cached.append(frozenset(one.made_by))
            if stores and not one.dropped:
                self.store(one)
        while len(self.answers) > late:
            self.epoch.answered(self.answers.pop(0))
            self.apply(self.epoch.end_checks())

    def store(self, one: Running) -> None:
        for made_by in one.unstored:
            assert len(made_by) == 1, "a page that several weights computed"
            (weights,) = made_by
            assert self.owner.setdefault(self.epoch.name, weights) == weights, (self.epoch.name, weights, self.owner)
        one.unstored.clear()

    @rule()
    def requests_end(self) -> None:
        self.running.clear()

    # ---- the user ----
    @rule(preempts=st.sampled_from([False, False, True]), renews=st.booleans())
    def reset_only(self, preempts: bool, renews: bool) -> None:
        """Also what sleep does, and a pause without a change of the weights."""
        self.reset(preempts=preempts, renews=renews)

    @rule(
        to=STATES,
        names=st.booleans(),
        preempts=st.sampled_from([False, False, True]),
        renews=st.booleans(),
    )
    def change_then_reset(self, to: Weights, names: bool, preempts: bool, renews: bool) -> None:
        """The name comes before the reset, or late. If the reset fails, the user continues."""
        self.change(to, names=names)
        self.reset(preempts=preempts, renews=renews)

    @rule()
    def name_comes_late(self) -> None:
        self.write_name()

    @rule(to=STATES, steps=st.integers(0, 3), names=st.booleans())
    def pause_then_change(self, to: Weights, steps: int, names: bool) -> None:
        """vLLM's ``pause_generation``, steps that compute nothing, a change, ``resume_generation``."""
        self.running.clear()
        assert self.reset(preempts=True, renews=True)
        for _ in range(steps):
            self.step(new=False, hits=False, computes=False, late=0)
        self.change(to, names=names)


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=300, stateful_step_count=20, deadline=None)


def machine(*, named: bool = False) -> EpochMachine:
    names = (f"~{number}" for number in range(100))
    return EpochMachine("first", "d1", named=named, unique=lambda: next(names))


def test_epoch_transitions_exclude_only_unasked_answers() -> None:
    answers = {EpochEvent.SAME, EpochEvent.OTHER, EpochEvent.UNKNOWN}
    missing = {(phase, event) for phase in EpochPhase for event in EpochEvent} - set(TRANSITIONS)
    assert missing == {(phase, event) for phase in (EpochPhase.OPEN, EpochPhase.CLOSED) for event in answers}
    for (phase, event), after in TRANSITIONS.items():
        assert (after is EpochPhase.CHECKING) == (
            event is EpochEvent.CLEARED or (phase, event) == (EpochPhase.CHECKING, EpochEvent.RENEWED)
        )
        assert after is not EpochPhase.OPEN or event in answers, "blocks are stored again only after a check"
        assert phase is not EpochPhase.CLOSED or event is EpochEvent.CLEARED or after is EpochPhase.CLOSED


def test_epoch_unasked_answers_do_nothing() -> None:
    made = machine()
    assert made.checked("d2", "", latest=True) is EpochDecision.NOTHING
    assert (made.phase, made.name) == (EpochPhase.OPEN, "first")


@pytest.mark.parametrize(("named", "given"), [(False, ""), (True, "first")])
def test_epoch_of_unchanged_weights_keeps_its_name(named: bool, given: str) -> None:
    made = machine(named=named)
    for digest, name, number in (("d1", "first", 0), ("d2", "~0" if named else "d2", 1), ("d2", "~0" if named else "d2", 1)):
        assert made.cleared() is EpochDecision.ASK
        assert made.renewed() is EpochDecision.NOTHING
        made.checked(digest, given, latest=True)
        assert (made.phase, made.name, made.number) == (EpochPhase.OPEN, name, number)
    made.cleared()
    assert made.checked("d1", given, latest=True) is EpochDecision.BEGIN
    assert made.name == (given or "d1"), "back to the first weights, and to their name"


def test_epoch_failed_reset_closes_if_weights_changed() -> None:
    made = machine()
    assert made.kept() is EpochDecision.ASK
    assert made.checked("d1", "", latest=True) is EpochDecision.NOTHING
    assert made.phase is EpochPhase.OPEN, "a failed reset alone changes nothing"
    made.kept()
    assert made.checked("d2", "", latest=True) is EpochDecision.CLOSE
    assert (made.kept(), made.renewed()) == (EpochDecision.NOTHING, EpochDecision.NOTHING)
    assert made.phase is EpochPhase.CLOSED
    made.cleared()
    assert made.checked("d2", "", latest=True) is EpochDecision.BEGIN
    assert (made.phase, made.name) == (EpochPhase.OPEN, "d2")


def test_epoch_failed_renewal_closes_at_once() -> None:
    made = machine(named=True)
    made.kept()
    assert made.renewed() is EpochDecision.CLOSE
    made.cleared()
    assert made.checked("d1", "v2", latest=True) is EpochDecision.BEGIN
    assert made.name == "v2", "the demand is not forgotten"


def test_epoch_failed_reset_during_a_check_closes() -> None:
    """Pages of the steps since the first reset may have been computed by either weights."""
    made = machine()
    made.cleared()
    assert made.kept() is EpochDecision.CLOSE
    assert made.checked("d1", "", latest=True) is EpochDecision.NOTHING
    assert made.phase is EpochPhase.CLOSED


def test_epoch_doubts_need_each_check_to_agree() -> None:
    made = machine()
    made.kept()
    made.kept()
    assert made.checked("d1", "", latest=False) is EpochDecision.NOTHING
    assert made.phase is EpochPhase.DOUBTED, "a later check was asked"
    assert made.checked("d2", "", latest=False) is EpochDecision.CLOSE


def test_epoch_check_not_answered_gets_a_unique_name() -> None:
    made = machine(named=True)
    made.cleared()
    assert made.checked("", "first", latest=True) is EpochDecision.BEGIN
    assert made.name == "~0"
    made.cleared()
    assert made.checked("d1", "first", latest=True) is EpochDecision.BEGIN
    assert made.name == "first"
    made.kept()
    assert made.checked("", "first", latest=True) is EpochDecision.CLOSE


@pytest.mark.parametrize(("named", "given"), [(False, ""), (True, "first")])
def test_epoch_that_could_not_begin_begins_after_a_reset(named: bool, given: str) -> None:
    made = machine(named=named)
    made.cleared()
    assert made.checked("d1", given and "second", latest=True) is EpochDecision.NOTHING, "no reset demanded another name"
    made.cleared()
    assert made.checked("d2", given and "second", latest=True) is EpochDecision.BEGIN
    assert made.failed() is EpochDecision.CLOSE
    assert made.checked("d2", given and "second", latest=True) is EpochDecision.NOTHING
    assert made.kept() is EpochDecision.NOTHING
    assert made.phase is EpochPhase.CLOSED
    made.cleared()
    assert made.checked("d2", given and "second", latest=True) is EpochDecision.BEGIN
    assert (made.phase, made.name, made.number) == (EpochPhase.OPEN, (given and "second") or "d2", 2)


def test_epoch_name_of_unknown_weights_is_used_once() -> None:
    made = machine(named=True)
    made.cleared()
    made.checked("", "v2", latest=True)
    assert made.name == "v2", "the user's word"
    made.cleared()
    made.checked("d2", "v2", latest=True)
    assert made.name == "~0"


def test_check_asks_with_a_step_that_computes_or_waits() -> None:
    check = WeightsCheck(workers=2)
    assert check.plan(computes=True) == 0
    check.begin()
    assert check.plan(computes=False) == 0, "an idle step of an engine that may be paused"
    assert check.hold_back()
    assert [check.plan(computes=False), check.plan(computes=True)] == [1, 0]
    check.answered({(1, 1): "b"})
    assert check.take() == []
    check.answered({(1, 0): "a", (7, 0): "other"})
    assert check.take() == [(1, combined_digest(["a", "b"]))]
    assert not check.hold_back()
    check.begin()
    assert check.plan(computes=True) == 2


def test_check_that_workers_do_not_answer_ends() -> None:
    clock = iter([0.0, CHECK_DEADLINE_S, CHECK_DEADLINE_S + 1])
    check = WeightsCheck(2, lambda: next(clock))
    check.begin()
    assert check.plan(computes=True) == 1
    check.answered({(1, 0): "a"})
    assert check.take() == []
    assert check.take() == [(1, "")]
    assert not check.hold_back()
    check.answered({(1, 1): "late"})
    assert check.take() == []


def test_check_answered_is_not_late_as_an_earlier_one_is() -> None:
    now_s = 0.0
    check = WeightsCheck(1, lambda: now_s)
    for number in (1, 2):
        check.begin()
        assert check.plan(computes=True) == number
        now_s += CHECK_DEADLINE_S / 2
    check.answered({(2, 0): "a"})
    assert check.take() == [(2, combined_digest(["a"]))]
    now_s += 1.0
    assert check.take() == [(1, "")], "from the step that asked it"
    assert check.take() == []


def options(**given: str) -> ConnectorOptions:
    return ConnectorOptions.from_mapping(given)


def checked(epoch: WeightsEpoch, digest: str, *, renews: bool = True) -> str:
    """Return the name after a reset and a check with that digest."""
    epoch.reset_ended(cleared=True)
    if renews:
        epoch.renew()
    number = epoch.plan_check(computes=True)
    epoch.answered({(number, 0): digest})
    epoch.end_checks()
    return epoch.name


def test_epoch_file_names_each_epoch(tmp_path: Path) -> None:
    path = tmp_path / "epoch"
    given = options(weights_epoch_file=str(path))
    with pytest.raises(InvalidArgument):
        given_name(given)
    path.write_text(" 8\n")
    epoch = WeightsEpoch(given)
    epoch.start(given_name(given), combined_digest(["w8"]))
    assert checked(epoch, "w8") == "8", "the same weights once more"
    path.write_text("9")
    assert checked(epoch, "w8", renews=False) == "8", "nothing changed"
    assert checked(epoch, "w8") == "9"
    assert checked(epoch, "w10") not in {"8", "9"}, "the file names the weights before"
    path.write_text("10")
    assert checked(epoch, "w10") == "10"
    path.unlink()
    assert checked(epoch, "w10", renews=False) == "10"
    assert checked(epoch, "w10") not in {"8", "9", "10", ""}, "rather nothing than stale KV"


def test_epoch_counts_what_ends_sharing() -> None:
    counts: list[str] = []
    epoch = WeightsEpoch(options(), count=counts.append)
    epoch.start("first", combined_digest(["a"]))
    assert checked(epoch, "a") == "first"
    assert checked(epoch, "b") == combined_digest(["b"])
    epoch.reset_ended(cleared=False)
    epoch.renew()
    assert epoch.is_closed
    assert counts == ["resets", "resets", "weights_epochs", "resets", "epochs_closed"]


def test_epoch_each_failed_reset_asks_with_the_next_step() -> None:
    """A check that came later would miss weights that computed in between: their KV would be stored under another name."""
    epoch = WeightsEpoch(options())
    epoch.start("first", combined_digest(["a"]))
    for digest in ("a", "b"):
        epoch.reset_ended(cleared=False)
        number = epoch.plan_check(computes=True)
        assert number
        epoch.answered({(number, 0): digest})
        epoch.end_checks()
    assert epoch.is_closed, "the engine may hold KV of both"


def test_epoch_name_in_a_hung_file_system_is_not_awaited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvclient.engines.vllm.identity.weights_epoch._READ_S", 0.05)
    path = tmp_path / "epoch"
    path.write_text("1")
    given = options(weights_epoch_file=str(path))
    epoch = WeightsEpoch(given)
    epoch.start(given_name(given), combined_digest(["w1"]))
    path.unlink()
    os.mkfifo(path)  # whose reader waits for a writer
    names = {checked(epoch, "w2"), checked(epoch, "w3")}
    assert len(names) == 2
    assert all(name.startswith("~") for name in names)
    path.write_text("4")
    path.unlink()
    path.write_text("4")
    end_s = time.monotonic() + 10.0
    while (name := checked(epoch, "w4")) != "4":
        assert time.monotonic() < end_s, name
