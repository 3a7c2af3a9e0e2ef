"""Questions to all primaries at once: their common abilities, and the size of the index."""

from __future__ import annotations

import functools
import re
from typing import Final

from kvstore.core.errors import Unsupported
from kvstore.index.contract import IndexStats
from kvstore.index.valkey import keys as names
from kvstore.index.valkey.cluster import ValkeyClient
from kvstore.index.valkey.connection import pack
from kvstore.index.valkey.records import Abilities, abilities_of, too_old

_ANSWER_S: Final = 1.0
_USED_MEMORY: Final = re.compile(rb"^used_memory:(\d+)", re.MULTILINE)
_SMALL_NAMES: Final = (*names.ALL_SMALL, *names.LEASES.values(), names.SETTINGS, names.FEED)


async def read_abilities(client: ValkeyClient) -> Abilities:
    """Abilities that all primaries that answer have.

    Raises:
        Unsupported: the version of a primary is too old.
    """
    answers = await client.on_each(pack("INFO", "server"), budget_s=_ANSWER_S)
    replies = {address: answer.decode(errors="replace") for address, answer in answers.items() if isinstance(answer, bytes)}
    for address, reply in replies.items():
        if old := too_old(reply):
            raise Unsupported(f"the server is {old}", address=address)
    return functools.reduce(Abilities.both, map(abilities_of, replies.values())) if replies else Abilities()


async def read_stats(client: ValkeyClient, *, dead: int, markers: int) -> IndexStats:
    """Size of the index, on the shards that answer.

    Args:
        client: the cluster.
        dead: number of closed volume epochs that may still have records.
        markers: number of keys that mark ranges.
    """
    sizes = await client.on_each(pack("DBSIZE"), budget_s=_ANSWER_S)
    memory = await client.on_each(pack("INFO", "memory"), budget_s=_ANSWER_S)
    others = [(names.SMALL_SLOT, pack("EXISTS", *_SMALL_NAMES))]
    others += [(slot, pack("EXISTS", name)) for slot, name in zip(names.STREAM_SLOTS, names.STREAMS, strict=True)]
    found = await client.run(others, budget_s=_ANSWER_S)
    used = [_USED_MEMORY.search(one) for one in memory.values() if isinstance(one, bytes)]
    keys = sum(size for size in sizes.values() if isinstance(size, int))
    return IndexStats(
        max(0, keys - sum(count for count in found if isinstance(count, int)) - markers),
        sum(int(match[1]) for match in used if match is not None),
        dead,
    )
