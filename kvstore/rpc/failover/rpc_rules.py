"""For each RPC of the metadata server: may a call be repeated on another server, and which server is called.

* ``REPEAT``: to execute the call twice has the effect of executing it once. It is repeated on another server after a lost
  connection, a timeout of half its time, or an answer that the server is unavailable.
* ``ONCE``: to execute it twice may have another effect, such as a second plan, or undo an order given in between. It is repeated
  only if it was never sent, because the connection was refused, or if the server answers that it has not executed it.
* ``STREAM``: it is not repeated. The caller opens another stream, which goes to the server in use.

Lookups and other reads of the index are spread over the servers. If the servers share their whole state (``metadata.engine``),
all other calls are spread, too, and those that one server answers for all (plans, requests) go straight to it. Else what a
server keeps in its own memory (plans, requests, block events, figures), and all changes, go to one server for all callers.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

from kvstore.rpc.failover.selection import CallPlacement


class Repetition(Enum):
    """Whether a call may be executed twice."""

    REPEAT = auto()
    ONCE = auto()
    STREAM = auto()


@dataclass(frozen=True, slots=True)
class RpcRule:
    """Rule of one RPC.

    Attributes:
        repetition: whether a call may be executed twice.
        placement: the servers that are called.
        waits: the server answers late on purpose, so that a timeout says nothing about it.
        watched: the server is probed while the caller waits for the next message of a stream. Streams beside which heartbeats go
            to the same server need no probes.
    """

    repetition: Repetition
    placement: CallPlacement
    waits: bool = False
    watched: bool = False


FORWARDED_TO: Final = "kv-forwarded-to"
"""Key of the trailing metadata of a forwarded call: the id of the server that answered it."""

_READ: Final = RpcRule(Repetition.REPEAT, CallPlacement.SPREAD)
_READ_STATE: Final = RpcRule(Repetition.REPEAT, CallPlacement.SHARED)
_IDEMPOTENT_CHANGE: Final = RpcRule(Repetition.REPEAT, CallPlacement.SHARED)
_CHANGE: Final = RpcRule(Repetition.ONCE, CallPlacement.SHARED)
_STREAM: Final = RpcRule(Repetition.STREAM, CallPlacement.SHARED)
_SUBSCRIPTION: Final = RpcRule(Repetition.STREAM, CallPlacement.SHARED, watched=True)
_PLAN: Final = RpcRule(Repetition.ONCE, CallPlacement.PLANNER)
_ASSIGN: Final = RpcRule(Repetition.ONCE, CallPlacement.PLANNER, waits=True)
_CANCEL: Final = RpcRule(Repetition.REPEAT, CallPlacement.PLANNER)

RULES: Final = {
    # registrations carry the boot of the node, and heartbeats its present state: the last one wins
    "/kvstore.v1.Metadata/RegisterNode": _IDEMPOTENT_CHANGE,
    "/kvstore.v1.Metadata/Heartbeat": _IDEMPOTENT_CHANGE,
    "/kvstore.v1.Metadata/UnregisterNode": _IDEMPOTENT_CHANGE,
    # batches have sequence numbers; the node sends unacknowledged ones again in its next stream
    "/kvstore.v1.Metadata/Publish": _STREAM,
    "/kvstore.v1.Metadata/WatchBlocks": _SUBSCRIPTION,
    "/kvstore.v1.Metadata/CompareDigests": _READ,
    # a late repetition would replace a range by its older content
    "/kvstore.v1.Metadata/RepairRanges": _CHANGE,
    # equal specs are equal namespaces
    "/kvstore.v1.Metadata/RegisterNamespace": _READ,
    "/kvstore.v1.Metadata/ListNamespaces": _READ,
    "/kvstore.v1.Metadata/ListNodes": _READ,
    "/kvstore.v1.Metadata/LocateBlocks": _READ,
    "/kvstore.v1.Metadata/Lookup": _READ,
    "/kvstore.v1.Metadata/LookupHeads": _READ,
    # orders: a late repetition would undo what another operator ordered in between
    "/kvstore.v1.Metadata/DrainNode": _CHANGE,
    "/kvstore.v1.Metadata/UndrainNode": _CHANGE,
    "/kvstore.v1.Metadata/RemoveNode": _CHANGE,
    # operation ids of plans and requests are known to one server only: another one would plan or assign again
    "/kvstore.v1.Metadata/PlanLoad": _PLAN,
    "/kvstore.v1.Metadata/ReplanLoad": _PLAN,
    # a late price is useless, and only the planner's server knows the queues
    "/kvstore.v1.Metadata/PriceLoad": _PLAN,
    "/kvstore.v1.Metadata/AssignRequest": _ASSIGN,
    # the next report includes this one; another server would not know the plan, or take the engines for new ones
    "/kvstore.v1.Metadata/ReportLoads": _PLAN,
    "/kvstore.v1.Metadata/ReportEngines": _PLAN,
    "/kvstore.v1.Metadata/CancelRequest": _CANCEL,
    "/kvstore.v1.Metadata/GetStats": _READ_STATE,
    "/kvstore.v1.MetadataAdmin/DescribeServer": _READ_STATE,
    "/kvstore.v1.MetadataAdmin/DescribeShards": _READ_STATE,
    "/kvstore.v1.MetadataAdmin/DescribeNamespaces": _READ_STATE,
    "/kvstore.v1.MetadataAdmin/DescribeBlocks": _READ,
    "/kvstore.v1.MetadataAdmin/DescribePlanning": _READ_STATE,
    "/kvstore.v1.MetadataAdmin/DescribeTenants": _READ_STATE,
    "/kvstore.v1.MetadataAdmin/ListNamespaceRules": _READ_STATE,
    "/kvstore.v1.MetadataAdmin/DescribeHistory": _READ_STATE,
    "/kvstore.v1.MetadataAdmin/ListClusterEvents": _READ_STATE,
    "/kvstore.v1.MetadataAdmin/SetPathPolicy": _CHANGE,
    "/kvstore.v1.MetadataAdmin/SetTenantQuota": _CHANGE,
    "/kvstore.v1.MetadataAdmin/SetNamespaceRule": _CHANGE,
    "/kvstore.v1.MetadataAdmin/RebuildIndex": _CHANGE,
    "/grpc.health.v1.Health/Check": _READ,
}
"""The rule of each RPC, by its full name."""


def rule_of(method: str) -> RpcRule:
    """Return the rule of an RPC. An unknown one is executed at most once."""
    return RULES.get(method, _CHANGE)
