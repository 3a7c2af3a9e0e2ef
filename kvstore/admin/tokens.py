"""Who may do what: bearer tokens from a file.

A line each::

    # role     name    token (16 characters at least)
    operator   alice   c2b1…
    read       grafana 77d0…

``read`` looks, ``operator`` changes things too. The name is what the audit log says. Tokens are kept as digests, compared in
constant time and never logged. The file is read at start: after a change, start the server again.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import re
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

from kvstore.core.errors import InvalidArgument

logger = logging.getLogger(__name__)

MAX_FILE_BYTES: Final = 1 << 20
MAX_TOKENS: Final = 1_000
LEAST_CHARACTERS: Final = 16
MOST_CHARACTERS: Final = 512
_NAME: Final = re.compile(r"[A-Za-z0-9_.@:-]{1,64}")
_OTHERS: Final = 0o077


class Role(StrEnum):
    """What a caller may do."""

    READ = "read"
    OPERATOR = "operator"


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks."""

    name: str
    role: Role


LOCAL: Final = Caller("local", Role.OPERATOR)
"""Whoever is on this host, where there are no tokens."""


class Tokens:
    """The tokens of a file."""

    def __init__(self, known: Sequence[tuple[bytes, Caller]]) -> None:
        self._known = tuple(known)

    @classmethod
    def read(cls, path: Path) -> Tokens:
        """Reads a file.

        Raises:
            InvalidArgument: it cannot be read, or a line is none; the line's number is told, never its content.
        """
        content, mode = _content(path)
        if mode & _OTHERS:
            logger.warning("%s can be read or written by others than its owner: chmod 600 it", path)
        known: list[tuple[bytes, Caller]] = []
        for number, line in enumerate(content.decode(errors="replace").splitlines(), start=1):
            if line.strip() and not line.lstrip().startswith("#"):
                known.append(_parse(line.split(), path, number))
        if not known or len(known) > MAX_TOKENS:
            raise InvalidArgument(f"a file of tokens has 1 to {MAX_TOKENS}", file=path, got=len(known))
        if len({digest for digest, _ in known}) < len(known):
            raise InvalidArgument("a token is there twice: who it stands for cannot be told", file=path)
        return cls(known)

    def caller(self, token: str) -> Caller | None:
        """Whose token it is; None: nobody's. Takes the same time for each, whatever it begins with."""
        asked = _digest(token)
        found = None
        for digest, caller in self._known:
            if hmac.compare_digest(asked, digest):
                found = caller
        return found


def _content(path: Path) -> tuple[bytes, int]:
    """What a file holds, and its mode. Whatever else has the name is not waited for: nobody may ever write to a pipe.

    Raises:
        InvalidArgument: it cannot be read, is no regular file, or is too long.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        try:
            mode = os.fstat(descriptor).st_mode
            if not stat.S_ISREG(mode):
                raise InvalidArgument("the tokens cannot be read: this is no regular file", file=path)
            with open(descriptor, "rb", closefd=False) as file:
                content = file.read(MAX_FILE_BYTES + 1)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise InvalidArgument(f"the tokens cannot be read: {error.strerror}", file=path) from error
    if len(content) > MAX_FILE_BYTES:
        raise InvalidArgument("the file of tokens is too long", file=path, limit_bytes=MAX_FILE_BYTES)
    return content, mode


def _parse(words: Sequence[str], path: Path, number: int) -> tuple[bytes, Caller]:
    where = {"file": path, "line": number}
    if len(words) != 3:
        raise InvalidArgument("a line of tokens takes a role, a name and a token", **where)
    role, name, token = words
    if role not in set(Role):
        raise InvalidArgument("a role is read or operator", **where)
    if not _NAME.fullmatch(name):
        raise InvalidArgument("a name takes 1 to 64 letters, digits and _ . @ : -", **where)
    if not LEAST_CHARACTERS <= len(token) <= MOST_CHARACTERS or not token.isascii():
        raise InvalidArgument(f"a token takes {LEAST_CHARACTERS} to {MOST_CHARACTERS} ASCII characters", **where)
    return _digest(token), Caller(name, Role(role))


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode(errors="replace")).digest()
