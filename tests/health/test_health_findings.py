"""Each finding, from a report that has exactly one thing wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from certificates import make_certificates
from kvproto.v1 import common_pb2
from kvproto.v1.common_pb2 import NODE_STATE_DRAIN_BLOCKED, NODE_STATE_DRAINED, DrainProgress, NodeInfo
from kvproto.v1.metadata_pb2 import HeartbeatRequest, NodeStatus
from kvstore.core.index_backend import IndexBackend, IndexServer
from kvstore.core.limits import MAX_NAME_BYTES, MAX_REASON
from kvstore.health import codes
from kvstore.health.certificate_file import certificate_end_s
from kvstore.health.cluster import ClusterReport, FileSystem, NodeReport, QuotaUse, ServerReport, find
from kvstore.health.findings import MAX_FINDINGS, HealthFinding, from_proto, overall
from kvstore.health.host_reports import CertificateWatch, file_system
from kvstore.health.node_reachability import Reachability
from kvstore.health.settled_findings import SETTLE_S, SettledFindings
from kvstore.metadata.service import check_findings
from kvstore.process.tls import TlsConfig

GIB = 1 << 30
INFO = NodeInfo(node_id="n", control_address="10.0.0.2:7401")
WELL = NodeReport(NodeStatus(node=INFO, alive=True))


def silent(reachability: Reachability) -> NodeReport:
    return NodeReport(NodeStatus(node=INFO, heartbeat_age_ms=22_000), reachability)


def told(status: NodeStatus) -> ClusterReport:
    return ClusterReport(nodes=[NodeReport(status)])


CASES = [
    ("INDEX_READ_ONLY", "", ClusterReport(ServerReport(index_failing="No space left", index_failing_s=5), [WELL]), "for 5 s"),
    (
        "INDEX_DISK_NEARLY_FULL",
        "",
        ClusterReport(ServerReport(index_path="/i", index_disk=FileSystem(100 * GIB, GIB // 2)), [WELL]),
        "/i has 512.0 MiB free of 100.0 GiB",
    ),
    (
        "SETTINGS_FILE_UNREADABLE",
        "",
        ClusterReport(ServerReport(settings_problem="truncated", settings_path="/i.json"), [WELL]),
        "/i.json cannot be read: truncated",
    ),
    (
        "FILE_NOT_WRITTEN",
        "/i.json",
        ClusterReport(ServerReport(unwritten={"/i.json": "Is a directory"}), [WELL]),
        "/i.json cannot be written: Is a directory",
    ),
    (
        "QUOTA_NEARLY_USED",
        "team-a",
        ClusterReport(ServerReport(quotas=[QuotaUse("team-a", "NVMe", 96, 100)]), [WELL]),
        "holds 96 B of 100 B in NVMe",
    ),
    (
        "QUOTA_EXCEEDED",
        "team-a",
        ClusterReport(ServerReport(quotas=[QuotaUse("team-a", "DRAM", 200, 100)]), [WELL]),
        "holds 200 B in DRAM, more than its quota of 100 B.",
    ),
    ("NO_NODES", "", ClusterReport(), "No node has registered"),
    ("NODE_SILENT", "n", ClusterReport(nodes=[silent(Reachability.NOT_PROBED)]), "has not reported for 22 s"),
    ("NODE_DOWN", "n", ClusterReport(nodes=[silent(Reachability.REFUSED)]), "nothing listens on 10.0.0.2:7401"),
    ("NODE_HUNG", "n", ClusterReport(nodes=[silent(Reachability.NO_ANSWER)]), "the process does not respond"),
    ("NODE_UNREACHABLE", "n", ClusterReport(nodes=[silent(Reachability.UNREACHABLE)]), "cannot be reached"),
    ("NODE_CUT_OFF", "n", ClusterReport(nodes=[silent(Reachability.ANSWERS)]), "its heartbeats have not arrived"),
    ("NODE_REFUSED", "n", told(NodeStatus(node=INFO, refused="the token is not known")), "the token is not known"),
    ("NODE_STOPPED", "n", told(NodeStatus(node=INFO, stopped=True, state=NODE_STATE_DRAINED)), "stopped after it was drained"),
    (
        "DRAIN_BLOCKED",
        "n",
        told(
            NodeStatus(
                node=INFO, alive=True, state=NODE_STATE_DRAIN_BLOCKED, drain=DrainProgress(why="no space", not_durable_blocks=7)
            )
        ),
        "(no space): 7 blocks would be lost",
    ),
    ("CLOCK_DIFFERS", "n", told(NodeStatus(node=INFO, alive=True, clock_offset_ms=-60_000)), "60 s behind"),
    (
        "VOLUME_HUNG",
        "n/nvme0",
        told(
            NodeStatus(
                node=INFO, alive=True, findings=[common_pb2.Finding(code="VOLUME_HUNG", subject="n/nvme0", facts="It hangs.")]
            )
        ),
        "It hangs.",
    ),
    (
        "PUBLISH_FAILS",
        "n",
        told(NodeStatus(node=INFO, alive=True, findings=[common_pb2.Finding(code="PUBLISH_FAILS", facts="It waits.")])),
        "It waits.",
    ),
]


@pytest.mark.parametrize(("code", "subject", "report", "words"), CASES, ids=[case[0] for case in CASES])
def test_report_with_one_fault_gives_its_code(code: str, subject: str, report: ClusterReport, words: str) -> None:
    (found,) = find(report)
    assert (found.code.name, found.subject) == (code, subject)
    assert words in found.facts
    assert overall([found]) == found.severity.value


def test_report_without_faults_has_no_findings() -> None:
    disk = FileSystem(100 * GIB, 2 * GIB)
    server = ServerReport(index_disk=disk, quotas=[QuotaUse("a", "DRAM", 90, 100), QuotaUse("b", "NVMe", 0, 0)])
    assert find(ClusterReport(server, [WELL])) == []
    assert overall([]) == "ok"


@pytest.mark.parametrize(
    "status",
    [
        NodeStatus(heartbeat_age_ms=22_000),
        NodeStatus(alive=True, clock_offset_ms=60_000),
        NodeStatus(alive=True, findings=[common_pb2.Finding(code="PUBLISH_FAILS", facts="It waits.")]),
    ],
)
def test_cache_of_an_engine_has_no_finding(status: NodeStatus) -> None:
    status.node.node_id = "vllm-1"
    assert find(ClusterReport(nodes=[WELL, NodeReport(status)])) == []
    assert [one.code for one in find(ClusterReport(nodes=[NodeReport(status)]))] == [codes.NO_NODES]


def test_findings_are_bounded_with_errors_first() -> None:
    quotas = [QuotaUse(f"t{number}", "NVMe", 99, 100) for number in range(2 * MAX_FINDINGS)]
    found = find(ClusterReport(ServerReport(quotas=quotas), [silent(Reachability.REFUSED)]))
    assert len(found) == MAX_FINDINGS
    assert found[0].code is codes.NODE_DOWN
    assert overall(found) == "error"


def test_small_file_system_is_judged_by_share() -> None:
    assert not FileSystem(24 << 20, 10 << 20).nearly_full
    assert FileSystem(24 << 20, 1 << 20).nearly_full


def test_finding_survives_the_message_with_cut_facts() -> None:
    (found,) = from_proto([HealthFinding(codes.NODE_HUNG, "n", "x" * 1_000).to_proto()])
    assert (found.code, found.subject, len(found.facts)) == (codes.NODE_HUNG, "n", MAX_REASON)


def test_finding_with_long_subject_costs_no_heartbeat() -> None:
    message = HealthFinding(codes.NODE_SLOW, "é" * MAX_NAME_BYTES, "It is slow.").to_proto()
    assert message.subject == "é" * (MAX_NAME_BYTES // 2)
    check_findings(HeartbeatRequest(findings=[message]))


def test_finding_of_many_nodes_is_one() -> None:
    """A slow host slows down the loads of all others: one finding, which hides none of another code."""
    slow = common_pb2.Finding(code="NODE_SLOW", subject="n", facts="It is slow.")
    nodes = [
        NodeReport(NodeStatus(node=NodeInfo(node_id=f"h{number}", control_address="h:1"), alive=True, findings=[slow]))
        for number in range(MAX_FINDINGS + 1)
    ]
    quotas = [QuotaUse("team-a", tier, 96, 100) for tier in ("DRAM", "NVMe")]
    found = find(ClusterReport(ServerReport(quotas=quotas), nodes))
    assert [(one.code, one.subject) for one in found] == [(codes.NODE_SLOW, "n"), *[(codes.QUOTA_NEARLY_USED, "team-a")] * 2]
    assert found[0].facts == f"It is slow. {MAX_FINDINGS + 1} nodes report this."


def test_certificate_near_its_end_is_reported(tmp_path: Path) -> None:
    tls = make_certificates(tmp_path / "tls").server()
    assert tls.cert is not None
    end_s = certificate_end_s(tls.cert)
    assert end_s is not None
    day_s = 86_400.0
    now_s = end_s - 20 * day_s
    watch = CertificateWatch(tls, "node n", lambda: now_s)
    assert list(watch.findings()) == []
    now_s = end_s - 10.5 * day_s
    (found,) = watch.findings()
    assert (found.code, "expires in 10 days" in found.facts) == (codes.CERTIFICATE_EXPIRES, True)
    now_s = end_s + 1
    assert [one.code for one in watch.findings()] == [codes.CERTIFICATE_EXPIRED]
    assert list(CertificateWatch(None, "node n").findings()) == []
    assert list(CertificateWatch(TlsConfig(cert=tmp_path / "gone", key=tmp_path / "gone"), "node n").findings()) == []


def test_file_system_of_missing_path_is_unknown(tmp_path: Path) -> None:
    assert file_system(tmp_path) is not None
    assert file_system(tmp_path / "gone") is None


def test_publish_failure_names_shards_that_are_away() -> None:
    status = NodeStatus(node=INFO, alive=True, findings=[common_pb2.Finding(code="PUBLISH_FAILS", facts="It waits.")])
    shards = [IndexServer(address=f"h:{number}", primary=True, shard=number, replicas=1, away_s=9.0) for number in range(3)]
    server = ServerReport(backend=IndexBackend(shards), metadata_servers=2)
    (found,) = [one for one in find(ClusterReport(server, [NodeReport(status)])) if one.code.name == "PUBLISH_FAILS"]
    assert found.facts == "It waits. 3 of 3 shards of the index do not answer."


def test_passing_finding_is_shown_after_some_seconds() -> None:
    settled = SettledFindings()
    passing, lasting = HealthFinding(codes.SHARD_AWAY, "shard 1", "x"), HealthFinding(codes.NODE_DOWN, "n", "x")
    assert settled.filter([passing, lasting], 0.0) == [lasting]
    assert settled.filter([passing], SETTLE_S - 0.1) == []
    assert settled.filter([passing], SETTLE_S) == [passing]
    assert settled.filter([], SETTLE_S + 0.1) == []
    assert settled.filter([passing], SETTLE_S + 0.2) == [], "it begins again"
