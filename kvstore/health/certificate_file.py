"""What a certificate file says: its end and its names. The standard library offers no reader of a leaf certificate."""

from __future__ import annotations

import ipaddress
import ssl
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

_MAX_FILE_BYTES: Final = 1 << 20
_SEQUENCE: Final = 0x30
_VERSION: Final = 0xA0
_EXTENSIONS: Final = 0xA3
_UTC_TIME: Final = 0x17
_DNS_NAME: Final = 0x82
_IP_ADDRESS: Final = 0x87
_SUBJECT_ALT_NAME: Final = b"\x55\x1d\x11"
_VALIDITY: Final = 3
"""Index of the field after the version: serial number, signature algorithm, issuer, validity."""
_BEGIN: Final = "-----BEGIN CERTIFICATE-----"
_END: Final = "-----END CERTIFICATE-----"


def certificate_end_s(path: Path) -> int | None:
    """Return when the first certificate of a PEM file expires, in seconds since 1970; None: it cannot be read."""
    try:
        _, (tag, text) = _elements(_fields(path)[_VALIDITY][1])
        form = "%y%m%d%H%M%SZ" if tag == _UTC_TIME else "%Y%m%d%H%M%SZ"
        return int(datetime.strptime(text.decode("ascii"), form).replace(tzinfo=UTC).timestamp())
    except (OSError, ValueError, IndexError):
        return None


def certificate_names(path: Path) -> list[str]:
    """Return the DNS names and IP addresses of the first certificate of a PEM file; none if it cannot be read."""
    try:
        return list(_alternative_names(_fields(path)))
    except (OSError, ValueError, IndexError):
        return []


def _fields(path: Path) -> list[tuple[int, bytes]]:
    """Return tag and content of each field of ``tbsCertificate`` (RFC 5280, section 4.1) after the version.

    Raises:
        OSError, ValueError, IndexError: the file cannot be read, or its first certificate is malformed.
    """
    with path.open(encoding="latin-1") as file:  # text before the certificate may have any encoding
        text = file.read(_MAX_FILE_BYTES)
    der = ssl.PEM_cert_to_DER_cert(text[text.index(_BEGIN) : text.index(_END) + len(_END)])
    fields = list(_elements(_content(_content(der))))
    return fields[1:] if fields[0][0] == _VERSION else fields


def _alternative_names(fields: list[tuple[int, bytes]]) -> Iterator[str]:
    for tag, content in fields:
        if tag != _EXTENSIONS:
            continue
        for _, extension in _elements(_content(content)):
            (_, kind), *_, (_, value) = _elements(extension)
            if kind != _SUBJECT_ALT_NAME:
                continue
            for form, name in _elements(_content(value)):
                if form == _DNS_NAME:
                    yield name.decode("ascii")
                elif form == _IP_ADDRESS:
                    yield str(ipaddress.ip_address(name))


def _content(der: bytes) -> bytes:
    """Return the content of a sequence.

    Raises:
        ValueError: the first element is none.
    """
    tag, content = next(_elements(der), (None, b""))
    if tag != _SEQUENCE:
        raise ValueError(f"expected the ASN.1 tag {_SEQUENCE:#x}, found {tag}")
    return content


def _elements(der: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield tag and content of each element."""
    at = 0
    while at < len(der):
        begin, length = at + 2, der[at + 1]
        if length >= 0x80:
            size = length & 0x7F
            length = int.from_bytes(der[begin : begin + size], "big")
            begin += size
        yield der[at], der[begin : begin + length]
        at = begin + length
