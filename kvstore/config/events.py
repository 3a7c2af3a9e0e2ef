"""Configuration of the event publisher."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Final, Literal, Self

from pydantic import BeforeValidator, Field

from kvstore.config.base import DEFAULT_METADATA_ADDRESS, AddressOrNone, Section
from kvstore.config.client import ClientSection
from kvstore.config.values import DurationMs, Size, parse_list
from kvstore.core import limits
from kvstore.core.errors import InvalidArgument
from kvstore.core.types import KEY_BYTES, NamespaceId, NodeId, Tier
from kvstore.rpc.address import check_metrics_address, stays_on_host
from kvstore.rpc.failover.addresses import MetadataAddresses

_ENDPOINT: Final = re.compile(r"(?P<kind>tcp|ipc)://(?P<rest>.+)")


class EventsSection(Section):
    """The publisher of block events in vLLM's KV event format."""

    metadata: str = Field(
        default=DEFAULT_METADATA_ADDRESS,
        description="metadata servers whose block events are published: HOST:PORT, a list, or a DNS name",
    )
    zmq: str | None = Field(
        default=None, description="endpoint of the PUB socket: tcp://HOST:PORT or ipc://PATH; port *: any free port"
    )
    connect: bool = Field(default=False, description="connect to a SUB socket instead of binding a PUB socket")
    replay: str | None = Field(
        default=None, description="endpoint of the ROUTER socket from which subscribers fetch missed batches; unset: no replay"
    )
    model: str = Field(
        default="",
        description="publish the labelled blocks of this model, with the engine's hashes and tokens; unset: all blocks, with the"
        " store's own keys",
    )
    engine_hash: str = Field(
        default="",
        description="with a model: publish labels of this hash of the engines, such as sha256 or sha256_cbor, with a suffix for"
        " PYTHONHASHSEED; unset: one of those that are found first, preferably sha256",
    )
    pool: str = Field(default="kvstore", description="with a model: name of the store in the topic kv@pool:NAME@MODEL")
    topic: str = Field(
        default="",
        description="first frame of each message; unset: kv@pool:NAME@MODEL, with one node kv@node:ID@MODEL, without model empty",
    )
    hashes: Literal["int64", "bytes"] = Field(
        default="int64", description="without a model: the last 8 bytes of the key as an integer, or all 16 bytes"
    )
    numbers: Literal["zero", "clock"] = Field(
        default="zero",
        description="number of the first batch: 0, or the clock's microseconds, for subscribers that ignore a return to 0",
    )
    namespaces: Annotated[tuple[str, ...], BeforeValidator(parse_list)] = Field(
        default=(), description="publish only these namespaces, each with 32 hexadecimal digits; unset: all"
    )
    nodes: Annotated[tuple[str, ...], BeforeValidator(parse_list)] = Field(
        default=(), description="publish only volumes of these nodes; unset: all"
    )
    tiers: Annotated[tuple[Literal["hbm", "dram", "nvme"], ...], BeforeValidator(parse_list)] = Field(
        default=(),
        description="publish only volumes of these tiers: hbm, dram, nvme; unset: all if a model is set, otherwise dram and nvme",
    )
    max_blocks: int = Field(
        default=10_000_000,
        ge=1,
        description="stored blocks that are followed, in about 450 bytes each; labels and each shard and KV cache group count."
        " Further blocks are not published until a quarter of the space is free",
    )
    labels_memory_bytes: Size = Field(
        default=1 << 30,
        ge=1 << 20,
        description="with a model: memory of labels; blocks whose labels do not fit are not published",
    )
    rank: int = Field(default=0, ge=0, description="data_parallel_rank in each batch")
    replay_batches: int = Field(default=10_000, ge=1, description="past batches that are kept for replay")
    replay_memory_bytes: Size = Field(default=64 << 20, ge=1 << 20, description="memory of the batches that are kept for replay")
    high_water: int = Field(
        default=1_000,
        ge=1,
        description="messages queued for a slow subscriber; it misses further ones",
    )
    heartbeat_ms: DurationMs = Field(
        default=5_000, gt=0, description="an empty batch is sent after this time without a batch, so that a gap is noticed"
    )
    allow_insecure_remote: bool = Field(
        default=False, description="bind an address that other hosts can reach: ZeroMQ lacks TLS and access control"
    )
    allow_insecure_metrics: bool = Field(
        default=False, description="allow plain HTTP metrics on an address that other hosts can reach"
    )
    metrics_listen: AddressOrNone = Field(
        default="127.0.0.1:7485", description="address of /metrics over plain HTTP; port 0: any free port; none: off"
    )
    ready_file: Path | None = Field(default=None, description="file written as JSON once all stored blocks are published")

    @property
    def namespace_ids(self) -> list[NamespaceId]:
        """The namespaces to publish.

        Raises:
            InvalidArgument: a namespace id is malformed.
        """
        found = []
        for text in self.namespaces:
            try:
                raw = bytes.fromhex(text)
            except ValueError:
                raw = b""
            if len(raw) != KEY_BYTES:
                raise InvalidArgument("a namespace id must have 32 hexadecimal digits", got=text[:64])
            found.append(NamespaceId(raw))
        return found

    @property
    def node_ids(self) -> list[NodeId]:
        """The nodes to publish."""
        return [NodeId(node) for node in self.nodes]

    @property
    def tier_kinds(self) -> list[Tier]:
        """The tiers to publish."""
        return [Tier[tier.upper()] for tier in self.tiers]


