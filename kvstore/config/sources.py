"""Sources of configuration values, and the source of each effective value."""

from __future__ import annotations

import difflib
import os
import stat
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_origin

from pydantic import BaseModel, SecretStr, ValidationError

from kvstore.config.client import ClusterSection
from kvstore.config.model import Config
from kvstore.config.values import FROM_SOURCES, ValueFormat
from kvstore.core.errors import InvalidArgument

ENVIRONMENT_PREFIX = "KVSTORE_"
DEFAULT_FILES = (Path("kvstore.toml"), Path("/etc/kvstore/kvstore.toml"))
"""The first one is in the current directory, which may belong to somebody else: see ``_check_owner``."""
_MAX_FILE_BYTES = 1 << 20
_CLUSTERS = "clusters."
_EVENTS_METADATA = "events.metadata"


@dataclass(frozen=True, slots=True)
class Origin:
    """Source of one value."""

    source: Literal["default", "file", "environment", "flag", "derived"]
    detail: str = ""
    """The file's path, the variable's name, the flag, the reason."""

    def __str__(self) -> str:
        return f"{self.source} {self.detail}".rstrip()


@dataclass(frozen=True, slots=True)
class Setting:
    """One value of a source."""

    key: str
    """Dotted, e.g. ``node.dram``."""
    value: Any
    origin: Origin


@dataclass(frozen=True, slots=True)
class Leaf:
    """One effective value and its texts."""

    key: str
    value: object
    """Plain data, secrets masked."""
    text: str
    origin: Origin
    description: str


Provenance = Mapping[str, Origin]


def load_config(
    file: Path | None = None,
    environment: Mapping[str, str] | None = None,
    flags: Sequence[Setting] = (),
    *,
    default_files: Sequence[Path] = DEFAULT_FILES,
    cluster: str | None = None,
) -> tuple[Config, Provenance]:
    """Read all sources and merge them.

    Args:
        file: TOML file, which must exist. None: the first file of ``default_files`` that exists is read.
        environment: variables, e.g. ``os.environ``; those with ``KVSTORE_`` and a ``__`` count.
        flags: settings of the command line, the last of equal keys wins.
        default_files: candidates if ``file`` is None. One with a relative path is refused if another user could have written it.
        cluster: named cluster. Its address, TLS and tokens replace those of ``[client]``, and its address that of
            ``[events]``; flags still win.

    Returns:
        The configuration, and the source of every value.

    Raises:
        InvalidArgument: a file cannot be read or trusted, a key is unknown, or a value is invalid. Names the key and its source.
    """
    found = next((path for path in default_files if path.is_file()), None) if file is None else file
    ours = file is None and found is not None and not found.is_absolute()
    settings = [*(_from_file(found, ours=ours) if found is not None else ()), *_from_environment(environment or {})]
    if cluster is not None:
        settings = list(_with_cluster(settings, cluster))
    settings += flags
    known = [*_leaf_keys(Config), *_cluster_keys(settings)]
    effective: dict[str, Setting] = {}
    for setting in settings:
        if setting.key not in known:
            raise _unknown(setting, known)
        effective[setting.key] = setting
    nested: dict[str, Any] = {}
    for setting in effective.values():
        *path, name = setting.key.split(".")
        section = nested
        for part in path:
            section = section.setdefault(part, {})
        section[name] = setting.value
    try:
        config = Config.model_validate(nested, context=FROM_SOURCES)
    except ValidationError as error:
        raise _wrong_value(error, effective) from error
    return config, {key: effective[key].origin if key in effective else Origin("default") for key in known}


def _cluster_keys(settings: Sequence[Setting]) -> Iterator[str]:
    """Keys of the named clusters that the settings mention."""
    for name in dict.fromkeys(setting.key.split(".")[1] for setting in settings if setting.key.startswith(_CLUSTERS)):
        yield from _leaf_keys(ClusterSection, f"{_CLUSTERS}{name}.")


def _with_cluster(settings: Sequence[Setting], cluster: str) -> Iterator[Setting]:
    """Replace the store that ``[client]`` names by a named cluster. A token of one store is never sent to another.

    Raises:
        InvalidArgument: no such cluster.
    """
    prefix = f"{_CLUSTERS}{cluster}."
    if not any(setting.key.startswith(prefix) for setting in settings):
        names = sorted({setting.key.split(".")[1] for setting in settings if setting.key.startswith(_CLUSTERS)})
        hint = f"the configuration has {', '.join(names)}" if names else f"add [{prefix[:-1]}] to the configuration"
        raise InvalidArgument(f"no cluster '{cluster}'; {hint}")
    replaced = {_EVENTS_METADATA, *(f"client.{key}" for key in _leaf_keys(ClusterSection))}
    for setting in settings:
        if setting.key not in replaced:
            yield setting
        if setting.key.startswith(prefix):
            origin = Origin(setting.origin.source, f"{setting.origin.detail} [{prefix[:-1]}]")
            key = setting.key.removeprefix(prefix)
            yield Setting(f"client.{key}", setting.value, origin)
            if key == "metadata":
                yield Setting(_EVENTS_METADATA, setting.value, origin)  # `kvstore events` uses TLS and token of [client]


def parse_assignment(text: str) -> Setting:
    """Parse ``node.dram=4GiB``, as given with ``--set``.

    Raises:
        InvalidArgument: there is no ``=``.
    """
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise InvalidArgument("a setting must look like node.dram=4GiB", got=text)
    return Setting(key.strip(), value.strip(), Origin("flag", f"--set {key.strip()}"))


def leaves(config: BaseModel, provenance: Provenance) -> Iterator[Leaf]:
    """Iterate over all effective values, in the order of declaration, with their origins."""
    yield from _leaves(config, provenance, "")


