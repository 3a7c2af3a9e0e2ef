"""Columns of a batch that are loaded from the store, and the check that the model was fed the announced prompt."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvclient import InvalidArgument
from kvclient.engines.transformers.input_tracker import InputTracker
from kvclient.engines.transformers.prompts import Prompts, common_columns, read_prompts, usable_blocks
from kvclient.engines.transformers.sliding_window import SlidingWindowHistory

BLOCK = 4


@st.composite
def batches(draw: st.DrawFn) -> Prompts:
    columns = draw(st.integers(1, 24))
    pads = draw(st.lists(st.integers(0, columns), min_size=1, max_size=4))
    ids = np.random.default_rng(draw(st.integers(0, 9))).integers(1, 50, (len(pads), columns))
    return read_prompts(ids, (np.arange(columns) >= np.array(pads)[:, None]).astype(np.int64))


@given(batches(), st.data())
def test_columns_loaded_are_the_most_common_to_all_rows(prompts: Prompts, data: st.DataObject) -> None:
    usable = [usable_blocks(prompts, row, BLOCK) for row in range(prompts.rows)]
    hits = [data.draw(st.integers(0, blocks)) for blocks in usable]
    columns = common_columns(prompts, hits, BLOCK)

    def served(column: int) -> bool:
        return all(column < pad + hit * BLOCK for pad, hit in zip(prompts.pads, hits, strict=True))

    assert columns < prompts.columns  # at least one column is computed
    assert all(served(column) for column in range(columns))
    assert columns == 0 or (prompts.pads < columns).any()  # never only padding
    if columns == 0:
        assert prompts.columns == 1 or not served(int(prompts.pads.min())) or int(prompts.pads.min()) >= prompts.columns - 1
    elif columns < prompts.columns - 1:
        assert not served(columns)
    for row, blocks in enumerate(usable):
        assert len(prompts.tokens(row)) == prompts.columns - prompts.pads[row]
        assert blocks == 0 or blocks * BLOCK < len(prompts.tokens(row)) <= (blocks + 1) * BLOCK


def test_prompts_malformed_batch_is_rejected() -> None:
    ids = np.ones((2, 4), np.int64)
    wrong: list[tuple[np.ndarray, np.ndarray | None]] = [  # type: ignore[type-arg]
        (ids[0], None),
        (ids[:0], None),
        (ids - 2, None),
        (ids, np.ones((2, 3), np.int64)),
        (ids, np.array([[1, 1, 1, 0], [1, 1, 1, 1]])),  # padding on the right
        (ids, np.array([[0, 1, 0, 1], [1, 1, 1, 1]])),
    ]
    for bad_ids, mask in wrong:
        with pytest.raises(InvalidArgument):
            read_prompts(bad_ids, mask)


# ---- input of the model ----
def batch(pads: list[int], columns: int = 12) -> Prompts:
    ids = np.arange(1, 1 + len(pads) * columns).reshape(len(pads), columns)
    return read_prompts(ids, (np.arange(columns) >= np.array(pads)[:, None]).astype(np.int64))


def passes(prompts: Prompts, start: int, stop: int, **other: object) -> tuple[torch.Tensor, dict[str, object]]:
    """One forward pass over columns of a batch, with the arguments of ``generate``."""
    ids = torch.from_numpy(np.resize(prompts.ids, (prompts.rows, max(stop, prompts.columns))))[:, start:stop]
    positions = (torch.arange(start, stop) - torch.from_numpy(prompts.pads)[:, None]).clamp(min=0)
    mask = (torch.arange(stop) >= torch.from_numpy(prompts.pads)[:, None]).long()
    return ids, {"position_ids": positions, "attention_mask": mask, **other}


def load(fed: InputTracker, columns: int) -> None:
    """Load leading columns, all of which are in stored blocks."""
    fed.loaded(columns, np.maximum(columns - fed.pads, 0) // BLOCK, BLOCK)


@pytest.mark.parametrize("pads", [[0], [0, 5, 12]])
def test_tracker_plain_pass_is_accepted_and_recorded(pads: list[int]) -> None:
    prompts = batch(pads)
    fed = InputTracker(prompts)
    load(fed, 4)
    for start, stop in ((4, 12), (12, 13), (13, 14)):
        assert fed.take(*passes(prompts, start, stop)) is None
    assert fed.settle() is None
    assert fed.columns == 14
    assert (fed.ids[:, :12] == prompts.ids).all()
    fed.truncate(13)
    assert fed.take(*passes(prompts, 13, 15)) is None
    fed.truncate(14)
    assert fed.settle() is None
    assert fed.ids.shape == (len(pads), 14)


def test_tracker_other_prompt_after_load_contradicts() -> None:
    prompts = batch([0, 2])
    other = Prompts(prompts.ids + 1, prompts.pads)
    for loaded, contradicts in ((0, False), (4, True)):
        fed = InputTracker(prompts)
        load(fed, loaded)
        reason = fed.take(*passes(other, loaded, 12))
        assert (reason is not None, fed.contradicts) == (contradicts, contradicts)
        if not loaded:
            assert fed.settle() is None
            assert (fed.ids == other.ids).all()  # keys are computed from the tokens that were fed


@pytest.mark.parametrize("pads", [[0], [0, 2]])
def test_tracker_first_pass_from_start_is_detected(pads: list[int]) -> None:
    prompts = batch(pads)
    fed = InputTracker(prompts)
    assert not fed.starts_over(*passes(prompts, 0, 12))  # nothing was loaded
    load(fed, 4)
    assert fed.starts_over(*passes(prompts, 0, 12))
    assert fed.starts_over(*passes(prompts, 0, 3))
    ids = torch.from_numpy(prompts.ids)
    assert fed.starts_over(ids, {})
    assert not fed.starts_over(ids[:, 4:], {})
    assert not fed.starts_over(*passes(prompts, 4, 12))
    assert not fed.starts_over(None, {})
    assert not fed.starts_over(ids, {"position_ids": torch.arange(12)[None] + 1})
    fed.take(*passes(prompts, 4, 12))
    assert not fed.starts_over(*passes(prompts, 0, 12))  # no longer the first pass


def test_tracker_pass_with_other_inputs_is_rejected() -> None:
    prompts = batch([0, 2])
    ids, plain = passes(prompts, 0, 12)
    mask, positions = plain["attention_mask"], plain["position_ids"]
    assert isinstance(mask, torch.Tensor)
    assert isinstance(positions, torch.Tensor)
    hole = mask.clone()
    hole[0, 3] = 0
    late = positions.clone()
    late[1, 7] += 1
    refused: list[tuple[torch.Tensor | None, dict[str, object]]] = [
        (None, plain),
        (ids[:1], plain),
        (ids.float(), {**plain, "pixel_values": torch.zeros(1)}),
        (ids, {**plain, "deepstack": [torch.zeros(1)]}),
        (ids, {**plain, "attention_mask": hole}),
        (ids, {**plain, "attention_mask": mask[:, None, None]}),
        (ids, {**plain, "attention_mask": {"full_attention": mask}}),
        (ids, {**plain, "attention_mask": None}),
        (ids, {**plain, "position_ids": late}),
        (ids, {**plain, "position_ids": positions[None]}),
        (ids, {**plain, "position_ids": None}),
        (ids - 100, plain),
    ]
    for wrong, given_ in refused:
        fed = InputTracker(prompts)
        assert (fed.take(wrong, given_) or fed.settle()) is not None, given_
    one = batch([0])
    assert InputTracker(one).take(torch.from_numpy(one.ids), {"output_attentions": False, "labels": None}) is None


def test_tracker_mask_hiding_one_step_is_detected() -> None:
    prompts = batch([0, 2])
    fed = InputTracker(prompts)
    ids, plain = passes(prompts, 0, 12)
    assert fed.take(ids, plain) is None
    ids, plain = passes(prompts, 12, 13)
    hidden = plain["attention_mask"]
    assert isinstance(hidden, torch.Tensor)
    hidden[0, 4] = 0
    assert fed.take(ids, plain) is None
    assert fed.take(*passes(prompts, 13, 14)) is None
    assert fed.settle() is not None


# ---- sliding windows ----
@given(st.integers(0, 5), st.lists(st.tuples(st.sampled_from(["append", "drop", "cut"]), st.integers(0, 12)), max_size=12))
def test_recorder_keeps_a_window_of_all_tokens(start: int, steps: list[tuple[str, int]]) -> None:
    recorder = SlidingWindowHistory(start)
    rows, model, first = 2, np.zeros((2, 0), np.int64), start
    serial = 0
    for what, number in steps:
        if what == "append" and number:
            chunk = np.arange(serial, serial + rows * number).reshape(rows, number)
            serial += rows * number
            keys = torch.from_numpy(chunk).view(rows, 1, number, 1)
            recorder.append(keys, keys + 1)
            model = np.concatenate([model, chunk], 1)
        elif what == "drop":
            gone = max(0, min(number, first + model.shape[1]) - first)
            recorder.drop_before(number)
            model, first = model[:, gone:], first + gone
        elif what == "cut" and number >= first:
            recorder.truncate(number)
            model = model[:, : number - first]
        assert (recorder.start, recorder.end) == (first, first + model.shape[1])
        if model.size:
            keys, values = recorder.window()
            assert (keys[:, 0, :, 0].numpy() == model).all()
            assert (values[:, 0, :, 0].numpy() == model + 1).all()
    with pytest.raises(InvalidArgument):
        recorder.truncate(first - 1)
