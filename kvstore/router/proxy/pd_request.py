"""One attempt of a request on a prefill engine and a decode engine.

In the concurrent flow both engines are called at once. The decode engine waits for the prompt's KV, which the prefill engine
hands over layer by layer; a transfer id from the router joins the two calls. In the sequential flow the decode engine is called
with the ``kv_transfer_params`` of the prefill engine's response, as vLLM's own connectors expect.

A failure belongs to the engine whose call failed. There is one exception: a decode engine that times out before its prefill
engine has answered was waiting for the prompt, so the prefill engine is charged with the timeout.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Mapping
from typing import Any, Final

from kvstore.core.errors import DeadlineExceeded, KVStoreError, Unavailable
from kvstore.observe.metric_definitions import router as router_metrics
from kvstore.router.context import RouterContext
from kvstore.router.placement.placement import PlacedRequest, Placement
from kvstore.router.prompts.request_body import RequestBody
from kvstore.router.proxy.upstream import AttemptFailure, EngineResponse, FailureKind

PREFILL_GRACE_S: Final = 10.0
"""Time for a prefill engine to finish after the decode engine has answered."""
MAX_UNFINISHED_PREFILLS: Final = 256
"""Most prefill calls that continue after their request was answered; each holds a connection."""
_MAX_RESPONSE_BYTES: Final = 16 << 20
_OK: Final = 200

TransferParams = Mapping[str, Any]


class PrefillDecodeRequest:
    """One attempt on two engines. The response is the decode engine's.

    Args:
        context: the router's state.
        placement: notified when the prompt is computed.
        body: the request.
        headers: headers for the engines.
    """

    def __init__(self, context: RouterContext, placement: Placement, body: RequestBody, headers: Mapping[str, str]) -> None:
        self._context = context
        self._placement = placement
        self._body = body
        self._headers = headers
        self._transfer_id = secrets.token_hex(16)

    async def run(self, placed: PlacedRequest) -> tuple[EngineResponse | AttemptFailure, str]:
        """Call both engines.

        Returns:
            The response or failure, and the engine that it belongs to.
        """
        assert placed.prefill is not None
        if self._context.config.flow == "sequential":
            return await self._run_sequentially(placed, placed.prefill)
        return await self._run_concurrently(placed, placed.prefill)

    async def _run_sequentially(self, placed: PlacedRequest, prefill_engine: str) -> tuple[EngineResponse | AttemptFailure, str]:
        params = await self._prefill(placed, prefill_engine)
        if isinstance(params, AttemptFailure):
            return params, prefill_engine
        return await self._decode(placed, prefill_engine, params), placed.engine

    async def _run_concurrently(self, placed: PlacedRequest, prefill_engine: str) -> tuple[EngineResponse | AttemptFailure, str]:
        prefill = asyncio.ensure_future(self._prefill(placed, prefill_engine))
        decode = asyncio.ensure_future(self._decode(placed, prefill_engine, {}))
        outcome: EngineResponse | AttemptFailure | None = None
        try:
            await asyncio.wait((prefill, decode), return_when=asyncio.FIRST_COMPLETED)
            if not decode.done() and isinstance(failure := prefill.result(), AttemptFailure):
                return failure, prefill_engine
            outcome = await decode
            if isinstance(outcome, AttemptFailure) and outcome.kind is FailureKind.TIMEOUT:
                timeout_s = self._context.config.first_byte_timeout_ms / 1000
                failure = prefill.result() if prefill.done() else _timeout(prefill_engine, timeout_s)
                if isinstance(failure, AttemptFailure):
                    return failure, prefill_engine
            return outcome, placed.engine
        finally:
            if not isinstance(outcome, EngineResponse):
                await _cancel(prefill, decode)
            elif outcome.ok and (prefill.done() or len(self._context.background) < MAX_UNFINISHED_PREFILLS):
                self._context.run_in_background(asyncio.ensure_future(self._finish_prefill(prefill_engine, prefill)))
            else:
                prefill.cancel()
                self._context.run_in_background(prefill)

    async def _finish_prefill(self, engine: str, prefill: asyncio.Future[TransferParams | AttemptFailure]) -> None:
        """Wait for a prefill engine whose request was answered without its response, and record a failure."""
        try:
            await asyncio.wait((prefill,), timeout=PREFILL_GRACE_S)
            outcome = prefill.result() if prefill.done() else _timeout(engine, PREFILL_GRACE_S)
        finally:
            prefill.cancel()
        if isinstance(outcome, AttemptFailure):
            self._context.counters.add(router_metrics.PREFILLS_FAILED)
            self._context.record_failure(engine, outcome)

    async def _prefill(self, placed: PlacedRequest, engine: str) -> TransferParams | AttemptFailure:
        """Compute the prompt on the prefill engine.

        Returns:
            ``kv_transfer_params`` for the decode engine, or the failure. A 4xx response is a failure of kind REJECTED.
        """
        params = {"do_remote_decode": True, "transfer_id": self._transfer_id, "decode_node": self._node(placed.engine)}
        body = self._body.for_prefill(params)
        response = await self._context.upstreams[engine].post(self._body.path, body, self._headers)
        if isinstance(response, AttemptFailure):
            return response
        try:
            content = await response.body(_MAX_RESPONSE_BYTES)
        except KVStoreError as broken:
            return AttemptFailure(FailureKind.RESET, broken)
        finally:
            await response.close()
        if response.status != _OK:
            error = Unavailable("the prefill engine rejected the request", engine=engine, status=response.status)
            return AttemptFailure(FailureKind.REJECTED, error, (response.status, response.headers, content))
        self._context.record_success(engine)
        self._placement.prefilled(placed)
        return _transfer_params(content)

    async def _decode(
        self, placed: PlacedRequest, prefill_engine: str, returned: TransferParams
    ) -> EngineResponse | AttemptFailure:
        params = {
            "do_remote_prefill": True,
            "transfer_id": self._transfer_id,
            "prefill_node": self._node(prefill_engine),
            **returned,
        }
        body = self._body.for_decode(params)
        return await self._context.upstreams[placed.engine].post(self._body.path, body, self._headers)

    def _node(self, engine: str) -> str:
        return self._context.health.engines[engine].config.node


def _timeout(engine: str, seconds: float) -> AttemptFailure:
    error = DeadlineExceeded("the prefill engine did not answer in time", engine=engine, seconds=seconds)
    return AttemptFailure(FailureKind.TIMEOUT, error)


async def _cancel(
    prefill: asyncio.Future[TransferParams | AttemptFailure], decode: asyncio.Future[EngineResponse | AttemptFailure]
) -> None:
    """Cancel both calls, which closes their connections, so that the engines cancel the request."""
    prefill.cancel()
    decode.cancel()
    await asyncio.wait((prefill, decode))
    if not decode.cancelled() and isinstance(response := decode.result(), EngineResponse):
        await response.close()


def _transfer_params(content: bytes) -> dict[str, Any]:
    """Return ``kv_transfer_params`` of a prefill engine's response; empty if it has none."""
    try:
        response = json.loads(content)
    except (ValueError, RecursionError):
        return {}
    params = response.get("kv_transfer_params") if isinstance(response, dict) else None
    return params if isinstance(params, dict) else {}
