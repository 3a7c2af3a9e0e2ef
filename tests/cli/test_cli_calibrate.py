"""``kvstore calibrate`` on files and on a fake engine with known constants."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from kvstore.cli.app import root
from kvstore.cli.commands.workloads.engine_probe import MOST_BYTES, measure_engine
from kvstore.roofline.calibration import StepTimes, fit

TRUE = StepTimes(0.03, 1e-4, 2e-8)
LENGTHS = "200,400,800,1600"
FAST = ["--lengths", LENGTHS, "--rounds", "1", "--limit", "20"]


class _Engine(BaseHTTPRequestHandler):
    """Advances the server's clock as an engine with ``TRUE`` would, and answers as the server's mode says."""

    server: _Server

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.prompts.append(len(body["prompt"]))
        mode = self.server.mode
        if mode == "good":
            self.server.now += TRUE.seconds(len(body["prompt"]), 0)
        tokens = len(body["prompt"])
        usage: object = {"prompt_tokens": -5, "prompt_tokens_details": {"cached_tokens": 1 << 70}}
        usage = {"prompt_tokens": tokens} if mode == "good" else usage
        answer = json.dumps({"choices": [{}], "usage": usage}).encode()
        answer = {"huge": b"[" * (2 * MOST_BYTES), "nested": b"[" * 100_000, "no_json": b"\xff\x00", "list": b"[1]"}.get(
            mode, answer
        )
        if mode == "repeats":  # the key crosses the end of the shown text
            answer = b"x" * 180 + b"wrong key: " + self.headers["Authorization"].encode()
        if mode == "garbage":
            self.wfile.write(b"no HTTP, but " + self.headers["Authorization"].encode() + b"\r\n")
        if mode in ("gone", "garbage"):
            self.close_connection = True
            return
        self.send_response({"error": 500, "repeats": 401, "redirect": 307}.get(mode, 200))
        if mode == "good":
            self.server.keys.append(self.headers["Authorization"])
        if mode == "redirect":
            self.send_header("Location", "/elsewhere")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        if mode != "slow":
            self.wfile.write(answer)
            return
        for byte in answer:
            if self.server.ended.wait(0.1):
                return
            try:
                self.wfile.write(bytes([byte]))
            except OSError:
                return

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass


class _Server(ThreadingHTTPServer):
    mode = "good"
    now = 0.0

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Engine)
        self.prompts: list[int] = []
        self.keys: list[str | None] = []
        self.ended = threading.Event()

    def handle_error(self, request: object, client_address: object) -> None:
        pass


@contextmanager
def engine(mode: str) -> Iterator[tuple[_Server, str]]:
    server = _Server()
    server.mode = mode
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server, f"http://127.0.0.1:{server.server_address[1]}/v1"
    finally:
        server.ended.set()
        server.shutdown()
        thread.join(10)
        server.server_close()


def test_calibrate_engine_recovers_constants() -> None:
    with engine("good") as (server, url):
        samples = measure_engine(url, "m", [200, 400, 800, 1600], 3, most_tokens=1 << 20, limit_s=1e6, clock=lambda: server.now)
        shown = CliRunner().invoke(root, ["calibrate", "--engine", url, *FAST, "-o", "json"])
    found = fit(samples)
    assert len(samples) == 12
    assert (found.fixed_s, found.token_s, found.pair_s) == pytest.approx((TRUE.fixed_s, TRUE.token_s, TRUE.pair_s), rel=0.05)
    assert json.loads(shown.stdout)["samples"] == 4, "the real clock may give any fit"
    assert sorted(set(server.prompts)) == [200, 400, 800, 1600]


@pytest.mark.parametrize("mode", ["error", "redirect", "huge", "nested", "no_json", "list"])
def test_calibrate_hostile_engine_fails_in_one_line(mode: str) -> None:
    with engine(mode) as (server, url):
        shown = CliRunner().invoke(root, ["calibrate", "--engine", url, *FAST])
    assert shown.exit_code == 1
    assert "the engine at 127.0.0.1" in shown.output
    assert len(server.prompts) == 1


def test_calibrate_ended_connection_is_no_timeout() -> None:
    with engine("gone") as (_, url):
        shown = CliRunner().invoke(root, ["calibrate", "--engine", url, *FAST])
    assert shown.exit_code == 1
    assert "the request to the engine at 127.0.0.1 failed: RemoteDisconnected" in " ".join(shown.output.split())


def test_calibrate_lying_counts_are_ignored() -> None:
    with engine("lies") as (_, url):
        shown = CliRunner().invoke(root, ["calibrate", "--engine", url, *FAST, "-o", "json"])
    assert json.loads(shown.stdout)["samples"] == 4, "the real clock may give any fit"


def test_calibrate_slow_engine_ends_at_limit() -> None:
    with engine("slow") as (_, url):
        shown = CliRunner().invoke(root, ["calibrate", "--engine", url, *FAST, "--limit", "0.5"])
    assert shown.exit_code == 1
    assert "did not answer within" in shown.output


@pytest.mark.parametrize("key", ["secret\nkey", "secr\u00e9t", "secret\x01"])
def test_calibrate_key_not_for_http_is_not_shown(key: str) -> None:
    with engine("good") as (server, url):
        shown = CliRunner().invoke(root, ["calibrate", "--engine", url, *FAST], env={"KVSTORE_ENGINE_API_KEY": key})
    assert shown.exit_code == 1
    assert "a character that HTTP does not allow; correct --api-key" in " ".join(shown.output.split())
    assert "secr" not in shown.output
    assert server.prompts == []


@pytest.mark.parametrize("mode", ["repeats", "garbage"])
def test_calibrate_key_repeated_by_engine_is_not_shown(mode: str) -> None:
    with engine(mode) as (server, url):
        shown = CliRunner().invoke(root, ["calibrate", "--engine", url, *FAST, "--api-key", 'se"cret'])
    assert shown.exit_code == 1
    assert "Bearer" in shown.output
    assert "se" + '"' not in shown.output.replace("\\", "")
    assert len(server.prompts) == 1


def test_calibrate_key_with_line_end_is_sent_without_it() -> None:
    with engine("good") as (server, url):
        measure_engine(url, "m", [200], 1, most_tokens=1 << 20, limit_s=1e6, key="secret\n", clock=lambda: server.now)
    assert server.keys == ["Bearer secret"] * 2


def test_calibrate_drawing_past_limit_sends_nothing() -> None:
    times = iter([0.0, 2.0])
    with engine("good") as (server, url):
        assert measure_engine(url, "m", [200], 1, most_tokens=1 << 20, limit_s=1.0, clock=lambda: next(times)) == []
    assert server.prompts == []


def test_calibrate_token_limit_bounds_prompts() -> None:
    with engine("good") as (server, url):
        shown = CliRunner().invoke(root, ["calibrate", "--engine", url, *FAST, "--most-tokens", "700"])
    assert shown.exit_code == 1
    assert sum(server.prompts) <= 700


def test_calibrate_samples_give_configuration(tmp_path: Path) -> None:
    file = tmp_path / "steps.csv"
    rows = [
        (tokens, context, TRUE.seconds(tokens, context)) for tokens, context in ((100, 0), (900, 0), (4000, 0), (300, 30_000))
    ]
    file.write_text("tokens,context,seconds\n" + "".join(f"{a},{b},{c}\n" for a, b, c in rows))
    shown = CliRunner().invoke(root, ["calibrate", "--samples", str(file), "--read", "2", "--token-bytes", "100000"])
    assert shown.exit_code == 0, shown.output
    assert "alpha_tokens = 60000\n" in shown.output
    assert f"beta_tokens = {round(5 * 32_768 / TRUE.seconds(768, 32_000))}\n" in shown.output
    saved = CliRunner().invoke(root, ["calibrate", "--samples", str(file), "-o", "json"])
    (tmp_path / "calibration.json").write_text(saved.stdout)
    small = [
        "simulate",
        "--model",
        "llama-3-8b",
        "--profile",
        "agentic-32k",
        "--agents",
        "4",
        "--every",
        "40",
        "--policies",
        "split",
    ]
    run = CliRunner().invoke(root, [*small, "--calibration", str(tmp_path / "calibration.json")])
    assert run.exit_code == 0, run.output


def calibrated(tmp_path: Path, text: str, *arguments: str) -> Result:
    file = tmp_path / "steps.csv"
    file.write_text(text)
    return CliRunner().invoke(root, ["calibrate", "--samples", str(file), *arguments])


def rows_of(seconds: Sequence[float]) -> str:
    lines = zip((100, 900, 4000, 8000), seconds, strict=True)
    return "tokens, context, seconds\n" + "".join(f"{tokens}, 0, {value}\n" for tokens, value in lines)


def test_calibrate_short_prompt_scales_cached(tmp_path: Path) -> None:
    good = rows_of([TRUE.seconds(tokens, 0) for tokens in (100, 900, 4000, 8000)])
    shown = calibrated(tmp_path, good, "--prompt", "8192", "-o", "json")
    assert shown.exit_code == 0, shown.output
    assert json.loads(shown.stdout)["cached"] == 8000


@pytest.mark.parametrize(("seconds", "words"), [([1, 1, 1, 1], "does not grow"), ([0.1, 9, 0.1, 9], "the fit is off")])
def test_calibrate_bad_fit_fails_with_result(tmp_path: Path, seconds: list[float], words: str) -> None:
    shown = calibrated(tmp_path, rows_of(seconds))
    assert shown.exit_code == 1
    assert "alpha_tokens" in shown.stdout
    assert words in shown.stderr


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a,b\n1,2\n", "the header tokens,context,seconds"),
        ("tokens,context,seconds\n1,0,1\n1,0,nan\n", "steps.csv, sample 2"),
        (" " * (17 << 20), "use fewer samples"),
    ],
)
def test_calibrate_bad_file_names_place(tmp_path: Path, text: str, words: str) -> None:
    shown = calibrated(tmp_path, text)
    assert shown.exit_code == 1
    assert words in " ".join(shown.stderr.split())


def test_calibrate_refused_connection_names_port() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        place = f"127.0.0.1:{closed.getsockname()[1]}"
        shown = CliRunner().invoke(root, ["calibrate", "--engine", f"http://{place}", *FAST])
    assert shown.exit_code == 1
    assert f"connection refused: no engine listens at {place}" in shown.stderr


@pytest.mark.parametrize("text", ["", "a,b\n1,2\n", "[1]", "{", "tokens,context,seconds\n1,0,nan\n"])
def test_calibrate_bad_samples_fail_in_one_line(tmp_path: Path, text: str) -> None:
    file = tmp_path / "steps"
    file.write_text(text)
    shown = CliRunner().invoke(root, ["calibrate", "--samples", str(file)])
    assert shown.exit_code == 1
    assert "Traceback" not in shown.output
