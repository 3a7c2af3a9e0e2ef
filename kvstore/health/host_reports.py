"""Findings that any process can make about its own host: certificates and file systems."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from kvstore.health import codes
from kvstore.health.certificate_file import certificate_end_s
from kvstore.health.cluster import FileSystem
from kvstore.health.findings import HealthFinding
from kvstore.process.tls import TlsConfig

EXPIRES_S: Final = 14 * 86_400.0
"""A certificate that expires within this time is reported."""
_READ_AGAIN_S: Final = 60.0
_DAY_S: Final = 86_400


def file_system(path: Path) -> FileSystem | None:
    """Return the space on the file system of a path; None: it cannot be read."""
    try:
        found = os.statvfs(path)
    except OSError:
        return None
    return FileSystem(found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize)


class CertificateWatch:
    """The expiry of a process's own certificate. The file is read at most once per minute.

    Args:
        tls: TLS files of the process; None: plain text.
        owner: whose certificate it is, for people, e.g. ``"node host-1"``.
        wall_s: time since 1970.
    """

    def __init__(self, tls: TlsConfig | None, owner: str, wall_s: Callable[[], float] = time.time) -> None:
        self._path = None if tls is None else tls.cert
        self._owner = owner
        self._wall_s = wall_s
        self._read_s = -_READ_AGAIN_S
        self._end_s: float | None = None

    def findings(self) -> Iterator[HealthFinding]:
        """Report a certificate that has expired, or expires within two weeks."""
        if self._path is None:
            return
        now_s = self._wall_s()
        if abs(now_s - self._read_s) >= _READ_AGAIN_S:
            self._read_s, self._end_s = now_s, certificate_end_s(self._path)
        if self._end_s is None or self._end_s - now_s > EXPIRES_S:
            return
        until = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(self._end_s))
        if self._end_s <= now_s:
            yield HealthFinding(
                codes.CERTIFICATE_EXPIRED, "", f"The certificate of {self._owner} expired on {until} ({self._path})."
            )
            return
        days = int((self._end_s - now_s) // _DAY_S)
        facts = f"The certificate of {self._owner} expires in {days} days, on {until} ({self._path})."
        yield HealthFinding(codes.CERTIFICATE_EXPIRES, "", facts)
