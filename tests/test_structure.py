"""Counts of structures that make a tree hard to read, which may only fall: cycles, large folders, names used twice, long names.

``tests/structure_limits.json`` records the counts. A test fails if there is more than that, and also if there is less: then the
file must be lowered (``python tests/test_structure.py --lower``), so that nothing returns.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
LIMITS = REPOSITORY / "tests" / "structure_limits.json"
ROOTS = (REPOSITORY / "kvstore", REPOSITORY / "clients" / "kvclient")
MOST_MODULES = 12
MOST_TEST_NAME = 60
PARTICIPLE = re.compile(r"[a-z]+ing$")
LOG_LEVELS = {"debug", "info", "warning", "error", "exception", "critical"}
VERB_FIRST = re.compile(
    r"(allocated|cannot|closed|copied|disabled|dropped|failed|lost|measured|missed|opened|paused|planned|refused|rejected"
    r"|released|removed|requeued|resized|tested)\b"
)
NOUNS_IN_ING = {"accounting", "scheduling", "tracing", "string", "ring", "sizing"}
"""Module names that end like participles and are nouns of the field."""


def modules() -> Iterator[Path]:
    for root in ROOTS:
        yield from (path for path in sorted(root.rglob("*.py")) if "stub_cuda" not in path.parts)


def short(path: Path) -> str:
    return str(path.relative_to(REPOSITORY)).removeprefix("clients/")


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


# ---- import cycles
def dotted(path: Path) -> str:
    return ".".join(Path(short(path)).with_suffix("").parts).removesuffix(".__init__")


def our_imports(node: ast.AST, known: Mapping[str, Path]) -> Iterator[str]:
    """Modules of ours that a module imports, for types alone too, but not within functions."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            continue
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names if alias.name in known)
        elif isinstance(child, ast.ImportFrom) and child.module and not child.level:
            inside = {f"{child.module}.{alias.name}" for alias in child.names} & set(known)
            yield from inside or ({child.module} & set(known))
        else:
            yield from our_imports(child, known)


def cycles() -> list[str]:
    """Groups of modules that import each other (strongly connected components), by Tarjan's algorithm."""
    known = {dotted(path): path for path in modules()}
    graph = {name: sorted(set(our_imports(tree_of(path), known)) - {name}) for name, path in known.items()}
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[str] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for target in graph[name]:
            if target not in index:
                visit(target)
                low[name] = min(low[name], low[target])
            elif target in stack:
                low[name] = min(low[name], index[target])
        if low[name] == index[name]:
            group = stack[stack.index(name) :]
            del stack[stack.index(name) :]
            if len(group) > 1:
                found.append(" ".join(sorted(group)))

    sys.setrecursionlimit(10_000)
    for name in graph:
        if name not in index:
            visit(name)
    return sorted(found)


# ---- the other counts
def large_folders() -> dict[str, int]:
    """Folders with more modules than a reader can survey, except ``__init__``."""
    counted = Counter(path.parent for path in modules() if path.name != "__init__.py")
    return {short(folder): count for folder, count in sorted(counted.items()) if count > MOST_MODULES}


def participle_modules() -> list[str]:
    """Modules with a participle as their name, in place of a noun for their content."""
    return sorted(short(path) for path in modules() if PARTICIPLE.match(path.stem) and path.stem not in NOUNS_IN_ING)


def names_used_twice() -> dict[str, int]:
    """Public class names that several modules define; those that subclass one another implement one contract."""
    where: dict[str, list[ast.ClassDef]] = defaultdict(list)
    for path in modules():
        for node in tree_of(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                where[node.name].append(node)
    return {name: len(nodes) for name, nodes in sorted(where.items()) if len(nodes) > 1}


def long_test_names() -> dict[str, int]:
    """Test names that do not fit a line of a report, by folder. Public suites are tests too."""
    counted: Counter[str] = Counter()
    suites = (REPOSITORY / "kvstore" / "testing").rglob("*.py")
    for path in sorted([*(REPOSITORY / "tests").rglob("test_*.py"), *suites]):
        for node in ast.walk(tree_of(path)):
            named = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name.startswith("test_")
            if named and len(node.name) > MOST_TEST_NAME:
                counted[short(path.parent)] += 1
    return dict(sorted(counted.items()))


def private_accesses() -> dict[str, int]:
    """Accesses to private members of other classes (ruff's SLF001), by package."""
    listed = subprocess.run(
        [
            sys.executable,
            "-m",
            "ruff",
            "check",
            "--select",
            "SLF001",
            "--output-format",
            "json",
            "--exit-zero",
            "--no-cache",
            ".",
        ],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    ).stdout
    found: list[dict[str, Any]] = json.loads(listed)
    counted: Counter[str] = Counter()
    for one in found:
        parts = Path(one["filename"]).relative_to(REPOSITORY).parts
        counted["/".join(parts[:2]) if len(parts) > 2 else parts[0]] += 1
    return dict(sorted(counted.items()))


COUNTS = {
    "import_cycles": cycles,
    "large_folders": large_folders,
    "participle_modules": participle_modules,
    "names_used_twice": names_used_twice,
    "long_test_names": long_test_names,
    "private_accesses": private_accesses,
}


@pytest.mark.parametrize("count", COUNTS)
def test_structure_is_no_worse_than_recorded(count: str) -> None:
    recorded = json.loads(LIMITS.read_text(encoding="utf-8"))[count]
    found = COUNTS[count]()
    lower = "less is left than recorded: python tests/test_structure.py --lower"
    if isinstance(found, list):
        assert sorted(set(found) - set(recorded)) == [], "new"
        assert sorted(set(recorded) - set(found)) == [], lower
        return
    more = {name: number for name, number in found.items() if number > recorded.get(name, 0)}
    assert more == {}, f"more than recorded: {recorded}"
    assert {name: number for name, number in recorded.items() if number > found.get(name, 0)} == {}, lower


def test_structure_cycle_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, text in {"a": "import b", "b": "def late() -> None:\n    import c\nimport c", "c": "from a import x"}.items():
        (tmp_path / f"{name}.py").write_text(text)
    paths = sorted(tmp_path.glob("*.py"))
    monkeypatch.setattr(sys.modules[__name__], "modules", lambda: iter(paths))
    monkeypatch.setattr(sys.modules[__name__], "dotted", lambda path: path.stem)
    assert cycles() == ["a b c"]
    (tmp_path / "c.py").write_text("def late() -> None:\n    from a import x\n")
    tree_of.cache_clear()
    assert cycles() == []


def verb_first_log_lines() -> list[str]:
    """Log lines that begin with what was done, instead of ``event: object (key=value)``."""
    found = []
    for path in modules():
        for node in ast.walk(tree_of(path)):
            match node:
                case ast.Call(func=ast.Attribute(attr=level), args=[ast.Constant(value=str(line)), *_]) if level in LOG_LEVELS:
                    if VERB_FIRST.match(line):
                        found.append(f"{short(path)}:{node.lineno}: {line}")
    return found


def test_structure_log_lines_begin_with_their_event() -> None:
    assert verb_first_log_lines() == []


def lower() -> None:
    """Record what is found now. For a developer who has made it less; a reviewer sees the file's difference."""
    LIMITS.write_text(json.dumps({name: count() for name, count in COUNTS.items()}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:] != ["--lower"]:
        raise SystemExit("usage: python tests/test_structure.py --lower")
    lower()
