"""Bearer tokens: the file of a server's tokens, and the token that a client sends.

One token per line::

    # role     name    token (at least 16 characters)
    operator   alice   c2b1…
    read       grafana 77d0…
    node       host-1  03fe…
    engine     pool-a  5b1c…
    tenant     acme    9a44…

``read`` and ``operator`` are for people, the other roles for machines; ``kvstore.rpc.auth.interceptor`` has their permissions.
Logs show the name. A tenant's name is the ``tenant`` of its namespaces' specs. Tokens are kept as digests, compared in
constant time and never logged. A changed file is read again within a second; if that fails, the previous content stays valid.
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
MIN_CHARACTERS: Final = 16
MAX_CHARACTERS: Final = 512
CHECK_INTERVAL_S: Final = 1.0
"""Interval between checks of a file. A removed token stays valid that long."""
_NAME: Final = re.compile(r"[A-Za-z0-9_.@:-]{1,64}")
_TOKEN: Final = re.compile(r"[!-~]+")
_GROUP_AND_OTHERS: Final = 0o077
_Stamp = tuple[int, int, int, int]


class AccessRole(StrEnum):
    """Role of a caller; ``interceptor.GRANTED`` has its permissions."""

    READ = "read"
    OPERATOR = "operator"
    NODE = "node"
    ENGINE = "engine"
    TENANT = "tenant"


@dataclass(frozen=True, slots=True)
class Principal:
    """An authenticated caller."""

    name: str
    role: AccessRole


LOCAL: Final = Principal("local", AccessRole.OPERATOR)
"""The caller on a server without a token file, which listens on this host only."""


class TokenTable:
    """The tokens of one version of a file."""

    def __init__(self, known: Sequence[tuple[bytes, Principal]]) -> None:
        self._known = tuple(known)

    @classmethod
    def parse(cls, content: bytes, path: Path) -> TokenTable:
        """Parse a token file.

        Raises:
            InvalidArgument: a line is invalid. The error has its number, never its content.
        """
        known: list[tuple[bytes, Principal]] = []
        for number, line in enumerate(content.decode(errors="replace").splitlines(), start=1):
            if line.strip() and not line.lstrip().startswith("#"):
                known.append(_parse(line.split(), path, number))
        if not known or len(known) > MAX_TOKENS:
            raise InvalidArgument(f"a token file must have 1 to {MAX_TOKENS} tokens", file=path, found=len(known))
        if len({digest for digest, _ in known}) < len(known):
            raise InvalidArgument("a token is listed twice; each token must belong to one caller", file=path)
        return cls(known)

    def caller(self, token: str) -> Principal | None:
        """The caller with this token; None: unknown token. Takes constant time."""
        asked = _digest(token)
        found = None
        for digest, caller in self._known:
            if hmac.compare_digest(asked, digest):
                found = caller
        return found


class WatchedFile(Generic[T]):
    """A file that is read again after it has changed. Thread-safe.

    Args:
        path: the file.
        parse: parses its content; raises ``InvalidArgument`` if that is invalid.
        now_s: a monotonic clock.

    Raises:
        InvalidArgument: the file cannot be read, or its content is invalid.
    """

    def __init__(self, path: Path, parse: Callable[[bytes, Path], T], now_s: Callable[[], float] = time.monotonic) -> None:
        self.path = path
        self._parse = parse
        self._now_s = now_s
        self._stamp, self._value = self._read()
        self._checked_s = now_s()

    def get(self) -> T:
        """The parsed content; the previous one if the file cannot be read or is invalid."""
        now_s = self._now_s()
        if now_s - self._checked_s < CHECK_INTERVAL_S:
            return self._value
        self._checked_s = now_s
        try:
            if _stamp(os.stat(self.path)) != self._stamp:
                self._stamp, self._value = self._read()
                logger.info("file reloaded: %s", self.path)
        except (OSError, InvalidArgument) as error:
            _limited.warning("reload failed, previous content kept: %s", error)
        return self._value

    def _read(self) -> tuple[_Stamp, T]:
        content, status = _content(self.path)
        if status.st_mode & _GROUP_AND_OTHERS:
            logger.warning("file accessible to group or others: %s; run chmod 600", self.path)
        return _stamp(status), self._parse(content, self.path)


def is_caller_name(text: str) -> bool:
    """Whether a text can be the name of a token."""
    return _NAME.fullmatch(text) is not None


def tokens_file(path: Path) -> WatchedFile[TokenTable]:
    """A server's token file.

    Raises:
        InvalidArgument: see ``WatchedFile``.
    """
    return WatchedFile(path, TokenTable.parse)


class TokenSource:
    """The token that a client sends: a string, or the content of a file. Its repr does not reveal it."""

    def __init__(self, token: str = "", file: Path | None = None) -> None:
        """Exactly one of ``token`` and ``file`` is required.

        Raises:
            InvalidArgument: both or neither are set, or the token is invalid.
        """
        if bool(token) == (file is not None):
            raise InvalidArgument("exactly one of token and token_file must be set")
        self._file = None if file is None else WatchedFile(file, _one_token)
        self._token = "" if file is not None else _checked(token)

    @classmethod
    def of(cls, token: str = "", file: Path | None = None) -> TokenSource | None:
        """As the constructor; None if neither argument is set."""
        return cls(token, file) if token or file is not None else None

    def get(self) -> str:
        """The current token."""
        return self._token if self._file is None else self._file.get()

    @property
    def file(self) -> Path | None:
        """The file with the token; None: the token was passed as a string."""
        return None if self._file is None else self._file.path

    def __repr__(self) -> str:
        return "TokenSource(…)"


def _one_token(content: bytes, path: Path) -> str:
    words = content.decode(errors="replace").split()
    if len(words) != 1:
        raise InvalidArgument(f"{path} holds no valid token: expected exactly one word, found {len(words)}")
    return _checked(words[0], f"{path} holds no valid token")


def _checked(token: str, complaint: str = "invalid token") -> str:
    if not MIN_CHARACTERS <= len(token) <= MAX_CHARACTERS or not _TOKEN.fullmatch(token):
        found = f"found {len(token)}" if _TOKEN.fullmatch(token) else "found other characters"
        bounds = f"{MIN_CHARACTERS} to {MAX_CHARACTERS} ASCII characters without spaces"
        raise InvalidArgument(f"{complaint}: {bounds}, {found}")
    return token


def _content(path: Path) -> tuple[bytes, os.stat_result]:
    """Content and status of a file. O_NONBLOCK: opening a pipe would wait for a writer.

    Raises:
        InvalidArgument: the file cannot be read, is not a regular file, or is too long.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise InvalidArgument("the tokens cannot be read: not a regular file", file=path)
            with open(descriptor, "rb", closefd=False) as file:
                content = file.read(MAX_FILE_BYTES + 1)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise InvalidArgument(f"the tokens cannot be read: {error.strerror}", file=path) from error
    if len(content) > MAX_FILE_BYTES:
        raise InvalidArgument("the token file is too long", file=path, limit_bytes=MAX_FILE_BYTES)
    return content, status


def _stamp(status: os.stat_result) -> _Stamp:
    """Identity of a file's version. Kubernetes replaces a link, editors replace the file."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _parse(words: Sequence[str], path: Path, number: int) -> tuple[bytes, Principal]:
    where = {"file": path, "line": number}
    if len(words) != 3:
        raise InvalidArgument("a line of a token file must have a role, a name and a token", **where)
    role, name, token = words
    if role not in set(AccessRole):
        raise InvalidArgument(f"the role must be one of {', '.join(AccessRole)}", **where)
    if not _NAME.fullmatch(name):
        raise InvalidArgument("the name must have 1 to 64 letters, digits and _ . @ : -", **where)
    if not MIN_CHARACTERS <= len(token) <= MAX_CHARACTERS or not token.isascii():
        raise InvalidArgument(
            f"the token must have {MIN_CHARACTERS} to {MAX_CHARACTERS} ASCII characters, found {len(token)}", **where
        )
    return _digest(token), Principal(name, AccessRole(role))


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode(errors="replace")).digest()
