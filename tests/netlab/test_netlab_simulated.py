"""The simulator's picture of a bed of timed engines: hosts, agents and steps are the lab's, times of the right size."""

from __future__ import annotations

import dataclasses

import pytest

from kvstore.dualpath.groups import EngineKind
from kvstore.netlab.bed import LabBed
from kvstore.simulate.result import SimResult
from netlab.agents import Trajectory, Turn, trajectories
from netlab.coordinator import LADDER, ORACLE, Variant
from netlab.engine_bed import EngineSettings
from netlab.simulated import sim_config, simulated

SETTINGS = EngineSettings(dilation=1.5)


def bed(prefill: int, decode: int) -> LabBed:
    """As the lab's, of that shape."""
    return LabBed(prefill, decode, 1, snic_mbit=120.0, cnic_mbit=960.0, storage_mbit=1920.0)


def test_hosts_links_and_turns_are_those_of_the_lab() -> None:
    made = [Trajectory(1000, (Turn(30, 50), Turn(200, 10)))]
    grouped = dataclasses.replace(LADDER[-1], layer_group=8)
    config = sim_config(bed(1, 2), SETTINGS, made, grouped)
    assert [(host.name, host.role) for host in config.hosts] == [
        ("prefill-0", EngineKind.PREFILL),
        ("decode-0", EngineKind.DECODE),
        ("decode-1", EngineKind.DECODE),
    ]
    assert {(host.snic, host.cnic) for host in config.hosts} == {(15e6, 120e6)}
    assert config.full_block_bytes == SETTINGS.spec(bed(1, 2)).block_bytes
    assert config.layer_groups == 4
    first, second = config.sessions[0].turns
    assert (first.hit, first.hit + first.new, first.out) == (896, 1030, 50)
    assert (second.hit, second.hit + second.new, second.out) == (1024, 1280, 10)  # of 1,079 known tokens, whole blocks


@pytest.mark.parametrize(("prefill", "decode"), [(1, 1), (1, 2), (2, 2)])
def test_times_are_bound_by_links_and_by_the_oracle(prefill: int, decode: int) -> None:
    made = trajectories("agentic-64k", 4 * prefill, 1, seed=1, out_factor=0.1)
    shape = bed(prefill, decode)
    prefill_only, split = (simulated(shape, SETTINGS, made, Variant(name, name)) for name in ("prefill_only", "split"))
    oracle = simulated(shape, SETTINGS, made, ORACLE)
    assert prefill_only.read_bytes == split.read_bytes > 0 == oracle.read_bytes
    assert prefill_only.seconds > prefill_only.read_bytes / (15e6 * prefill)
    assert oracle.seconds < split.seconds < prefill_only.seconds
    assert split.seconds > split.read_bytes / (15e6 * (prefill + decode))


def test_split_gains_only_while_links_are_idle() -> None:
    """Why the lab's ablation shows no gain of split over taking turns: its links are full."""
    shape = LabBed(1, 1, 1, snic_mbit=240.0, cnic_mbit=1920.0, storage_mbit=1920.0)

    def both(agents: int) -> tuple[SimResult, SimResult]:
        made = trajectories("agentic-64k", agents, 2, seed=1)
        turns, split = (simulated(shape, EngineSettings(), made, variant) for variant in (LADDER[2], LADDER[-1]))
        return turns, split

    (alone, alone_split), (many, many_split) = both(1), both(16)
    assert alone.load.mean > 1.9 * alone_split.load.mean
    assert alone.snic_use < 0.5 < 0.75 < many.snic_use
    assert many.load.mean < 1.1 * many_split.load.mean
