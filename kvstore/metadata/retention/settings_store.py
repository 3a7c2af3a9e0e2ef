"""Operator settings that must outlive everything else: quotas, retention rules and path policy, in a small file beside the index.

The index is a hint and may be dropped at any time, so these settings are not kept in it. The file is JSON. A change writes it
as a whole (synced, then renamed), so a reader sees it before or after a change. Servers of one host change it one after the
other (``flock``) and notice each other's changes by its inode, time and size. Each read costs a ``stat`` of a few microseconds.

A file that cannot be read is not touched. The server keeps serving, logs the problem, and sends nodes no settings, so they keep
their last ones. It rejects changes until an operator has repaired or removed the file.

``FileSettings`` is for servers of one host. If several hosts share an index, the file is a copy: ``shared_settings``.
"""

from __future__ import annotations

import asyncio
import errno
import json
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, TypeAlias

from kvstore.core.errors import CapacityExceeded, Conflict, Unavailable
from kvstore.core.limits import MAX_COPIES, MAX_NAME_BYTES, MAX_QUOTAS, MAX_RULES
from kvstore.core.types import NamespaceId
from kvstore.process.atomic_file import only_writer, write_atomically

VERSION: Final = 2
MAX_FILE_BYTES: Final = 4 << 20
"""Several times the size of the maximum number of quotas and rules."""
NAMESPACE_BYTES: Final = 16
KNOWN_CHANGES: Final = 64
"""Number of changes by which settings are recognised as made from others. Settings that are older count as their origin."""
_CHANGE_BYTES: Final = 6
_DISK_FULL: Final = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@dataclass(frozen=True, slots=True)
class QuotaSetting:
    """Maximum bytes of payload that a tenant may hold in all nodes together; None: unlimited."""

    dram: int | None = None
    nvme: int | None = None

    def __bool__(self) -> bool:
        return self.dram is not None or self.nvme is not None


@dataclass(frozen=True, slots=True)
class RuleSetting:
    """Retention rule of a namespace.

    Attributes:
        ttl_ms: blocks that were not used for this time are evicted; 0: no limit.
        kept: whether blocks are not evicted, up to half of each tier of a node.
        copies: number of nodes whose volumes hold each durable block, 1 or 2.
    """

    ttl_ms: int = 0
    kept: bool = False
    copies: int = 1

    def __bool__(self) -> bool:
        return bool(self.ttl_ms or self.kept or self.copies > 1)


