"""What a router is told."""

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
from kvstore.core.tls import TlsConfig
from kvstore.rpc.address import check_address, stays_on_host

MAX_ENGINES: Final = 1_024
_NO_BRACKETS: Final = str.maketrans("", "", "[]")
_NAME: Final = re.compile(r"[A-Za-z0-9_.:-]+")

Policy = Literal["scheduler", "least_loaded", "round_robin"]
Flow = Literal["concurrent", "sequential"]


class Role(StrEnum):
    """What an engine does for this router."""

    PLAIN = "plain"
    """Whole requests."""
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """One engine.

    Attributes:
        name: as logs, statistics and the scheduler call it; unique.
        url: ``http://host:port`` of its OpenAI-compatible server, without a path.
        role: what it does.
        node: id of the store's node on its host; empty: not known, and its host's DRAM does not count as near.
    """

    name: str
    url: str
    role: Role = Role.PLAIN
    node: str = ""

    def __post_init__(self) -> None:
        for kind, text in (("name", self.name), ("node", self.node or "-")):
            if not _NAME.fullmatch(text) or len(text) > limits.MAX_NAME_BYTES:
                raise InvalidArgument(f"an engine's {kind} takes letters, digits and _ . : -", got=text)
        try:
            parts = urlsplit(self.url)
            wrong = parts.port == 0  # also whether it is a number
        except ValueError:
            raise InvalidArgument("an engine's address is http://host:port", got=self.url) from None
        if (
            wrong
            or parts.scheme not in {"http", "https"}
            or not parts.hostname
            or parts.username
            or parts.query
            or parts.fragment
        ):
            raise InvalidArgument("an engine's address is http://host:port", got=self.url)
        if parts.path not in {"", "/"}:
            raise InvalidArgument("an engine's address has no path: /v1 is added by the router", got=self.url)


def parse_engine(text: str, role: Role) -> EngineConfig:
    """``[NAME=]URL[@NODE]``; without a name it is called after host and port.

    Raises:
        InvalidArgument: it is no such thing.
    """
    name, equals, rest = text.partition("=") if "=" in text.partition("://")[0] else ("", "", text)
    url, _, node = rest.partition("@")
    url = url.rstrip("/").removesuffix("/v1")
    if equals and not name:
        raise InvalidArgument("an engine is given as [NAME=]URL[@NODE]", got=text)
    called = url.partition("://")[2].translate(_NO_BRACKETS)
    return EngineConfig(name or called or url, url, role, node)


@dataclass(frozen=True, slots=True)
class HealthLimits:
    """When an engine counts as gone, and for how long.

    Attributes:
        interval_s: from one active check to the next.
        timeout_s: of a check.
        failed_checks: so many in a row and it is out.
        failed_requests: so many lost or timed-out requests in a row and it is out; a refused connection is enough by itself.
        eject_s: how long it stays out at first; doubled each time, up to ``eject_most_s``.
        eject_most_s: the longest.
    """

    interval_s: float = 1.0
    timeout_s: float = 2.0
    failed_checks: int = 2
    failed_requests: int = 3
    eject_s: float = 1.0
    eject_most_s: float = 30.0

    def __post_init__(self) -> None:
        if min(self.interval_s, self.timeout_s, self.eject_s) <= 0 or self.eject_most_s < self.eject_s:
            raise InvalidArgument("health checks take times above 0, and eject_most no shorter than eject")
        if min(self.failed_checks, self.failed_requests) < 1:
            raise InvalidArgument("an engine is out after at least one failure")


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """One router.

    Args:
        engines: all of them plain, or some that prefill and some that decode.
        listen: ``"host:port"`` (port 0: any).
        policy: ``scheduler``: the metadata server's scheduler decides, and ``least_loaded`` while it is away; ``least_loaded``:
            the engine that has the least to load and compute, the prefix it holds deducted; ``round_robin``: in turn.
        metadata: the metadata server; None: no scheduler and no lookups.
        name: of this pool of engines at the scheduler.
        report: whether this router reports for the engines; where several share a pool, one does.
        lookup: whether the store is asked which prefixes lie near which engine.
        flow: with pairs: whether prefill and decode engine are called at once, or one after the other.
        max_body_bytes: of a request.
        max_inflight: requests at once; one more is refused.
        assign_timeout_s: how long a request waits for engines.
        connect_timeout_s: to an engine.
        first_byte_timeout_s: from the request to the first byte of its answer.
        idle_timeout_s: between pieces of an answer.
        client_timeout_s: how long a client may take nothing of what waits for it.
        retries: further attempts on other engines, before the first byte.
        expected_output_tokens: where a request does not say, for room on the decode engine; also the most that is reckoned with.
        stop_grace_s: how long requests under way may take when the router ends.
        health: of engines.
        engine_tls_ca: PEM file for ``https`` engines; None: the system's.
        tls: of the metadata server's channel.
        token_file: a file with the token that it is shown; None: none.
        serve_tls: this server's own certificate; None: plain HTTP.
        allow_insecure_remote: listen without TLS where other hosts can reach it.
        ready_file: written as JSON ``{"address", "pid"}`` once it answers.

    Raises:
        InvalidArgument: a value that cannot work, or an open door that nobody asked for.
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
            raise InvalidArgument("a router's name takes letters, digits and _ . : -", got=self.name)
        if self.metadata is not None:
            check_address(self.metadata)
        elif self.policy == "scheduler":
            raise InvalidArgument("the policy scheduler takes a metadata server; least_loaded and round_robin do without")
        engine_times = (self.connect_timeout_s, self.first_byte_timeout_s, self.idle_timeout_s)
        if min(self.assign_timeout_s, self.client_timeout_s, *engine_times) <= 0 or self.stop_grace_s < 0:
            raise InvalidArgument("timeouts are above 0")
        if self.max_body_bytes < 1_024 or self.max_inflight < 1 or self.expected_output_tokens < 1 or not 0 <= self.retries <= 8:
            raise InvalidArgument(
                "bounds out of range",
                max_body_bytes=self.max_body_bytes,
                max_inflight=self.max_inflight,
                expected_output_tokens=self.expected_output_tokens,
                retries=self.retries,
            )
        if self.serve_tls is None and not self.allow_insecure_remote and not stays_on_host(self.listen):
            raise InvalidArgument(
                "refusing to listen beyond this host without TLS; give certificates, or set allow_insecure_remote",
                listen=self.listen,
            )

    def _check_engines(self) -> None:
        if not 1 <= len(self.engines) <= MAX_ENGINES:
            raise InvalidArgument("a router takes engines: --engine URL …, or --prefill URL … and --decode URL …")
        for kind, names in (
            ("name", [engine.name for engine in self.engines]),
            ("address", [engine.url for engine in self.engines]),
        ):
            twice = {name for name in names if names.count(name) > 1}
            if twice:
                raise InvalidArgument(f"two engines have the same {kind}", got=sorted(twice)[0])
        roles = {engine.role for engine in self.engines}
        if roles not in ({Role.PLAIN}, {Role.PREFILL, Role.DECODE}):
            raise InvalidArgument("engines are all plain, or some prefill and some decode", roles=", ".join(sorted(roles)))

        nameless = [engine.name for engine in self.engines if engine.role is Role.DECODE and not engine.node]
        if self.flow == "concurrent" and nameless:
            raise InvalidArgument(
                "a prompt is handed over to the store's node beside the decode engine: name it, URL@NODE", engine=nameless[0]
            )

    @property
    def pairs(self) -> bool:
        """Whether a request takes a prefill engine and a decode engine."""
        return any(engine.role is not Role.PLAIN for engine in self.engines)
