"""One request on a prefill engine and a decode engine.

Concurrently: both are called at once, and the decode engine waits for the prompt's KV, which the prefill engine hands to its host
layer by layer; a name that the router makes joins the two. One after the other: the decode engine is called with what the prefill
engine's answer says of where the KV is, which is how vLLM's own connectors want it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
from collections.abc import Mapping
from typing import Any, Final

from kvstore.core.errors import DeadlineExceeded, KVStoreError, Unavailable
from kvstore.observe.limited_log import LimitedLog
from kvstore.router.body import ParsedBody
from kvstore.router.parts import Parts, Place, Placement
from kvstore.router.upstream import Answer, Failure, FailureKind

_log = LimitedLog(logging.getLogger(__name__))

_MAX_PREFILL_ANSWER: Final = 16 << 20
_OK: Final = 200
_LATE_S: Final = 10.0
"""For so long a prefill engine may go on once its request was answered without it: it is of no use any more."""
_MOST_LATE: Final = 256
"""Of these at once: each holds a connection."""


class PairCall:
    """One attempt. The answer is the decode engine's.

    Args:
        parts: of the router.
        placement: is told when the prompt is computed.
        body: the request.
        headers: to be sent to engines.
    """

    def __init__(self, parts: Parts, placement: Placement, body: ParsedBody, headers: Mapping[str, str]) -> None:
        self._parts = parts
        self._placement = placement
        self._body = body
        self._headers = headers
        self._transfer = secrets.token_hex(16)
        self._refusal: Failure | None = None
        """What the prefill engine said instead of computing: of the request, unless the decode engine answers it."""

    async def run(self, place: Place) -> tuple[Answer | Failure, str]:
        """Calls both engines.

        Returns:
            The decode engine's answer, or a failure; and the engine that is to blame for that.
        """
        assert place.prefill is not None
        if self._parts.config.flow == "sequential":
            return await self._one_after_the_other(place, place.prefill)
        return await self._at_once(place, place.prefill)

    async def _at_once(self, place: Place, prefill_engine: str) -> tuple[Answer | Failure, str]:
        prefill = asyncio.ensure_future(self._prefill(place, prefill_engine))
        decode = asyncio.ensure_future(self._decode(place, prefill_engine, {}))
        outcome: Answer | Failure | None = None
        try:
            await asyncio.wait((prefill, decode), return_when=asyncio.FIRST_COMPLETED)
            if not decode.done() and isinstance(failure := prefill.result(), Failure):
                self._parts.counters.add("router_prefills_failed_total")
                return failure, prefill_engine
            outcome = await decode
            if isinstance(outcome, Failure) and outcome.kind is FailureKind.LATE:
                met = prefill.result() if prefill.done() else _too_late(prefill_engine, self._parts.config.first_byte_timeout_s)
                if isinstance(met, Failure):  # it waited for a prompt that nobody computed
                    self._parts.counters.add("router_prefills_failed_total")
                    return met, prefill_engine
            return outcome, place.engine
        finally:
            if isinstance(outcome, Answer):  # the prefill engine has done its part, and mostly only its answer is on its way
                self._let_finish(place, prefill_engine, prefill, wanted=outcome.well)
            else:
                await _call_off(prefill, decode)

    def _let_finish(self, place: Place, engine: str, prefill: asyncio.Future[dict[str, Any] | Failure], *, wanted: bool) -> None:
        """Lets a prefill engine end whose request was answered: for a while, and where not too many do.

        Args:
            place: where the request went.
            engine: that prefills.
            prefill: its answer.
            wanted: the decode engine did not refuse the request; where it did, the prefill engine is let go, however it did.
        """
        if not wanted or (not prefill.done() and len(self._parts.running) >= _MOST_LATE):
            if wanted:
                self._parts.counters.add("router_prefills_failed_total")
            prefill.cancel()
            self._parts.keep(prefill)
            return
        name = f"{place.attempt} late"
        self._parts.ledger.rename(place.attempt, engine, name)
        self._parts.ledger.decodes(name, engine)  # of little weight: who waits for engines must not wait for these
        self._parts.keep(asyncio.ensure_future(self._late(name, place, engine, prefill)))

    async def _late(self, name: str, place: Place, engine: str, prefill: asyncio.Future[dict[str, Any] | Failure]) -> None:
        """Waits for a prefill engine whose request was answered: until then it has that to do, and may still fail at it.

        Args:
            name: of that in the books.
            place: where the request went.
            engine: that prefills.
            prefill: its answer.
        """
        try:
            await asyncio.wait((prefill,), timeout=_LATE_S)
            outcome = prefill.result() if prefill.done() else _too_late(engine, _LATE_S)
        finally:
            prefill.cancel()
            self._parts.ledger.end(name, engine)
        self._answered_without(place, engine, self._refusal or outcome)

    def _answered_without(self, place: Place, engine: str, outcome: dict[str, Any] | Failure | None) -> None:
        """The decode engine has answered: what the prefill engine failed at was not because of the request."""
        if isinstance(outcome, Failure) and outcome.kind is not FailureKind.BUSY:
            why = str(outcome.error)
            self._parts.counters.add("router_prefills_failed_total")
            self._parts.counters.add(f"router_attempts_{outcome.kind}_total")
            _log.warning("a prefill on %s failed, behind the answer of %s: %s", engine, place.engine, why)
            pool, now_s = self._parts.pool, self._parts.now_s()
            if (pool.refused if outcome.kind is FailureKind.REFUSED else pool.failed)(engine, now_s, why):
                logging.getLogger(__name__).warning("engine %s is out: %s", engine, why)

    async def _one_after_the_other(self, place: Place, prefill_engine: str) -> tuple[Answer | Failure, str]:
        outcome = await self._prefill(place, prefill_engine)
        if isinstance(outcome, Failure):
            self._parts.counters.add("router_prefills_failed_total")
            return outcome, prefill_engine
        answer = await self._decode(place, prefill_engine, outcome)
        if isinstance(answer, Answer) and answer.well:
            self._answered_without(place, prefill_engine, self._refusal)
        return answer, place.engine

    async def _prefill(self, place: Place, engine: str) -> dict[str, Any] | Failure:
        """Lets the prompt be computed.

        Returns:
            What the decode engine must be told; empty also where the engine refuses the request (``_refusal``): if that is wrong,
            the decode engine will say so.
        """
        params = {"do_remote_decode": True, "transfer_id": self._transfer, "decode_node": self._node(place.engine)}
        body = self._body.for_prefill(params)
        answer = await self._parts.upstreams[engine].post(self._body.path, body, self._headers)
        if isinstance(answer, Failure):
            return answer
        try:
            content = await answer.body(_MAX_PREFILL_ANSWER)
        except KVStoreError as broken:
            return Failure(FailureKind.LOST, broken)
        finally:
            await answer.close()
        if answer.status != _OK:
            error = Unavailable("the engine refused to compute the prompt", engine=engine, status=answer.status)
            self._refusal = Failure(FailureKind.ERRED, error)
            return {}
        self._parts.pool.succeeded(engine)
        self._placement.prefilled(place)
        return _returned_params(content)

    async def _decode(self, place: Place, prefill_engine: str, returned: Mapping[str, Any]) -> Answer | Failure:
        params = {
            "do_remote_prefill": True,
            "transfer_id": self._transfer,
            "prefill_node": self._node(prefill_engine),
            **returned,
        }
        body = self._body.for_decode(params)
        return await self._parts.upstreams[place.engine].post(self._body.path, body, self._headers)

    def _node(self, engine: str) -> str:
        return self._parts.pool.engines[engine].config.node


def _too_late(engine: str, seconds: float) -> Failure:
    return Failure(
        FailureKind.LATE, DeadlineExceeded("the prefill engine did not answer in time", engine=engine, seconds=seconds)
    )


async def _call_off(prefill: asyncio.Future[dict[str, Any] | Failure], decode: asyncio.Future[Answer | Failure]) -> None:
    """Ends what nobody wants any more, so that engines know."""
    prefill.cancel()
    decode.cancel()
    await asyncio.wait((prefill, decode))
    if not decode.cancelled() and isinstance(answer := decode.result(), Answer):
        await answer.close()


def _returned_params(content: bytes) -> dict[str, Any]:
    """``kv_transfer_params`` of a prefill engine's answer."""
    try:
        answer = json.loads(content)
    except (ValueError, RecursionError):
        return {}
    params = answer.get("kv_transfer_params") if isinstance(answer, dict) else None
    return params if isinstance(params, dict) else {}
