"""Digests of weights as a model holds them."""

from __future__ import annotations

import pytest
import torch

from kvclient import InvalidArgument
from kvclient.engines.held_weights import held_digest


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.bool, torch.complex128])
def test_held_digest_any_single_element_changes_it(dtype: torch.dtype, whole: bool) -> None:
    tensor = torch.zeros(40, 130, dtype=dtype)
    seen = {held_digest([("w", tensor)], whole=whole)}
    for index in (0, 7, 64, 1_000, 5_199):
        tensor.view(-1)[index] = 1
        seen.add(held_digest([("w", tensor)], whole=whole))
    assert len(seen) == 6


def test_held_digest_depends_on_name_shape_and_dtype_not_order() -> None:
    one, two = torch.arange(12.0), torch.ones(3)
    assert held_digest([("a", one), ("b", two)]) == held_digest([("b", two), ("a", one.clone())])
    others = [
        [("a", two), ("b", one)],
        [("a", one.view(3, 4)), ("b", two)],
        [("a", one.double()), ("b", two)],
        [("a", one)],
    ]
    digests = {held_digest(one, whole=whole) for one in others for whole in (True, False)}
    assert len(digests) == 2 * len(others)


def test_held_digest_samples_transposed_tensor_in_place() -> None:
    def digest(tensor: torch.Tensor) -> str:
        return held_digest([("w", tensor.t())], whole=False)

    tensor = torch.randn(300, 500)
    changed = tensor.clone()
    assert digest(tensor) == digest(changed)
    changed[299, 499] += 1
    assert digest(tensor) != digest(changed)


def test_held_digest_offloaded_weights_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="weights_epoch"):
        held_digest([("w", torch.empty(2, device="meta"))])
