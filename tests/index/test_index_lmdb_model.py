"""Model-based tests of the LMDB index (``kvstore.testing.index.state_machine``)."""

from __future__ import annotations

from pathlib import Path

from hypothesis import settings

from kvstore.index.contract import PrefixIndex
from kvstore.index.lmdb import LmdbIndex
from kvstore.testing.index.state_machine import ClosedIndexMachine, TornIndexMachine
from samples import sample


class LmdbClosedMachine(ClosedIndexMachine):
    def open_index(self, place: Path) -> PrefixIndex:
        return LmdbIndex.open(place, map_bytes=1 << 20)


class LmdbTornMachine(TornIndexMachine):
    def open_index(self, place: Path) -> PrefixIndex:
        return LmdbIndex.open(place, map_bytes=1 << 20)


TestLmdbAgainstModel = LmdbClosedMachine.TestCase
TestLmdbAgainstModel.settings = settings(max_examples=sample(20, of=60), stateful_step_count=30)
TestLmdbWithHolesAgainstModel = LmdbTornMachine.TestCase
TestLmdbWithHolesAgainstModel.settings = settings(max_examples=sample(20, of=60), stateful_step_count=30)
