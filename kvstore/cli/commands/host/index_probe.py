"""Calls of the doctor to the Valkey Cluster that ``metadata.engine`` names."""

from __future__ import annotations

import asyncio
import ssl
from typing import TYPE_CHECKING, Final

from kvstore.cli.support.build_config import metadata_config
from kvstore.config.model import Config
from kvstore.config.sources import Provenance
from kvstore.core.errors import KVStoreError, PermissionDenied, Unauthenticated, Unavailable, Unsupported, install_command
from kvstore.core.index_backend import IndexBackend
from kvstore.doctor.servers.shard_findings import RunningIndex, SeedAnswer, SeedProblem
from kvstore.index.counts import count_nothing
from kvstore.index.valkey.address import Credentials, ValkeyAddress
from kvstore.metadata.indexing.index_opening import valkey_address

if TYPE_CHECKING:
    from kvstore.index.valkey.connection import ValkeyConnection

_ANSWER_S: Final = 2.0
_ALL_S: Final = 10.0


def running_index(config: Config, provenance: Provenance) -> RunningIndex:
    """Ask each server that the configuration names, then the whole cluster. Nothing is asked if the index is a file."""
    try:
        settings = metadata_config(config, provenance)
        if not settings.valkey_servers:
            return RunningIndex()
        address = valkey_address(settings)
    except KVStoreError as error:
        return RunningIndex(error=str(error))
    try:
        return asyncio.run(_ask(address))
    except ImportError:
        return RunningIndex(error=f"metadata.engine = valkey://... requires the package hiredis: {install_command('valkey')}")


async def _ask(address: ValkeyAddress) -> RunningIndex:
    seeds = await asyncio.gather(*(_ask_seed(seed, address) for seed in address.seeds))
    usable = tuple(seed.address for seed in seeds if seed.problem is None)
    backend = await _describe(ValkeyAddress(usable, address.credentials, address.tls)) if usable else IndexBackend()
    return RunningIndex(seeds, backend)


async def _describe(address: ValkeyAddress) -> IndexBackend:
    """All servers of the cluster; none if they cannot be listed."""
    from kvstore.index.valkey.cluster import ValkeyClient
    from kvstore.index.valkey.servers.watch import ServerWatch

    client = ValkeyClient(address, budget_s=_ANSWER_S, count=count_nothing)
    watch = ServerWatch(address, client)
    try:
        async with asyncio.timeout(_ALL_S):
            await client.start()
            await watch.observe()
            return watch.backend()
    except (KVStoreError, TimeoutError):
        return IndexBackend()
    finally:
        watch.close()
        await client.close()


async def _ask_seed(seed: str, address: ValkeyAddress) -> SeedAnswer:
    from kvstore.index.valkey.connection import connect

    try:
        connection = await connect(seed, address.credentials, address.tls, _ANSWER_S)
        try:
            async with asyncio.timeout(_ANSWER_S):
                return await _check_cluster(seed, connection)
        finally:
            connection.close()
    except TimeoutError:
        return SeedAnswer(seed, SeedProblem.SILENT, f"no answer within {_ANSWER_S:g} s")
    except (KVStoreError, OSError) as error:
        if address.tls is not None and isinstance(error.__cause__, TimeoutError) and await _answers_without_tls(seed):
            return SeedAnswer(seed, SeedProblem.NO_TLS)
        return SeedAnswer(seed, *_problem_of(error, tls=address.tls is not None))


async def _answers_without_tls(seed: str) -> bool:
    """Whether the server answers a call without TLS, to which no password is sent. It waits for the end of a TLS handshake."""
    from kvstore.index.valkey.connection import connect

    try:
        (await connect(seed, Credentials(), None, _ANSWER_S)).close()
    except Unauthenticated:
        return True
    except KVStoreError:
        return False
    return True


async def _check_cluster(seed: str, connection: ValkeyConnection) -> SeedAnswer:
    """Whether the server belongs to a cluster in which the user may work."""
    import hiredis

    from kvstore.index.valkey.connection import pack, refusal
    from kvstore.index.valkey.records import too_old

    info, slots = await connection.ask(pack("INFO") + pack("CLUSTER", "SLOTS"), 2)
    for reply in (info, slots):
        if isinstance(reply, hiredis.ReplyError) and (rejected := refusal(reply, seed)) is not None:
            raise rejected
    if isinstance(info, bytes) and (old := too_old(info.decode(errors="replace"))):
        return SeedAnswer(seed, SeedProblem.TOO_OLD, old)
    if isinstance(slots, hiredis.ReplyError) or (isinstance(info, bytes) and b"cluster_enabled:0" in info):
        return SeedAnswer(seed, SeedProblem.NO_CLUSTER)
    if not slots:
        return SeedAnswer(seed, SeedProblem.NOT_READY, "its cluster has no shards yet")
    return SeedAnswer(seed)


def _problem_of(error: Exception, *, tls: bool) -> tuple[SeedProblem, str]:
    cause = error.__cause__ if error.__cause__ is not None else error
    if isinstance(error, Unauthenticated):
        return SeedProblem.REFUSED_LOGIN, ""
    if isinstance(error, PermissionDenied):
        return SeedProblem.REFUSED_COMMAND, ""
    if isinstance(error, Unsupported):
        return SeedProblem.NO_CLUSTER, ""
    if isinstance(cause, ssl.SSLCertVerificationError):
        return SeedProblem.BAD_CERTIFICATE, cause.verify_message
    if isinstance(cause, ssl.SSLError):
        return SeedProblem.NO_TLS, ""
    if isinstance(cause, ConnectionRefusedError):
        return SeedProblem.SILENT, "connection refused"
    if isinstance(error, Unavailable) and error.__cause__ is None and not tls:
        return SeedProblem.WANTS_TLS, ""
    return SeedProblem.SILENT, type(cause).__name__ if cause is not error else str(error)