@dataclass(frozen=True, slots=True)
class OperatorSettings:
    """All quotas, by tenant, and all rules, by namespace.

    Attributes:
        path_policy: path policy of loads that name none; empty: the configured one.
        revision: number of changes that led to these settings.
        changes: ids of the last of these changes, the newest last. They tell whether other settings were made from these.
    """

    quotas: Mapping[str, QuotaSetting] = field(default_factory=dict)
    rules: Mapping[NamespaceId, RuleSetting] = field(default_factory=dict)
    path_policy: str = ""
    revision: int = 0
    changes: tuple[str, ...] = field(default=(), compare=False)

    def with_quota(self, tenant: str, quota: QuotaSetting) -> OperatorSettings:
        """A copy with another quota of one tenant; an unlimited quota is removed."""
        others = {name: known for name, known in self.quotas.items() if name != tenant}
        return replace(self, quotas={**others, tenant: quota} if quota else others)

    def with_rule(self, namespace: NamespaceId, rule: RuleSetting) -> OperatorSettings:
        """A copy with another rule of one namespace; an empty rule is removed."""
        others = {one: known for one, known in self.rules.items() if one != namespace}
        return replace(self, rules={**others, namespace: rule} if rule else others)

    def edited(self, edit: SettingsEdit) -> OperatorSettings:
        """These settings after a change; the revision grows if they differ."""
        after = edit(self)
        if after == self:
            return self
        changes = (*self.changes, secrets.token_hex(_CHANGE_BYTES))[-KNOWN_CHANGES:]
        return replace(after, revision=self.revision + 1, changes=changes)

    def descends_from(self, earlier: OperatorSettings) -> bool:
        """Whether these settings were made from earlier ones, or are the same."""
        if earlier == OperatorSettings() or (self, self.changes) == (earlier, earlier.changes):
            return True
        beyond = self.revision - earlier.revision
        if not earlier.changes:
            return beyond > 0
        return earlier.changes[-1] in self.changes or beyond >= max(1, len(self.changes))

    def encode(self) -> bytes:
        """Encode as the file's content."""
        quotas = {tenant: {"dram": quota.dram, "nvme": quota.nvme} for tenant, quota in sorted(self.quotas.items())}
        rules = {
            namespace.hex(): {"ttl_ms": one.ttl_ms, "kept": one.kept, "copies": one.copies}
            for namespace, one in sorted(self.rules.items())
        }
        content = {
            "version": VERSION,
            "revision": self.revision,
            "quotas": quotas,
            "namespaces": rules,
            "path_policy": self.path_policy,
            "changes": list(self.changes),
        }
        return json.dumps(content, indent=1).encode()

    @classmethod
    def decode(cls, raw: bytes) -> OperatorSettings:
        """Decode the file's content.

        Raises:
            ValueError: the content is invalid.
        """
        if len(raw) > MAX_FILE_BYTES:
            raise ValueError(f"larger than {MAX_FILE_BYTES} bytes")
        try:
            content = json.loads(raw)
        except RecursionError as error:
            raise ValueError("nested too deeply") from error
        if not isinstance(content, dict):
            raise ValueError("not a JSON object")  # noqa: TRY004  # like all invalid content
        if content.get("version") == 1:
            raise ValueError('version 1 has "pinned" for "kept"; rename the field and set "version" to 2')
        if content.get("version") != VERSION:
            raise ValueError(f"the version is not {VERSION}")
        return cls(
            {
                _tenant(name): QuotaSetting(_number(entry, "dram"), _number(entry, "nvme"))
                for name, entry in _entries(content, "quotas", MAX_QUOTAS)
            },
            {
                _namespace(name): RuleSetting(_number(entry, "ttl_ms") or 0, entry.get("kept") is True, _copies(entry))
                for name, entry in _entries(content, "namespaces", MAX_RULES)
            },
            _policy(content.get("path_policy", "")),
            _number(content, "revision") or 0,
            _changes(content.get("changes", [])),
        )


def _entries(found: dict[str, Any], name: str, limit: int) -> Iterator[tuple[str, dict[str, Any]]]:
    entries = found.get(name, {})
    if not isinstance(entries, dict) or len(entries) > limit:
        raise ValueError(f"{name} is not an object with at most {limit} entries")
    for key, entry in entries.items():
        if not isinstance(entry, dict):
            raise ValueError(f"{name}[{key!r}] is not an object")  # noqa: TRY004  # like all invalid content
        yield key, entry


def _policy(name: object) -> str:
    if not isinstance(name, str) or len(name) > MAX_NAME_BYTES or not name.isprintable():
        raise ValueError("path_policy is not a name")
    return name


def _changes(names: object) -> tuple[str, ...]:
    if not isinstance(names, list) or len(names) > KNOWN_CHANGES or not all(_is_change(name) for name in names):
        raise ValueError("changes is not a list of ids")
    return tuple(names)


def _is_change(name: object) -> bool:
    return isinstance(name, str) and len(name) == 2 * _CHANGE_BYTES


def _tenant(name: str) -> str:
    if len(name.encode()) > MAX_NAME_BYTES or not name.isprintable():  # a lone surrogate raises UnicodeEncodeError, a ValueError
        raise ValueError(f"{name[:64]!r} is not a valid tenant name")
    return name


def _namespace(name: str) -> NamespaceId:
    namespace = bytes.fromhex(name)
    if len(namespace) != NAMESPACE_BYTES:
        raise ValueError(f"{name[:64]!r} is not a namespace id")
    return NamespaceId(namespace)


