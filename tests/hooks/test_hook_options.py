"""Options of a hook, and the errors for invalid ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from certificates import make_certificates
from kvclient import InvalidArgument
from kvclient.engines.options import HookOptions


def test_options_mapping_sets_fields_and_namespace() -> None:
    options = HookOptions.from_mapping({"metadata": "host:1", "tenant": "t", "weights_epoch": "7", "mine": 3}, ("mine",))
    spec = options.spec("m", block_tokens=16, layers=2, layer_block_bytes=1024, dtype="fp32", layout="x")
    assert (spec.model, spec.tenant, spec.weights_epoch) == ("m", "t", "7")
    assert options.with_epoch("8").spec("m", block_tokens=16, layers=2, layer_block_bytes=1024, dtype="fp32", layout="x") != spec
    named = HookOptions(model="other").spec("m", block_tokens=16, layers=2, layer_block_bytes=1024, dtype="fp32", layout="x")
    assert named.model == "other"


def test_options_unknown_key_suggests_nearest() -> None:
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
def test_options_invalid_values_are_rejected(wrong: dict[str, object]) -> None:
    with pytest.raises(InvalidArgument):
        HookOptions.from_mapping(wrong)


def test_options_tls_is_read_from_files() -> None:
    assert HookOptions().tls() is None
    tls = HookOptions(tls_ca="/ca.pem", tls_server_name="store").tls()
    assert tls is not None
    assert (tls.ca, tls.server_name) == (Path("/ca.pem"), "store")
    assert HookOptions(tls_server_name="store").tls() is not None, "a name alone asks for TLS as well, not for clear text"
    with pytest.raises(InvalidArgument):
        HookOptions(tls_cert="/cert.pem").tls()


@pytest.mark.parametrize("content", [None, "no certificate"], ids=["missing", "invalid"])
@pytest.mark.parametrize("option", ["tls_ca", "tls_cert", "tls_key"])
def test_options_file_unusable_error_names_option(option: str, content: str | None, tmp_path: Path) -> None:
    files = make_certificates(tmp_path / "good")
    given = {"tls_ca": str(files.ca), "tls_cert": str(files.cert), "tls_key": str(files.key)}
    assert HookOptions.from_mapping(given).tls() is not None
    wrong = tmp_path / "wrong.pem"
    if content is not None:
        wrong.write_text(content)
    with pytest.raises(InvalidArgument, match=str(wrong)) as caught:
        HookOptions.from_mapping({**given, option: str(wrong)})
    assert option in caught.value.fields["option"]


def test_options_token_file_missing_error_names_it(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"no\.token"):
        HookOptions.from_mapping({"token_file": str(tmp_path / "no.token")})
