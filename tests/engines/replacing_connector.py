"""The connector in a vLLM whose weights' files are replaced by others once they were read, before the connector looks at them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from kvclient.engines.vllm.connector import KVStoreConnector

FOLDER, OTHERS, HOW = "TEST_WEIGHTS", "TEST_OTHER_WEIGHTS", "TEST_REPLACED_BY"
"""Environment variables: the model's folder, another's, and the way."""


class ReplacingConnector(KVStoreConnector):
    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        if role is KVConnectorRole.WORKER:  # made once the model was loaded
            replace(Path(os.environ[FOLDER]), Path(os.environ[OTHERS]), os.environ[HOW])
        super().__init__(vllm_config, role, kv_cache_config)


def replace(folder: Path, others: Path, how: str) -> None:
    weights = folder / "model.safetensors"
    if how == "written":
        with weights.open("r+b") as file, (others / weights.name).open("rb") as other:
            shutil.copyfileobj(other, file)
    elif how == "renamed":
        shutil.copyfile(others / weights.name, folder / "new")
        (folder / "new").rename(weights)
    elif how == "folders swapped":
        kept = shutil.copytree(others, folder.with_name("kept"))
        folder.rename(folder.with_name("old"))
        kept.rename(folder)
    else:
        raise ValueError(how)
