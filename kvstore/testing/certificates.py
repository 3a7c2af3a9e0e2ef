"""Throw-away certificates for TLS tests: one authority, and one certificate of it that is good for 127.0.0.1 on both sides."""

from __future__ import annotations

import datetime as dt
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


@dataclass(frozen=True, slots=True)
class CertificateFiles:
    """PEM files."""

    ca: Path
    cert: Path
    key: Path


def make_certificates(folder: Path) -> CertificateFiles:
    """Makes an authority and a certificate for ``localhost`` and 127.0.0.1, valid for a day."""
    now = dt.datetime.now(dt.UTC)

    def certificate(name: str, issuer: str, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
            .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer)]))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - dt.timedelta(hours=1))
            .not_valid_after(now + dt.timedelta(days=1))
        )

    ca_key = ec.generate_private_key(ec.SECP256R1())
    ca = certificate("test authority", "test authority", ca_key).add_extension(
        x509.BasicConstraints(ca=True, path_length=None), critical=True
    )
    key = ec.generate_private_key(ec.SECP256R1())
    names = x509.SubjectAlternativeName([x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    leaf = certificate("localhost", "test authority", key).add_extension(names, critical=False)

    files = CertificateFiles(folder / "ca.pem", folder / "cert.pem", folder / "key.pem")
    pem = serialization.Encoding.PEM
    files.ca.write_bytes(ca.sign(ca_key, hashes.SHA256()).public_bytes(pem))
    files.cert.write_bytes(leaf.sign(ca_key, hashes.SHA256()).public_bytes(pem))
    files.key.touch(mode=0o600)
    files.key.write_bytes(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()))
    return files
