"""Hints of vLLM requests about their sessions, collected until the next step's plan.

A request gives its hint in ``kv_transfer_params`` (field ``kvstore_hint``), or as an action ``kvstore.session`` of vLLM's
``kv_hints``. It applies once the request has ended, to all blocks of it that the store holds. Invalid hints are counted.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from kvclient import BlockKey, InvalidArgument
from kvclient.call.request_hint import HINT_FIELD, RequestHint
from kvclient.engines.vllm.counters import ConnectorCounters
from kvclient.engines.vllm.plan import HintJob
from kvstore.observe.limited_log import LimitedLog

_limited: Final = LimitedLog(logging.getLogger(__name__))
ACTION: Final = "kvstore.session"
MAX_WAITING: Final = 1_024
"""Hints that wait for the next step."""


def request_hint(request: Any) -> RequestHint | None:  # noqa: ANN401
    """Return the hint of a vLLM request; None: it has none.

    Raises:
        InvalidArgument: an invalid hint.
    """
    params = getattr(request, "kv_transfer_params", None)
    if isinstance(params, Mapping) and HINT_FIELD in params:
        return RequestHint.read(params[HINT_FIELD])
    envelope = getattr(request, "kv_hints", None)
    for action in getattr(envelope, "actions", ()):
        if action.action_type == ACTION:
            return RequestHint.read(action.payload)
    return None


class SessionHintQueue:
    """Hints of ended requests.

    Args:
        counters: receive the counts.
    """

    def __init__(self, counters: ConnectorCounters) -> None:
        self._counters = counters
        self._waiting: list[HintJob] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def ended(self, request: Any, stored_keys: Callable[[], Sequence[BlockKey]]) -> None:  # noqa: ANN401
        """Note that a request ended.

        Args:
            request: the request.
            stored_keys: returns the keys of its blocks in the store, from the head. Called only for a hint that is queued.
        """
        try:
            hint = request_hint(request)
        except InvalidArgument as error:
            self._counters.add("hints_refused")
            _limited.warning("hint ignored: request %s: %s", request.request_id, error)
            return
        if hint is None:
            return
        if len(self._waiting) >= MAX_WAITING:
            self._counters.add("hints_refused")
            _limited.warning("hint ignored: too many requests with hints ended in one step (limit=%d)", MAX_WAITING)
            return
        keys = stored_keys()
        if not keys and not hint.end:
            self._counters.add("hints_refused")
            return
        self._counters.add("hints")
        self._waiting.append(HintJob(hint, list(keys)))

    def clear(self) -> None:
        """Drop hints whose keys are of other weights."""
        if self._waiting:
            self._counters.add("hints_refused", len(self._waiting))
        self._waiting = []

    def take(self) -> list[HintJob]:
        """Return the hints for the next step."""
        waiting, self._waiting = self._waiting, []
        return waiting
