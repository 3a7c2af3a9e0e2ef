"""Building blocks of the configuration's sections."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Final

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer

from kvstore.config.values import ValueFormat
from kvstore.process.tls import TlsConfig

_UNIT: Final = re.compile(r"_(ms|bytes)$")
DEFAULT_METADATA_ADDRESS: Final = "127.0.0.1:7400"


def setting_name(attribute: str) -> str:
    """The setting's name for an attribute: ``lease_ms`` is set as ``lease``, because people write the unit with the value."""
    return _UNIT.sub("", attribute)


class Section(BaseModel):
    """A table of the configuration: frozen, and an unknown setting is an error. Attributes carry their unit, settings do not."""

    model_config = ConfigDict(frozen=True, extra="forbid", alias_generator=setting_name, populate_by_name=True)


def _none(value: object) -> object:
    return None if value in ("", "none") else value


def _none_text(value: str | None) -> str:
    return value or "none"


AddressOrNone = Annotated[str | None, BeforeValidator(_none), PlainSerializer(_none_text), ValueFormat(_none_text)]
"""An address, or ``none``."""


class TlsSection(Section):
    """PEM files for TLS. TLS is off if none is set."""

    ca: Path | None = Field(default=None, description="CA certificates that the peer's certificate must chain to")
    cert: Path | None = Field(default=None, description="certificate chain of this process")
    key: Path | None = Field(default=None, description="private key of the certificate")
    require_client_cert: bool = Field(
        default=False, description="servers: reject clients without a certificate that chains to ca"
    )
    server_name: str | None = Field(default=None, description="clients: name expected in the server's certificate")

    def resolve(self) -> TlsConfig | None:
        """TLS settings for channels and servers; None if nothing is set.

        Raises:
            InvalidArgument: the files do not fit together.
        """
        return None if self == TlsSection() else TlsConfig(**dict(self))


TOKENS_FILE: Final = (
    "file with lines of ROLE NAME TOKEN, roles read, operator, node, engine and tenant; read again after a change."
    " Unset: every caller may do everything"
)
INSECURE: Final = "allow plain text on an address that other hosts can reach, metrics included"
INSECURE_METRICS: Final = "allow plain HTTP metrics on an address that other hosts can reach; other ports still require TLS"
