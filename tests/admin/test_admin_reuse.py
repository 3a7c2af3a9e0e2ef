"""Answers told again: only where a question comes again and again, only for a moment, and never across a change."""

from __future__ import annotations

from starlette.types import Message

from kvstore.admin.reuse import FRESH_S, MOST_ANSWERS, OFTEN, Answers

PATH = ("/v1/nodes", b"limit=1")


class Asking:
    """A server that answers with a number of its own each time."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.answers = Answers(lambda: self.now_s)
        self.found = 0

    async def ask(self, question: tuple[str, bytes] = PATH, status: int = 200, *, change: bool = False) -> bytes:
        told = self.answers.again(question)
        if told is None:
            self.found += 1
            told = []

            async def send(message: Message) -> None:
                told.append(message)

            sending = self.answers.keeping(question, send)
            await sending({"type": "http.response.start", "status": status, "headers": []})
            if change:
                self.answers.forget()
            await sending({"type": "http.response.body", "body": b"%d" % self.found, "more_body": True})
            await sending({"type": "http.response.body", "body": b"."})
        told[0]["headers"].append((b"x-request-id", b"mine"))
        assert len(told[0]["headers"]) == 1, "what is added on the way out is this request's alone"
        return b"".join(message.get("body", b"") for message in told)


async def test_now_and_then_every_answer_is_new() -> None:
    asking = Asking()
    for number in range(1, 20):
        assert await asking.ask() == b"%d." % number
        asking.now_s += 1 / OFTEN


async def test_again_and_again_it_is_told_for_a_moment() -> None:
    asking = Asking()
    told = [await asking.ask() for _ in range(3 * OFTEN)]
    assert told == [b"%d." % number for number in range(1, OFTEN + 1)] + [b"%d." % OFTEN] * 2 * OFTEN
    asking.now_s += FRESH_S + 0.01
    assert await asking.ask() == b"%d." % (OFTEN + 1), "it has become old"
    assert await asking.ask(("/v1/nodes", b"limit=2")) == b"%d." % (OFTEN + 2), "another question"
    for _ in range(20):  # ten seconds of two hundred a second: so many new ones a second, and no more
        for _ in range(100):
            await asking.ask()
            asking.now_s += 0.005
    assert asking.found < OFTEN + 3 + 11 * OFTEN


async def test_a_change_forgets_what_was_told_and_what_is_being_found_out() -> None:
    asking = Asking()
    for _ in range(3 * OFTEN):
        last = await asking.ask()
    asking.answers.forget()
    assert await asking.ask(change=True) != last
    fresh = await asking.ask()
    assert int(fresh[:-1]) == asking.found, "the answer before may be what was before the change"


async def test_errors_are_found_out_anew_and_answers_kept_are_bounded() -> None:
    asking = Asking()
    told = [await asking.ask(status=503) for _ in range(3 * OFTEN)]
    assert len(set(told)) == len(told)
    for number in range(2 * MOST_ANSWERS):
        await asking.ask(("/v1/blocks", b"%d" % number))
    assert len(asking.answers._asked) <= MOST_ANSWERS
