"""Connectors under test: those that this kit knows, and any other from a file."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from kvstore.core.errors import InvalidArgument
from kvstore.testing.conformance.faults import FOLDER_FAULTS, ConnectorFault
from kvstore.testing.conformance.server import fill
from kvstore.testing.conformance.storage import ENGINE_FAULTS, SERVER_FAULTS, FolderStorage, Storage, StoreStorage

_PRIMARY_BYTES: Final = 64 << 20
_OFFLOADING: Final = {"kv_role": "kv_both", "kv_connector_module_path": "kvclient.engines.vllm.tier"}


@dataclass(frozen=True, slots=True)
class ConnectorTarget:
    """A connector under test.

    Attributes:
        name: shown in the table.
        transfer: vLLM's ``kv_transfer_config``; ``{folder}``, ``{metadata}``, ``{node}``, ``{host}`` and ``{port}`` in its texts
            are replaced.
        server: command of its server, with the same names and ``{port2}`` and ``{spare_port}``; empty: it has none.
        uses_store: whether it keeps KV in this store.
    """

    name: str
    transfer: Mapping[str, Any]
    server: Sequence[str] = field(default=())
    uses_store: bool = False

    @property
    def faults(self) -> Sequence[ConnectorFault]:
        """Faults that its storage can suffer."""
        return [*ENGINE_FAULTS, *FOLDER_FAULTS, *(SERVER_FAULTS if self.server or self.uses_store else ())]

    def storage(self, folder: Path) -> Storage:
        """Return a new storage."""
        return StoreStorage(folder, self.server) if self.uses_store else FolderStorage(folder, self.server)

    def transfer_with(self, values: Mapping[str, str]) -> dict[str, Any]:
        """Return the configuration for a storage."""
        filled: dict[str, Any] = _filled(self.transfer, values)
        return filled


def _filled(value: Any, values: Mapping[str, str]) -> Any:  # noqa: ANN401  # JSON
    if isinstance(value, str):
        return int(values["port"]) if value == "{port}" else fill(value, values)
    if isinstance(value, Mapping):
        return {key: _filled(one, values) for key, one in value.items()}
    if isinstance(value, Sequence):
        return [_filled(one, values) for one in value]
    return value


_LMCACHE = {
    "kv_connector": "LMCacheMPConnector",
    "kv_connector_module_path": "lmcache.integration.vllm.lmcache_mp_connector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"lmcache.mp.host": "tcp://{host}", "lmcache.mp.port": "{port}"},
}


def _lmcache_server(adapter: Mapping[str, Any]) -> Sequence[str]:
    """Return the command of LMCache's server on a CPU. Its program is beside this Python."""
    flags = {
        "host": "{host}",
        "port": "{port}",
        "http-host": "{host}",
        "http-port": "{port2}",
        "prometheus-port": "{spare_port}",
        "l1-size-gb": "0.1",
        "eviction-policy": "LRU",
        "chunk-size": "32",
        "supported-transfer-mode": "engine_driven",
        "l2-adapter": json.dumps(adapter),
    }
    program = str(Path(sys.executable).with_name("lmcache"))
    return (program, "server", "--no-l1-use-lazy", *(text for name, value in flags.items() for text in (f"--{name}", value)))


_STORE = {"metadata": "{metadata}", "node": "{node}"}
KNOWN: Final[Mapping[str, ConnectorTarget]] = {
    target.name: target
    for target in (
        ConnectorTarget(
            "kvstore-connector",
            {
                "kv_connector": "KVStoreConnector",
                "kv_connector_module_path": "kvclient.engines.vllm.connector",
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {**_STORE, "load_choice": "always"},  # every hit is tested
            },
            uses_store=True,
        ),
        ConnectorTarget(
            "kvstore-tier",
            {
                **_OFFLOADING,
                "kv_connector": "KVStoreOffloadingConnector",
                "kv_connector_extra_config": {"cpu_bytes_to_use": _PRIMARY_BYTES, "kvstore": _STORE},
            },
            uses_store=True,
        ),
        ConnectorTarget(
            "vllm-fs",
            {
                "kv_connector": "OffloadingConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {
                    "spec_name": "HostTieringSpec",
                    "spec_module_path": "kvclient.engines.vllm.tier",
                    "cpu_bytes_to_use": _PRIMARY_BYTES,
                    "secondary_tiers": [{"type": "fs", "root_dir": "{folder}"}],
                },
            },
        ),
        ConnectorTarget("lmcache-fs", _LMCACHE, _lmcache_server({"type": "fs", "base_path": "{folder}"})),
        ConnectorTarget(
            "lmcache-kvstore",
            _LMCACHE,
            _lmcache_server(
                {
                    "type": "plugin",
                    "module_path": "kvclient.engines.lmcache",
                    "class_name": "KVStoreL2Adapter",
                    "adapter_params": {**_STORE, "chunk_tokens": 32, "weights_epoch": "1"},
                }
            ),
            uses_store=True,
        ),
    )
}
"""Targets by name. vLLM's fs tier copies pages with this project's worker: vLLM's own requires a device."""
DEFAULT: Final = ("kvstore-connector", "kvstore-tier", "vllm-fs")
"""Those that require nothing but vLLM."""


def target_of(text: str) -> ConnectorTarget:
    """Return a known target, or the one that a JSON file describes.

    Raises:
        InvalidArgument: neither.
    """
    if text in KNOWN:
        return KNOWN[text]
    path = Path(text)
    if path.suffix != ".json":
        raise InvalidArgument("unknown target: use one of the names, or a .json file", target=text, names=", ".join(KNOWN))
    if not path.is_file():
        raise InvalidArgument("no such file; names of targets are also possible", file=path, names=", ".join(KNOWN))
    try:
        given = json.loads(path.read_text())
    except ValueError as error:
        raise InvalidArgument("the target's file is not JSON", file=path, reason=error) from error
    if isinstance(given, dict) and (unknown := sorted(given.keys() - {"name", _TRANSFER, "server"})):
        raise InvalidArgument("unknown key in the target's file", key=unknown[0], known=f"name, {_TRANSFER}, server", file=path)
    transfer, server = (given.get(_TRANSFER), given.get("server", [])) if isinstance(given, dict) else (None, [])
    if not isinstance(transfer, dict):
        raise InvalidArgument(f"the target's file must be an object with an object {_TRANSFER}", file=path)
    if not isinstance(server, list) or not all(isinstance(part, str) for part in server):
        raise InvalidArgument("server must be a list of texts: program and arguments", file=path)
    if server and shutil.which(server[0]) is None:
        raise InvalidArgument("no such program", server=server[0], file=path)
    return ConnectorTarget(str(given.get("name", path.stem)).replace("/", "_"), transfer, tuple(server))


_TRANSFER = "kv_transfer_config"
