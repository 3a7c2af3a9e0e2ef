"""Which versions of LMCache the adapter is tested with. The interface has grown between versions."""

from __future__ import annotations

from importlib import metadata

from kvstore.core.errors import InvalidArgument, Unsupported

TESTED = ("0.5.6",)
"""Versions whose interface and objects are tested."""
OBJECT_FORMAT = "0.5"
"""Format of LMCache's objects, part of each namespace: versions in ``TESTED`` that share it exchange objects."""


def check_version(installed: str | None = None) -> None:
    """Check the version of LMCache.

    Args:
        installed: its version; None: that of the installed package.

    Raises:
        Unsupported: another version than the tested ones.
        InvalidArgument: LMCache is not installed.
    """
    if installed is None:
        try:
            installed = metadata.version("lmcache")
        except metadata.PackageNotFoundError as error:
            raise InvalidArgument("LMCache is not installed; pip install lmcache", tested=", ".join(TESTED)) from error
    if installed.partition("+")[0] not in TESTED:
        raise Unsupported(
            "the adapter is not tested with this version of LMCache; install a tested one",
            installed=installed,
            tested=", ".join(TESTED),
        )
