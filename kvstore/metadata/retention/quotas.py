"""How a tenant's quota, which holds for the whole cluster, is shared out over nodes. Pure.

Every node is told a *share* with each heartbeat, and keeps to it (``kvstore.node.eviction.quotas``). Shares of the living nodes
are made of what each holds now: a node is given what it holds and some room to grow, and what is then left of the quota is spread
by capacity; where that is more than the quota, nodes that hold little for their capacity keep what they have, and the others
are cut to one level (max-min fairness, weighed by capacity). So

* shares computed together are never more than the quota; what nodes hold together exceeds it for some heartbeats at most, while
  one grows into what another is giving up, and where what is in use cannot leave;
* a tenant whose engines are all on one host has at least seven eighths of its quota there, however many nodes there are;
* a node that begins to hold something of the tenant gets its fair part within some heartbeats, whoever has the rest.

A node that drains has no share, and nothing of it leaves for the quota: the others share all of it, and what comes to them
from there is taken only as far as it fits (``kvstore.node.control.pull``). While it lasts nodes get no room to grow at each
other's expense, or what just came would leave again.

A silent node has no share: what it holds is served by nobody. Where it is read through a mount all the same, it is not counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

HEADROOM: Final = 8
"""Of a node's part of the quota by capacity, one n-th is kept for it to grow into, whoever holds the rest."""


def shares(quota: int, held: Sequence[int], capacities: Sequence[int], *, grows: bool = True) -> list[int]:
    """What each node may hold.

    Args:
        quota: bytes, of all nodes together.
        held: bytes that each holds now.
        capacities: bytes of each node's volumes of the tier; 0: it has none.
        grows: whether nodes get room to grow at the expense of others. If not, nobody has less than it holds while all of them
            together hold no more than the quota.

    Returns:
        Bytes for each; together no more than the quota.
    """
    total = sum(capacities)
    if not total:
        return [0] * len(held)
    spare = quota // HEADROOM if grows else 0
    wanted = [has + spare * room // total if room else 0 for has, room in zip(held, capacities, strict=True)]
    given = [0] * len(held)
    left, room_left = quota, total
    over = sum(wanted) > quota
    for node in sorted(range(len(held)), key=lambda node: wanted[node] / capacities[node] if capacities[node] else 0.0):
        room = capacities[node]
        if not room:
            continue
        fair = left * room // room_left
        given[node] = min(wanted[node], fair) if over else wanted[node]
        left -= given[node]
        room_left -= room
    if over:
        return given
    return [has + left * room // total for has, room in zip(given, capacities, strict=True)]
