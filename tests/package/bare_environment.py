"""Virtual environments that hold a built wheel and its declared dependencies, nothing else.

Dependencies are links to the distributions of this Python, so no package index is asked. Only requirements in the metadata of the
wheel are followed: a module that the wheel imports without declaring it is missing in the environment.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import venv
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib.metadata import Distribution, PathDistribution, distribution, packages_distributions
from pathlib import Path, PurePosixPath
from typing import Final

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

REPOSITORY: Final = Path(__file__).resolve().parents[2]
OWN_NAME: Final = "kvstore-dualpath"
_BUILD_S: Final = 120


def copied_tree(folder: Path) -> Path:
    """Copy what a wheel is built from, so that a build leaves the working tree as it is."""
    for name in ("kvstore", "clients", "proto", "scripts"):
        shutil.copytree(REPOSITORY / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE", "constraints.txt"):
        shutil.copy(REPOSITORY / name, folder)
    return folder


def build_packages(folder: Path, out_of: Path = REPOSITORY) -> tuple[Path, Path]:
    """Build wheel and sdist of a tree in ``folder``, as ``make wheel`` does in ``dist``."""
    command = [sys.executable, "-m", "hatchling", "build", "--directory", str(folder)]
    subprocess.run(command, cwd=out_of, check=True, capture_output=True, timeout=_BUILD_S)
    (wheel,) = folder.glob("*.whl")
    (sdist,) = folder.glob("*.tar.gz")
    return wheel, sdist


def install_wheel(wheel: Path, folder: Path, extras: Sequence[str] = ()) -> Path:
    """Make a virtual environment with ``wheel`` and the requirements of these extras.

    Returns:
        The folder with the programs of the environment.
    """
    venv.create(folder, with_pip=False, symlinks=True)
    programs = folder / "bin"
    pip = [sys.executable, "-m", "pip", "--python", str(programs / "python"), "install"]
    subprocess.run(
        [*pip, "--quiet", "--no-deps", "--no-index", str(wheel)],
        check=True,
        capture_output=True,
        timeout=_BUILD_S,
    )
    packages = site_packages(folder)
    for needed in declared(own_metadata(packages), extras):
        link(needed, packages)
    return programs


def add_extra(bare: Path, folder: Path, extra: str) -> Path:
    """Make a virtual environment that sees the packages of ``bare`` and the requirements of one extra. Returns its Python."""
    venv.create(folder, with_pip=False, symlinks=True)
    packages = site_packages(folder)
    (packages / "bare.pth").write_text(f"{site_packages(bare)}\n")
    for needed in declared(own_metadata(site_packages(bare)), [extra]):
        link(needed, packages)
    return folder / "bin" / "python"


def site_packages(folder: Path) -> Path:
    """The packages of a virtual environment."""
    (packages,) = folder.glob("lib/python*/site-packages")
    return packages


def own_metadata(packages: Path) -> Distribution:
    """The metadata of the installed wheel."""
    (metadata,) = packages.glob("kvstore_dualpath-*.dist-info")
    return PathDistribution(metadata)


def declared(first: Distribution, extras: Sequence[str]) -> Iterator[Distribution]:
    """Find the distributions that ``first`` with ``extras`` declares, directly or through others, without ``first`` itself."""
    waiting, seen = [(first, frozenset(extras))], set[tuple[str, frozenset[str]]]()
    while waiting:
        one, asked = waiting.pop()
        for text in one.requires or ():
            requirement = Requirement(text)
            name = canonicalize_name(requirement.name)
            wanted = requirement.marker is None or any(requirement.marker.evaluate({"extra": each}) for each in (*asked, ""))
            key = (name, frozenset(requirement.extras))
            if not wanted or key in seen:
                continue
            seen.add(key)
            found = first if name == OWN_NAME else distribution(name)
            waiting.append((found, key[1]))
            if found is not first:
                yield found


def link(package: Distribution, packages: Path) -> None:
    """Link ``package`` into another ``site-packages``: whole folders, or single files if several distributions share a folder."""
    for file in package.files or ():
        path = PurePosixPath(file)
        if ".." in path.parts or "__pycache__" in path.parts:
            continue  # programs, and compiled modules
        if len(_owners().get(path.parts[0], [])) <= 1:
            path = PurePosixPath(path.parts[0])
        target = packages / path
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to(Path(str(package.locate_file(path))).resolve())


@cache
def _owners() -> Mapping[str, list[str]]:
    """Distributions by the folder or module at the top that they have files in."""
    return {name: sorted(set(owners)) for name, owners in packages_distributions().items()}
