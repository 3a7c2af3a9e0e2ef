"""Which shard serves which hash slot. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvstore.index.valkey.keys import RANGE_SLOTS, SLOTS, TAGS

NO_SHARD: Final = -1


@dataclass(frozen=True, slots=True)
class ShardNodes:
    """The servers of one shard, as ``host:port``."""

    primary: str
    replicas: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Topology:
    """The shards of a cluster.

    Args:
        shards: servers of each shard, in the order of their first slots.
        of_slot: number of the shard of each slot; ``NO_SHARD``: no server has the slot.
    """

    shards: tuple[ShardNodes, ...]
    of_slot: tuple[int, ...]

    @property
    def complete(self) -> bool:
        """Whether each slot has a server."""
        return NO_SHARD not in self.of_slot

    def primary_of(self, slot: int) -> str | None:
        """Address of the primary of a slot; None: no server has the slot."""
        number = self.of_slot[slot]
        return None if number == NO_SHARD else self.shards[number].primary

    def tag_at(self, primary: str) -> bytes | None:
        """Tag of a range that a primary serves; None: it serves no range."""
        return next((tag for slot, tag in zip(RANGE_SLOTS, TAGS, strict=True) if self.primary_of(slot) == primary), None)


EMPTY: Final = Topology((), (NO_SHARD,) * SLOTS)


def parse_cluster_slots(reply: object, asked_host: str) -> Topology:
    """Read the reply to ``CLUSTER SLOTS``.

    Args:
        reply: the reply.
        asked_host: the host that replied. A server that does not know its own address leaves it out.

    Raises:
        ValueError: the reply has another shape.
    """
    shards: dict[str, tuple[int, ShardNodes]] = {}
    of_slot = [NO_SHARD] * SLOTS
    if not isinstance(reply, list):
        raise ValueError("no list of slots")  # noqa: TRY004  # one error for every shape
    for entry in sorted(reply, key=_first_slot):
        first, last, *servers = entry
        if not isinstance(last, int) or not 0 <= first <= last < SLOTS or not servers:
            raise ValueError("a range of slots is invalid")
        addresses = [_address(server, asked_host) for server in servers]
        number, _ = shards.setdefault(addresses[0], (len(shards), ShardNodes(addresses[0], tuple(addresses[1:]))))
        of_slot[first : last + 1] = [number] * (last + 1 - first)
    return Topology(tuple(nodes for _, nodes in shards.values()), tuple(of_slot))


def _first_slot(entry: object) -> int:
    if not isinstance(entry, list) or len(entry) < 3 or not isinstance(entry[0], int):
        raise ValueError("a range of slots is invalid")
    return entry[0]


def _address(server: object, asked_host: str) -> str:
    if not isinstance(server, list) or len(server) < 2 or not isinstance(server[1], int):
        raise ValueError("the address of a server is invalid")
    host = server[0].decode() if isinstance(server[0], bytes) else ""
    return known_address(f"{host}:{server[1]}", asked_host)


def known_address(address: str, asked_host: str) -> str:
    """Address of a server as another server names it. A host that the other server does not know is the other server's host."""
    host, _, port = address.rpartition(":")
    return f"{host if host and host != '?' else asked_host}:{port}"
