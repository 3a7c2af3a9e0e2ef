"""Detection of model files that were replaced after an engine started, on a real file system."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvclient.engines.file_stamps import mark_engine_start, process_start_s, replaced_since
from kvclient.engines.model_files import ModelFiles, replaced_path

MOVES: dict[str, Callable[[Path], object]] = {
    "written": lambda top: (top / "real" / "v1" / "model.safetensors").write_bytes(b"other"),
    "cut short": lambda top: os.truncate(top / "real" / "v1" / "model.safetensors", 3),
    "renamed": lambda top: (top / "spare.safetensors").rename(top / "real" / "v1" / "model.safetensors"),
    "removed": lambda top: (top / "real" / "v1" / "second.safetensors").unlink(),
    "its configuration": lambda top: (top / "real" / "v1" / "config.json").write_text("{}"),
    "the folder moved": lambda top: ((top / "real" / "v1").rename(top / "old"), (top / "v2").rename(top / "real" / "v1")),
    "a folder above moved": lambda top: ((top / "real").rename(top / "old"), (top / "other").rename(top / "real")),
    "a folder above moved, and written to": lambda top: (
        (top / "real").rename(top / "old"),
        (top / "other").rename(top / "real"),
        (top / "real" / "VERSION").write_text("2"),
    ),
    "a folder far above moved, and written to": lambda top: (
        (top / "real").rename(top / "old"),
        (top / "other").rename(top / "real"),
        (top / "real" / "v1" / "VERSION").write_text("2"),
        (top / "real" / "VERSION").touch(),
    ),
    "a folder above moved, with the old one inside": lambda top: (
        (top / "real").rename(top / "old"),
        (top / "other").rename(top / "real"),
        (top / "old").rename(top / "real" / "before"),
    ),
    "a link of the folder": lambda top: ((top / "link").unlink(), (top / "link").symlink_to(top / "v2")),
    "a link of a file": lambda top: (
        (top / "real" / "v1" / "third.safetensors").unlink(),
        (top / "real" / "v1" / "third.safetensors").symlink_to(top / "spare.safetensors"),
    ),
}


@pytest.fixture
def top(tmp_path: Path) -> Path:
    """Create ``link`` -> ``real/v1`` with weights, one of them a link, and the files that can replace them."""
    for folder in ("real/v1", "v2", "other/v1"):
        (tmp_path / folder).mkdir(parents=True)
        for name in ("model.safetensors", "second.safetensors"):
            (tmp_path / folder / name).write_bytes(folder.encode())
        (tmp_path / folder / "config.json").write_text("{ }")
    (tmp_path / "spare.safetensors").write_bytes(b"spare")
    (tmp_path / "blob").write_bytes(b"blob")
    (tmp_path / "real" / "v1" / "third.safetensors").symlink_to("../../blob")
    (tmp_path / "link").symlink_to("real/v1")
    return tmp_path


@pytest.mark.parametrize("how", MOVES)
def test_path_replaced_after_start_is_detected(top: Path, how: str) -> None:
    mark_engine_start()
    assert replaced_path(top / "link") is None
    time.sleep(0.05)
    MOVES[how](top)
    assert replaced_path(top / "link") is not None
    mark_engine_start()
    assert replaced_path(top / "link") is None, "the next engine reads what is there"


def test_path_unrelated_changes_are_ignored(top: Path) -> None:
    mark_engine_start()
    (top / "real" / "another model").mkdir()
    (top / "real" / "v3.tmp").write_bytes(b"x")
    (top / "real" / "v3.tmp").unlink()
    (top / "real").chmod(0o755)
    assert replaced_path(top / "link") is None
    assert replaced_path(top / "spare.safetensors") is None, "a model of one file"


def test_path_ancestor_folder_replaced_is_detected(top: Path) -> None:
    for folder in ("a/b/c", "a2/b/c"):
        (top / "deep" / folder).mkdir(parents=True)
        (top / "deep" / folder / "model.safetensors").write_bytes(folder.encode())
    model = top / "deep" / "a" / "b" / "c"
    (top / "by").symlink_to("deep/a/b")
    mark_engine_start()
    assert (replaced_path(model), replaced_path(top / "by" / "c")) == (None, None)
    time.sleep(0.05)
    (top / "deep" / "a").rename(top / "deep" / "old")
    (top / "deep" / "a2").rename(top / "deep" / "a")
    (top / "deep" / "a" / ".ready").touch()
    assert (replaced_path(model), replaced_path(top / "by" / "c")) == (top / "deep" / "a",) * 2


def test_process_start_is_precise(tmp_path: Path) -> None:
    """The error is smaller than the difference to the time stamp of a file that is written later."""
    script = "import time; time.sleep(0.2); from kvclient.engines.file_stamps import process_start_s; print(process_start_s())"
    before_s = time.time()
    told_s = float(subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout)
    assert before_s - 0.05 < told_s < time.time() - 0.2
    path = tmp_path / "now"
    path.write_bytes(b"x")
    assert replaced_since([path], told_s) is not None
    assert replaced_since([path], time.time() + 1) is None


def test_process_start_unknown_counts_all_files_as_replaced(top: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvclient.engines.file_stamps._STATUS", top / "none")
    monkeypatch.setattr("kvclient.engines.file_stamps._marked_s", 0.0)
    assert process_start_s() == 0.0
    assert replaced_path(top / "link") is not None


def test_link_cycle_raises(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(OSError, match="links"):
        replaced_since([tmp_path / "a"], time.time() + 1)


def test_weights_replaced_after_start_are_not_shared(top: Path, caplog: pytest.LogCaptureFixture) -> None:
    drawn = iter("abc")
    source = ModelFiles(str(top / "link"))
    mark_engine_start()
    named = source.weights_digest(lambda: next(drawn))
    assert named == source.weights_digest(lambda: next(drawn)) != "a:"
    MOVES["renamed"](top)
    assert [source.weights_digest(lambda: next(drawn)) for _ in range(2)] == ["a:", "b:"]
    assert "until the next start: " in caplog.text
    assert "weights_epoch" in caplog.text
    assert ModelFiles(str(top / "link"), revision="commit").weights_digest(lambda: "x") == "commit:", (
        "a hub's folders never change"
    )


@pytest.mark.parametrize("name", ["model.safetensors.index.json", "preprocessor_config.json", "modeling_own.py"])
def test_weights_digest_depends_on_configuration_and_code(top: Path, name: str) -> None:
    """These files list the model's shards, configure the processing of images, and contain the model's code."""
    folder = top / "real" / "v1"
    told = {}
    for content in ("old", "new", "old"):
        (folder / name).write_text(content)
        (folder / "tokenizer.json").write_text(content)
        mark_engine_start()
        told.setdefault(content, set()).add(ModelFiles(str(folder)).weights_digest(lambda: "x"))
    assert len(told["old"]) == len(told["new"]) == 1
    assert told["old"] != told["new"]
    (folder / "tokenizer.json").write_text("of another kind")
    mark_engine_start()
    assert ModelFiles(str(folder)).weights_digest(lambda: "x") in told["old"], "it says nothing of the weights"


def test_weights_read_from_npcache_are_not_shared(top: Path) -> None:
    """``npcache`` reads its own copies of the files, which may be older than the files."""
    mark_engine_start()
    drawn = iter("ab")
    source = ModelFiles(str(top / "link"), load_format="npcache")
    assert [source.weights_digest(lambda: next(drawn)) for _ in range(2)] == ["a:npcache:", "b:npcache:"]


def test_weights_in_two_formats_depend_on_load_format(top: Path) -> None:
    ways = [ModelFiles(str(top / "link"), load_format=how).load_options for how in ("auto", "safetensors")]
    assert ways == ["", ""]
    (top / "real" / "v1" / "consolidated.safetensors").write_bytes(b"Mistral's")
    ways = [ModelFiles(str(top / "link"), load_format=how).load_options for how in ("auto", "safetensors")]
    assert ways == ["", "safetensors:"]
