"""Configuration of the metadata server."""

from __future__ import annotations

from pathlib import Path
from typing import Final, Literal, Self

from pydantic import Field

from kvstore.config.base import (
    DEFAULT_METADATA_ADDRESS,
    INSECURE,
    INSECURE_METRICS,
    TOKENS_FILE,
    AddressOrNone,
    Section,
    TlsSection,
)
from kvstore.config.values import DurationMs, Size
from kvstore.core.errors import InvalidArgument
from kvstore.process.effective_config import EffectiveSetting
from kvstore.rpc.address import check_address, check_listen_address, check_metrics_address, host_and_port, is_unix

MIN_EVENTS_BYTES: Final = 1 << 20
"""About the largest batch of one long chain. A subscriber starts over if a single change does not fit."""
MAX_VALKEY_SERVERS: Final = 64


class MetadataSection(Section):
    """The metadata server."""

    listen: str = Field(
        default=DEFAULT_METADATA_ADDRESS,
        description="address at which nodes and clients reach the server by gRPC; port 0: any free port",
    )
    advertise: str | None = Field(
        default=None,
        description="host:port at which other metadata servers that share the index reach this one; unset: the listen address, or"
        " if that is all interfaces, the address of this host towards the Valkey Cluster",
    )
    index_path: Path | None = Field(
        default=None, description="folder of the index; may be deleted while the server is down. Unset: in data_dir"
    )
    index_size_bytes: Size = Field(
        default=16 << 30,
        ge=1 << 20,
        description="maximum size of the index file. It reserves address space only; disk space is used as the index grows",
    )
    engine: str = Field(
        default="lmdb",
        description="where the index is: lmdb (a file of this host), or valkey://HOST:PORT[,HOST:PORT...], some servers of a"
        " Valkey or Redis Cluster that several metadata servers share; valkeys:// for TLS",
    )
    valkey_user: str = Field(default="", description="user of the Valkey Cluster; unset: its default user")
    valkey_password_file: Path | None = Field(default=None, description="file with the password of the Valkey Cluster")
    valkey_ca: Path | None = Field(
        default=None, description="CA certificates that the servers of the Valkey Cluster must chain to; unset: those of the host"
    )
    lookup_shard_ms: DurationMs = Field(
        default=20, ge=1, description="time that a lookup waits for a shard of the Valkey Cluster before it goes on without it"
    )
    heartbeat_interval_ms: DurationMs = Field(default=500, ge=10, description="time between two heartbeats of a node")
    node_ttl_ms: DurationMs = Field(default=2_500, description="time without a heartbeat after which a node is hidden")
    node_forget_ms: DurationMs = Field(
        default=86_400_000, description="time without a heartbeat after which a node and its replicas are forgotten"
    )
    path_policy: Literal["prefill_only", "round_robin", "shorter_queue", "split"] = Field(
        default="split", description="choice of the hosts whose storage links serve a load, if the client names no policy"
    )
    alpha_tokens: int = Field(
        default=75_000,
        ge=1,
        description="a host's read queue above this many tokens (alpha) is long: engines of other hosts are preferred. Measure:"
        " bytes per second of its storage link under load (25 Gbit/s: 3.1e9) x 3 s / KV bytes per token (Llama-3-8B: 131,072)",
    )
    beta_tokens: int = Field(
        default=100_000,
        ge=1,
        description="a prefill engine with more tokens than this (beta) gets no further requests. Measure: prompt tokens per"
        " second, hits included, of one engine under load x 5 s",
    )
    engine_ttl_ms: DurationMs = Field(
        default=5_000, ge=10, description="time without a report after which an engine group's requests go to other groups"
    )
    request_ttl_ms: DurationMs = Field(
        default=21_600_000, description="a request is forgotten after this time if no engine reported its end"
    )
    max_requests: int = Field(
        default=100_000, ge=1, le=1_000_000, description="requests that wait or run; further ones are rejected"
    )
    stop_grace_ms: DurationMs = Field(default=5_000, description="time for calls in flight to finish when the server stops")
    events_memory_bytes: Size = Field(
        default=32 << 20,
        ge=MIN_EVENTS_BYTES,
        description="memory of past block events; it bounds how far a subscriber may fall behind",
    )
    max_subscribers: int = Field(
        default=64, ge=1, le=1_024, description="concurrent subscribers of block events; further ones are rejected"
    )
    tokens_file: Path | None = Field(default=None, description=f"who may call the metadata server: {TOKENS_FILE}")
    tls: TlsSection = TlsSection()
    allow_insecure_remote: bool = Field(default=False, description=f"metadata server: {INSECURE}")
    allow_insecure_metrics: bool = Field(default=False, description=f"metadata server: {INSECURE_METRICS}")
    metrics_listen: AddressOrNone = Field(
        default="127.0.0.1:7401",
        description="address of the metadata server's /metrics over plain HTTP; port 0: any free port; none: off",
    )
    ready_file: Path | None = Field(default=None, description="file written as JSON once the metadata server answers")


