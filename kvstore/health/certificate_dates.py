"""When a certificate expires. The standard library verifies certificates but offers no reader of a leaf's dates."""

from __future__ import annotations

import ssl
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

_MAX_FILE_BYTES: Final = 1 << 20
_SEQUENCE: Final = 0x30
_VERSION: Final = 0xA0
_UTC_TIME: Final = 0x17
_BEGIN: Final = "-----BEGIN CERTIFICATE-----"
_END: Final = "-----END CERTIFICATE-----"


def certificate_end_s(path: Path) -> float | None:
    """Return when the first certificate of a PEM file expires, in seconds since 1970; None: it cannot be read."""
    try:
        with path.open(encoding="ascii") as file:
            text = file.read(_MAX_FILE_BYTES)
        first = text[text.index(_BEGIN) : text.index(_END) + len(_END)]
        return _not_after(ssl.PEM_cert_to_DER_cert(first)).timestamp()
    except (OSError, ValueError, IndexError):
        return None


def _not_after(der: bytes) -> datetime:
    """Read ``tbsCertificate.validity.notAfter`` (RFC 5280, section 4.1)."""
    body = _content(_content(der, _SEQUENCE), _SEQUENCE)
    if body[0] == _VERSION:
        body = _after(body)
    for _ in ("serial number", "signature algorithm", "issuer"):
        body = _after(body)
    end = _after(_content(body, _SEQUENCE))
    text = _content(end, end[0]).decode("ascii")
    return datetime.strptime(text, "%y%m%d%H%M%SZ" if end[0] == _UTC_TIME else "%Y%m%d%H%M%SZ").replace(tzinfo=UTC)


def _bounds(der: bytes) -> tuple[int, int]:
    """Return begin and end of the content of the first element."""
    length = der[1]
    if length < 0x80:
        return 2, 2 + length
    size = length & 0x7F
    begin = 2 + size
    return begin, begin + int.from_bytes(der[2:begin], "big")


def _content(der: bytes, tag: int) -> bytes:
    """Return the content of the first element.

    Raises:
        ValueError: it has another tag.
    """
    if der[0] != tag:
        raise ValueError(f"expected the ASN.1 tag {tag:#x}, found {der[0]:#x}")
    begin, end = _bounds(der)
    return der[begin:end]


def _after(der: bytes) -> bytes:
    """Return what follows the first element."""
    return der[_bounds(der)[1] :]
