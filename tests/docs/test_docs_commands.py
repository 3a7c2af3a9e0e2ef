"""Instructions of the documentation work: tests run the pages, and check names in commands that cannot run here."""

from __future__ import annotations

import collections
import re
import shutil
import tomllib
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from deployed import parse
from docs_site import included
from docs_site.markdown import fences, outside_fences
from page_session import NOT_RUN, Session, kind, steps, valkey_programs
from shell_commands import kvstore_commands

from kvstore.cli.app import root
from kvstore.config.model import Config
from kvstore.config.sources import leaves, load_config
from kvstore.core.errors import KVStoreError
from kvstore.observe.metric_definitions import METRICS

DOCS = included.DOCS
ALL = sorted(DOCS.rglob("*.md"))
OUTSIDE = [included.REPOSITORY / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "deploy/README.md")]
NAMING = [*ALL, *OUTSIDE]
"""Pages whose names are compared with the code."""
SHOWN = ("mermaid", "toml", "python")
"""Languages of blocks that contain no commands."""


def has_commands(page: Path) -> bool:
    """Whether the page has commands that the tests can run."""
    return any(
        fence.language == "sh" and not fence.title.startswith(NOT_RUN) for fence in fences(page.read_text(encoding="utf-8"))
    )


FOLLOWED = [page for page in [*ALL, included.REPOSITORY / "README.md"] if has_commands(page)]
PROGRAMS = ("awk", "bash", "curl", "openssl")
SETTINGS = {leaf.key for leaf in leaves(Config(), {})}
SECTIONS = {key.rpartition(".")[0] for key in SETTINGS} | {"node", "metadata"}
_INDENTED = re.compile(r"(?:(?<=\n\n)|\A)(?:    .*\n|\n(?=    ))+")
_CODE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
_SETTING = re.compile(r"((?:metadata|node|router|admin|events|log|observe|client)(?:\.[a-z_]+)+)(?: ?= ?.+)?")
_COMMAND = re.compile(r"kvstore ([a-z][a-z-]*)(?: ([a-z][a-z-]*)\b(?![=./-]))?")
_METRIC = re.compile(r"kvstore_[a-z0-9_]+_(?:total|seconds|bytes|blocks|tokens)")


def ids(pages: list[Path]) -> list[str]:
    return [page.relative_to(included.REPOSITORY).with_suffix("").as_posix().removeprefix("docs/") for page in pages]


def texts(page: Path) -> Iterator[tuple[str, str]]:
    """Texts of a page and of the files that it includes, each with its file."""
    yield str(page.relative_to(included.REPOSITORY)), page.read_text(encoding="utf-8")
    yield from ((str(source), text) for source, text in included.sources(page))


def shells(text: str) -> Iterator[str]:
    """Find blocks of commands, both fenced and indented."""
    yield from (fence.text for fence in fences(text) if fence.language in {"sh", ""})
    plain = "".join(line for line, outside in outside_fences(text) if outside)
    yield from (re.sub("(?m)^    ", "", found[0]) for found in _INDENTED.finditer(plain))


def spans(text: str) -> Iterator[str]:
    """Find inline code in prose."""
    prose = "".join(line for line, outside in outside_fences(text) if outside and not line.startswith("    "))
    yield from (found[1] for found in _CODE.finditer(prose))


# ---------------------------------------------------------------- pages that the tests run
@pytest.mark.parametrize("page", FOLLOWED, ids=ids(FOLLOWED))
def test_page_can_be_followed(page: Path, tmp_path: Path) -> None:
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    missing += [name for name in ("valkey-server", "valkey-cli") if name in page.read_text() and name not in valkey_programs()]
    if missing:
        pytest.skip(f"not on this machine: {', '.join(missing)}")
    told = steps(page)
    assert any(not hasattr(step, "command") and kind(step) in {"run", "terminal"} for step in told)
    with Session(tmp_path) as session:
        for step in told:
            session.follow(step)


