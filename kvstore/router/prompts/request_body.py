"""A client's request body: the fields that the router reads, and the bodies for prefill and decode engines."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from kvclient.call.request_hint import RequestHint
from kvstore.core import limits
from kvstore.core.errors import InvalidArgument
from kvstore.router.prompts.prefix_memory import MAX_TEXT_BYTES
from kvstore.router.prompts.session_hints import with_hint

COMPLETIONS: Final = "/v1/completions"
CHAT: Final = "/v1/chat/completions"

_TEMPLATE_FIELDS: Final = ("tools", "documents", "chat_template", "chat_template_kwargs", "add_generation_prompt")
"""Fields besides ``messages`` that an engine's chat template puts into the prompt, mostly before them."""
_MAX_ITEMS: Final = MAX_TEXT_BYTES // 16
"""Most messages, or prompts, that are read. If there are more, each of them is almost empty."""
_OUTPUT_FIELDS: Final = ("stream_options", "min_tokens", "best_of", "use_beam_search")
"""Fields that concern the whole output. They are removed for prefill engines, which generate one token."""


@dataclass(frozen=True, slots=True)
class RequestBody:
    """The parts of a request that the router reads. The engine validates all others.

    Attributes:
        path: path of the endpoint.
        fields: the parsed JSON object.
        model: requested model; empty if not given.
        stream: whether the response is streamed.
        output_tokens: longest output; 0 if not given.
        choices: number of outputs.
        token_prompt: the prompt as token ids; None if it is given in another form.
        length: length of the body in bytes.
        hint: what the client says about its session; None: nothing.
    """

    path: str
    fields: Mapping[str, Any]
    model: str
    stream: bool
    output_tokens: int
    choices: int
    token_prompt: list[int] | None
    length: int
    hint: RequestHint | None = None

    @property
    def plain(self) -> bool:
        """Whether the prompt is a single text or list of tokens, so that its keys can be computed without the engine."""
        if self.path == COMPLETIONS:
            return isinstance(self.fields.get("prompt"), str) or self.token_prompt is not None
        messages = self.fields["messages"]
        return all(not isinstance(message, dict) or not isinstance(message.get("content"), list) for message in messages)

    def seed(self) -> bytes:
        """Return everything besides the prompt that decides which KV may be shared."""
        return json.dumps([self.path == CHAT, self.model, self.fields.get("cache_salt")]).encode()

    def text(self) -> bytes:
        """Return the beginning of the prompt, in the engine's order: a common beginning of prompts is one of their texts."""
        if self.path == COMPLETIONS:
            prompt = self.fields.get("prompt")
            if self.token_prompt is not None:
                text = " ".join(map(str, self.token_prompt[: MAX_TEXT_BYTES // 4]))
            elif isinstance(prompt, str):
                text = prompt[:MAX_TEXT_BYTES]
            else:
                text = json.dumps(_head(prompt) if isinstance(prompt, list) else prompt)
        else:
            parts = [self.fields[name] for name in _TEMPLATE_FIELDS if self.fields.get(name)]
            text = json.dumps([*parts, *self.fields["messages"][:_MAX_ITEMS]], sort_keys=True)[:-1]
        return text.encode(errors="surrogatepass")[:MAX_TEXT_BYTES]

    def for_prefill(self, params: Mapping[str, Any]) -> bytes:
        """Return the body for the prefill engine: the prompt, one output token, not streamed."""
        fields = {name: value for name, value in self.fields.items() if name not in _OUTPUT_FIELDS}
        fields |= {"stream": False, "max_tokens": 1, "n": 1, "kv_transfer_params": with_hint(params, self.hint)}
        if "max_completion_tokens" in fields:
            fields["max_completion_tokens"] = 1
        return json.dumps(fields).encode()

    def for_decode(self, params: Mapping[str, Any] | None) -> bytes:
        """Return the body for the decode engine: the client's, with the source of the prompt's KV."""
        return json.dumps({**self.fields, "kv_transfer_params": with_hint(params, self.hint)}).encode()

    def for_engine(self) -> bytes:
        """Return the body for an engine that serves the whole request: the client's, with its hint."""
        return self.for_decode(self.fields.get("kv_transfer_params"))


def parse_body(path: str, raw: bytes) -> RequestBody:
    """Parse a request body.

    Raises:
        InvalidArgument: the body is not a JSON object, or a required field is missing or has the wrong type.
    """
    try:
        fields = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument("the body is not valid JSON", why=str(error)[:200]) from error
    if not isinstance(fields, dict):
        raise InvalidArgument("the body must be a JSON object")
    model = fields.get("model", "")
    if model is None:
        model = ""
    if not isinstance(model, str) or len(model) > limits.MAX_NAME_BYTES:
        raise InvalidArgument("model must be a string of at most 512 characters", field="model")
    stream = fields.get("stream") or False
    if not isinstance(stream, bool):
        raise InvalidArgument("stream must be true or false", field="stream")
    if path == CHAT:
        messages = fields.get("messages")
        if not isinstance(messages, list) or not messages:
            raise InvalidArgument("messages must be a list with at least one message", field="messages")
    elif fields.get("prompt") is None and fields.get("prompt_embeds") is None:
        raise InvalidArgument("a completion requires a prompt", field="prompt")
    output = next((fields[name] for name in ("max_completion_tokens", "max_tokens") if fields.get(name) is not None), 0)
    choices = max(1, _count(fields.get("n") or 1))
    tokens = _token_prompt(fields.get("prompt")) if path == COMPLETIONS else None
    return RequestBody(path, fields, model, stream, _count(output), choices, tokens, len(raw))


def _count(value: object) -> int:
    """Return a number of tokens or outputs; 0 for other values, which the engine rejects."""
    return min(max(value, 0), 1 << 31) if isinstance(value, int) and not isinstance(value, bool) else 0


def _token_prompt(prompt: object) -> list[int] | None:
    """Return a prompt that is a list of token ids. It may have millions, so it is scanned once, in C."""
    return prompt if isinstance(prompt, list) and set(map(type, prompt)) == {int} else None


def _head(prompts: list[Any]) -> list[Any]:
    """Return the first of several prompts, up to ``MAX_TEXT_BYTES`` items in total."""
    head, left = [], MAX_TEXT_BYTES
    for prompt in prompts[:_MAX_ITEMS]:
        head.append(prompt[:left] if isinstance(prompt, str | list) else prompt)
        left -= len(prompt) if isinstance(prompt, str | list) else 1
        if left <= 0:
            break
    return head
