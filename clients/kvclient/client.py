"""The client as engines see it, blocking. ``kvclient.aio`` is the same for asyncio.

Threads: all methods may be called from any thread. Fork: gRPC does not survive it, so make the client after forking; a child
that calls its parent's client gets ``InvalidArgument``.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Self

import numpy as np

from kvclient.call.context import Core, check_keys, check_place
from kvclient.call.execution import Call, Caller
from kvclient.call.incidents import Incidents
from kvclient.call.operation import Operation, check_name, check_seconds, check_sendable
from kvclient.handoff.sender import AwaitedPrompt, Handoff, abandon_prompt, check_transfer_id, find_decode_node
from kvclient.load.accounting import LoadAccounts
from kvclient.load.layer_progress import LayerBoard
from kvclient.load.layerwise import LayerGate, LoadHandle
from kvclient.load.load import Load
from kvclient.load.paths import Paths
from kvclient.load.planned import PlannedLoad
from kvclient.memory.buffers import as_block_buffer
from kvclient.memory.device_buffer import ArenaPinner, FarBlocks
from kvclient.memory.engine_pool import NearPool
from kvclient.nodes.connect import NodeFinder, attempt, check_types, watch_servers
from kvclient.nodes.local_session import LocalNode
from kvclient.nodes.metadata_client import Directory, by_roles
from kvclient.nodes.peers import PeerPool
from kvclient.nodes.remote_sessions import Stages
from kvclient.options import VERIFY_CHOICES, ClientOptions, Verify
from kvclient.results import LoadResult, Lookup, NodeRef, StoreResult
from kvclient.store.handle import StoreHandle
from kvclient.store.layerwise import LayerwiseStore
from kvclient.store.store import Store
from kvproto.v1 import common_pb2, node_pb2
from kvstore.core.buffers import BlockBuffer
from kvstore.core.clock import MonotonicClock
from kvstore.core.errors import InvalidArgument, KVStoreError, Unavailable
from kvstore.core.keys import KeyChain, Tokens
from kvstore.core.spec import CacheSpec
from kvstore.core.types import BlockKey, NodeId, Outcome, StoreOutcome, pack_keys
from kvstore.observe import tracing
from kvstore.observe.context import named_request
from kvstore.observe.counters import Counters
from kvstore.observe.slow_loads import RecentLoads
from kvstore.process.tls import TlsConfig
from kvstore.rpc.client import call_cancellable

if TYPE_CHECKING:
    from kvstore.observe.http import MetricsServer

_log = logging.getLogger(__name__)

_LOOKUP_SHARE = 0.5
"""Part of a load's time that the lookup within it may take."""
_REGISTER_SHARE = 0.5
"""Part of the time of ``connect`` that the metadata server may take where the node is to have its chance without it."""
_STORE_NODE_VALID_S = 5.0

Keys = Sequence[BlockKey] | bytes
"""Consecutive keys of a chain: a sequence of 16-byte keys, or all of them packed in one ``bytes``."""


