"""Convert the configuration to the settings of servers and clients."""

from __future__ import annotations

import re

from kvstore.cli.support.host_settings import compute_link, settle, storage_link
from kvstore.cli.support.logs import set_up_logs
from kvstore.config.admin import AdminConfig
from kvstore.config.client import ClientSection
from kvstore.config.events import EventsConfig
from kvstore.config.metadata import MetadataConfig
from kvstore.config.model import Config
from kvstore.config.node import NodeConfig, NodeSection
from kvstore.config.router import RouterConfig
from kvstore.config.sources import Provenance, leaves
from kvstore.core.errors import InvalidArgument, install_command
from kvstore.observe import tracing
from kvstore.process.effective_config import EffectiveSetting
from kvstore.rpc.auth.tokens import TokenSource
from kvstore.transport.link_speed import LinkSpeed

_PASSWORD = re.compile(r"(://)[^/@\s]*@")


def token(section: ClientSection | NodeSection) -> TokenSource | None:
    """Read the token that a process sends to metadata server and nodes; None: no token.

    Raises:
        InvalidArgument: the file cannot be read or contains no token.
    """
    return TokenSource.of(file=section.token_file)


def effective_settings(config: Config, provenance: Provenance | None, *sections: str) -> tuple[EffectiveSetting, ...]:
    """List the settings that a process publishes. Passwords in addresses are masked.

    Args:
        config: the whole configuration.
        provenance: sources of the values; None: unknown, and no settings are published.
        sections: key prefixes that apply to the process.
    """
    if provenance is None:
        return ()
    return tuple(
        EffectiveSetting(
            leaf.key, _PASSWORD.sub(r"\1********@", leaf.text), leaf.origin.source, leaf.origin.detail, leaf.description
        )
        for leaf in leaves(config, provenance)
        if leaf.key.startswith(sections)
    )


def metadata_config(config: Config, provenance: Provenance | None = None) -> MetadataConfig:
    """Build the configuration of the metadata server."""
    config, provenance = _settled(config, provenance)
    settings = effective_settings(config, provenance, "data_dir", "metadata.", "log.", "observe.")
    return MetadataConfig(**dict(config.metadata), settings=settings).check()


def node_config(config: Config, provenance: Provenance | None = None) -> NodeConfig:
    """Build the configuration of this host's node."""
    config, provenance = _settled(config, provenance)
    section = config.node
    return NodeConfig(
        **dict(section),
        storage_link_bytes_per_s=_rate(storage_link(section)),
        compute_link_bytes_per_s=_rate(compute_link(section)),
        slow_load_ms=config.observe.slow_load_ms,
        settings=effective_settings(config, provenance, "data_dir", "node.", "log.", "observe."),
    ).check()


def router_config(config: Config) -> RouterConfig:
    """Build the configuration of the router."""
    from kvstore.router.engines import engines_of  # the extra `router` may be missing for other commands

    checked = RouterConfig(**dict(config.router), client=config.client).check()
    engines_of(checked)
    return checked


def admin_config(config: Config, provenance: Provenance | None = None) -> AdminConfig:
    """Build the configuration of the admin server."""
    shown = ("admin.", "client.tls.", "client.token_file", "client.read_token_file", "log.")
    return AdminConfig(
        **dict(config.admin), client=config.client, settings=effective_settings(config, provenance, *shown)
    ).check()


def events_config(config: Config, endpoint: str) -> EventsConfig:
    """Build the configuration of the event publisher."""
    return EventsConfig(**dict(config.events) | {"zmq": endpoint}, client=config.client).check()


def _settled(config: Config, provenance: Provenance | None) -> tuple[Config, Provenance | None]:
    settled, origins = settle(config, provenance or {})
    return settled, None if provenance is None else origins


def _rate(link: LinkSpeed | None) -> int:
    return 0 if link is None else int(link.bytes_per_s)


def set_up_traces(config: Config, service: str, **attributes: str) -> None:
    """Enable tracing in this process if configured.

    Raises:
        InvalidArgument: tracing cannot be enabled.
    """
    section = config.observe
    try:
        tracing.set_up(
            section.traces,
            service,
            endpoint=section.traces_endpoint,
            file=section.traces_file,
            share=section.traces_share,
            attributes=attributes,
        )
    except ModuleNotFoundError as error:
        raise InvalidArgument(f"observe.traces: {error.name} is missing: {install_command('observe')}") from error
    except (ValueError, OSError) as error:
        raise InvalidArgument(f"observe.traces: {error}") from error


def set_up_process(config: Config, service: str) -> None:
    """Set up logs and tracing of a daemon."""
    set_up_logs(config.log)
    set_up_traces(config, service)
