"""How people write the values of a configuration: ``64MiB``, ``500ms``, ``/nvme0:100GiB``; and how they are shown again."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Final

from pydantic import BeforeValidator, ValidationInfo

from kvstore.process.memory.host_memory import memory_total

_SIZE_UNITS: Final = {
    "": 1,
    "b": 1,
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
    "tib": 1 << 40,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
}
_SHOWN_UNITS: Final = ("TiB", "GiB", "MiB", "KiB", "TB", "GB", "MB")
_DURATION_UNITS_MS: Final = {"ms": 1, "s": 1_000, "m": 60_000, "min": 60_000, "h": 3_600_000, "d": 86_400_000}
_BITS: Final = re.compile(r"[KMGT]i?b")
_PERCENT: Final = re.compile(r"\s*(\d{1,3})\s*%\s*")
_NUMBER_AND_UNIT: Final = re.compile(r"\s*(\d{1,18}(?:\.\d{1,6})?)\s*([A-Za-z]*)\s*")


def parse_size(value: object) -> int:
    """Bytes of ``"64MiB"``, ``"1.5 GB"`` or ``4096``.

    Raises:
        ValueError: not a size, a size in bits, or not a whole number of bytes.
    """
    number = _NUMBER_AND_UNIT.fullmatch(value) if isinstance(value, str) else None
    if number is not None and _BITS.fullmatch(number[2]):
        raise ValueError(f"{number[2]} is a unit of bits: write {number[2][:-1]}B in {value!r}")
    if isinstance(value, int) and not isinstance(value, bool):
        size = value
    else:
        size = _scaled(value, _SIZE_UNITS, 'a size looks like "64MiB", "4GB" or a whole number of bytes')
    if size < 0:
        raise ValueError("a size must not be negative")
    return size


def parse_duration_ms(value: object) -> int:
    """Milliseconds of ``"500ms"``, ``"2.5s"``, ``"1m"``.

    Raises:
        ValueError: not a duration, or without a unit.
    """
    hint = 'a duration takes a unit (ms, s, m, h, d): "500ms", "10s", "2m"'
    if not isinstance(value, str):
        raise ValueError(hint)  # noqa: TRY004  # pydantic reports ValueError as a wrong value
    return _scaled(value, _DURATION_UNITS_MS, hint)


def parse_memory(value: object) -> int:
    """Bytes of a size as ``parse_size`` takes it, or of a part of this host's memory: ``"80%"``, in whole MiB.

    Raises:
        ValueError: it is neither, or the host does not say how much memory it has.
    """
    match = _PERCENT.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        return parse_size(value)
    share, total = int(match[1]), memory_total()
    if not 1 <= share <= 95:
        raise ValueError(f"a part of the memory must be 1% to 95%, not {value!r}")
    if total is None:
        raise ValueError("this host does not say how much memory it has: give a size")
    return max(1, total * share // 100 >> 20) << 20


def _scaled(value: object, units: dict[str, int], hint: str) -> int:
    match = _NUMBER_AND_UNIT.fullmatch(value) if isinstance(value, str) else None
    if match is None or match[2].lower() not in units:
        raise ValueError(f"{hint}, not {value!r}")
    whole, _, fraction = match[1].partition(".")
    scale = units[match[2].lower()]
    parts = int("1" + "0" * len(fraction))
    scaled, rest = divmod((int(whole) * parts + int(fraction or 0)) * scale, parts)
    if rest:
        raise ValueError(f"{hint}; {value!r} is not a whole number of the smallest unit")
    return scaled


def format_size(size: int) -> str:
    """The shortest exact way to write a size."""
    ways = [
        f"{size // _SIZE_UNITS[unit.lower()]}{unit}" for unit in _SHOWN_UNITS if size and size % _SIZE_UNITS[unit.lower()] == 0
    ]
    return min([*ways, str(size)], key=len)


def format_duration_ms(duration_ms: int) -> str:
    """The shortest exact way to write a duration."""
    for unit in ("h", "m", "s"):
        scale = _DURATION_UNITS_MS[unit]
        if duration_ms and duration_ms % scale == 0:
            return f"{duration_ms // scale}{unit}"
    return f"{duration_ms}ms"


def parse_list(value: object) -> object:
    """Parse a list of a flag or a variable: ``a,b``, or a TOML list ``["a", "b"]``, whose quotes a shell may have removed.

    Raises:
        ValueError: a text that begins with ``[`` and does not end with ``]``.
    """
    if not isinstance(value, str):
        return value
    text = value.strip()
    if text.startswith("["):
        if not text.endswith("]"):
            raise ValueError(f"{value!r} is not a list: write {_forms('A')}")
        text = text[1:-1]
    return [part for part in (part.strip().strip("\"'") for part in text.split(",")) if part]


def _forms(item: str) -> str:
    """Ways to write a list of items."""
    return f'{item},{item} or ["{item}", "{item}"]'


def parse_volume(value: object) -> object:
    """Read ``"/path:100GiB"`` as ``{"path": …, "capacity": …}``; leave anything else to pydantic.

    Raises:
        ValueError: a text without both parts.
    """
    if not isinstance(value, str):
        return value
    path, _, size = value.rpartition(":")
    if not path or not size:
        raise ValueError(
            f"{value!r} is not PATH:SIZE (/v0:100GiB); a path must not contain a comma; a list is {_forms('PATH:SIZE')}"
        )
    return {"path": path, "capacity": size}


def parse_mount(value: object) -> object:
    """Read ``"storage-1/nvme0=/path"`` as ``{"volume": …, "path": …}``; leave anything else to pydantic.

    Raises:
        ValueError: a text without both parts.
    """
    if not isinstance(value, str):
        return value
    volume, _, path = value.partition("=")
    if not path or not volume:
        raise ValueError(f"{value!r} is not VOLUME=PATH such as storage-1/nvme0=/mnt/v; a list is {_forms('VOLUME=PATH')}")
    return {"volume": volume, "path": path}


@dataclass(frozen=True, slots=True)
class ValueFormat:
    """How a field's values are written for people: part of its annotation."""

    write: Callable[[Any], str]


def _unset(parse: Callable[[object], int]) -> Callable[[object], int | None]:
    """Leave out a value that is not given."""
    return lambda value: None if value is None else parse(value)


FROM_SOURCES: Final = "from_sources"
"""Validation context of values that people wrote: a duration then requires its unit. Code passes milliseconds."""


def _duration(value: object, info: ValidationInfo) -> int:
    if info.context != FROM_SOURCES and isinstance(value, int) and not isinstance(value, bool):
        return value
    return parse_duration_ms(value)


def _duration_if_set(value: object, info: ValidationInfo) -> int | None:
    return None if value is None else _duration(value, info)


def _shown_if_set(write: Callable[[int], str]) -> Callable[[int | None], str]:
    return lambda value: "" if value is None else write(value)


Size = Annotated[int, BeforeValidator(parse_size), ValueFormat(format_size)]
Memory = Annotated[int, BeforeValidator(parse_memory), ValueFormat(format_size)]
SizeIfSet = Annotated[int | None, BeforeValidator(_unset(parse_size)), ValueFormat(_shown_if_set(format_size))]
DurationMsIfSet = Annotated[int | None, BeforeValidator(_duration_if_set), ValueFormat(_shown_if_set(format_duration_ms))]
DurationMs = Annotated[int, BeforeValidator(_duration), ValueFormat(format_duration_ms)]
