"""From the configuration to the settings that servers and clients take."""

from __future__ import annotations

import re
from typing import TypeVar

from kvclient.options import ClientOptions
from kvstore.admin.config import AdminConfig
from kvstore.cli.support.host_settings import compute_link, settle, storage_link
from kvstore.cli.support.logs import set_up_logs
from kvstore.config.model import ClientSection, Config, NodeSection, TlsSection
from kvstore.config.sources import Provenance, leaves
from kvstore.core.errors import Internal, InvalidArgument
from kvstore.metadata.config import MetadataConfig
from kvstore.node.config import MountConfig, NodeConfig, NvmeConfig
from kvstore.observe import tracing
from kvstore.process.effective_config import EffectiveSetting
from kvstore.process.tls import TlsConfig
from kvstore.router.config import HealthLimits, Role, RouterConfig, parse_engine
from kvstore.rpc.auth.tokens import TokenSource
from kvstore.transport.link_speed import LinkSpeed
from kvstore.transport.nixl.agent import NixlOptions
from kvstore.transport.shaping.traffic import TrafficClass

_T = TypeVar("_T")
_PASSWORD = re.compile(r"(://)[^/@\s]*@")


def tls(section: TlsSection) -> TlsConfig | None:
    """TLS settings, or None where nothing is set."""
    if section == TlsSection():
        return None
    return TlsConfig(
        ca=section.ca,
        cert=section.cert,
        key=section.key,
        require_client_cert=section.require_client_cert,
        server_name=section.server_name,
    )


def token(section: ClientSection | NodeSection) -> TokenSource | None:
    """The token that a process shows to metadata server and nodes, or None.

    Raises:
        InvalidArgument: the file cannot be read, or holds none.
    """
    return TokenSource.of(file=section.token_file)


def in_force(config: Config, provenance: Provenance | None, *sections: str) -> tuple[EffectiveSetting, ...]:
    """What a process shows of its configuration; passwords in addresses are masked.

    Args:
        config: all of it.
        provenance: where values came from; None: nobody knows, and nothing is shown.
        sections: beginnings of the keys that concern the process.
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
    """Settings of the metadata server."""
    config, provenance = _settled(config, provenance)
    section = config.metadata
    return MetadataConfig(
        index_path=_filled(section.index_path),
        listen=section.listen,
        map_bytes=section.index_size,
        heartbeat_interval_ms=section.heartbeat_interval,
        node_ttl_ms=section.node_ttl,
        node_forget_ms=section.node_forget,
        path_policy=section.path_policy,
        alpha_tokens=section.alpha_tokens,
        beta_tokens=section.beta_tokens,
        engine_ttl_ms=section.engine_ttl,
        request_ttl_ms=section.request_ttl,
        max_requests=section.max_requests,
        workers=section.workers,
        stop_grace_ms=section.stop_grace,
        tokens_file=section.tokens_file,
        events_bytes=section.events_memory,
        max_subscribers=section.max_subscribers,
        tls=tls(section.tls),
        metrics_listen=_listen_or_none(section.metrics_listen),
        ready_file=section.ready_file,
        allow_insecure_remote=section.allow_insecure_remote,
        in_force=in_force(config, provenance, "data_dir", "metadata.", "log.", "observe."),
    )


def node_config(config: Config, provenance: Provenance | None = None) -> NodeConfig:
    """Settings of this host's node daemon."""
    config, provenance = _settled(config, provenance)
    section = config.node
    return NodeConfig(
        node_id=_filled(section.node_id),
        roles=section.roles,
        listen=section.listen,
        data_listen=section.data_listen,
        advertise_host=section.advertise_host,
        run_dir=_filled(section.run_dir),
        metadata=section.metadata,
        dram_bytes=section.dram,
        huge_pages=_filled(section.huge_pages),
        prefault=section.prefault,
        nvme=tuple(NvmeConfig(volume.path, volume.capacity, direct=volume.direct) for volume in section.nvme),
        mounts=tuple(MountConfig(mount.volume, mount.path, direct=mount.direct) for mount in section.mounts),
        write_behind_to=section.write_behind_to,
        policy=section.policy,
        lease_ms=section.lease,
        prepare_ttl_ms=section.prepare_ttl,
        load_window_bytes=_filled(section.load_window),
        load_threads=_filled(section.load_threads),
        volume_stall_s=section.volume_stall / 1000,
        io_threads=section.io_threads,
        gds=section.gds,
        nixl=None if section.nixl == "off" else _nixl(section),
        nixl_required=section.nixl == "required",
        nixl_trusted_network=section.nixl_trusted_network,
        storage_listen=section.storage_listen,
        storage_advertise_host=section.storage_advertise_host,
        storage_bytes_per_s=section.storage_bandwidth,
        compute_bytes_per_s=section.compute_bandwidth,
        storage_link_bytes_per_s=_rate(storage_link(section)),
        compute_link_bytes_per_s=_rate(compute_link(section)),
        traffic=TrafficClass(section.kv_dscp, section.compute_cap),
        prefill_buffer_bytes=section.prefill_buffer,
        decode_buffer_bytes=section.decode_buffer,
        keep_loaded=section.keep_loaded,
        peer_streams=section.peer_streams,
        anti_entropy_interval_ms=section.anti_entropy_interval,
        stop_grace_s=_filled(section.stop_grace) / 1000,
        move_bytes_per_s=_filled(section.move_bandwidth),
        move_window_bytes=_filled(section.move_window),
        tokens_file=section.tokens_file,
        token_file=section.token_file,
        tls=tls(section.tls),
        allow_insecure_remote=section.allow_insecure_remote,
        metrics_listen=_listen_or_none(section.metrics_listen),
        slow_load_s=config.observe.slow_load / 1000,
        ready_file=section.ready_file,
        in_force=in_force(config, provenance, "data_dir", "node.", "log.", "observe."),
    )


