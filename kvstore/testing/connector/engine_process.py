"""An engine with a hook in its own process: it loads what another process stored, and tests can kill it."""

from __future__ import annotations

import multiprocessing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from kvstore.core.errors import DeadlineExceeded, Internal, Unavailable
from kvstore.embedded.children import die_with_parent
from kvstore.testing.connector.driver import EngineAnswer, HookDriver, HookEngine, StoreAddress
from kvstore.testing.connector.offload_files import OffloadFiles

START_S = 120.0
CALL_S = 120.0
_STOP_S = 20.0


@dataclass(frozen=True, slots=True)
class _Failed:
    """An error of the child."""

    why: str


class EngineProcess:
    """A ``HookEngine`` in a child process. One process can open engines in sequence, because its start is slow.

    Args:
        driver: opens the engine in the child.
        store: addresses of the store; None: the engine alone.
        options: options of the hook.

    Raises:
        Internal: the engine does not open.
    """

    def __init__(self, driver: HookDriver, store: StoreAddress | None, options: Mapping[str, object]) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawn.Pipe()
        self._process = spawn.Process(target=_serve, args=(theirs, driver), daemon=True)
        self._process.start()
        self._is_asked = False
        self._files = OffloadFiles()
        theirs.close()
        try:
            self.open(store, options)
        except BaseException:
            self.kill()
            raise

    @property
    def is_ready(self) -> bool:
        """Whether the process is there, and owes no answer."""
        return self._process.is_alive() and not self._is_asked

    def open(self, store: StoreAddress | None, options: Mapping[str, object]) -> None:
        """Open an engine, if none is open.

        Raises:
            Internal: it does not open.
        """
        self.begin("open", store, dict(options))
        self._answer(START_S)
        self._note_files()

    def leave(self) -> None:
        """Stop the engine gracefully. The process stays, for another engine."""
        self.begin("leave")
        self.end()

    def begin(self, method: str, *arguments: object) -> None:
        """Send a call without waiting for its answer; ``end`` waits."""
        try:
            self._is_asked = True
            self._pipe.send((method, arguments))
        except OSError as error:
            raise Unavailable("the engine's process has ended") from error

    def end(self) -> Any:  # noqa: ANN401  # whatever the method returns
        """The answer to what ``begin`` asked.

        Raises:
            Unavailable: the process has ended.
            Internal: the method failed.
            DeadlineExceeded: no answer in time.
        """
        return self._answer(CALL_S)

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[EngineAnswer]:
        """See ``HookEngine``."""
        self.begin("generate", [list(prompt) for prompt in prompts], max_tokens)
        answers: list[EngineAnswer] = self.end()
        return answers

    def flush(self, timeout_s: float) -> bool:
        """See ``HookEngine``."""
        self.begin("flush", timeout_s)
        return bool(self.end())

    def forget(self) -> None:
        """See ``HookEngine``."""
        self.begin("forget")
        self.end()

    def counters(self) -> Mapping[str, int]:
        """See ``HookEngine``."""
        self.begin("counters")
        counters: dict[str, int] = self.end()
        return counters

    def kill(self) -> None:
        """SIGKILL. Files of vLLM's offloading are removed, since vLLM cannot do it."""
        self._note_files()
        self._process.kill()
        self._process.join()
        self._pipe.close()
        self._files.remove()

    def _note_files(self) -> None:
        if self._process.pid is not None:
            self._files.note(self._process.pid)

    def close(self) -> None:
        """Stop the engine and its process gracefully."""
        if self._process.is_alive():
            self.begin("close")
            self._process.join(_STOP_S)
        self.kill()

    def _answer(self, timeout_s: float) -> Any:  # noqa: ANN401
        try:
            if not self._pipe.poll(timeout_s):
                raise DeadlineExceeded("the engine's process does not answer", seconds=timeout_s)
            answer = self._pipe.recv()
            self._is_asked = False
        except (EOFError, OSError) as error:
            raise Unavailable("the engine's process has ended") from error
        if isinstance(answer, _Failed):
            raise Internal(f"in the engine's process: {answer.why}")
        return answer


def _serve(pipe: Connection, driver: HookDriver) -> None:
    """The child: answer calls until it receives ``close`` or its parent ends."""
    die_with_parent()
    engine: HookEngine | None = None
    while True:
        try:
            method, arguments = pipe.recv()
            answer = None
            if method == "open":
                engine = driver.open(*arguments)
            elif method in ("leave", "close"):
                if engine is not None:
                    engine.close()
                    engine = None
                if method == "close":
                    return
            else:
                answer = getattr(engine, method)(*arguments)
            pipe.send(dict(answer or {}) if method == "counters" else answer)
        except EOFError:
            return
        except Exception as error:  # noqa: BLE001  # the edge of the process: whatever it is, the other side is told
            pipe.send(_Failed(repr(error)))
