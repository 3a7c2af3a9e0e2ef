"""Rules for the whole tree: allowed imports, the contract, the length of files."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet
from grpc_tools import protoc

from kvstore.core import errors, status

REPOSITORY = Path(__file__).resolve().parent.parent

LEAVES = {"core", "native", "observe", "process"}
"""Packages that import none of ours, so every package may import them."""

ALLOWED: dict[str, set[str]] = {
    "core": {"native"},
    "native": set(),
    "config": {"core", "process", "rpc"},
    "observe": set(),
    "health": {"core", "process", "kvproto"},
    "process": {"core"},
    "dualpath": {"core"},
    "recompute": {"core"},
    "roofline": {"core", "recompute"},
    "index": LEAVES,
    "tiers": LEAVES,
    "transport": LEAVES,
    "rpc": LEAVES | {"kvproto"},
    "doctor": LEAVES | {"health", "tiers", "transport"},
    "metadata": LEAVES | {"health", "config", "dualpath", "index", "rpc", "kvproto"},
    "node": LEAVES | {"health", "config", "tiers", "transport", "rpc", "kvproto"},
    "control_api": LEAVES | {"health", "rpc", "kvproto"},
    "admin": LEAVES | {"health", "config", "control_api", "rpc", "kvproto"},
    "router": LEAVES | {"config", "rpc", "kvproto", "kvclient"},
    "events": LEAVES | {"config", "rpc", "kvclient"},
    "kvclient": LEAVES | {"recompute", "transport", "rpc", "kvproto"},
    "embedded": LEAVES | {"rpc"},
    "netlab": LEAVES | {"dualpath", "embedded"},
    "testing": LEAVES | {"embedded", "index", "tiers", "transport", "rpc", "kvproto"},
    "lab": LEAVES | {"embedded", "testing", "tiers", "transport", "rpc", "kvproto", "node", "kvclient"},
}
"""Allowed imports of each package. Packages that wire everything together (``FREE``) may import all."""

WITHIN = {
    "clients/kvclient/engine_cache": {"node", "tiers"},
    "clients/kvclient/gds": {"config", "node", "tiers"},
    "clients/kvclient/hbm": {"config", "node", "tiers"},
    "kvstore/rpc/failover": {"transport"},
}
"""Additional imports of a folder: a pool of device memory and the cache of an engine are small nodes, and reads into device
memory mount volumes like a node; all are loaded only by name. Failover uses liveness; the conformance of connectors makes a tiny
model."""

TEST_CODE = {"testing", "lab"}
"""Packages that only tests, benchmarks and third parties import."""

FREE = {"cli", "replay", "simulate", "stress", "workload"}

CORE_LIBRARIES = {"numpy", "xxhash"}
"""Third-party packages that the pure core may use."""

LONGEST_FILE = 700


def our_files() -> list[Path]:
    return sorted([*(REPOSITORY / "kvstore").rglob("*.py"), *(REPOSITORY / "clients").rglob("*.py")])


def package_of(path: Path) -> str:
    """``kvstore/tiers/nvme.py`` -> ``tiers``; ``clients/kvclient/x.py`` -> ``kvclient``; ``kvstore/cli.py`` -> ``cli``."""
    inside = path.relative_to(REPOSITORY).parts
    if inside[0] == "clients":
        return inside[1]
    return "" if inside[1] == "__init__.py" else Path(inside[1]).stem


def imports_of(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line and absolute name of every import, including those in functions and below ``if TYPE_CHECKING``."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                folder = path.relative_to(REPOSITORY).parts[:-1]
                folder = folder[1:] if folder[0] == "clients" else folder
                base = ".".join(folder[: len(folder) - node.level + 1])
                module = f"{base}.{node.module}" if node.module else base
            else:
                module = node.module or ""
            # `from kvstore import metadata`: the alias is the package
            yield from ((node.lineno, f"{module}.{alias.name}" if module == "kvstore" else module) for alias in node.names)


def our_package(module: str) -> str | None:
    """Return our package that a dotted name belongs to; None for others and for the version in ``kvstore``."""
    parts = module.split(".")
    if parts[0] in {"kvclient", "kvproto"}:
        return parts[0]
    if parts[0] != "kvstore" or len(parts) < 2 or parts[1] == "__version__":
        return None
    return parts[1]


def test_every_package_has_its_rule() -> None:
    assert {package_of(path) for path in our_files()} - {""} <= set(ALLOWED) | FREE


@pytest.mark.parametrize("package", sorted(ALLOWED))
def test_imports_point_inward(package: str) -> None:
    allowed = ALLOWED[package] | {package}
    wrong = [
        f"{path.relative_to(REPOSITORY)}:{line} imports {module}"
        for path in our_files()
        if package_of(path) == package
        for line, module in imports_of(path)
        if (target := our_package(module)) is not None
        and target not in allowed | WITHIN.get(str(path.parent.relative_to(REPOSITORY)), set())
    ]
    assert wrong == []


def test_product_imports_no_test_code() -> None:
    wrong = [
        f"{path.relative_to(REPOSITORY)}:{line} imports {module}"
        for path in our_files()
        if package_of(path) not in TEST_CODE
        for line, module in imports_of(path)
        if our_package(module) in TEST_CODE
    ]
    assert wrong == []


def test_test_modules_import_no_other_test_module() -> None:
    """Code that several of them need is in a module of its own. Imports in the source of child processes do not count."""
    wrong = [
        f"{path.relative_to(REPOSITORY)}:{line} imports {module}"
        for path in (REPOSITORY / "tests").rglob("*.py")
        for line, module in imports_of(path)
        if module.rpartition(".")[2].startswith("test_")
    ]
    assert wrong == []


def test_core_is_pure() -> None:
    libraries = {
        (str(path.relative_to(REPOSITORY)), module.split(".")[0])
        for path in our_files()
        if package_of(path) == "core"
        for _, module in imports_of(path)
        if module.split(".")[0] not in sys.stdlib_module_names
    }
    assert {entry for entry in libraries if entry[1] not in CORE_LIBRARIES | {"kvstore"}} == set()


def test_importing_the_client_loads_no_engine_and_no_server() -> None:
    forbidden = ["torch", "pydantic", "fastapi", "vllm", "sglang", "lmdb", "click", "rich"]
    forbidden += [
        f"kvstore.{package}"
        for package in ("index", "tiers", "metadata", "node", "embedded", "netlab", "testing", "lab", *sorted(FREE))
    ]
    # names are loaded on first use: use them all
    program = f"import sys; from kvclient import *; print(*[name for name in {forbidden!r} if name in sys.modules])"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert loaded.stdout.split() == []


def test_files_stay_short() -> None:
    folders = ("kvstore", "clients", "benchmarks", "scripts", "tests")
    long = {
        str(path.relative_to(REPOSITORY)): lines
        for folder in folders
        for path in (REPOSITORY / folder).rglob("*.py")
        if (lines := len(path.read_text(encoding="utf-8").splitlines())) > LONGEST_FILE
    }
    assert long == {}


# ---- the contract ----


@pytest.fixture(scope="module")
def contract(tmp_path_factory: pytest.TempPathFactory) -> list[FileDescriptorProto]:
    """Return descriptors of our proto files, with comments."""
    out = tmp_path_factory.mktemp("contract") / "set"
    sources = sorted(str(path) for path in (REPOSITORY / "proto" / "kvstore").rglob("*.proto"))
    arguments = ["protoc", f"-I{REPOSITORY / 'proto'}", f"--descriptor_set_out={out}", "--include_source_info", *sources]
    assert protoc.main(arguments) == 0
    return list(FileDescriptorSet.FromString(out.read_bytes()).file)


def uncommented(file: FileDescriptorProto) -> Iterator[str]:
    """Yield the names of fields, values, RPCs and messages without a comment."""
    said = {
        tuple(place.path)
        for place in file.source_code_info.location
        if (place.leading_comments + place.trailing_comments).strip()
    }
    # the comment of an RPC covers its request and response
    spoken_for = {
        name.rsplit(".", 1)[-1]
        for service in file.service
        for rpc in service.method
        for name in (rpc.input_type, rpc.output_type)
    }
    for m, message in enumerate(file.message_type):
        if (4, m) not in said and message.name not in spoken_for:
            yield message.name
        yield from (f"{message.name}.{field.name}" for f, field in enumerate(message.field) if (4, m, 2, f) not in said)
    for e, enum in enumerate(file.enum_type):
        if (5, e) not in said:
            yield enum.name
        yield from (
            f"{enum.name}.{value.name}" for v, value in enumerate(enum.value) if value.number and (5, e, 2, v) not in said
        )
    for s, service in enumerate(file.service):
        if (6, s) not in said:
            yield service.name
        yield from (f"{service.name}.{rpc.name}" for r, rpc in enumerate(service.method) if (6, s, 2, r) not in said)


def test_everything_in_the_contract_has_a_comment(contract: list[FileDescriptorProto]) -> None:
    assert [f"{file.name}: {name}" for file in contract for name in uncommented(file)] == []


FILLERS = frozenset(("a", "an", "the", "its", "their", "of", "in", "per", "number", "id", "name", "16", "bytes"))


def empty_comments(file: FileDescriptorProto) -> Iterator[str]:
    """Yield the fields whose comment only repeats the name of the field or of its type."""
    said = {tuple(place.path): place.leading_comments + place.trailing_comments for place in file.source_code_info.location}
    for m, message in enumerate(file.message_type):
        for f, field in enumerate(message.field):
            words = re.findall(r"\w+", said.get((4, m, 2, f), "").lower())
            known = {*field.name.split("_"), field.type_name.rpartition(".")[2].lower()}
            if all(word in FILLERS or word.removesuffix("s") in {one.removesuffix("s") for one in known} for word in words):
                yield f"{message.name}.{field.name}: {' '.join(words)}"


def test_contract_comments_say_more_than_the_name(contract: list[FileDescriptorProto]) -> None:
    assert [found for file in contract for found in empty_comments(file)] == []


def test_generated_stubs_are_in_sync() -> None:
    checked = subprocess.run(
        [sys.executable, str(REPOSITORY / "scripts" / "generate_stubs.py"), "--check"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert checked.returncode == 0, checked.stderr


# ---- errors ----


def subclasses(cls: type[errors.KVStoreError]) -> Iterator[type[errors.KVStoreError]]:
    for child in cls.__subclasses__():
        yield child
        yield from subclasses(child)


def test_every_error_kind_has_one_class() -> None:
    ours = [cls.kind for cls in subclasses(errors.KVStoreError) if cls.__module__ == errors.__name__]
    assert Counter(ours) == Counter(errors.ErrorKind)


@pytest.mark.parametrize("kind", errors.ErrorKind)
def test_every_error_kind_goes_out_and_comes_back(kind: errors.ErrorKind) -> None:
    assert status.kind_of_grpc(status.STATUS[kind].grpc) is kind
    assert status.make_error(kind, "a message", {}).kind is kind


# ---- versions ----


def test_constraints_are_exact_and_name_each_package_once() -> None:
    lines = (REPOSITORY / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert [pin for pin in pins if not re.fullmatch(r"[A-Za-z0-9_.-]+==[0-9A-Za-z.]+", pin)] == []
    names = Counter(re.sub(r"[-_.]+", "-", pin.split("==")[0]).lower() for pin in pins)
    assert [name for name, count in names.items() if count > 1] == []
