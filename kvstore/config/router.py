"""Configuration of the router."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Final, Literal, Self

from pydantic import BeforeValidator, Field

from kvstore.config.base import DEFAULT_METADATA_ADDRESS, AddressOrNone, Section, TlsSection
from kvstore.config.client import ClientSection
from kvstore.config.values import DurationMs, Size, parse_list
from kvstore.core import limits
from kvstore.core.errors import InvalidArgument
from kvstore.rpc.address import check_address, check_listen_address
from kvstore.rpc.failover.addresses import MetadataAddresses

_NAME: Final = re.compile(r"[A-Za-z0-9_.:-]+")
_Engines = Annotated[tuple[str, ...], BeforeValidator(parse_list)]


class RouterSection(Section):
    """The router: one OpenAI-compatible address in front of several engines."""

    listen: str = Field(default="127.0.0.1:8000", description="address of the HTTP service; port 0: any free port")
    engines: _Engines = Field(default=(), description="engines that serve whole requests: [NAME=]URL[@NODE], …")
    prefill: _Engines = Field(default=(), description="engines that compute prompts: [NAME=]URL[@NODE], …; requires decode")
    decode: _Engines = Field(default=(), description="engines that generate output: [NAME=]URL[@NODE], …; requires prefill")
    policy: Literal["scheduler", "least_loaded", "round_robin"] = Field(
        default="scheduler",
        description="choice of the engine: by the metadata server's scheduler, the least loaded engine, or in turn",
    )
    metadata: AddressOrNone = Field(
        default=DEFAULT_METADATA_ADDRESS,
        description="metadata servers: HOST:PORT, a list, or a DNS name; none: no scheduler and no lookups",
    )
    name: str = Field(default="router", description="name of this pool of engines at the scheduler")
    report: bool = Field(
        default=True,
        description="report engine load; of several routers that share a pool, the one started last reports",
    )
    lookup: bool = Field(default=True, description="look prompts up in the store to find nodes that hold their prefix")
    flow: Literal["concurrent", "sequential"] = Field(
        default="concurrent", description="call prefill and decode engine at once, or the decode engine after the prefill engine"
    )
    max_body_bytes: Size = Field(default=16 << 20, ge=1_024, description="largest body of a request that the router accepts")
    max_inflight: int = Field(
        default=1_024, ge=1, le=1_000_000, description="requests that the router serves at once; further ones are rejected"
    )
    assign_timeout_ms: DurationMs = Field(
        default=60_000, gt=0, description="how long a request waits for an engine with capacity"
    )
    connect_timeout_ms: DurationMs = Field(default=2_000, gt=0, description="timeout of a connection to an engine")
    first_byte_timeout_ms: DurationMs = Field(
        default=600_000, gt=0, description="time from a request to the first byte of the response"
    )
    idle_timeout_ms: DurationMs = Field(default=120_000, gt=0, description="longest pause within a response")
    client_timeout_ms: DurationMs = Field(
        default=120_000, gt=0, description="how long a client may stop reading its response before it is disconnected"
    )
    retries: int = Field(default=2, ge=0, le=8, description="further attempts before the first byte of the response")
    expected_output_tokens: int = Field(
        default=512, ge=1, le=1 << 20, description="assumed output length if a request sets none, and the most that is reserved"
    )
    stop_grace_ms: DurationMs = Field(default=10_000, description="time for requests in flight to finish when the router stops")
    check_interval_ms: DurationMs = Field(default=1_000, gt=0, description="time between health checks of one engine")
    check_timeout_ms: DurationMs = Field(default=2_000, gt=0, description="timeout of a health check")
    ejection_time_ms: DurationMs = Field(
        default=1_000, gt=0, description="duration of an engine's first ejection; the n-th lasts n times as long"
    )
    max_ejection_time_ms: DurationMs = Field(default=30_000, gt=0, description="longest ejection of an engine")
    engine_ca: Path | None = Field(default=None, description="PEM file with the CA of https engines")
    tls: TlsSection = TlsSection()
    allow_insecure_remote: bool = Field(default=False, description="allow plain HTTP on an address that other hosts can reach")
    ready_file: Path | None = Field(default=None, description="file written as JSON once the router serves")


class RouterConfig(RouterSection):
    """Configuration of one router.

    Attributes:
        client: TLS and token for the metadata server.
    """

    client: ClientSection = ClientSection()

    @property
    def pairs(self) -> bool:
        """Whether a request uses a prefill engine and a decode engine."""
        return bool(self.prefill or self.decode)

    def check(self) -> Self:
        """This configuration, after checks that span several settings.

        Raises:
            InvalidArgument: an invalid value, or a remote address without TLS.
        """
        check_address(self.listen)
        if not _NAME.fullmatch(self.name) or len(self.name) > limits.MAX_NAME_BYTES // 2:
            raise InvalidArgument("a router's name may contain only letters, digits and _ . : -", got=self.name)
        if self.metadata is not None:
            MetadataAddresses.parse(self.metadata)
        elif self.policy == "scheduler":
            raise InvalidArgument(
                "policy scheduler requires a metadata server; set router.metadata, or use least_loaded or round_robin"
            )
        if self.max_ejection_time_ms < self.ejection_time_ms:
            raise InvalidArgument(
                "max_ejection_time must not be below ejection_time; raise it",
                max_ejection_time_ms=self.max_ejection_time_ms,
                ejection_time_ms=self.ejection_time_ms,
            )
        has_tls = self.tls.resolve() is not None
        check_listen_address(self.listen, "router.", tls=has_tls, allow_insecure=self.allow_insecure_remote)
        return self
