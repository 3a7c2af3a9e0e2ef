"""A landing ring that kvikio fills, with a stub CUDA driver: ``test_device_landing.py`` runs it in a separate process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

os.environ["TRITON_INTERPRET"] = "1"

from landing_bed import BLOCKS, Engine, Volume, hash_quickly

from kvstore.tiers.io_engines.tensor_memory import TensorMemory


def test_landing_by_kvikio_is_verified_on_device_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hash_quickly(monkeypatch)

    def fetched(*_: object) -> Any:
        raise AssertionError("bytes went back to the host")

    monkeypatch.setattr(TensorMemory, "fetch", fetched)
    volume = Volume(tmp_path)
    engine = Engine(volume, 1)
    engine.wait_ready()
    volume.flip(7, 4096 + 500)
    assert engine.fetch(range(BLOCKS)) == 7
    assert engine.count("device_gds_corrupt_blocks_total") == 1
    volume.flip(7, 4096 + 500)
    assert engine.fetch(range(BLOCKS)) == BLOCKS
    assert engine.count("gds_device_reads_total") == 8 + BLOCKS
    assert engine.count("device_reads_bounced_total") == 0
    assert any("forced: by kvikio" in line for line in engine.ring.reader.describe())
    engine.close()
    volume.slab.close()
