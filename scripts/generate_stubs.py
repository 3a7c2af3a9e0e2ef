"""Generate ``proto/kvproto`` from ``proto/kvstore``. With ``--check``, fail if the committed stubs differ.

The proto package is ``kvstore.v1``, whose Python module would collide with the ``kvstore`` package. So the stubs are in
``kvproto.v1``, with rewritten imports. Requires the versions pinned in ``constraints.txt``: other generators write other bytes.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from importlib.resources import files
from pathlib import Path

from grpc_tools import protoc

PROTO_ROOT = Path(__file__).resolve().parent.parent / "proto"
STUBS = PROTO_ROOT / "kvproto"


def generate(into: Path) -> None:
    """Write all stubs below ``into``, the package ``kvproto``."""
    sources = sorted(str(path) for path in (PROTO_ROOT / "kvstore").rglob("*.proto"))
    with tempfile.TemporaryDirectory() as scratch:
        arguments = [f"-I{PROTO_ROOT}", f"-I{files('grpc_tools') / '_proto'}"]
        arguments += [f"--{plugin}_out={scratch}" for plugin in ("python", "pyi", "grpc_python")]
        if protoc.main(["protoc", *arguments, *sources]) != 0:
            raise SystemExit("protoc failed")
        for made in sorted((Path(scratch) / "kvstore").rglob("*.py*")):
            target = into / made.relative_to(Path(scratch) / "kvstore")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(re.sub(r"^from kvstore\.v1 import", "from kvproto.v1 import", made.read_text(), flags=re.MULTILINE))
    (into / "__init__.py").write_text('"""Generated from proto/kvstore by scripts/generate_stubs.py: do not edit."""\n')
    (into / "v1" / "__init__.py").write_text('"""Stubs of the package kvstore.v1."""\n')


def drift() -> list[str]:
    """Return the names of stubs that differ from newly generated ones."""
    with tempfile.TemporaryDirectory() as fresh:
        generate(Path(fresh))
        names = {
            path.relative_to(root)
            for root in (Path(fresh), STUBS)
            for path in root.rglob("*.py*")
            if path.suffix in {".py", ".pyi"}
        }
        return sorted(
            str(name)
            for name in names
            if not (STUBS / name).exists()
            or not (Path(fresh) / name).exists()
            or (STUBS / name).read_bytes() != (Path(fresh) / name).read_bytes()
        )


def main() -> None:
    """Parse the arguments and run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 if the committed stubs differ")
    if not parser.parse_args().check:
        generate(STUBS)
        return
    if drifted := drift():
        sys.exit(f"stubs have drifted, run scripts/generate_stubs.py: {', '.join(drifted)}")


if __name__ == "__main__":
    main()
