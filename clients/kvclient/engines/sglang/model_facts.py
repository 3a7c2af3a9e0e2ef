"""Identifies the model of an SGLang engine by its configuration and weight files, from the server's arguments.

SGLang passes only the model's name to a storage backend. The server's arguments are available in the same process. Without a
server (host pools and controllers used directly) nothing is known, and the user must set ``weights_epoch``.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from kvclient.engines.model_files import ModelFiles, replaced_path, sampled_digest

_log = logging.getLogger(__name__)
_ARGUMENTS = (
    "context_length",
    "custom_weight_loader",
    "dtype",
    "json_model_override_args",
    "model_impl",
    "quantization",
    "quantization_param_path",
    "torchao_config",
)
"""Arguments that change the KV computed from the same files."""
_DRAFT = "speculative_draft_"
_NOT_THE_MODEL = ("_name_or_path", "transformers_version")
_PROCESSORS = "*processor_config.json"
"""Files of models that read images, video or audio: how these are prepared."""
_MOST_CONFIG_BYTES = 16 << 20
_DIGEST_CHARS = 16


def server_arguments() -> Any:  # noqa: ANN401  # SGLang's ServerArgs
    """Return the arguments of this process's server; None: no server."""
    try:
        from sglang.srt.runtime_context import get_server_args

        return get_server_args()
    except (ImportError, AttributeError, RuntimeError, ValueError):
        return None


def model_text(arguments: Any, *, draft: bool, sample: bool, make_unique: Callable[[], str]) -> str:  # noqa: ANN401
    """Digest the model and the adapters that SGLang was started with, because its hashes contain only their names and paths.

    Args:
        arguments: SGLang's arguments, or None.
        draft: include the draft model, if there is one: additional pools may hold its KV.
        sample: read the weight files; False if the user names the weights.
        make_unique: makes a text that no other engine has, for weights that cannot be identified.

    Returns:
        Empty if nothing is known.

    Raises:
        OSError: files cannot be read.
    """
    if arguments is None:
        return ""
    facts: dict[str, Any] = {name: getattr(arguments, name, None) for name in _ARGUMENTS}
    if scales := facts["quantization_param_path"]:
        facts["quantization_param_path"] = _of_scales(Path(scales), make_unique)
    if restored := getattr(arguments, "modelopt_checkpoint_restore_path", None):
        facts["modelopt_checkpoint_restore_path"] = restored
    facts["model"] = _of_files(arguments, "", sample=sample, make_unique=make_unique)
    if draft and getattr(arguments, f"{_DRAFT}model_path", None):
        facts["draft"] = _of_files(arguments, _DRAFT, sample=sample, make_unique=make_unique)
        facts["draft_quantization"] = getattr(arguments, f"{_DRAFT}model_quantization", None)
    facts["adapters"] = sorted(_of_adapter(path, make_unique) for path in _adapter_paths(getattr(arguments, "lora_paths", None)))
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:_DIGEST_CHARS]


def _of_files(arguments: Any, whose: str, *, sample: bool, make_unique: Callable[[], str]) -> list[object]:  # noqa: ANN401
    """Configuration and weights of the model, or of the draft model."""

    def own(name: str) -> Any:  # noqa: ANN401
        given = getattr(arguments, f"{whose}{name}", None)
        return getattr(arguments, name, None) if given is None and name == "load_format" else given

    loader = str(getattr(arguments, "model_loader_extra_config", None) or "")
    source = ModelFiles(
        str(own("model_path")),
        str(getattr(own("load_format"), "value", own("load_format")) or "auto"),
        "" if loader == "{}" else loader,
        requested_revision=str(own("revision" if not whose else "model_revision") or ""),
        cache=str(getattr(arguments, "download_dir", None) or ""),
    )
    try:
        with (source.folder / "config.json").open("rb") as file:
            config = json.loads(file.read(_MOST_CONFIG_BYTES))
    except (FileNotFoundError, NotADirectoryError, ValueError):  # one file (GGUF), or read from another source
        config = None
    if isinstance(config, dict):
        config = {name: value for name, value in config.items() if name not in _NOT_THE_MODEL}
    if sample and not whose and _quantizes(arguments, config, source.folder):
        _log.warning("weights not identified: no KV is shared unless weights_epoch names them (ModelOpt makes them at start)")
        return [config, make_unique()]
    if sample:
        return [config, source.weights_digest(make_unique)]
    has_lists = getattr(arguments, "trust_remote_code", False) or any(source.folder.glob(_PROCESSORS))
    return [config, source.load_options, *([source.lists_digest(make_unique)] if has_lists else [])]


def _quantizes(arguments: Any, config: object, folder: Path) -> bool:  # noqa: ANN401
    """Whether ModelOpt quantizes the model at the start, or restores a checkpoint that is not among the model's files."""
    if getattr(arguments, "modelopt_checkpoint_restore_path", None) or getattr(arguments, "quantize_and_serve", False):
        return True
    quantized = (isinstance(config, dict) and "quantization_config" in config) or (folder / "hf_quant_config.json").is_file()
    return str(getattr(arguments, "quantization", None) or "").startswith("modelopt") and not quantized


def _of_scales(path: Path, make_unique: Callable[[], str]) -> str:
    """Return a digest of the file with the scales of the KV cache."""
    if not path.is_file():
        return make_unique()
    content = hashlib.sha256(path.read_bytes()).hexdigest()
    return content if replaced_path(path) is None else make_unique()


def _adapter_paths(given: Any) -> Iterator[str]:  # noqa: ANN401  # as it was typed, or as SGLang understood it
    """Return the folders of the adapters that a server was started with."""
    for one in (given.values() if isinstance(given, Mapping) else given) or ():
        path = one.get("lora_path") if isinstance(one, Mapping) else getattr(one, "lora_path", one)
        yield str(path).rpartition("=")[2]


def _of_adapter(path: str, make_unique: Callable[[], str]) -> str:
    """Return a digest of an adapter's weights and configuration."""
    config = Path(path) / "adapter_config.json"
    if not config.is_file() or not (weights := sampled_digest(Path(path))):
        return f"{path}:{make_unique()}"  # a hub name, for example
    identity = f"{path}:{weights}:{hashlib.sha256(config.read_bytes()[:_MOST_CONFIG_BYTES]).hexdigest()}"
    if (newer := replaced_path(Path(path))) is None:
        return identity
    _log.warning("adapter not identified: %s: replaced after the process started: %s; no KV is shared", path, newer)
    return f"{path}:{make_unique()}"
