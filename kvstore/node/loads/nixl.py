"""NIXL agents of a node: one serves the arena to other nodes, one reads from other nodes into it.

There are two because a fence ends the reading agent, and reads that this node serves must not end with it.
"""

from __future__ import annotations

import logging

from kvstore.config.node import NodeConfig
from kvstore.core.errors import InvalidArgument, Unsupported
from kvstore.observe.counters import Counters
from kvstore.observe.metric_definitions import transport as transport_metrics
from kvstore.rpc.address import stays_on_host
from kvstore.transport.nixl.agent import LOOPBACK, NEEDS_TRUST, SERVING, NixlAgent, NixlOptions, Region, has_rdma

log = logging.getLogger(__name__)

BOUNCE_BYTES = 16 << 20
"""Size of bounce buffers. The arena is registered, so only rare reads need one."""


class NixlAgents:
    """The agents of a node, if NIXL is configured and works. ``open`` once, before the other members.

    Args:
        config: of the node.
        arena: its memory, to be registered.
        counters: metrics.
    """

    def __init__(self, config: NodeConfig, arena: Region, counters: Counters) -> None:
        self.serving: NixlAgent | None = None
        self.reading: NixlAgent | None = None
        self.description = "off"
        self._config = config
        self._arena = arena
        self._counters = counters

    def open(self) -> None:
        """Create the agents.

        Raises:
            InvalidArgument: NIXL is required and the configuration excludes it, or it would open ports beyond this host.
            Unsupported: NIXL is required and does not work on this host.
        """
        config, arena, counters = self._config, self._arena, self._counters
        if config.nixl == "off":
            return
        if not config.nixl_trusted_network:
            raise InvalidArgument(NEEDS_TRUST, option="node.nixl", needs="node.nixl_trusted_network=true")
        options = NixlOptions(
            mode=config.nixl_mode,
            service_level=config.nixl_service_level,
            devices=_devices(config),
            transports=config.nixl_transports,
            bounce_bytes=BOUNCE_BYTES,
        )
        problem: InvalidArgument | Unsupported | None = None
        if config.tls.resolve() is not None:
            problem = InvalidArgument("NIXL transfers bypass TLS: node.nixl requires a node without tls")
        elif config.compute_cap:
            problem = InvalidArgument("NIXL transfers bypass compute_cap: node.nixl requires a node without a cap")
        else:
            names = [f"{config.node_id}-{name}" for name in (SERVING, "reads")]
            made = [NixlAgent(options, name=name, regions=[arena], counters=counters) for name in names]
            try:
                for agent in made:
                    agent.open()
                self.serving, self.reading = made
            except Unsupported as error:
                for agent in made:
                    agent.close()
                problem = error
        if problem is None:
            found = "RDMA, TCP and CMA" if has_rdma() else "TCP and CMA (no RDMA device)"
            if options.devices == LOOPBACK:
                found = "TCP and CMA within this host"
            self.description = f"in use, UCX over {options.transports or found}"
            log.info("NIXL in use: %s", self.description)
            return
        if config.nixl == "required":
            raise problem
        counters.add(transport_metrics.NIXL_UNAVAILABLE)
        self.description = f"not in use: {problem}"
        log.warning("NIXL not used, blocks are transferred over TCP: %s", problem)

    @property
    def exposes(self) -> bool:
        """Whether other nodes can write to the arena directly. Then clients verify the blocks that they copy from it."""
        return self.serving is not None

    def close(self) -> None:
        """Close the agents."""
        for agent in (self.serving, self.reading):
            if agent is not None:
                agent.close()


def _devices(config: NodeConfig) -> str:
    """Return the network devices for NIXL: the configured ones, or loopback for a node that listens on loopback only."""
    listens = (config.data_listen, config.storage_listen or config.data_listen)
    if not all(map(stays_on_host, listens)):
        return config.nixl_devices
    if config.nixl_devices in ("", LOOPBACK):
        return LOOPBACK
    if not config.allow_insecure_remote:
        raise InvalidArgument(
            "NIXL would open ports beyond this host, and this node listens on loopback only: leave node.nixl_devices unset,"
            " or set allow_insecure_remote",
            devices=config.nixl_devices,
        )
    return config.nixl_devices
