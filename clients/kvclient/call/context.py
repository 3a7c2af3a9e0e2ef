"""Parts that all calls of one client share."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from kvclient.load.accounting import HitAccounting
from kvclient.memory.engine_pool import DiskReader, PoolNamespace
from kvclient.nodes.local_session import LocalNode
from kvclient.nodes.lookup_memory import ChainNodes, RunEndMemory
from kvclient.nodes.metadata_client import MetadataClient
from kvclient.nodes.peers import PeerPool
from kvclient.nodes.remote_sessions import RemoteSessionCache
from kvclient.nodes.store_node import StoreNodeFinder
from kvclient.options import ClientOptions
from kvclient.results import Lookup
from kvstore.core.clock import Clock
from kvstore.core.spec import CacheSpec
from kvstore.core.types import BlockShape, NamespaceId
from kvstore.observe.limited_log import LimitedLog
from kvstore.process.threads.submission import LazyThreadPool
from kvstore.transport.liveness import LivenessMonitor


@dataclass(frozen=True, slots=True)
class ClientContext:
    """The parts of one client that loads, stores and handoffs work with."""

    spec: CacheSpec
    shape: BlockShape
    namespace: NamespaceId
    clock: Clock
    options: ClientOptions
    incidents: LimitedLog
    metadata: MetadataClient | None
    local: LocalNode | None
    peers: PeerPool
    remote_sessions: RemoteSessionCache
    store_nodes: StoreNodeFinder
    liveness: LivenessMonitor
    accounting: HitAccounting
    run_ends: RunEndMemory
    part_threads: LazyThreadPool
    """Threads for the parts of planned loads."""
    prompt_threads: LazyThreadPool
    """Threads for prompts that are awaited, which last longer than parts."""
    pool: PoolNamespace | None = None
    """The engine's own pool, nearer than any node."""
    chain_nodes: ChainNodes = field(default_factory=ChainNodes)
    ahead_threads: LazyThreadPool = field(default_factory=lambda: LazyThreadPool(2, "kvclient-ahead"))
    """Threads that plan reads ahead."""
    ahead_slots: threading.BoundedSemaphore = field(default_factory=lambda: threading.BoundedSemaphore(64))
    """Bounds the reads ahead that wait for such a thread."""
    hint_threads: LazyThreadPool = field(default_factory=lambda: LazyThreadPool(1, "kvclient-hint"))
    """A thread that sends hints to other nodes."""
    disks: DiskReader | None = None
    """Reads the local node's volumes into device memory, for an engine without a pool."""

    def prepare_disks(self) -> None:
        """Begin to find out whether the local node's volumes can be read directly into device memory.

        Raises:
            Unsupported: such reads are required and not possible.
        """
        reader = self.pool or self.disks
        if reader is not None:
            session = self.local.session() if self.local is not None else None
            reader.prepare_disks(session.volumes if session is not None else ())

    def detach_pool(self) -> None:
        """Stop demoting blocks of the engine's own pool through this client."""
        if self.pool is not None:
            self.pool.detach()

    def predict_load(self, lookup: Lookup) -> float | None:
        """Return how long the load of found blocks should take, for an engine that may compute them instead.

            seconds = client.context.predict_load(client.lookup(keys))

        Args:
            lookup: what would be loaded.

        Returns:
            Seconds, by the recent loads of this client; None: it has not loaded from one of the sources yet.
        """
        own_node = self.local.node_id if self.local is not None else None
        return self.accounting.predictor.predict(lookup, own_node or "")

    def close(self) -> None:
        """End the threads and close all connections."""
        self.part_threads.close()  # parts end soon after their scopes
        self.prompt_threads.close()  # prompts were cancelled before
        self.remote_sessions.close()
        self.hint_threads.close()  # hints that wait fail at once, because no session is left
        self.peers.close()
        if self.local is not None:
            self.local.close()
        if self.metadata is not None:
            self.metadata.close()
        self.ahead_threads.close()  # plans that wait fail at once: the channel is closed
        self.liveness.close()
