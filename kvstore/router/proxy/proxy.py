"""One request, from its parsed body to the last byte of its response.

How it works:

1. The request is placed on an engine (or a pair) and sent there. One such try is an attempt.
2. An attempt may be repeated while the client has received nothing. Nothing else of it is visible: KV that it left in the store
   equals the KV of the next attempt.
3. Therefore status and headers are held back until the first piece of the body arrives, and a response that is not streamed until
   it is complete. Streams are forwarded as complete events. A stream that breaks off ends with an error event.
4. Retries prefer engines that the request has not tried. At most ``retries`` further attempts are made:

   - connect error, 502, 503, 504: up to that limit;
   - reset, other 5xx, 429: one retry, because the request itself may be the cause;
   - timeout: no retry;
   - a status from the only remaining engine: no retry.
5. After two failures of prefill engines, or one before the last attempt, the decode engine computes the prompt.
6. After the last attempt the client gets the engine's own error response if there is one.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
from collections.abc import Callable, Mapping
from typing import Final

from starlette.types import Receive, Scope, Send

from kvstore.core.errors import DeadlineExceeded, Internal, KVStoreError, NotFound, Unavailable
from kvstore.observe.limited_log import LimitedLog
from kvstore.observe.metric_definitions import router as router_metrics
from kvstore.router.context import RouterContext
from kvstore.router.engines import Role
from kvstore.router.placement.placement import PlacedRequest, Placement, PlacementRequest
from kvstore.router.prompts.prompt_facts import PromptFacts, PromptReader
from kvstore.router.prompts.request_body import RequestBody
from kvstore.router.proxy.client_connection import ClientConnection, ClientStalledError, RawHeaders, wait_for_disconnect
from kvstore.router.proxy.event_stream import MAX_EVENT_BYTES, EventStream, EventTooLongError
from kvstore.router.proxy.openai_errors import error_body, error_event, http_status
from kvstore.router.proxy.pd_request import PrefillDecodeRequest
from kvstore.router.proxy.upstream import AttemptFailure, EngineResponse, FailureKind
from kvstore.rpc.http_server import ABORT

_log = LimitedLog(logging.getLogger(__name__))

MAX_RESPONSE_BYTES: Final = 256 << 20
"""Largest response that is not streamed; it is held in memory until it is complete."""
MAX_PARSED_BYTES: Final = 4 << 20
"""Largest response that is parsed as JSON to verify that it is complete. Of longer ones only both ends are checked."""
_COMPLETION_S: Final = 1.0
"""Time for the connection to end after the last event, at which clients disconnect."""
_ABORT_S: Final = 1.0
"""Time for the server to notice that a connection was aborted."""
_HOP_HEADERS: Final = frozenset(
    (b"connection", b"keep-alive", b"proxy-authenticate", b"te", b"trailer", b"transfer-encoding", b"upgrade", b"content-length")
) | {b"date", b"server"}
"""Response headers that are not forwarded: they belong to one connection, or the router's own server writes them."""
_JSON: Final = (b"content-type", b"application/json")
_RETRIED_ONCE: Final = frozenset({FailureKind.RESET, FailureKind.SERVER_ERROR, FailureKind.RATE_LIMITED})
_STATUS_FAILURES: Final = frozenset({FailureKind.GATEWAY, FailureKind.SERVER_ERROR, FailureKind.RATE_LIMITED})
_MAX_PREFILL_FAILURES: Final = 2


