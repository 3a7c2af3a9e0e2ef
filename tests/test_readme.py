"""The README's Python snippet runs as it stands, and does what the text around it says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from kvstore.testing.cluster import LocalCluster, NodeSpec

README = Path(__file__).resolve().parent.parent / "README.md"


def test_the_tour_stores_then_loads_also_after_a_restart(tmp_path: Path) -> None:
    snippet, sketch = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    compile(sketch, "README", "exec")  # what needs two hosts is shown, not run

    def run(address: str) -> list[str]:
        program = snippet.replace("127.0.0.1:7400", address)
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    with LocalCluster([NodeSpec("tour", dram_bytes=64 << 20, nvme_bytes=256 << 20)], tmp_path) as cluster:
        assert run(cluster.metadata_address) == ["0 of 156 blocks loaded, 0 MiB, by tier {}", "19 MiB stored, durable: True"]
        assert run(cluster.metadata_address)[0] == "156 of 156 blocks loaded, 19 MiB, by tier {'DRAM': 20447232}"
        cluster.kill("tour")
        cluster.start_node("tour")
        assert run(cluster.metadata_address)[0] == "156 of 156 blocks loaded, 19 MiB, by tier {'NVME': 20447232}"
