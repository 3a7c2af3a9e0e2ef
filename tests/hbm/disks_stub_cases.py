"""A pool that reads disks by kvikio, with a stub CUDA driver: ``test_hbm_disks.py`` runs it in a separate process.

The driver has a device whose memory is this process's; kvikio is in compatibility mode, as on many hosts with a GPU.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from disk_bed import VOLUME, disk_of, gpu_target
from hbm_chains import allocate

from kvclient.gds.volume_reader import GdsReader
from kvclient.memory.engine_pool import StoredVolume
from kvstore.observe.counters import Counters
from kvstore.tiers.io_engines.probe_process import PROBE_BYTES
from kvstore.tiers.io_engines.tensor_memory import TensorMemory
from support.wait import wait_until


def test_gds_forced_mode_uses_kvikio(tmp_path: Path) -> None:
    with disk_of(tmp_path) as disk:
        disk.damage(7, 4096 + 5000)
        assert disk.fetch(out := allocate(12)) == 7
        assert np.array_equal(out.array[:7], disk.data.array[:7])
        assert disk.pool.stats()["gds_device_reads_total"] == 12
        assert "device_reads_bounced_total" not in disk.pool.stats()
        assert any("forced: by kvikio" in line for line in disk.pool.io_engines())


def test_gds_threads_suffice_for_several_volumes(tmp_path: Path) -> None:
    """Each volume of each reader has at most 8 reads in flight; if all of one hang, the others find a thread."""
    import kvikio.defaults

    with disk_of(tmp_path):
        assert kvikio.defaults.get("num_threads") >= 8 * 8


def test_gds_driver_failure_reads_through_host_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(_: TensorMemory) -> Any:
        raise RuntimeError("no device memory")

    with disk_of(tmp_path) as disk:
        monkeypatch.setattr(TensorMemory, "__cuda_array_interface__", property(refuses))
        assert disk.fetch(out := allocate(12)) == 12
        assert np.array_equal(out.array, disk.data.array)
        stats = disk.pool.stats()
        assert stats["device_reads_bounced_total"] == 12
        assert stats["gds_given_up_total"] == 1


def test_gds_compatibility_mode_leaves_reads_to_node(tmp_path: Path) -> None:
    """As a pool on a CUDA device decides."""
    (tmp_path / "slab.kv").write_bytes(bytes(PROBE_BYTES))
    counters = Counters()
    volumes = [StoredVolume(VOLUME, tmp_path)]
    disks = GdsReader(gpu_target(counters), "auto", 4)
    disks.prepare(volumes)
    wait_until(lambda: "through host memory" in disks.describe()[0], timeout_s=60.0)
    assert not disks.ready(volumes)
    assert counters.snapshot() == {"gds_pretended_total": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["slab.kv"]  # nothing was written beside it
