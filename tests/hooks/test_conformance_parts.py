"""Parts of the conformance command that need no engine: faults of files, targets, the table."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from kvstore.core.errors import InvalidArgument
from kvstore.testing.conformance.__main__ import main
from kvstore.testing.conformance.engine import ConnectorDriver
from kvstore.testing.conformance.faults import FOLDER_FAULTS, SECTOR, ConnectorFault, heal_folder, strike_folder
from kvstore.testing.conformance.report import table
from kvstore.testing.conformance.runs import Models, RunResult, RunVerdict
from kvstore.testing.conformance.targets import KNOWN, ConnectorTarget, target_of
from kvstore.testing.connector.conversations import Conversations

SKIPPED = SECTOR
CONTENT = random.Random(0).randbytes(SKIPPED + 4 * SECTOR)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "files"
    (made / "deep").mkdir(parents=True)
    (made / "deep" / "data").write_bytes(CONTENT)
    (made / "small").write_bytes(b"as it was")
    return made


def differing(path: Path) -> list[int]:
    """Sectors that differ from the original."""
    found = path.read_bytes()
    return [at for at in range(len(found) // SECTOR) if found[at * SECTOR :][:SECTOR] != CONTENT[at * SECTOR :][:SECTOR]]


def strike(folder: Path, fault: ConnectorFault) -> Path:
    strike_folder(folder, fault, random.Random(1), skip_bytes=SKIPPED)
    return folder / "deep" / "data"


def test_flipped_bits_are_one_per_sector(folder: Path) -> None:
    found = strike(folder, ConnectorFault.BYTES_CHANGED).read_bytes()
    flipped = [(one ^ other).bit_count() for one, other in zip(found, CONTENT, strict=True)]
    assert [sum(flipped[at : at + SECTOR]) for at in range(0, len(flipped), SECTOR)] == [0, 1, 1, 1, 1]
    assert (folder / "small").read_bytes() == b"as it was"


def test_swapped_sectors_keep_their_content(folder: Path) -> None:
    path = strike(folder, ConnectorFault.SECTORS_SWAPPED)
    assert differing(path) == [1, 2, 3, 4]
    assert sorted(path.read_bytes()) == sorted(CONTENT)


def test_cut_files_are_half_as_long(folder: Path) -> None:
    assert strike(folder, ConnectorFault.FILES_CUT).stat().st_size == len(CONTENT) // 2


def test_removed_files_leave_the_folder(folder: Path) -> None:
    assert not strike(folder, ConnectorFault.FILES_REMOVED).exists()
    assert (folder / "small").exists()


def test_lost_folder_comes_back_when_healed(folder: Path) -> None:
    path = strike(folder, ConnectorFault.FOLDER_LOST)
    assert folder.is_file()
    heal_folder(folder)
    assert path.read_bytes() == CONTENT
    heal_folder(folder)


def test_targets_fill_in_their_storage(tmp_path: Path) -> None:
    fs = target_of("vllm-fs")
    assert set(FOLDER_FAULTS) <= set(fs.faults)
    assert ConnectorFault.SERVER_KILLED not in fs.faults
    with fs.storage(tmp_path / "run") as storage:
        extra = fs.transfer_with(storage.values())["kv_connector_extra_config"]
        assert Path(extra["secondary_tiers"][0]["root_dir"]).is_dir()
    assert set(KNOWN["kvstore-tier"].faults) == set(ConnectorFault)


def test_target_of_file_has_its_server(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    file.write_text(json.dumps({"kv_transfer_config": {"port": "{port}", "at": "{folder}/x"}, "server": ["true", "{port}"]}))
    target = target_of(str(file))
    assert target == ConnectorTarget("mine", {"port": "{port}", "at": "{folder}/x"}, ("true", "{port}"))
    assert ConnectorFault.SERVER_KILLED in target.faults
    assert target.transfer_with({"port": "81", "folder": "/f"}) == {"port": 81, "at": "/f/x"}


@pytest.mark.parametrize(
    ("content", "names"),
    [
        ("", "not JSON"),
        ("[]", "kv_transfer_config"),
        ("{}", "kv_transfer_config"),
        ('{"kv_transfer_config": 3}', "kv_transfer_config"),
        ('{"kv_transfer_config": {}, "server": "x"}', "list of texts"),
        ('{"kv_transfer_config": {}, "sever": []}', "sever"),
        ('{"kv_transfer_config": {}, "server": ["no-such-program"]}', "no such program"),
    ],
)
def test_target_of_malformed_file_is_refused(tmp_path: Path, content: str, names: str) -> None:
    file = tmp_path / "mine.json"
    file.write_text(content)
    with pytest.raises(InvalidArgument, match=names):
        target_of(str(file))


def test_conformance_needs_both_models(tmp_path: Path) -> None:
    assert main(["--model", str(tmp_path)]) == 2


def test_models_are_exchanged_by_a_link(tmp_path: Path) -> None:
    """The folders of the user stay as they are."""
    first, other, link = tmp_path / "first", tmp_path / "second", tmp_path / "model"
    for folder in (first, other):
        folder.mkdir()
    link.symlink_to(first)
    nothing = Conversations([])
    models = Models(ConnectorDriver(link), first, nothing, other, nothing)
    with models.exchanged():
        assert link.resolve() == other
    assert link.resolve() == first


@pytest.mark.parametrize("arguments", [["--seeds", "5:2"], ["--seeds", "x"], ["--model", "/missing"], ["--fault", "rain"]])
def test_conformance_arguments_are_checked_first(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2


@pytest.mark.parametrize("text", ["nobody", "missing.json"])
def test_target_unknown_names_the_known_ones(text: str) -> None:
    with pytest.raises(InvalidArgument, match="vllm-fs"):
        target_of(text)


def test_table_counts_different_verdicts() -> None:
    def ran(target: str, fault: ConnectorFault, verdict: RunVerdict, loaded: int = 0) -> RunResult:
        return RunResult(target, fault, 0, verdict, loaded, 1.0)

    results = [
        ran("a", ConnectorFault.NONE, RunVerdict.RIGHT, 64),
        ran("a", ConnectorFault.BYTES_CHANGED, RunVerdict.RIGHT),
        ran("a", ConnectorFault.BYTES_CHANGED, RunVerdict.WRONG),
        ran("b", ConnectorFault.BYTES_CHANGED, RunVerdict.HUNG),
    ]
    assert table(results).splitlines() == [
        "| fault | a | b |",
        "| --- | --- | --- |",
        "| none | right | - |",
        "| bits flipped on disk | right 1 of 2, wrong tokens 1 of 2 | hung |",
        "| tokens loaded | 64 | none: nothing was tested |",
    ]
