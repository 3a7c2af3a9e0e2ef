"""Configuration of the router."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final, Literal
from urllib.parse import urlsplit

from kvstore.core import limits
from kvstore.core.errors import InvalidArgument
from kvstore.process.tls import TlsConfig
from kvstore.rpc.address import check_address, stays_on_host

MAX_ENGINES: Final = 1_024
_NO_BRACKETS: Final = str.maketrans("", "", "[]")
_NAME: Final = re.compile(r"[A-Za-z0-9_.:-]+")

Policy = Literal["scheduler", "least_loaded", "round_robin"]
Flow = Literal["concurrent", "sequential"]


class Role(StrEnum):
    """Role of an engine for this router."""

    PLAIN = "plain"
    """Serves whole requests: prompt and output."""
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """One engine.

    Attributes:
        name: unique name for logs, metrics and the scheduler.
        url: ``http://host:port`` of the OpenAI-compatible server, without a path.
        role: role of the engine.
        node: id of the store's node on the same host; empty if unknown: blocks in that host's DRAM then do not count as close.
    """

    name: str
    url: str
    role: Role = Role.PLAIN
    node: str = ""

    def __post_init__(self) -> None:
        for kind, text in (("name", self.name), ("node", self.node or "-")):
            if not _NAME.fullmatch(text) or len(text) > limits.MAX_NAME_BYTES:
                raise InvalidArgument(f"an engine's {kind} may contain only letters, digits and _ . : -", got=text)
        try:
            parts = urlsplit(self.url)
            wrong = parts.port == 0  # also whether it is a number
        except ValueError:
            raise InvalidArgument("an engine's address must be http://host:port", got=self.url) from None
        if (
            wrong
            or parts.scheme not in {"http", "https"}
            or not parts.hostname
            or parts.username
            or parts.query
            or parts.fragment
        ):
            raise InvalidArgument("an engine's address must be http://host:port", got=self.url)
        if parts.path not in {"", "/"}:
            raise InvalidArgument("an engine's address must not contain a path; the router adds /v1", got=self.url)


def parse_engine(text: str, role: Role) -> EngineConfig:
    """Parse ``[NAME=]URL[@NODE]``. The default name is ``host:port``.

    Raises:
        InvalidArgument: the text has another form.
    """
    name, equals, rest = text.partition("=") if "=" in text.partition("://")[0] else ("", "", text)
    url, _, node = rest.partition("@")
    url = url.rstrip("/").removesuffix("/v1")
    if equals and not name:
        raise InvalidArgument("an engine must be given as [NAME=]URL[@NODE]", got=text)
    called = url.partition("://")[2].translate(_NO_BRACKETS)
    return EngineConfig(name or called or url, url, role, node)


@dataclass(frozen=True, slots=True)
class HealthLimits:
    """Limits of active checks and outlier detection.

    Attributes:
        check_interval_s: time between active checks of one engine.
        check_timeout_s: timeout of one check.
        failed_checks: consecutive failed checks that eject an engine.
        gateway_failures: consecutive gateway failures that eject an engine.
        server_errors: consecutive 5xx responses that eject an engine.
        ejection_time_s: duration of the first ejection; the n-th lasts n times as long.
        max_ejection_time_s: longest ejection.
        max_ejected_share: largest share of a role's engines that outlier detection ejects; one engine may always be ejected.
    """

    check_interval_s: float = 1.0
    check_timeout_s: float = 2.0
    failed_checks: int = 2
    gateway_failures: int = 3
    server_errors: int = 5
    ejection_time_s: float = 1.0
    max_ejection_time_s: float = 30.0
    max_ejected_share: float = 0.5

    def __post_init__(self) -> None:
        if min(self.check_interval_s, self.check_timeout_s, self.ejection_time_s) <= 0:
            raise InvalidArgument("check interval, check timeout and ejection time must be above 0")
        if self.max_ejection_time_s < self.ejection_time_s:
            raise InvalidArgument(
                "max_ejection_time must not be below ejection_time; raise it",
                max_ejection_time_s=self.max_ejection_time_s,
                ejection_time_s=self.ejection_time_s,
            )
        if min(self.failed_checks, self.gateway_failures, self.server_errors) < 1 or not 0 <= self.max_ejected_share <= 1:
            raise InvalidArgument("limits of failures must be at least 1, and max_ejected_share between 0 and 1")


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """Configuration of one router.

    Args:
        engines: all plain, or some prefill and some decode engines.
        listen: ``"host:port"``; port 0 means any free port.
        policy: ``scheduler``: the metadata server's scheduler assigns engines, and ``least_loaded`` applies while it is down;
            ``least_loaded``: the engine with the least uncached work; ``round_robin``: in turn.
        metadata: address of the metadata server; None: no scheduler and no lookups.
        name: name of this pool of engines at the scheduler.
        report: report engine load to the scheduler; if several routers share a pool, exactly one reports.
        lookup: look prompts up in the store to find nodes that hold their prefix.
        flow: for prefill and decode engines: call both at once, or the decode engine after the prefill engine.
        max_body_bytes: largest request body.
        max_inflight: concurrent requests; further ones are rejected.
        assign_timeout_s: how long a request waits for an engine with capacity.
        connect_timeout_s: timeout of a connection to an engine.
        first_byte_timeout_s: time from a request to the first byte of the response.
        idle_timeout_s: longest pause within a response.
        client_timeout_s: how long a client may stop reading its response before it is disconnected.
        retries: further attempts before the first byte of the response.
        expected_output_tokens: assumed output length of a request that sets none, and the most that is reserved for any request.
        stop_grace_s: time for requests in flight to finish when the router stops.
        health: limits of health checks and outlier detection.
        engine_tls_ca: PEM file for ``https`` engines; None: the system's certificates.
        tls: TLS of the channel to the metadata server.
        token_file: file with the token for the metadata server; None: no token.
        serve_tls: certificate of the router's own HTTP server; None: plain HTTP.
        allow_insecure_remote: allow plain HTTP on an address that other hosts can reach.
        ready_file: file that is written as JSON ``{"address", "pid"}`` once the router serves.

    Raises:
        InvalidArgument: an invalid value, or a remote address without TLS.
    """

    engines: Sequence[EngineConfig]
    listen: str = "127.0.0.1:8000"
    policy: Policy = "scheduler"
    metadata: str | None = None
    name: str = "router"
    report: bool = True
    lookup: bool = True
    flow: Flow = "concurrent"
    max_body_bytes: int = 16 << 20
    max_inflight: int = 1_024
    assign_timeout_s: float = 60.0
    connect_timeout_s: float = 2.0
    first_byte_timeout_s: float = 600.0
    idle_timeout_s: float = 120.0
    client_timeout_s: float = 120.0
    retries: int = 2
    expected_output_tokens: int = 512
    stop_grace_s: float = 10.0
    health: HealthLimits = HealthLimits()
    engine_tls_ca: Path | None = None
    tls: TlsConfig | None = None
    token_file: Path | None = None
    serve_tls: TlsConfig | None = None
    allow_insecure_remote: bool = False
    ready_file: Path | None = None

    def __post_init__(self) -> None:
        check_address(self.listen)
        self._check_engines()
        if not _NAME.fullmatch(self.name) or len(self.name) > limits.MAX_NAME_BYTES // 2:
            raise InvalidArgument("a router's name may contain only letters, digits and _ . : -", got=self.name)
        if self.metadata is not None:
            check_address(self.metadata)
        elif self.policy == "scheduler":
            raise InvalidArgument(
                "policy scheduler requires a metadata server; set router.metadata, or use least_loaded or round_robin"
            )
        engine_times = (self.connect_timeout_s, self.first_byte_timeout_s, self.idle_timeout_s)
        if min(self.assign_timeout_s, self.client_timeout_s, *engine_times) <= 0 or self.stop_grace_s < 0:
            raise InvalidArgument("timeouts must be above 0")
        if self.max_body_bytes < 1_024 or self.max_inflight < 1 or self.expected_output_tokens < 1 or not 0 <= self.retries <= 8:
            raise InvalidArgument(
                "a limit is out of range",
                max_body_bytes=self.max_body_bytes,
                max_inflight=self.max_inflight,
                expected_output_tokens=self.expected_output_tokens,
                retries=self.retries,
            )
        if self.serve_tls is None and not self.allow_insecure_remote and not stays_on_host(self.listen):
            raise InvalidArgument(
                "listening on a remote address requires TLS; set router.tls, or allow_insecure_remote",
                listen=self.listen,
            )

    def _check_engines(self) -> None:
        if not 1 <= len(self.engines) <= MAX_ENGINES:
            raise InvalidArgument("a router requires engines: --engine URL …, or --prefill URL … and --decode URL …")
        for kind, names in (
            ("name", [engine.name for engine in self.engines]),
            ("address", [engine.url for engine in self.engines]),
        ):
            twice = {name for name in names if names.count(name) > 1}
            if twice:
                raise InvalidArgument(f"two engines have the same {kind}", got=sorted(twice)[0])
        roles = {engine.role for engine in self.engines}
        if roles not in ({Role.PLAIN}, {Role.PREFILL, Role.DECODE}):
            raise InvalidArgument("engines must be all plain, or some prefill and some decode", roles=", ".join(sorted(roles)))
        nameless = [engine.name for engine in self.engines if engine.role is Role.DECODE and not engine.node]
        if self.flow == "concurrent" and nameless:
            raise InvalidArgument(
                "the concurrent flow requires the store's node of each decode engine; write URL@NODE", engine=nameless[0]
            )

    @property
    def pairs(self) -> bool:
        """Whether a request uses a prefill engine and a decode engine."""
        return any(engine.role is not Role.PLAIN for engine in self.engines)
