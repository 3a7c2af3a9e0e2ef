"""Facts that a Valkey server reports about itself and its cluster. Pure: replies are checked, and unknown values are None."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from kvstore.core.index_backend import IndexServer
from kvstore.index.valkey.connection import Reply, pack
from kvstore.index.valkey.records import abilities_of
from kvstore.index.valkey.topology import Topology

MAX_SERVERS: Final = 256
"""Servers of one cluster that are observed."""
_MAX_SERVERS_OF_SHARD: Final = 16
DESCRIBE: Final = (
    pack("INFO", "server", "memory", "persistence", "replication", "keyspace"),
    pack("CONFIG", "GET", "save", "appendonly", "cluster-node-timeout"),
)
"""Commands whose replies ``ServerFacts.of`` reads. A user without the right to the second one learns less."""


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """Replies of one server: fields of ``INFO``, and its configuration."""

    info: Mapping[str, str]
    settings: Mapping[str, str]

    @classmethod
    def of(cls, replies: Sequence[Reply]) -> ServerFacts:
        """Read the replies to ``DESCRIBE``."""
        info, settings = replies
        text = info.decode(errors="replace") if isinstance(info, bytes) else ""
        pairs = [line.partition(":") for line in text.splitlines() if not line.startswith("#")]
        words = _texts(settings)
        return cls({name: value for name, _, value in pairs}, dict(zip(words[::2], words[1::2], strict=False)))

    def number(self, name: str) -> int | None:
        """A field of ``INFO`` as a number; None: it is missing."""
        return _number(self.info.get(name))

    def describe(self, address: str) -> IndexServer:
        """The server with these facts. Its role and its shard follow from the topology (``servers_of``)."""
        product = "valkey" if "valkey_version" in self.info else "redis"
        version = self.info.get(f"{product}_version", "")[:32]
        save, append = self.settings.get("save"), self.info.get("aof_enabled")
        return IndexServer(
            address=address,
            primary=False,
            version=f"{product} {version}" if version else "",
            compare_and_set=abilities_of("\n".join(f"{name}:{value}" for name, value in self.info.items())).compare_and_set,
            keys=sum(_keys_of(value) for name, value in self.info.items() if name.startswith("db")),
            used_bytes=self.number("used_memory"),
            limit_bytes=self.number("maxmemory"),
            eviction_policy=self.info.get("maxmemory_policy", "")[:32],
            snapshots=None if save is None else bool(save.strip()),
            append_only=None if append is None else append != "0",
            node_timeout_ms=_number(self.settings.get("cluster-node-timeout")),
        )

    def lags(self) -> dict[str, int]:
        """Bytes that each replica of this primary has not confirmed, by ``host:port``."""
        written, found = self.number("master_repl_offset"), {}
        for number in range(_MAX_SERVERS_OF_SHARD):
            fields = dict(part.partition("=")[::2] for part in self.info.get(f"slave{number}", "").split(","))
            confirmed = _number(fields.get("offset"))
            if written is not None and confirmed is not None:
                found[f"{fields.get('ip')}:{fields.get('port')}"] = max(0, written - confirmed)
        return found


def parse_cluster_shards(reply: object, asked_host: str) -> list[list[str]]:
    """Read the reply to ``CLUSTER SHARDS``: the addresses of each shard's servers, also of those that have failed.

    Raises:
        ValueError: the reply has another shape.
    """
    if not isinstance(reply, list):
        raise ValueError("no list of shards")  # noqa: TRY004  # one error for every shape
    groups = []
    for shard in reply:
        nodes = _fields(shard).get("nodes")
        if not isinstance(nodes, list):
            raise ValueError("the servers of a shard are missing")  # noqa: TRY004
        groups.append([_address(_fields(node), asked_host) for node in nodes])
    return groups


def servers_of(topology: Topology, slots: Mapping[int, int], groups: Sequence[Sequence[str]]) -> list[IndexServer]:
    """All servers of a cluster with their roles, at most ``MAX_SERVERS``.

    Args:
        topology: which servers serve slots.
        slots: number of slots of each shard.
        groups: addresses of each shard's servers, also of those that have failed.
    """
    found: dict[str, IndexServer] = {}
    for number, nodes in enumerate(topology.shards):
        found[nodes.primary] = IndexServer(address=nodes.primary, primary=True, shard=number, slots=slots.get(number, 0))
    for number, nodes in enumerate(topology.shards):
        beside = next((group for group in groups if nodes.primary in group), ())
        for address in (*nodes.replicas, *beside):
            found.setdefault(address, IndexServer(address=address, primary=False, shard=number))
    for address in (address for group in groups for address in group):
        found.setdefault(address, IndexServer(address=address, primary=False))
    ordered = sorted(found.values(), key=lambda one: (one.shard is None, one.shard, not one.primary, one.address))
    return ordered[:MAX_SERVERS]


def _fields(reply: object) -> dict[str, object]:
    """The fields of a map that Valkey sends as a list."""
    if not isinstance(reply, list) or len(reply) % 2:
        raise ValueError("no fields")
    return {name.decode(errors="replace"): value for name, value in zip(reply[::2], reply[1::2], strict=True)}


def _address(node: Mapping[str, object], asked_host: str) -> str:
    endpoint, port = node.get("endpoint"), node.get("port", node.get("tls-port"))
    if not isinstance(port, int):
        raise ValueError("the port of a server is missing")  # noqa: TRY004
    host = endpoint.decode(errors="replace") if isinstance(endpoint, bytes) else ""
    return f"{host if host and host != '?' else asked_host}:{port}"


def _texts(reply: Reply) -> list[str]:
    return [one.decode(errors="replace") for one in reply if isinstance(one, bytes)] if isinstance(reply, list) else []


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isascii() and text.isdecimal() and len(text) < 20 else None


def _keys_of(keyspace: str) -> int:
    return _number(keyspace.removeprefix("keys=").partition(",")[0]) or 0
