"""Which versions of vLLM the connectors accept."""

from __future__ import annotations

from importlib import metadata
from unittest import mock

import pytest

from kvclient.engines.vllm import versions
from kvstore.core.errors import Unsupported


@pytest.mark.parametrize("installed", ["0.32.0", "0.32.1+cpu", "0.32.2.dev3+gabc"])
def test_vllm_tested_version_is_accepted(installed: str) -> None:
    versions.check_version(installed, allow_untested=False)


@pytest.mark.parametrize("installed", ["0.31.9", "0.33.0", "0.3.2", "1.32.0", "0.1.dev1+gabc", "dev"])
def test_vllm_other_version_is_refused_unless_allowed(installed: str, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(Unsupported, match=r"allow_untested_vllm.*tested=0\.32"):
        versions.check_version(installed, allow_untested=False)
    versions.check_version(installed, allow_untested=True)
    assert "untested version of vLLM" in caplog.text


@pytest.mark.parametrize(("installed", "raised"), [("0.99.0", Unsupported), ("0.32.0", ImportError), (None, ImportError)])
def test_vllm_missing_interface_names_tested_versions(installed: str | None, raised: type[Exception]) -> None:
    found = mock.Mock(side_effect=metadata.PackageNotFoundError) if installed is None else mock.Mock(return_value=installed)
    with mock.patch.object(metadata, "version", found), pytest.raises(raised), versions.vllm_imports():
        raise ImportError("cannot import name 'X' from 'vllm'")
