"""Which versions of vLLM the connectors are tested with. Its interfaces are experimental and change between versions."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata

from kvstore.core.errors import Unsupported

_log = logging.getLogger(__name__)
TESTED = ("0.32",)
"""Lines whose interfaces are tested."""
_LINES = ", ".join(f"{line}.*" for line in TESTED)


def check_version(installed: str, *, allow_untested: bool) -> None:
    """Check the version of vLLM.

    Args:
        installed: its version.
        allow_untested: the user takes the risk of another version; it is only logged.

    Raises:
        Unsupported: another version than the tested ones.
    """
    if _is_tested(installed):
        return
    if not allow_untested:
        raise Unsupported(
            "the connector is not tested with this version of vLLM; install a tested one, or set allow_untested_vllm",
            installed=installed,
            tested=_LINES,
        )
    _log.warning("untested version of vLLM (installed=%s, tested=%s)", installed, _LINES)


@contextmanager
def vllm_imports() -> Iterator[None]:
    """Around imports of vLLM: name the tested versions if another version lacks what is imported.

    Raises:
        Unsupported: an untested version lacks a module or a name.
    """
    try:
        yield
    except ImportError as error:
        try:
            installed = metadata.version("vllm")
        except metadata.PackageNotFoundError:
            raise error from None
        if _is_tested(installed):
            raise
        raise Unsupported(
            "this version of vLLM lacks what the connector imports; install a tested one", installed=installed, tested=_LINES
        ) from error


def _is_tested(installed: str) -> bool:
    return installed.partition("+")[0].split(".")[:2] in [line.split(".") for line in TESTED]
