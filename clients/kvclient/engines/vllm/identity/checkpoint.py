"""The weights of an engine, named by the files that it loaded, so that the name does not depend on tensor parallelism.

The tensors that a worker holds are shards: their digests differ between engines of different tensor parallelism. The files of the
checkpoint do not. They are read whole, so that a change of a single number gives another name.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from kvclient.engines.vllm.identity.engine_facts import model_files
from kvclient.engines.vllm.identity.model_weights import combined_digest

_log = logging.getLogger(__name__)
_PREFIX = "files:"


def checkpoint_digest(vllm_config: Any) -> str:  # noqa: ANN401
    """Digest the files that this worker loaded; empty: they do not identify its weights.

    Weights of a draft model are in other files, so an engine with speculative decoding is not identified.
    """
    if vllm_config.speculative_config is not None:
        return ""
    try:
        return model_files(vllm_config).checkpoint_digest()
    except OSError as error:
        _log.warning("checkpoint not readable (error=%s)", error)
        return ""


def weights_name(held: Sequence[str], checkpoints: Sequence[str]) -> str:
    """Return the name of the weights of all workers.

    Args:
        held: by rank: digest of the tensors in its memory.
        checkpoints: by rank: from ``checkpoint_digest``; nothing: tensor parallelism is in the namespace anyway.

    Returns:
        The name of the checkpoint if all workers loaded the same one. Otherwise a digest of the tensors of all ranks.
    """
    if len(set(checkpoints)) == 1 and checkpoints[0]:
        return f"{_PREFIX}{checkpoints[0]}"
    return combined_digest(held)
