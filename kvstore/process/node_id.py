"""What may name a node. Node ids become parts of paths (sockets, volumes, logs), so that only plain names pass."""

from __future__ import annotations

import re
from typing import Final

from kvstore.core.errors import InvalidArgument

_NODE_ID: Final = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}")
_TAKEN: Final = "metadata"
"""Names the metadata server's own files in a folder that it shares with nodes."""


def check_node_id(node_id: str) -> str:
    """Returns ``node_id`` if it may name a node.

    Raises:
        InvalidArgument: it is not 1 to 64 letters, digits, ``.``, ``_`` and ``-``, begins with a dot, or is ``metadata``.
    """
    if not is_plain(node_id):
        raise InvalidArgument(
            f"a node id takes 1 to 64 letters, digits, '.', '_' and '-', and does not begin with a dot: not {node_id!r}"
        )
    if node_id == _TAKEN:
        raise InvalidArgument(f"no node is called {_TAKEN!r}: the metadata server has that name")
    return node_id


def is_plain(name: str) -> bool:
    """Whether a name has the characters of a node's id and no others: safe in a path, a shell, a terminal."""
    return _NODE_ID.fullmatch(name) is not None
