"""Throw-away certificates for TLS tests, made by the commands of docs/how-to/security.md, as an operator makes them.

They carry a common name and no address. A client that dials a host by its address and expects no name is refused.
"""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from docs_site.markdown import fences

from kvstore.process.tls import TlsConfig

HOW_TO: Final = Path(__file__).resolve().parent.parent / "docs" / "how-to" / "security.md"
SERVER_NAME: Final = "kvstore"
_OPENSSL_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class CertificateFiles:
    """PEM files of one authority and of the one certificate that all daemons and clients share."""

    ca: Path
    cert: Path
    key: Path

    def server(self) -> TlsConfig:
        """The configuration of a server that requires client certificates. A node is a client of others as well."""
        return TlsConfig(ca=self.ca, cert=self.cert, key=self.key, require_client_cert=True, server_name=SERVER_NAME)

    def client(self, server_name: str | None = SERVER_NAME) -> TlsConfig:
        """The configuration of a client with a certificate."""
        return TlsConfig(ca=self.ca, cert=self.cert, key=self.key, server_name=server_name)

    def settings(self) -> tuple[tuple[str, str], ...]:
        """``server()`` as settings of a section: ``tls.ca`` and so on."""
        return (
            ("tls.ca", str(self.ca)),
            ("tls.cert", str(self.cert)),
            ("tls.key", str(self.key)),
            ("tls.require_client_cert", "true"),
            ("tls.server_name", SERVER_NAME),
        )


def make_certificates(folder: Path, *, name: str = SERVER_NAME, authority: CertificateFiles | None = None) -> CertificateFiles:
    """Run the commands of the how-to page in a new folder.

    Args:
        folder: for the files.
        name: the common name that the certificate carries.
        authority: files of the authority that signs; None: a new one.

    Raises:
        AssertionError: a command failed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    text = next(fence.text for fence in fences(HOW_TO.read_text(encoding="utf-8")) if fence.text.startswith("openssl req"))
    lines = text.replace(SERVER_NAME, name).splitlines()
    if authority is not None:
        for file in ("ca.crt", "ca.key"):
            shutil.copy(authority.ca.with_name(file), folder)
        lines = lines[1:]  # the first command makes an authority
    done = subprocess.run(
        ["bash", "-euc", "\n".join(lines)],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_OPENSSL_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return CertificateFiles(folder / "ca.crt", folder / "tls.crt", folder / "tls.key")
