"""Health of the cluster: gathers what this process knows, probes silent nodes, and derives the findings."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from kvproto.v1.metadata_pb2 import NodeStatus
from kvstore.core.errors import KVStoreError
from kvstore.health.cluster import ClusterReport, FileSystem, NodeReport, QuotaUse, ServerReport, find
from kvstore.health.findings import HealthFinding
from kvstore.health.host_reports import CertificateWatch, file_system
from kvstore.health.settled_findings import SettledFindings
from kvstore.index.contract import PrefixIndex
from kvstore.metadata.cluster.event_journal import EventJournal
from kvstore.metadata.cluster.event_sources import FindingEvents, NodeEvents
from kvstore.metadata.cluster.node_probes import NodeProbes
from kvstore.metadata.membership.node_table import NodeTable
from kvstore.metadata.membership.server_table import ServerTable
from kvstore.metadata.retention.policies import RetentionPolicies
from kvstore.metadata.retention.settings_store import SettingsStore
from kvstore.observe.counters import Counters
from kvstore.observe.limited_log import LimitedLog
from kvstore.observe.metric_definitions import metadata as metadata_metrics

logger = logging.getLogger(__name__)

TICK_S: Final = 1.0


class HealthMonitor:
    """Derives findings every second. Use on one event loop.

    Args:
        index: the index.
        index_path: its folder.
        nodes: registrations and liveness.
        settings: the file of quotas and retention rules.
        retention: usage of tenants.
        probes: probes of silent nodes.
        certificate: expiry of this server's certificate.
        journal: receives events of nodes and findings.
        counters: counters of this process.
        servers: the metadata servers that serve the index.
    """

    def __init__(
        self,
        index: PrefixIndex,
        index_path: Path,
        nodes: NodeTable,
        settings: SettingsStore,
        retention: RetentionPolicies,
        probes: NodeProbes,
        certificate: CertificateWatch,
        journal: EventJournal,
        counters: Counters,
        servers: ServerTable,
    ) -> None:
        self._index = index
        self._index_path = index_path
        self._nodes = nodes
        self._settings = settings
        self._retention = retention
        self._probes = probes
        self._certificate = certificate
        self._journal = journal
        self._counters = counters
        self._servers = servers
        self._log = LimitedLog(logger, counters=counters)
        self._events = FindingEvents(journal), NodeEvents(journal)
        self._settled = SettledFindings()
        self._disk: FileSystem | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start on the running event loop."""
        self._task = asyncio.create_task(self._run(), name="metadata-health")

    async def stop(self) -> None:
        """Stop."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    @property
    def index_disk(self) -> FileSystem | None:
        """Space on the file system of the index when it was last measured; None: unknown."""
        return self._disk

    def findings(self) -> list[HealthFinding]:
        """Return the present findings. Space on disk and probes are at most some seconds old."""
        return self._findings(self._nodes.statuses())

    def _findings(self, statuses: Sequence[NodeStatus]) -> list[HealthFinding]:
        found = find(ClusterReport(self._server(), [self._node(status) for status in statuses]))
        return self._settled.filter(found, time.monotonic())

    async def refresh(self) -> None:
        """Measure the disk, probe silent nodes, and record events."""
        self._disk = await asyncio.to_thread(file_system, self._index_path)
        await self._probes.refresh({record.node_id: record.control_address for record in self._nodes.silent()})
        of_findings, of_nodes = self._events
        statuses = self._nodes.statuses()
        of_findings.observe(self._findings(statuses))
        of_nodes.observe(statuses)
        await asyncio.to_thread(self._journal.flush)

    async def _run(self) -> None:
        while True:
            try:
                await self.refresh()
            except KVStoreError as error:  # the index does not answer: lookups report it, too
                self._log.report(metadata_metrics.HEALTH_FAILURES, "cannot derive the health of the cluster", error)
            except Exception:  # process edge: without this task, no event would be recorded
                self._counters.add(metadata_metrics.BACKGROUND_BUGS)
                logger.exception("health round failed: unexpected error, trying again")
            await asyncio.sleep(TICK_S)

    def _node(self, status: NodeStatus) -> NodeReport:
        return NodeReport(status, self._probes.found(status.node.node_id))

    def _server(self) -> ServerReport:
        stats = self._index.stats()
        readable = self._settings.read() is not None
        return ServerReport(
            index_failing=stats.failing,
            index_failing_s=stats.failing_s,
            index_path=str(self._index_path),
            index_disk=self._disk,
            settings_problem="" if readable else self._settings.problem,
            settings_path=str(self._settings.path),
            unwritten=self._unwritten(),
            quotas=self._quotas() if readable else (),
            findings=list(self._certificate.findings()),
            backend=self._index.backend(),
            metadata_servers=len(self._servers.servers()),
        )

    def _unwritten(self) -> dict[str, str]:
        problems = {self._settings.path: self._settings.copy_problem, self._journal.path: self._journal.problem}
        return {str(path): why for path, why in problems.items() if why}

    def _quotas(self) -> list[QuotaUse]:
        found = []
        for one in self._retention.with_quota():
            if one.quota.HasField("dram_bytes"):
                found.append(QuotaUse(one.tenant, "DRAM", one.dram_bytes, one.quota.dram_bytes))
            if one.quota.HasField("nvme_bytes"):
                found.append(QuotaUse(one.tenant, "NVMe", one.nvme_bytes, one.quota.nvme_bytes))
        return found
