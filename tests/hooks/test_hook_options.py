"""What users may say about a hook, and what they are told when it is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvclient import InvalidArgument
from kvclient.engines.options import HookOptions


def test_a_mapping_becomes_options_and_a_namespace() -> None:
    options = HookOptions.from_mapping({"metadata": "host:1", "tenant": "t", "weights_epoch": "7", "mine": 3}, ("mine",))
    spec = options.spec("m", block_tokens=16, layers=2, layer_block_bytes=1024, dtype="fp32", layout="x")
    assert (spec.model, spec.tenant, spec.weights_epoch) == ("m", "t", "7")
    assert options.with_epoch("8").spec("m", block_tokens=16, layers=2, layer_block_bytes=1024, dtype="fp32", layout="x") != spec
    named = HookOptions(model="other").spec("m", block_tokens=16, layers=2, layer_block_bytes=1024, dtype="fp32", layout="x")
    assert named.model == "other"


def test_an_unknown_key_names_what_was_meant() -> None:
    with pytest.raises(InvalidArgument) as caught:
        HookOptions.from_mapping({"metdata": "host:1"})
    assert caught.value.fields["meant"] == "metadata"
    with pytest.raises(InvalidArgument) as caught:
        HookOptions.from_mapping({"zzz": 1}, ("mine",))
    assert "mine" in caught.value.fields["known"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"metadata": 7},
        {"load": "yes"},
        {"load_deadline_s": True},
        {"load_deadline_s": -1},
        {"load_deadline_s": float("nan")},
        {"verify": "perhaps"},
        {"metadata": ""},
    ],
)
def test_impossible_values_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(InvalidArgument):
        HookOptions.from_mapping(wrong)


def test_tls_is_made_of_files() -> None:
    assert HookOptions().tls() is None
    tls = HookOptions(tls_ca="/ca.pem", tls_server_name="store").tls()
    assert tls is not None
    assert (tls.ca, tls.server_name) == (Path("/ca.pem"), "store")
    assert HookOptions(tls_server_name="store").tls() is not None, "a name alone asks for TLS as well, not for clear text"
    with pytest.raises(InvalidArgument):
        HookOptions(tls_cert="/cert.pem").tls()
