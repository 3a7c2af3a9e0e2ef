"""Each alert rule fires on its cause and on nothing else. promtool evaluates synthetic series."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from monitored import ALERTS, alerts

EVAL_MINUTES = 30
ON = 'instance="h:1"'


@dataclass(frozen=True)
class Case:
    """Series by selector, in promtool's notation of one value per minute: after ``firing`` the alert fires, after ``quiet``
    not."""

    firing: dict[str, str]
    quiet: dict[str, str]
    minutes: int = EVAL_MINUTES


def level(value: float) -> str:
    """A constant gauge."""
    return f"{value}x{EVAL_MINUTES + 1}"


def grows(by: float) -> str:
    """A counter that grows by ``by`` per minute."""
    return f"0+{by}x{EVAL_MINUTES + 1}"


def counter(name: str, bad: float, good: float = 0, labels: str = ON) -> Case:
    """A rule about the rate of one counter."""
    return Case({f"{name}{{{labels}}}": grows(bad)}, {f"{name}{{{labels}}}": grows(good)})


def gauge(name: str, bad: float, good: float, labels: str = ON) -> Case:
    """A rule about one gauge."""
    return Case({f"{name}{{{labels}}}": level(bad)}, {f"{name}{{{labels}}}": level(good)})


def share(part: str, whole: str, bad: float, good: float, labels: str = "", whole_labels: str = ON) -> Case:
    """A rule about the ratio of a counter to one that grows by 100 per minute."""
    series = f"{part}{{{ON}{labels}}}", f"{whole}{{{whole_labels}}}"
    return Case(
        dict(zip(series, (grows(bad), grows(100)), strict=True)), dict(zip(series, (grows(good), grows(100)), strict=True))
    )


def disk(name: str, labels: str = ON) -> list[Case]:
    """A rule about a file system of 100 GB that is almost full, or fills up within four hours."""
    free, size = f"{name}_free_bytes{{{labels}}}", f"{name}_bytes{{{labels}}}"
    total = level(100e9)
    return [
        Case({free: level(0.5e9), size: total}, {free: level(3e9), size: total}),
        Case({free: "40e9-0.2e9x31", size: total}, {free: "40e9-0.05e9x31", size: total}),
        Case({free: "40e9-0.2e9x31", size: total}, {free: "95e9-0.5e9x31", size: total}),
        Case({free: level(0.5e9), size: total}, {free: level(0.5e9), size: level(2e9)}),
    ]


def churn(blocks: int, used: int) -> dict[str, str]:
    """A node that evicts 6,000 blocks per hour from volumes of 100 GB."""
    on = f'{{{ON},volume="nvme0",tier="nvme"}}'
    return {
        f"kvstore_evicted_nvme_blocks_total{{{ON}}}": "0+100x121",
        f"kvstore_volume_blocks{on}": f"{blocks}x121",
        f"kvstore_volume_used_bytes{on}": f"{used}e9x121",
        f"kvstore_volume_capacity_bytes{on}": "100e9x121",
    }


USED, MOST = (f'kvstore_index_shard_memory_{name}{{{ON},shard="2"}}' for name in ("bytes", "limit_bytes"))
MISSED = "kvstore_node_load_missed_blocks_total"
HITS, KEYS = "kvstore_metadata_lookup_hit_blocks_total", "kvstore_metadata_lookup_keys_total"
CASES: dict[str, list[Case]] = {
    "KVStoreVolumeFull": [gauge("kvstore_volume_read_only", 1, 0, f'{ON},volume="nvme0",tier="nvme"')],
    "KVStoreVolumeDiskFilling": disk("kvstore_volume_disk", f'{ON},volume="nvme0",tier="nvme"'),
    "KVStoreCacheChurn": [
        Case(churn(2_000, 98), churn(10_000, 98), minutes=120),
        Case(churn(2_000, 98), churn(2_000, 60), minutes=120),
    ],
    "KVStoreVolumeStalled": [gauge("kvstore_node_volume_stalled", 1, 0, f'{ON},volume="nvme0"')],
    "KVStoreWriteBackFailing": [counter("kvstore_write_back_errors_total", 6)],
    "KVStoreWriteBackBacklog": [
        Case(
            {
                f"kvstore_node_write_back_waiting_blocks{{{ON}}}": level(60),
                f'kvstore_volume_blocks{{{ON},tier="dram"}}': level(100),
            },
            {
                f"kvstore_node_write_back_waiting_blocks{{{ON}}}": level(40),
                f'kvstore_volume_blocks{{{ON},tier="dram"}}': level(100),
            },
        )
    ],
    "KVStoreStoresSkipped": [counter("kvstore_store_skipped_no_space_blocks_total", 6)],
    "KVStoreNodeRefused": [gauge("kvstore_metadata_node_refused", 1, 0, f'{ON},node="host-1"')],
    "KVStoreNodeSilent": [gauge("kvstore_metadata_node_heartbeat_age_seconds", 60, 0.4, f'{ON},node="host-1"')],
    "KVStoreProcessDown": [
        gauge("up", 0, 1, f'{ON},job="kvstore-node"'),
        Case({f'up{{{ON},job="kvstore-metadata"}}': level(0)}, {f'up{{{ON},job="vllm"}}': level(0)}),
    ],
    "KVStoreMetadataUnreachable": [gauge("kvstore_node_registered", 0, 1)],
    "KVStoreCorruptBlocks": [
        counter(f"kvstore_{name}_total", 1)
        for name in (
            "nvme_corrupt_blocks",
            "arena_corrupt_blocks",
            "transport_peer_corrupt_blocks",
            "write_back_corrupt_blocks",
            "quarantined_blocks",
        )
    ],
    "KVStoreCallersRefused": [
        counter("kvstore_rpc_errors_total", 6, 1, f'{ON},kind="unauthenticated"'),
        Case(
            {f'kvstore_rpc_errors_total{{{ON},kind="permission_denied"}}': grows(6)},
            {f'kvstore_rpc_errors_total{{{ON},kind="unavailable"}}': grows(6)},
        ),
    ],
    "KVStoreTlsFailures": [counter("kvstore_transport_tls_failures_total", 6, 1)],
    "KVStoreIndexDrift": [counter("kvstore_index_ranges_drifted_total", 10, 1)],
    "KVStoreIndexReadOnly": [
        gauge("kvstore_index_changes_failing_seconds", 20, 0),
        Case(
            {f"kvstore_index_read_only_total{{{ON}}}": grows(1), f"kvstore_index_writable_again_total{{{ON}}}": level(0)},
            {f"kvstore_index_read_only_total{{{ON}}}": grows(1), f"kvstore_index_writable_again_total{{{ON}}}": grows(1)},
        ),
    ],
    "KVStoreIndexDiskFilling": disk("kvstore_index_disk"),
    "KVStoreIndexShardAway": [gauge("kvstore_index_shard_up", 0, 1, f'{ON},shard="2"')],
    "KVStoreIndexShardWithoutReplica": [gauge("kvstore_index_shard_replicas", 0, 1, f'{ON},shard="2"')],
    "KVStoreIndexMemoryFilling": [
        Case({USED: level(95e6), MOST: level(100e6)}, {USED: level(85e6), MOST: level(100e6)}),
        Case({USED: level(95e6), MOST: level(100e6)}, {USED: level(95e6)}),  # the quiet shard is unlimited
    ],
    "KVStoreIndexChangesRefused": [
        counter("kvstore_index_changes_refused_total", 1, labels=f'{ON},reason="{reason}"') for reason in ("full", "other")
    ],
    "KVStorePublishFailing": [gauge("kvstore_node_publish_failing_seconds", 60, 10)],
    "KVStoreOrdersUnreadable": [counter("kvstore_metadata_orders_unreadable_total", 1)],
    "KVStoreHitRatioCollapse": [
        Case(  # 100 blocks per second are looked up; half of them were found for six hours, none since
            {f"{HITS}{{{ON}}}": "0+3000x360 1080000x40", f"{KEYS}{{{ON}}}": "0+6000x400"},
            {f"{HITS}{{{ON}}}": "0+3000x400", f"{KEYS}{{{ON}}}": "0+6000x400"},
            minutes=395,
        ),
        Case(  # the quiet case has too few lookups for a ratio
            {f"{HITS}{{{ON}}}": "0+3000x360 1080000x40", f"{KEYS}{{{ON}}}": "0+6000x400"},
            {f"{HITS}{{{ON}}}": "0+3x360 1080x40", f"{KEYS}{{{ON}}}": "0+6x400"},
            minutes=395,
        ),
    ],
    "KVStoreLoadsFail": [
        *(
            share(MISSED, "kvstore_node_load_blocks_total", 6, 4, f',reason="{reason}"')
            for reason in ("corrupt", "unavailable", "timeout", "no_space", "abandoned")
        ),
        Case(
            {f'{MISSED}{{{ON},reason="timeout"}}': grows(6), f"kvstore_node_load_blocks_total{{{ON}}}": grows(100)},
            {
                f'{MISSED}{{{ON},reason="miss"}}': grows(50),
                f'{MISSED}{{{ON},reason="draining"}}': grows(50),
                f"kvstore_node_load_blocks_total{{{ON}}}": grows(100),
            },
        ),
        share("vllm:kvstore_load_missing_blocks_total", "vllm:kvstore_load_blocks_total", 6, 4),
    ],
    "KVStorePlansFail": [share("kvstore_metadata_replans_total", "kvstore_metadata_plans_total", 6, 4)],
    "KVStoreBugs": [
        *(
            counter(f"kvstore_{name}_total", 1)
            for name in ("rpc_unexpected_errors", "write_back_bugs", "publish_bugs", "undeclared_events")
        ),
        counter("vllm:kvstore_bugs_total", 1),
    ],
}


def test_every_alert_has_cases() -> None:
    assert list(CASES) == [rule["alert"] for rule in alerts()]


@pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool on this machine")
@pytest.mark.parametrize("alert", CASES)
def test_alert_fires_on_its_cause_only(alert: str, tmp_path: Path) -> None:
    document = {
        "rule_files": [str(ALERTS)],
        "evaluation_interval": "1m",
        "tests": [
            {
                "interval": "1m",
                "input_series": [{"series": name, "values": values} for name, values in series.items()],
                "promql_expr_test": [
                    {
                        "expr": 'sum by (alertname) (ALERTS{alertstate="firing"})',
                        "eval_time": f"{case.minutes}m",
                        "exp_samples": [{"labels": f'{{alertname="{alert}"}}', "value": 1}] if fires else [],
                    }
                ],
            }
            for case in CASES[alert]
            for fires, series in ((True, case.firing), (False, case.quiet))
        ],
    }
    path = tmp_path / "cases.yml"
    path.write_text(yaml.safe_dump(document))
    done = subprocess.run(["promtool", "test", "rules", str(path)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
