"""Answers told again: only where a question comes again and again, only for a moment, and never across a change."""

from __future__ import annotations

import httpx

from kvstore.admin.middleware import Gate
from kvstore.admin.reuse import BURST, FRESH_S, MOST_ANSWERS, MOST_BYTES, Answers
from kvstore.config.admin import AdminConfig
from kvstore.observe.counters import Counters


class Asking:
    """A server that answers with a number of its own each time."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.answers: Answers[str, int] = Answers(lambda: self.now_s)
        self.found = 0

    def ask(self, question: str = "nodes", *, change: bool = False, nbytes: int = 1) -> int:
        told = self.answers.again(question)
        if told is not None:
            return told
        self.found += 1
        changes = self.answers.changes
        if change:
            self.answers.forget()
        self.answers.keep(question, self.found, nbytes, changes)
        return self.found


def test_now_and_then_every_answer_is_new() -> None:
    asking = Asking()
    for number in range(1, 20):
        assert asking.ask() == number
        asking.now_s += 1.0
    asking.now_s += 60.0
    assert [asking.ask() for _ in range(BURST)] == list(range(20, 20 + BURST)), "and some in a row"


def test_again_and_again_it_is_told_for_a_moment() -> None:
    asking = Asking()
    assert [asking.ask() for _ in range(3 * BURST)] == [*range(1, BURST + 1), *[BURST] * 2 * BURST]
    assert asking.ask("volumes") == BURST + 1, "another question"
    asking.now_s += FRESH_S + 0.001
    assert asking.ask() == BURST + 2, "it has become old"
    found = asking.found
    for _ in range(2_000):  # ten seconds of two hundred a second
        asking.ask()
        asking.now_s += 0.005
    assert 8 <= asking.found - found <= 12, "about one a second"


def test_a_change_forgets_what_was_told_and_what_is_being_found_out() -> None:
    asking = Asking()
    last = [asking.ask() for _ in range(3 * BURST)][-1]
    asking.answers.forget()
    assert asking.ask(change=True) > last
    assert asking.ask() == asking.found, "the answer before may be what was before the change"


def test_answers_kept_are_bounded() -> None:
    asking = Asking()
    for number in range(2 * MOST_ANSWERS):
        asking.ask(f"block {number}")
    assert len(asking.answers._asked) <= MOST_ANSWERS
    for number in range(20):
        asking.ask(f"large {number}", nbytes=MOST_BYTES // 4)
    assert asking.answers._nbytes <= MOST_BYTES
    assert len(asking.answers._asked) <= 4


async def test_a_gate_tells_again_what_was_good_with_a_name_of_its_own() -> None:
    asked: list[str] = []
    status = 200

    async def app(scope: object, receive: object, send: object) -> None:
        asked.append(scope["method"])  # type: ignore[index]
        await send({"type": "http.response.start", "status": status, "headers": [(b"etag", b"x")]})  # type: ignore[operator]
        await send({"type": "http.response.body", "body": b"%d" % len(asked), "more_body": True})  # type: ignore[operator]
        await send({"type": "http.response.body", "body": b"."})  # type: ignore[operator]

    counters = Counters()
    gate = Gate(app, AdminConfig(), None, counters)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(gate), base_url="http://127.0.0.1:7470") as client:  # type: ignore[arg-type]
        told = [await client.get("/v1/nodes", headers={"x-request-id": f"r{number}"}) for number in range(3 * BURST)]
        assert [one.text for one in told[: BURST + 1]] == [*(f"{number}." for number in range(1, BURST + 1)), f"{BURST}."]
        assert len(asked) == BURST
        assert [one.headers.get_list("x-request-id") for one in told] == [[f"r{number}"] for number in range(3 * BURST)]
        assert {one.headers["etag"] for one in told} == {"x"}
        assert counters.snapshot()["admin_answers_reused_total"] == 2 * BURST
        await client.post("/v1/nodes/a/undrain")
        assert (await client.get("/v1/nodes")).text == f"{len(asked)}.", "anew, after a change"
        assert asked[-2:] == ["POST", "GET"]
        status = 503
        found = [(await client.get("/v1/volumes")).text for _ in range(2 * BURST)]
        assert len(set(found)) == len(found), "errors are found out anew"
