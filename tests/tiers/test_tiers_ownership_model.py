"""Adoption of volumes as a model: nodes that run the real decisions in any interleaving, are paused at any point, and die.

A node decides from an earlier state, so each of its writes may come late. Any node may believe at any time that another one is
absent. Still no block that was reported durable may be missing from the catalog of a later owner.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.tiers.nvme.ownership import NOT_OPEN, OPEN, Owner, Step, VolumeObservation, next_step

NODES = ("home", "a", "b")


@dataclass
class Folder:
    """The files."""

    claims: dict[int, str] = field(default_factory=lambda: {0: "home"})
    copies: list[tuple[int, int]] = field(default_factory=lambda: [(0, 0), (0, 0)])
    """(token, epoch) of the two copies of the superblock."""
    catalogs: dict[int, set[int]] = field(default_factory=lambda: {0: set()})

    @property
    def claimed(self) -> int:
        return max(self.claims)

    @property
    def published(self) -> int:
        return max(self.copies)[0]


class Fenced(Exception):
    """The node has found that it no longer owns the volume."""


class Node:
    """One process of a node: a generator that stops before each access to the volume."""

    def __init__(self, name: str, folder: Folder, durable: set[int], numbers: Iterator[int]) -> None:
        self.name = name
        self.folder = folder
        self.durable = durable
        self.numbers = numbers
        self.held: int | None = None
        self.believes_absent = True
        self.steps = self._live()

    def _live(self) -> Iterator[None]:
        while True:
            try:
                yield from self._step()
            except Fenced:
                self.held = None

    def _seen(self) -> VolumeObservation:
        folder = self.folder
        if self.held is not None:  # a holder looks for the next claim only
            claimed = self.held + (self.held + 1 in folder.claims)
            return VolumeObservation(Owner.SELF, claimed, folder.published, self.held, self.held)
        holder = folder.claims[folder.claimed]
        owner = Owner.SELF if holder == self.name else Owner.ABSENT if self.believes_absent else Owner.PRESENT
        return VolumeObservation(owner, folder.claimed, folder.published, max(folder.catalogs))

    def _step(self) -> Iterator[None]:
        folder = self.folder
        yield
        seen = self._seen()
        step = next_step(seen)
        yield
        if step is Step.CLAIM:
            folder.claims.setdefault(seen.token + 1, self.name)
        elif step in (Step.PUBLISH, Step.RESTORE):
            yield from self._publish(seen.token)
        elif step is Step.COPY:
            copied = set(folder.catalogs[seen.catalog])
            yield
            folder.catalogs.setdefault(seen.token, copied)
        elif step is Step.OPEN:
            yield from self._begin_epoch(seen.token)
            self.held = seen.token
            assert self.durable <= folder.catalogs[seen.token] or folder.claimed > seen.token, "a durable block is lost"
        elif step is Step.KEEP:
            yield from self._store()
        elif step is Step.DROP:
            raise Fenced

    def _publish(self, token: int) -> Iterator[None]:
        for at in (0, 1):
            if self.folder.claimed > token:
                return
            yield  # a node may be paused here: the write comes late
            self.folder.copies[at] = (token, max(epoch for _, epoch in self.folder.copies) + 1)

    def _begin_epoch(self, token: int) -> Iterator[None]:
        older = min((0, 1), key=self.folder.copies.__getitem__)
        if self.folder.published > token:
            raise Fenced
        yield
        self.folder.copies[older] = (token, max(epoch for _, epoch in self.folder.copies) + 1)

    def _store(self) -> Iterator[None]:
        """Commit a block, as ``NvmeSlab.commit`` does, and report it durable if the volume is still owned."""
        assert self.held is not None
        block = next(self.numbers)
        yield
        self.folder.catalogs[self.held].add(block)
        yield
        seen = self._seen()
        step = next_step(seen)
        if step is Step.RESTORE:
            yield from self._publish(self.held)
        elif step is Step.DROP:
            raise Fenced
        if step is Step.KEEP:
            later = [held for token, held in self.folder.catalogs.items() if token > self.held]
            assert all(block in held for held in later), "copied too early"
            self.durable.add(block)


class Volume:
    """Several nodes and one volume."""

    def __init__(self) -> None:
        self.folder = Folder()
        self.durable: set[int] = set()
        self.numbers = iter(range(1_000_000))
        self.nodes: dict[str, Node] = {}
        for name in NODES:
            self.start(name)

    def start(self, name: str) -> None:
        """Start a process of a node. An earlier one is dead, wherever it was."""
        self.nodes[name] = Node(name, self.folder, self.durable, self.numbers)

    def run(self, name: str, accesses: int) -> None:
        for _ in range(accesses):
            next(self.nodes[name].steps)

    def adopt(self, name: str) -> None:
        """However all others ended, one living node becomes the owner, with all durable blocks."""
        for other in NODES:
            self.start(other)
        node = self.nodes[name]
        for _ in range(60):
            next(node.steps)
            if node.held is not None:
                break
        assert node.held == self.folder.claimed == self.folder.published
        assert self.durable <= self.folder.catalogs[node.held]


names = st.sampled_from(NODES)
runs = st.lists(st.tuples(names, st.integers(1, 12), st.sampled_from(["run"] * 9 + ["kill"])), max_size=60)


@given(runs=runs, adopter=names)
@settings(max_examples=2_000, deadline=None)
def test_nodes_race_pause_and_die_no_durable_block_is_lost(runs: list[tuple[str, int, str]], adopter: str) -> None:
    volume = Volume()
    volume.run("home", 20)
    for name, accesses, action in runs:
        if action == "kill":
            volume.start(name)
        else:
            volume.run(name, accesses)
    volume.adopt(adopter)


def accesses_until(volume: Volume, name: str, done: Callable[[Node], bool]) -> int:
    """Run a node until something is true of it. Returns its number of accesses."""
    for accesses in range(1, 100):
        volume.run(name, 1)
        if done(volume.nodes[name]):
            return accesses
    raise AssertionError("it never came to that")


ADOPTION = accesses_until(Volume(), "a", lambda node: node.held is not None)
"""Accesses of an adoption, from the first look to the opened volume."""


@pytest.mark.parametrize("paused_at", range(ADOPTION + 1))
def test_owner_wakes_at_any_step_of_adoption_and_stops_writing(paused_at: int) -> None:
    for owner_at in range(20, 32):
        volume = Volume()
        volume.nodes["home"].believes_absent = False
        volume.run("home", owner_at)
        volume.run("a", paused_at)
        volume.run("home", 40)
        volume.run("a", 2 * ADOPTION)
        volume.run("home", 40)
        assert volume.nodes["home"].held is None
        assert volume.nodes["a"].held == volume.folder.claimed
        assert volume.durable <= volume.folder.catalogs[volume.folder.claimed]


@pytest.mark.parametrize("dies_at", range(ADOPTION + 1))
def test_adopter_dies_at_any_step_and_next_one_adopts(dies_at: int) -> None:
    volume = Volume()
    volume.run("home", 30)
    volume.run("a", dies_at)
    volume.start("a")
    volume.start("home")
    volume.adopt("b")


@pytest.mark.parametrize("ahead", range(ADOPTION + 1))
def test_two_adopters_race_and_one_adopts(ahead: int) -> None:
    """``a`` goes ahead and pauses while ``b``, which believes it absent, adopts; then ``a`` continues."""
    volume = Volume()
    volume.run("home", 30)
    volume.run("a", ahead)
    volume.run("b", 3 * ADOPTION)
    volume.nodes["a"].believes_absent = False
    volume.run("a", 3 * ADOPTION)
    volume.run("b", 10)
    assert [name for name, node in volume.nodes.items() if node.held == volume.folder.claimed] == ["b"]
    assert volume.nodes["a"].held is None
    assert volume.durable <= volume.folder.catalogs[volume.folder.claimed]


def test_tables_cover_every_case() -> None:
    assert set(NOT_OPEN) == {(owner, sign) for owner in Owner for sign in (-1, 0, 1)}
    assert set(OPEN) == {(claimed, published) for claimed in (-1, 0, 1) for published in (-1, 0, 1)}


@pytest.mark.parametrize(("owner", "step"), [(Owner.PRESENT, Step.WAIT), (Owner.ABSENT, Step.CLAIM), (Owner.SELF, Step.OPEN)])
def test_next_step_depends_on_owner(owner: Owner, step: Step) -> None:
    assert next_step(VolumeObservation(owner, 0, 0, 0)) is step


def test_next_step_lost_catalog_is_not_copied() -> None:
    """Opening reports it, and a repair rebuilds it."""
    assert next_step(VolumeObservation(Owner.SELF, 2, 2, -1)) is Step.OPEN
