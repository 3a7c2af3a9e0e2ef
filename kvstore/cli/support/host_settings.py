"""Fill in settings that are not configured from facts of this host. Daemons run with the result; ``config show`` prints it."""

from __future__ import annotations

import os
import socket
from dataclasses import fields
from typing import Any

from kvstore.cli.support.folders import data_dir, run_dir
from kvstore.config.model import Config
from kvstore.config.node import NodeSection
from kvstore.config.sources import Origin, Provenance
from kvstore.process.host_defaults import HostFacts, NodeDefaults, derive
from kvstore.process.memory.host_memory import huge_pages_free
from kvstore.transport.link_speed import LinkSpeed, link_speed


def settle(config: Config, provenance: Provenance) -> tuple[Config, Provenance]:
    """Fill in every setting that is unset and follows from the host or from other settings.

    Args:
        config: configuration without derived values.
        provenance: the source of each value.

    Returns:
        The configuration in force, and the source of each value. Filled-in values are ``derived``, with the reason.
    """
    node_id = config.node.node_id or socket.gethostname()
    defaults = node_defaults(config.node)
    data = data_dir(config)
    filled: dict[str, tuple[Any, str]] = {
        "data_dir": (data, "XDG_DATA_HOME, else ~/.local/share"),
        "metadata.index_path": (data / "index", "in data_dir"),
        "node.node_id": (node_id, "name of the host"),
        "node.run_dir": (run_dir(node_id), "XDG_RUNTIME_DIR, else the folder of temporary files"),
    }
    for one in fields(NodeDefaults):
        derived = getattr(defaults, one.name)
        filled[f"node.{one.name}"] = (derived.value, derived.why)
    changed: dict[str, dict[str, Any]] = {}
    origins = dict(provenance)
    for key, (value, why) in filled.items():
        section, _, name = key.rpartition(".")
        model = getattr(config, section) if section else config
        attribute = next(each for each, field in type(model).model_fields.items() if (field.alias or each) == name)
        if getattr(model, attribute) is None:
            changed.setdefault(section, {})[attribute] = value
            origins[key] = Origin("derived", f"({why})")
    top = changed.pop("", {})
    parts = {section: getattr(config, section).model_copy(update=values) for section, values in changed.items()}
    return config.model_copy(update={**top, **parts}), origins


def node_defaults(section: NodeSection) -> NodeDefaults:
    """Defaults of this host for the settings of a node."""
    link = compute_link(section)
    return derive(
        HostFacts(
            cores=len(os.sched_getaffinity(0)),
            arena_bytes=section.dram_bytes,
            volumes=len(section.nvme),
            writes_elsewhere=section.write_back_to is not None,
            huge_pages_free_bytes=huge_pages_free(),
            link_bytes_per_s=float(section.compute_bandwidth) or (None if link is None else link.bytes_per_s),
        )
    )


def compute_link(section: NodeSection) -> LinkSpeed | None:
    """The link of a node's data plane; None if the kernel does not report it."""
    return link_speed(section.data_listen.rpartition(":")[0], section.advertise_host)


def storage_link(section: NodeSection) -> LinkSpeed | None:
    """The link that a node reads storage over; None if it reads local volumes or the kernel does not report the link."""
    if section.storage_listen is not None:
        return link_speed(section.storage_listen.rpartition(":")[0], section.storage_advertise_host)
    return None if section.nvme else compute_link(section)