def _leaves(model: BaseModel, provenance: Provenance, prefix: str) -> Iterator[Leaf]:
    plain = model.model_dump(mode="json")
    for name, field in type(model).model_fields.items():
        key = prefix + (field.alias or name)
        value = getattr(model, name)
        if isinstance(value, BaseModel):
            yield from _leaves(value, provenance, key + ".")
            continue
        if isinstance(value, dict):
            for inner, section in value.items():
                yield from _leaves(section, provenance, f"{key}.{inner}.")
            continue
        shown = next((note for note in field.metadata if isinstance(note, ValueFormat)), None)
        if isinstance(value, SecretStr):
            text = "********" if value.get_secret_value() else ""
        elif shown is not None:
            text = shown.write(value)
        elif isinstance(value, tuple):
            text = ", ".join(str(part) for part in value)
        else:
            text = "" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
        yield Leaf(key, plain[name], text, provenance.get(key, Origin("default")), field.description or "")


def _leaf_keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _leaf_keys(field.annotation, f"{prefix}{name}.")
        elif get_origin(field.annotation) is not dict:  # the keys of named sections depend on their names
            yield prefix + (field.alias or name)


def _from_file(path: Path, *, ours: bool) -> Iterator[Setting]:
    """Settings of a TOML file.

    Args:
        path: of the file.
        ours: whether to refuse a file that another user could have written.
    """
    try:
        with path.open("rb") as file:
            if ours:
                _check_owner(path, os.fstat(file.fileno()))
            content = file.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        raise InvalidArgument(f"cannot read the configuration: {error.strerror}", file=path) from error
    if len(content) > _MAX_FILE_BYTES:
        raise InvalidArgument("the configuration is too long", file=path, limit_bytes=_MAX_FILE_BYTES)
    try:
        tables = tomllib.loads(content.decode())
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"the configuration is not valid TOML: {error}", file=path) from error
    yield from _flatten(tables, Origin("file", str(path)), "")


def _check_owner(path: Path, opened: os.stat_result) -> None:
    """Refuse a file that another user could have written: its writer could redirect the caller's token to another server.

    Raises:
        InvalidArgument: neither the caller nor root owns the file or a link to it, or its group or others may write it.
    """
    if not {opened.st_uid, path.lstat().st_uid} <= {0, os.geteuid()}:
        raise InvalidArgument(
            "the configuration in the current directory belongs to another user; name it with --config if you trust it",
            file=path.absolute(),
            owner=opened.st_uid,
        )
    if opened.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise InvalidArgument(
            "other users may write the configuration in the current directory; run chmod go-w, or name the file with --config",
            file=path.absolute(),
            mode=f"{stat.S_IMODE(opened.st_mode):04o}",
        )


def _flatten(table: Mapping[str, Any], origin: Origin, prefix: str) -> Iterator[Setting]:
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _flatten(value, origin, f"{prefix}{name}.")
        else:
            yield Setting(prefix + name, value, origin)


def _from_environment(environment: Mapping[str, str]) -> Iterator[Setting]:
    """Settings of variables with a double underscore. Kubernetes sets others, such as KVSTORE_PORT for a service."""
    for name, value in sorted(environment.items()):
        rest = name.removeprefix(ENVIRONMENT_PREFIX)
        if rest != name and "__" in rest:
            yield Setting(rest.lower().replace("__", "."), value, Origin("environment", name))
    if directory := environment.get(f"{ENVIRONMENT_PREFIX}DATA_DIR"):
        yield Setting("data_dir", directory, Origin("environment", f"{ENVIRONMENT_PREFIX}DATA_DIR"))


def _unknown(setting: Setting, known: list[str]) -> InvalidArgument:
    inside = [key for key in known if key.startswith(f"{setting.key}.")]
    if inside:
        return InvalidArgument(
            f"'{setting.key}' is a section, not a setting; name a setting in it, e.g. '{inside[0]}'", source=setting.origin
        )
    name = setting.key.rpartition(".")[2]
    near = difflib.get_close_matches(setting.key, known, n=1, cutoff=0.5)
    if near and not (
        setting.key.startswith(f"{near[0]}.") or difflib.get_close_matches(name, [near[0].rpartition(".")[2]], cutoff=0.5)
    ):
        near = []  # only the section is similar
    if not near:  # the right name in the wrong section
        near = [key for key in known if key.rpartition(".")[2] == name][:1]
    hint = f"; did you mean '{near[0]}'?" if near else "; `kvstore config` lists all"
    return InvalidArgument(f"unknown setting '{setting.key}'{hint}", source=setting.origin)


_IN_OUR_WORDS = {
    "missing": "something is missing",
    "extra_forbidden": "there is no such setting",
    "path_type": "a path is text in quotes",
    "bool_parsing": "write true or false",
    "int_parsing": "write a whole number",
}
"""Validation messages that are clearer than those of pydantic."""


def _wrong_value(error: ValidationError, effective: Mapping[str, Setting]) -> InvalidArgument:
    first = error.errors(include_url=False)[0]
    path = [str(part) for part in first["loc"]]
    message = _IN_OUR_WORDS.get(first["type"]) or first["msg"].removeprefix("Value error, ")
    for end in range(len(path), 0, -1):
        setting = effective.get(".".join(path[:end]))
        if setting is not None:
            within = ".".join(path[end:])  # e.g. which field of which volume
            message = f"{message} ('{within}')" if within else message
            return InvalidArgument(f"wrong value for '{setting.key}': {message}", source=setting.origin)
    return InvalidArgument(f"wrong value for '{'.'.join(path)}': {message}")