def _settled(config: Config, provenance: Provenance | None) -> tuple[Config, Provenance | None]:
    settled, origins = settle(config, provenance or {})
    return settled, None if provenance is None else origins


def _rate(link: LinkSpeed | None) -> int:
    return 0 if link is None else int(link.bytes_per_s)


def _filled(value: _T | None) -> _T:
    """A value that ``settle`` has filled in."""
    if value is None:
        raise Internal("a setting that follows from the host was not filled in")
    return value


def _listen_or_none(address: str) -> str | None:
    return None if address in {"", "none"} else address


def set_up_traces(config: Config, service: str, **attributes: str) -> None:
    """Switches traces on in this process where the configuration says so.

    Raises:
        InvalidArgument: they cannot be.
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
        raise InvalidArgument(f"observe.traces: {error.name} is missing: pip install 'kvstore-dualpath[observe]'") from error
    except (ValueError, OSError) as error:
        raise InvalidArgument(f"observe.traces: {error}") from error


def set_up_process(config: Config, service: str) -> None:
    """Logs and traces of a daemon's process."""
    set_up_logs(config.log)
    set_up_traces(config, service)


def _nixl(section: NodeSection) -> NixlOptions:
    return NixlOptions(
        mode=section.nixl_way,
        service_level=section.nixl_service_level,
        devices=section.nixl_devices,
        transports=section.nixl_transports,
    )


def router_config(config: Config) -> RouterConfig:
    """Build the router's configuration. Its channel to the metadata server uses the client's TLS and token."""
    section = config.router
    given = ((section.engines, Role.PLAIN), (section.prefill, Role.PREFILL), (section.decode, Role.DECODE))
    return RouterConfig(
        engines=[parse_engine(text, role) for texts, role in given for text in texts],
        listen=section.listen,
        policy=section.policy,
        metadata=None if section.metadata == "none" else section.metadata,
        name=section.name,
        report=section.report,
        lookup=section.lookup,
        flow=section.flow,
        max_body_bytes=section.max_body,
        max_inflight=section.max_inflight,
        assign_timeout_s=section.assign_timeout / 1000,
        connect_timeout_s=section.connect_timeout / 1000,
        first_byte_timeout_s=section.first_byte_timeout / 1000,
        idle_timeout_s=section.idle_timeout / 1000,
        client_timeout_s=section.client_timeout / 1000,
        retries=section.retries,
        expected_output_tokens=section.expected_output_tokens,
        stop_grace_s=section.stop_grace / 1000,
        health=HealthLimits(
            check_interval_s=section.check_interval / 1000,
            check_timeout_s=section.check_timeout / 1000,
            ejection_time_s=section.ejection_time / 1000,
            max_ejection_time_s=section.max_ejection_time / 1000,
        ),
        engine_tls_ca=section.engine_ca,
        tls=tls(config.client.tls),
        token_file=config.client.token_file,
        serve_tls=tls(section.tls),
        allow_insecure_remote=section.allow_insecure_remote,
        ready_file=section.ready_file,
    )


def admin_config(config: Config, provenance: Provenance | None = None) -> AdminConfig:
    """Settings of the admin server. Its channels are a client's."""
    section = config.admin
    return AdminConfig(
        listen=section.listen,
        metadata=section.metadata,
        tokens_file=section.tokens_file,
        timeout_s=section.timeout / 1000,
        change_timeout_s=section.change_timeout / 1000,
        max_body_bytes=section.max_body,
        max_inflight=section.max_inflight,
        stop_grace_s=section.stop_grace / 1000,
        tls=tls(config.client.tls),
        token=token(config.client),
        read_token=TokenSource.of(file=config.client.read_token_file),
        serve_tls=tls(section.tls),
        allow_insecure_remote=section.allow_insecure_remote,
        ready_file=section.ready_file,
        in_force=in_force(config, provenance, "admin.", "client.tls.", "client.token_file", "client.read_token_file", "log."),
    )


def client_options(config: Config, name: str) -> ClientOptions:
    """Bounds of a client of ours."""
    return ClientOptions(
        client_name=name,
        default_deadline_s=config.client.deadline / 1000,
        lookup_deadline_s=config.client.lookup_deadline / 1000,
        token_file=config.client.token_file,
    )
