"""The gRPC contract, from the proto files and their comments."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Final

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    ServiceDescriptorProto,
)
from grpc_tools import protoc

from docs_site.included import REPOSITORY
from docs_site.markdown import code, plain, table

_PROTO: Final = REPOSITORY / "proto"
_SYNTAX, _MESSAGE, _ENUM, _SERVICE = (12,), 4, 5, 6
_FIELD, _NESTED, _VALUE, _METHOD = 2, 3, 2, 2
"""Field numbers of descriptors, which form the paths of comments."""
Comments = dict[tuple[int, ...], str]


def pages() -> str:
    """Write a part per file: services, then messages and enums in order.

    Raises:
        ChildProcessError: the compiler rejects the files.
    """
    return "\n".join(part for file in _files() for part in _file(file))


def method_comments() -> Iterator[tuple[str, str]]:
    """Yield each method as ``Service.Method``, with its comment."""
    for file in _files():
        said = _comments(file)
        for number, service in enumerate(file.service):
            for place, method in enumerate(service.method):
                yield f"{service.name}.{method.name}", said.get((_SERVICE, number, _METHOD, place), "").strip()


def _files() -> list[FileDescriptorProto]:
    sources = sorted(str(path) for path in (_PROTO / "kvstore").rglob("*.proto"))
    with tempfile.TemporaryDirectory() as scratch:
        made = Path(scratch) / "set"
        known = [f"-I{_PROTO}", f"-I{files('grpc_tools') / '_proto'}"]
        if protoc.main(["protoc", *known, f"--descriptor_set_out={made}", "--include_source_info", *sources]) != 0:
            raise ChildProcessError("protoc rejects the proto files")
        return list(FileDescriptorSet.FromString(made.read_bytes()).file)


def _file(file: FileDescriptorProto) -> Iterator[str]:
    said = _comments(file)
    yield f"## {file.name}\n"
    yield f"{plain(said.get(_SYNTAX, ''))}\n"
    for number, service in enumerate(file.service):
        yield from _service(service, (_SERVICE, number), said)
    for number, message in enumerate(file.message_type):
        yield from _message(message, (_MESSAGE, number), said)
    for number, enum in enumerate(file.enum_type):
        yield from _enum(enum, (_ENUM, number), said)


def _comments(file: FileDescriptorProto) -> Comments:
    return {
        tuple(place.path): " ".join([place.leading_comments, place.trailing_comments]) for place in file.source_code_info.location
    }


def _service(service: ServiceDescriptorProto, path: tuple[int, ...], said: Comments) -> Iterator[str]:
    yield f"### service {service.name}\n"
    yield f"{plain(said.get(path, ''))}\n"
    for number, method in enumerate(service.method):
        asked = f"{'stream of ' if method.client_streaming else ''}{_link(method.input_type)}"
        answer = f"{'stream of ' if method.server_streaming else ''}{_link(method.output_type)}"
        yield f"#### {service.name}.{method.name}\n"
        yield f"{asked} → {answer}\n"
        yield f"{plain(said.get((*path, _METHOD, number), ''))}\n"


def _message(message: DescriptorProto, path: tuple[int, ...], said: Comments) -> Iterator[str]:
    yield f"### {message.name}\n"
    yield f"{plain(said.get(path, ''))}\n"
    entries = {nested.name: nested for nested in message.nested_type if nested.options.map_entry}
    rows = [
        (str(field.number), code(field.name), _kind(field, message, entries), plain(said.get((*path, _FIELD, number), "")))
        for number, field in enumerate(message.field)
    ]
    yield table(("no.", "field", "kind", "what it is"), rows) if rows else "No fields.\n"
    for number, nested in enumerate(message.nested_type):
        if not nested.options.map_entry:
            yield from _message(nested, (*path, _NESTED, number), said)


def _enum(enum: EnumDescriptorProto, path: tuple[int, ...], said: Comments) -> Iterator[str]:
    yield f"### {enum.name}\n"
    yield f"{plain(said.get(path, ''))}\n"
    yield table(
        ("no.", "value", "what it means"),
        [
            (str(value.number), code(value.name), plain(said.get((*path, _VALUE, number), "")))
            for number, value in enumerate(enum.value)
        ],
    )


def _kind(field: FieldDescriptorProto, message: DescriptorProto, entries: dict[str, DescriptorProto]) -> str:
    name = field.type_name.rpartition(".")[2]
    if name in entries:
        key, value = entries[name].field
        return f"map from {_plain_kind(key)} to {_plain_kind(value)}"
    kind = _plain_kind(field)
    if field.label == FieldDescriptorProto.LABEL_REPEATED:
        return f"list of {kind}"
    if field.proto3_optional:
        return f"{kind}, may be unset"
    if field.HasField("oneof_index"):
        return f"{kind}, one of {code(message.oneof_decl[field.oneof_index].name)}"
    return kind


def _plain_kind(field: FieldDescriptorProto) -> str:
    if field.type_name:
        return _link(field.type_name)
    return FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()


def _link(type_name: str) -> str:
    package, _, name = type_name.lstrip(".").rpartition(".")
    return f"[{name}](#{name.lower()})" if package == "kvstore.v1" else f"{package}.{name}"
