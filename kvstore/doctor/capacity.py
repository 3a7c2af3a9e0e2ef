"""Findings on capacity: volumes that share a disk, memory of the index, NUMA of large arenas. Pure functions."""

from __future__ import annotations

import shlex
from collections import defaultdict
from collections.abc import Iterator

from kvstore.doctor.contract import Finding, Level, setting_size
from kvstore.doctor.facts import ProbeResults, Requirements, Section, WantedVolume
from kvstore.health.quantities import show_size
from kvstore.process.memory.memory_sizing import NODE_BASE_BYTES, NODE_BYTES_PER_BLOCK, block_table_memory, most_blocks

LARGE_ARENA = 32 << 30
"""Above this size, huge pages and NUMA placement matter."""
SMALL_SHARE = 20
"""An arena below this fraction (1/n) of the memory of a large host is reported."""


def capacity_findings(facts: ProbeResults, wanted: Requirements) -> Iterator[Finding]:
    """Report combinations that do not fit on the host, even if each part does."""
    yield from _shared_disks(facts, wanted)
    yield from _disks(facts, wanted)
    yield from _full_node(facts["memory"], wanted)
    yield from _arena(facts["memory"], wanted)


def _shared_disks(facts: ProbeResults, wanted: Requirements) -> Iterator[Finding]:
    by_filesystem: dict[int, list[tuple[WantedVolume, Section]]] = defaultdict(list)
    by_disk: dict[str, list[str]] = defaultdict(list)
    for volume, folder in zip(wanted.volumes, facts.all("volume"), strict=False):
        device, disk = folder.number("device"), folder.text("disk")
        if folder.error or device is None:
            continue
        by_filesystem[device].append((volume, folder))
        by_disk[disk or f"file system {device}"].append(str(volume.path))
    for together in by_filesystem.values():
        if len(together) < 2:
            continue
        first = together[0][1]
        free = first.number("free_bytes")
        needed = sum(max(0, volume.capacity_bytes - (folder.number("slab_bytes") or 0)) for volume, folder in together)
        where = first.text("mount") or first.text("nearest") or "?"
        if free is not None and needed > free:
            message = (
                f"{len(together)} volumes share the file system at {where}: together they need {show_size(needed)} more, and"
                f" {show_size(free)} is free"
            )
            yield Finding(
                "storage", Level.MISSING, message, f"df -h {shlex.quote(where)}   # free space, or give them less in node.nvme"
            )
    for disk, paths in by_disk.items():
        if len(paths) > 1:
            message = f"{len(paths)} volumes share one disk ({disk}) and its bandwidth: {', '.join(paths)}"
            yield Finding("storage", Level.WARNING, message)


def _disks(facts: ProbeResults, wanted: Requirements) -> Iterator[Finding]:
    """List the NVMe disks of the host if no volume is configured."""
    if wanted.volumes or facts["disks"].error:
        return
    for disk in facts["disks"].sections("nvme"):
        mounts = disk.texts("mounts")
        where = f"mounted at {', '.join(mounts)}" if mounts else "not mounted"
        message = (
            f"NVMe disk {disk.text('name')}, {show_size(disk.number('bytes') or 0)}, {where}: not used by this configuration"
        )
        yield Finding("storage", Level.INFO, message)


def _full_node(memory: Section, wanted: Requirements) -> Iterator[Finding]:
    total = memory.number("total_bytes")
    if memory.error or total is None:
        return
    nvme = sum(volume.capacity_bytes for volume in wanted.volumes)
    blocks = most_blocks(wanted.dram_bytes, nvme, wanted.block_bytes)
    table = block_table_memory(wanted.dram_bytes, nvme, wanted.block_bytes)
    by_block = f"{NODE_BYTES_PER_BLOCK:,} bytes for each of {blocks:,} blocks of {show_size(wanted.block_bytes)}"
    reckoned = f"{show_size(NODE_BASE_BYTES)} plus {by_block}"
    if wanted.dram_bytes <= total < wanted.dram_bytes + table:
        message = (
            f"arena and block table of a full node take {show_size(wanted.dram_bytes + table)} of {show_size(total)}: the"
            f" kernel may kill the node (block table: {show_size(table)}, {reckoned})"
        )
        most = total - table
        fix = f"--set node.dram={setting_size(most)}" if most > 1 << 20 else None
        yield Finding("memory", Level.WARNING, message, fix)
    else:
        yield Finding("memory", Level.OK, f"a full node takes {show_size(table)} beside its arena ({reckoned})")


def _arena(memory: Section, wanted: Requirements) -> Iterator[Finding]:
    total, nodes = memory.number("total_bytes"), memory.number("numa_nodes")
    if memory.error or total is None:
        return
    if total >= LARGE_ARENA and wanted.dram_bytes < total // SMALL_SHARE:
        message = f"the arena takes {100 * wanted.dram_bytes / total:.1f} % of {show_size(total)}"
        yield Finding("memory", Level.INFO, message, "--set node.dram=80%   # if nothing else on the host needs the memory")
    if nodes is not None and nodes > 1 and wanted.dram_bytes >= LARGE_ARENA:
        message = f"{nodes} NUMA nodes: the pages of the arena may all come from one of them"
        yield Finding("memory", Level.INFO, message, "numactl --interleave=all kvstore node")
