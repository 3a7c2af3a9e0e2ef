"""What an admin server is told."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvstore.control_api.store_rpc import StoreEndpoint
from kvstore.core.errors import InvalidArgument
from kvstore.process.effective_config import EffectiveSetting
from kvstore.process.tls import TlsConfig
from kvstore.rpc.address import check_address, is_unix, stays_on_host
from kvstore.rpc.auth.tokens import TokenSource


@dataclass(frozen=True, slots=True)
class AdminConfig:
    """One admin server.

    Args:
        listen: ``"host:port"`` (port 0: any).
        metadata: address of the metadata server.
        tokens_file: who may do what (``kvstore.rpc.auth.tokens``); None: whoever reaches it, which is this host alone.
        timeout_s: of a question to the metadata server or a node.
        change_timeout_s: of a change at one of them, such as an eviction.
        max_body_bytes: of a request.
        max_inflight: requests at once; one more is refused.
        stop_grace_s: how long requests under way may take when it ends.
        tls: of the channels to metadata server and nodes.
        token: what they are shown; None: nothing.
        read_token: what nodes are shown that are only asked; None: the same. A node's address is whatever was registered.
        serve_tls: this server's own certificate; None: plain HTTP.
        allow_insecure_remote: listen without TLS where other hosts can reach it. Never without tokens.
        ready_file: written as JSON ``{"address", "pid"}`` once it answers.
        in_force: the configuration that all this was made of, for those who ask.

    Raises:
        InvalidArgument: a value that cannot work, or an open door.
    """

    listen: str = "127.0.0.1:7470"
    metadata: str = "127.0.0.1:7400"
    tokens_file: Path | None = None
    timeout_s: float = 3.0
    change_timeout_s: float = 60.0
    max_body_bytes: int = 4 << 20
    max_inflight: int = 64
    stop_grace_s: float = 5.0
    tls: TlsConfig | None = None
    token: TokenSource | None = None
    read_token: TokenSource | None = None
    serve_tls: TlsConfig | None = None
    allow_insecure_remote: bool = False
    ready_file: Path | None = None
    in_force: tuple[EffectiveSetting, ...] = ()

    @property
    def endpoint(self) -> StoreEndpoint:
        """How this server reaches the store."""
        return StoreEndpoint(self.metadata, self.tls, self.token, self.read_token, self.timeout_s, self.change_timeout_s)

    def __post_init__(self) -> None:
        check_address(self.listen)
        check_address(self.metadata)
        if is_unix(self.listen):
            raise InvalidArgument("the admin server listens on TCP", listen=self.listen)
        if min(self.timeout_s, self.change_timeout_s) <= 0 or self.stop_grace_s < 0:
            raise InvalidArgument("timeouts are above 0")
        if self.max_body_bytes < 1_024 or self.max_inflight < 1:
            raise InvalidArgument("bounds out of range", max_body_bytes=self.max_body_bytes, max_inflight=self.max_inflight)
        if stays_on_host(self.listen):
            return
        if self.tokens_file is None:
            raise InvalidArgument(
                "refusing to listen beyond this host without tokens: name a file of them (admin.tokens_file)", listen=self.listen
            )
        if self.serve_tls is None and not self.allow_insecure_remote:
            raise InvalidArgument(
                "refusing to listen beyond this host without TLS, as tokens could be read on the way; give certificates, or set"
                " allow_insecure_remote",
                listen=self.listen,
            )
