"""An OpenAI-compatible server that computes nothing: a real HTTP server on a real socket with scripted answers and failures.

For tests of the router. Its answers contain its name and the number of words of the prompt; a prompt's words are its tokens.
"""

from __future__ import annotations

import asyncio
import socket
from collections import Counter, deque
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

_BLOCK_TOKENS = 16
_TICK_S = 0.005


@dataclass(slots=True)
class Behaviour:
    """Scripted handling of one request.

    Attributes:
        status: status of the answer.
        body: body of an answer that is not a completion.
        pieces: pieces of a streamed answer.
        hold: the answer waits until this event is set.
        hold_after: number of stream pieces before it waits for ``hold``.
        cut_after: the connection is cut after this number of stream pieces; 0: before the head.
        cut_inside: the connection is cut within an answer that is not streamed.
        unended: a stream closes without its last event.
        headers: further headers.
        waits_for_prompts: a prefill engine never hands its prompt over.
        raw: the body, piece by piece, instead of an answer; None: the connection is cut.
        hold_behind: ``raw`` does not end before this event is set.
    """

    status: int = 200
    body: dict[str, Any] | None = None
    pieces: int = 3
    hold: asyncio.Event | None = None
    hold_after: int = 0
    cut_after: int | None = None
    cut_inside: bool = False
    unended: bool = False
    headers: dict[str, str] = field(default_factory=dict)
    waits_for_prompts: bool = False
    raw: Sequence[bytes | None] | None = None
    hold_behind: asyncio.Event | None = None


