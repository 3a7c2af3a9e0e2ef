"""The rules of namespaces that a node heard last, kept on its first volume: pins hold from its start on, whoever is away then.

Shares of quotas are not kept: they are made of what nodes hold, and may be others by then.

The file is a header {magic, xxh3-64 of the rest} and a ``Retention`` that has rules alone.
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
_MOST: Final = _HEADER.size + MAX_RULES * 64
_ID_BYTES: Final = 16


def write_rules(path: Path, rules: Iterable[NamespaceRule]) -> None:
    """Keeps rules.

    Raises:
        OSError: they could not be written; those of before are there.
    """
    body = Retention(rules=rules).SerializeToString()
    write_atomically(path, _HEADER.pack(_MAGIC, xxhash.xxh3_64_intdigest(body)) + body)


def read_rules(path: Path) -> list[NamespaceRule]:
    """The rules kept; none where there is no file.

    Raises:
        ValueError: it is damaged, or none of ours.
        OSError: it cannot be read.
    """
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return []
    with os.fdopen(file, "rb") as opened:
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode) or not _HEADER.size <= found.st_size <= _MOST:
            raise ValueError("it has not the size or kind that it can have")
        raw = opened.read(_MOST)
    if len(raw) < _HEADER.size:
        raise ValueError("it is cut short")
    magic, digest = _HEADER.unpack_from(raw)
    body = raw[_HEADER.size :]
    if magic != _MAGIC or xxhash.xxh3_64_intdigest(body) != digest:
        raise ValueError("its checksum is another")
    try:
        rules = list(Retention.FromString(body).rules)
    except DecodeError as error:
        raise ValueError("it cannot be decoded") from error
    if len(rules) > MAX_RULES or any(len(rule.namespace_id) != _ID_BYTES for rule in rules):
        raise ValueError("it has rules that nobody can have given")
    return rules
