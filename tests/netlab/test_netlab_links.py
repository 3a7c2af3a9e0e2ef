"""Command lines of ``tc``, and the arithmetic of recordings: no root needed."""

from __future__ import annotations

import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.core.errors import InvalidArgument, Unsupported
from kvstore.netlab import lab as netlab
from kvstore.netlab import netns
from kvstore.netlab.bed import LabBed
from kvstore.netlab.links import LinkSettings, LinkTrafficClass, bucket_bytes, change_lines
from kvstore.netlab.traffic import LabNic, Series

PLAIN = LinkSettings(1000)
CLASSES = LinkSettings(1000, LinkTrafficClass(8, 10, 900))


@given(st.floats(1, 100_000))
def test_a_bucket_holds_one_segment_and_never_long_bursts(rate_mbit: float) -> None:
    bucket = bucket_bytes(rate_mbit)
    assert 65_536 + 9_000 < bucket <= 256 << 10
    assert bucket <= max(80 << 10, rate_mbit * 125 * 2)


def test_only_what_differs_is_changed() -> None:
    for settings in (LinkSettings(None), PLAIN, CLASSES):
        assert change_lines("snic", settings, settings) == []
    assert [line.split()[:2] for line in change_lines("snic", LinkSettings(None), PLAIN)] == [["qdisc", "replace"]]
    assert "rate 1000000000bit burst 250000 latency 20ms" in change_lines("snic", LinkSettings(None), PLAIN)[0]
    assert change_lines("snic", PLAIN, LinkSettings(None)) == ["qdisc del dev snic root"]


def test_classes_come_and_go_as_a_whole() -> None:
    lines = change_lines("cnic", PLAIN, CLASSES)
    assert lines[0] == "qdisc replace dev cnic root handle 1: htb default 20"
    assert "match ip dsfield 0x20 0xfc flowid 1:10" in lines[-1]
    assert change_lines("cnic", CLASSES, PLAIN)[0] == "qdisc del dev cnic root"
    assert change_lines("cnic", CLASSES, LinkSettings(None)) == ["qdisc del dev cnic root"]
    assert change_lines("cnic", CLASSES, LinkSettings(2000, CLASSES.kv))[0] == "qdisc del dev cnic root"


@pytest.mark.parametrize("rate", [0, 0.5, -3, 1e6, float("nan"), float("inf")])
def test_impossible_rates(rate: float) -> None:
    with pytest.raises(InvalidArgument):
        LinkSettings(rate)
    with pytest.raises(InvalidArgument):
        netlab.HostSpec("a", rate)


@pytest.mark.parametrize(
    "kv",
    [
        LinkTrafficClass(0, 10),
        LinkTrafficClass(64, 10),
        LinkTrafficClass(8, 10, 1001),
        LinkTrafficClass(8, 10, 5),
        LinkTrafficClass(8, 0),
        LinkTrafficClass(8, 1000),
    ],
)
def test_impossible_classes(kv: LinkTrafficClass) -> None:
    with pytest.raises(InvalidArgument):
        LinkSettings(1000, kv)
    with pytest.raises(InvalidArgument):
        LinkSettings(None, CLASSES.kv)


@pytest.mark.parametrize("name", ["", "switch", "a/b", "a b", "x" * 65, "a;reboot"])
def test_impossible_names(name: str) -> None:
    with pytest.raises(InvalidArgument):
        netlab.HostSpec(name)


def test_two_hosts_of_one_name() -> None:
    with pytest.raises(InvalidArgument):
        netlab.NetLab([netlab.HostSpec("a"), netlab.HostSpec("a")])
    with pytest.raises(InvalidArgument):
        netlab.NetLab([])


def test_a_series_of_a_steady_flow() -> None:
    at_s = np.array([10.0, 10.3, 11.0, 11.1, 12.5])
    steady = Series(LabNic("a", "storage"), at_s, ((at_s - 10) * 1e6).astype(np.int64), np.zeros(5, np.int64))
    times, rates = steady.mbit("rx")
    assert np.allclose(rates, 8.0)
    assert np.allclose(times, [0.15, 0.65, 1.05, 1.8])
    assert np.allclose(steady.bytes_in_windows("rx", 1.0), [1e6, 1e6])
    assert steady.total_bytes("rx") == 2_500_000
    assert steady.total_bytes("tx") == 0


def test_a_series_without_samples() -> None:
    empty = Series(LabNic("a", "storage"), np.zeros(0), np.zeros(0, np.int64), np.zeros(0, np.int64))
    assert empty.total_bytes("rx") == 0
    assert empty.bytes_in_windows("rx", 1.0).size == 0
    assert empty.mbit("rx")[0].size == 0


def test_without_root_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert netlab.available() == "network namespaces need root"


def test_without_iproute2_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(netns, "_SBIN", "")
    monkeypatch.setenv("PATH", "")
    assert netlab.available() == "ip is not installed: install iproute2"
    with pytest.raises(Unsupported):
        netns.batch("ip", ["link"])


# ---------------------------------------------------------------- beds
def test_a_bed_has_its_hosts_and_its_bound() -> None:
    bed = LabBed(prefill=1, decode=2)
    assert [host.name for host in bed.hosts()] == ["metadata", "prefill-0", "decode-0", "decode-1", "storage-0"]
    verdict = bed.verdict()
    # storage at an eighth of the compute links, as in the paper: 1/7 <= P/D <= 7/2
    assert verdict.lower == pytest.approx(1 / 7)
    assert verdict.upper == pytest.approx(3.5)
    assert verdict.free
    assert verdict.sentence in bed.describe()


def test_a_bed_outside_the_bound_says_so() -> None:
    assert not LabBed(snic_mbit=2000, cnic_mbit=4000).verdict().free
    assert not LabBed(dram_bytes_per_s=100e6).verdict().free
    assert LabBed(prefill=4, decode=5).storage_bound is False
    assert "slower than the storage links" in LabBed(prefill=4, decode=5).describe()
    with pytest.raises(InvalidArgument):
        LabBed(decode=0)
    with pytest.raises(InvalidArgument):
        LabBed(snic_mbit=0)