class ProxyRequest:
    """ASGI application for one request. Used once.

    Args:
        context: the router's state.
        placement: chooses engines.
        prompts: estimates prompt lengths and cached prefixes.
        body: the parsed request.
        raw: the request body as received.
        headers: headers for engines.
    """

    def __init__(
        self,
        context: RouterContext,
        placement: Placement,
        prompts: PromptReader,
        body: RequestBody,
        raw: bytes,
        headers: Mapping[str, str],
    ) -> None:
        self._context = context
        self._placement = placement
        self._prompts = prompts
        self._body = body
        self._raw = raw
        self._headers = headers
        self._started_s = context.now_s()
        self._events = EventStream()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve the request until it is answered, or the client disconnects or stalls; then cancel all calls to engines."""
        work = asyncio.ensure_future(self._serve(ClientConnection(send, self._context.config.client_timeout_ms / 1000)))
        disconnect = asyncio.ensure_future(wait_for_disconnect(receive))
        try:
            await asyncio.wait((work, disconnect), return_when=asyncio.FIRST_COMPLETED)
            if not work.done() and self._events.terminated:
                await asyncio.wait((work,), timeout=_COMPLETION_S)
            if not work.done():
                self._context.counters.add(router_metrics.CLIENTS_GONE)
            elif not work.cancelled() and isinstance(work.exception(), ClientStalledError):
                await self._abort(scope, disconnect)
                return
        finally:
            disconnect.cancel()
            work.cancel()
            await asyncio.wait((work, disconnect))
        if not work.cancelled():
            work.result()

    async def _abort(self, scope: Scope, disconnect: asyncio.Future[None]) -> None:
        """Abort the client's connection. Closing it would wait until the client reads the rest."""
        self._context.counters.add(router_metrics.CLIENTS_STUCK)
        _log.warning("client disconnected: it stopped reading (timeout_s=%g)", self._context.config.client_timeout_ms / 1000)
        abort: Callable[[], None] | None = scope.get("state", {}).get(ABORT)
        if abort is not None:  # other ASGI servers do not provide it, and close the connection
            abort()
            await asyncio.wait((disconnect,), timeout=_ABORT_S)

    async def _serve(self, client: ClientConnection) -> None:
        """Answer the client; every exception becomes an error response.

        Raises:
            ClientStalledError: the client stopped reading.
        """
        try:
            await self._answer(client)
        except KVStoreError as error:
            await self._respond_error(client, error)
        except ClientStalledError:
            raise
        except Exception:  # edge of the process: an internal error must not hang or cut the client's connection
            logging.getLogger(__name__).exception("request failed: internal error")
            self._context.counters.add(router_metrics.INTERNAL_ERRORS)
            await self._respond_error(client, Internal("internal error of the router; see its log"))

    async def _respond_error(self, client: ClientConnection, error: KVStoreError) -> None:
        self._context.counters.add(router_metrics.ERRORS)
        if not client.started:
            headers = [_JSON, *([(b"retry-after", b"1")] if error.retryable else [])]
            await client.respond(http_status(error), headers, error_body(error))

    # ---- attempts
    async def _answer(self, client: ClientConnection) -> None:
        self._check_model()
        facts = await self._prompts.read(self._body, self._headers)
        engines, retries = self._context.health.engines, self._context.config.retries
        prefill_engines = {name for name, engine in engines.items() if engine.config.role is Role.PREFILL}
        tried: set[str] = set()
        prefill_failures = single_retries = 0
        for attempt in range(1 + retries):
            if attempt:
                self._context.counters.add(router_metrics.RETRIES)
            decode_only = prefill_failures >= _MAX_PREFILL_FAILURES or (prefill_failures > 0 and attempt == retries)
            request = self._placement_request(facts, tried | prefill_engines if decode_only else tried)
            failure, engine = await self._attempt(client, request, facts)
            if failure is None:
                return
            tried.add(engine)
            self._context.record_failure(engine, failure)
            if engine in prefill_engines:
                prefill_failures += 1
                self._context.counters.add(router_metrics.PREFILLS_FAILED)
                may_retry = failure.kind not in {FailureKind.TIMEOUT, FailureKind.REJECTED}
            else:
                may_retry = self._may_retry(failure.kind, engine, tried, single_retries)
                single_retries += failure.kind in _RETRIED_ONCE
            if client.started or not may_retry:
                break
        assert failure is not None  # at least one attempt was made
        if client.started:
            return
        if failure.response is not None:
            status, headers, content = failure.response
            await client.respond(status, _forwarded(headers), content)
            return
        raise failure.error

    def _may_retry(self, kind: FailureKind, engine: str, tried: set[str], single_retries: int) -> bool:
        """Whether a failure of a plain or decode engine may be retried; see the module's rule 4."""
        if kind is FailureKind.TIMEOUT or (kind in _RETRIED_ONCE and single_retries):
            return False
        health = self._context.health
        candidates = health.candidates(health.engines[engine].config.role, self._body.model or None)
        return kind not in _STATUS_FAILURES or not tried.issuperset(candidates)

    def _check_model(self) -> None:
        health = self._context.health
        role = Role.DECODE if self._context.config.pairs else Role.PLAIN
        if self._body.model and not health.candidates(role, self._body.model):
            raise NotFound("no engine serves this model", model=self._body.model, served=", ".join(health.models())[:512])

    def _placement_request(self, facts: PromptFacts, avoid: set[str]) -> PlacementRequest:
        config = self._context.config
        output = min(self._body.output_tokens or config.expected_output_tokens, config.expected_output_tokens)
        return PlacementRequest(
            attempt_id=secrets.token_hex(16),
            model=self._body.model,
            prompt_tokens=facts.prompt_tokens,
            cached_tokens=self._prompts.cached_tokens(facts),
            hit_tokens=facts.hit_tokens,
            output_tokens=output * self._body.choices,
            avoid=frozenset(avoid),
        )

    async def _attempt(
        self, client: ClientConnection, request: PlacementRequest, facts: PromptFacts
    ) -> tuple[AttemptFailure | None, str]:
        """Make one attempt and forward its response.

        Returns:
            The failure, or None if the client was answered; and the engine that it belongs to.
        """
        placed = await self._placement.place(request)
        try:
            outcome, engine = await self._call(placed, facts)
            if isinstance(outcome, AttemptFailure):
                return outcome, engine
            failure = await self._forward(client, placed, outcome)
            if failure is None and outcome.ok:
                self._context.record_success(engine)
            return failure, engine
        finally:
            self._placement.release(placed)

    async def _call(self, placed: PlacedRequest, facts: PromptFacts) -> tuple[EngineResponse | AttemptFailure, str]:
        """Call the engines of a placed request; also return the engine that the outcome belongs to."""
        for engine in (placed.engine, placed.prefill):
            if engine is not None:
                self._context.memory.insert(engine, facts.chain, self._context.now_s())
        self._context.counters.add(router_metrics.ATTEMPTS)
        if placed.prefill is not None:
            return await PrefillDecodeRequest(self._context, self._placement, self._body, self._headers).run(placed)
        raw = self._raw
        if self._context.config.pairs and "kv_transfer_params" in self._body.fields:
            raw = self._body.for_decode(None)  # a client must not choose the source of a decode engine's KV
        upstream = self._context.upstreams[placed.engine]
        return await upstream.post(self._body.path, raw, self._headers), placed.engine

    # ---- response
    async def _forward(self, client: ClientConnection, placed: PlacedRequest, response: EngineResponse) -> AttemptFailure | None:
        """Forward a response; return a failure if it was incomplete or invalid."""
        counters = self._context.counters
        self._placement.prefilled(placed)
        counters.add(router_metrics.ANSWERS)
        try:
            if response.streams:
                await self._forward_stream(client, placed, response)
            else:
                content = await response.body(MAX_RESPONSE_BYTES)
                if response.ok and not self._is_complete(response, content):
                    raise Unavailable("the engine returned an invalid response", engine=placed.engine)
                await client.respond(response.status, _response_headers(response, placed), content)
        except KVStoreError as error:
            if self._events.terminated:  # only the end of the connection is missing
                await client.write(b"", last=True)
                return None
            counters.add(router_metrics.ANSWERS_BROKEN)
            if client.started:
                await client.write(error_event(error), last=True)
            timeout = isinstance(error, DeadlineExceeded)
            return AttemptFailure(FailureKind.TIMEOUT if timeout else FailureKind.RESET, error)
        finally:
            await response.close()
        return None

    def _is_complete(self, response: EngineResponse, content: bytes) -> bool:
        """Whether a response that is not streamed is complete. The end of a connection alone does not show it."""
        if self._body.stream:
            return False
        if not response.is_json or not response.readable:
            return bool(content)
        if len(content) > MAX_PARSED_BYTES:
            return content.lstrip()[:1] == b"{" and content.rstrip()[-1:] == b"}"
        try:
            return isinstance(json.loads(content, parse_int=len), dict)  # integers may have any length
        except (ValueError, RecursionError):
            return False

    async def _forward_stream(self, client: ClientConnection, placed: PlacedRequest, response: EngineResponse) -> None:
        """Forward a stream event by event. The stream of an error response is forwarded as it arrives.

        Raises:
            Unavailable: the stream broke off, or an event is too long.
            DeadlineExceeded: the engine sent nothing for too long.
        """
        first_byte_ms = int((self._context.now_s() - self._started_s) * 1000)
        self._context.counters.add(router_metrics.FIRST_BYTE_SECONDS, first_byte_ms)
        await client.start(response.status, _response_headers(response, placed))
        await self._forward_piece(client, response, response.first)
        async for piece in response.rest():
            await self._forward_piece(client, response, piece)
        if response.ok and not self._events.may_end:
            raise Unavailable("the engine's stream ended early", engine=placed.engine)
        await client.write(self._events.rest(), last=True)

    async def _forward_piece(self, client: ClientConnection, response: EngineResponse, piece: bytes) -> None:
        try:
            ready = self._events.feed(piece) if response.ok else piece
        except EventTooLongError:
            raise Unavailable("an event of the engine's stream is too long", max_bytes=MAX_EVENT_BYTES) from None
        if ready:
            await client.write(ready)


def _response_headers(response: EngineResponse, placed: PlacedRequest) -> list[tuple[bytes, bytes]]:
    headers = [*_forwarded(response.headers), (b"x-kvstore-engine", placed.engine.encode())]
    if placed.prefill is not None:
        headers.append((b"x-kvstore-prefill", placed.prefill.encode()))
    return headers


def _forwarded(headers: RawHeaders) -> list[tuple[bytes, bytes]]:
    return [(name, value) for name, value in headers if name.lower() not in _HOP_HEADERS]
