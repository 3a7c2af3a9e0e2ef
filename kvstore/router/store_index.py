"""What the store has of a prompt, and near which engines: by token ids, as the engines' connector makes its keys.

An engine counts the tokens (``/tokenize``: templates and special tokens are its own business), the namespaces that engines have
registered say how keys are made of them. All of it within a short time: a hint that is late is no hint.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from kvclient import AsyncKVClient, CacheSpec, ClientOptions, KVStoreError, Lookup, Tier, encode_extra
from kvproto.v1 import metadata_pb2 as pb
from kvproto.v1 import metadata_pb2_grpc
from kvstore.core.errors import InvalidArgument
from kvstore.core.limits import MAX_KEYS_PER_CALL
from kvstore.core.tls import TlsConfig
from kvstore.observe.limited_log import LimitedLog
from kvstore.router.body import ParsedBody
from kvstore.router.choice import Turn
from kvstore.router.config import Role
from kvstore.router.parts import Parts
from kvstore.router.prompts import StoreHits
from kvstore.rpc.client import call_aio, connect_aio
from kvstore.rpc.codec import spec_from_proto

_logger = logging.getLogger(__name__)
_log = LimitedLog(_logger)

BUDGET_S: Final = 0.5
"""Of tokens and lookup together: what a request may wait for hints."""
MAX_SPECS: Final = 4
"""Namespaces of one model that are asked; the newest."""
_LAYOUT: Final = "vllm="
_REFRESH_S: Final = 5.0
_LIST_S: Final = 2.0
_TOKENIZED: Final = (
    "model",
    "prompt",
    "messages",
    "add_special_tokens",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
    "chat_template_kwargs",
    "tools",
)
"""Fields of a request that decide its tokens."""


class KVStoreIndex:
    """Looks prompts up for one router.

    Args:
        parts: of the router.
        metadata: address of the metadata server.
        tls: of the channels to it.
        token_file: what it is shown; None: nothing.
    """

    def __init__(self, parts: Parts, metadata: str, tls: TlsConfig | None, token_file: Path | None = None) -> None:
        self._parts = parts
        self._metadata = metadata
        self._tls = tls
        self._options = ClientOptions(
            client_name="router", require_store=False, lookup_deadline_s=BUDGET_S, token_file=token_file
        )
        self._channel = connect_aio(metadata, tls=tls, token=self._options.shown_token())
        self._stub = metadata_pb2_grpc.MetadataStub(self._channel)
        self._specs: list[CacheSpec] = []
        self._clients: dict[bytes, AsyncKVClient] = {}
        self._turn = Turn()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begins to follow which namespaces there are."""
        self._task = asyncio.create_task(self._follow())

    async def close(self) -> None:
        """Ends it."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait((self._task,))
        for client in self._clients.values():
            await client.close()
        await self._channel.close(None)

    async def look_up(self, body: ParsedBody, headers: Mapping[str, str]) -> tuple[int | None, StoreHits]:
        """See ``StoreIndex``."""
        clients = self._clients_of(body.model) if body.plain else []
        if not clients:
            return None, StoreHits()
        counters = self._parts.counters
        tokens: list[int] | None = None
        try:
            async with asyncio.timeout(BUDGET_S):
                tokens = body.token_prompt or await self._tokenize(body, headers)
                hits = await asyncio.gather(*(self._hits(client, tokens, body) for client in clients))
        except TimeoutError:
            counters.add("router_lookups_late_total")
            return (len(tokens) if tokens else None), StoreHits()
        except (KVStoreError, ValueError, RecursionError) as error:
            counters.add("router_lookups_failed_total")
            _log.warning("a prompt is not looked up: %s", error)
            return (len(tokens) if tokens else None), StoreHits()
        counters.add("router_lookups_total")
        best = max(hits, key=lambda found: found.hit_tokens)
        counters.add("router_lookup_hit_tokens_total", best.hit_tokens)
        counters.add("router_lookup_tokens_total", len(tokens))
        return len(tokens), best

    async def _tokenize(self, body: ParsedBody, headers: Mapping[str, str]) -> list[int]:
        """The prompt's tokens, counted by an engine.

        Raises:
            Unavailable: no engine counts.
            InvalidArgument: what an engine answered are no tokens.
        """
        role = Role.PREFILL if self._parts.config.pairs else Role.PLAIN
        candidates = self._parts.pool.candidates(role, self._parts.now_s(), body.model or None)
        if not candidates:
            raise InvalidArgument("no engine is there to count tokens")
        upstream = self._parts.upstreams[self._turn.next(candidates)]
        fields = {name: body.fields[name] for name in _TOKENIZED if name in body.fields}
        answer = json.loads(await upstream.ask("/tokenize", json.dumps(fields).encode(), BUDGET_S, headers))
        tokens = answer.get("tokens") if isinstance(answer, dict) else None
        if not isinstance(tokens, list) or not tokens:
            raise InvalidArgument("the engine answered no tokens", engine=upstream.engine.name)
        return tokens

    async def _hits(self, client: AsyncKVClient, tokens: Sequence[int], body: ParsedBody) -> StoreHits:
        salt = body.fields.get("cache_salt")
        extras = {0: encode_extra([("salt", salt.encode())])} if isinstance(salt, str) and salt else None
        keys = client.keys(tokens[: MAX_KEYS_PER_CALL * client.blocking.spec.block_tokens], extras)
        if not keys:
            return StoreHits()
        lookup = await client.lookup(keys, deadline_s=BUDGET_S)
        return hits_of(lookup, client.blocking.spec.block_tokens)

    # ---- namespaces
    def _clients_of(self, model: str) -> list[AsyncKVClient]:
        """Clients of the newest namespaces of a model."""
        newest = [spec for spec in reversed(self._specs) if not model or spec.model == model][:MAX_SPECS]
        return [self._clients[spec.namespace] for spec in newest if spec.namespace in self._clients]

    async def _follow(self) -> None:
        while True:
            try:
                await self._refresh()
            except KVStoreError as error:
                self._parts.counters.add("router_namespaces_unknown_total")
                _log.warning("the store does not say which namespaces there are: %s", error)
            await asyncio.sleep(_REFRESH_S)

    async def _refresh(self) -> None:
        answer: pb.ListNamespacesResponse = await call_aio(self._stub.ListNamespaces, pb.ListNamespacesRequest(), _LIST_S)
        specs = [spec_from_proto(info.spec) for info in answer.namespaces]
        served = set(self._parts.pool.models())
        # the first part stands for all parts of a model: its chain makes the keys of all of them
        self._specs = [
            spec for spec in specs if spec.model in served and spec.layout.startswith(_LAYOUT) and spec.shard_rank == 0
        ]
        wanted = {spec.namespace: spec for model in served for spec in self._newest(model)}
        for namespace in [namespace for namespace in self._clients if namespace not in wanted]:
            await self._clients.pop(namespace).close()
        for namespace, spec in wanted.items():
            if namespace not in self._clients:
                self._clients[namespace] = await AsyncKVClient.connect(
                    self._metadata, spec, node=None, tls=self._tls, options=self._options
                )
                _logger.info("prompts of %s are looked up in a namespace of %d tokens a block", spec.model, spec.block_tokens)

    def _newest(self, model: str) -> list[CacheSpec]:
        return [spec for spec in reversed(self._specs) if spec.model == model][:MAX_SPECS]


def hits_of(lookup: Lookup, block_tokens: int) -> StoreHits:
    """How much of a prompt is in the store, and how much of its beginning in the DRAM of each node."""
    near: dict[str, int] = {}
    for run in sorted(lookup.runs, key=lambda run: run.start):
        if run.tier is Tier.DRAM and run.start <= near.get(run.node_id, 0):
            near[run.node_id] = max(near.get(run.node_id, 0), run.end)
    hit = lookup.hit_blocks
    return StoreHits(hit * block_tokens, {node: min(blocks, hit) * block_tokens for node, blocks in near.items()})
