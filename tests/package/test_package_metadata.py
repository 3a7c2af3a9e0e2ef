"""The version, the extras and the changelog agree with the documentation."""

from __future__ import annotations

import re
import shlex
import subprocess
import tomllib

import pytest
import yaml
from bare_environment import REPOSITORY

import kvstore
from kvstore.core.errors import install_command

PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
EXTRAS_PAGE = REPOSITORY / "docs" / "reference" / "packages.md"


def test_extras_page_lists_every_extra() -> None:
    rows = re.findall(r"^\| (`.+?`) \|", EXTRAS_PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(re.findall(r"`([^`]+)`", " ".join(rows))) == sorted(PROJECT["project"]["optional-dependencies"])


def test_install_command_searches_no_index_for_the_package() -> None:
    """pip finds the extra in the installed package; its libraries are part of the test environment."""
    pytest.importorskip("pip")
    command = [*shlex.split(install_command("admin")), "--no-index", "--dry-run", "--quiet"]
    done = subprocess.run(command, cwd="/", capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr


def test_version_of_chart_and_project_are_one() -> None:
    chart = yaml.safe_load((REPOSITORY / "deploy/helm/kvstore/Chart.yaml").read_text(encoding="utf-8"))
    assert "version" in PROJECT["project"]["dynamic"]
    assert {chart["version"], chart["appVersion"]} == {kvstore.__version__}


def test_changelog_keeps_its_form() -> None:
    text = (REPOSITORY / "CHANGELOG.md").read_text(encoding="utf-8")
    releases = re.findall(r"^## \[(.+?)\](.*)$", text, re.MULTILINE)
    assert releases[0] == ("Unreleased", "")
    assert releases[1][0] == kvstore.__version__
    assert all(re.fullmatch(r" - \d{4}-\d\d-\d\d", date) for _, date in releases[1:])
    assert set(re.findall(r"^### (.+)$", text, re.MULTILINE)) <= {
        "Added",
        "Changed",
        "Deprecated",
        "Removed",
        "Fixed",
        "Security",
    }