class FakeEngine:
    """One engine, on the running event loop. An async context manager.

    Attributes:
        name: name in its answers.
        requests: received bodies.
        seen_headers: their headers.
        script: handling of the next requests; later requests succeed.
        gone: requests whose client disconnected before the answer.
        well: answer of ``/health``.
        models: served models.
        cache: name of its published cache; empty: it publishes none.
    """

    def __init__(self, name: str, *, models: tuple[str, ...] = ("m",), capacity_blocks: int = 1_000) -> None:
        self.name = name
        self.models = models
        self.well = True
        self.cache = ""
        self.requests: list[dict[str, Any]] = []
        self.seen_headers: list[dict[str, str]] = []
        self.script: deque[Behaviour] = deque()
        self.default = Behaviour()
        self.gone = 0
        self.calls: Counter[str] = Counter()
        self.running = 0
        self.started_s = 1_000.0
        self.silence: asyncio.Event | None = None
        """Where given, it says nothing of its figures until this is set."""
        self._capacity_blocks = capacity_blocks
        self._port = 0
        self._server: uvicorn.Server | None = None
        self._task: asyncio.Task[None] | None = None
        self.changed = asyncio.Condition()

    # ---- life
    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.stop()

    async def start(self) -> None:
        """Listens; again at the same address after a stop."""
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", self._port))
        listener.listen(256)  # from here on connections wait, until the server takes them
        self._port = listener.getsockname()[1]
        config = uvicorn.Config(self._app(), log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=1)
        self._server = PromptServer(config)
        self._task = asyncio.create_task(self._server.serve(sockets=[listener]))

    async def stop(self) -> None:
        """End like a killed process: connections are cut."""
        if self._server is None or self._task is None:
            return
        self._server.should_exit = self._server.force_exit = True
        self.cut_all()
        await self._task
        self.cut_all()  # including requests that arrived since
        self._server = self._task = None

    def cut_all(self) -> None:
        """Cut all connections."""
        assert self._server is not None
        for connection in list(self._server.server_state.connections):
            connection.transport.abort()

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self._port}"

    async def until_requests(self, count: int) -> None:
        """Wait until it has received this number of requests."""
        async with self.changed:
            await self.changed.wait_for(lambda: len(self.requests) >= count)

    async def until_gone(self, count: int) -> None:
        """Wait until this number of clients has disconnected."""
        async with self.changed:
            await self.changed.wait_for(lambda: self.gone >= count)

    # ---- doors
    def _app(self) -> FastAPI:
        app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
        app.add_api_route("/health", self._health, methods=["GET"], response_model=None)
        app.add_api_route("/v1/models", self._models, methods=["GET"], response_model=None)
        app.add_api_route("/metrics", self._metrics, methods=["GET"], response_model=None)
        app.add_api_route("/tokenize", self._tokenize, methods=["POST"], response_model=None)
        app.add_api_route("/v1/completions", self._complete, methods=["POST"], response_model=None)
        app.add_api_route("/v1/chat/completions", self._complete, methods=["POST"], response_model=None)
        return app

    async def _health(self) -> Response:
        self.calls["health"] += 1
        return Response(status_code=200 if self.well else 503)

    async def _models(self) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": model, "object": "model"} for model in self.models]})

    async def _metrics(self) -> Response:
        self.calls["metrics"] += 1
        if self.silence is not None:
            await self.silence.wait()
        labels = f'engine="0",model_name="{"".join(self.models[:1])}"'
        return PlainTextResponse(
            f"# HELP vllm:num_requests_running Number of requests\nvllm:num_requests_running{{{labels}}} {float(self.running)}\n"
            f"vllm:num_requests_waiting{{{labels}}} 0.0\nvllm:kv_cache_usage_perc{{{labels}}} 0.25\n"
            f'vllm:cache_config_info{{block_size="{_BLOCK_TOKENS}",num_gpu_blocks="{self._capacity_blocks}",x="y"}} 1.0\n'
            f"process_start_time_seconds {self.started_s}\n"
            + (f'vllm:kvstore_cache_info{{{labels},cache="{self.cache}"}} 1.0\n' if self.cache else "")
        )

    async def _tokenize(self, request: Request) -> Response:
        self.calls["tokenize"] += 1
        tokens = tokens_of(await request.json())
        return JSONResponse({"count": len(tokens), "max_model_len": 4096, "tokens": tokens})

    async def _complete(self, request: Request) -> Response:
        body = await request.json()
        behaviour = self.script.popleft() if self.script else self.default
        async with self.changed:
            self.requests.append(body)
            self.seen_headers.append(dict(request.headers))
            self.changed.notify_all()
        self.running += 1
        try:
            if behaviour.cut_after == 0:
                return _Cut(self)
            if behaviour.hold is not None and not (body.get("stream") and behaviour.hold_after):
                await self._hold(request, behaviour.hold)
            if behaviour.waits_for_prompts and "kv_transfer_params" in body:
                await self._hold(request, asyncio.Event())
            if behaviour.raw is not None:
                kind = behaviour.headers.get("content-type", "text/event-stream")
                return StreamingResponse(
                    self._raw(behaviour.raw, behaviour.hold_behind), media_type=kind, headers=behaviour.headers
                )
            if behaviour.body is not None or behaviour.status != 200:
                content = behaviour.body or {"error": {"message": "as told", "type": "told", "code": behaviour.status}}
                return JSONResponse(content, status_code=behaviour.status, headers=behaviour.headers)
            if body.get("stream"):
                return StreamingResponse(self._stream(behaviour), media_type="text/event-stream")
            if behaviour.cut_inside:
                return StreamingResponse(self._half(), media_type="application/json", headers={"content-length": "100"})
            return JSONResponse(self._answer(body), headers=behaviour.headers)
        finally:
            self.running -= 1

    def _answer(self, body: dict[str, Any]) -> dict[str, Any]:
        count = len(tokens_of(body))
        choice = {"index": 0, "text": f"{self.name} saw {count}", "finish_reason": "length", "logprobs": None}
        if "messages" in body:
            choice = {**choice, "message": {"role": "assistant", "content": choice.pop("text")}}
        answer = {
            "id": f"cmpl-{len(self.requests)}",
            "object": "text_completion",
            "created": 1,
            "model": body.get("model", ""),
            "choices": [choice],
            "usage": {"prompt_tokens": count, "completion_tokens": 1, "total_tokens": count + 1},
        }
        if body.get("kv_transfer_params", {}).get("do_remote_decode"):
            answer["kv_transfer_params"] = {"remote_host": self.name, "do_remote_prefill": True}
        return answer

    async def _stream(self, behaviour: Behaviour) -> AsyncIterator[bytes]:
        ended = False
        try:
            for number in range(behaviour.pieces):
                if behaviour.cut_after == number:
                    self.cut_all()
                    await asyncio.sleep(60)  # cancelled as the connection goes
                if behaviour.hold is not None and number == behaviour.hold_after:
                    await behaviour.hold.wait()
                yield f'data: {{"choices": [{{"index": 0, "text": "{self.name} {number}"}}]}}\n\n'.encode()
            if not behaviour.unended:
                yield b"data: [DONE]\n\n"
            ended = True
        finally:
            if not ended:
                await self._note_gone()

    async def _raw(self, pieces: Sequence[bytes | None], hold: asyncio.Event | None) -> AsyncIterator[bytes]:
        for piece in pieces:
            await asyncio.sleep(0.001)
            if piece is None:
                self.cut_all()
                await asyncio.sleep(60)  # cancelled as the connection goes
            yield piece or b""
        if hold is not None:
            await hold.wait()

    async def _half(self) -> AsyncIterator[bytes]:
        yield b'{"choices": ['
        await asyncio.sleep(0.01)
        self.cut_all()
        await asyncio.sleep(60)  # cancelled as the connection goes

    async def _hold(self, request: Request, hold: asyncio.Event) -> None:
        """Wait for the event, or until the client disconnects."""
        waits = [asyncio.ensure_future(hold.wait()), asyncio.ensure_future(_gone(request))]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        if not waits[0].done():
            await self._note_gone()
        for wait in waits:
            wait.cancel()

    async def _note_gone(self) -> None:
        self.gone += 1
        await asyncio.shield(asyncio.ensure_future(self._tell()))

    async def _tell(self) -> None:
        async with self.changed:
            self.changed.notify_all()


class _Cut(Response):
    """Cuts the connection instead of an answer."""

    def __init__(self, engine: FakeEngine) -> None:
        super().__init__()
        self._engine = engine

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002  # the shape of ASGI
        self._engine.cut_all()


class PromptServer(uvicorn.Server):
    """A uvicorn server that stops within milliseconds and leaves the process's signals alone.

    uvicorn itself checks every 100 ms whether it should stop and whether its connections are closed.
    """

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def main_loop(self) -> None:
        await self.on_tick(0)
        while not self.should_exit:  # noqa: ASYNC110  # set by assignment, as uvicorn has it
            await asyncio.sleep(_TICK_S)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        for listener in sockets or []:
            listener.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        try:
            async with asyncio.timeout(self.config.timeout_graceful_shutdown):
                while not self.force_exit and (self.server_state.connections or self.server_state.tasks):  # noqa: ASYNC110
                    await asyncio.sleep(_TICK_S)
        except TimeoutError:
            for task in self.server_state.tasks:
                task.cancel()


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def tokens_of(body: dict[str, Any]) -> list[int]:
    """The tokens of a prompt: given as such, or one a word."""
    prompt = body.get("prompt")
    if isinstance(prompt, list):
        return prompt
    text = prompt if isinstance(prompt, str) else " ".join(str(message.get("content")) for message in body.get("messages", []))
    return [int.from_bytes(word.encode()[:3], "little") for word in text.split()]
