"""Steps of ``KVClient.connect``: check the arguments, find the local node, tolerate failures if the options allow it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from kvclient.memory.device_buffer import ArenaPinner
from kvclient.memory.engine_pool import DiskReaderFactory, EnginePool
from kvclient.nodes.local_session import local_address
from kvclient.nodes.metadata_client import MetadataClient, by_roles
from kvclient.options import ClientOptions
from kvproto.v1.common_pb2 import NodeInfo
from kvstore.core.errors import InvalidArgument, KVStoreError, Unavailable
from kvstore.core.spec import CacheSpec
from kvstore.observe.counters import Counters
from kvstore.observe.limited_log import LimitedLog
from kvstore.observe.metric_definitions import client as client_metrics
from kvstore.process.tls import TlsConfig
from kvstore.rpc.client import connect
from kvstore.rpc.diagnosis import diagnose
from kvstore.rpc.health_probe import HealthProbe
from kvstore.transport.liveness import LivenessMonitor

Result = TypeVar("Result")
_log = logging.getLogger(__name__)

_ANSWER_S = 1.0
"""Time for a node on this host to accept a connection, if another node or no node can take its place."""


@dataclass(frozen=True, slots=True)
class NodeChoice:
    """Which of the nodes on this host a client uses, and why.

    Attributes:
        node_id: the chosen node; empty if the caller named an address.
        address: its address.
        reason: why it was chosen.
        others: ids of the other nodes on this host.
    """

    node_id: str
    address: str
    reason: str
    others: tuple[str, ...] = ()


class NodeFinder:
    """Finds the address of the local node: the named one, or one from the metadata server, or the last one found."""

    def __init__(self, node: str, metadata: MetadataClient | None, options: ClientOptions) -> None:
        self._named = None if node == "auto" else node
        self._metadata = metadata
        self._options = options
        self.choice: NodeChoice | None = None
        """The last choice; None: no node runs on this host, or the search has not begun."""

    @property
    def advice(self) -> str:
        """What a caller of ``connect`` can do if the local node is not reached."""
        other = 'node="auto" to connect' if self._named is not None else "node=None to connect (blocks then travel over TCP)"
        return f"check that it runs (`kvstore status` lists nodes), or pass {other}"

    def find(self, within_s: float, *, patient: bool) -> str | None:
        """Return the address, or None if no node runs on this host.

        Of several nodes, those that do not accept a connection are passed over.

        Args:
            within_s: time for finding a node and opening a session with it. At most half of it is spent here, besides
                ``lookup_deadline_s``.
            patient: whether the caller waits for the first node if no node accepts a connection.

        Raises:
            Unavailable: ``options.local_node`` names a node that is not on this host, or no node accepts a connection and the
                caller is not patient.
            KVStoreError: the metadata server does not answer, and no node was found before.
        """
        if self._named is not None or self._metadata is None:
            if self._named is not None:
                self._choose(NodeChoice("", self._named, "the caller named its address"))
            return self._named
        try:
            nodes = self._metadata.nodes(self._options.lookup_deadline_s)
        except KVStoreError:
            if self.choice is None:
                raise
            return self.choice.address
        here = {node.node_id: node for node in by_roles(nodes, self._options.local_roles) if local_address([node])}
        wanted = self._options.local_node
        if wanted is not None and wanted not in here:
            known = ", ".join(here) or "none"
            problem = "the node of the option local_node is not on this host; name one that is, or leave the option out"
            raise Unavailable(problem, local_node=wanted, here=known)
        if here:
            silent = self._silent(list(here.values()) if wanted is None else [here[wanted]], within_s, patient=patient)
            self._choose(self._best(here, wanted, silent))
        return None if self.choice is None else self.choice.address

    def _silent(self, candidates: Sequence[NodeInfo], within_s: float, *, patient: bool) -> list[str]:
        """Return the ids of the candidates before the first one that accepts a connection.

        Empty if none does and the caller is patient.
        """
        if patient and len(candidates) == 1:
            return []
        each_s = min(_ANSWER_S, within_s / (2 * len(candidates)))
        reasons: dict[str, str] = {}
        for node in candidates:
            reason = diagnose(local_address([node]) or "", None, "TlsConfig", each_s)
            if reason is None:
                return list(reasons)
            reasons[node.node_id] = reason
        if patient:
            return []
        why = "; ".join(f"{node_id}: {reason}" for node_id, reason in reasons.items())
        raise Unavailable(f"cannot reach a node on this host ({why}); {self.advice}")

    def _best(self, here: Mapping[str, NodeInfo], wanted: str | None, silent: Sequence[str]) -> NodeChoice:
        node_id = wanted or next(node_id for node_id in here if node_id not in silent)
        others = tuple(other for other in here if other != node_id)
        if wanted is not None:
            reason = "the option local_node names it"
        elif silent:
            reason = f"preferred nodes do not answer: {', '.join(silent)}"
        elif not others:
            reason = "it is the only node on this host"
        else:
            role = next((role for role in self._options.local_roles if role in here[node_id].roles), "none")
            tied = any(role in here[other].roles for other in others)
            reason = f"its role {role} comes first in local_roles" + (", and its id is the first of that role" if tied else "")
        return NodeChoice(node_id, local_address([here[node_id]]) or "", reason, others)

    def _choose(self, choice: NodeChoice) -> None:
        if choice != self.choice:
            others = f", others={', '.join(choice.others)}" if choice.others else ""
            name = choice.node_id or choice.address
            _log.info("local node chosen: %s (reason=%s%s)", name, choice.reason, others)
        self.choice = choice


def watch_servers(tls: TlsConfig | None, counters: Counters) -> LivenessMonitor:
    """Return the monitor that finds out whether the servers of one client answer."""
    probe = HealthProbe(partial(connect, tls=tls))
    return LivenessMonitor(probe, counters, on_close=probe.close)


def attempt(options: ClientOptions, incidents: LimitedLog, work: Callable[[], Result]) -> Result | None:
    """Do a step of ``connect``. If it fails and ``require_store`` is False, return None.

    Raises:
        KVStoreError: the step failed and ``require_store`` is True, or an argument is invalid.
    """
    try:
        return work()
    except KVStoreError as error:
        if options.require_store or isinstance(error, InvalidArgument):
            raise
        incidents.report(client_metrics.CONNECT_FAILED, "connected without a part of the store", error)
        return None


def check_types(
    metadata: object, spec: object, node: object, tls: object, options: object, hbm: object, gds: object, device: object
) -> None:
    """Check the types of the arguments of ``connect`` before anything depends on them.

    Raises:
        InvalidArgument: an argument has another type.
    """
    expected: tuple[tuple[str, object, Any], ...] = (
        ("metadata", metadata, str | None),
        ("spec", spec, CacheSpec),
        ("node", node, str | None),
        ("tls", tls, TlsConfig | None),
        ("options", options, ClientOptions),
        ("hbm", hbm, EnginePool | None),
        ("gds", gds, DiskReaderFactory | None),
        ("device", device, ArenaPinner | None),
    )
    for name, value, kind in expected:
        if not isinstance(value, kind):
            expected_name = getattr(kind, "__name__", str(kind))
            raise InvalidArgument(
                "an argument of connect has another type", argument=name, got=type(value).__name__, expected=expected_name
            )
