"""Address of a Valkey Cluster, with user, password and TLS."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Credentials:
    """Identity of this client. An empty user is Valkey's user ``default``; without a password no identity is shown."""

    user: str = ""
    password: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True)
class ValkeyAddress:
    """A cluster.

    Args:
        seeds: ``host:port`` of some servers; the others are learnt from them.
        credentials: user and password.
        tls: None: no TLS.
    """

    seeds: tuple[str, ...]
    credentials: Credentials = field(default_factory=Credentials)
    tls: ssl.SSLContext | None = None
