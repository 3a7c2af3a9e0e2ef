"""``kvstore calibrate``: fit the constants of scheduler and simulator to measured step times."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvstore.cli.support import result
from kvstore.cli.support.help import Command
from kvstore.cli.support.result import CommandOutput
from kvstore.core.errors import InvalidArgument

if TYPE_CHECKING:
    from kvstore.roofline.calibration import StepSample, StepTimes

_MOST_FILE_BYTES = 16 << 20
_MOST_ERROR = 0.2
"""Largest median error of a fit, as a share of the sample, that is no failure."""
_LEAST_GROWTH = 1e-6
"""Minimum relative growth of the fitted time from an empty to a typical prompt. Less is an error of rounding."""
_HEADER = "tokens,context,seconds"
_LENGTHS = "256,512,1024,2048,4096,8192"


def _lengths(ctx: click.Context, param: click.Parameter, value: str) -> list[int]:
    try:
        lengths = [int(part) for part in value.split(",")]
    except ValueError:
        lengths = []
    if len(set(lengths)) < 4 or not all(1 <= length <= 1 << 20 for length in lengths):
        raise click.BadParameter("at least four different lengths such as 256,512,1024,2048", ctx, param)
    return sorted(set(lengths))


@click.command(cls=Command)
@click.option(
    "--samples",
    type=click.Path(dir_okay=False, path_type=Path),
    help="CSV with the columns tokens,context,seconds, or JSON with a list of such objects.",
)
@click.option("--engine", metavar="URL", help="Measure this OpenAI-compatible engine instead, such as http://host:8000.")
@click.option("--engine-model", default="", help="Name of the model at the engine.")
@click.option("--api-key", envvar="KVSTORE_ENGINE_API_KEY", help="API key of the engine (or KVSTORE_ENGINE_API_KEY).")
@click.option("--lengths", callback=_lengths, default=_LENGTHS, show_default=True, help="Lengths of the prompts sent, in tokens.")
@click.option("--rounds", type=click.IntRange(1, 100), default=3, show_default=True, help="Prompts per length that count.")
@click.option(
    "--most-tokens", type=click.IntRange(1), default=200_000, show_default=True, help="Maximum number of prompt tokens sent."
)
@click.option(
    "--limit", type=click.FloatRange(0.1, 3600), default=60.0, show_default=True, help="Time limit of the measurement in seconds."
)
@click.option(
    "--token-bytes", type=click.IntRange(1), default=131_072, show_default=True, help="KV bytes per token of the model."
)
@click.option(
    "--read",
    "read_rate",
    type=click.FloatRange(0, min_open=True),
    default=3.1,
    show_default=True,
    help="Storage link, GB/s. 'kvstore nodes show NODE' prints the rate that planned loads have measured.",
)
@click.option("--prompt", type=click.IntRange(1), default=32_768, show_default=True, help="Tokens of a typical prompt.")
@click.option("--cached", type=click.IntRange(0), help="Cached tokens of a typical prompt (default: 125/128 of it).")
@result.prints
def calibrate(
    samples: Path | None,
    engine: str | None,
    engine_model: str,
    api_key: str | None,
    lengths: list[int],
    rounds: int,
    most_tokens: int,
    limit: float,
    token_bytes: int,
    read_rate: float,
    prompt: int,
    cached: int | None,
) -> CommandOutput:
    """Fit alpha_tokens and beta_tokens, and the step times of the simulator, to a real engine.

    It reads measured forward passes from a file, or sends prompts of random tokens to an engine that is otherwise idle. It prints
    the [metadata] section for kvstore.toml. 'kvstore simulate --calibration' reads the JSON.

    Examples:
      kvstore calibrate --samples steps.csv --token-bytes 131072 --read 3.1
      kvstore calibrate --engine http://localhost:8000 --engine-model llama-3-8b
      kvstore calibrate --samples steps.csv -o json > calibration.json
    """
    from kvstore.roofline.calibration import fit, limits_of

    if (samples is None) == (engine is None):
        raise click.UsageError("give either --samples or --engine")
    found = _read(samples) if samples is not None else []
    if engine is not None:
        found = _measure(engine, engine_model, lengths, rounds, most_tokens, limit, api_key)
    times = fit(found)
    cached = prompt * 125 // 128 if cached is None else cached
    alpha, beta = limits_of(times, prompt, cached, read_rate * 1e9, token_bytes)
    data = {
        "metadata": {"alpha_tokens": alpha, "beta_tokens": beta},
        "step_times": times.to_json(),
        "samples": len(found),
        "prompt": prompt,
        "cached": cached,
        "read_bytes_s": read_rate * 1e9,
        "token_bytes": token_bytes,
    }
    warning = _warning(times, prompt)
    return CommandOutput(data, lambda: click.echo(_toml(alpha, beta, times, len(found))), int(warning is not None), warning)


def _warning(times: StepTimes, prompt: int) -> str | None:
    """Say why a fit should not be used; None: it may be."""
    if times.seconds(prompt, 0) <= times.fixed_s * (1 + _LEAST_GROWTH):
        return "the fitted time does not grow with the tokens: measure longer prompts, on an engine that is otherwise idle"
    if times.error > _MOST_ERROR:
        return (
            f"the fit is off by {times.error:.0%} (median), above {_MOST_ERROR:.0%}: measure again, on an engine that is"
            " otherwise idle"
        )
    return None


def _toml(alpha: int, beta: int, times: StepTimes, count: int) -> str:
    return (
        f"# {count} samples, median error of the fit {times.error:.1%}\n"
        f"# a pass: {times.fixed_s * 1e3:.3g} ms + {times.token_s * 1e6:.3g} us per token"
        f" + {times.pair_s * 1e12:.3g} ps per pair\n"
        f"[metadata]\nalpha_tokens = {alpha}\nbeta_tokens = {beta}"
    )


def _measure(
    engine: str, model: str, lengths: list[int], rounds: int, most_tokens: int, limit: float, key: str | None
) -> list[StepSample]:
    from kvstore.cli.commands.workloads.engine_probe import measure_engine
    from kvstore.replay.progress import progress

    with progress("calibrate", len(lengths) * (rounds + 1), unit="prompts") as report:
        return measure_engine(
            engine,
            model,
            lengths,
            rounds,
            most_tokens=most_tokens,
            limit_s=limit,
            key=key,
            measured=lambda sent: report(sent, ""),
        )


def _read(file: Path) -> list[StepSample]:
    from kvstore.roofline.calibration import checked

    if file.stat().st_size > _MOST_FILE_BYTES:
        raise InvalidArgument(f"{file} has more than {_MOST_FILE_BYTES} bytes; use fewer samples")
    try:
        text = file.read_text(encoding="utf-8-sig")
        is_json = text.lstrip().startswith(("[", "{"))
        rows = json.loads(text) if is_json else list(csv.DictReader(text.splitlines(), skipinitialspace=True))
    except (ValueError, RecursionError, csv.Error) as error:
        raise InvalidArgument(f"{file} is neither CSV nor JSON: {error}") from error
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise InvalidArgument(f"{file} must be a list of samples with tokens, context and seconds")
    if not is_json and rows and not {"tokens", "seconds"} <= rows[0].keys():
        raise InvalidArgument(f"{file}: the first line must be the header {_HEADER}")
    samples = []
    for number, row in enumerate(rows, start=1):
        try:
            samples.append(checked(row.get("tokens"), row.get("context") or 0, row.get("seconds")))
        except InvalidArgument as error:
            raise InvalidArgument(f"{file}, sample {number}: {error}; a sample is {_HEADER}") from error
    return samples
