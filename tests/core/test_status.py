"""The table of kinds, gRPC codes and HTTP statuses is complete in both directions."""

from __future__ import annotations

import pytest

from kvstore.core import errors
from kvstore.core.errors import ErrorKind, KVStoreError
from kvstore.core.status import ERROR_CLASSES, STATUS, GrpcCode, kind_of_grpc, make_error


@pytest.mark.parametrize("kind", ErrorKind)
def test_kind_round_trips(kind: ErrorKind) -> None:
    assert kind_of_grpc(STATUS[kind].grpc) is kind
    assert ERROR_CLASSES[kind].kind is kind


def test_every_error_class_is_in_the_table() -> None:
    in_tree = {cls for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, KVStoreError)} - {KVStoreError}
    assert set(ERROR_CLASSES.values()) == in_tree


@pytest.mark.parametrize("code", [code for code in GrpcCode if code is not GrpcCode.OK])
def test_every_grpc_code_has_a_kind(code: GrpcCode) -> None:
    assert kind_of_grpc(int(code)) in ErrorKind


def test_an_unknown_grpc_code_is_internal() -> None:
    assert kind_of_grpc(77) is ErrorKind.INTERNAL


def test_success_is_no_error() -> None:
    with pytest.raises(ValueError, match="not an error"):
        kind_of_grpc(0)


def test_numbers_are_those_of_grpc() -> None:
    grpc = pytest.importorskip("grpc")
    assert {code.name: code.value[0] for code in grpc.StatusCode} == {code.name: int(code) for code in GrpcCode}


@pytest.mark.parametrize("kind", ErrorKind)
def test_created_errors_have_the_class_of_their_kind(kind: ErrorKind) -> None:
    error = make_error(kind, "what went wrong", {"message": "a field called message", "self": "1"})
    assert type(error) is ERROR_CLASSES[kind]
    assert error.message == "what went wrong"
    assert error.fields == {"message": "a field called message", "self": "1"}
