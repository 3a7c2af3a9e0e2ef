"""A client's request body: what the router must know of it, and what it changes in it for prefill and decode engines."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from kvstore.core import limits
from kvstore.core.errors import InvalidArgument
from kvstore.router.prefix_memory import MAX_TEXT_BYTES

COMPLETIONS: Final = "/v1/completions"
CHAT: Final = "/v1/chat/completions"

_OWN_CHAT_PARTS: Final = ("tools", "documents", "chat_template", "chat_template_kwargs", "add_generation_prompt")
"""What, besides messages, an engine's template makes into the prompt; most of it comes before them."""
_MOST_ITEMS: Final = MAX_TEXT_BYTES // 16
"""Messages, or prompts, that are looked at: more of them than that are next to empty."""
_OF_THE_WHOLE_ANSWER: Final = ("stream_options", "min_tokens", "best_of", "use_beam_search")


@dataclass(frozen=True, slots=True)
class ParsedBody:
    """A request as far as the router reads it. All else is the engine's to judge.

    Attributes:
        path: of the endpoint.
        fields: the body.
        model: wanted.
        stream: answered piece by piece.
        output_tokens: the most that the answer may have; 0: not said.
        choices: answers wanted at once.
        token_prompt: the prompt, where it is given as the token ids of one prompt.
        length: of the body in bytes, as it came.
    """

    path: str
    fields: Mapping[str, Any]
    model: str
    stream: bool
    output_tokens: int
    choices: int
    token_prompt: list[int] | None
    length: int

    @property
    def plain(self) -> bool:
        """One prompt of text or tokens alone: what keys of the store can be made of outside of the engine."""
        if self.path == COMPLETIONS:
            return isinstance(self.fields.get("prompt"), str) or self.token_prompt is not None
        messages = self.fields["messages"]
        return all(not isinstance(message, dict) or not isinstance(message.get("content"), list) for message in messages)

    def seed(self) -> bytes:
        """What besides the prompt decides which KV may be shared."""
        return json.dumps([self.path == CHAT, self.model, self.fields.get("cache_salt")]).encode()

    def text(self) -> bytes:
        """The prompt's head in the order in which an engine reads it: requests that begin alike have texts that begin alike."""
        if self.path == COMPLETIONS:
            prompt = self.fields.get("prompt")
            if self.token_prompt is not None:
                text = " ".join(map(str, self.token_prompt[: MAX_TEXT_BYTES // 4]))
            elif isinstance(prompt, str):
                text = prompt[:MAX_TEXT_BYTES]
            else:
                text = json.dumps(_head(prompt) if isinstance(prompt, list) else prompt)
        else:
            parts = [self.fields[name] for name in _OWN_CHAT_PARTS if self.fields.get(name)]
            text = json.dumps([*parts, *self.fields["messages"][:_MOST_ITEMS]], sort_keys=True)[:-1]
        return text.encode(errors="surrogatepass")[:MAX_TEXT_BYTES]

    def for_prefill(self, params: Mapping[str, Any]) -> bytes:
        """The body for the prefill engine: the prompt, one token, nothing streamed."""
        fields = {name: value for name, value in self.fields.items() if name not in _OF_THE_WHOLE_ANSWER}
        fields |= {"stream": False, "max_tokens": 1, "n": 1, "kv_transfer_params": dict(params)}
        if "max_completion_tokens" in fields:
            fields["max_completion_tokens"] = 1
        return json.dumps(fields).encode()

    def for_decode(self, params: Mapping[str, Any]) -> bytes:
        """The body for the decode engine: the client's own, and where the prompt's KV comes from."""
        return json.dumps({**self.fields, "kv_transfer_params": dict(params)}).encode()


def parse_body(path: str, raw: bytes) -> ParsedBody:
    """Reads a body.

    Raises:
        InvalidArgument: it is no JSON object, or lacks what the endpoint needs.
    """
    try:
        fields = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument("the body is no JSON", why=str(error)[:200]) from error
    if not isinstance(fields, dict):
        raise InvalidArgument("the body is a JSON object")
    model = fields.get("model", "")
    if model is None:
        model = ""
    if not isinstance(model, str) or len(model) > limits.MAX_NAME_BYTES:
        raise InvalidArgument("model takes a name", field="model")
    stream = fields.get("stream") or False
    if not isinstance(stream, bool):
        raise InvalidArgument("stream takes true or false", field="stream")
    if path == CHAT:
        messages = fields.get("messages")
        if not isinstance(messages, list) or not messages:
            raise InvalidArgument("messages takes a list with one message at least", field="messages")
    elif fields.get("prompt") is None and fields.get("prompt_embeds") is None:
        raise InvalidArgument("a completion takes a prompt", field="prompt")
    output = next((fields[name] for name in ("max_completion_tokens", "max_tokens") if fields.get(name) is not None), 0)
    choices = max(1, _count(fields.get("n") or 1))
    tokens = _token_prompt(fields.get("prompt")) if path == COMPLETIONS else None
    return ParsedBody(path, fields, model, stream, _count(output), choices, tokens, len(raw))


def _count(value: object) -> int:
    """A number of tokens or answers, if it is one; what is none is the engine's to refuse."""
    return min(max(value, 0), 1 << 31) if isinstance(value, int) and not isinstance(value, bool) else 0


def _token_prompt(prompt: object) -> list[int] | None:
    """A prompt that is given as token ids: it may have millions of them, so they are looked at once, and in few steps."""
    return prompt if isinstance(prompt, list) and set(map(type, prompt)) == {int} else None


def _head(prompts: list[Any]) -> list[Any]:
    """The first of several prompts, and of them no more than makes a text."""
    head, left = [], MAX_TEXT_BYTES
    for prompt in prompts[:_MOST_ITEMS]:
        head.append(prompt[:left] if isinstance(prompt, str | list) else prompt)
        left -= len(prompt) if isinstance(prompt, str | list) else 1
        if left <= 0:
            break
    return head
