"""Capacity of a replay's store: chosen by the user, or enough for every block."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from kvstore.config.values import format_size, parse_size
from kvstore.core.errors import CapacityExceeded, InvalidArgument
from kvstore.core.types import BlockShape
from kvstore.process.memory.host_memory import memory_available
from kvstore.tiers.allocator import round_up
from kvstore.tiers.nvme.slot_header import slot_bytes

_SLACK = 1.15
"""Volumes are divided into spans of slots; up to a sixteenth may be lost at each end."""
_MIB = 1 << 20
_LEAST_BYTES = 64 << 20
_DRAM_SHARE = 4
"""The whole workload is kept in DRAM if it needs at most a quarter of the available memory."""
_STAGING_SHARE = 8
_DISK_SHARE = 2


@dataclass(frozen=True, slots=True)
class StoreCapacity:
    """Bytes of each tier."""

    dram_bytes: int
    nvme_bytes: int = 0
    limited: bool = False
    """Chosen by the user; the whole workload may not fit."""

    def blocks(self, shape: BlockShape) -> int:
        """Maximum number of blocks in both tiers together, each block in one of them."""
        return self.dram_bytes // dram_slot_bytes(shape) + self.nvme_bytes // slot_bytes(shape)

    def check(self, shape: BlockShape) -> None:
        """Reject a capacity below one block of ``shape``.

        Raises:
            InvalidArgument: names the value and the minimum.
        """
        for tier, given, least in (
            ("dram", self.dram_bytes, dram_slot_bytes(shape)),
            ("nvme", self.nvme_bytes or None, slot_bytes(shape)),
        ):
            if given is not None and given < least:
                raise InvalidArgument(
                    f"{tier}={format_size(given)} does not hold one block of {format_size(shape.block_bytes)}: "
                    f"the minimum is {tier}={format_size(least)}"
                )

    def __str__(self) -> str:
        parts = [f"dram={format_size(self.dram_bytes)}"]
        if self.nvme_bytes:
            parts.append(f"nvme={format_size(self.nvme_bytes)}")
        return ",".join(parts)


def dram_slot_bytes(shape: BlockShape) -> int:
    """Bytes of one block in the arena."""
    return round_up(shape.block_bytes)


def parse_capacity(text: str) -> StoreCapacity:
    """Parse ``dram=1GiB,nvme=20GiB``.

    Raises:
        InvalidArgument: an unknown tier, a tier twice, no DRAM, or an invalid size.
    """
    sizes: dict[str, int] = {}
    for part in text.split(","):
        tier, equals, size = part.strip().partition("=")
        tier = tier.strip().lower()
        if tier not in {"dram", "nvme"} or not equals or tier in sizes:
            raise InvalidArgument("a capacity must look like dram=1GiB,nvme=20GiB", got=text)
        try:
            sizes[tier] = parse_size(size)
        except ValueError as error:
            raise InvalidArgument(str(error), got=text) from error
    if not sizes.get("dram"):
        raise InvalidArgument("every node needs some DRAM: blocks pass through it", got=text)
    return StoreCapacity(sizes["dram"], sizes.get("nvme", 0), limited=True)


def space_for(blocks: int, shape: BlockShape, folder: Path) -> StoreCapacity:
    """Choose the capacity for ``blocks`` blocks: DRAM if this machine has enough, else the disk of ``folder``.

    Raises:
        CapacityExceeded: they fit in neither.
    """
    memory = memory_available() or 0
    dram = _with_slack(blocks * dram_slot_bytes(shape))
    if dram <= memory // _DRAM_SHARE:
        return StoreCapacity(dram)
    nvme = _with_slack(blocks * slot_bytes(shape))
    free = _free_disk_bytes(folder)
    if nvme <= free // _DISK_SHARE:
        return StoreCapacity(max(_LEAST_BYTES, memory // _STAGING_SHARE), nvme)
    raise CapacityExceeded(
        f"{blocks:,} blocks of {format_size(shape.block_bytes)} fit neither in a quarter of the memory nor in half of the disk: "
        "lower --block-bytes, set --limit or set --capacity",
        needed_bytes=dram,
        available_memory_bytes=memory,
        free_disk_bytes=free,
        folder=folder,
    )


def _free_disk_bytes(folder: Path) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    fill = os.statvfs(folder)
    return fill.f_bavail * fill.f_frsize


def _with_slack(size: int) -> int:
    whole = max(_LEAST_BYTES, int(size * _SLACK) + (16 << 20))
    return -(-whole // _MIB) * _MIB