def _number(entry: dict[str, Any], name: str) -> int | None:
    value = entry.get(name)
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**63):
        raise ValueError(f"{name} is not an integer from 0 to 2^63 - 1")
    return value


def _copies(entry: dict[str, Any]) -> int:
    copies = _number(entry, "copies") or 1
    if copies > MAX_COPIES:
        raise ValueError(f"copies is not an integer from 1 to {MAX_COPIES}")
    return copies


SettingsEdit: TypeAlias = "Callable[[OperatorSettings], OperatorSettings]"
"""Returns the new settings for the present ones. May be called again if others change the settings at the same time."""


class SettingsStore(ABC):
    """Contract: the settings in force, and how they are changed. Use on one event loop."""

    def __init__(self, path: Path) -> None:
        self.path = path
        """The file of this host."""
        self.problem = ""
        """Why the file cannot be read; empty: it can be read."""
        self.copy_problem = ""
        """Why the file could not take settings that are in force; empty: it has them."""

    @abstractmethod
    def read(self) -> OperatorSettings | None:
        """The settings in force; None: the file cannot be read (see ``problem``). Does not wait."""

    @abstractmethod
    async def change(self, edit: SettingsEdit) -> tuple[OperatorSettings, OperatorSettings]:
        """Change the settings.

        Args:
            edit: makes the change; its exceptions reach the caller, and nothing is changed.

        Returns:
            The settings before and after the change.

        Raises:
            Conflict: the file cannot be read.
            CapacityExceeded: the disk is full; nothing is changed.
            Unavailable: the settings cannot be written now.
        """

    @abstractmethod
    async def start(self) -> None:
        """Begin to follow changes by others."""

    @abstractmethod
    async def stop(self) -> None:
        """End what ``start`` began."""


class FileSettings(SettingsStore):
    """The settings file. Several processes of a host may use it."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._file_state: tuple[int, int, int] | None = None
        self._settings: OperatorSettings | None = OperatorSettings()

    def read(self) -> OperatorSettings | None:
        try:
            found = self.path.stat()
            file_state = (found.st_ino, found.st_mtime_ns, found.st_size)
            if file_state != self._file_state:
                with self.path.open("rb") as file:
                    raw = file.read(MAX_FILE_BYTES + 1)
                self._settings, self.problem = OperatorSettings.decode(raw), ""
                self._file_state = file_state
        except FileNotFoundError:
            self._settings, self.problem, self._file_state = OperatorSettings(), "", None
        except (OSError, ValueError) as error:
            self._settings, self.problem, self._file_state = None, str(error), None
        return self._settings

    async def change(self, edit: SettingsEdit) -> tuple[OperatorSettings, OperatorSettings]:
        return await asyncio.to_thread(self._write, lambda before: before.edited(edit))

    async def start(self) -> None:
        pass

    async def stop(self) -> None:
        pass

    async def keep(self, settings: OperatorSettings) -> None:
        """Write settings that others made, unless those of the file were made from them. The same errors as ``change``."""
        await asyncio.to_thread(self._write, lambda present: present if present.descends_from(settings) else settings)

    def _write(self, replaced: SettingsEdit) -> tuple[OperatorSettings, OperatorSettings]:
        try:
            with only_writer(self.path):
                present = FileSettings(self.path)
                before = present.read()
                if before is None:
                    raise unreadable(self.path, present.problem)
                after = replaced(before)
                if after is not before:
                    write_atomically(self.path, after.encode())
                return before, after
        except OSError as error:
            if error.errno in _DISK_FULL:
                raise CapacityExceeded("no space on disk for the settings file", path=self.path) from error
            raise Unavailable("the settings file cannot be written", path=self.path, reason=error) from error


def unreadable(path: Path, problem: str) -> Conflict:
    """The error of calls that need a file that cannot be read."""
    return Conflict("the settings file cannot be read: repair or remove it", path=path, reason=problem)
