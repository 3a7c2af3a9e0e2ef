"""Memory of a store in addition to its blocks, estimated from measured constants."""

from __future__ import annotations

from typing import Final

NODE_BYTES_PER_BLOCK: Final = 1_000
"""Memory of a full node per block, in DRAM or on a volume: 500 bytes measured, and the keys of evicted blocks, an estimate."""
NODE_BASE_BYTES: Final = 1 << 30
"""Resident memory of an empty node: Python and its libraries, connections, staging of reads and writes."""
USUAL_BLOCK_BYTES: Final = 1 << 20
"""Block size to assume. It is small, so that the memory suffices for larger blocks."""


def most_blocks(dram_bytes: int, nvme_bytes: int, block_bytes: int = USUAL_BLOCK_BYTES) -> int:
    """Number of blocks of a full node.

    Args:
        dram_bytes: its arena.
        nvme_bytes: all its volumes together.
        block_bytes: size of one block.
    """
    return (dram_bytes + nvme_bytes) // max(1, block_bytes)


def block_table_memory(dram_bytes: int, nvme_bytes: int, block_bytes: int = USUAL_BLOCK_BYTES) -> int:
    """Bytes of memory of a full node in addition to its arena. Arguments as of ``most_blocks``."""
    return NODE_BASE_BYTES + NODE_BYTES_PER_BLOCK * most_blocks(dram_bytes, nvme_bytes, block_bytes)