@pytest.mark.parametrize("page", ALL, ids=ids(ALL))
def test_page_skipped_commands_have_reason(page: Path) -> None:
    """Each command of a followed page runs or states why not. Pages that are not followed need neither."""
    for fence in fences(page.read_text(encoding="utf-8")):
        if page not in FOLLOWED and fence.language in SHOWN:
            continue
        if kind(fence) == "unrun":
            assert len(fence.title) > len(NOT_RUN)


# ---------------------------------------------------------------- names that must exist
@pytest.mark.parametrize("page", NAMING, ids=ids(NAMING))
def test_page_commands_and_flags_exist(page: Path) -> None:
    for source, text in texts(page):
        for shell in shells(text):
            for words in kvstore_commands(shell):
                given = [word for word in words if word not in {"--help", "--version"}]
                try:
                    if given:
                        parse(given)
                except Exception as error:
                    raise AssertionError(f"{source}: kvstore {' '.join(words)}: {error}") from error


@pytest.mark.parametrize("page", NAMING, ids=ids(NAMING))
def test_page_names_in_prose_exist(page: Path) -> None:
    wrong = []
    for source, text in texts(page):
        for span in spans(text):
            setting = _SETTING.fullmatch(span)
            if (
                setting is not None and setting[1] not in SETTINGS | SECTIONS and not source.startswith("deploy/")
            ):  # values of the Helm chart
                wrong.append(f"{source}: the setting {span}")
            command = _COMMAND.match(span)
            if command is not None and not _is_command(command[1], command[2]):
                wrong.append(f"{source}: the command {span}")
            if _METRIC.fullmatch(span) and span not in METRICS:
                wrong.append(f"{source}: the metric {span}")
        wrong += [f"{source}: {name}" for name in re.findall(r"\bKVSTORE_[A-Z0-9]+__[A-Z0-9_]+", text) if not _is_variable(name)]
    assert wrong == []


@pytest.mark.parametrize("page", ALL, ids=ids(ALL))
def test_page_configurations_are_valid(page: Path, tmp_path: Path) -> None:
    for _, text in texts(page):
        for number, fence in enumerate(fence for fence in fences(text) if fence.language == "toml"):
            tomllib.loads(fence.text)
            file = tmp_path / f"{number}.toml"
            file.write_text(fence.text)
            load_config(file)


def _is_command(name: str, below: str | None) -> bool:
    """Whether a command exists; ``below`` is a subcommand if the command is a group, else an argument."""
    command = root.get_command(click.Context(root), name)
    return command is not None and (
        below is None or not isinstance(command, click.Group) or below in command.list_commands(click.Context(command))
    )


def _is_variable(name: str) -> bool:
    try:
        load_config(None, {name: ""}, default_files=())
    except KVStoreError as error:
        return "unknown setting" not in str(error)
    return True


# ---------------------------------------------------------------- errors are detected
def test_unknown_subcommand_in_prose_is_detected() -> None:
    assert _is_command("nodes", "show")
    assert not _is_command("nodes", "paint")
    assert not _is_command("paint", None)


@pytest.mark.parametrize(
    "shell",
    [
        "kvstore up --dramm 1GiB\n",
        "KVSTORE_NODE__DRAM=1GiB kvstore begin\n",
        "x=$(kvstore volumes --every)\n",
        "true &&\\\n  kvstore node --set dram\n",
        "kvstore status # fine\nkvstore nodes; kvstore volumes evict host-1/nvme0 --down 50  # not fine\n",
    ],
)
def test_unknown_command_is_detected(shell: str) -> None:
    with pytest.raises(click.UsageError):
        collections.deque(map(parse, kvstore_commands(shell)), maxlen=0)


def test_page_wrong_output_is_detected(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    (tmp_path / "run").mkdir()
    page.write_text(
        '```sh\necho one two\n```\n\n```text title="It prints"\none …\n```\n\n```text title="It prints"\ntwo one\n```\n'
    )
    echo, right, wrong = steps(page)
    with Session(tmp_path / "run") as session:
        session.follow(echo)
        session.follow(right)
        with pytest.raises(AssertionError, match="expected"):
            session.follow(wrong)
