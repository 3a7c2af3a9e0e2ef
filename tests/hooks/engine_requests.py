"""Requests and a block pool as vLLM's scheduler has them, for tests of the connector without vLLM."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvclient import CacheSpec

BLOCK = 4
SPEC = CacheSpec(model="m", block_tokens=BLOCK, layers=2, layer_block_bytes=64)


@dataclass
class Request:
    request_id: str
    all_token_ids: list[int]
    num_computed_tokens: int = 0
    num_preemptions: int = 0
    mm_features: Sequence[Any] = ()
    lora_request: Any = None
    cache_salt: str | None = None
    prompt_embeds: Any = None
    block_hashes: list[bytes] = field(default_factory=list)
    num_prompt_tokens: int = 0
    skip_reading_prefix_cache: bool = False
    resumable: bool = False

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)


@dataclass
class Block:
    block_id: int
    users: int = 0

    @property
    def ref_cnt(self) -> int:
        return self.users


class Pool:
    """Blocks with reference counts, like the engine's pool."""

    def __init__(self, count: int) -> None:
        self.blocks = [Block(at) for at in range(count)]
        self.evicted: set[int] = set()

    def evict_blocks(self, block_ids: set[int]) -> None:
        self.evicted |= block_ids

    def touch(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            block.users += 1

    def free_blocks(self, ordered_blocks: Iterable[Block]) -> None:
        for block in ordered_blocks:
            assert block.users > 0
            block.users -= 1

    @property
    def pinned(self) -> set[int]:
        return {block.block_id for block in self.blocks if block.users}


def request(tokens: int, name: str = "r") -> Request:
    return Request(name, random.Random(name).choices(range(1000), k=tokens))
