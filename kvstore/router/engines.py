"""Engines behind a router, and the limits of their health checks."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Final
from urllib.parse import urlsplit

from kvstore.config.router import RouterConfig
from kvstore.core import limits
from kvstore.core.errors import InvalidArgument

MAX_ENGINES: Final = 1_024
_NO_BRACKETS: Final = str.maketrans("", "", "[]")
_NAME: Final = re.compile(r"[A-Za-z0-9_.:-]+")


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
            wrong = parts.port == 0  # also rejects a port that is not a number
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
        failed_checks: consecutive failed checks that eject an engine.
        gateway_failures: consecutive gateway failures that eject an engine.
        server_errors: consecutive 5xx responses that eject an engine.
        ejection_time_s: duration of the first ejection; the n-th lasts n times as long.
        max_ejection_time_s: longest ejection.
        max_ejected_share: largest share of a role's engines that outlier detection ejects; one engine may always be ejected.
    """

    failed_checks: int = 2
    gateway_failures: int = 3
    server_errors: int = 5
    ejection_time_s: float = 1.0
    max_ejection_time_s: float = 30.0
    max_ejected_share: float = 0.5


def engines_of(config: RouterConfig) -> list[EngineConfig]:
    """The engines of a router.

    Raises:
        InvalidArgument: an engine is malformed, or the engines do not fit together.
    """
    given = ((config.engines, Role.PLAIN), (config.prefill, Role.PREFILL), (config.decode, Role.DECODE))
    engines = [parse_engine(text, role) for texts, role in given for text in texts]
    if not 1 <= len(engines) <= MAX_ENGINES:
        raise InvalidArgument("a router requires engines: --engine URL …, or --prefill URL … and --decode URL …")
    for kind, names in (("name", [engine.name for engine in engines]), ("address", [engine.url for engine in engines])):
        twice = {name for name in names if names.count(name) > 1}
        if twice:
            raise InvalidArgument(f"two engines have the same {kind}", got=sorted(twice)[0])
    roles = {engine.role for engine in engines}
    if roles not in ({Role.PLAIN}, {Role.PREFILL, Role.DECODE}):
        raise InvalidArgument("engines must be all plain, or some prefill and some decode", roles=", ".join(sorted(roles)))
    nameless = [engine.name for engine in engines if engine.role is Role.DECODE and not engine.node]
    if config.flow == "concurrent" and nameless:
        raise InvalidArgument(
            "the concurrent flow requires the store's node of each decode engine; write URL@NODE", engine=nameless[0]
        )
    return engines


def health_limits(config: RouterConfig) -> HealthLimits:
    """Limits of active checks and outlier detection."""
    return HealthLimits(
        ejection_time_s=config.ejection_time_ms / 1000,
        max_ejection_time_s=config.max_ejection_time_ms / 1000,
    )
