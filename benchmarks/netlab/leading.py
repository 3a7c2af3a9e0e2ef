"""Groups of one engine and the routers of a bed, speaking to the scheduler of the metadata server as they would in production."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from kvclient import EngineFigures, EngineRequest, SchedulerClient
from kvclient.scheduling import EngineRole
from kvstore.core.errors import KVStoreError
from netlab.stepping import Speaker

PERIOD_S = 0.02
"""A group reports at least so often; at once where something has ended."""
_DEADLINE_S = 5.0
_ASSIGN_S = 120.0
MOST_WAITING = 128
"""Requests that wait for engines at once, each in a thread."""


class Leading:
    """The leader of a group of one engine, in a thread of its own. Failures are said, and end the run.

    Args:
        metadata: address of the server.
        engine: name of the engine, its group and its node.
        role: of it.
        hbm_tokens: that fit a decode engine.
        speaker: where failures go.
    """

    def __init__(self, metadata: str, engine: str, role: EngineRole, hbm_tokens: int, speaker: Speaker) -> None:
        self._client = SchedulerClient(metadata)
        self._leader = self._client.leader(engine, role)
        self._engine = EngineFigures(engine, engine, hbm_tokens=hbm_tokens)
        self._ended: dict[str, list[int]] = {"prefilled": [], "finished": []}
        self._name = "prefilled" if role == "prefill" else "finished"
        self._speaker = speaker
        self._changed = threading.Condition()
        self._stopping = False
        self._leader.report([self._engine], deadline_s=_DEADLINE_S)
        self._thread = threading.Thread(target=self._lead, name="lead", daemon=True)
        self._thread.start()

    def ended(self, generation: int) -> None:
        """An attempt's prompt is computed and handed over, or (decode) it is done."""
        with self._changed:
            self._ended[self._name].append(generation)
            self._changed.notify()

    def close(self) -> None:
        """Tells what has ended, and leaves."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._thread.join()
        self._client.close()

    def _lead(self) -> None:
        try:
            while True:
                with self._changed:
                    if not self._stopping and not self._ended[self._name]:
                        self._changed.wait(PERIOD_S)
                    told, self._ended[self._name] = self._ended[self._name], []
                    stopping = self._stopping
                self._leader.report([self._engine], **{self._name: told}, deadline_s=_DEADLINE_S)
                if stopping:
                    self._leader.leave(_DEADLINE_S)
                    return
        except KVStoreError as error:
            self._speaker.say(did="failed", id="", error=f"the group's leader: {error}")


class Routing:
    """A router: asks for the engines of each request, and says which it was given."""

    def __init__(self, metadata: str, speaker: Speaker) -> None:
        self._client = SchedulerClient(metadata)
        self._speaker = speaker
        self._waiting = ThreadPoolExecutor(MOST_WAITING, thread_name_prefix="route")

    def do(self, command: dict[str, Any]) -> None:
        """A request, ``assign``; returns at once."""
        self._waiting.submit(self._assign, command)

    def close(self) -> None:
        """Waits for what is asked."""
        self._waiting.shutdown()
        self._client.close()

    def _assign(self, command: dict[str, Any]) -> None:
        request = EngineRequest(command["id"], command["prompt"], command["hit"], command["out"])
        try:
            found = self._client.assign(request, _ASSIGN_S)
        except KVStoreError as error:
            self._speaker.say(did="failed", id=command["id"], error=f"no engines: {error}")
            return
        self._speaker.say(
            did="paired",
            id=command["id"],
            prefill=found.prefill.engine,
            decode=found.decode.engine,
            generation=found.generation,
        )
