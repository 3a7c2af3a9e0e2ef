"""Types of a workload, recorded or generated."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

BlockIds = npt.NDArray[np.int64]
"""Ids of a request's blocks, from the head of its chain: equal leading ids = equal prefix."""

NO_BLOCKS: BlockIds = np.empty(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class TraceInfo:
    """Properties of all requests of a workload."""

    name: str
    block_tokens: int
    format: str
    """``mooncake``, ``rle`` or ``generated``."""


@dataclass(frozen=True, slots=True, eq=False)
class TraceRequest:
    """One request: a prompt to look up, load and store."""

    session: str
    """Requests of one session follow one another; most of a prompt repeats the previous one."""
    turn: int
    timestamp_ms: int
    input_tokens: int
    output_tokens: int
    block_ids: BlockIds
    """Blocks of the prompt."""
    answer_ids: BlockIds = field(default_factory=lambda: NO_BLOCKS)
    """Blocks that decoding the answer fills, after ``block_ids``. Recorded traces do not contain them."""