class EventsConfig(EventsSection):
    """Configuration of one event publisher.

    Attributes:
        zmq: endpoint of the PUB socket.
        client: TLS and token for the metadata server.
    """

    zmq: str
    metrics_listen: AddressOrNone = None
    client: ClientSection = ClientSection()

    @property
    def frame(self) -> str:
        """The topic of all messages."""
        if self.topic or not self.model:
            return self.topic
        holder = f"node:{self.nodes[0]}" if len(self.nodes) == 1 else f"pool:{self.pool}"
        return f"kv@{holder}@{self.model}"

    def check(self) -> Self:
        """This configuration, after checks that span several settings.

        Raises:
            InvalidArgument: an invalid endpoint, or a remote address that was not allowed.
        """
        MetadataAddresses.parse(self.metadata)
        self._check_endpoint(self.zmq, binds=not self.connect)
        if self.replay is not None:
            self._check_endpoint(self.replay, binds=True)
        if len(self.frame.encode()) > limits.MAX_NAME_BYTES:
            raise InvalidArgument("the topic is too long", limit=limits.MAX_NAME_BYTES)
        if self.model and not self.topic and self.frame.count("@") != 2:
            raise InvalidArgument("a router cannot read names with @ in the topic: set events.topic", topic=self.frame)
        check_metrics_address(self.metrics_listen, allow_remote=self.allow_insecure_remote or self.allow_insecure_metrics)
        return self

    def _check_endpoint(self, endpoint: str, *, binds: bool) -> None:
        found = _ENDPOINT.fullmatch(endpoint)
        if found is None:
            raise InvalidArgument("an endpoint must be tcp://HOST:PORT or ipc://PATH", got=endpoint)
        if found["kind"] == "ipc" or (not binds and "*" not in endpoint):
            return
        host, _, port = found["rest"].rpartition(":")
        if not binds:
            raise InvalidArgument("connecting requires one address, not *; name a host and port, or bind", got=endpoint)
        local = host != "*" and stays_on_host(f"{host}:{0 if port == '*' else port}")
        if not local and not self.allow_insecure_remote:
            raise InvalidArgument(
                "binding a remote address is refused: ZeroMQ lacks TLS and access control; set events.allow_insecure_remote to"
                " allow it",
                endpoint=endpoint,
            )
