"""The names of the reference with their descriptions, from the code that the pages are generated from."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterator
from functools import cache
from typing import Any

import click
from docs_site.protocol import method_comments
from docs_site.rest import openapi
from pydantic import BaseModel

from kvstore.cli.app import root
from kvstore.config.model import Config
from kvstore.core.status import ERROR_CLASSES
from kvstore.observe.metric_definitions import METRICS


def settings() -> Iterator[tuple[str, str]]:
    """Each setting with its description. A section that has several parents (``tls``) counts once."""
    yield from _settings(Config, "", set())


def _settings(model: type[BaseModel], prefix: str, seen: set[type[BaseModel]]) -> Iterator[tuple[str, str]]:
    for name, field in model.model_fields.items():
        section = field.annotation
        if not (isinstance(section, type) and issubclass(section, BaseModel)):
            yield f"{prefix}{field.alias or name}", field.description or ""
        elif section not in seen:
            seen.add(section)
            yield from _settings(section, f"{prefix}{name}.", seen)


def metrics() -> Iterator[tuple[str, str]]:
    """Each metric with its help text."""
    yield from ((metric.name, metric.help) for metric in METRICS.values())


def errors() -> Iterator[tuple[str, str]]:
    """Each kind of error with its meaning."""
    yield from ((kind.value, inspect.getdoc(found) or "") for kind, found in ERROR_CLASSES.items())


@cache
def _openapi() -> dict[str, Any]:
    return asyncio.run(openapi())


def rest_operations() -> Iterator[tuple[str, str, str]]:
    """Method, path and text of each REST call."""
    for path, operations in _openapi()["paths"].items():
        for method, operation in operations.items():
            yield method.upper(), path, f"{operation.get('summary', '')}: {operation.get('description', '')}"


def rest() -> Iterator[tuple[str, str]]:
    """Each REST call with its text."""
    yield from ((f"{method} {path}", text) for method, path, text in rest_operations())


def commands() -> Iterator[tuple[str, str]]:
    """Each command with the first paragraph of its help."""
    yield from _commands(click.Context(root, info_name="kvstore"))


def _commands(context: click.Context) -> Iterator[tuple[str, str]]:
    command = context.command
    yield context.command_path, inspect.cleandoc(command.help or "").split("\n\n")[0]
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            if below is not None:
                yield from _commands(click.Context(below, info_name=name, parent=context))


def calls() -> Iterator[tuple[str, str]]:
    """Each gRPC method with its comment."""
    yield from method_comments()