class MetadataConfig(MetadataSection):
    """Configuration of one metadata server, with the values that follow from the host.

    Attributes:
        index_path: folder of the index; created if it is missing.
        settings: effective settings, for callers that ask for them.
    """

    index_path: Path
    metrics_listen: AddressOrNone = None
    settings: tuple[EffectiveSetting, ...] = ()

    @property
    def settings_path(self) -> Path:
        """File of the operators' orders. It is stored beside the index folder, which may be deleted."""
        return self.index_path.with_name(f"{self.index_path.name}.orders.json")

    @property
    def events_path(self) -> Path:
        """File of the cluster events of the last 24 hours, beside the index folder."""
        return self.index_path.with_name(f"{self.index_path.name}.events.jsonl")

    @property
    def valkey_servers(self) -> tuple[str, ...]:
        """Addresses of some servers of the Valkey Cluster; empty: the index is a file of this host.

        Raises:
            InvalidArgument: ``engine`` has another form.
        """
        scheme, separator, rest = self.engine.partition("://")
        if self.engine == "lmdb":
            return ()
        if not separator or scheme not in {"valkey", "valkeys"}:
            raise InvalidArgument("metadata.engine must be lmdb or valkey://HOST:PORT[,HOST:PORT...]", engine=self.engine)
        addresses = tuple(part.strip() for part in rest.rstrip("/").split(","))
        if len(addresses) > MAX_VALKEY_SERVERS:
            raise InvalidArgument("metadata.engine names too many servers", got=len(addresses), limit=MAX_VALKEY_SERVERS)
        for address in addresses:
            if "@" in address:
                raise InvalidArgument(
                    "metadata.engine must not contain a password; set metadata.valkey_user and metadata.valkey_password_file"
                )
            try:
                host_and_port(address)
            except InvalidArgument as error:
                raise InvalidArgument(
                    "metadata.engine needs a port with each server: valkey://HOST:PORT[,HOST:PORT...]", address=address
                ) from error
        return addresses

    def check(self) -> Self:
        """This configuration, after checks that span several settings.

        Raises:
            InvalidArgument: settings that contradict each other, or a remote address without TLS.
        """
        check_address(self.listen)
        if not self.valkey_servers and (self.valkey_user or self.valkey_password_file or self.valkey_ca):
            raise InvalidArgument("metadata.valkey_* settings require metadata.engine = valkey://HOST:PORT", engine=self.engine)
        if self.valkey_servers:
            self._check_shared()
        if self.heartbeat_interval_ms >= self.node_ttl_ms:
            raise InvalidArgument(
                "metadata.heartbeat_interval must be shorter than metadata.node_ttl",
                heartbeat_interval_ms=self.heartbeat_interval_ms,
                node_ttl_ms=self.node_ttl_ms,
            )
        if self.node_forget_ms < self.node_ttl_ms:
            raise InvalidArgument(
                "metadata.node_forget must not be shorter than metadata.node_ttl",
                node_forget_ms=self.node_forget_ms,
                node_ttl_ms=self.node_ttl_ms,
            )
        if self.engine_ttl_ms >= self.request_ttl_ms:
            raise InvalidArgument(
                "metadata.engine_ttl must be shorter than metadata.request_ttl",
                engine_ttl_ms=self.engine_ttl_ms,
                request_ttl_ms=self.request_ttl_ms,
            )
        has_tls = self.tls.resolve() is not None
        check_listen_address(self.listen, "metadata.", tls=has_tls, allow_insecure=self.allow_insecure_remote)
        check_metrics_address(self.metrics_listen, allow_remote=self.allow_insecure_remote or self.allow_insecure_metrics)
        return self

    def _check_shared(self) -> None:
        """Check the settings of a server that shares its index with others.

        Raises:
            InvalidArgument: other servers could not reach this one.
        """
        if self.advertise is not None:
            host_and_port(self.advertise)
        elif is_unix(self.listen):
            raise InvalidArgument("other metadata servers cannot reach a unix socket; set metadata.advertise", listen=self.listen)
