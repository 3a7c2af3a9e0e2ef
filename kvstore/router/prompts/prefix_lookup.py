"""Lookup of prompts in the store: how much of a prompt it holds, in the DRAM of which nodes, and in the caches of which engines.

An engine counts the tokens (``/tokenize``), because only the engine knows its chat template and special tokens. The namespaces
that engines registered determine the keys. The whole lookup has a short timeout: a late hint is useless.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from kvclient import AsyncKVClient, BlockKey, CacheSpec, ClientOptions, KVStoreError, Lookup, Tier, encode_extra
from kvclient.engine_cache.cache_namespace import cache_keys
from kvproto.v1 import metadata_pb2 as pb
from kvproto.v1 import metadata_pb2_grpc
from kvstore.core.errors import InvalidArgument
from kvstore.core.limits import MAX_KEYS_PER_CALL
from kvstore.observe.limited_log import LimitedLog
from kvstore.observe.metric_definitions import router as router_metrics
from kvstore.process.tls import TlsConfig
from kvstore.router.context import RouterContext
from kvstore.router.engines import Role
from kvstore.router.placement.balancer import RotationOrder
from kvstore.router.prompts.prompt_facts import StoreHits
from kvstore.router.prompts.request_body import RequestBody
from kvstore.rpc.client import call_aio
from kvstore.rpc.codec import spec_from_proto
from kvstore.rpc.failover.connect import connect_metadata_aio

_logger = logging.getLogger(__name__)
_log = LimitedLog(_logger)

TIMEOUT_S: Final = 0.5
"""Timeout of tokenization and lookup together."""
CACHES_SHARE: Final = 0.5
"""Share of the remaining time that a lookup in the caches of engines may take, so that it cannot delay the store's too long."""
MAX_NAMESPACES: Final = 4
"""Most namespaces of one model that are looked up: the newest."""
_LAYOUT: Final = "vllm="
_REFRESH_INTERVAL_S: Final = 5.0
_LIST_TIMEOUT_S: Final = 2.0
_TOKENIZED_FIELDS: Final = (
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
"""Fields of a request that determine its tokens."""


class StorePrefixLookup:
    """Looks prompts up for one router.

    Args:
        context: the router's state.
        metadata: address of the metadata server, or of several.
        tls: TLS of the channels to the metadata server.
        token_file: file with the token for the metadata server; None: no token.
    """

    def __init__(self, context: RouterContext, metadata: str, tls: TlsConfig | None, token_file: Path | None = None) -> None:
        self._context = context
        self._metadata = metadata
        self._tls = tls
        self._options = ClientOptions(
            client_name="router", require_store=False, lookup_deadline_s=TIMEOUT_S, token_file=token_file
        )
        self._channel = connect_metadata_aio(metadata, tls=tls, token=self._options.shown_token(), counters=context.counters)
        self._stub = metadata_pb2_grpc.MetadataStub(self._channel)
        self._specs: list[CacheSpec] = []
        self._clients: dict[bytes, AsyncKVClient] = {}
        self._rotation = RotationOrder()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start to follow the list of namespaces."""
        self._task = asyncio.create_task(self._follow_namespaces())

    async def close(self) -> None:
        """Stop, and close all channels."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait((self._task,))
        for client in self._clients.values():
            await client.close()
        await self._channel.close(None)

    async def look_up(self, body: RequestBody, headers: Mapping[str, str]) -> tuple[int | None, StoreHits]:
        """Implement ``PrefixLookup``."""
        clients = self._clients_of(body.model) if body.plain else []
        if not clients:
            return None, StoreHits()
        counters = self._context.counters
        ends_s = time.monotonic() + TIMEOUT_S
        tokens: list[int] | None = None
        try:
            async with asyncio.timeout(TIMEOUT_S):
                tokens = body.token_prompt or await self._tokenize(body, headers)
                hits = await asyncio.gather(*(self._hits(client, tokens, body, ends_s) for client in clients))
        except TimeoutError:
            counters.add(router_metrics.LOOKUPS_LATE)
            return (len(tokens) if tokens else None), StoreHits()
        except (KVStoreError, ValueError, RecursionError) as error:
            counters.add(router_metrics.LOOKUPS_FAILED)
            _log.warning("lookup failed: %s", error)
            return (len(tokens) if tokens else None), StoreHits()
        counters.add(router_metrics.LOOKUPS)
        best = joined(hits)
        counters.add(router_metrics.LOOKUP_HIT_TOKENS, best.hit_tokens)
        counters.add(router_metrics.LOOKUP_TOKENS, len(tokens))
        counters.add(router_metrics.LOOKUP_CACHE_TOKENS, max((best.cache_tokens or {}).values(), default=0))
        return len(tokens), best

    async def _tokenize(self, body: RequestBody, headers: Mapping[str, str]) -> list[int]:
        """Ask an engine for the prompt's tokens.

        Raises:
            Unavailable: the engine failed.
            InvalidArgument: no engine is healthy, or its response contains no tokens.
        """
        role = Role.PREFILL if self._context.config.pairs else Role.PLAIN
        engines = self._context.health.healthy(role, body.model or None)
        if not engines:
            raise InvalidArgument("no healthy engine can tokenize the prompt")
        upstream = self._context.upstreams[self._rotation.next(engines)]
        fields = {name: body.fields[name] for name in _TOKENIZED_FIELDS if name in body.fields}
        response = json.loads(await upstream.post_json("/tokenize", json.dumps(fields).encode(), TIMEOUT_S, headers))
        tokens = response.get("tokens") if isinstance(response, dict) else None
        if not isinstance(tokens, list) or not tokens:
            raise InvalidArgument("the engine's response contains no tokens", engine=upstream.engine.name)
        return tokens

    async def _hits(self, client: AsyncKVClient, tokens: Sequence[int], body: RequestBody, ends_s: float) -> StoreHits:
        salt = body.fields.get("cache_salt")
        extras = {0: encode_extra([("salt", salt.encode())])} if isinstance(salt, str) and salt else None
        keys = client.keys(tokens[: MAX_KEYS_PER_CALL * client.blocking.spec.block_tokens], extras)
        if not keys:
            return StoreHits()
        block_tokens = client.blocking.spec.block_tokens
        caches_s = max(0.0, ends_s - time.monotonic()) * CACHES_SHARE
        lookup, cached = await asyncio.gather(
            client.lookup(keys, deadline_s=TIMEOUT_S), self._cached(client.blocking.spec, keys, caches_s)
        )
        return hits_of(lookup, block_tokens, cached)

    async def _cached(self, spec: CacheSpec, keys: Sequence[BlockKey], timeout_s: float) -> dict[str, int] | None:
        """Return how many leading blocks each engine's published cache holds; None: no engine publishes one, or it is unknown."""
        if not any(self._context.caches(name) for name in self._context.upstreams):
            return None
        namespace, packed = cache_keys(spec, keys)
        request = pb.LookupRequest(namespace_id=namespace, keys=packed)
        try:
            answer: pb.LookupResponse = await call_aio(self._stub.Lookup, request, timeout_s)
        except KVStoreError as error:
            self._context.counters.add(router_metrics.CACHE_LOOKUPS_FAILED)
            _log.warning("lookup in the caches of engines failed: %s", error)
            return None
        return leading_blocks((run.start, run.start + run.count, answer.nodes[run.node].node_id) for run in answer.runs)

    # ---- namespaces
    def _clients_of(self, model: str) -> list[AsyncKVClient]:
        """Return clients of the newest namespaces of a model."""
        newest, _ = self._newest(model)
        return [self._clients[spec.namespace] for spec in newest if spec.namespace in self._clients]

    async def _follow_namespaces(self) -> None:
        while True:
            try:
                await self._refresh()
            except KVStoreError as error:
                self._context.counters.add(router_metrics.NAMESPACES_UNKNOWN)
                _log.warning("namespaces not refreshed: %s", error)
            except Exception:  # task edge: without it, new namespaces would never be looked up
                self._context.counters.add(router_metrics.BACKGROUND_BUGS)
                _logger.exception("namespaces not refreshed: unexpected error, trying again")
            await asyncio.sleep(_REFRESH_INTERVAL_S)

    async def _refresh(self) -> None:
        answer: pb.ListNamespacesResponse = await call_aio(self._stub.ListNamespaces, pb.ListNamespacesRequest(), _LIST_TIMEOUT_S)
        specs = [spec_from_proto(info.spec) for info in answer.namespaces]
        served = set(self._context.health.models())
        # look up the first shard of a model only: all shards have the same keys
        self._specs = [
            spec for spec in specs if spec.model in served and spec.layout.startswith(_LAYOUT) and spec.shard_rank == 0
        ]
        wanted: dict[bytes, CacheSpec] = {}
        for model in served:
            newest, left_out = self._newest(model)
            wanted.update((spec.namespace, spec) for spec in newest)
            if left_out:
                self._context.counters.add(router_metrics.NAMESPACES_LEFT_OUT, left_out)
                _log.warning("%d older namespaces of model %s are not looked up (limit=%d)", left_out, model, MAX_NAMESPACES)
        for namespace in [namespace for namespace in self._clients if namespace not in wanted]:
            await self._clients.pop(namespace).close()
        for namespace, spec in wanted.items():
            if namespace not in self._clients:
                self._clients[namespace] = await AsyncKVClient.connect(
                    self._metadata, spec, node=None, tls=self._tls, options=self._options
                )
                _logger.info("namespace added to lookups: %s (block_tokens=%d)", spec.model, spec.block_tokens)

    def _newest(self, model: str) -> tuple[list[CacheSpec], int]:
        """Return the newest namespaces of a model, or of all models if it is empty, and how many older ones are left out."""
        known = [spec for spec in reversed(self._specs) if not model or spec.model == model]
        return known[:MAX_NAMESPACES], max(0, len(known) - MAX_NAMESPACES)


def hits_of(lookup: Lookup, block_tokens: int, cached: Mapping[str, int] | None = None) -> StoreHits:
    """Convert a lookup's runs of blocks into tokens: those on any node, and the leading ones in each node's DRAM.

    Args:
        lookup: the result of the lookup in the store.
        block_tokens: tokens of a block.
        cached: leading blocks in the published cache of each engine; None: not looked up.
    """
    in_dram = leading_blocks((run.start, run.end, run.node_id) for run in lookup.runs if run.tier is Tier.DRAM)
    hit = lookup.hit_blocks
    return StoreHits(
        hit * block_tokens,
        {node: min(blocks, hit) * block_tokens for node, blocks in in_dram.items()},
        None if cached is None else {cache: blocks * block_tokens for cache, blocks in cached.items()},
    )


def joined(hits: Sequence[StoreHits]) -> StoreHits:
    """Return the longest hit of several namespaces, with the caches of all. If one was not looked up, no cache counts."""
    cached: dict[str, int] = {}
    for one in hits:
        for cache, tokens in (one.cache_tokens or {}).items():
            cached[cache] = max(cached.get(cache, 0), tokens)
    known = all(one.cache_tokens is not None for one in hits)
    return replace(max(hits, key=lambda found: found.hit_tokens), cache_tokens=cached if known else None)


def leading_blocks(runs: Iterable[tuple[int, int, str]]) -> dict[str, int]:
    """Return how many leading blocks each node has, given (start, end, node) of runs."""
    leading: dict[str, int] = {}
    for start, end, node in sorted(runs):
        if start <= leading.get(node, 0):
            leading[node] = max(leading.get(node, 0), end)
    return leading
