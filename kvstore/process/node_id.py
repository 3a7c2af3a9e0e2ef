"""Validation of node ids. They become parts of paths (sockets, volumes, logs), so only plain names are valid."""

from __future__ import annotations

import re
from typing import Final

from kvstore.core.errors import InvalidArgument

_NODE_ID: Final = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}")
_RESERVED: Final = "metadata"
"""Name of the metadata server's files, in a folder that it shares with nodes."""


def check_node_id(node_id: str) -> str:
    """Return a valid node id unchanged.

    Raises:
        InvalidArgument: not 1 to 64 letters, digits, ``.``, ``_`` and ``-``, a leading dot, or the reserved id ``metadata``.
    """
    if not is_plain(node_id):
        raise InvalidArgument(
            f"invalid node id {node_id!r}: use 1 to 64 letters, digits, '.', '_' and '-', without a leading dot"
        )
    if node_id == _RESERVED:
        raise InvalidArgument(f"node id {_RESERVED!r} is reserved for the metadata server; choose another id")
    return node_id


def is_plain(name: str) -> bool:
    """Whether a name has only the characters of a node id, which are safe in a path, a shell and a terminal."""
    return _NODE_ID.fullmatch(name) is not None
