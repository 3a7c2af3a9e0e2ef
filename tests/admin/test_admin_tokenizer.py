"""Texts in the prefix explorer: the configured tokenizer, and errors without one."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvstore.admin import tokenizer
from kvstore.admin.tokenizer import FILE, PromptTokenizer
from kvstore.core.errors import CapacityExceeded, InvalidArgument, Unsupported

WORDS = {
    "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
    "pre_tokenizer": {"type": "Whitespace"}, "post_processor": None, "decoder": None,
    "model": {"type": "WordLevel", "vocab": {"hello": 0, "world": 1, "?": 2}, "unk_token": "?"},
}  # fmt: skip


class SplittingTokenizer:
    """Encodes each word as its length. Like the library, it releases the interpreter lock in ``encode_batch`` only."""

    def __init__(self) -> None:
        self.may_end = threading.Event()
        self.may_end.set()
        self.began = threading.Event()

    def encode_batch(self, texts: list[str]) -> list[FoundTokens]:
        self.began.set()
        assert self.may_end.wait(60)
        return [FoundTokens([len(word) for word in text.split()]) for text in texts]


class FoundTokens:
    """Token ids of one text."""

    def __init__(self, ids: list[int]) -> None:
        self.ids = ids

    def __len__(self) -> int:
        return len(self.ids)


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
        return SplittingTokenizer()

    monkeypatch.setitem(sys.modules, "tokenizers", SimpleNamespace(Tokenizer=SimpleNamespace(from_file=from_file)))
    assert encode(tmp_path, "a prompt of words") == [1, 6, 2, 5]
    assert asked == [str(tmp_path / FILE)]


def offer(made: SplittingTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    library = SimpleNamespace(Tokenizer=SimpleNamespace(from_file=lambda path: made))
    monkeypatch.setitem(sys.modules, "tokenizers", library)


def test_text_with_too_many_tokens_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offer(SplittingTokenizer(), monkeypatch)
    monkeypatch.setattr(tokenizer, "MAX_TOKENS", 3)
    assert encode(tmp_path, "one two three") == [3, 3, 5]
    with pytest.raises(InvalidArgument, match="too many tokens"):
        encode(tmp_path, "one two three four")


def test_second_text_at_the_same_time_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cancelled request leaves its thread running, so it counts until the thread ends."""
    made = SplittingTokenizer()
    offer(made, monkeypatch)

    async def run() -> list[int]:
        prompts = PromptTokenizer(tmp_path)
        made.may_end.clear()
        first = asyncio.ensure_future(prompts.encode("a b"))
        await asyncio.to_thread(made.began.wait, 60)
        with pytest.raises(CapacityExceeded, match="busy"):
            await prompts.encode("c d")
        first.cancel()
        await asyncio.wait([first])
        with pytest.raises(CapacityExceeded, match="busy"):
            await prompts.encode("c d")
        made.may_end.set()
        while True:
            try:
                return await prompts.encode("one two")
            except CapacityExceeded:
                await asyncio.sleep(0.01)

    assert asyncio.run(run()) == [3, 3]


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
