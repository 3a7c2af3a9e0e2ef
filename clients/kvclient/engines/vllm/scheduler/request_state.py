"""What the scheduler's half knows of one request, and of the pages that one store reads."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from kvclient.engines.vllm.identity.adapters import AdapterWeights
from kvclient.engines.vllm.identity.keys import RequestKeys, VllmRequest
from kvclient.engines.vllm.scheduler.prefix_lookup import NOTHING, PrefixMatch


@dataclass(slots=True)
class RequestState:
    """State of one request, from its arrival to its end."""

    request: VllmRequest
    keys: RequestKeys
    adapter: AdapterWeights | None = None
    lookup: Future[PrefixMatch] | None = None
    found: PrefixMatch = NOTHING
    verdict: tuple[int, int] | None = None
    """Tokens that the engine had, and tokens to load; None: not decided yet."""
    preemptions: int = 0
    features: int = 0
    """Number of its images and other media in ``keys``."""
    first_offered: int = 0
    """Position of the first block that a load would fill."""
    loading: dict[int, list[int]] = field(default_factory=dict)
    """By part: pages that a load fills, until its outcome is known."""
    load_failed: bool = False
    stored_blocks: int = 0
    """Leading blocks that the store holds, or will hold when pending stores succeed."""
    store_failures: int = 0
    failed_up_to: int = 0
    """Number of the last job that was planned when a store of this request failed."""
    store_ended: bool = False
    """The chain has a gap, so that later blocks would not be found."""
    watched_blocks: int = 0
    """Leading blocks that ``CacheWatch`` knows."""
    idle_from: int = 0
    """A step that begins with fewer computed tokens follows a preemption, so its blocks are reported again."""
    idle_until: int = 0
    """A step that ends with fewer computed tokens fills no block: there is nothing to store and nothing to report."""


@dataclass(slots=True)
class Pins:
    """Pages that a store reads, and how many workers have not answered yet."""

    request: VllmRequest
    first: int
    stop: int
    blocks: list[Any]
    workers: int
    observed: object = None
    """From ``StoreObserver.planned``."""
