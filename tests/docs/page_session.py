"""Follow a documentation page like a reader: save files, run commands and compare outputs in a temporary folder.

Readers and tests use a fenced block according to its title:

* ``sh`` without a title is run by bash and must succeed;
* ``sh title="In a separate terminal"`` is started and runs until a comment ``<!-- test: Ctrl-C -->`` (ends the last
  terminal, or the one whose command begins with the text after ``Ctrl-C``) or the end of the page;
* ``sh title="This is refused"`` must fail;
* ``sh title="Not run by the tests: WHY"`` is skipped;
* a file name as title: the block is saved to this file;
* ``text title="It prints"``: expected output of the preceding block, by line; … matches any text.

Ports of the page are replaced by free ones.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from docs_site.markdown import Fence, fences

from kvstore.embedded.children import die_with_parent
from kvstore.embedded.temp_dirs import TempDir
from nursery import cli
from support.ports import free_ports, free_valkey_ports

REPOSITORY: Final = Path(__file__).resolve().parents[2]
TERMINAL: Final = "In a separate terminal"
REFUSED: Final = "This is refused"
PRINTS: Final = "It prints"
NOT_RUN: Final = "Not run by the tests: "
WAIT_S: Final = 60.0
_FILE: Final = re.compile(r"[\w-]+\.(py|toml|json|yaml)")
_STOP: Final = re.compile(r"<!-- test: Ctrl-C ?(.*) -->")
_DEFAULTS: Final = {
    "KVSTORE_METADATA__LISTEN": 7400,
    "KVSTORE_METADATA__METRICS_LISTEN": 7401,
    "KVSTORE_NODE__METADATA": 7400,
    "KVSTORE_NODE__METRICS_LISTEN": 7480,
    "KVSTORE_CLIENT__METADATA": 7400,
    "KVSTORE_ADMIN__METADATA": 7400,
    "KVSTORE_ADMIN__LISTEN": 7470,
}
"""Settings with a port in the default."""
_VALKEY_PORTS: Final = range(7500, 7600)


@dataclass(frozen=True, slots=True)
class Stop:
    """Press Ctrl-C in the terminal whose command begins with this text; empty: in the last one."""

    command: str
    line: int


def valkey_programs() -> dict[str, Path]:
    """Valkey's programs, or those of Redis, by the names that pages use. None without the extra ``valkey``."""
    if find_spec("hiredis") is None:
        return {}
    from kvstore.embedded.valkey import find_server

    client = shutil.which("valkey-cli") or shutil.which("redis-cli")
    found = {"valkey-server": find_server(), "valkey-cli": Path(client) if client else None}
    return {name: path for name, path in found.items() if path is not None}


def steps(page: Path) -> list[Fence | Stop]:
    """List the steps of a page in order."""
    text = page.read_text(encoding="utf-8")
    stops = [Stop(found[1], number) for number, line in enumerate(text.splitlines(), start=1) if (found := _STOP.fullmatch(line))]
    return sorted([*fences(text), *stops], key=lambda step: step.line)


def kind(fence: Fence) -> str:
    """Classify a block: ``run``, ``terminal``, ``refused``, ``unrun``, ``file`` or ``prints``.

    Raises:
        ValueError: the title is unknown.
    """
    match fence.language, fence.title:
        case "sh", "":
            return "run"
        case "sh", title if title == TERMINAL:
            return "terminal"
        case "sh", title if title == REFUSED:
            return "refused"
        case "sh", title if title.startswith(NOT_RUN):
            return "unrun"
        case "text", title if title == PRINTS:
            return "prints"
        case (("python" | "toml" | "json" | "yaml"), title) if _FILE.fullmatch(title):
            return "file"
    raise ValueError(f"line {fence.line}: unknown kind of block: {fence.language} {fence.title!r}")


