"""Model-based tests of the index in Valkey (``kvstore.testing.index.state_machine``), on one cluster of three shards."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import settings

from kvstore.embedded.valkey import ValkeyServers
from kvstore.index.contract import PrefixIndex
from kvstore.index.valkey.address import ValkeyAddress
from kvstore.index.valkey.index import ValkeyIndex
from kvstore.testing.index.state_machine import ClosedIndexMachine, TornIndexMachine
from samples import sample


class SharedCluster:
    """The cluster of all examples: emptied for each new place."""

    cluster: ClassVar[ValkeyServers]
    in_use: ClassVar[Path | None] = None

    @classmethod
    def open(cls, place: Path) -> PrefixIndex:
        if cls.in_use != place:
            for server in cls.cluster.servers:
                server.call("FLUSHALL")
            cls.in_use = place
        return ValkeyIndex.open(ValkeyAddress(cls.cluster.seeds), lookup_budget_s=5.0)


@pytest.fixture(scope="module", autouse=True)
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with ValkeyServers(tmp_path_factory.mktemp("valkey"), shards=3) as SharedCluster.cluster:
        yield


class ValkeyClosedMachine(ClosedIndexMachine):
    def open_index(self, place: Path) -> PrefixIndex:
        return SharedCluster.open(place)


class ValkeyTornMachine(TornIndexMachine):
    def open_index(self, place: Path) -> PrefixIndex:
        return SharedCluster.open(place)


FEW = settings(max_examples=sample(6, of=60), stateful_step_count=20, deadline=None)
"""Fewer examples than in process: each step takes a dozen round trips."""

TestValkeyAgainstModel = ValkeyClosedMachine.TestCase
TestValkeyAgainstModel.settings = FEW
TestValkeyWithHolesAgainstModel = ValkeyTornMachine.TestCase
TestValkeyWithHolesAgainstModel.settings = FEW
