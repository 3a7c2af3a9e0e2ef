"""Labs of real namespaces: rates, isolation, faults, and complete removal."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from netlab_peers import Peer, assert_rate, measure_mbit

from kvstore.core.errors import Conflict, Internal, InvalidArgument, NotFound
from kvstore.netlab import netns, traffic
from kvstore.netlab.lab import HostSpec, LabHost, NetLab
from kvstore.netlab.traffic import LabNic, Network
from support.wait import wait_until

MakeLab = Callable[..., NetLab]
WAIT_S = 20.0
KV_DSCP = 8


def pair(make_lab: MakeLab, snic: float | None = 60, cnic: float | None = 120) -> tuple[NetLab, LabHost, LabHost]:
    lab = make_lab(HostSpec("a", snic, cnic), HostSpec("b", snic, cnic))
    return lab, lab.host("a"), lab.host("b")


def ping_ms(source: LabHost, target: LabHost, network: Network, count: int = 3, timeout_s: float = 10.0) -> list[float] | str:
    """Sorted round trips, or the error."""
    server = Peer(target, "echo", target.ip(network))
    client = Peer(source, "ping", target.ip(network), server.line(), count, timeout_s)
    answer: list[float] | str = client.line()
    server.end()
    client.end()
    return answer


def assert_exact(mbit: float, source: LabHost, target: LabHost, network: Network) -> None:
    assert_rate(0.9 * mbit, 1.05 * mbit, source, target, network)


def test_rates_are_exact(make_lab: MakeLab) -> None:
    lab, a, b = pair(make_lab)
    before = lab.sample()
    assert_exact(60, a, b, "storage")
    assert_exact(60, b, a, "storage")
    between = lab.sample()
    assert_exact(120, a, b, "compute")
    after = lab.sample()
    # each network carried its own traffic and nothing else
    assert between[LabNic("b", "storage")].rx_bytes - before[LabNic("b", "storage")].rx_bytes >= 4 << 20
    assert between[LabNic("a", "storage")].tx_bytes - before[LabNic("a", "storage")].tx_bytes >= 4 << 20
    assert between[LabNic("b", "compute")].rx_bytes - before[LabNic("b", "compute")].rx_bytes < 4096
    assert after[LabNic("b", "compute")].rx_bytes - between[LabNic("b", "compute")].rx_bytes >= 4 << 20
    assert after[LabNic("b", "storage")].rx_bytes - between[LabNic("b", "storage")].rx_bytes < 4096


def test_a_rate_changes_while_it_runs(make_lab: MakeLab) -> None:
    _, a, b = pair(make_lab)
    b.shape("storage", 30)
    assert_exact(30, a, b, "storage")
    b.shape("storage", None)
    assert_exact(60, a, b, "storage")  # what a may send
    a.shape("storage", None)
    assert_rate(75, math.inf, a, b, "storage")
    with pytest.raises(InvalidArgument):
        a.shape("storage", 0)


def test_networks_are_isolated(make_lab: MakeLab) -> None:
    _, a, b = pair(make_lab)
    b.cut("compute")
    assert isinstance(ping_ms(a, b, "storage"), list)
    assert ping_ms(a, b, "compute", timeout_s=0.3) == "TimeoutError"
    # the compute address cannot be had over the storage network either
    route = ["ip", "route", "replace", f"{b.compute_ip}/32", "via", b.storage_ip]
    a.run(route)
    assert isinstance(ping_ms(a, b, "storage"), list)
    b.restore("compute")
    a.run(["ip", "route", "del", f"{b.compute_ip}/32"])
    assert isinstance(ping_ms(a, b, "compute"), list)


def test_netlab_cut_link_stalls_until_restored(make_lab: MakeLab) -> None:
    lab, a, b = pair(make_lab)
    sink = Peer(b, "sink", b.storage_ip)
    sender = Peer(a, "send", b.storage_ip, sink.line(), 24 << 20, 0)
    wait_until(lambda: lab.sample()[LabNic("b", "storage")].rx_bytes > 1 << 20, "traffic flows")
    b.cut("storage")
    stalled = lab.sample()[LabNic("b", "storage")]
    assert ping_ms(a, b, "storage", timeout_s=0.3) == "TimeoutError"
    assert isinstance(ping_ms(a, b, "compute"), list)
    assert lab.sample()[LabNic("b", "storage")].rx_bytes == stalled.rx_bytes < 24 << 20
    b.restore("storage")
    assert sink.line()["bytes"] == 24 << 20
    sink.end()
    sender.end()


def test_kill_ends_all_of_one_host(make_lab: MakeLab) -> None:
    _, a, b = pair(make_lab)
    family = a.popen(["sh", "-c", "sleep 1000 & sleep 1000 & wait"])
    other = b.popen(["sleep", "1000"])
    wait_until(lambda: len(netns.pids_inside(a.namespace)) == 3, "the shell has its children")
    assert a.kill() == 3
    assert family.wait(WAIT_S) == -signal.SIGKILL
    assert netns.pids_inside(a.namespace) == []
    assert other.poll() is None
    b.kill()
    other.wait(WAIT_S)


def test_programs_on_a_host(make_lab: MakeLab) -> None:
    _, a, _ = pair(make_lab)
    assert a.run(["cat"], stdin=b"to and fro") == b"to and fro"
    with pytest.raises(Internal, match="code 3 on host a: because"):
        a.run(["sh", "-c", "echo because >&2; exit 3"])
    with pytest.raises(subprocess.TimeoutExpired):
        a.run(["sleep", "1000"], timeout_s=0.1)
    with pytest.raises(FileNotFoundError):
        a.popen(["no-such-program"])


def test_netlab_two_labs_are_independent(make_lab: MakeLab) -> None:
    first, a, b = pair(make_lab)
    second, c, d = pair(make_lab, 50, 50)
    assert (a.storage_ip, a.compute_ip) == (c.storage_ip, c.compute_ip)
    server = Peer(b, "echo", b.storage_ip)
    port = server.line()
    stranger = Peer(c, "ping", b.storage_ip, port, 1, 5.0)
    assert stranger.line() == "ConnectionRefusedError"
    assert_exact(50, c, d, "storage")
    assert first.sample()[LabNic("b", "storage")].rx_bytes < 4096
    second.close()
    friend = Peer(a, "ping", b.storage_ip, port, 1, 5.0)
    assert isinstance(friend.line(), list)
    for peer in (server, stranger, friend):
        peer.end()


def test_a_lab_is_removed_with_what_runs_in_it(make_lab: MakeLab) -> None:
    lab, a, _ = pair(make_lab)
    process = a.popen(["sleep", "1000"])
    with pytest.raises(Conflict):
        lab.__enter__()
    lab.close()
    assert process.wait(WAIT_S) == -signal.SIGKILL
    assert netns.namespaces_of(lab.name) == []
    with pytest.raises(NotFound):
        lab.sample()
    with pytest.raises(NotFound):
        lab.record()
    lab.close()


def test_unknown_names(make_lab: MakeLab) -> None:
    lab, _, _ = pair(make_lab)
    with pytest.raises(NotFound):
        lab.host("c")
    with lab.record() as recording, pytest.raises(NotFound):
        recording.series("c", "storage")


def test_a_refused_command_says_what_and_why(make_lab: MakeLab) -> None:
    _, a, _ = pair(make_lab)
    with pytest.raises(netns.IprouteFailed) as caught:
        netns.batch("ip", ["link set lo up", "link set nothing up"], a.namespace)
    assert caught.value.command == f"ip -n {a.namespace} link set nothing up"
    assert "nothing" in caught.value.stderr


# ---------------------------------------------------------------- recordings
def test_netlab_recording_counts_traffic_per_nic(make_lab: MakeLab) -> None:
    lab = make_lab(HostSpec("s", 400, 400), HostSpec("p", 200, 400), HostSpec("d", 200, 400))
    with lab.record(0.01) as recording:
        measure_mbit(lab.host("s"), lab.host("p"), "storage", megabytes=8)
        assert recording.series("p", "storage").total_bytes("rx") > 0
        measure_mbit(lab.host("s"), lab.host("d"), "storage", megabytes=4)
    assert set(recording.nics) == {LabNic(host, network) for host in "spd" for network in ("storage", "compute")}
    to_p, to_d, from_s = (recording.series(host, "storage") for host in "pds")
    assert 8 << 20 < to_p.total_bytes("rx") < 1.02 * (8 << 20)
    assert 4 << 20 < to_d.total_bytes("rx") < 1.02 * (4 << 20)
    assert from_s.total_bytes("tx") == pytest.approx(12 << 20, rel=0.02)
    # one after the other: at each moment one of the two did all of it
    assert recording.max_over_avg("storage", ["p", "d"], window_s=0.02) > 1.5
    assert recording.max_over_avg("compute", ["p", "d"]) == 1.0


def test_netlab_long_recording_is_thinned_without_loss(make_lab: MakeLab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traffic, "_MAX_SAMPLES", 16)
    lab, a, b = pair(make_lab)
    with lab.record(0.001) as recording:
        measure_mbit(a, b, "storage", megabytes=4)
    series = recording.series("b", "storage")
    assert len(series.at_s) <= 16
    assert (series.at_s[1:] > series.at_s[:-1]).all()
    assert series.total_bytes("rx") > 4 << 20


# ---------------------------------------------------------------- the class of KV
def rtt_beside_bulk(a: LabHost, b: LabHost, tos: int) -> list[float]:
    """Round trips of foreign traffic while KV fills the link, both ways."""
    sinks = [Peer(host, "sink", host.compute_ip) for host in (a, b)]
    senders = [
        Peer(far, "send", host.compute_ip, sink.line(), 0, tos) for far, host, sink in ((b, a, sinks[0]), (a, b, sinks[1]))
    ]
    ping_ms(a, b, "compute", count=100)  # until the queues are full
    times = ping_ms(a, b, "compute", count=300)
    for peer in (*senders, *sinks):
        peer.end()
    assert isinstance(times, list)
    return times


def test_marked_traffic_yields_to_other_traffic(make_lab: MakeLab, record_property: Callable[[str, object], None]) -> None:
    _, a, b = pair(make_lab)
    tos = KV_DSCP << 2
    alike = rtt_beside_bulk(a, b, tos)
    for host in (a, b):
        host.classify("compute", kv_dscp=KV_DSCP)
    yielding = rtt_beside_bulk(a, b, tos)
    record_property("p99_ms", {"alike": alike[-3], "classified": yielding[-3]})
    assert yielding[len(yielding) // 2] < alike[len(alike) // 2]
    for host in (a, b):
        host.unclassify("compute")
    assert_exact(120, a, b, "compute")


def test_a_class_has_a_ceiling(make_lab: MakeLab) -> None:
    _, a, b = pair(make_lab)
    a.classify("compute", kv_dscp=KV_DSCP, kv_ceil_mbit=30)
    assert_rate(0, 32, a, b, "compute", tos=KV_DSCP << 2)
    assert_rate(45, 126, a, b, "compute")
    a.classify("compute", kv_dscp=KV_DSCP, kv_ceil_mbit=60)
    assert_rate(32, 63, a, b, "compute", tos=KV_DSCP << 2)
    a.shape("compute", 90)
    assert a.settings("compute").kv is not None
    with pytest.raises(InvalidArgument):
        a.shape("compute", None)
    with pytest.raises(InvalidArgument):
        a.classify("compute", kv_dscp=0)
    a.unclassify("compute")
    a.shape("compute", None)
    with pytest.raises(InvalidArgument):
        a.classify("compute", kv_dscp=KV_DSCP)


# ---------------------------------------------------------------- owners that die
OWNER = """
import subprocess, sys, time
from kvstore.netlab.lab import HostSpec, NetLab
lab = NetLab([HostSpec("a", 100, 100)]).__enter__()
lab.host("a").popen(["sh", "-c", "sleep 1000 & sleep 1000"], stdout=subprocess.DEVNULL)
print(lab.name, lab._guard._process.pid, flush=True)
time.sleep(1000)
"""


def start_owner() -> tuple[subprocess.Popen[bytes], str, int]:
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE)
    assert owner.stdout is not None
    lab, guard = owner.stdout.readline().decode().split()
    return owner, lab, int(guard)


def test_netlab_killed_owner_leaves_nothing(lab_possible: None) -> None:
    owner, lab, _ = start_owner()
    inside = [pid for name in netns.namespaces_of(lab) for pid in netns.pids_inside(name)]
    assert inside
    assert lab not in netns.stale_labs()
    owner.kill()
    owner.communicate(timeout=WAIT_S)
    wait_until(lambda: netns.namespaces_of(lab) == [], "the guard removes the lab")
    wait_until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in inside), "its processes are gone")


def test_netlab_leftovers_of_dead_guard_are_removed(lab_possible: None, make_lab: MakeLab) -> None:
    for way in ("by hand", "at the next start", "by several at once"):
        owner, lab, guard = start_owner()
        os.kill(guard, signal.SIGKILL)
        owner.kill()
        owner.communicate(timeout=WAIT_S)
        assert lab in netns.stale_labs()
        if way == "by hand":
            clean = [sys.executable, "-m", "kvstore.netlab.lab", "clean"]
            said = subprocess.run(clean, capture_output=True, text=True, timeout=WAIT_S, check=True)
            assert f"removed {lab}" in said.stdout
        elif way == "at the next start":
            make_lab(HostSpec("next"))
        else:
            with ThreadPoolExecutor(4) as pool:
                assert any(lab in removed for removed in pool.map(lambda _: netns.remove_stale(), range(4)))
        assert netns.namespaces_of(lab) == []
