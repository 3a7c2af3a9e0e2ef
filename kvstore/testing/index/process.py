"""An index opened by another process, driven over a pipe: for backends that several processes may share."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

from kvstore.index.contract import PrefixIndex

ANSWER_TIMEOUT_S = 60.0


class IndexProcess:
    """A child process that has an index open.

    Args:
        opener: ``"module:callable"``, which receives the folder and returns an open ``PrefixIndex``; a name, so that the child
            inherits nothing from the parent.
        place: folder of the index.
    """

    def __init__(self, opener: str, place: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(opener, place, theirs), daemon=True)
        process.start()
        self._process: multiprocessing.process.BaseProcess | None = process
        theirs.close()
        self.receive()

    def call(self, member: str, *arguments: object) -> Any:  # noqa: ANN401 - whatever the index answers
        """Call a method, or read a property, of the index in the child; raises its errors."""
        self._connection.send((member, arguments))
        return self.receive()

    def send(self, member: str, *arguments: object) -> None:
        """Begin a call without waiting; ``receive`` returns the results in order."""
        self._connection.send((member, arguments))

    def receive(self) -> Any:  # noqa: ANN401
        """Result of the oldest call that was sent and not received yet."""
        if not self._connection.poll(ANSWER_TIMEOUT_S):
            raise TimeoutError("the child process did not answer")
        result, error = self._connection.recv()
        if error is not None:
            raise error
        return result

    def kill(self) -> None:
        """Send ``SIGKILL``; no effect if the process has ended."""
        if self._process is not None and self._process.pid is not None and self._process.is_alive():
            os.kill(self._process.pid, signal.SIGKILL)
        self._end()

    def close(self) -> None:
        """Close the index in the child and end the process."""
        self.call("close")
        self._connection.send(None)
        self._end()

    def _end(self) -> None:
        if self._process is not None:
            self._process.join(ANSWER_TIMEOUT_S)
            self._connection.close()
            self._process.close()
            self._process = None


def find_opener(name: str) -> Callable[[Path], PrefixIndex]:
    """``"module:callable"`` -> the callable."""
    module, _, attributes = name.partition(":")
    found: Any = importlib.import_module(module)
    for attribute in attributes.split("."):
        found = getattr(found, attribute)
    return cast("Callable[[Path], PrefixIndex]", found)


def _serve(opener: str, place: Path, connection: Connection) -> None:
    index = find_opener(opener)(place)
    connection.send((None, None))
    while (request := connection.recv()) is not None:
        member, arguments = request
        try:
            found = getattr(index, member)
            connection.send((found(*arguments) if callable(found) else found, None))
        except Exception as error:  # noqa: BLE001 - a process edge: it is raised on the other side
            connection.send((None, error))
