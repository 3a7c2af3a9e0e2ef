"""Callers of the metadata server's scheduler on a bed, as routers and leaders of engine groups are in production."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from kvclient import EngineFigures, EngineRequest, SchedulerClient
from kvclient.scheduling.types import EngineRole
from kvstore.core.errors import KVStoreError
from netlab.stepping import Speaker

PERIOD_S = 0.02
"""Maximum interval of a group's reports. A group reports at once after a request ended."""
MOST_WAITING = 128
"""Requests that wait for engines at once, each in a thread."""
_DEADLINE_S = 5.0
_ASSIGN_S = 120.0


class Leading:
    """The leader of a group, in a separate thread. Failures are reported, and end the run.

    Args:
        client: of the metadata server.
        role: of all its engines, and its name.
        engines: tokens of KV that fit each, by name; an engine is named as its node.
        speaker: where failures go.
    """

    def __init__(self, client: SchedulerClient, role: EngineRole, engines: Mapping[str, int], speaker: Speaker) -> None:
        self._leader = client.leader(role, role)
        self._role = role
        self._engines = [EngineFigures(name, name, hbm_tokens=tokens) for name, tokens in engines.items()]
        self._ended: list[int] = []
        self._speaker = speaker
        self._changed = threading.Condition()
        self._stopping = False
        self._leader.report(self._engines, deadline_s=_DEADLINE_S)
        self._thread = threading.Thread(target=self._lead, name=f"lead-{role}", daemon=True)
        self._thread.start()

    def ended(self, generation: int) -> None:
        """An attempt's prompt is computed and handed over, or (decode) it is done."""
        with self._changed:
            self._ended.append(generation)
            self._changed.notify()

    def close(self) -> None:
        """The group leaves."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._thread.join()

    def _lead(self) -> None:
        try:
            while not self._stopping:
                with self._changed:
                    if not self._stopping and not self._ended:
                        self._changed.wait(PERIOD_S)
                    told, self._ended = self._ended, []
                told_as = {"prefilled" if self._role == "prefill" else "finished": told}
                self._leader.report(self._engines, **told_as, deadline_s=_DEADLINE_S)
            self._leader.leave(_DEADLINE_S)
        except KVStoreError as error:
            self._speaker.say(did="failed", id="", error=f"the leader of {self._role} engines: {error}")


class Routing:
    """A router, which asks for the engines of each request, and the leaders of both groups.

    Args:
        metadata: address of the server.
        groups: by role: tokens of KV that fit each engine, by name.
        speaker: where answers and failures go.
    """

    def __init__(self, metadata: str, groups: Mapping[EngineRole, Mapping[str, int]], speaker: Speaker) -> None:
        self._client = SchedulerClient(metadata)
        self._groups = groups
        self._speaker = speaker
        self._leading: dict[EngineRole, Leading] = {}
        self._waiting = ThreadPoolExecutor(MOST_WAITING, thread_name_prefix="route")

    def do(self, command: dict[str, Any]) -> None:
        """``assign`` a request, tell that an attempt has ``ended`` in a group, or let both ``leave``; they join when needed."""
        if command["do"] == "leave":
            self._leave()
            return
        if not self._leading:
            self._leading = {role: Leading(self._client, role, held, self._speaker) for role, held in self._groups.items()}
        if command["do"] == "ended":
            self._leading[command["group"]].ended(command["generation"])
        else:
            self._waiting.submit(self._assign, command)

    def close(self) -> None:
        """Wait for calls under way, and stop the groups."""
        self._waiting.shutdown()
        self._leave()
        self._client.close()

    def _leave(self) -> None:
        for leading in self._leading.values():
            leading.close()
        self._leading.clear()

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
