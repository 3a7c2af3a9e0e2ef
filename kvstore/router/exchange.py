"""One request from its body to the last byte of its answer: places it, asks engines, tries others where that is safe, passes on.

An attempt may be repeated as long as the client has seen nothing of an answer, for nothing else of it is visible to anybody: KV
that it left behind is the same as the next one makes. The head of an answer is held back until the first piece of its body is
here, so that an engine which dies in the middle of the prompt is no reason to fail; an answer that is not streamed, until it is
complete. Attempts are bounded; one that was lost after it had been sent, or at which the engine failed, is repeated once only,
for the request itself may be the reason; one that took too long never is. An engine that says it failed, or that it takes no such
request, is held to be the reason once another one has answered the same request.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import secrets
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from starlette.types import Message, Receive, Scope, Send

from kvstore.core.errors import DeadlineExceeded, Internal, KVStoreError, NotFound, Unavailable
from kvstore.observe.limited_log import LimitedLog
from kvstore.router.body import ParsedBody
from kvstore.router.config import Role
from kvstore.router.errors import error_body, error_event, http_status
from kvstore.router.pair import PairCall
from kvstore.router.parts import Parts, Place, Placement, Wanted
from kvstore.router.prompts import PromptFacts, PromptReader
from kvstore.router.upstream import Answer, Failure, FailureKind
from kvstore.rpc.http_server import ABORT

_log = LimitedLog(logging.getLogger(__name__))

MAX_ANSWER_BYTES: Final = 256 << 20
"""Of an answer that is not streamed, and so is held until it is complete."""
_SHUNNED_S: Final = 1.0
"""For so long others come before an engine that lost a request, and may be dying: until the next check or so."""
_PIECE_BYTES: Final = 16 << 10
"""What a client is given at once. Each piece has its time, so that a long answer may be taken slowly."""
_ENDED_S: Final = 1.0
"""For the end of an answer behind its last event, at which clients leave."""
_ABORTED_S: Final = 1.0
"""Until the server has seen that a connection was cut: a turn of the event loop or two."""
_NOT_PASSED: Final = frozenset(
    (b"connection", b"keep-alive", b"proxy-authenticate", b"te", b"trailer", b"transfer-encoding", b"upgrade", b"content-length")
) | {b"date", b"server"}  # of whoever sends the answer, which is this router: its own server writes them
_JSON: Final = (b"content-type", b"application/json")
_END: Final = re.compile(rb"^data: ?\[DONE\]\s*$", re.MULTILINE)
"""The last of a stream: what ends without it has broken off."""
_EVENT_ENDS: Final = (b"\n\n", b"\r\n\r\n", b"\n\r\n", b"\r\r")
_MOST_EVENT_BYTES: Final = 64 << 20
"""Of an event: pieces of one are held back until it is whole."""
_PARSED_BYTES: Final = 4 << 20
"""Up to so many an answer is read as JSON, to see that it is whole; longer ones are looked at from both ends."""
_NOT_FOUND: Final = 404
_LIMITED: Final = 429
_MAY_BE_THE_REQUEST: Final = frozenset({FailureKind.LOST, FailureKind.ERRED})
_UNPROVEN: Final = frozenset({FailureKind.BUSY, FailureKind.ERRED})
"""What an engine says of itself, and may say of one client alone: it counts once another engine has answered the request."""
_Headers = Iterable[tuple[bytes, bytes]]


class _StuckError(Exception):
    """The client takes nothing. Never leaves this module: there is nobody to be told."""


class _Client:
    """Who asked: takes each piece in time, or is stuck.

    Args:
        send: of ASGI.
        timeout_s: for each piece.
    """

    def __init__(self, send: Send, timeout_s: float) -> None:
        self._send = send
        self._timeout_s = timeout_s
        self.started = False
        """Whether it was given a head."""

    async def start(self, status: int, headers: _Headers) -> None:
        """Gives it the head of an answer."""
        self.started = True
        await self._give({"type": "http.response.start", "status": status, "headers": list(headers)})

    async def piece(self, piece: bytes, *, last: bool = False) -> None:
        """Gives it some of the body."""
        for start in range(0, max(1, len(piece)), _PIECE_BYTES):
            some, more = piece[start : start + _PIECE_BYTES], start + _PIECE_BYTES < len(piece)
            await self._give({"type": "http.response.body", "body": some, "more_body": more or not last})

    async def whole(self, status: int, headers: _Headers, content: bytes) -> None:
        """Gives it all of an answer."""
        await self.start(status, [*headers, (b"content-length", b"%d" % len(content))])
        await self.piece(content, last=True)

    async def _give(self, message: Message) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._send(message)
        except TimeoutError:
            raise _StuckError from None


class Exchange:
    """An ASGI answer to one request. Made for one use.

    Args:
        parts: of the router.
        placement: decides where it goes.
        prompts: tells what is known of its prompt.
        body: the request.
        raw: its body as it came.
        headers: to be sent to engines.
    """

    def __init__(
        self,
        parts: Parts,
        placement: Placement,
        prompts: PromptReader,
        body: ParsedBody,
        raw: bytes,
        headers: Mapping[str, str],
    ) -> None:
        self._parts = parts
        self._placement = placement
        self._prompts = prompts
        self._body = body
        self._raw = raw
        self._headers = headers
        self._began_s = parts.now_s()
        self._ended = False
        """Whether the client was given all: it may leave."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves it until it is answered, the client is gone or takes nothing; then all that was asked for it is called off."""
        work = asyncio.ensure_future(self._serve(_Client(send, self._parts.config.client_timeout_s)))
        gone = asyncio.ensure_future(_gone(receive))
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
            if not work.done() and self._ended:
                await asyncio.wait((work,), timeout=_ENDED_S)
            if not work.done():
                self._parts.counters.add("router_clients_gone_total")
            elif not work.cancelled() and isinstance(work.exception(), _StuckError):
                await self._cut(scope, gone)
                return
        finally:
            gone.cancel()
            work.cancel()
            await asyncio.wait((work, gone))
        if not work.cancelled():
            work.result()

    async def _cut(self, scope: Scope, gone: asyncio.Future[None]) -> None:
        """Ends the connection: closing it would wait until all is taken."""
        self._parts.counters.add("router_clients_stuck_total")
        _log.warning("a client took nothing of its answer for %g s: it is cut off", self._parts.config.client_timeout_s)
        abort: Callable[[], None] | None = scope.get("state", {}).get(ABORT)
        if abort is not None:  # another server than ours has none, and closes as well as it can
            abort()
            await asyncio.wait((gone,), timeout=_ABORTED_S)

    async def _serve(self, client: _Client) -> None:
        """Answers, whatever happens.

        Raises:
            _StuckError: the client takes nothing.
        """
        counters = self._parts.counters
        try:
            await self._answer(client)
        except KVStoreError as error:
            await self._refuse(client, error)
        except _StuckError:
            raise
        except Exception:  # the edge of the process: a bug of ours must not end as a hung or cut connection
            logging.getLogger(__name__).exception("a request failed inside the router")
            counters.add("router_internal_errors_total")
            await self._refuse(client, Internal("the router failed; its log says how"))

    async def _refuse(self, client: _Client, error: KVStoreError) -> None:
        self._parts.counters.add("router_errors_total")
        if not client.started:
            headers = [_JSON, *([(b"retry-after", b"1")] if error.retryable else [])]
            await client.whole(http_status(error), headers, error_body(error))

    async def _answer(self, client: _Client) -> None:
        self._check_model()
        facts = await self._prompts.read(self._body, self._headers)
        avoid: set[str] = set()
        unproven: dict[str, Failure] = {}
        suspect = 0
        prefills = {name for name, engine in self._parts.pool.engines.items() if engine.config.role is Role.PREFILL}
        for attempt in range(1 + self._parts.config.retries):
            if attempt:
                self._parts.counters.add("router_retries_total")
            if not prefills.isdisjoint(avoid) and (suspect > 1 or attempt == self._parts.config.retries):
                avoid |= prefills  # a decode engine that computes the prompt tells whose fault it is
            place = await self._placement.place(self._wanted(facts, avoid))
            failure: Failure | None = None
            done = False
            try:
                outcome, culprit = await self._ask(place, facts)
                failure = await self._pass_on(client, place, outcome) if isinstance(outcome, Answer) else outcome
                done = failure is None
            finally:
                (self._placement.done if done else self._placement.dropped)(place)
            if failure is None:
                if isinstance(outcome, Answer) and outcome.well:  # a refusal tells nothing of any engine
                    self._parts.pool.succeeded(place.engine)
                    for engine, met in unproven.items():
                        self._blame(engine, met)
                return
            avoid.add(culprit)
            self._note(culprit, failure)
            suspect += failure.kind in _MAY_BE_THE_REQUEST
            if failure.kind in _UNPROVEN:
                if not self._may_lack_model(culprit, failure):
                    unproven[culprit] = failure
                if failure.kind is FailureKind.ERRED and culprit not in prefills and not self._others(culprit):
                    break
            if client.started or failure.kind is FailureKind.LATE or (suspect > 1 and culprit not in prefills):
                break
        assert failure is not None  # there is one attempt at least
        if client.started:
            return
        if failure.answer is not None:
            status, headers, content = failure.answer
            await client.whole(status, _passed(headers), content)
            return
        raise failure.error

    def _others(self, engine: str) -> bool:
        """Whether there is another that could do what an engine failed at."""
        pool = self._parts.pool
        role, model = pool.engines[engine].config.role, self._body.model or None
        return any(other != engine for other in pool.candidates(role, self._parts.now_s(), model))

    def _may_lack_model(self, engine: str, failure: Failure) -> bool:
        """Whether an engine that does not say what it serves was sent a request for what it may not have."""
        not_found = failure.answer is not None and failure.answer[0] == _NOT_FOUND
        return not_found and bool(self._body.model) and not self._parts.pool.engines[engine].models

    def _check_model(self) -> None:
        pool = self._parts.pool
        role = Role.DECODE if self._parts.config.pairs else Role.PLAIN
        now_s = self._parts.now_s()
        if not pool.candidates(role, now_s):
            raise Unavailable("no engine is there", engines=len(pool.engines))
        if self._body.model and not pool.candidates(role, now_s, self._body.model):
            raise NotFound("no engine serves this model", model=self._body.model, served=", ".join(pool.models())[:512])

    def _wanted(self, facts: PromptFacts, avoid: set[str]) -> Wanted:
        config = self._parts.config
        output = min(self._body.output_tokens or config.expected_output_tokens, config.expected_output_tokens)
        return Wanted(
            attempt=secrets.token_hex(16),
            model=self._body.model,
            prompt_tokens=facts.prompt_tokens,
            near_tokens=self._prompts.near(facts),
            hit_tokens=facts.hit_tokens,
            output_tokens=output * self._body.choices,
            avoid=frozenset(avoid),
        )

    async def _ask(self, place: Place, facts: PromptFacts) -> tuple[Answer | Failure, str]:
        """Asks the engines of a place; with a failure, names the engine that is to blame."""
        for engine in (place.engine, place.prefill):
            if engine is not None:
                self._parts.memory.saw(engine, facts.chain)
        self._parts.counters.add("router_attempts_total")
        if place.prefill is not None:
            call = PairCall(self._parts, self._placement, self._body, self._headers)
            return await call.run(place)
        outcome = await self._parts.upstreams[place.engine].post(self._body.path, self._raw, self._headers)
        return outcome, place.engine

    def _note(self, engine: str, failure: Failure) -> None:
        """What an attempt met tells how an engine is."""
        pool, now_s, why = self._parts.pool, self._parts.now_s(), str(failure.error)
        self._parts.counters.add(f"router_attempts_{failure.kind}_total")
        _log.warning("an attempt on %s failed: %s", engine, why)
        if failure.kind is FailureKind.REFUSED:
            self._went_out(engine, why, out=pool.refused(engine, now_s, why))
        elif failure.kind not in _UNPROVEN:
            pool.shun(engine, now_s, _SHUNNED_S)
            self._failed(engine, why)

    def _blame(self, engine: str, failure: Failure) -> None:
        """What an engine could not do, another one has done."""
        if failure.kind is FailureKind.BUSY:
            pool, limited = self._parts.pool, failure.answer is not None and failure.answer[0] == _LIMITED
            (pool.limits if limited else pool.busy)(engine, self._parts.now_s(), failure.retry_after_s)
        else:
            self._failed(engine, str(failure.error))

    def _failed(self, engine: str, why: str) -> None:
        """An engine is to blame for a request that came to nothing."""
        self._went_out(engine, why, out=self._parts.pool.failed(engine, self._parts.now_s(), why))

    @staticmethod
    def _went_out(engine: str, why: str, *, out: bool) -> None:
        if out:
            logging.getLogger(__name__).warning("engine %s is out: %s", engine, why)

    # ---- the answer
    async def _pass_on(self, client: _Client, place: Place, answer: Answer) -> Failure | None:
        """Passes an answer on; what was wrong with it, if anything: it was not complete."""
        parts = self._parts
        self._placement.prefilled(place)
        parts.counters.add("router_answers_total")
        try:
            if answer.streams:
                await self._stream(client, place, answer)
            else:
                content = await answer.body(MAX_ANSWER_BYTES)
                if answer.well and not self._is_whole(answer, content):
                    raise Unavailable("the engine's answer is none to what was asked", engine=place.engine)
                await client.whole(answer.status, self._headers_of(answer, place), content)
        except KVStoreError as error:
            if self._ended:  # what it lacks is the end of a connection
                await client.piece(b"", last=True)
                return None
            parts.counters.add("router_answers_broken_total")
            if client.started:
                await client.piece(error_event(error), last=True)
            return Failure(FailureKind.LATE if isinstance(error, DeadlineExceeded) else FailureKind.LOST, error)
        finally:
            await answer.close()
        return None

    def _is_whole(self, answer: Answer, content: bytes) -> bool:
        """Whether an answer at once is one, and all of it: not every end of a connection tells a broken one."""
        if self._body.stream:
            return False
        if not answer.is_json or not answer.readable:
            return bool(content)
        if len(content) > _PARSED_BYTES:
            return content.lstrip()[:1] == b"{" and content.rstrip()[-1:] == b"}"
        try:
            return isinstance(json.loads(content, parse_int=len), dict)  # numbers may be as long as they like
        except (ValueError, RecursionError):
            return False

    async def _stream(self, client: _Client, place: Place, answer: Answer) -> None:
        """Passes the events of an answer on as they come, each when it is whole.

        Raises:
            Unavailable: it ended before its end.
            DeadlineExceeded: nothing came for too long.
        """
        parts = self._parts
        parts.counters.add("router_first_byte_ms_total", int((parts.now_s() - self._began_s) * 1000))
        await client.start(answer.status, self._headers_of(answer, place))
        checked, held = answer.well, bytearray()
        await self._events(client, held, answer.first, checked=checked)
        async for piece in answer.rest():
            await self._events(client, held, piece, checked=checked)
        if checked and not self._ended and not _END.search(held):
            raise Unavailable("the engine's stream ended before its end", engine=place.engine)
        await client.piece(bytes(held), last=True)

    async def _events(self, client: _Client, held: bytearray, piece: bytes, *, checked: bool) -> None:
        """Gives the client the events that are whole by now; the beginning of the next is held back."""
        if not checked:
            await client.piece(piece)
            return
        seam = max(0, len(held) - 3)  # an end may lie across two pieces
        held += piece
        end = max(at + len(mark) if (at := held.rfind(mark, seam)) >= 0 else 0 for mark in _EVENT_ENDS)
        if end:
            whole = bytes(held[:end])
            del held[:end]
            self._ended = self._ended or _END.search(whole) is not None
            await client.piece(whole)
        while held[:1] == b":" and (line := held.find(b"\n") + 1):  # a comment keeps a connection alive, and belongs to no event
            await client.piece(bytes(held[:line]))
            del held[:line]
        if len(held) > _MOST_EVENT_BYTES:
            raise Unavailable("an event of the engine's stream is too long", most_bytes=_MOST_EVENT_BYTES)

    @staticmethod
    def _headers_of(answer: Answer, place: Place) -> list[tuple[bytes, bytes]]:
        headers = [*_passed(answer.headers), (b"x-kvstore-engine", place.engine.encode())]
        if place.prefill is not None:
            headers.append((b"x-kvstore-prefill", place.prefill.encode()))
        return headers


async def _gone(receive: Receive) -> None:
    """Waits until the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _passed(headers: _Headers) -> list[tuple[bytes, bytes]]:
    return [(name, value) for name, value in headers if name.lower() not in _NOT_PASSED]
