"""The last retention rules of a node, in a file on its first volume: after a restart, they apply without the metadata server.

Quota shares are not kept: they depend on the blocks that all nodes hold, and may have changed.

The file is a header {magic, xxh3-64 of the rest} and a ``Retention`` message that has rules only.
"""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import xxhash
from google.protobuf.message import DecodeError

from kvproto.v1.metadata_pb2 import NamespaceRule, Retention
from kvstore.core.limits import MAX_RULES
from kvstore.process.atomic_file import write_atomically

NAME: Final = "rules"
_HEADER: Final = struct.Struct("<8sQ")
_MAGIC: Final = b"kvrules1"
_MAX_BYTES: Final = _HEADER.size + MAX_RULES * 64
_ID_BYTES: Final = 16


def write_rules(path: Path, rules: Iterable[NamespaceRule]) -> None:
    """Write the rules.

    Raises:
        OSError: they could not be written; the earlier file is unchanged.
    """
    body = Retention(rules=rules).SerializeToString()
    write_atomically(path, _HEADER.pack(_MAGIC, xxhash.xxh3_64_intdigest(body)) + body)


def read_rules(path: Path) -> list[NamespaceRule]:
    """Read the rules. Returns empty rules if the file does not exist.

    Raises:
        ValueError: the file is damaged, or of another kind.
        OSError: it cannot be read.
    """
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return []
    with os.fdopen(file, "rb") as opened:
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode) or not _HEADER.size <= found.st_size <= _MAX_BYTES:
            raise ValueError("not a regular file of a valid size")
        raw = opened.read(_MAX_BYTES)
    if len(raw) < _HEADER.size:
        raise ValueError("truncated")
    magic, digest = _HEADER.unpack_from(raw)
    body = raw[_HEADER.size :]
    if magic != _MAGIC or xxhash.xxh3_64_intdigest(body) != digest:
        raise ValueError("wrong magic or checksum")
    try:
        rules = list(Retention.FromString(body).rules)
    except DecodeError as error:
        raise ValueError("not decodable") from error
    if len(rules) > MAX_RULES or any(len(rule.namespace_id) != _ID_BYTES for rule in rules):
        raise ValueError("invalid rules")
    return rules
