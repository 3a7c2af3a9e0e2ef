"""TokenTable: its file format and reload; every method requires a permission."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from kvclient import ClientOptions
from kvclient.engines.options import HookOptions
from kvproto.v1 import admin_pb2, metadata_pb2, node_pb2
from kvstore.core.errors import InvalidArgument, PermissionDenied, Unauthenticated
from kvstore.observe.counters import Counters
from kvstore.rpc.auth.interceptor import (
    GRANTED,
    ON_BEHALF,
    READABLE_DATA_METHODS,
    REQUIRED,
    AuthInterceptor,
    Permission,
    caller_name,
)
from kvstore.rpc.auth.tokens import CHECK_INTERVAL_S, AccessRole, TokenSource, TokenTable, WatchedFile, tokens_file

SERVED = (
    *(metadata_pb2.DESCRIPTOR.services_by_name[name] for name in ("Metadata",)),
    *(node_pb2.DESCRIPTOR.services_by_name[name] for name in ("Node",)),
    *(admin_pb2.DESCRIPTOR.services_by_name[name] for name in ("MetadataAdmin", "NodeAdmin")),
    health_pb2.DESCRIPTOR.services_by_name["Health"],
    reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"],
)
TOKENS = {role: f"the-token-of-{role.value}" for role in AccessRole}
LOOKUP = "/kvstore.v1.Metadata/Lookup"


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o600)
    return path


@pytest.fixture
def known(tmp_path: Path) -> WatchedFile[TokenTable]:
    lines = [f"{role.value} some-{role.value} {token}" for role, token in TOKENS.items()]
    return tokens_file(written(tmp_path / "tokens", "\n".join(lines)))


def shown(token: str) -> list[tuple[str, str | bytes]]:
    return [("other", b"x"), ("authorization", f"Bearer {token}")]


def test_required_covers_every_served_method() -> None:
    """A new method needs an entry in the mapping; otherwise every caller is denied."""
    assert {f"/{service.full_name}/{method.name}" for service in SERVED for method in service.methods} == set(REQUIRED)


def test_required_changes_need_operator_probes_need_nothing() -> None:
    for method, need in REQUIRED.items():
        assert (need is Permission.NOTHING) == (method in {"/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/List"})
        name = method.rpartition("/")[2]
        if name.startswith(("Drain", "Undrain", "Remove", "Set", "Rebuild", "Evict", "Invalidate", "Compare", "Cancel", "Check")):
            machines = (
                {Permission.SERVE, Permission.SCHEDULE}
                if name in {"CompareDigests", "CancelRequest"}
                else {Permission.CHANGE, Permission.NOTHING}
            )
            assert need in machines, method
    assert [role for role in AccessRole if Permission.CHANGE in GRANTED[role]] == [AccessRole.OPERATOR]
    assert set(GRANTED) == set(AccessRole)


def test_admit_known_token_by_role(known: WatchedFile[TokenTable]) -> None:
    keeper = AuthInterceptor(known, Counters().add)
    for method, need in REQUIRED.items():
        for role, token in TOKENS.items():
            looks = role is AccessRole.READ and method.rpartition("/")[2] in READABLE_DATA_METHODS
            if need is Permission.NOTHING:
                assert keeper.admit(method, None) is None
            elif need in GRANTED[role] or looks:
                caller = keeper.admit(method, shown(token))
                assert caller is not None
                assert (caller.role, caller.name) == (role, f"some-{role.value}")
            else:
                with pytest.raises(PermissionDenied, match="requires the role"):
                    keeper.admit(method, shown(token))


@pytest.mark.parametrize(
    "metadata",
    [
        None,
        [],
        [("authorization", b"Bearer the-token-of-operator")],
        [("authorization", "the-token-of-operator")],
        [("authorization", "Basic the-token-of-operator")],
        shown(""),
        shown("the-token-of-operato"),
        shown("the-token-of-operator2"),
    ],
)
def test_admit_unknown_token_is_unauthenticated(known: WatchedFile[TokenTable], metadata: list[tuple[str, str | bytes]]) -> None:
    with pytest.raises(Unauthenticated) as refused:
        AuthInterceptor(known, Counters().add).admit(LOOKUP, metadata)
    assert "the-token" not in str(refused.value)


def test_admit_unmapped_method_is_denied(known: WatchedFile[TokenTable]) -> None:
    keeper = AuthInterceptor(known, Counters().add)
    for token in TOKENS.values():
        with pytest.raises(PermissionDenied):
            keeper.admit("/kvstore.v1.Metadata/New", shown(token))


@pytest.mark.parametrize(
    ("role", "person", "recorded"),
    [
        (AccessRole.OPERATOR, "alice", "alice (via some-operator)"),
        (AccessRole.OPERATOR, "", "some-operator"),
        (AccessRole.OPERATOR, "root (via x)", "some-operator"),
        (AccessRole.OPERATOR, "a" * 65, "some-operator"),
        (AccessRole.NODE, "alice", "some-node"),
        (AccessRole.ENGINE, "alice", "some-engine"),
    ],
)
async def test_person_is_recorded_for_operators_only(
    known: WatchedFile[TokenTable], role: AccessRole, person: str, recorded: str
) -> None:
    names = []

    async def handle(_: object) -> None:
        names.append(caller_name())

    for metadata in ([*shown(TOKENS[role]), (ON_BEHALF, person)], shown(TOKENS[role])):
        call = SimpleNamespace(method="/kvstore.v1.Metadata/RegisterNamespace", invocation_metadata=metadata)
        await AuthInterceptor(known, Counters().add).intercept_service(handle, call)  # type: ignore[arg-type]
    assert names[0] == recorded
    assert names[1] == f"some-{role.value}", "a later call in the same context has no person"


def test_token_file_changed_is_read_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    now_s = 0.0
    file = written(tmp_path / "tokens", f"read a {TOKENS[AccessRole.READ]}")
    found = WatchedFile(file, TokenTable.parse, lambda: now_s)
    assert found.get().caller(TOKENS[AccessRole.READ]) is not None
    fresh = written(tmp_path / "new", f"operator b {TOKENS[AccessRole.OPERATOR]}")
    fresh.replace(file)
    assert found.get().caller(TOKENS[AccessRole.OPERATOR]) is None, "not looked at again yet"
    now_s += CHECK_INTERVAL_S
    assert found.get().caller(TOKENS[AccessRole.OPERATOR]) is not None
    assert found.get().caller(TOKENS[AccessRole.READ]) is None, "taken out"
    for wrong in ("nonsense", ""):
        written(file, wrong)
        now_s += CHECK_INTERVAL_S
        assert found.get().caller(TOKENS[AccessRole.OPERATOR]) is not None, "the previous content stays valid"
    file.unlink()
    now_s += CHECK_INTERVAL_S
    assert found.get().caller(TOKENS[AccessRole.OPERATOR]) is not None
    assert "previous content kept" in caplog.text
    written(file, f"read c {TOKENS[AccessRole.READ]}")
    now_s += CHECK_INTERVAL_S
    assert found.get().caller(TOKENS[AccessRole.OPERATOR]) is None
    assert "the-token" not in caplog.text


def test_client_token_is_not_printed_and_follows_file(tmp_path: Path) -> None:
    file = written(tmp_path / "token", "  the-token-of-today-1\n")
    options = ClientOptions(token_file=file)
    token = options.shown_token()
    assert token is not None
    assert token.get() == "the-token-of-today-1"
    told = f"{token} {token!r} {options} {ClientOptions(token='a-token-in-the-code')}"
    assert "the-token-of" not in told
    assert "a-token-in" not in told
    assert ClientOptions().shown_token() is None
    assert HookOptions(token_file=str(file)).client_options().token_file == file
    other = written(tmp_path / "next", "the-token-of-tomorrow")
    os.replace(other, file)
    again = options.shown_token()
    assert again is not None
    assert again.get() == "the-token-of-tomorrow"


@pytest.mark.parametrize("text", ["", "short", "two words-of-a-token", "x" * 513, "nön-ascii-0123456789"])
def test_token_source_invalid_token_raises(tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with pytest.raises(InvalidArgument) as refused:
        TokenSource(file=written(tmp_path / "token", text))
    assert text not in str(refused.value) or not text
    if text:
        with pytest.raises(InvalidArgument):
            ClientOptions(token=text)
    with pytest.raises(InvalidArgument):
        ClientOptions(token="a-token-that-is-fine", token_file=tmp_path / "token")
