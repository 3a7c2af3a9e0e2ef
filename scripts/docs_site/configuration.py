"""All settings, from the typed configuration."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from docs_site.markdown import code, plain, table
from kvstore.config.model import Config
from kvstore.config.sources import ENVIRONMENT_PREFIX, leaves

_HEADING = ("setting", "default", "what it does")


def pages() -> str:
    """Write a table per section. A shared section (``tls``) appears in each of its parents, since its names differ."""
    shown = {leaf.key: leaf.text for leaf in leaves(Config(), {})}
    top = [
        _row(name, field, shown) for name, field in Config.model_fields.items() if not (_is_section(field) or _is_named(field))
    ]
    return "\n".join([table(_HEADING, top), *_sections(Config, "", shown)])


def _sections(model: type[BaseModel], prefix: str, shown: dict[str, str]) -> Iterator[str]:
    for name, field in model.model_fields.items():
        key = f"{prefix}{name}"
        section: Any = field.annotation
        if _is_named(field):  # a table of sections
            key, section = f"{key}.NAME", get_args(section)[1]
            shown = shown | {f"{key}.{leaf.key}": leaf.text for leaf in leaves(section(metadata=""), {})}
        elif not _is_section(field):
            continue
        variable = f"{ENVIRONMENT_PREFIX}{key.replace('.', '__').upper()}__…"
        yield f"{'#' * (key.count('.') + 2)} {key}\n"
        yield f"{plain(inspect.getdoc(section) or '')} Environment: {code(variable)}.\n"
        rows = [
            _row(f"{key}.{one.alias or each}", one, shown) for each, one in section.model_fields.items() if not _is_section(one)
        ]
        yield table(_HEADING, rows)
        yield from _sections(section, f"{key}.", shown)


def _is_section(field: FieldInfo) -> bool:
    return isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)


def _is_named(field: FieldInfo) -> bool:
    return get_origin(field.annotation) is dict


def _row(key: str, field: FieldInfo, shown: dict[str, str]) -> tuple[str, str, str]:
    choices = [str(choice) for choice in get_args(field.annotation)] if get_origin(field.annotation) is Literal else []
    text = plain(field.description or "")
    told = f" One of {', '.join(code(choice) for choice in choices)}." if choices else ""
    return f"`{key}`", code(shown[key]), text + told
