"""Memory that a store takes beside the blocks themselves: the measured constants, and the sums made of them. Pure."""

from __future__ import annotations

from typing import Final

NODE_BYTES_PER_BLOCK: Final = 1_200
"""Resident memory of a node for each block that it holds, in DRAM or on a volume: entry, key, order of eviction, replica log."""
NODE_BASE_BYTES: Final = 1 << 30
"""A node that holds no block: Python and its libraries, connections, staging of reads and writes."""
METADATA_BYTES_PER_BLOCK: Final = 83
"""Room in the metadata server's index (LMDB, on disk and in the page cache) for each block."""
USUAL_BLOCK_BYTES: Final = 1 << 20
"""The block size that is reckoned with where nobody says: small, so that the memory suffices for larger ones."""


def most_blocks(dram_bytes: int, nvme_bytes: int, block_bytes: int = USUAL_BLOCK_BYTES) -> int:
    """Blocks that a node holds when it is full.

    Args:
        dram_bytes: its arena.
        nvme_bytes: all its volumes together.
        block_bytes: size of one block.
    """
    return (dram_bytes + nvme_bytes) // max(1, block_bytes)


def index_memory(dram_bytes: int, nvme_bytes: int, block_bytes: int = USUAL_BLOCK_BYTES) -> int:
    """Bytes of memory that a full node needs beside its arena. Arguments as of ``most_blocks``."""
    return NODE_BASE_BYTES + NODE_BYTES_PER_BLOCK * most_blocks(dram_bytes, nvme_bytes, block_bytes)
