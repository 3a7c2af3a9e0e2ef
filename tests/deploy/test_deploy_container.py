"""Checks of the Dockerfile and the compose file that need no container engine."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from deployed import DOCKERFILE, REPOSITORY, compose, compose_daemons, image

HADOLINT = Path(sys.executable).with_name("hadolint")


@pytest.mark.skipif(not HADOLINT.exists(), reason="no hadolint beside this Python: requirements-deploy.txt")
def test_hadolint_finds_nothing() -> None:
    done = subprocess.run([str(HADOLINT), str(DOCKERFILE)], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_bases_are_pinned_and_the_user_is_not_root() -> None:
    whole, last = image()
    bases = [line.partition("=")[2] for line in whole.all("ARG") if "BASE=" in line]
    assert len(bases) == 2
    assert all(re.search(r":\d+\.\d+", base) for base in bases)
    user, group = last.last("USER").split(":")
    assert user == group != "0"
    assert f"useradd --uid {user} " in " ".join(last.all("RUN"))
    names = {line.partition(" AS ")[2] for line in whole.all("FROM")}
    assert {"cpu", "cuda", "build"} <= names


def test_dockerfile_copied_files_exist() -> None:
    whole, _ = image()
    ignored = DOCKERFILE.with_name("Dockerfile.dockerignore").read_text().splitlines()
    sent = {line[1:] for line in ignored if line.startswith("!")}
    copied = {source for line in whole.all("COPY") if not line.startswith("--from") for source in line.split()[:-1]}
    assert copied == sent
    assert all((REPOSITORY / source).exists() for source in copied)
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    packages = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert {package.split("/")[0] for package in packages} <= copied


def test_dockerfile_extras_exist() -> None:
    whole, _ = image()
    extras = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    hardware = (REPOSITORY / "requirements-hardware.txt").read_text()
    asked = [dict(part.split("=", 1) for part in line.split() if "=" in part) for line in whole.all("ENV") if "EXTRAS" in line]
    assert len(asked) == 2
    for variant in asked:
        assert set(variant["EXTRAS"].split(",")) <= set(extras)
        for package in variant["HARDWARE"].strip('"').split():
            assert re.search(rf"^{package}==", hardware, re.MULTILINE)


def test_compose_file_is_valid() -> None:
    compose_spec = pytest.importorskip("compose_spec", reason="requirements-deploy.txt is not installed")
    document = compose()
    compose_spec.PyCompose.from_json(json.dumps(document))
    document["services"]["metadata"]["netwroks"] = ["compute"]
    with pytest.raises(ValueError, match="netwroks"):
        compose_spec.PyCompose.from_json(json.dumps(document))


def test_compose_services_have_minimal_rights() -> None:
    for name, service in compose()["services"].items():
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        if "build" in service:
            assert service["read_only"] is True, name
            assert service["stop_grace_period"] == "1m", name
            assert compose_daemons()[name].grace_ms <= 30_000, name
        else:
            assert re.fullmatch(r"[a-z]+/[a-z]+:v?\d+\.\d+\.\d+", service["image"]), name
