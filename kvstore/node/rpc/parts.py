"""The parts of a node that its RPCs and gauges use."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvproto.v1 import common_pb2
from kvstore.config.node import NodeConfig
from kvstore.core.clock import Clock
from kvstore.node.ahead.read_ahead import AheadReader
from kvstore.node.base.buffer_budget import BufferBudget
from kvstore.node.base.process_stall import ProcessStallDetector
from kvstore.node.control.admission_gate import AdmissionGate
from kvstore.node.control.drain import Drainer
from kvstore.node.control.pull import Puller
from kvstore.node.control.retention import RetentionEnforcer
from kvstore.node.copies.copier import Copier
from kvstore.node.durability.volume_checks import VolumeChecks
from kvstore.node.hints.session_hints import SessionHints
from kvstore.node.loads.layered import LayeredLoader
from kvstore.node.loads.loader import Loader
from kvstore.node.loads.nixl import NixlAgents
from kvstore.node.loads.prompt_wait import PromptWaits
from kvstore.node.loads.timings import LoadTimings
from kvstore.node.publish.health import HealthReporter
from kvstore.node.publish.publisher import IndexPublisher
from kvstore.node.rpc.links import Links
from kvstore.node.rpc.sessions import Sessions
from kvstore.node.rpc.wait_threads import WaitThreads
from kvstore.node.state.change_log import ReplicaChangeLog
from kvstore.node.state.namespaces import NamespaceRegistry
from kvstore.node.table import BlockTable
from kvstore.observe.counters import Counters
from kvstore.observe.history import History
from kvstore.transport.shaping.traffic import KvTraffic
from kvstore.transport.tickets import TicketAuthority


@dataclass(slots=True)
class NodeParts:
    """The parts of one node. The daemon sets ``publisher`` and ``copier`` at its start."""

    config: NodeConfig
    info: common_pb2.NodeInfo
    counters: Counters
    clock: Clock
    table: BlockTable
    namespaces: NamespaceRegistry
    sessions: Sessions
    loader: Loader
    layered: LayeredLoader
    prompts: PromptWaits
    ahead: AheadReader
    hints: SessionHints
    hint_calls: WaitThreads
    """Applies hints, one after the other."""
    buffers: Mapping[str, BufferBudget]
    gate: AdmissionGate
    puller: Puller
    drainer: Drainer
    enforcer: RetentionEnforcer
    checks: VolumeChecks
    replica_log: ReplicaChangeLog
    health: HealthReporter
    history: History
    timings: LoadTimings
    stall_detector: ProcessStallDetector
    authority: TicketAuthority
    traffic: KvTraffic
    links: Links
    nixl: NixlAgents
    io_engines: Callable[[], Sequence[str]]
    arena_socket: str
    arena_bytes: int
    publisher: IndexPublisher | None = None
    """None: the node runs without a metadata server."""
    copier: Copier | None = None
    """None: as for ``publisher``."""
