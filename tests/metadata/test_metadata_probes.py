"""Probes of silent nodes: whatever address a node registered, a probe ends with a result."""

from __future__ import annotations

import asyncio

import pytest

from kvstore.core.clock import ManualClock
from kvstore.health.node_reachability import Reachability
from kvstore.metadata.cluster import node_probes
from kvstore.metadata.cluster.node_probes import INTERVAL_S, NodeProbes, probe

IMPOSSIBLE = ["127.0.0.1:99999", "a..b:80", f"{'x' * 70}:80", "h:\N{SUPERSCRIPT TWO}", "https://h", "", ":", "unix:/s"]


@pytest.mark.parametrize("address", IMPOSSIBLE)
def test_probe_of_an_impossible_address_has_a_result(address: str) -> None:
    assert asyncio.run(probe(address, tls=False)) is Reachability.NOT_PROBED


def test_probe_of_the_longest_silent_node_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_probes, "_AT_ONCE", 2)
    asked: list[str] = []

    async def note(address: str, *, tls: bool) -> Reachability:
        asked.append(address)
        return Reachability.REFUSED

    async def run() -> None:
        clock = ManualClock()
        probes = NodeProbes(clock, tls=False)
        silent = {str(number): str(number) for number in range(6)}
        for _ in range(3):
            await probes.refresh(silent)
            clock.advance(INTERVAL_S)

    monkeypatch.setattr(node_probes, "probe", note)
    asyncio.run(run())
    assert sorted(asked) == [str(number) for number in range(6)]
