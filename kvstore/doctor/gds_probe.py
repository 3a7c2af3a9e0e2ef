"""Probe: whether a node could use GPUDirect Storage on a folder. Runs in a separate process.

``python -m kvstore.doctor.gds_probe FOLDER SECONDS`` prints one JSON object.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from kvstore.tiers.io_engines.probe import GdsPath, glance_at_gds


def main(folder: Path, timeout_s: float) -> None:
    """Print one JSON object."""
    found = glance_at_gds(folder, timeout_s=timeout_s)
    said = {"path": found.path.value, "real": found.path is GdsPath.GDS, "why": found.why, "measured": found.measured}
    print(json.dumps(said | {"fix": found.fix, "facts": dict(found.facts)}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]))
