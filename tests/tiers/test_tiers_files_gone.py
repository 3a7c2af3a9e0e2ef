"""A slab whose files are removed, moved or hidden while it is open: its blocks are not durable any more, but can be read."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvstore.core.errors import Unavailable
from kvstore.core.types import BlockShape, VolumeId
from kvstore.observe.counters import Counters
from kvstore.testing.volume_suite import assert_reads_back, items_for
from kvstore.tiers.nvme.slab import NvmeSlab

SHAPE = BlockShape(3, 20_000)


def remove(folder: Path) -> None:
    shutil.rmtree(folder)


def remove_slab(folder: Path) -> None:
    (folder / "slab.kv").unlink()


def remove_catalog(folder: Path) -> None:
    shutil.rmtree(folder / "catalog")


def replace_by_copy(folder: Path) -> None:
    shutil.copy(folder / "slab.kv", folder / "copy")
    (folder / "copy").rename(folder / "slab.kv")


def mount_over(folder: Path) -> None:
    mounted = subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(folder)], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip("mounting takes root: a volume that is mounted over was NOT tested")


@pytest.fixture
def counters() -> Counters:
    return Counters()


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "volume"
    subprocess.run(["umount", "-l", str(tmp_path / "volume")], capture_output=True, check=False)


@pytest.fixture
def slab(folder: Path, counters: Counters) -> Iterator[NvmeSlab]:
    slab = NvmeSlab.open(folder, volume_id=VolumeId("v"), capacity_bytes=8 << 20, counters=counters)
    assert list(slab.recover()) == []
    yield slab
    slab.close()


@pytest.mark.parametrize("harm", [remove, remove_slab, remove_catalog, replace_by_copy, mount_over])
@pytest.mark.parametrize("asked", [False, True])
def test_commit_into_missing_files_is_rejected(
    slab: NvmeSlab, folder: Path, counters: Counters, harm: Callable[[Path], None], *, asked: bool
) -> None:
    before = items_for(slab.allocate(SHAPE, 5) or [], range(5), SHAPE)
    after = items_for(slab.allocate(SHAPE, 5) or [], range(5, 10), SHAPE)
    assert slab.write(before) == [None] * 5
    slab.commit([(slot, record) for slot, record, _ in before], [])
    assert slab.check_files()
    assert slab.write(after) == [None] * 5
    harm(folder)
    if asked:
        assert not slab.check_files()
    with pytest.raises(Unavailable, match="no longer in"):
        slab.commit([(slot, record) for slot, record, _ in after], [])
    assert not slab.files_present
    assert "no longer in" in (slab.read_only or "")
    assert slab.allocate(SHAPE, 1) is None
    assert not slab.resume()
    assert counters.get("nvme_files_gone_total") == 1
    assert_reads_back(slab, before)


def test_folder_moved_back_is_writable_again(slab: NvmeSlab, folder: Path, tmp_path: Path) -> None:
    items = items_for(slab.allocate(SHAPE, 5) or [], range(5), SHAPE)
    assert slab.write(items) == [None] * 5
    folder.rename(tmp_path / "elsewhere")
    assert not slab.check_files()
    assert not slab.resume()
    (tmp_path / "elsewhere").rename(folder)
    assert slab.resume()
    assert slab.files_present
    assert slab.read_only is None
    slab.commit([(slot, record) for slot, record, _ in items], [])
    slab.close()
    again = NvmeSlab.open(folder, volume_id=VolumeId("v"), capacity_bytes=8 << 20)
    assert len(list(again.recover())) == 5
    again.close()
