"""The blocking client. ``kvclient.aio`` is the same for asyncio.

Threads: all methods may be called from any thread. Fork: make the client after forking; calls of a parent's client are rejected.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Self

from kvclient.call.arguments import check_name, check_process, check_seconds, check_sendable
from kvclient.call.context import ClientContext
from kvclient.call.execution import CallRunner, CallScope
from kvclient.call.open_calls import OpenCalls
from kvclient.handoff.receiver import PromptReceiver
from kvclient.handoff.sender import PromptSender, abandon_prompt, check_transfer_id, find_decode_node
from kvclient.load.accounting import HitAccounting
from kvclient.load.layerwise import LayerBarrier, LoadHandle
from kvclient.load.load import HeadLookupCall, Load, LookupCall, checked_verify
from kvclient.load.paths import Paths, checked_paths
from kvclient.load.read_ahead import ReadAhead, read_ahead
from kvclient.memory.buffers import as_block_buffer
from kvclient.memory.device_buffer import ArenaPinner, DeviceBuffer
from kvclient.memory.engine_pool import DiskReaderFactory, EnginePool
from kvclient.nodes.connect import NodeChoice, NodeFinder, attempt, check_types, watch_servers
from kvclient.nodes.hints import HintSender
from kvclient.nodes.local_session import LocalNode
from kvclient.nodes.lookup_memory import RunEndMemory
from kvclient.nodes.metadata_client import MetadataClient
from kvclient.nodes.peers import PeerPool
from kvclient.nodes.remote_sessions import RemoteSessionCache
from kvclient.nodes.store_node import StoreNodeFinder
from kvclient.options import ClientOptions, Verify
from kvclient.results import HeadLookup, LoadResult, Lookup, StoreResult
from kvclient.store.demotions import Demotions
from kvclient.store.handle import StoreHandle
from kvclient.store.layerwise import LayerwiseStore
from kvclient.store.store import Store
from kvproto.v1 import node_pb2
from kvstore.core.chain import ChainSlice, check_position
from kvstore.core.clock import MonotonicClock
from kvstore.core.errors import InvalidArgument, KVStoreError
from kvstore.core.keys import KeyChain, Tokens
from kvstore.core.spec import CacheSpec
from kvstore.core.types import BlockKey, NodeId
from kvstore.observe.counters import Counters
from kvstore.observe.limited_log import LimitedLog
from kvstore.observe.metric_definitions import client as client_metrics
from kvstore.observe.slow_loads import RecentLoads
from kvstore.process.threads.submission import LazyThreadPool
from kvstore.process.tls import TlsConfig
from kvstore.rpc.client import ChannelBroken, call_cancellable
from kvstore.rpc.failover.addresses import MetadataAddresses
from kvstore.rpc.failover.servers import MetadataServerState

if TYPE_CHECKING:
    from kvstore.observe.http import MetricsServer

_log = logging.getLogger(__name__)

_REGISTER_SHARE = 0.5
"""Share of the time of ``connect`` that the metadata server may take if the node can be used without it."""
_FLUSH_GRACE_S = 0.5

Keys = Sequence[BlockKey] | bytes
"""Consecutive keys of a chain: a sequence of 16-byte keys, or all of them packed in one ``bytes``."""


class KVClient:
    """An engine's access to the store, in one namespace. Made by ``connect``. A context manager.

    Example::

        spec = CacheSpec(model="m", block_tokens=64, layers=32, layer_block_bytes=65536)
        with KVClient.connect("127.0.0.1:7400", spec) as client:
            keys = client.keys(tokens)
            result = client.load(keys, buffer)
    """

    def __init__(self, context: ClientContext, finder: NodeFinder | None, demotions: Demotions) -> None:
        """For ``connect``."""
        self._context = context
        self._finder = finder
        self._demotions = demotions
        self._chain = KeyChain(context.spec)
        options = context.options
        self.runner = CallRunner(
            context.incidents, workers=options.workers, max_pending=options.max_pending, strict=options.strict
        )
        """For ``kvclient.aio``: where calls run."""
        self._hints = HintSender(context)
        self._unfinished: OpenCalls[LayerwiseStore | PromptReceiver] = OpenCalls()
        self._pid, self._closed = os.getpid(), False
        self._metrics = self._serve_metrics(options.metrics_listen) if options.metrics_listen is not None else None

    @classmethod
    def connect(
        cls,
        metadata: str | None,
        spec: CacheSpec,
        *,
        node: str | None = "auto",
        tls: TlsConfig | None = None,
        options: ClientOptions | None = None,
        hbm: EnginePool | None = None,
        device: ArenaPinner | None = None,
        gds: DiskReaderFactory | None = None,
    ) -> Self:
        """Register the namespace and open a session with the node of this host.

            client = KVClient.connect("127.0.0.1:7400", spec, options=ClientOptions(require_store=False))

        Args:
            metadata: address of the metadata server, ``host:port``; of several servers, separated by commas, or a DNS name of
                several; None: only the local node is asked.
            spec: the namespace.
            node: address of the local node (``unix:/path`` or ``host:port``); ``"auto"``: a living node whose unix socket is on
                this host and which accepts a connection, if any; None: none, bytes travel over TCP to and from other nodes.
            tls: for all connections except unix sockets.
            options: bounds and choices.
            hbm: the engine's own pool (``kvclient.hbm.HbmPool``), which several clients may share. Loads look there first; loads
                and stores leave a copy there. It outlives the client.
            device: copies between the arena and the engine's device (``kvclient.device.DeviceCopier``), and pins the arena. It
                outlives the client.
            gds: reads the local node's volumes directly into device memory (``kvclient.gds.LandingRing``). Not used with ``hbm``.

        Raises:
            InvalidArgument: an argument of another type, a malformed address, neither metadata server nor node, or a block that
                is larger than the pool or the arena of the local node.
            Unsupported: GPUDirect Storage is required, which is not available for the volumes of the local node.
            KVStoreError: the metadata server or the local node does not answer, unless ``options.require_store`` is False.
        """
        options = options or ClientOptions()
        check_types(metadata, spec, node, tls, options, hbm, gds, device)
        if device is not None:
            device.check(spec)
        clock = MonotonicClock()
        incidents = LimitedLog(logging.getLogger("kvclient"), options.log_interval_s, clock.now_s)
        if metadata is None and (node is None or node == "auto"):
            raise InvalidArgument('connect requires a metadata server ("127.0.0.1:7400"), a node ("unix:/path"), or both')
        addresses = None if metadata is None else MetadataAddresses.parse(metadata)
        liveness = watch_servers(tls, incidents.counters)
        metadata_client = local = finder = None
        if addresses is not None:
            metadata_client = MetadataClient(addresses, spec, tls, clock, options, incidents, liveness)
        peers = PeerPool(spec, tls, options, incidents, liveness)
        end_s = clock.now_s() + options.connect_deadline_s
        try:
            if metadata_client is not None:
                share = 1.0 if options.require_store or node is None else _REGISTER_SHARE
                attempt(options, incidents, partial(metadata_client.introduce, options.connect_deadline_s * share))
            if node is not None:
                finder = NodeFinder(node, metadata_client, options)
                local = LocalNode(finder.find, spec, tls, clock, options, incidents, liveness, device, finder.advice)
                if attempt(options, incidents, partial(local.open, end_s)) is False:
                    local.close()
                    local = None
                    _log.info("no local node: blocks travel over TCP")
        except BaseException:
            if local is not None:
                local.close()
            if metadata_client is not None:
                metadata_client.close()
            liveness.close()
            raise
        context = ClientContext(
            spec=spec,
            shape=spec.shape,
            namespace=spec.namespace,
            clock=clock,
            options=options,
            incidents=incidents,
            metadata=metadata_client,
            local=local,
            peers=peers,
            remote_sessions=RemoteSessionCache(spec, tls, options, incidents, liveness),
            store_nodes=StoreNodeFinder(metadata_client, peers, clock, options),
            liveness=liveness,
            accounting=HitAccounting(spec.block_tokens, spec.shape.block_bytes, incidents, options),
            run_ends=RunEndMemory(),
            part_threads=LazyThreadPool(options.part_workers, "kvclient-part"),
            prompt_threads=LazyThreadPool(options.prompt_workers, "kvclient-prompt"),
        )
        demotions = Demotions(context)
        try:
            if hbm is not None:
                context = replace(context, pool=hbm.attach(spec, demotions.demote))
            elif gds is not None:
                context = replace(context, disks=gds.attach(spec))
            context.prepare_disks()
            return cls(context, finder, demotions)
        except BaseException:
            context.detach_pool()
            demotions.close()
            context.close()
            raise

    def _serve_metrics(self, address: str) -> MetricsServer | None:
        from kvclient.metrics import serve_client  # loads prometheus_client

        return serve_client(self, address)

    # ---- keys and lookup ----
    @property
    def spec(self) -> CacheSpec:
        """The namespace."""
        return self._context.spec

    def keys(
        self, tokens: Tokens, extras: Mapping[int, bytes] | None = None, parent: BlockKey | None = None, first_block: int = 0
    ) -> list[BlockKey]:
        """Return the keys of all full blocks of some tokens; see ``kvstore.core.keys.KeyChain.keys``.

        Example: ``more = client.keys(next_tokens, parent=keys[-1], first_block=len(keys))``
        """
        check_position(parent, first_block)
        return self._chain.keys(tokens, extras=extras, parent=parent, first_block=first_block)

    def tail_key(self, tokens: Tokens, parent: BlockKey | None = None, extra: bytes = b"") -> BlockKey:
        """Return the key of a prompt's partial last block, with its extra; see ``kvstore.core.keys.KeyChain.tail``.

        Example: ``tail = client.tail_key(tokens[len(keys) * spec.block_tokens :], parent=keys[-1])``
        """
        return self._chain.tail(tokens, parent, extra)

    def lookup(self, keys: Keys, *, deadline_s: float | None = None) -> Lookup:
        """Return the longest run of leading keys that the store can serve, according to its index.

            lookup = client.lookup(keys)
            lookup.hit_blocks                    # leading blocks that a load may bring

        Args:
            keys: a chain from its head.
            deadline_s: seconds it may take; None: ``ClientOptions.lookup_deadline_s``.

        Raises:
            InvalidArgument: malformed keys, or too many.
        """
        return self.runner.run(self.lookup_call(keys, deadline_s))

    def lookup_call(self, keys: Keys, deadline_s: float | None) -> LookupCall:
        """Prepare ``lookup``: the arguments are checked, the work has not begun."""
        chain = self._slice(keys)
        return LookupCall(self._context, chain, self._scope(deadline_s, self._context.options.lookup_deadline_s))

    def lookup_heads(self, keys: Keys, *, deadline_s: float | None = None) -> HeadLookup:
        """Return which blocks, each the head of a separate chain, the store can serve according to its index.

            found = client.lookup_heads(page_keys)
            found.held                           # one bool per key
            client.load(found, pages)            # loads those that are held, with one outcome per key

        Args:
            keys: keys of blocks that ``store_heads`` stored, in any order.
            deadline_s: seconds it may take; None: ``ClientOptions.lookup_deadline_s``.

        Raises:
            InvalidArgument: malformed keys, or too many.
        """
        return self.runner.run(self.lookup_heads_call(keys, deadline_s))

    def lookup_heads_call(self, keys: Keys, deadline_s: float | None) -> HeadLookupCall:
        """Prepare ``lookup_heads``: the arguments are checked, the work has not begun."""
        heads = self._slice(keys, heads=True)
        return HeadLookupCall(self._context, heads, self._scope(deadline_s, self._context.options.lookup_deadline_s))

    # ---- loads ----
    def load(
        self,
        what: Lookup | HeadLookup | Keys,
        buffer: object,
        *,
        deadline_s: float | None = None,
        verify: Verify | None = None,
        parent: BlockKey | None = None,
        depth: int = 0,
        paths: Paths | None = None,
    ) -> LoadResult:
        """Load blocks into a buffer. When this returns, nothing writes to the buffer any more.

            result = client.load(client.lookup(keys), buffer)
            result.hit_blocks                    # leading blocks whose bytes are in the buffer

        Args:
            what: a ``Lookup``: its first ``hit_blocks`` blocks are loaded (``lookup.part`` for fewer). A ``HeadLookup``: all of
                its blocks are. Or keys: they are looked up first if they begin a chain, and the local node is asked for all of
                them even if the index lists none.
            buffer: space for exactly these blocks; see ``as_block_buffer``.
            deadline_s: seconds it may take; None: ``ClientOptions.default_deadline_s``.
            verify: ``auto``, ``always`` or ``never``, see ``Verify``; None: ``ClientOptions.verify``.
            parent: with keys: the key before the first, unless that is the head of its chain.
            depth: with keys: position of the first in its chain.
            paths: hosts whose storage links may be used for blocks in storage; None: as the client's options say.

        Raises:
            InvalidArgument: a buffer or keys that do not fit, or an argument of another type.
        """
        return self.runner.run(self.load_call(what, buffer, deadline_s, verify, parent, depth, paths))

    def start_load(
        self,
        what: Lookup | HeadLookup | Keys,
        buffer: object,
        *,
        deadline_s: float | None = None,
        verify: Verify | None = None,
        layerwise: bool = True,
        parent: BlockKey | None = None,
        depth: int = 0,
        paths: Paths | None = None,
    ) -> LoadHandle:
        """Start a load in the background, to use layers as they arrive; other arguments as for ``load``.

            handle = client.start_load(lookup, buffer)
            handle.wait_layer(0)
            result = handle.result()

        Args:
            what: see ``load``.
            buffer: see ``load``.
            deadline_s: see ``load``.
            verify: see ``load``.
            layerwise: layer 0 of all blocks comes first, then layer 1, and so on; False: block after block, which is faster.
            parent: see ``load``.
            depth: see ``load``.
            paths: see ``load``.

        Raises:
            InvalidArgument: see ``load``.
        """
        barrier = LayerBarrier(what.hit_blocks if isinstance(what, Lookup) else 0)
        call = self.load_call(what, buffer, deadline_s, verify, parent, depth, paths, barrier=barrier, layerwise=layerwise)
        future = self.runner.start(call)
        wait_on_stream = buffer.wait_on_stream if layerwise and isinstance(buffer, DeviceBuffer) else None
        return LoadHandle(call.scope, barrier, future, self._context.shape.layers, wait_on_stream)

    def read_ahead(self, lookup: Lookup, *, deadline_s: float | None = None, paths: Paths | None = None) -> ReadAhead | None:
        """Bring found blocks into DRAM while their request waits: ``ahead = client.read_ahead(lookup)``; see ``ReadAhead``.

        Args:
            lookup: its first ``hit_blocks`` blocks are read ahead.
            deadline_s: how long nodes hold them at most, in seconds from now; None: the option ``default_deadline_s``.
            paths: see ``load``.

        Returns:
            The read ahead, which the caller ends. None: all blocks are in the DRAM of this host, or there is no local node.

        Raises:
            InvalidArgument: ``deadline_s`` or ``paths`` has another type, or the seconds are out of range.
        """
        chain = self._slice(lookup.keys[: lookup.hit_blocks], lookup.parent, lookup.depth)
        return read_ahead(self._context, chain, lookup.runs, deadline_s, checked_paths(paths, self._context.options.paths))

    def load_call(
        self,
        what: Lookup | HeadLookup | Keys,
        buffer: object,
        deadline_s: float | None,
        verify: Verify | None,
        parent: BlockKey | None,
        depth: int,
        paths: Paths | None,
        *,
        barrier: LayerBarrier | None = None,
        layerwise: bool = False,
    ) -> Load:
        """Prepare ``load``: the arguments are checked, the work has not begun."""
        lookup = what if isinstance(what, Lookup | HeadLookup) else None
        if lookup is not None and (parent is not None or depth):
            raise InvalidArgument("pass parent and depth only with keys: a lookup contains its own")
        if isinstance(what, Lookup):
            chain = self._slice(what.keys[: what.hit_blocks], what.parent, what.depth)
        elif isinstance(what, HeadLookup):
            chain = self._slice(what.keys, heads=True)
        else:
            chain = self._slice(what, parent, depth)
        verify = checked_verify(verify, self._context.options.verify)
        blocks = as_block_buffer(buffer, self._context.shape, len(chain), spec=self._context.spec)
        if barrier is not None:
            barrier.promised_blocks = len(chain)
        scope = self._scope(deadline_s, self._context.options.default_deadline_s)
        paths = self._context.options.paths if paths is None else checked_paths(paths)
        return Load(self._context, chain, lookup, blocks, scope, verify, barrier=barrier, layerwise=layerwise, paths=paths)

    # ---- stores ----
    def store(
        self,
        keys: Keys,
        buffer: object,
        *,
        parent: BlockKey | None = None,
        depth: int = 0,
        deadline_s: float | None = None,
        durable: bool = False,
        wait_visible: bool = False,
    ) -> StoreResult:
        """Store blocks. Blocks that the store holds already are not written again.

            client.store(keys[n:], buffer, parent=keys[n - 1], depth=n).held_blocks

        Args:
            keys: consecutive keys of a chain.
            buffer: their bytes; must not change until the call has returned.
            parent: the key before the first, unless that is the head of its chain.
            depth: position of the first in its chain.
            deadline_s: seconds it may take, including the wait for space; None: ``ClientOptions.default_deadline_s``.
            durable: return only after they are durable, or the time is over (see the result's ``durable``).
            wait_visible: with a local node: wait until lookups everywhere show the blocks, at most 0.8 of the time left.

        Raises:
            InvalidArgument: a buffer or keys that do not fit.
        """
        call = self.store_call(keys, buffer, parent, depth, deadline_s, durable=durable, wait_visible=wait_visible)
        return self.runner.run(call)

    def start_store(
        self,
        keys: Keys,
        buffer: object,
        *,
        parent: BlockKey | None = None,
        depth: int = 0,
        deadline_s: float | None = None,
        durable: bool = False,
        wait_visible: bool = False,
    ) -> StoreHandle:
        """Start a store in the background; arguments as for ``store``.

            handle = client.start_store(keys, pages)
            ...                                  # the pages must not change until the store has ended
            result = handle.result()             # or handle.cancel(), to have the pages back soon

        At most ``ClientOptions.max_pending`` calls run or wait in the background; one more ends at once, its blocks SKIPPED.

        Raises:
            InvalidArgument: a buffer or keys that do not fit.
        """
        call = self.store_call(keys, buffer, parent, depth, deadline_s, durable=durable, wait_visible=wait_visible)
        return StoreHandle(call.scope, self.runner.start(call))

    def store_heads(self, keys: Keys, buffer: object, *, deadline_s: float | None = None) -> StoreResult:
        """Store blocks each of which is the head of a separate chain; the first failure ends the call.

            client.store_heads(page_keys, pages)

        For pages of engines that do not name the preceding pages, or keep only some of them. Such pages are found by
        ``lookup_heads`` and evicted in any order.

        Raises:
            InvalidArgument: a buffer or keys that do not fit.
        """
        return self.runner.run(self.store_call(keys, buffer, None, 0, deadline_s, durable=False, wait_visible=False, heads=True))

    def store_call(
        self,
        keys: Keys,
        buffer: object,
        parent: BlockKey | None,
        depth: int,
        deadline_s: float | None,
        *,
        durable: bool,
        wait_visible: bool,
        heads: bool = False,
    ) -> Store:
        """Prepare ``store`` or ``store_heads``: the arguments are checked, the work has not begun."""
        chain = self._slice(keys, parent, depth, heads=heads)
        blocks = as_block_buffer(buffer, self._context.shape, len(chain), writable=False, spec=self._context.spec)
        scope = self._scope(deadline_s, self._context.options.default_deadline_s)
        in_pool = not heads  # the engine's own pool is for prompts
        return Store(self._context, chain, blocks, scope, durable=durable, wait_visible=wait_visible, keep_in_pool=in_pool)

    def begin_store(
        self, keys: Keys, *, parent: BlockKey | None = None, depth: int = 0, deadline_s: float | None = None
    ) -> LayerwiseStore:
        """Begin a store that is written layer by layer; ``deadline_s`` bounds it up to its commit.

            with client.begin_store(keys) as store:
                for layer, rows in enumerate(computed_layers):
                    store.put_layer(layer, rows)
                result = store.commit()

        Raises:
            InvalidArgument: keys that do not fit.
        """
        chain = self._slice(keys, parent, depth)
        store = LayerwiseStore(self._context, chain, self._scope(deadline_s, self._context.options.default_deadline_s))
        store.begin()
        self._unfinished.add(store)
        return store

    def flush(self, timeout_s: float = 10.0) -> bool:
        """Wait until all blocks that are stored on the local node at the time of the call are durable.

            client.flush(30.0)

        Returns:
            False: not in time, blocks were given up (a full or failing disk), nothing is kept durably, or there is no local node.

        Raises:
            InvalidArgument: ``timeout_s`` is not a number of seconds.
        """
        self._check_usable()
        timeout_s = check_seconds("timeout_s", timeout_s, zero=True)
        session = self._context.local.session() if self._context.local is not None else None
        if session is None:
            return False
        try:
            request = node_pb2.FlushRequest(timeout_ms=int(timeout_s * 1000))
            answer = call_cancellable(session.stub.Flush, request, timeout_s + _FLUSH_GRACE_S, session.server.waiting)
            return bool(answer.complete)
        except KVStoreError as error:
            if isinstance(error, ChannelBroken) and self._context.local is not None:
                self._context.local.lost(session, error)
            self._context.incidents.report(client_metrics.FLUSH_FAILED, "flush failed", error)
            return False

    # ---- handoff of prompts ----
    def begin_handoff(
        self,
        keys: Keys,
        decode_node: str,
        *,
        parent: BlockKey | None = None,
        depth: int = 0,
        tail: bool = False,
        deadline_s: float | None = None,
    ) -> PromptSender:
        """Prefill side: begin to hand a prompt over, layer by layer, to the host of the engine that will decode it.

            with client.begin_handoff(keys, "node-b") as handoff:
                for layer, rows in enumerate(computed_layers):
                    handoff.put_layer(layer, rows)
                result = handoff.commit()

        Args:
            keys: consecutive keys of the prompt, hits and new blocks alike. Blocks that the decode host holds are not sent.
            decode_node: its node.
            parent: the key before the first, unless that is the head of its chain.
            depth: position of the first in its chain.
            tail: the last key is ``tail_key``'s: it is handed over, but not kept.
            deadline_s: bound, up to the commit.

        Raises:
            InvalidArgument: keys that do not fit, or a malformed ``decode_node``.
        """
        chain = self._slice(keys, parent, depth)
        check_name("decode_node", decode_node)
        scope = self._scope(deadline_s, self._context.options.default_deadline_s)
        node, failure = None, None
        try:
            node = find_decode_node(self._context, decode_node, scope)
        except KVStoreError as error:
            failure = error
            self._context.incidents.report(client_metrics.HANDOFFS_FAILED, "decode node not found", error)
        return PromptSender(self._context, node, chain, scope, failure, tail=tail)

    def abandon_prompt(self, transfer_id: str, decode_node: str, *, deadline_s: float | None = None) -> bool:
        """Prefill side: tell the decode node that the rest of a prompt will not arrive, so that the decode side stops waiting.

            client.abandon_prompt("request-7", "node-b")

        Args:
            transfer_id: the one that the decode side gives to ``await_prompt``, before or after this call.
            decode_node: its node.
            deadline_s: how long to try.

        Returns:
            Whether the node received the message. If not, the decode side waits until its own deadline.

        Raises:
            InvalidArgument: ``transfer_id`` does not have 1 to 64 bytes, or a malformed ``decode_node``.
        """
        self._check_usable()
        check_sendable("transfer_id", check_transfer_id(transfer_id, needed=True))
        check_name("decode_node", decode_node)
        scope = self._scope(deadline_s, self._context.options.default_deadline_s)
        return abandon_prompt(self._context, transfer_id, decode_node, scope)

    def await_prompt(self, keys: Keys, *, transfer_id: str = "", deadline_s: float | None = None) -> PromptReceiver:
        """Decode side: reserve space for a prompt in this host's decode buffer, and wait for it in the background.

            with client.await_prompt(keys, transfer_id="request-7") as prompt:
                if prompt.wait(5.0):
                    result = prompt.take(buffer)

        Args:
            keys: all keys of the prompt, including a partial last block's.
            transfer_id: names the handoff: the prefill side may end the wait by it (``abandon_prompt``). At most 64 bytes.
            deadline_s: seconds it may take; None: ``ClientOptions.default_deadline_s``.

        Raises:
            InvalidArgument: malformed keys, or a malformed ``transfer_id``.
            Unavailable: the client is closed.
        """
        check_sendable("transfer_id", check_transfer_id(transfer_id))
        scope = self._scope(deadline_s, self._context.options.default_deadline_s)
        prompt = PromptReceiver(self._context, self._slice(keys), scope, transfer_id)
        prompt.begin(self._context.prompt_threads.submit(prompt.run))
        if not self._unfinished.add(prompt):
            prompt.cancel()
        return prompt

    # ---- state and end ----
    def stats(self) -> dict[str, int]:
        """Return totals of this client by name, and whether its session with the local node is open (1 or 0).

        Example: ``client.stats()["client_load_hit_blocks_total"]``
        """
        local = self._context.local
        return {**self._context.incidents.counters.snapshot(), "client_session_open": int(local is not None and local.is_open)}

    @property
    def hints(self) -> HintSender:
        """Hints about sessions of the application, see ``HintSender``: ``client.hints.keep("chat-7", keys, next_turn_s=20)``."""
        return self._hints

    @property
    def counters(self) -> Counters:
        """Counters and distributions of this client."""
        return self._context.incidents.counters

    @property
    def metrics_address(self) -> str | None:
        """Address of ``/metrics`` and ``/loads``, with the port that was chosen; None: not served. See ``metrics_listen``."""
        return self._metrics.address if self._metrics is not None else None

    @property
    def recent_loads(self) -> RecentLoads:
        """The last loads, with the slowest ones and their causes."""
        return self._context.accounting.recent

    @property
    def metadata_servers(self) -> list[MetadataServerState]:
        """The metadata servers that the client knows, with the one in use; empty without a metadata server.

        Example: ``[server.address for server in client.metadata_servers if server.used]``
        """
        return [] if self._context.metadata is None else self._context.metadata.servers()

    @property
    def local_node(self) -> NodeId | None:
        """The node with which a session is open, if any."""
        return self._context.local.node_id if self._context.local is not None else None

    @property
    def local_node_choice(self) -> NodeChoice | None:
        """Which of the nodes on this host the client uses and why; None: no node runs here, or ``node=None``.

        Example: ``print(client.local_node_choice.node_id, client.local_node_choice.reason)``
        """
        return None if self._finder is None else self._finder.choice

    @property
    def context(self) -> ClientContext:
        """Parts that all calls of this client share, such as sessions and connections, for extensions and diagnosis.

        They end with the client, and may change between versions. Example: ``session = client.context.local.session()``
        """
        return self._context

    def close(self) -> None:
        """Cancel what runs and close all connections. Later calls are misses and skips. Idempotent."""
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        with ExitStack() as steps:  # the last one first; each runs if others raise
            steps.callback(self._context.close)
            steps.callback(self.runner.close)
            for call in self._unfinished.close():
                steps.callback(call.cancel if isinstance(call, PromptReceiver) else call.abort)
            steps.callback(self._demotions.close)
            steps.callback(self._context.detach_pool)
            if self._metrics is not None:
                steps.callback(self._metrics.stop)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _slice(self, keys: Keys, parent: BlockKey | None = None, depth: int = 0, *, heads: bool = False) -> ChainSlice:
        self._check_usable()
        return ChainSlice(self._context.namespace, keys, parent, depth, heads=heads)

    def _scope(self, deadline_s: float | None, default_s: float) -> CallScope:
        seconds = default_s if deadline_s is None else check_seconds("deadline_s", deadline_s)
        return CallScope.after(seconds, self._context.clock)

    def _check_usable(self) -> None:
        check_process(self._pid)
