"""Collect facts of the host. Probes run in parallel, each in a separate process with a timeout. A failed probe is a fact too."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from kvstore.doctor.facts import ProbeResults, Requirements, Section
from kvstore.process.run_with_timeout import run_with_timeout

PROBE_S = 10.0
GDS_S = 30.0
HOST = "kvstore.doctor.host_probes"
GDS = "kvstore.doctor.gds_probe"
NIXL = "kvstore.doctor.nixl_probe"


def collect(wanted: Requirements, *, timeout_s: float = PROBE_S, gds_timeout_s: float = GDS_S) -> ProbeResults:
    """Collect the facts of this host. Takes as long as the slowest probe. A failing probe raises nothing.

    Args:
        wanted: requirements of the configuration; its folders are probed. With ``gds`` off, kvikio is not loaded.
        timeout_s: limit per probe.
        gds_timeout_s: limit per measurement of GPUDirect Storage.
    """
    asked: dict[str, Callable[[], Section]] = {
        name: partial(run_probe, HOST, [name], timeout_s) for name in ("system", "gpu", "memory", "network", "disks")
    }
    for number, volume in enumerate(wanted.volumes):
        asked[f"volume:{number}"] = partial(run_probe, HOST, ["folder", str(volume.path)], timeout_s)
        if wanted.gds != "off":
            # the probe limits its measurement itself; timeout_s is extra time for a folder that does not respond
            asked[f"gds:{number}"] = partial(run_probe, GDS, [str(volume.path), str(gds_timeout_s)], gds_timeout_s + timeout_s)
    if wanted.nixl is not None:
        asked["nixl"] = partial(run_probe, NIXL, [wanted.nixl.devices, wanted.nixl.transports], timeout_s)
    for number, mount in enumerate(wanted.mounts):
        asked[f"mount:{number}"] = partial(run_probe, HOST, ["folder", str(mount)], timeout_s)
    for number, tls in enumerate(wanted.tls):
        files = [str(file or "") for file in (tls.ca, tls.cert, tls.key)]
        asked[f"tls:{number}"] = partial(run_probe, HOST, ["certificates", *files], timeout_s)
    with ThreadPoolExecutor(len(asked), thread_name_prefix="doctor") as threads:
        answers = {name: threads.submit(ask) for name, ask in asked.items()}
        return ProbeResults({name: answer.result() for name, answer in answers.items()})


def run_probe(module: str, arguments: Sequence[str], timeout_s: float) -> Section:
    """Run a probe module and parse the JSON object in its last output line."""
    try:
        ran = run_with_timeout([sys.executable, "-m", module, *arguments], timeout_s)
    except OSError as error:
        return Section({}, f"cannot be started: {error.strerror or error}")
    if ran.code is None:
        return Section({}, f"gave no answer within {timeout_s:g} s")
    try:
        said = json.loads(ran.output.strip().rsplit("\n", 1)[-1])
    except ValueError:
        said = None
    if ran.code != 0 or not isinstance(said, dict):
        last = ran.errors.strip().rsplit("\n", 1)[-1][:200]
        return Section({}, f"failed with code {ran.code}: {last or 'it said nothing'}")
    return Section(said)
