"""KV events: announce to vLLM's subscribers which blocks of this engine the store holds.

Each event has vLLM's block hashes and the medium ``KVSTORE``; there is one per run of blocks and group. Evictions are not
announced, because the store is shared: subscribe to the events of the store for them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from vllm.distributed.kv_events import BlockStored
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from kvclient.engines.vllm.scheduler.scheduler_connector import StoredBlocks

MEDIUM = "KVSTORE"


def stored_events(stored: Iterable[StoredBlocks], block_tokens: int, groups: int) -> Sequence[Any]:
    """Return the events of stored blocks for vLLM's publisher."""
    events: list[Any] = []
    for blocks in stored:
        request = blocks.request
        hashes = request.block_hashes[blocks.first : blocks.stop]
        stop = blocks.first + len(hashes)
        if not hashes:
            continue
        parent = request.block_hashes[blocks.first - 1] if blocks.first else None
        lora = request.lora_request
        events += [
            BlockStored(
                block_hashes=[maybe_convert_block_hash(one) for one in hashes],
                parent_block_hash=maybe_convert_block_hash(parent) if parent is not None else None,
                token_ids=list(request.all_token_ids[blocks.first * block_tokens : stop * block_tokens]),
                block_size=block_tokens,
                lora_id=lora.adapter_id if lora is not None else None,
                medium=MEDIUM,
                lora_name=lora.lora_name if lora is not None else None,
                group_idx=group,
                locality="REMOTE",
            )
            for group in range(groups)
        ]
    return events
