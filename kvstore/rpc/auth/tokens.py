"""Who may do what: bearer tokens from a file, for whoever serves; and the token that whoever asks shows.

A line each::

    # role     name    token (16 characters at least)
    operator   alice   c2b1…
    read       grafana 77d0…
    node       host-1  03fe…
    engine     pool-a  5b1c…
    tenant     acme    9a44…

``read`` looks, ``operator`` does everything; the others are for machines (``kvstore.rpc.auth.interceptor``). The name is what
logs say; that of a tenant is the ``tenant`` of its namespaces' specs. Tokens are kept as digests, compared in constant time and
never logged. A file that changes is read again, at most once a second; while it cannot be read, what was read before holds.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import re
import stat
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final, Generic, TypeVar

from kvstore.core.errors import InvalidArgument
from kvstore.observe.limited_log import LimitedLog

T = TypeVar("T")
logger = logging.getLogger(__name__)
_limited = LimitedLog(logger)

MAX_FILE_BYTES: Final = 1 << 20
MAX_TOKENS: Final = 1_000
LEAST_CHARACTERS: Final = 16
MOST_CHARACTERS: Final = 512
LOOK_S: Final = 1.0
"""A file is looked at so often at most: a token that is taken out works so much longer."""
_NAME: Final = re.compile(r"[A-Za-z0-9_.@:-]{1,64}")
_TOKEN: Final = re.compile(r"[!-~]+")
_OTHERS: Final = 0o077
_Stamp = tuple[int, int, int, int]


class Role(StrEnum):
    """What a caller may do."""

    READ = "read"
    OPERATOR = "operator"
    NODE = "node"
    ENGINE = "engine"
    TENANT = "tenant"


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks."""

    name: str
    role: Role


LOCAL: Final = Caller("local", Role.OPERATOR)
"""Whoever is on this host, where there are no tokens."""


class Tokens:
    """The tokens of a file, as it was."""

    def __init__(self, known: Sequence[tuple[bytes, Caller]]) -> None:
        self._known = tuple(known)

    @classmethod
    def parse(cls, content: bytes, path: Path) -> Tokens:
        """What a file says.

        Raises:
            InvalidArgument: a line is none; its number is told, never its content.
        """
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


class Watched(Generic[T]):
    """A file that is read again when it has changed. May be used from any thread: a look more does no harm.

    Args:
        path: the file.
        parse: what it means; raises ``InvalidArgument`` where it means nothing.
        now_s: a monotonic clock.

    Raises:
        InvalidArgument: it cannot be read, or means nothing.
    """

    def __init__(self, path: Path, parse: Callable[[bytes, Path], T], now_s: Callable[[], float] = time.monotonic) -> None:
        self.path = path
        self._parse = parse
        self._now_s = now_s
        self._stamp, self._value = self._read()
        self._looked_s = now_s()

    def get(self) -> T:
        """What it says now; while it cannot be read or means nothing, what it said before."""
        now_s = self._now_s()
        if now_s - self._looked_s < LOOK_S:
            return self._value
        self._looked_s = now_s
        try:
            if _stamp(os.stat(self.path)) != self._stamp:
                self._stamp, self._value = self._read()
                logger.info("%s has changed and was read again", self.path)
        except (OSError, InvalidArgument) as error:
            _limited.warning("what was read before holds: %s", error)
        return self._value

    def _read(self) -> tuple[_Stamp, T]:
        content, status = _content(self.path)
        if status.st_mode & _OTHERS:
            logger.warning("%s can be read or written by others than its owner: chmod 600 it", self.path)
        return _stamp(status), self._parse(content, self.path)


def tokens_file(path: Path) -> Watched[Tokens]:
    """The tokens that a server knows.

    Raises:
        InvalidArgument: as ``Watched``.
    """
    return Watched(path, Tokens.parse)


class Shown:
    """The token that a caller shows: a text, or what a file holds. Printing it does not show it."""

    def __init__(self, token: str = "", file: Path | None = None) -> None:
        """One of both.

        Raises:
            InvalidArgument: both or neither, or it cannot be a token.
        """
        if bool(token) == (file is not None):
            raise InvalidArgument("a token is given as it is, or in a file")
        self._file = None if file is None else Watched(file, _one_token)
        self._token = "" if file is not None else _checked(token)

    @classmethod
    def of(cls, token: str = "", file: Path | None = None) -> Shown | None:
        """As the constructor; None where neither is given."""
        return cls(token, file) if token or file is not None else None

    def get(self) -> str:
        """The token, as it is now."""
        return self._token if self._file is None else self._file.get()

    @property
    def file(self) -> Path | None:
        """The file that holds the token; None: it was given as a text."""
        return None if self._file is None else self._file.path

    def __repr__(self) -> str:
        return "Shown(…)"


def _one_token(content: bytes, path: Path) -> str:
    words = content.decode(errors="replace").split()
    if len(words) != 1:
        raise InvalidArgument(f"{path} holds no valid token: one word alone in the file, found {len(words)}")
    return _checked(words[0], f"{path} holds no valid token")


def _checked(token: str, complaint: str = "this is no valid token") -> str:
    if not LEAST_CHARACTERS <= len(token) <= MOST_CHARACTERS or not _TOKEN.fullmatch(token):
        found = f"found {len(token)}" if _TOKEN.fullmatch(token) else "found others"
        bounds = f"{LEAST_CHARACTERS} to {MOST_CHARACTERS} ASCII characters without spaces"
        raise InvalidArgument(f"{complaint}: {bounds}, {found}")
    return token


def _content(path: Path) -> tuple[bytes, os.stat_result]:
    """What a file holds, and its status. Whatever else has the name is not waited for: nobody may ever write to a pipe.

    Raises:
        InvalidArgument: it cannot be read, is no regular file, or is too long.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise InvalidArgument("the tokens cannot be read: this is no regular file", file=path)
            with open(descriptor, "rb", closefd=False) as file:
                content = file.read(MAX_FILE_BYTES + 1)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise InvalidArgument(f"the tokens cannot be read: {error.strerror}", file=path) from error
    if len(content) > MAX_FILE_BYTES:
        raise InvalidArgument("the file of tokens is too long", file=path, limit_bytes=MAX_FILE_BYTES)
    return content, status


def _stamp(status: os.stat_result) -> _Stamp:
    """What differs once a file was replaced or written: Kubernetes swaps a link, editors write anew."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _parse(words: Sequence[str], path: Path, number: int) -> tuple[bytes, Caller]:
    where = {"file": path, "line": number}
    if len(words) != 3:
        raise InvalidArgument("a line of a token file is a role, a name and a token", **where)
    role, name, token = words
    if role not in set(Role):
        raise InvalidArgument(f"a role is one of {', '.join(Role)}", **where)
    if not _NAME.fullmatch(name):
        raise InvalidArgument("a name takes 1 to 64 letters, digits and _ . @ : -", **where)
    if not LEAST_CHARACTERS <= len(token) <= MOST_CHARACTERS or not token.isascii():
        raise InvalidArgument(f"a token is {LEAST_CHARACTERS} to {MOST_CHARACTERS} ASCII characters, found {len(token)}", **where)
    return _digest(token), Caller(name, Role(role))


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode(errors="replace")).digest()
