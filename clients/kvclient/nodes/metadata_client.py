"""Calls to the metadata server: lookups, nodes, load plans.

A circuit breaker guards the server: while it is unreachable, lookups are misses at no cost, until a trial call succeeds.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import TypeVar

from kvclient.load.paths import Paths, Plan, PlannedPart, plan_from_proto, replan_from_proto
from kvclient.load.plan_progress import PlanProgressReporter
from kvclient.options import ClientOptions
from kvclient.results import HeadLookup, Lookup, NodeRef, Run
from kvproto.v1 import common_pb2, metadata_pb2, metadata_pb2_grpc
from kvstore.core.chain import ChainSlice
from kvstore.core.clock import Clock
from kvstore.core.errors import DeadlineExceeded, Internal, KVStoreError, NotFound, Unavailable
from kvstore.core.spec import CacheSpec
from kvstore.core.types import NodeId, Tier, VolumeId
from kvstore.observe.limited_log import LimitedLog
from kvstore.observe.metric_definitions import client as client_metrics
from kvstore.process.tls import TlsConfig
from kvstore.recompute.link_price import LinkPrice
from kvstore.rpc.client import NO_RETRY, RetryPolicy, UnaryMethod, call
from kvstore.rpc.codec import spec_from_proto, spec_to_proto, tier_from_proto
from kvstore.rpc.diagnosis import TIMEOUT_S, Diagnoser, Target
from kvstore.rpc.failover.addresses import MetadataAddresses
from kvstore.rpc.failover.connect import connect_metadata, states_of
from kvstore.rpc.failover.servers import MetadataServerState
from kvstore.transport.liveness import CircuitBreaker, LivenessMonitor

_limited = LimitedLog(logging.getLogger("kvclient"))

_Request = TypeVar("_Request")
_Response = TypeVar("_Response")

_ONCE_MORE = RetryPolicy(attempts=2, first_backoff_s=0.01)
_PLAN_TIMEOUT_S = 0.5
"""A plan that takes longer costs more than it gains."""
_MAX_REASON = 256
_NODES_VALID_S = 5.0
_STORAGE = "storage"
_MIN_CALL_S = 0.001
"""With less time than this not even a healthy server answers."""
_REVIVAL_S = 5.0
"""Maximum wait of one attempt to reach a lost server again; the next failure starts another."""
_MIN_TELLING_TIMEOUT_S = 0.05
"""A timeout shorter than this says nothing about the server."""


class MetadataClient:
    """The metadata servers of one store. Thread-safe.

    Args:
        addresses: their gRPC addresses.
        spec: the namespace of lookups.
        tls: for the connection.
        clock: source of time.
        options: bounds.
        incidents: counts failures.
        liveness: of the servers of this client.
    """

    def __init__(
        self,
        addresses: MetadataAddresses,
        spec: CacheSpec,
        tls: TlsConfig | None,
        clock: Clock,
        options: ClientOptions,
        incidents: LimitedLog,
        liveness: LivenessMonitor,
    ) -> None:
        self.address = str(addresses)
        self._incidents = incidents
        self._server = None if addresses.only is None else liveness.server(addresses.only)
        self._spec = spec
        self._clock = clock
        token = options.shown_token()
        self._channel = connect_metadata(addresses, tls=tls, token=token, counters=incidents.counters)
        self._diagnoser = Diagnoser(
            Target("the metadata server", self.address, tls, token, "TlsConfig", "ClientOptions.token or token_file")
        )
        self._stub = metadata_pb2_grpc.MetadataStub(self._channel)
        self._breaker = CircuitBreaker(clock, failures=options.breaker_failures, open_s=options.breaker_pause_s)
        self._registered = False
        self._closed = False
        self._reviving_lock = threading.Lock()
        self._reviving: threading.Thread | None = None
        self._nodes: tuple[dict[str, NodeRef], float] = ({}, 0.0)
        self._reporter = PlanProgressReporter(
            lambda report: self._call(self._stub.ReportLoads, report, _PLAN_TIMEOUT_S), incidents
        )

    def introduce(self, timeout_s: float) -> None:
        """Make the namespace known, when a client connects: as ``register``, with an error that says why it failed.

        Raises:
            KVStoreError: the server refused it or does not answer. Finding out why takes up to ``timeout_s`` more.
        """
        try:
            self.register(timeout_s)
        except KVStoreError as error:  # from None: gRPC's own traceback says less at greater length
            raise _advised(self._diagnoser.explain(error, min(timeout_s, TIMEOUT_S))) from None

    def namespaces(self, timeout_s: float) -> list[CacheSpec]:
        """Return all namespaces that are registered.

        Raises:
            KVStoreError: the server does not answer.
        """
        answer = self._call(self._stub.ListNamespaces, metadata_pb2.ListNamespacesRequest(), timeout_s)
        return [spec_from_proto(one.spec) for one in answer.namespaces]

    def register(self, timeout_s: float) -> None:
        """Register the namespace. Idempotent.

        Raises:
            KVStoreError: the server refused it or does not answer.
        """
        request = metadata_pb2.RegisterNamespaceRequest(operation_id=secrets.token_bytes(16), spec=spec_to_proto(self._spec))
        answer = self._call(self._stub.RegisterNamespace, request, timeout_s)
        if answer.namespace_id != self._spec.namespace:
            raise Internal("the metadata server derives another namespace from this spec: use one version of kvstore")
        self._registered = True

    def lookup(self, chain: ChainSlice, timeout_s: float, ends: Sequence[int] = ()) -> Lookup:
        """Return the longest hit of a chain, from its head.

        Args:
            chain: the blocks.
            timeout_s: bound of the call.
            ends: guesses where replicas of the chain end (``RunEndMemory``).

        Raises:
            KVStoreError: the server does not answer, or answers something impossible.
        """
        started_s = self._clock.now_s()
        request = metadata_pb2.LookupRequest(namespace_id=self._spec.namespace, keys=chain.packed, ends=ends)
        answer = self._look_up(self._stub.Lookup, request, timeout_s)
        if answer.hit_blocks > len(chain):
            raise Internal(
                "the metadata server answered for more keys than requested", hit_blocks=answer.hit_blocks, keys=len(chain)
            )
        runs = _runs(answer, len(chain))
        return Lookup(chain.keys, answer.hit_blocks, runs, seconds=self._clock.now_s() - started_s)

    def lookup_heads(self, heads: ChainSlice, timeout_s: float) -> HeadLookup:
        """Return which of several heads of chains the store can serve.

        Raises:
            KVStoreError: the server does not answer, or answers something impossible.
        """
        started_s = self._clock.now_s()
        request = metadata_pb2.LookupHeadsRequest(namespace_id=self._spec.namespace, keys=heads.packed)
        answer = self._look_up(self._stub.LookupHeads, request, timeout_s)
        return HeadLookup(heads.keys, _runs(answer, len(heads)), seconds=self._clock.now_s() - started_s)

    def _look_up(self, method: UnaryMethod[_Request, _Response], request: _Request, timeout_s: float) -> _Response:
        """Call the server; a namespace that it does not know is registered first. All calls together have ``timeout_s``."""
        until_s = self._clock.now_s() + timeout_s
        if not self._registered:  # connect() found no server
            self.register(timeout_s)
        try:
            return self._call(method, request, until_s - self._clock.now_s())
        except NotFound:  # the server lost its index and with it the namespace
            self._registered = False
            self.register(until_s - self._clock.now_s())
            return self._call(method, request, until_s - self._clock.now_s())

    def nodes(self, timeout_s: float) -> list[common_pb2.NodeInfo]:
        """Return the living nodes, by node id.

        Raises:
            KVStoreError: the server does not answer.
        """
        answer = self._call(self._stub.ListNodes, metadata_pb2.ListNodesRequest(), timeout_s)
        return [status.node for status in answer.nodes if status.alive]

    def writable_nodes(self, timeout_s: float) -> list[common_pb2.NodeInfo]:
        """Return the living nodes that accept stores, by node id. Draining nodes do not.

        Raises:
            KVStoreError: the server does not answer.
        """
        answer = self._call(self._stub.ListNodes, metadata_pb2.ListNodesRequest(), timeout_s)
        return [status.node for status in answer.nodes if status.alive and status.state <= common_pb2.NODE_STATE_ACTIVE]

    def node(self, node_id: str, timeout_s: float) -> NodeRef:
        """Return the addresses of a living node. They are requested again every few seconds.

        Raises:
            NotFound: no living node has this id.
            KVStoreError: the server does not answer.
        """
        now_s = self._clock.now_s()
        known, until_s = self._nodes
        if node_id not in known or now_s > until_s:
            try:
                known = {one.node_id: _node(one) for one in self.nodes(timeout_s)}
            except (Unavailable, DeadlineExceeded) as error:
                if node_id not in known:
                    raise
                why = f"used the last known address of node {node_id}: the metadata server did not answer"
                self._incidents.report(client_metrics.STALE_ADDRESSES, why, error)
                return known[node_id]
            self._nodes = (known, now_s + _NODES_VALID_S)
        if node_id not in known:
            raise NotFound("no living node has this id", node_id=node_id)
        return known[node_id]

    def servers(self) -> list[MetadataServerState]:
        """Return the metadata servers with their state."""
        return states_of(self._channel, self.address)

    # ---- plans ----
    def plan_load(
        self,
        prefill_node: str,
        decode_node: str | None,
        policy: str | None,
        blocks: int,
        block_bytes: int,
        block_tokens: int,
        budget_s: float,
        *,
        relays: bool,
    ) -> Plan:
        """Return a plan that says over which storage links ``blocks`` blocks are read.

        Raises:
            KVStoreError: the server does not answer, or knows no node that could read.
        """
        request = metadata_pb2.PlanLoadRequest(
            operation_id=secrets.token_bytes(16),
            policy=policy or "",
            prefill_node=prefill_node,
            decode_node=decode_node or "",
            relays=relays,
            blocks=blocks,
            block_bytes=block_bytes,
            block_tokens=block_tokens,
            budget_ms=int(budget_s * 1000),
        )
        plan = plan_from_proto(self._call(self._stub.PlanLoad, request, min(budget_s, _PLAN_TIMEOUT_S)), blocks)
        return replace(plan, request=request)

    def price_load(
        self, prefill_node: str, paths: Paths, blocks: int, block_bytes: int, block_tokens: int, timeout_s: float
    ) -> LinkPrice:
        """Return how long a load would take if it were planned now, by the queues of all storage links. Nothing is planned.

        Raises:
            KVStoreError: the server does not answer, knows no node that could read, or is older than this call.
        """
        request = metadata_pb2.PlanLoadRequest(
            policy=paths.policy or "",
            prefill_node=prefill_node,
            decode_node=paths.decode_node or "",
            relays=paths.relays,
            blocks=blocks,
            block_bytes=block_bytes,
            block_tokens=block_tokens,
        )
        answer = self._call(self._stub.PriceLoad, request, timeout_s, NO_RETRY)
        return LinkPrice(answer.first_seconds, answer.seconds, blocks)

    def replan_load(self, plan: Plan, part: PlannedPart, arrived: Sequence[tuple[int, int]], why: str, budget_s: float) -> Plan:
        """Return a plan for the blocks that a failed part has not brought.

        Args:
            plan: the plan of the part.
            part: the part.
            arrived: (start, count) of the blocks that it brought, numbered as in the plan.
            why: reason, for people.
            budget_s: time left.

        Raises:
            KVStoreError: the server does not answer, has forgotten the plan, or knows no other node.
        """
        request = metadata_pb2.ReplanLoadRequest(plan_id=plan.plan_id, index=part.index, why=why[:_MAX_REASON])
        for start, count in arrived:
            request.arrived.add(start=start, count=count)
        # no retry: the answer that no node is left ends the plan, and a second call would only return that
        answer = self._call(self._stub.ReplanLoad, request, min(budget_s, _PLAN_TIMEOUT_S), NO_RETRY)
        return replace(replan_from_proto(answer, plan, part, arrived), request=plan.request)

    def report_loads(
        self,
        moved: Mapping[int, Sequence[tuple[int, int]]],
        *,
        finished: bool,
        restored: Mapping[int, metadata_pb2.PlanInProgress] = MappingProxyType({}),
    ) -> None:
        """Report progress of planned loads soon, in the background: plan -> (part, blocks done).

        Args:
            moved: the progress.
            finished: these loads have ended.
            restored: plans of ``moved`` that the planner has forgotten and shall count again.
        """
        self._reporter.tell(moved, finished=finished, restored=restored)

    def take_forgotten(self, plan_ids: Iterable[int]) -> set[int]:
        """Those of these plans that the planner has forgotten since the last call."""
        return self._reporter.take_forgotten(plan_ids)

    def close(self) -> None:
        """Close the channel. Calls under way fail."""
        self._reporter.close()
        with self._reviving_lock:
            self._closed = True
        self._channel.close()

    def _call(
        self, method: UnaryMethod[_Request, _Response], request: _Request, timeout_s: float, retry: RetryPolicy = _ONCE_MORE
    ) -> _Response:
        if timeout_s < _MIN_CALL_S:  # says nothing about the server, so the breaker does not count it
            raise DeadlineExceeded("no time left for a call to the metadata server", seconds=timeout_s)
        if self._server is not None:
            self._server.check()
        if not self._breaker.allow():
            raise Unavailable("the metadata server does not answer; calls fail for a moment", address=self.address)
        try:
            with nullcontext() if self._server is None else self._server.waiting(_nothing):
                answer = call(method, request, timeout_s, retry)
        except DeadlineExceeded:
            if timeout_s >= _MIN_TELLING_TIMEOUT_S:
                self._breaker.failed()
            raise
        except Unavailable as error:
            self._breaker.failed()
            self._revive(error)
            raise self._diagnoser.known(error) from error
        except KVStoreError:
            self._breaker.succeeded()  # any other error is an answer
            raise
        self._breaker.succeeded()
        return answer

    def _revive(self, error: Unavailable) -> None:
        """Wait in the background until the server is reached again, and then let calls through at once.

        gRPC connects only while a call waits, and calls to a lost server fail without waiting. With trial calls alone, a server
        that is back would be found many seconds later.
        """
        with self._reviving_lock:
            if not self._closed and (self._reviving is None or not self._reviving.is_alive()):
                self._reviving = threading.Thread(target=self._await_server, args=(error,), name="kvclient-revive", daemon=True)
                try:
                    self._reviving.start()
                except RuntimeError as refused:  # no more threads: the next failed call tries again
                    _limited.warning("metadata server not awaited (reason=%s)", refused)

    def _await_server(self, lost: Unavailable) -> None:
        if self._diagnoser.known(lost) is lost:
            explained = self._diagnoser.explain(lost)
            if self._closed:
                return
            _limited.warning("metadata server lost: %s", explained)
        patient: UnaryMethod[metadata_pb2.ListNodesRequest, metadata_pb2.ListNodesResponse]
        patient = partial(self._stub.ListNodes, wait_for_ready=True)
        try:
            call(patient, metadata_pb2.ListNodesRequest(), _REVIVAL_S)
        except KVStoreError:  # still gone, or the client was closed; the caller has counted and logged the failure
            return
        self._diagnoser.answered()
        self._breaker.succeeded()


def _nothing() -> None:
    """Cancel nothing: calls to the metadata server have short deadlines."""


def _runs(answer: metadata_pb2.LookupResponse | metadata_pb2.LookupHeadsResponse, count: int) -> tuple[Run, ...]:
    """Return the runs of an answer, checked: they decide where bytes are read and written."""
    nodes = [_node(one) for one in answer.nodes]
    runs = []
    for run in answer.runs:
        if run.node >= len(nodes) or run.start + run.count > count:
            raise Internal("the metadata server answered runs outside the request", run=run)
        tier, volume_id = _volume(answer.nodes[run.node], run.volume)
        runs.append(Run(run.start, run.count, nodes[run.node], tier, volume_id))
    return tuple(runs)


def _node(info: common_pb2.NodeInfo) -> NodeRef:
    """Return the reference of a node."""
    storage_only = bool(info.roles) and set(info.roles) == {_STORAGE}
    return NodeRef(NodeId(info.node_id), info.control_address, info.data_address, info.storage_address, storage_only)


def _volume(node: common_pb2.NodeInfo, position: int) -> tuple[Tier, VolumeId]:
    """Return a volume by its position among the node's own volumes, followed by the volumes of others that it mounts."""
    own = len(node.volumes)
    if position < own:
        volume = node.volumes[position]
        return tier_from_proto(volume.tier), VolumeId(volume.volume_id)
    if position - own >= len(node.mounts):
        raise Internal("the metadata server named a volume that the node does not have", node_id=node.node_id, position=position)
    return Tier.NVME, VolumeId(node.mounts[position - own])


def _advised(error: KVStoreError) -> KVStoreError:
    """The error of ``introduce`` with what to do, if the server was not reached."""
    if not isinstance(error, Unavailable | DeadlineExceeded):
        return error
    if " TLS and " in error.message:  # only one side uses it
        advice = "if the server uses TLS, pass tls=TlsConfig(ca=...) to connect; if not, pass tls=None"
    elif "TLS" in error.message or "certificate" in error.message:
        return error  # it names the field of TlsConfig
    else:
        advice = "check its address (port 7400 by default) and that it runs; `kvstore up` starts a store on this machine"
    return type(error)(f"{error.message}; {advice}", **error.fields)


def by_roles(nodes: Sequence[common_pb2.NodeInfo], roles: Sequence[str]) -> list[common_pb2.NodeInfo]:
    """Return nodes in the order of their best role, then of their ids."""

    def rank(node: common_pb2.NodeInfo) -> int:
        return min((roles.index(role) for role in node.roles if role in roles), default=len(roles))

    return sorted(nodes, key=rank)
