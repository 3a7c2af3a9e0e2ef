"""Configuration: precedence, provenance, and errors with a fix."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import get_args

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, SecretStr, ValidationError

from kvstore.cli.app import root
from kvstore.cli.support import build_config, folders
from kvstore.config.model import Config
from kvstore.config.node import NodeSection
from kvstore.config.sources import Provenance, leaves, load_config, parse_assignment
from kvstore.config.values import format_duration_ms, format_size, parse_duration_ms, parse_memory, parse_size
from kvstore.core.errors import InvalidArgument
from kvstore.embedded.cluster import NodeSpec
from kvstore.process.memory.host_memory import memory_total
from kvstore.process.tls import TlsConfig
from kvstore.tiers.eviction.policy import POLICY_NAMES


def load(
    file: str | None = None, environment: dict[str, str] | None = None, flags: tuple[str, ...] = (), *, folder: Path | None = None
) -> tuple[Config, Provenance]:
    path = None
    if file is not None:
        assert folder is not None
        path = folder / "kvstore.toml"
        path.write_text(file)
    return load_config(path, environment, [parse_assignment(flag) for flag in flags], default_files=())


@pytest.mark.parametrize(
    ("text", "size"),
    [("64MiB", 64 << 20), ("4GB", 4 * 10**9), (" 1.5 KiB ", 1536), ("0", 0), (17, 17), ("1tib", 1 << 40), ("12b", 12)],
)
def test_parse_size_valid(text: object, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "x", "-1", -1, "1.5", "4 QiB", "1e3", True, None, 1.5, "9" * 40])
def test_parse_size_invalid_raises(text: object) -> None:
    with pytest.raises(ValueError, match="a size"):
        parse_size(text)


@pytest.mark.parametrize(("text", "unit"), [("64Gb", "GB"), ("1 Mib", "MiB")])
def test_parse_size_in_bits_names_the_unit_of_bytes(text: str, unit: str) -> None:
    with pytest.raises(ValueError, match=f"bits: write {unit}"):
        parse_size(text)


def test_parse_memory_percent_is_a_part_of_the_host() -> None:
    total = memory_total()
    assert total is not None
    assert parse_memory("50%") == total // 2 >> 20 << 20
    assert parse_memory(" 4 % ") == total * 4 // 100 >> 20 << 20
    assert parse_memory("64MiB") == 64 << 20
    for text in ("0%", "96%", "100%"):
        with pytest.raises(ValueError, match="1% to 95%"):
            parse_memory(text)
    with pytest.raises(ValueError, match="a size looks like"):
        parse_memory("half")


@pytest.mark.parametrize(("text", "ms"), [("500ms", 500), ("2.5s", 2500), ("1m", 60_000), ("2h", 7_200_000), ("0ms", 0)])
def test_parse_duration_valid(text: str, ms: int) -> None:
    assert parse_duration_ms(text) == ms


@pytest.mark.parametrize("text", ["", "5", 5, "5 days", "-1s", "0.5ms", None])
def test_parse_duration_invalid_raises(text: object) -> None:
    with pytest.raises(ValueError, match="a duration"):
        parse_duration_ms(text)


@given(st.integers(0, 1 << 50))
def test_shown_values_parse_back(number: int) -> None:
    assert parse_size(format_size(number)) == number
    assert parse_duration_ms(format_duration_ms(number)) == number


def test_sources_precedence_and_provenance(tmp_path: Path) -> None:
    text = '[node]\ndram = "2GiB"\npolicy = "lru"\nlease = "7s"\n[node.tls]\nca = "/ca.pem"\n'
    config, provenance = load(
        text,
        {"KVSTORE_NODE__DRAM": "3GiB", "KVSTORE_NODE__LEASE": "8s", "KVSTORE_LOG__LEVEL": "debug", "HOME": "/"},
        ("node.dram=4GiB", "node.dram=5GiB"),
        folder=tmp_path,
    )
    assert (config.node.dram_bytes, config.node.lease_ms, config.node.policy, config.log.level) == (5 << 30, 8000, "lru", "debug")
    assert config.node.tls.ca == Path("/ca.pem")
    assert str(provenance["node.dram"]) == "flag --set node.dram"
    assert str(provenance["node.lease"]) == "environment KVSTORE_NODE__LEASE"
    assert str(provenance["node.policy"]) == f"file {tmp_path / 'kvstore.toml'}"
    assert str(provenance["node.listen"]) == "default"
    assert {leaf.key for leaf in leaves(config, provenance)} == set(provenance)


def test_all_three_ways_to_name_volumes(tmp_path: Path) -> None:
    one, _ = load('[node]\nnvme = ["/a:1GiB", {path = "/b", capacity = "2GB", direct = false}]', folder=tmp_path)
    assert [(str(v.path), v.capacity_bytes, v.direct) for v in one.node.nvme] == [("/a", 1 << 30, True), ("/b", 2 * 10**9, False)]
    two, _ = load(environment={"KVSTORE_NODE__NVME": "/a:1GiB, /with:colon:5"})
    assert [(str(v.path), v.capacity_bytes) for v in two.node.nvme] == [("/a", 1 << 30), ("/with:colon", 5)]
    three, _ = load(flags=("node.nvme=", "node.roles=storage,decode"))
    assert three.node.nvme == ()
    assert three.node.roles == ("storage", "decode")


def test_mounts_are_named_by_volume_and_path(tmp_path: Path) -> None:
    one, _ = load('[node]\nmounts = ["s1/nvme0=/a", {volume = "s2/nvme0", path = "/b", direct = false}]', folder=tmp_path)
    assert [str(mount) for mount in one.node.mounts] == ["s1/nvme0=/a", "s2/nvme0=/b (buffered)"]
    two, _ = load(flags=("node.mounts=s1/nvme0=/with=sign, s2/nvme0=/b",))
    assert [(mount.volume, str(mount.path)) for mount in two.node.mounts] == [("s1/nvme0", "/with=sign"), ("s2/nvme0", "/b")]
    assert [mount.volume for mount in build_config.node_config(two).mounts] == ["s1/nvme0", "s2/nvme0"]


def test_environment_foreign_variables_are_ignored() -> None:
    config, _ = load(environment={"KVSTORE_PORT": "tcp://10.0.0.1:7400", "KVSTORE_SERVICE_HOST": "x", "KVSTOREX__A": "1"})
    assert config == Config()


@pytest.mark.parametrize(
    ("flag", "hint"),
    [
        ("node.dramm=1", "did you mean 'node.dram'"),
        ("dram=1", "did you mean 'node.dram'"),
        ("metdata.listen=x", "did you mean 'metadata.listen'"),
        ("node.tls.caa=x", "did you mean 'node.tls.ca'"),
        ("qqqq.zzzz=1", "unknown setting 'qqqq.zzzz'"),
        ("nodee.a=1", "unknown setting 'nodee.a'; `kvstore config` lists all"),
        ("node=1", "'node' is a section, not a setting; name a setting in it, e.g. 'node."),
        ("node.tls=x", "'node.tls' is a section"),
        ("node.prefault=maybe", "write true or false"),
        ("metadata.max_requests=many", "write a whole number"),
        ("node.dram=x", "a size looks like"),
        ("node.lease=5", "takes a unit"),
        ("node.roles=cook", "'prefill', 'decode' or 'storage'"),
        ("node.nvme=/a", "is not PATH:SIZE"),
        ("node.nvme=/a:x", "a size looks like"),
        ("metadata.max_requests=0", "greater than or equal to 1"),
        ("metadata.workers=2", "unknown setting 'metadata.workers'"),
        ("node.dram=0", "greater than 0"),
        ("nonsense", "must look like node.dram=4GiB"),
        ("node.lease=249ms", "250ms or more"),
        ("node.policy=foo", "'reuse-distance', 's3-fifo' or 'lru'"),
        ("node.nvme=/a,b:1GiB", "must not contain a comma"),
        ("node.mounts=/a", "is not VOLUME=PATH such as"),
        ("node.mounts==/a", "is not VOLUME=PATH such as"),
        ("node.node_id=../../evil", "invalid node id"),
        ("node.write_back_to=a/b", "invalid node id"),
    ],
)
def test_invalid_settings_name_fix(flag: str, hint: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        load(flags=(flag,))
    assert hint in str(caught.value)


@pytest.mark.parametrize(
    ("flags", "hint"),
    [
        (("node.node_id=a", "node.write_back_to=a"), "node.write_back_to names this node itself"),
        (("node.write_back_to=b", "node.nvme=/mnt/a:1GiB"), "node.write_back_to is for nodes without volumes"),
        (("node.prefill_buffer=2GiB", "node.dram=1GiB"), "node.prefill_buffer exceeds node.dram"),
        (("node.decode_buffer=2GiB", "node.dram=1GiB"), "node.decode_buffer exceeds node.dram"),
        (("node.roles=",), "node.roles is empty"),
        (("node.nvme=/nowhere/v:1GiB,/nowhere/../nowhere/v:1GiB",), "node.nvme names a folder twice"),
        (("node.nvme=/etc/passwd:32MiB",), "names a file"),
        (("node.nvme=/nowhere/v:1",), "(size=1)"),
    ],
)
def test_implausible_settings_are_rejected(flags: tuple[str, ...], hint: str) -> None:
    config, _ = load(flags=flags)
    with pytest.raises(InvalidArgument) as caught:
        build_config.node_config(config)
    assert hint in str(caught.value)


@pytest.mark.parametrize("node_id", ["", ".", "..", ".a", "../../evil", "a b", "ü", "a/b", "a\n", "a" * 65, "metadata"])
def test_node_id_invalid_is_rejected(node_id: str) -> None:
    with pytest.raises(ValidationError):
        Config.model_validate({"node": {"node_id": node_id}})
    with pytest.raises(InvalidArgument):
        NodeSpec(node_id)


@pytest.mark.parametrize("node_id", ["a", "host-1.rack_2", "0", "-", "A" * 64, "metadata-1"])
def test_node_id_valid_is_accepted(node_id: str) -> None:
    config, _ = load(flags=(f"node.node_id={node_id}",))
    assert build_config.node_config(config).node_id == NodeSpec(node_id).node_id == node_id


def test_the_configuration_knows_all_policies() -> None:
    assert set(get_args(NodeSection.model_fields["policy"].annotation)) == set(POLICY_NAMES)


def test_errors_name_their_source(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="environment KVSTORE_NODE__DRAM"):
        load(environment={"KVSTORE_NODE__DRAM": "lots"})
    with pytest.raises(InvalidArgument, match=r"kvstore\.toml"):
        load("[node]\ndrum = 1", folder=tmp_path)


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ('[[node.nvme]]\npath = "/x"\n', "something is missing ('0.capacity')"),
        ('[[node.nvme]]\npath = "/x"\ncapacity = "1GiB"\nfoo = 1\n', "there is no such setting ('0.foo')"),
        ("data_dir = 5\n", "a path is text in quotes"),
        ("node = 3\n", "'node' is a section"),
        ("[node.dram]\na = 3\n", "did you mean 'node.dram'"),
    ],
)
def test_invalid_files_name_fix(text: str, hint: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument) as caught:
        load(text, folder=tmp_path)
    assert hint in str(caught.value)
    assert "kvstore.toml" in str(caught.value)


@pytest.mark.parametrize("content", [b"[node", b"\xff\xfe", b"x = " + b"[" * 100_000, b"#" * (2 << 20)])
def test_unreadable_files_are_rejected(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "kvstore.toml"
    path.write_bytes(content)
    with pytest.raises(InvalidArgument, match=r"kvstore\.toml"):
        load_config(path, {})


def test_config_file_missing_fails_only_if_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="No such file"):
        load_config(tmp_path / "none.toml", {})
    second = tmp_path / "b.toml"
    second.write_text('log.level = "error"')
    config, _ = load_config(None, {}, default_files=(tmp_path / "a.toml", second))
    assert config.log.level == "error"


def test_the_configuration_is_frozen() -> None:
    with pytest.raises(ValidationError):
        NodeSection().dram_bytes = 5


def test_secrets_are_masked() -> None:
    class WithSecret(BaseModel):
        token: SecretStr = SecretStr("hush")
        empty: SecretStr = SecretStr("")

    shown = list(leaves(WithSecret(), {}))
    assert [leaf.text for leaf in shown] == ["********", ""]
    assert "hush" not in str(shown)


def test_the_configuration_becomes_the_servers_settings(tmp_path: Path) -> None:
    config, _ = load(
        flags=(
            "node.node_id=n1",
            "node.nvme=/v:1GiB",
            "node.tls.cert=/c",
            "node.tls.key=/k",
            f"data_dir={tmp_path}",
            "metadata.node_ttl=9s",
            "node.prepare_ttl=4s",
        )
    )
    node = build_config.node_config(config)
    assert (node.node_id, node.nvme[0].capacity_bytes, node.prepare_ttl_ms) == ("n1", 1 << 30, 4000)
    assert node.tls.resolve() == TlsConfig(cert=Path("/c"), key=Path("/k"))
    metadata = build_config.metadata_config(config)
    assert (metadata.index_path, metadata.node_ttl_ms, metadata.tls.resolve()) == (tmp_path / "index", 9000, None)


def test_socket_folders_are_short_and_distinct(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    short = {folders.run_dir(name).name for name in ("a", "a/b", "a_b", "x" * 300, "x" * 301, "../../etc")}
    assert len(short) == 6
    assert all(len(name) <= 32 and "/" not in name and ".." not in name for name in short)


def test_run_dir_is_made_private(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    wanted = folders.run_dir("a")
    before = os.umask(0)
    try:
        folders.make_run_dir(wanted)
        modes = [one.stat().st_mode & 0o777 for one in (wanted.parent, wanted)]
    finally:
        os.umask(before)
    assert modes == [0o700, 0o700]
    wanted.parent.chmod(0o775)
    folders.make_run_dir(wanted)
    assert wanted.parent.stat().st_mode & 0o777 == 0o700
    assert wanted in folders.socket_folders(Config())
    uid = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: uid + 1)
    with pytest.raises(InvalidArgument, match="belongs to another user"):
        folders.make_run_dir(wanted)
    assert not any(folder.is_relative_to(wanted.parent) for folder in folders.socket_folders(Config()))


def test_config_show_prints_values_and_origins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kvstore.toml").write_text('node.policy = "lru"')
    (tmp_path / "kvstore.toml").chmod(0o644)
    monkeypatch.setenv("KVSTORE_NODE__LEASE", "3s")
    runner = CliRunner()
    text = runner.invoke(root, ["config", "show", "--set", "node.dram=4GiB"])
    assert text.exit_code == 0
    lines = {line.split()[0]: line.split()[1:] for line in text.stdout.splitlines()}
    assert lines["node.dram"] == ["4GiB", "flag", "--set", "node.dram"]
    assert lines["node.policy"] == ["lru", "file", "kvstore.toml"]
    assert lines["node.lease"] == ["3s", "environment", "KVSTORE_NODE__LEASE"]
    assert lines["node.listen"] == ["127.0.0.1:0", "default"]
    shown = json.loads(runner.invoke(root, ["config", "show", "-o", "json"]).stdout)
    assert shown["node.lease"] == {"value": 3000, "source": "environment", "detail": "KVSTORE_NODE__LEASE"}


def test_config_in_current_folder_of_others_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It could name a foreign server and a file with a token of the caller."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "kvstore.toml"
    path.write_text('client.metadata = "192.0.2.1:1"')
    path.chmod(0o644)
    assert load_config()[0].client.metadata == "192.0.2.1:1"
    for mode in (0o664, 0o646):
        path.chmod(mode)
        with pytest.raises(InvalidArgument, match=f"chmod go-w.*{path}.*0{mode:o}"):
            load_config()
        assert load_config(path)[0].client.metadata == "192.0.2.1:1"  # as with --config
    path.chmod(0o644)
    if os.geteuid() == 0:
        os.chown(path, 65_534, 65_534)
    else:
        caller = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: caller + 1)
    shown = CliRunner().invoke(root, ["config", "show"])
    assert shown.exit_code != 0
    assert "belongs to another user; name it with --config" in shown.stderr
    assert load_config(path)[0].client.metadata == "192.0.2.1:1"


def test_config_link_of_others_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.toml").write_text('client.metadata = "192.0.2.1:1"')
    (tmp_path / "own.toml").chmod(0o644)
    link = tmp_path / "kvstore.toml"
    link.symlink_to("own.toml")
    assert load_config()[0].client.metadata == "192.0.2.1:1"
    if os.geteuid() != 0:
        pytest.skip("only root changes the owner of a link")
    os.chown(link, 65_534, 65_534, follow_symlinks=False)
    with pytest.raises(InvalidArgument, match="belongs to another user"):
        load_config()


def test_config_show_derived_values_have_a_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    arguments = ["config", "show", "--set", "node.nvme=/a:1TiB,/b:1TiB,/c:1TiB", "--set", "node.dram=80GiB", "-o", "json"]
    shown = json.loads(CliRunner().invoke(root, [*arguments, "--set", "node.load_threads=5"]).stdout)
    assert shown["data_dir"]["value"] == str(tmp_path / "kvstore")
    assert shown["metadata.index_path"]["value"] == str(tmp_path / "kvstore" / "index")
    assert shown["node.node_id"] == {"value": socket.gethostname(), "source": "derived", "detail": "(name of the host)"}
    assert shown["node.load_window"]["value"] == 96 << 20
    assert "3 volumes" in shown["node.load_window"]["detail"]
    assert shown["node.load_threads"] == {"value": 5, "source": "flag", "detail": "--set node.load_threads"}
    assert shown["node.stop_grace"]["value"] == 22_000


def test_node_settings_configured_values_win() -> None:
    config, provenance = load(
        flags=("node.stop_grace=3s", "node.move_bandwidth=0", "node.huge_pages=true", "node.move_window=1MiB")
    )
    node = build_config.node_config(config, provenance)
    assert (node.stop_grace_ms, node.move_bandwidth, node.huge_pages, node.move_window_bytes) == (3_000, 0, True, 1 << 20)
    assert (node.load_threads, node.load_window_bytes) == (8, 64 << 20)
    shown = {one.key: one.source for one in node.settings}
    assert (shown["node.stop_grace"], shown["node.load_threads"]) == ("flag", "derived")


def test_config_show_reads_the_file_named(tmp_path: Path) -> None:
    path = tmp_path / "other.toml"
    path.write_text('[client]\nmetadata = "10.0.0.1:1"')
    shown = json.loads(CliRunner().invoke(root, ["config", "show", "-o", "json", "--config", str(path)]).stdout)
    assert shown["client.metadata"]["value"] == "10.0.0.1:1"
    by_variable = CliRunner().invoke(root, ["config", "show", "-o", "json"], env={"KVSTORE_CONFIG": str(path)})
    assert json.loads(by_variable.stdout)["client.metadata"]["source"] == "file"
