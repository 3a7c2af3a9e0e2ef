"""Configuration of the admin server."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from pydantic import Field

from kvstore.config.base import DEFAULT_METADATA_ADDRESS, Section, TlsSection
from kvstore.config.client import ClientSection
from kvstore.config.values import DurationMs, Size
from kvstore.core.errors import InvalidArgument
from kvstore.process.effective_config import EffectiveSetting
from kvstore.rpc.address import check_address, check_listen_address, is_unix, stays_on_host
from kvstore.rpc.failover.addresses import MetadataAddresses


class AdminSection(Section):
    """The admin server: REST API and web page. It reaches metadata server and nodes with client.tls and client.token_file."""

    listen: str = Field(
        default="127.0.0.1:7470",
        description="address of the HTTP service; port 0: any free port; none: kvstore up starts no admin server",
    )
    metadata: str = Field(
        default=DEFAULT_METADATA_ADDRESS,
        description="metadata servers that page and REST show: HOST:PORT, a list, or a DNS name",
    )
    tokens_file: Path | None = Field(
        default=None,
        description="file with lines of ROLE NAME TOKEN, roles read and operator; read again after a change."
        " Unset: every caller on this host may do everything",
    )
    timeout_ms: DurationMs = Field(default=3_000, gt=0, description="timeout of a query to the metadata server or a node")
    change_timeout_ms: DurationMs = Field(default=60_000, gt=0, description="timeout of a change, such as an eviction")
    max_body_bytes: Size = Field(default=4 << 20, ge=1_024, description="largest body of a REST call that is accepted")
    max_inflight: int = Field(default=64, ge=1, le=10_000, description="REST calls that run at once; further ones are rejected")
    stop_grace_ms: DurationMs = Field(default=5_000, description="time for requests in flight to finish when the server stops")
    tokenizer: Path | None = Field(
        default=None,
        description="tokenizer.json or folder of a local model, for texts in the prefix explorer (extra tokenizer)."
        " Unset: token ids only",
    )
    tls: TlsSection = TlsSection()
    allow_insecure_remote: bool = Field(
        default=False, description="allow plain HTTP on an address that other hosts can reach; tokens remain required"
    )
    ready_file: Path | None = Field(default=None, description="file written as JSON once the admin server answers")


class AdminConfig(AdminSection):
    """Configuration of one admin server.

    Attributes:
        client: TLS and tokens for the metadata server and nodes.
        settings: effective settings, for callers that ask for them.
    """

    client: ClientSection = ClientSection()
    settings: tuple[EffectiveSetting, ...] = ()

    def check(self) -> Self:
        """This configuration, after checks that span several settings.

        Raises:
            InvalidArgument: an invalid address, or a remote address without tokens or TLS.
        """
        check_address(self.listen)
        MetadataAddresses.parse(self.metadata)
        has_tls = self.tls.resolve() is not None
        if is_unix(self.listen):
            raise InvalidArgument("the admin server listens on TCP only; set admin.listen to HOST:PORT", listen=self.listen)
        if self.tokens_file is None and not stays_on_host(self.listen):
            raise InvalidArgument("listening on a remote address requires tokens; set admin.tokens_file", address=self.listen)
        check_listen_address(self.listen, "admin.", tls=has_tls, allow_insecure=self.allow_insecure_remote)
        return self
