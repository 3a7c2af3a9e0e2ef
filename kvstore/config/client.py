"""Configuration of programs that use the store."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from kvstore.config.base import DEFAULT_METADATA_ADDRESS, Section, TlsSection
from kvstore.config.values import DurationMs


class ClientSection(Section):
    """Clients of the store: commands, admin server, router, event publisher."""

    metadata: str = Field(
        default=DEFAULT_METADATA_ADDRESS,
        description="metadata servers that commands ask: HOST:PORT, a list, or a DNS name",
    )
    node: str | None = Field(default=None, description="address or unix socket of the node on this host; unset: no node")
    deadline_ms: DurationMs = Field(default=10_000, gt=0, description="deadline of a load or store")
    token_file: Path | None = Field(default=None, description="file with the token for the metadata server and nodes")
    read_token_file: Path | None = Field(
        default=None,
        description="file with a token of role read, for queries of the admin server and commands to nodes; unset: token_file",
    )
    tls: TlsSection = TlsSection()


class ClusterSection(Section):
    """A named cluster of the commands' option ``--cluster``. It replaces these settings of ``[client]``."""

    metadata: str = Field(description="metadata servers of the cluster: HOST:PORT, a list, or a DNS name")
    node: str | None = Field(default=None, description="address or unix socket of a node; unset: no node")
    token_file: Path | None = Field(default=None, description="file with the token for the metadata server and nodes")
    read_token_file: Path | None = Field(
        default=None, description="file with a token of role read for queries of nodes; unset: token_file"
    )
    tls: TlsSection = TlsSection()
