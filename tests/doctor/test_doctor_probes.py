"""Probes on this host: they answer in time, change nothing, and a failing probe does not affect the others."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from certificates import make_certificates
from kvstore.core.types import NodeId, VolumeId
from kvstore.doctor import collect as collecting
from kvstore.doctor import host_probes
from kvstore.doctor.certificates import certificate_findings
from kvstore.doctor.collect import collect, run_probe
from kvstore.doctor.contract import Level
from kvstore.doctor.facts import ProbeResults, Requirements, Section, WantedNixl, WantedTls, WantedVolume
from kvstore.doctor.findings import findings
from kvstore.doctor.servers.local_nodes import sockets_in
from kvstore.tiers.nvme.ownership import claim
from kvstore.tiers.nvme.slab import NvmeSlab

SMALL = Requirements(dram_bytes=1 << 20)


def test_probes_answer_on_this_host() -> None:
    facts = collect(SMALL)
    assert {name: section.error for name, section in facts.sections.items()} == dict.fromkeys(
        ("system", "gpu", "memory", "network", "disks")
    )
    assert facts["network"].flag("sysfs") is True
    assert facts["memory"].flag("root_raises_limits") is not None
    assert 0 < (facts["memory"].number("available_bytes") or 0) < (facts["memory"].number("total_bytes") or 0)
    assert facts["memory"].number("total_bytes") == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert facts["system"].pairs("packages")["numpy"]
    assert facts["network"].number("tcp_rmem")
    assert findings(facts, SMALL)


def test_nixl_probe_unavailable_transport_fails() -> None:
    wanted = Requirements(dram_bytes=1 << 20, nixl=WantedNixl(required=True, devices="no-such-device", transports="tcp"))
    probe = collect(wanted, timeout_s=60.0)["nixl"]
    assert probe.error is None
    assert probe.flag("works") is False
    assert probe.text("why")


def tree(folder: Path) -> dict[str, tuple[int, int, int]]:
    """List the files of a folder with the attributes that a change would affect."""
    paths = [folder, *folder.rglob("*")]
    return {str(path): (stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns) for path in paths if (stat := path.stat())}


def test_folder_probe_changes_nothing(tmp_path: Path) -> None:
    """Probe a volume, an empty folder, a missing folder and a file."""
    slab = NvmeSlab.open(tmp_path / "volume", volume_id=VolumeId("v"), capacity_bytes=32 << 20)
    assert list(slab.recover()) == []
    slab.close()
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_bytes(b"")
    before = tree(tmp_path)
    names = ("volume", "empty", "not/there", "file")
    wanted = Requirements(
        dram_bytes=1 << 20, volumes=[WantedVolume(tmp_path / name, 1 << 20) for name in names], mounts=[tmp_path / "volume"]
    )
    facts = collect(wanted)
    assert tree(tmp_path) == before
    volume, empty, missing, file = facts.all("volume")
    assert [section.error for section in (volume, empty, missing, file)] == [None] * 4
    assert (volume.number("slab_bytes") or 0) > 32 << 20
    assert [section.flag("exists") for section in (volume, empty, missing, file)] == [True, True, False, False]
    assert missing.text("nearest") == str(tmp_path)
    assert volume.text("direct") == empty.text("direct")  # tried on a slab or an unnamed file of the same file system
    assert len(facts.all("gds")) == 4
    assert facts.all("mount")[0].flag("slot_manifest") is True


def test_volume_probe_names_adopter(tmp_path: Path) -> None:
    slab = NvmeSlab.open(tmp_path, volume_id=VolumeId("n/nvme0"), capacity_bytes=1 << 20)
    assert list(slab.recover()) == []
    assert volume_found(tmp_path).text("slab_owner") is None
    slab.close()
    assert claim(tmp_path, 1, NodeId("other"))
    assert volume_found(tmp_path).text("slab_owner") == "other"


def test_folders_on_one_file_system_name_one_device(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    a, b = volume_found(tmp_path / "a"), volume_found(tmp_path / "not" / "there")
    assert a.number("device") == b.number("device") == tmp_path.stat().st_dev
    assert a.text("disk") == b.text("disk")
    assert volume_found(Path("/proc")).number("device") != a.number("device")


def certificates_found(*files: Path | str) -> Section:
    return Section(host_probes.certificates(*map(str, files)))


def test_certificates_valid_have_expiry(tmp_path: Path) -> None:
    made = make_certificates(tmp_path)
    found = certificates_found(made.ca, made.cert, made.key)
    ca, cert = found.sections("certificates")
    assert (ca.text("file"), cert.text("file")) == (str(made.ca), str(made.cert))
    assert (cert.number("ends") or 0) > time.time()
    assert cert.text("names") == "kvstore"
    wanted = Requirements(dram_bytes=1, tls=[WantedTls("node", made.ca, made.cert, made.key)])
    now_s = time.time()
    ends = cert.number("ends") or 0
    facts = ProbeResults({"tls:0": found})
    for moment, level in ((ends - 40 * 86_400, Level.OK), (ends - 86_400, Level.WARNING), (ends + 1, Level.MISSING)):
        (finding,) = [one for one in certificate_findings(facts, wanted, moment) if str(made.cert) in one.message]
        assert finding.level is level
    assert collect(wanted)["tls:0"].sections("certificates") == found.sections("certificates")
    assert now_s < ends


def test_certificates_mismatched_are_reported(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    made, other = make_certificates(tmp_path), make_certificates(tmp_path / "other")
    wanted = Requirements(dram_bytes=1, tls=[WantedTls("node", made.ca, made.cert, other.key)])
    for files, words in (
        ((made.ca, made.cert, other.key), "KEY_VALUES_MISMATCH"),
        ((tmp_path / "none.pem", "", ""), "No such file"),
        ((made.key, "", ""), "cannot be used"),
    ):
        found = certificates_found(*files)
        assert words in (found.text("broken") or ""), found
        (finding,) = certificate_findings(ProbeResults({"tls:0": found}), wanted, time.time())
        assert finding.level is Level.MISSING


def test_node_sockets_stale_ones_have_error(tmp_path: Path) -> None:
    folder = Path(tempfile.mkdtemp(prefix="kvd-", dir="/tmp"))  # socket paths must be short
    try:
        with socket.socket(socket.AF_UNIX) as listening, socket.socket(socket.AF_UNIX) as left:
            listening.bind(str(folder / "a.sock"))
            listening.listen()
            left.bind(str(folder / "b.sock"))
            (folder / "c.sock").write_text("no socket")
            (a, b), closed = sockets_in([folder, folder / "none", tmp_path])
        assert (a.path.name, a.process, a.error) == ("a.sock", os.getpid(), None)
        assert a.open_files is None or a.open_files > 0
        assert (b.path.name, b.error) == ("b.sock", "Connection refused")
        assert closed == []
    finally:
        shutil.rmtree(folder)


def volume_found(path: Path) -> Section:
    return Section(host_probes.folder(str(path)))


def test_folder_probe_file_in_path_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "nowhere").symlink_to(tmp_path / "gone")
    for name, below in (("file", ""), ("file", "under/it"), ("nowhere", "")):
        found = volume_found(tmp_path / name / below)
        assert found.text("in_the_way") == str(tmp_path / name)
        assert found.text("nearest") == str(tmp_path)
    (tmp_path / "link").symlink_to(tmp_path)
    for fine in ("link", "not/there", ""):
        assert volume_found(tmp_path / fine).text("in_the_way") is None


@pytest.mark.parametrize("content", [b"", b"x" * 20_000, bytes(20_000)])
def test_slab_invalid_is_reported(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "slab.kv").write_bytes(content)
    assert volume_found(tmp_path).text("slab_damage")
    wanted = Requirements(dram_bytes=1 << 20, volumes=[WantedVolume(tmp_path, 1 << 20)], gds="off")
    levels = {finding.level for finding in findings(collect(wanted), wanted) if finding.area == "storage"}
    assert levels == {Level.MISSING}


def test_slab_that_is_folder_is_reported(tmp_path: Path) -> None:
    (tmp_path / "slab.kv").mkdir()
    assert volume_found(tmp_path).text("slab_damage") == "Is a directory"


@pytest.mark.skipif(os.geteuid() != 0, reason="another user is needed who may not enter")
@pytest.mark.parametrize("below", ["", "a/b"])
def test_folder_without_access_is_reported(below: str, tmp_path: Path) -> None:
    """Probe in an unprivileged child process, because a new interpreter of that user may not find its modules."""
    top = Path(tempfile.mkdtemp())
    reading, writing = os.pipe()
    try:
        top.chmod(0o755)
        (top / "closed").mkdir(mode=0o700)
        child = os.fork()
        if child == 0:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            try:
                os.write(writing, json.dumps(host_probes.folder(str(top / "closed" / below))).encode())
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        os.close(writing)
        with os.fdopen(reading) as said:
            found = Section(json.load(said))
    finally:
        shutil.rmtree(top)
    assert found.flag("closed") is True
    assert found.text("nearest") == str(top / "closed")
    assert found.flag("exists") is (below == "")


def test_file_system_read_only_is_reported(tmp_path: Path) -> None:
    """Use a new mount namespace, and a path with a blank."""
    place = tmp_path / "read only"
    place.mkdir()
    script = 'mount -t tmpfs -o ro none "$1" || exit 77; exec "$0" -m kvstore.doctor.host_probes folder "$1/volume"'
    command = ["unshare", "--mount", "bash", "-c", script, sys.executable, str(place)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0 and not done.stdout:
        pytest.skip(f"NOT TESTED ON A READ-ONLY MOUNT: {done.stderr.strip()[:100]}")
    found = Section(json.loads(done.stdout))
    assert found.flag("read_only") is True
    assert found.text("mount") == str(place)
    assert volume_found(tmp_path).flag("read_only") is False


def test_volume_read_only_is_reported(tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0o500)
    facts = collect(Requirements(dram_bytes=1, volumes=[WantedVolume(tmp_path / "closed", 1)], gds="off"))
    assert facts.all("volume")[0].flag("writable") is (os.geteuid() == 0)  # root may write regardless of the mode
    assert facts.all("gds") == []


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import time; time.sleep(600)", "gave no answer within 1 s"),
        ("import os; os.abort()", "failed with code -6: it said nothing"),
        ("raise OSError('no such driver')", "failed with code 1: OSError: no such driver"),
        ("print('nonsense')", "failed with code 0: it said nothing"),
        ("print('[1]')", "failed with code 0: it said nothing"),
        ("print('{\"a\": 1}'); raise SystemExit(3)", "failed with code 3: it said nothing"),
        ("", "failed with code 0: it said nothing"),
    ],
)
def test_probe_failure_has_error(code: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_probe.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    section = run_probe("broken_probe", [], 1.0 if "sleep" in code else 60.0)
    assert section.error == said
    assert section.said == {}


def test_probe_output_before_answer_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "loud_probe.py").write_text("print('a library says hello'); print('{\"a\": 1}')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert run_probe("loud_probe", [], 60.0).number("a") == 1


def test_all_probes_failed_still_has_findings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(collecting, "HOST", "no.such.module")
    monkeypatch.setattr(collecting, "GDS", "no.such.module")
    monkeypatch.setattr(collecting, "NIXL", "no.such.module")
    wanted = Requirements(dram_bytes=1, volumes=[WantedVolume(tmp_path, 1)], mounts=[tmp_path], nixl=WantedNixl())
    facts = collect(wanted)
    assert all(section.error for section in facts.sections.values())
    found = findings(facts, wanted)
    areas = {"software", "GPU", "GPUDirect Storage", "storage", "memory", "network", "NIXL"}
    assert {finding.area for finding in found} == areas
    monkeypatch.setattr("sys.executable", "/no/such/python")
    assert {section.error for section in collect(wanted).sections.values()} == {"cannot be started: No such file or directory"}
