"""The storage links of a vLLM request: the options', unless the request names others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvclient import InvalidArgument, Paths
from kvclient.engines.options import HookOptions
from kvclient.engines.vllm.request_paths import request_paths

OPTIONS = HookOptions(path_policy="shorter_queue", path_layer_group=2)
NAMES = st.sampled_from(("decode_node", "path_policy"))
VALUES = st.none() | st.integers() | st.text(max_size=200) | st.lists(st.text(max_size=3)) | st.just("split")


def named(params: object) -> Paths | None:
    return request_paths(SimpleNamespace(kv_transfer_params=params), OPTIONS)


def test_paths_request_names_replace_options() -> None:
    assert named({"decode_node": "d0"}) == Paths("d0", "shorter_queue", layer_group=2)
    assert named({"path_policy": "split", "other": [1]}) == Paths(None, "split", layer_group=2)
    assert named({"decode_node": "d0", "path_policy": "split"}) == Paths("d0", "split", layer_group=2)


@pytest.mark.parametrize("params", [None, {}, [], "split", {"decode_node": "a b", "path_policy": "Split!"}])
def test_paths_request_without_names_uses_the_client(params: object) -> None:
    assert named(params) is None
    assert request_paths(SimpleNamespace(), OPTIONS) is None


@given(st.dictionaries(NAMES, VALUES))
def test_paths_request_content_never_raises(params: dict[str, Any]) -> None:
    found = named(params)
    assert found is None or found.policy in ("shorter_queue", params.get("path_policy"))


def test_paths_every_hook_plans_loads_by_default() -> None:
    assert HookOptions().client_options().paths == Paths()
    assert OPTIONS.client_options().paths == Paths(policy="shorter_queue", layer_group=2)


@pytest.mark.parametrize("wrong", [{"path_layer_group": -1}, {"path_policy": 3}, {"path_policy": "x" * 1_000}])
def test_paths_options_are_checked(wrong: dict[str, object]) -> None:
    with pytest.raises(InvalidArgument):
        HookOptions.from_mapping(wrong)
