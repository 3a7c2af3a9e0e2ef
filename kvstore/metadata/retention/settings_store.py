"""What operators ordered and what must outlive all else: tenants' quotas, rules of namespaces. A small file beside the index.

The index is a hint, and may be dropped at any time; orders are not, so they are not kept in it. The file is JSON, written anew
as a whole (synced, then renamed), so that it is there before or after a change and never in between; several workers change it
one after the other (``flock``) and see each other's changes by its time and number. It is looked at whenever somebody asks: a
few microseconds.

A file that cannot be read is left alone: the server serves, says so in its log, tells nodes nothing, which therefore go on as
they did, and refuses changes until somebody has mended or removed it.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from kvstore.core.errors import CapacityExceeded, Conflict, Unavailable
from kvstore.core.limits import MAX_NAME_BYTES, MAX_QUOTAS, MAX_RULES
from kvstore.core.types import NamespaceId
from kvstore.process.atomic_file import write_atomically

VERSION: Final = 1
MAX_FILE_BYTES: Final = 4 << 20
"""Several times what all quotas and rules that there may be take."""
NAMESPACE_BYTES: Final = 16
_NO_ROOM: Final = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@dataclass(frozen=True, slots=True)
class QuotaSetting:
    """What a tenant may hold in all nodes together, in bytes of payload; None: as much as there is."""

    dram: int | None = None
    nvme: int | None = None

    def __bool__(self) -> bool:
        return self.dram is not None or self.nvme is not None


@dataclass(frozen=True, slots=True)
class RuleSetting:
    """What may stay of a namespace."""

    ttl_ms: int = 0
    """Blocks that were not used for so long leave; 0: never for that."""
    pinned: bool = False

    def __bool__(self) -> bool:
        return bool(self.ttl_ms or self.pinned)


@dataclass(frozen=True, slots=True)
class OperatorSettings:
    """All of them."""

    quotas: Mapping[str, QuotaSetting] = field(default_factory=dict)
    """By tenant."""
    rules: Mapping[NamespaceId, RuleSetting] = field(default_factory=dict)
    """By namespace."""

    def with_quota(self, tenant: str, quota: QuotaSetting) -> OperatorSettings:
        """The same with another quota of one tenant; one without any bound: none."""
        others = {name: known for name, known in self.quotas.items() if name != tenant}
        return replace(self, quotas={**others, tenant: quota} if quota else others)

    def with_rule(self, namespace: NamespaceId, rule: RuleSetting) -> OperatorSettings:
        """The same with another rule of one namespace; one that says nothing: none."""
        others = {one: known for one, known in self.rules.items() if one != namespace}
        return replace(self, rules={**others, namespace: rule} if rule else others)

    def encode(self) -> bytes:
        """As the file has it."""
        quotas = {tenant: {"dram": quota.dram, "nvme": quota.nvme} for tenant, quota in sorted(self.quotas.items())}
        rules = {namespace.hex(): {"ttl_ms": one.ttl_ms, "pinned": one.pinned} for namespace, one in sorted(self.rules.items())}
        return json.dumps({"version": VERSION, "quotas": quotas, "namespaces": rules}, indent=1).encode()

    @classmethod
    def decode(cls, raw: bytes) -> OperatorSettings:
        """From the file.

        Raises:
            ValueError: it is none of ours.
        """
        if len(raw) > MAX_FILE_BYTES:
            raise ValueError("too large for a file of orders")
        try:
            found = json.loads(raw)
        except RecursionError as error:
            raise ValueError("nested too deeply") from error
        if not isinstance(found, dict) or found.get("version") != VERSION:
            raise ValueError("of another version, or no file of orders")
        return cls(
            {
                _tenant(name): QuotaSetting(_number(said, "dram"), _number(said, "nvme"))
                for name, said in _part(found, "quotas", MAX_QUOTAS)
            },
            {
                _namespace(name): RuleSetting(_number(said, "ttl_ms") or 0, said.get("pinned") is True)
                for name, said in _part(found, "namespaces", MAX_RULES)
            },
        )


def _part(found: dict[str, Any], name: str, most: int) -> Iterator[tuple[str, dict[str, Any]]]:
    part = found.get(name, {})
    if not isinstance(part, dict) or len(part) > most:
        raise ValueError(f"{name} are none, or more than {most}")
    for key, said in part.items():
        if not isinstance(said, dict):
            raise ValueError(f"{name} of {key!r} are not as they are written")  # noqa: TRY004  # as all else that is wrong
        yield key, said


def _tenant(name: str) -> str:
    if len(name.encode()) > MAX_NAME_BYTES or not name.isprintable():  # a lone surrogate cannot be encoded: a ValueError, too
        raise ValueError(f"{name[:64]!r} is no tenant's name")
    return name


def _namespace(name: str) -> NamespaceId:
    namespace = bytes.fromhex(name)
    if len(namespace) != NAMESPACE_BYTES:
        raise ValueError(f"{name[:64]!r} is no id of a namespace")
    return NamespaceId(namespace)


def _number(said: dict[str, Any], name: str) -> int | None:
    value = said.get(name)
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**63):
        raise ValueError(f"{name} is no number that it can be")
    return value


class SettingsStore:
    """The file. ``now`` on one thread, ``change`` on another; several processes may have it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._seen: tuple[int, int, int] | None = None
        self._orders: OperatorSettings | None = OperatorSettings()
        self.wrong = ""
        """Why it cannot be read; empty: it can."""

    def now(self) -> OperatorSettings | None:
        """The orders in force; None: they cannot be read (``wrong`` says why)."""
        try:
            found = self.path.stat()
            seen = (found.st_ino, found.st_mtime_ns, found.st_size)
            if seen != self._seen:
                with self.path.open("rb") as file:
                    raw = file.read(MAX_FILE_BYTES + 1)
                self._orders, self.wrong = OperatorSettings.decode(raw), ""
                self._seen = seen
        except FileNotFoundError:
            self._orders, self.wrong, self._seen = OperatorSettings(), "", None
        except (OSError, ValueError) as error:
            self._orders, self.wrong, self._seen = None, str(error), None
        return self._orders

    def change(self, changed: Callable[[OperatorSettings], OperatorSettings]) -> tuple[OperatorSettings, OperatorSettings]:
        """Changes the orders: what they were, and what they are. Blocks for I/O.

        Args:
            changed: of the orders that there are, those that are to be; what it raises goes on to the caller.

        Raises:
            Conflict: the file cannot be read.
            CapacityExceeded: there is no room on disk; nothing is changed.
            Unavailable: it cannot be written; nothing is changed.
        """
        try:
            with self._alone():
                before = SettingsStore(self.path)
                orders = before.now()
                if orders is None:
                    raise Conflict("the file of orders cannot be read: mend or remove it", path=self.path, why=before.wrong)
                after = changed(orders)
                if after != orders:
                    write_atomically(self.path, after.encode())
                return orders, after
        except OSError as error:
            if error.errno in _NO_ROOM:
                raise CapacityExceeded("no room on disk for orders", path=self.path) from error
            raise Unavailable("orders cannot be written", path=self.path, reason=error) from error

    @contextmanager
    def _alone(self) -> Iterator[None]:
        lock = os.open(self.path.with_name(self.path.name + ".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)  # held for one small write at a time
            yield
        finally:
            os.close(lock)
