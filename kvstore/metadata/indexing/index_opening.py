"""Opening the index that the configuration names, and the stores that belong to the index."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from pathlib import Path

from kvstore.config.metadata import MetadataConfig
from kvstore.core.errors import InvalidArgument, Unavailable, Unsupported, install_command
from kvstore.index.contract import PrefixIndex
from kvstore.index.lmdb import LmdbIndex
from kvstore.index.valkey.address import Credentials, ValkeyAddress
from kvstore.metadata.events.contract import EventSource
from kvstore.metadata.indexing.index_thread import IndexThread
from kvstore.metadata.membership.node_table import NodeTable
from kvstore.metadata.retention.settings_store import FileSettings, SettingsStore
from kvstore.metadata.retention.shared_settings import SharedSettings
from kvstore.observe.counters import Counters


async def open_index(config: MetadataConfig, counters: Counters, on_damage: Callable[[], None]) -> PrefixIndex:
    """Open the index: the embedded one, or that of a Valkey Cluster.

    Args:
        config: configuration of the server.
        counters: counters of this process.
        on_damage: called, in any thread, if this process must open the index again.

    Raises:
        Unavailable: the index cannot be opened, or the cluster does not answer.
        Unsupported: a package is missing, or the cluster cannot hold an index.
        InvalidArgument: a file of the configuration cannot be read.
        Unauthenticated, PermissionDenied: the cluster rejects the user.
    """
    if not config.valkey_servers:
        return LmdbIndex.open(config.index_path, map_bytes=config.index_size_bytes, count=counters.add, on_damage=on_damage)
    make_folder(config.index_path.parent)
    try:
        from kvstore.index.valkey.index import ValkeyIndex
    except ImportError as error:
        raise Unsupported(f"metadata.engine = valkey://... requires the package hiredis: {install_command('valkey')}") from error
    return await ValkeyIndex.start(
        valkey_address(config),
        count=counters.add,
        observe=counters.observe,
        lookup_budget_s=config.lookup_shard_ms / 1000,
        on_rebuild=on_damage,
    )


def make_folder(folder: Path) -> None:
    """Create the folder of this server's files. An embedded index creates it itself.

    Raises:
        Unavailable: it cannot be created.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Unavailable("the folder of metadata.index_path cannot be created", path=folder, cause=error.strerror) from error


def valkey_address(config: MetadataConfig) -> ValkeyAddress:
    """The Valkey Cluster that the configuration names, with credentials and TLS.

    Raises:
        InvalidArgument: a file of the configuration cannot be read.
    """
    return ValkeyAddress(config.valkey_servers, _credentials(config), _tls(config))


def open_settings(config: MetadataConfig, index: PrefixIndex, counters: Counters) -> SettingsStore:
    """The operators' settings: a file of this host, or a value that all servers of the index share, with a copy in a file."""
    file = FileSettings(config.settings_path)
    if not config.valkey_servers:
        return file
    from kvstore.index.valkey.index import ValkeyIndex
    from kvstore.index.valkey.keys import SETTINGS

    assert isinstance(index, ValkeyIndex)
    return SharedSettings(file, index.shared_value(SETTINGS), counters)


def open_shared_feed(
    config: MetadataConfig, index: PrefixIndex, reads: IndexThread, nodes: NodeTable, counters: Counters
) -> EventSource:
    """The block events that all servers of an index in Valkey share."""
    from kvstore.index.valkey.index import ValkeyIndex
    from kvstore.metadata.events.shared_feed import SharedFeed

    assert isinstance(index, ValkeyIndex)
    return SharedFeed(
        index, reads, nodes, counters, most_bytes=config.events_memory_bytes, max_subscribers=config.max_subscribers
    )


def _credentials(config: MetadataConfig) -> Credentials:
    if config.valkey_password_file is None:
        return Credentials(config.valkey_user)
    try:
        return Credentials(config.valkey_user, config.valkey_password_file.read_text().strip())
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument(
            "metadata.valkey_password_file cannot be read", file=config.valkey_password_file, cause=type(error).__name__
        ) from error


def _tls(config: MetadataConfig) -> ssl.SSLContext | None:
    if not config.engine.startswith("valkeys://"):
        return None
    try:
        return ssl.create_default_context(cafile=config.valkey_ca)
    except (OSError, ssl.SSLError) as error:
        raise InvalidArgument("metadata.valkey_ca cannot be read", file=config.valkey_ca, cause=str(error)) from error