class KVClient:
    """One engine's access to the store, in one namespace. Made by ``connect``; a context manager."""

    def __init__(self, core: Core, directory: Directory | None) -> None:
        """For ``connect``."""
        self._core = core
        self._directory = directory
        self._chain = KeyChain(core.spec)
        options = core.options
        self._caller = Caller(core.incidents, workers=options.workers, max_pending=options.max_pending, strict=options.strict)
        self._handles: weakref.WeakSet[LayerwiseStore] = weakref.WeakSet()
        self._demotions: set[Operation] = set()
        self._demotions_lock = threading.Lock()
        self._store_node: tuple[NodeRef, float] | None = None
        self._parts_lock = threading.Lock()
        self._parts: ThreadPoolExecutor | None = None
        self._pid = os.getpid()
        self._closed = False
        self._metrics: MetricsServer | None = None

    @classmethod
    def connect(
        cls,
        metadata: str | None,
        spec: CacheSpec,
        *,
        node: str | None = "auto",
        tls: TlsConfig | None = None,
        options: ClientOptions | None = None,
        hbm: NearPool | None = None,
        device: ArenaPinner | None = None,
    ) -> Self:
        """Makes the namespace known and opens a session with the node of this host.

        Args:
            metadata: address of the metadata server, ``host:port``; None: only the local node is asked.
            spec: the namespace.
            node: address of the local node (``unix:/path`` or ``host:port``); ``"auto"``: a living one whose unix socket is on
                this host, if there is one; None: none, bytes travel over TCP straight to and from other nodes.
            tls: for everything but unix sockets.
            options: bounds and choices.
            hbm: this engine's own pool (``kvclient.hbm.HbmPool``), which may be shared by clients: loads look there first, loads
                and stores leave a copy there. It outlives the client.
            device: copies between the arena and this engine's device (``kvclient.device.DeviceCopier``): pins the arena. It
                outlives the client.

        Raises:
            InvalidArgument: a malformed address or another type, or neither metadata server nor node; or no block fits the pool.
            Unsupported: the pool requires GPUDirect Storage, and it is not real for the volumes of the local node.
            KVStoreError: the metadata server or the named node does not answer (unless ``options.require_store`` is False).
        """
        options = options or ClientOptions()
        check_types(metadata, spec, node, tls, options, hbm)
        if device is not None:
            if not isinstance(device, ArenaPinner):
                raise InvalidArgument("an argument of another type", argument="device", got=type(device).__name__)
            device.check(spec)
        clock = MonotonicClock()
        incidents = Incidents(clock, options.log_interval_s)
        if metadata is None and (node is None or node == "auto"):
            raise InvalidArgument("a client takes a metadata server, a node, or both")
        liveness = watch_servers(tls, incidents.counters)
        server = liveness.server(metadata or "")
        directory = Directory(metadata, spec, tls, clock, options, incidents, server) if metadata is not None else None
        peers = PeerPool(spec, tls, options, incidents, liveness)
        stages = Stages(spec, tls, options, incidents, liveness)
        local = None
        end_s = clock.now_s() + options.connect_deadline_s
        try:
            if directory is not None:
                share = 1.0 if options.require_store or node is None else _REGISTER_SHARE
                attempt(options, incidents, partial(directory.introduce, options.connect_deadline_s * share))
            if node is not None:
                finder = NodeFinder(node, directory, options)
                local = LocalNode(finder.find, spec, tls, clock, options, incidents, liveness, device)
                if attempt(options, incidents, partial(local.open, end_s)) is False:
                    local.close()
                    local = None
                    _log.info("no node of the store on this host: blocks travel over TCP")
        except BaseException:
            if local is not None:
                local.close()
            if directory is not None:
                directory.close()
            liveness.close()
            raise
        loads = LoadAccounts(spec.block_tokens, spec.shape.block_bytes, incidents, options)
        core = Core(spec, spec.shape, spec.namespace, clock, options, incidents, local, peers, stages, liveness, loads)
        client = cls(core, directory)
        if hbm is not None:
            try:
                near = hbm.attach(spec, client._demote)
                client._core = replace(client._core, near=near)
                session = local.session() if local is not None else None
                near.prepare_disks(session.volumes if session is not None else ())
            except BaseException:
                client.close()
                raise
        if options.metrics_listen is not None:
            from kvclient.metrics import serve_client  # loads prometheus_client

            client._metrics = serve_client(client, options.metrics_listen)
        return client

    # ---- keys and lookup ----
    @property
    def spec(self) -> CacheSpec:
        """The namespace."""
        return self._core.spec

    def keys(
        self, tokens: Tokens, extras: Mapping[int, bytes] | None = None, parent: BlockKey | None = None, first_block: int = 0
    ) -> list[BlockKey]:
        """Keys of all full blocks of some tokens; see ``kvstore.core.keys.KeyChain.keys``."""
        check_place(parent, first_block)
        return self._chain.keys(tokens, extras=extras, parent=parent, first_block=first_block)

    def lookup(self, keys: Keys, *, deadline_s: float | None = None) -> Lookup:
        """The longest run of leading keys that can be served, as far as the index knows.

        Args:
            keys: a chain from its head.
            deadline_s: seconds it may take; None: the option's.

        Raises:
            InvalidArgument: malformed keys, or too many.
        """
        return self._caller.now(self.lookup_call(keys, deadline_s))

    def lookup_call(self, keys: Keys, deadline_s: float | None) -> Call[Lookup]:
        """The work of ``lookup``, checked but not begun."""
        self._check_usable()
        keys, packed = check_keys(keys)
        operation = self._operation(deadline_s, self._core.options.lookup_deadline_s)
        accounts = self._core.loads

        def work() -> Lookup:
            found = self._look_up(keys, packed, operation)
            accounts.looked_up(found)
            return found

        def refused(error: KVStoreError) -> Lookup:
            accounts.refused(len(keys), error)
            return Lookup(keys, error=error)

        return Call(operation, work, refused)

    def _look_up(self, keys: Sequence[BlockKey], packed: bytes, operation: Operation) -> Lookup:
        """Asks the metadata server; without an answer, a miss."""
        counters = self._core.incidents.counters
        counters.add("client_lookups_total")
        if not keys or self._directory is None:
            return Lookup(keys)
        try:
            found = self._directory.lookup(keys, packed, operation.left_s())
        except KVStoreError as error:
            self._core.incidents.report("client_lookups_failed_total", "lookup failed: a miss", error)
            return Lookup(keys, seconds=operation.elapsed_s(), error=error)
        counters.add("client_lookup_blocks_total", len(keys))
        counters.add("client_lookup_hit_blocks_total", found.hit_blocks)
        counters.observe("client_lookup_seconds", found.seconds)
        return found

    # ---- loads ----
    def load(
        self,
        what: Lookup | Keys,
        buffer: object,
        *,
        deadline_s: float | None = None,
        verify: Verify | None = None,
        parent: BlockKey | None = None,
        depth: int = 0,
        paths: Paths | None = None,
    ) -> LoadResult:
        """Loads blocks into a buffer of the caller's. When it has returned, nothing writes to the buffer any more.

        Args:
            what: a ``Lookup``: its first ``hit_blocks`` are loaded (``lookup.part`` for less). Or keys: they are looked up on the
                way if they begin a chain, and the local node is asked for all of them, whatever the index says.
            buffer: room for exactly these blocks; see ``as_block_buffer``.
            deadline_s: seconds it may take; None: the option's.
            verify: whether checksums are compared here; None: the option's.
            parent: with keys: the key before the first, where that is not the head of its chain.
            depth: with keys: position of the first in its chain.
            paths: over which hosts' storage links what lies in storage may be read; None: over this host's.

        Raises:
            InvalidArgument: a buffer or keys that do not fit.
        """
        return self._caller.now(self.load_call(what, buffer, deadline_s, verify, parent, depth, None, paths))

    def start_load(
        self,
        what: Lookup | Keys,
        buffer: object,
        *,
        deadline_s: float | None = None,
        verify: Verify | None = None,
        layerwise: bool = True,
        parent: BlockKey | None = None,
        depth: int = 0,
        paths: Paths | None = None,
    ) -> LoadHandle:
        """Begins a load in the background, for layer-wise hand-over; other arguments as for ``load``.

        ``layerwise``: layer 0 of all blocks comes first, then layer 1, and so on; False: block after block, which is done sooner.
        """
        blocks = what.hit_blocks if isinstance(what, Lookup) else len(check_keys(what)[0])
        gate = LayerGate(blocks)
        load = self.load_call(what, buffer, deadline_s, verify, parent, depth, gate if layerwise else None, paths)

        def work() -> LoadResult:
            good = 0
            try:
                result = load.work()
                good = result.hit_blocks
            finally:
                gate.finish(good)
            return result

        def refused(error: KVStoreError) -> LoadResult:
            gate.finish(0)
            return load.refused(error)

        future = self._caller.later(Call(load.operation, work, refused))
        follow = buffer.follow if layerwise and isinstance(buffer, FarBlocks) else None
        return LoadHandle(load.operation, gate, future, self._core.shape.layers, follow)

    def load_call(
        self,
        what: Lookup | Keys,
        buffer: object,
        deadline_s: float | None,
        verify: Verify | None,
        parent: BlockKey | None,
        depth: int,
        gate: LayerGate | None,
        paths: Paths | None = None,
    ) -> Call[LoadResult]:
        """The work of ``load``, checked but not begun."""
        self._check_usable()
        lookup: Lookup | None = None
        if isinstance(what, Lookup):
            if parent is not None or depth:
                raise InvalidArgument("a lookup knows its place in the chain: give parent and depth with keys only")
            lookup, parent, depth = what, what.parent, what.depth
            keys, packed = check_keys(what.keys[: what.hit_blocks])
        else:
            keys, packed = check_keys(what)
        check_place(parent, depth)
        verify = self._core.options.verify if verify is None else verify
        if verify not in VERIFY_CHOICES:
            raise InvalidArgument("unknown choice", verify=verify, choices=VERIFY_CHOICES)
        blocks = as_block_buffer(buffer, self._core.shape, len(keys), spec=self._core.spec)
        operation = self._operation(deadline_s, self._core.options.default_deadline_s)

        def work() -> LoadResult:
            with named_request(), tracing.span("kvclient.load.load"):
                return bring()

        def bring() -> LoadResult:
            found = lookup
            if found is None:
                head = (keys, packed) if parent is None else ((), b"")  # the index knows chains from their head only
                with operation.phase("lookup"):
                    found = self._look_up(*head, Operation(self._core.clock, operation.left_s() * _LOOKUP_SHARE))
                operation.named_blocks, operation.index_down = found.hit_blocks, found.error is not None
            place = (keys, packed, found.runs, parent, depth, blocks, operation, verify)
            load: Load | PlannedLoad
            if paths is not None and self._directory is not None:
                load = PlannedLoad(self._core, self._directory, self._part_pool(), *place, gate, paths)
            else:
                board = LayerBoard(len(keys), self._core.shape.layers, gate, blocks) if gate is not None else None
                load = Load(self._core, *place, board)
            if found.error is not None:
                load.note(found.error)
            return load.run()

        def refused(error: KVStoreError) -> LoadResult:
            self._core.loads.refused(len(keys), error)
            return LoadResult(np.full(len(keys), Outcome.UNAVAILABLE, np.uint8), error=error)

        return Call(operation, work, refused)

    def _part_pool(self) -> ThreadPoolExecutor:
        """Threads for the parts of planned loads, made when first needed."""
        with self._parts_lock:
            if self._parts is None:
                self._parts = ThreadPoolExecutor(self._core.options.part_workers, thread_name_prefix="kvclient-part")
            return self._parts

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
        """Stores blocks; what the store holds already is not written again.

        Args:
            keys: consecutive keys of a chain.
            buffer: their bytes; must not change until the call has returned.
            parent: the key before the first, where that is not the head of its chain.
            depth: position of the first in its chain.
            deadline_s: seconds it may take, waiting for room included; None: the option's.
            durable: answer only once they are on NVMe (see the result's ``durable``).
            wait_visible: with a local node: return only once lookups everywhere show the blocks, or most of the time is up.

        Raises:
            InvalidArgument: a buffer or keys that do not fit.
        """
        return self._caller.now(
            self.store_call(keys, buffer, parent, depth, deadline_s, durable=durable, wait_visible=wait_visible)
        )

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

        At most ``ClientOptions.max_pending`` calls run or wait in the background; one more ends at once, and its blocks are
        SKIPPED.

        Raises:
            InvalidArgument: a buffer or keys that do not fit.
        """
        call = self.store_call(keys, buffer, parent, depth, deadline_s, durable=durable, wait_visible=wait_visible)
        return StoreHandle(call.operation, self._caller.later(call))

    def store_heads(self, keys: Keys, buffer: object, *, deadline_s: float | None = None) -> StoreResult:
        """Stores blocks each of which is the head of a chain of its own, as ``store`` does; the first that fails ends it.

        For pages of engines that do not tell what comes before them. They are looked up one by one, and evicted in any order.

        Raises:
            InvalidArgument: a buffer or keys that do not fit.
        """
        call = self.store_call(keys, buffer, None, 0, deadline_s, durable=False, wait_visible=False, heads=True)
        return self._caller.now(call)

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
    ) -> Call[StoreResult]:
        """The work of ``store``, or of ``store_heads``, checked but not begun."""
        self._check_usable()
        keys, packed = check_keys(keys)
        check_place(parent, depth)
        blocks: BlockBuffer = as_block_buffer(buffer, self._core.shape, len(keys), writable=False, spec=self._core.spec)
        operation = self._operation(deadline_s, self._core.options.default_deadline_s)
        store = Store(
            self._core,
            keys,
            packed,
            parent,
            depth,
            blocks,
            operation,
            self._find_store_node,
            durable=durable,
            wait_visible=wait_visible,
            heads=heads,
        )

        def work() -> StoreResult:
            result = store.run()
            if result.error is not None:
                self._store_node = None  # it may be that node's fault: choose anew
            near = None if heads else self._core.near  # a pool of the engine's own is for prompts
            if near is not None and not operation.over:  # also what the node had no room for
                near.keep(keys, parent, depth, blocks, operation, checksums=self._core.options.verify == "always")
            return result

        return Call(operation, work, lambda error: StoreResult(np.full(len(keys), StoreOutcome.SKIPPED, np.uint8), error=error))

    def _demote(self, keys: Sequence[BlockKey], parent: BlockKey | None, depth: int, blocks: BlockBuffer) -> bool:
        """Offers what must leave the pool to the node; what it holds is not copied. Whether it holds all of it now."""
        operation = Operation(self._core.clock, _DEMOTION_S)
        operation.cancellable = True
        with self._demotions_lock:
            if self._closed:
                return False
            self._demotions.add(operation)
        try:
            place = (self._core, keys, pack_keys(tuple(keys)), parent, depth, blocks, operation, self._find_store_node)
            return Store(*place, durable=False, wait_visible=False).run().held_blocks == len(keys)
        finally:
            with self._demotions_lock:
                self._demotions.discard(operation)

    def begin_store(
        self, keys: Keys, *, parent: BlockKey | None = None, depth: int = 0, deadline_s: float | None = None
    ) -> LayerwiseStore:
        """Begins a store that is written layer by layer; ``deadline_s`` bounds it up to its commit.

        Raises:
            InvalidArgument: keys that do not fit.
        """
        self._check_usable()
        keys, packed = check_keys(keys)
        check_place(parent, depth)
        operation = self._operation(deadline_s, self._core.options.default_deadline_s)
        handle = LayerwiseStore(self._core, keys, packed, parent, depth, operation, self._find_store_node)
        self._handles.add(handle)
        return handle

    # ---- hand-over of prompts ----
    def tail_key(self, tokens: Tokens, parent: BlockKey | None = None) -> BlockKey:
        """Key of a prompt's partial last block; see ``kvstore.core.keys.KeyChain.tail``."""
        return self._chain.tail(tokens, parent)

    def begin_handoff(
        self,
        keys: Keys,
        decode_node: str,
        *,
        parent: BlockKey | None = None,
        depth: int = 0,
        tail: bool = False,
        deadline_s: float | None = None,
    ) -> Handoff:
        """Prefill side: begins to hand a prompt over to the host of the engine that will decode it, layer by layer.

        Args:
            keys: consecutive keys of the prompt: hit and new blocks alike. What the decode host holds is not sent.
            decode_node: its node.
            parent: the key before the first, where that is not the head of its chain.
            depth: position of the first in its chain.
            tail: the last key is ``tail_key``'s: handed over, but not kept.
            deadline_s: bound, up to the commit.

        Raises:
            InvalidArgument: keys that do not fit, or a ``decode_node`` that is no name.
        """
        self._check_usable()
        keys, _ = check_keys(keys)
        check_place(parent, depth)
        check_name("decode_node", decode_node)
        operation = self._operation(deadline_s, self._core.options.default_deadline_s)
        node, failed = None, None
        try:
            node = find_decode_node(self._core, self._directory, decode_node, operation)
        except KVStoreError as error:
            failed = error
            self._core.incidents.report("client_handoffs_failed_total", "the decode node is not found", error)
        return Handoff(self._core, node, keys, parent, depth, operation, failed, tail=tail)

    def abandon_prompt(self, transfer_id: str, decode_node: str, *, deadline_s: float | None = None) -> bool:
        """Prefill side: tells the decode node that what is missing of a prompt will not come, so that nobody waits for it there.

        Args:
            transfer_id: as the decode side gives it to ``await_prompt``, now or soon.
            decode_node: its node.
            deadline_s: how long to try.

        Returns:
            Whether it was told. If not, the decode side waits for as long as it chose to.

        Raises:
            InvalidArgument: ``transfer_id`` is not of 1 to 64 bytes, or ``decode_node`` no name.
        """
        self._check_usable()
        check_sendable("transfer_id", check_transfer_id(transfer_id, needed=True))
        check_name("decode_node", decode_node)
        operation = self._operation(deadline_s, self._core.options.default_deadline_s)
        return abandon_prompt(self._core, self._directory, transfer_id, decode_node, operation)

    def await_prompt(self, keys: Keys, *, transfer_id: str = "", deadline_s: float | None = None) -> AwaitedPrompt:
        """Decode side: takes room for a prompt in this host's decode buffer and waits, in the background, until it is complete.

        Args:
            keys: all keys of the prompt, a partial last block's included.
            transfer_id: names the hand-over: the prefill side may end the wait by it (``abandon_prompt``). At most 64 bytes.
            deadline_s: how long it may take; None: the option's.

        Raises:
            InvalidArgument: malformed keys, or a ``transfer_id`` that is too long or no Unicode.
            CapacityExceeded: too much runs in the background already.
        """
        self._check_usable()
        keys, packed = check_keys(keys)
        check_sendable("transfer_id", check_transfer_id(transfer_id))
        operation = self._operation(deadline_s, self._core.options.default_deadline_s)
        prompt = AwaitedPrompt(self._core, keys, packed, operation, transfer_id)
        prompt.begin(self._part_pool().submit(prompt.run))
        return prompt

    def flush(self, timeout_s: float = 10.0) -> bool:
        """Waits until everything that was stored on the local node so far is durable.

        False: not in time, some of it was given up (a full or failing disk), the node keeps nothing durable, or there is no node.

        Raises:
            InvalidArgument: ``timeout_s`` is no number of seconds.
        """
        self._check_usable()
        timeout_s = check_seconds("timeout_s", timeout_s, zero=True)
        session = self._core.local.session() if self._core.local is not None else None
        if session is None:
            return False
        try:
            request = node_pb2.FlushRequest(timeout_ms=int(timeout_s * 1000))
            answer = call_cancellable(session.stub.Flush, request, timeout_s + _FLUSH_GRACE_S, session.server.waiting)
            return bool(answer.complete)
        except KVStoreError as error:
            self._core.incidents.report("client_flush_failed_total", "flush failed", error)
            return False

    def _find_store_node(self, timeout_s: float) -> NodeRef:
        """Where stores go without a local node: asked of the metadata server now and then."""
        now_s = self._core.clock.now_s()
        if self._store_node is not None and now_s < self._store_node[1] and not self._core.peers.hung(self._store_node[0]):
            return self._store_node[0]
        if self._directory is None:
            raise Unavailable("no local node and no metadata server: nowhere to store")
        options = self._core.options
        nodes = by_roles(self._directory.takers(min(timeout_s, options.lookup_deadline_s)), options.store_roles)
        for node in nodes:
            if node.volumes and all(volume.tier == common_pb2.TIER_HBM for volume in node.volumes):
                continue  # an engine's pool, which takes nothing from outside
            if options.store_node is None or node.node_id == options.store_node:
                ref = NodeRef(NodeId(node.node_id), node.control_address, node.data_address)
                if self._core.peers.hung(ref):
                    continue
                self._store_node = (ref, now_s + _STORE_NODE_VALID_S)
                return ref
        raise Unavailable("no living node to store to", store_node=options.store_node)

    # ---- life ----
    def stats(self) -> dict[str, int]:
        """Totals of this client by name, and whether its session with the local node is open (1 or 0)."""
        local = self._core.local
        return {**self._core.incidents.snapshot(), "client_session_open": int(local is not None and local.is_open)}

    @property
    def counters(self) -> Counters:
        """What ``stats`` shows, and the distributions beside it."""
        return self._core.incidents.counters

    @property
    def recent_loads(self) -> RecentLoads:
        """The last loads: which were slowest, and why."""
        return self._core.loads.recent

    @property
    def local_node(self) -> NodeId | None:
        """The node that a session is open with, if any."""
        return self._core.local.node_id if self._core.local is not None else None

    def close(self) -> None:
        """Cancels what runs and lets go of everything. Calls after it are misses and skips."""
        if self._closed or os.getpid() != self._pid:
            return
        with self._demotions_lock:
            self._closed = True
            demotions = list(self._demotions)
        if self._metrics is not None:
            self._metrics.stop()
        if self._core.near is not None:
            self._core.near.detach()
        for operation in demotions:
            operation.cancel()
        for handle in list(self._handles):
            handle.abort()
        self._caller.close()
        if self._parts is not None:
            self._parts.shutdown()  # parts end soon after their cancelled operations
        self._core.stages.close()
        self._core.peers.close()
        if self._core.local is not None:
            self._core.local.close()
        if self._directory is not None:
            self._directory.close()
        self._core.liveness.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    @property
    def caller(self) -> Caller:
        """For ``kvclient.aio``: where calls run."""
        return self._caller

    def _operation(self, deadline_s: float | None, default_s: float) -> Operation:
        seconds = default_s if deadline_s is None else check_seconds("deadline_s", deadline_s)
        return Operation(self._core.clock, seconds)

    def _check_usable(self) -> None:
        if os.getpid() != self._pid:
            raise InvalidArgument("this client was made before a fork: make another one in the child")


_FLUSH_GRACE_S = 0.5
_DEMOTION_S = 1.0
"""Bound of one demotion, waiting for room in the node included."""
