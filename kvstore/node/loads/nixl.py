"""This node's NIXL agents: one that serves the arena to readers, one that reads from other nodes into it.

Two, because a fence ends the agent that reads, and what this node serves to others must not end with it.
"""

from __future__ import annotations

import logging

from kvstore.config.node import NodeConfig
from kvstore.core.errors import InvalidArgument, Unsupported
from kvstore.observe.counters import Counters
from kvstore.observe.metric_definitions import transport as transport_metrics
from kvstore.rpc.address import stays_on_host
from kvstore.transport.nixl.agent import LOOPBACK, NEEDS_TRUST, NixlAgent, NixlOptions, Region, has_rdma

log = logging.getLogger(__name__)

BOUNCE_BYTES = 16 << 20
"""Blocks lie in the arena, which is registered: nothing of a node's takes a bounce but odd cases."""


class NixlPorts:
    """The agents, where this node has them.

    Args:
        config: of the node.
        arena: its memory, to be registered.
        counters: where events are counted.

    Raises:
        InvalidArgument: NIXL is required, and the configuration rules it out; or it would open ports beyond this host unasked.
        Unsupported: NIXL is required, and does not work here.
    """

    def __init__(self, config: NodeConfig, arena: Region, counters: Counters) -> None:
        self.serving: NixlAgent | None = None
        self.reading: NixlAgent | None = None
        self.says = "off"
        if config.nixl == "off":
            return
        if not config.nixl_trusted_network:
            raise InvalidArgument(NEEDS_TRUST, option="node.nixl", needs="node.nixl_trusted_network=true")
        options = NixlOptions(
            mode=config.nixl_way,
            service_level=config.nixl_service_level,
            devices=_devices(config),
            transports=config.nixl_transports,
            bounce_bytes=BOUNCE_BYTES,
        )
        problem: InvalidArgument | Unsupported | None = None
        if config.tls.resolve() is not None:
            problem = InvalidArgument("bytes that NIXL moves go past TLS: node.nixl takes a node without tls")
        elif config.compute_cap:
            problem = InvalidArgument("bytes that NIXL moves go past compute_cap: node.nixl takes a node without a cap")
        else:
            names = [f"{config.node_id}-{name}" for name in ("serves", "reads")]
            made = [NixlAgent(options, name=name, regions=[arena], counters=counters) for name in names]
            try:
                for port in made:
                    port.open()
                self.serving, self.reading = made
            except Unsupported as error:
                for port in made:
                    port.close()
                problem = error
        if problem is None:
            found = "RDMA, TCP and CMA" if has_rdma() else "TCP and CMA (no RDMA device)"
            if options.devices == LOOPBACK:
                found = "TCP and CMA within this host"
            self.says = f"in use, UCX over {options.transports or found}"
            log.info("NIXL is %s", self.says)
            return
        if config.nixl == "required":
            raise problem
        counters.add(transport_metrics.NIXL_UNAVAILABLE)
        self.says = f"not in use: {problem}"
        log.warning("blocks move over TCP, NIXL is %s", self.says)

    @property
    def exposes(self) -> bool:
        """Whether others may write to the arena past this node: what is copied out of it is verified then."""
        return self.serving is not None

    def close(self) -> None:
        """Ends the agents."""
        for port in (self.serving, self.reading):
            if port is not None:
                port.close()


def _devices(config: NodeConfig) -> str:
    """Network devices for NIXL: those that are named; loopback for a node that listens nowhere else."""
    listens = (config.data_listen, config.storage_listen or config.data_listen)
    if not all(map(stays_on_host, listens)):
        return config.nixl_devices
    if config.nixl_devices in ("", LOOPBACK):
        return LOOPBACK
    if not config.allow_insecure_remote:
        raise InvalidArgument(
            "refusing to open ports of NIXL beyond this host, where this node listens on loopback alone: leave"
            " node.nixl_devices unset, or set allow_insecure_remote",
            devices=config.nixl_devices,
        )
    return config.nixl_devices
