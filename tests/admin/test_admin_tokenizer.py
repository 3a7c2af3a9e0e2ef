"""Texts in the prefix explorer: the configured tokenizer, and errors without one."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvstore.admin.tokenizer import FILE, PromptTokenizer
from kvstore.core.errors import InvalidArgument, Unsupported

WORDS = {
    "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
    "pre_tokenizer": {"type": "Whitespace"}, "post_processor": None, "decoder": None,
    "model": {"type": "WordLevel", "vocab": {"hello": 0, "world": 1, "?": 2}, "unk_token": "?"},
}  # fmt: skip


def encode(path: Path | None, text: str) -> list[int]:
    async def run() -> list[int]:
        return await PromptTokenizer(path).encode(text)

    return asyncio.run(run())


def test_text_without_configured_tokenizer_is_unsupported() -> None:
    with pytest.raises(Unsupported, match=r"set admin\.tokenizer"):
        encode(None, "hello")
    assert not PromptTokenizer(None).configured


def test_missing_library_is_named_with_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(Unsupported, match=r"kvstore-dualpath\[tokenizer\]"):
        encode(tmp_path, "hello")


def test_folder_is_searched_for_tokenizer_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def from_file(path: str) -> object:
        asked.append(path)
        return SimpleNamespace(encode=lambda text: SimpleNamespace(ids=[len(word) for word in text.split()]))

    monkeypatch.setitem(sys.modules, "tokenizers", SimpleNamespace(Tokenizer=SimpleNamespace(from_file=from_file)))
    assert encode(tmp_path, "a prompt of words") == [1, 6, 2, 5]
    assert asked == [str(tmp_path / FILE)]


def test_unreadable_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def from_file(path: str) -> object:
        raise Exception(f"No such file: {path}")  # noqa: TRY002  # as the library does

    monkeypatch.setitem(sys.modules, "tokenizers", SimpleNamespace(Tokenizer=SimpleNamespace(from_file=from_file)))
    with pytest.raises(InvalidArgument, match=r"admin\.tokenizer .*nothing\.json cannot be read"):
        encode(tmp_path / "nothing.json", "hello")


def test_real_tokenizer_file_gives_token_ids(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers", reason="no library tokenizers")
    (tmp_path / FILE).write_text(json.dumps(WORDS))
    assert encode(tmp_path, "hello world again") == [0, 1, 2]
    assert encode(tmp_path / FILE, "world") == [1]
