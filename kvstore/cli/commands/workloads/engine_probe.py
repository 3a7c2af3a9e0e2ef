"""Measure the prefill time of a running OpenAI-compatible engine. Its answers are input from outside and may be anything."""

from __future__ import annotations

import contextlib
import http
import http.client
import json
import random
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from urllib.parse import urlsplit

from kvstore.core.errors import InvalidArgument, Unavailable
from kvstore.roofline.calibration import StepSample, checked

MOST_BYTES = 1 << 18
"""Largest answer that is read."""
_REQUEST_S = 30.0
_LOWEST_ID, _HIGHEST_ID = 100, 1000
"""Token ids of prompts: every vocabulary has them."""


def measure_engine(
    url: str,
    model: str,
    lengths: Sequence[int],
    rounds: int,
    *,
    most_tokens: int,
    limit_s: float,
    key: str | None = None,
    measured: Callable[[int], None] | None = None,
    seed: int | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> list[StepSample]:
    """Send prompts of random tokens, which no cache holds, and ask for one token each.

    A first prompt of each length warms the engine up and does not count. The measurement ends at the limit of tokens or time with
    the samples that it has.

    Args:
        url: address of the engine, with or without ``/v1``.
        model: its name at the engine.
        lengths: tokens of prompts.
        rounds: prompts of each length.
        most_tokens: limit of all prompts together.
        limit_s: limit of the measurement, seconds.
        key: API key.
        measured: called after each prompt with the number of prompts sent.
        seed: of the prompts; None: random.
        clock: seconds.

    Raises:
        InvalidArgument: the URL is not valid, or the key has characters that a header must not have.
        Unavailable: the engine does not answer, or answers with an error.
    """
    end = clock() + limit_s
    key = _header_value(key)
    draw = random.Random(seed)  # noqa: S311  # prompts, not secrets
    samples: list[StepSample] = []
    sent = spent = 0
    for number in range(rounds + 1):
        for length in lengths:
            if spent + length > most_tokens:
                return samples
            prompt = [draw.randint(_LOWEST_ID, _HIGHEST_ID) for _ in range(length)]
            began = clock()
            if began >= end:
                return samples
            limit = min(_REQUEST_S, end - began)
            try:
                answer = _post(url, {"model": model, "prompt": prompt, "max_tokens": 1, "temperature": 0}, key, limit)
                seconds = clock() - began
            except Unavailable:
                if clock() >= end and samples:
                    return samples
                raise
            spent += length
            sent += 1
            if number:
                samples.append(_sample(answer, length, seconds))
            if measured is not None:
                measured(sent)
    return samples


def _header_value(key: str | None) -> str | None:
    """Return an API key as a header may have it. An error must not show the key, as that of the HTTP client does."""
    key = key.strip() if key else None
    if key and not (key.isascii() and key.isprintable()):
        raise InvalidArgument("the API key has a character that HTTP does not allow; correct --api-key or KVSTORE_ENGINE_API_KEY")
    return key or None


def _without_key(said: str, key: str | None) -> str:
    """Hide the API key in text of an engine: some engines repeat a key that they reject."""
    for form in (key, json.dumps(key)[1:-1]) if key else ():
        said = said.replace(form, "[API key]")
    return said


def _sample(answer: object, length: int, seconds: float) -> StepSample:
    """Use the token counts of the engine if they can be true: a part of the prompt was cached, or a few tokens were added."""
    tokens, cached = length, 0
    usage = answer.get("usage") if isinstance(answer, dict) else None
    if isinstance(usage, dict):
        said = usage.get("prompt_tokens")
        if type(said) is int and length <= said <= length + 16:
            tokens = said
        details = usage.get("prompt_tokens_details")
        hit = details.get("cached_tokens") if isinstance(details, dict) else None
        if type(hit) is int and 0 <= hit < tokens:
            cached = hit
    return checked(tokens - cached, cached, seconds)


def _post(url: str, body: object, key: str | None, limit_s: float) -> object:
    """Send one request; redirects are errors. A watchdog ends a connection that answers too slowly, byte by byte."""
    deadline = time.monotonic() + limit_s
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise InvalidArgument(f"'{url}' is not a URL: {error}") from error
    if parts.scheme not in ("http", "https") or not host:
        raise InvalidArgument(f"'{url}' is not the URL of an engine; give it as http://HOST:8000")
    path = parts.path.rstrip("/").removesuffix("/v1") + "/v1/completions"
    connection: http.client.HTTPConnection
    if parts.scheme == "https":
        connection = http.client.HTTPSConnection(host, port, timeout=limit_s, context=ssl.create_default_context())
    else:
        connection = http.client.HTTPConnection(host, port, timeout=limit_s)
    headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
    watchdog: threading.Timer | None = None
    too_late = threading.Event()
    try:
        connection.connect()
        watchdog = threading.Timer(max(0.0, deadline - time.monotonic()), _cut, (connection.sock, too_late))
        watchdog.daemon = True
        watchdog.start()
        connection.request("POST", path, json.dumps(body).encode(), headers)
        with connection.getresponse() as response:
            data = response.read(MOST_BYTES + 1)
            status = response.status
        if too_late.is_set():
            raise TimeoutError  # the answer was cut off: as a timeout of the socket
    except ConnectionRefusedError as error:
        raise Unavailable(
            f"connection refused: no engine listens at {host}:{connection.port}; start it, or correct --engine"
        ) from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        if too_late.is_set() or isinstance(error, TimeoutError):
            raise Unavailable(f"the engine at {host} did not answer within {limit_s:.1f} s") from error
        said = _without_key(str(error), key)
        raise Unavailable(f"the request to the engine at {host} failed: {type(error).__name__}: {said}") from error
    finally:
        if watchdog is not None:
            watchdog.cancel()
        connection.close()
    if status != http.HTTPStatus.OK:
        said = _without_key(data.decode(errors="replace"), key)
        raise Unavailable(f"the engine at {host} answered with status {status}: {said[:200]!r}")
    if len(data) > MOST_BYTES:
        raise Unavailable(f"the engine at {host} answered with more than {MOST_BYTES} bytes")
    try:
        answer = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise Unavailable(f"the engine at {host} returned an invalid response: no JSON") from error
    if not isinstance(answer, dict) or not isinstance(answer.get("choices"), list):
        raise Unavailable(f"the engine at {host} returned an invalid response: no choices")
    return answer


def _cut(sock: socket.socket, too_late: threading.Event) -> None:
    too_late.set()
    with contextlib.suppress(OSError):  # the connection ended in the meantime
        sock.shutdown(socket.SHUT_RDWR)
