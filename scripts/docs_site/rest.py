"""The REST reference, from the OpenAPI document."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx

from docs_site.markdown import code, fenced, plain, table
from kvstore.admin.app import OPENAPI, make_app
from kvstore.admin.main import store_endpoint
from kvstore.config.admin import AdminConfig
from kvstore.control_api.store_rpc import StoreRpc
from kvstore.observe.counters import Counters

Json = dict[str, Any]


def pages() -> str:
    """Write a section per operation, by tag, and one per schema."""
    document = asyncio.run(openapi())
    return "\n".join([str(document["info"]["description"]), *_operations(document), "## Shapes\n", *_shapes(document)])


async def openapi() -> Json:
    """Create the OpenAPI document without a running server."""
    config, counters = AdminConfig(), Counters()
    rpc = StoreRpc(store_endpoint(config), counters)
    try:
        transport = httpx.ASGITransport(make_app(rpc, config, None, counters))
        async with httpx.AsyncClient(transport=transport, base_url=f"http://{config.listen}") as client:
            answer = await client.get(OPENAPI)
    finally:
        await rpc.close()
    answer.raise_for_status()
    document: Json = answer.json()
    return document


def _operations(document: Json) -> Iterator[str]:
    by_tag: dict[str, list[tuple[str, str, Json]]] = {}
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            by_tag.setdefault(operation.get("tags", ["other"])[0], []).append((method.upper(), path, operation))
    for tag, found in by_tag.items():
        yield f"## {tag[:1].upper()}{tag[1:]}\n"
        for method, path, operation in found:
            yield from _operation(method, path, operation)


def _operation(method: str, path: str, operation: Json) -> Iterator[str]:
    yield f"### {method} {plain(path)}\n"
    told = [operation.get("summary", ""), operation.get("description", "")]
    yield "\n\n".join(plain(text) for text in told if text) + "\n"
    parameters = [
        (
            code(one["name"]),
            one["in"],
            _kind(one["schema"]),
            "yes" if one.get("required") else "no",
            plain(one.get("description", "")),
        )
        for one in operation.get("parameters", [])
    ]
    if parameters:
        yield table(("parameter", "in", "kind", "needed", "what it is"), parameters)
    if "requestBody" in operation:
        body = operation["requestBody"]["content"]["application/json"]["schema"]
        yield f"Body: {_kind(body)}.\n"
    answers = [
        (status, plain(answer.get("description", "")), _answer(answer))
        for status, answer in sorted(operation["responses"].items())
        if status < "400"
    ]
    refusals = ", ".join(f"{status}" for status in sorted(operation["responses"]) if status >= "400")
    yield table(("answer", "", "shape"), answers)
    yield f"Refusals: {refusals}, each a [Problem](#problem).\n"


def _answer(answer: Json) -> str:
    content = answer.get("content", {})
    return "; ".join(_kind(one.get("schema", {})) or code(media) for media, one in content.items())


def _shapes(document: Json) -> Iterator[str]:
    for name, shape in sorted(document["components"]["schemas"].items()):
        yield f"### {name}\n"
        if text := shape.get("description"):
            yield plain(text) + "\n"
        if "enum" in shape:
            yield f"One of {', '.join(code(str(value)) for value in shape['enum'])}.\n"
        needed = shape.get("required", [])
        rows = [
            (code(field), _kind(one), "yes" if field in needed else "no", plain(one.get("description", "")))
            for field, one in shape.get("properties", {}).items()
        ]
        if rows:
            yield table(("field", "kind", "always", "what it is"), rows)
        if examples := shape.get("examples"):
            yield fenced(json.dumps(examples[0], indent=2), "json")


def _kind(schema: Json) -> str:
    """Format a schema in a cell: a link to its section, or its JSON type."""
    if "$ref" in schema:
        name = str(schema["$ref"]).rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    for several in ("anyOf", "oneOf", "allOf"):
        if several in schema:
            return " or ".join(dict.fromkeys(_kind(one) for one in schema[several]))
    if "enum" in schema:
        return ", ".join(code(str(value)) for value in schema["enum"])
    if "const" in schema:
        return code(str(schema["const"]))
    kind = str(schema.get("type", ""))
    if kind == "array":
        return f"list of {_kind(schema.get('items', {})) or 'values'}"
    if kind == "object" and isinstance(schema.get("additionalProperties"), dict):
        return f"object of {_kind(schema['additionalProperties']) or 'values'}"
    return kind