class Session:
    """Session of a reader on one page. A context manager that ends all terminals on exit.

    Args:
        folder: working folder of the reader.
        installed: the programs of an environment in which a wheel is installed; None: those of the checkout.
        foreign: a program of others, which may end with any code after Ctrl-C.
    """

    def __init__(self, folder: Path, installed: Path | None = None, foreign: str = "") -> None:
        self.folder = folder
        self._foreign = foreign
        self._run = TempDir("kvs-", Path("/tmp"))
        self._ports: dict[int, int] = {}
        self._terminals: list[tuple[str, subprocess.Popen[bytes], Path]] = []
        self._printed: str | None = None
        programs = folder / "bin"
        programs.mkdir()
        python, kvstore = (sys.executable, shlex.join(cli("metadata", "node", "admin", "router")))
        if installed is not None:
            python, kvstore = (str(installed / "python"), str(installed / "kvstore"))
        calls = {"python": python, "kvstore": kvstore, **{name: str(path) for name, path in valkey_programs().items()}}
        for name, call in calls.items():
            (programs / name).write_text(f'#!/bin/sh\nexec {call} "$@"\n')
            (programs / name).chmod(0o755)
        self._environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("KVSTORE_", "PYTHON"))},
            **{name: f"127.0.0.1:{self._port(port)}" for name, port in _DEFAULTS.items()},
            "PATH": f"{programs}:{os.environ['PATH']}",
            "HOME": str(folder),
            "XDG_RUNTIME_DIR": str(self._run.path),
        }
        if installed is None:
            self._environment["PYTHONPATH"] = os.pathsep.join(str(REPOSITORY / each) for each in (".", "clients", "proto"))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for _, process, _ in self._terminals:
            process.kill()
            process.wait(WAIT_S)
        self._run.close()

    @property
    def printed(self) -> str | None:
        """Output of the last command; None if the last step opened a terminal."""
        return self._printed

    def follow(self, step: Fence | Stop) -> None:
        """Run one step. Fail if the result differs from the page."""
        if isinstance(step, Stop):
            self._stop(step.command)
            return
        text = self._here(step.text)
        match kind(step):
            case "run":
                self._bash(text, refused=False)
            case "refused":
                self._bash(text, refused=True)
            case "terminal":
                self._open(step.text, text)
            case "file":
                (self.folder / step.title).write_text(text)
            case "prints":
                self._compare(text)

    def _here(self, text: str) -> str:
        """Replace the ports of a text by those of this session."""
        return re.sub(r"(?:(?<=:)|(?<=--port ))(7\d{3}|8000)\b", lambda found: str(self._port(int(found[0]))), text)

    def _port(self, named: int) -> int:
        if named not in self._ports:
            (self._ports[named],) = free_valkey_ports(1) if named in _VALKEY_PORTS else free_ports(1)
        return self._ports[named]

    def _bash(self, text: str, *, refused: bool) -> None:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", text],
            cwd=self.folder,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=WAIT_S,
            check=False,
        )
        self._printed = done.stdout
        assert (done.returncode != 0) == refused, f"{text}ended with {done.returncode}:\n{done.stdout}{self._said()}"

    def _open(self, shown: str, text: str) -> None:
        said = self.folder / f"terminal-{len(self._terminals)}"
        with said.open("wb") as out:
            process = subprocess.Popen(
                ["bash", "-c", f"exec {text}"],
                cwd=self.folder,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                preexec_fn=die_with_parent,
            )
        self._terminals.append((shown, process, said))
        self._printed = None

    def _stop(self, command: str) -> None:
        found = [one for one in self._terminals if one[0].startswith(command) and one[1].poll() is None]
        assert found, f"no terminal in which {command or 'anything'} runs"
        _, process, said = found[-1]
        process.send_signal(signal.SIGINT)
        is_foreign = self._foreign and command.startswith(self._foreign)
        assert process.wait(WAIT_S) == 0 or is_foreign, said.read_text(errors="replace")

    def _compare(self, expected: str) -> None:
        """Output of the last command, or of the terminal that was just opened, up to a timeout."""
        end_s = time.monotonic() + WAIT_S
        wanted = [re.sub(r"\\?\s+", r"\\s+", re.escape(line.strip())).replace("…", ".*") for line in expected.splitlines()]
        pattern = re.compile(r"[^\n]*\n(?:.*\n)*?[^\n]*?".join(wanted))
        if self._printed is not None:
            assert pattern.search(self._printed), f"expected:\n{expected}\nprinted:\n{self._printed}"
            return
        _, process, said = self._terminals[-1]
        while not pattern.search(said.read_text(errors="replace")):
            assert process.poll() is None, f"it ended:\n{said.read_text(errors='replace')}"
            assert time.monotonic() < end_s, f"expected:\n{expected}\nprinted:\n{said.read_text(errors='replace')}"
            time.sleep(0.02)

    def _said(self) -> str:
        return "".join(f"\n--- {shown}{said.read_text(errors='replace')[-2000:]}" for shown, _, said in self._terminals)
