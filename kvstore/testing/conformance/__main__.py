"""Run faults against KV connectors of vLLM, and print which of them gave wrong tokens, hung or crashed.

Each run has three engines with one storage. The first one stores prompts. Then a fault strikes, and the second one loads. Killed
processes are started again, and the third one loads, except after a change of weights. All tokens are compared with vLLM alone.

    kvstore-conformance                                        the connectors of this store and vLLM's fs tier, one run per fault
    kvstore-conformance --target kvstore-tier --seeds 0:20     20 runs per fault
    kvstore-conformance --target mine.json --fault bytes_changed
    kvstore-conformance --output conformance.json

A file describes another connector: {"name": "mine", "kv_transfer_config": {...}, "server": ["program", "--port", "{port}"]}.
{folder}, {host}, {port}, {port2} and {spare_port} in its texts are replaced. The exit status is 1 if a run gave wrong tokens,
hung, crashed or failed, and if a connector never loaded anything.

Requires vLLM, and transformers unless --model and --other-model are given. Engines run in this environment, on its device.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from kvstore.core.errors import KVStoreError
from kvstore.testing.conformance.engine import ConnectorDriver
from kvstore.testing.conformance.faults import ConnectorFault
from kvstore.testing.conformance.report import table
from kvstore.testing.conformance.runs import BAD, Models, Runner, RunResult
from kvstore.testing.conformance.targets import DEFAULT, KNOWN, ConnectorTarget, target_of

_QUIET = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    given = _parser().parse_args(arguments)
    try:
        targets = [target_of(one) for one in dict.fromkeys(given.target or DEFAULT)]
    except KVStoreError as error:
        print(f"kvstore-conformance: {error}", file=sys.stderr)
        return 2
    if (given.model is None) != (given.other_model is None):
        print("kvstore-conformance: --model and --other-model must be given together", file=sys.stderr)
        return 2
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    with tempfile.TemporaryDirectory(prefix="kvstore-conformance-") as scratch:
        folder = Path(scratch)
        model, other = given.model or _tiny(folder / "first", 0), given.other_model or _tiny(folder / "other", 1)
        print("engine alone: computing the right answers", file=sys.stderr, flush=True)
        models = Models.make(ConnectorDriver(model, dtype=given.dtype, log=given.log), other, folder)
        results = [result for target in targets for result in _runs(target, models, given.fault, given.seeds, folder)]
    print(table(results))
    if given.output is not None:
        given.output.write_text(json.dumps([asdict(one) for one in results], indent=1) + "\n")
    tested = {one.target for one in results if one.loaded_tokens}
    return int(any(one.verdict in BAD or one.target not in tested for one in results))


def _runs(target: ConnectorTarget, models: Models, wanted: Sequence[str] | None, seeds: range, folder: Path) -> list[RunResult]:
    runner = Runner(target, models, folder)
    results: list[RunResult] = []
    try:
        for fault in (one for one in ConnectorFault if one in target.faults and (not wanted or one.name.lower() in wanted)):
            for seed in seeds:
                result = runner.run(fault, seed)
                results.append(result)
                print(
                    f"{target.name}: {fault}, seed {seed}: {result.verdict}, {result.loaded_tokens} tokens loaded,"
                    f" {result.seconds:.0f} s{'; ' + result.detail if result.detail else ''}",
                    file=sys.stderr,
                    flush=True,
                )
    finally:
        runner.close()
    return results


def _tiny(folder: Path, seed: int) -> Path:
    from kvstore.testing.tiny_models import TinyModel, make_model

    return make_model(folder, TinyModel(hidden=128, head_dim=32, max_tokens=4096, seed=seed))


def _seeds(text: str) -> range:
    first, _, end = text.partition(":")
    if not first.isdecimal() or not (end or "0").isdecimal() or not (seeds := range(int(first), int(end or int(first) + 1))):
        raise argparse.ArgumentTypeError(f"{text}: two numbers FIRST:END, with FIRST below END")
    return seeds


def _folder(text: str) -> Path:
    if not Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"{text}: no such folder")
    return Path(text)


def _parser() -> argparse.ArgumentParser:
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("kvstore-conformance", description=__doc__, formatter_class=layout)
    targets = f"of {', '.join(KNOWN)} ({', '.join(DEFAULT)}); may be repeated"
    parser.add_argument("--target", action="append", metavar="NAME|FILE.json", help=targets)
    faults = [fault.name.lower() for fault in ConnectorFault]
    parser.add_argument("--fault", action="append", choices=faults, metavar="FAULT", help=f"of {', '.join(faults)} (all)")
    parser.add_argument("--seeds", type=_seeds, default=range(1), metavar="FIRST:END", help="seeds of each fault (0:1)")
    parser.add_argument("--model", type=_folder, help="folder of the model (a tiny one is made)")
    parser.add_argument("--other-model", type=_folder, help="folder of a model with equal configuration and other weights")
    parser.add_argument("--dtype", default="float32", help="of the model (float32: greedy tokens repeat exactly on CPUs)")
    parser.add_argument(
        "--log", type=Path, default=Path(os.devnull), metavar="FILE", help="file for the output of engines (none)"
    )
    parser.add_argument("--output", type=Path, metavar="FILE.json", help="also write all runs to a file")
    return parser


if __name__ == "__main__":
    sys.exit(main())
