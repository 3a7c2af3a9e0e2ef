"""A pool against a simple model: random keeps, reads, pins, evictions and resizes return right bytes and leak nothing."""

from __future__ import annotations

from contextlib import ExitStack

import numpy as np
import torch
from hbm_chains import Below, Chain, allocate, chain, in_time
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvclient import CacheSpec
from kvclient.hbm import HbmPool
from kvclient.hbm.namespace_view import NamespaceView, PinnedBlocks
from kvstore.core.types import BlockKey
from samples import sample

SPECS = (
    CacheSpec(model="model-a", block_tokens=4, layers=2, layer_block_bytes=4096),
    CacheSpec(model="model-b", block_tokens=4, layers=3, layer_block_bytes=1000),
)
LONGEST = 10
CHAINS = {(which, seed): chain(LONGEST, seed, spec) for which, spec in enumerate(SPECS) for seed in range(4)}
SIZES = (4096, 64 << 10, 256 << 10)
PLACE = st.tuples(st.integers(0, len(SPECS) - 1), st.integers(0, 3))


class PoolMachine(RuleBasedStateMachine):
    """The pool may contain all blocks kept since it was last emptied; it must contain the pinned ones."""

    def __init__(self) -> None:
        super().__init__()
        self.below = (Below(), Below())
        self.pool = HbmPool("cpu", capacity_bytes=SIZES[-1], space_wait_s=0.05)
        self.near: list[NamespaceView | None] = [
            self.pool.attach(spec, below) for spec, below in zip(SPECS, self.below, strict=True)
        ]
        self.handles = [self.pool.blocks(spec) for spec in SPECS]
        self.may: set[BlockKey] = set()
        self.pins: list[tuple[Chain, PinnedBlocks, ExitStack]] = []

    def blocks(self, which: int) -> NamespaceView:
        return self.near[which] or self.handles[which]

    @rule(place=PLACE, start=st.integers(0, LONGEST - 1), count=st.integers(1, LONGEST), sums=st.booleans(), tensor=st.booleans())
    def insert(self, place: tuple[int, int], start: int, count: int, *, sums: bool, tensor: bool) -> None:
        keys, data = CHAINS[place]
        part = slice(start, start + count)
        parent = keys[start - 1] if start else None
        if tensor:
            kept = self.blocks(place[0]).insert_tensor(keys[part], parent, start, torch.from_numpy(data.array[part].copy()))
        else:
            piece = type(data)(data.array[part])
            kept = self.blocks(place[0]).insert(keys[part], parent, start, piece, in_time(), checksums=sums)
        assert kept <= len(keys[part])
        self.may.update(keys[part])

    @rule(place=PLACE, count=st.integers(1, LONGEST), verify=st.booleans(), tensor=st.booleans())
    def fetch(self, place: tuple[int, int], count: int, *, verify: bool, tensor: bool) -> None:
        keys, data = CHAINS[place]
        out = allocate(count, SPECS[place[0]])
        if tensor:
            found = self.blocks(place[0]).copy_to_tensor(keys[:count], torch.from_numpy(out.array))
        else:
            found = self.blocks(place[0]).fetch(keys[:count], out, in_time(), verify=verify)
        assert np.array_equal(out.array[:found], data.array[:found])
        assert set(keys[:found]) <= self.may
        if tensor or not verify:  # blocks without checksums are not compared
            pinned = {block.key for _, pin, _ in self.pins for block in pin.blocks}
            assert found >= next((at for at, key in enumerate(keys[:count]) if key not in pinned), count)

    @precondition(lambda self: len(self.pins) < 3)
    @rule(place=PLACE, count=st.integers(1, LONGEST))
    def pin(self, place: tuple[int, int], count: int) -> None:
        stack = ExitStack()
        found = stack.enter_context(self.blocks(place[0]).pinned(CHAINS[place][0][:count]))
        self.pins.append((CHAINS[place], found, stack))

    @precondition(lambda self: self.pins)
    @rule()
    def unpin(self) -> None:
        self.pins.pop(0)[2].close()

    @rule(demote=st.booleans())
    def evict(self, *, demote: bool) -> None:
        held = {block.key for block in self.pool.state.table.snapshot()}
        self.pool.evict(demote=demote)
        pinned = {block.key for _, pin, _ in self.pins for block in pin.blocks}
        assert {block.key for block in self.pool.state.table.snapshot()} <= pinned
        assert pinned <= held
        if demote:
            for which, below in enumerate(self.below):
                wanted = {key for (mine, _), (keys, _) in CHAINS.items() if mine == which for key in keys} & held - pinned
                assert self.near[which] is None or wanted <= set(below.held)
        self.may = pinned

    @rule(size=st.sampled_from(SIZES), demote=st.booleans())
    def resize(self, size: int, *, demote: bool) -> None:
        done = self.pool.resize(size, demote=demote, timeout_s=0.02 if self.pins else 20.0)
        in_use = any(len(pin) for _, pin, _ in self.pins)
        assert done != in_use
        if done:
            assert self.pool.usage().capacity_bytes == size
            self.may = set()

    @rule(which=st.integers(0, len(SPECS) - 1))
    def detach_or_attach(self, which: int) -> None:
        near = self.near[which]
        if near is None:
            if self.pool.usage().capacity_bytes >= SPECS[which].block_bytes:
                self.near[which] = self.pool.attach(SPECS[which], self.below[which])
        else:
            near.detach()
            self.near[which] = None

    @invariant()
    def what_is_pinned_has_its_bytes(self) -> None:
        for (_, data), found, _ in self.pins:
            size = data.shape.block_bytes
            for at, offset in enumerate(found.offsets.tolist()):
                assert self.pool.state.volume.memory[offset : offset + size].numpy().tobytes() == data.array[at].tobytes()

    @invariant()
    def what_went_down_has_its_bytes(self) -> None:
        contents = {key: data.array[at] for keys, data in CHAINS.values() for at, key in enumerate(keys)}
        for below in self.below:
            for key, content in below.held.items():
                assert content == contents[key].tobytes()

    @invariant()
    def the_table_is_sound(self) -> None:
        self.pool.state.table.validate()
        assert self.pool.stats()["hbm_lost"] == 0

    def teardown(self) -> None:
        for _, _, stack in self.pins:
            stack.close()
        self.pool.close()
        assert self.pool.usage().blocks == 0


class TestPool(PoolMachine.TestCase):  # type: ignore[name-defined,misc]
    settings = settings(max_examples=sample(15, of=40), stateful_step_count=30, phases=[Phase.generate])
