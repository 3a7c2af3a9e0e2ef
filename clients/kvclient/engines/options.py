"""Options common to the hooks of all engines: read from the engine's mapping, checked and typed.

vLLM passes ``kv_connector_extra_config``, SGLang ``--hicache-storage-backend-extra-config``, transformers users keyword
arguments. Each hook adds its own keys. An unknown key is an error that lists the known ones.
"""

from __future__ import annotations

import difflib
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from kvclient import CacheSpec, ClientOptions, InvalidArgument, KVClient, Paths, TlsConfig
from kvclient.call.arguments import check_seconds

if TYPE_CHECKING:
    from kvclient.memory.device_buffer import ArenaPinner
    from kvclient.memory.engine_pool import DiskReaderFactory

_KINDS: dict[str, tuple[type, ...]] = {"str": (str,), "bool": (bool,), "float": (int, float), "int": (int,)}


@dataclass(frozen=True, slots=True)
class HookOptions:
    """Options common to all hooks.

    Attributes:
        metadata: metadata servers: ``host:port``, a list separated by commas, or a DNS name; empty: none, the hook uses only the
            local node.
        node: address of this host's node (``unix:/path`` or ``host:port``), ``auto``: found through the metadata server;
            ``none``: no node, blocks travel over TCP.
        model: name of the model in the namespace; empty: the engine's name of it. Hosts that share KV must use the same name.
        weights_epoch: version of the weights. Change it after every update, or KV of the old weights is served.
        tenant: owner of the KV. KV is not shared between tenants.
        salt: further text that separates namespaces.
        hash_algorithm: ``xxh3-128``, or ``sha256-128`` if the users of a namespace do not trust each other.
        load: whether prefixes are loaded.
        store: whether new blocks are stored.
        connect_deadline_s: limit of the engine's wait for the store at its start. After that the engine runs without the store
            until it answers, or fails if ``require_store`` is set.
        lookup_deadline_s: bound of a lookup.
        load_deadline_s: bound of a load; the engine computes the rest.
        store_deadline_s: bound of a store, waiting for space included; the rest is skipped.
        verify: when the engine itself compares checksums: ``auto``, ``always``, ``never``; see ``ClientOptions``.
        path_policy: over which hosts' storage links blocks are read that other hosts hold in storage, by name: ``split``,
            ``shorter_queue``, ``round_robin``; ``prefill_only``: this host's alone; empty: the metadata server's choice.
        path_layer_group: layers of such blocks that are read together over all blocks; 0: whole blocks. Where an engine waits for
            layers instead of blocks, it computes the first ones while the later ones are still read.
        require_store: fail at the start if the store does not answer, instead of serving without it until it does.
        tls_ca: PEM file of the CA certificates that sign the store's; empty: no TLS.
        tls_cert: PEM file of this client's certificate, if the store requires one.
        tls_key: its key.
        tls_server_name: name expected in the store's certificates, if it is not the host name.
        token_file: file with the token for the store; empty: none. (Not the token itself: engines log their options.)
    """

    metadata: str = "127.0.0.1:7400"
    node: str = "auto"
    model: str = ""
    weights_epoch: str = ""
    tenant: str = ""
    salt: str = ""
    hash_algorithm: str = "xxh3-128"
    load: bool = True
    store: bool = True
    connect_deadline_s: float = 3.0
    lookup_deadline_s: float = 1.0
    load_deadline_s: float = 10.0
    store_deadline_s: float = 10.0
    verify: str = "auto"
    path_policy: str = ""
    path_layer_group: int = 0
    require_store: bool = False
    tls_ca: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    tls_server_name: str = ""
    token_file: str = ""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            kinds = _KINDS[str(field.type)]
            if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
                raise InvalidArgument(
                    "the option has the wrong type", option=field.name, wants=field.type, got=type(value).__name__
                )
        for name in ("connect_deadline_s", "lookup_deadline_s", "load_deadline_s", "store_deadline_s"):
            object.__setattr__(self, name, check_seconds(name, getattr(self, name)))
        if not self.metadata and self.node in {"", "auto", "none"}:
            raise InvalidArgument("an address is missing; set metadata, node, or both", metadata=self.metadata)
        self.client_options()  # validates the client's options

    @classmethod
    def from_mapping(cls, given: Mapping[str, Any], known_elsewhere: tuple[str, ...] = ()) -> Self:
        """Create options from the mapping that an engine passes.

        Args:
            given: option -> value, as parsed from JSON or YAML.
            known_elsewhere: keys that the hook or the engine handles.

        Raises:
            InvalidArgument: an unknown key, an invalid value, or a file that cannot be used.
        """
        names = {field.name for field in fields(cls)}
        unknown = sorted(set(given) - names - set(known_elsewhere))
        if unknown:
            close = difflib.get_close_matches(unknown[0], sorted(names | set(known_elsewhere)), n=1)
            hint = {"meant": close[0]} if close else {"known": ", ".join(sorted(names | set(known_elsewhere)))}
            raise InvalidArgument("unknown option", option=unknown[0], **hint)
        made = cls(**{name: value for name, value in given.items() if name in names})
        made.check_files()
        return made

    def check_files(self) -> None:
        """Check the files that options name, so that a wrong path is an error at the start and not a store that never answers.

        Raises:
            InvalidArgument: a file cannot be read or has invalid content, or a certificate lacks its key.
        """
        self.tls()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        for names, load in ((("tls_ca",), context.load_verify_locations), (("tls_cert", "tls_key"), context.load_cert_chain)):
            paths = [getattr(self, name) for name in names]
            try:
                if any(paths):
                    load(*paths)
            except OSError as error:  # ssl.SSLError is one
                options, files = ", ".join(names), ", ".join(paths)
                why = InvalidArgument("TLS files cannot be used: correct their paths", option=options, file=files, error=error)
                raise why from None

    def client_options(self) -> ClientOptions:
        """Return the corresponding client options; a hook may ``dataclasses.replace`` further ones.

        Raises:
            InvalidArgument: an option is invalid.
        """
        return ClientOptions(
            connect_deadline_s=self.connect_deadline_s,
            lookup_deadline_s=self.lookup_deadline_s,
            default_deadline_s=max(self.load_deadline_s, self.store_deadline_s),
            require_store=self.require_store,
            verify=self.verify,  # type: ignore[arg-type]  # checked there
            paths=self.paths(),
            token_file=Path(self.token_file) if self.token_file else None,
        )

    def paths(self, decode_node: str = "", policy: str = "") -> Paths:
        """Return the storage links that a load may use: this host's, the decode host's, and those of idle hosts.

        Args:
            decode_node: the store's node on the host that will decode the request; empty: none, or this one.
            policy: of this request; empty: the option ``path_policy``.

        Raises:
            InvalidArgument: an impossible option.
        """
        return Paths(decode_node or None, policy or self.path_policy or None, layer_group=self.path_layer_group)

    def spec(
        self,
        model: str,
        *,
        block_tokens: int,
        layers: int,
        layer_block_bytes: int,
        dtype: str,
        layout: str,
        layout_version: int = 1,
        shard_rank: int = 0,
        shard_count: int = 1,
    ) -> CacheSpec:
        """Return the namespace.

        Args:
            model: the engine's name of the model, used unless the user set another.
            block_tokens: tokens of a block.
            layers: number of layers of the model, or of the group that shares block tables.
            layer_block_bytes: bytes of one block in one layer.
            dtype: dtype of the cache.
            layout: everything else that makes the bytes of equal blocks differ.
            layout_version: version of the hook's own layout.
            shard_rank: index among the tensor-parallel ranks that hold different KV.
            shard_count: number of these ranks.

        Raises:
            InvalidArgument: invalid values.
        """
        return CacheSpec(
            model=self.model or model,
            block_tokens=block_tokens,
            layers=layers,
            layer_block_bytes=layer_block_bytes,
            weights_epoch=self.weights_epoch,
            dtype=dtype,
            layout=layout,
            layout_version=layout_version,
            shard_rank=shard_rank,
            shard_count=shard_count,
            hash_algorithm=self.hash_algorithm,  # type: ignore[arg-type]  # checked there
            tenant=self.tenant,
            salt=self.salt.encode(),
        )

    def with_epoch(self, weights_epoch: str) -> Self:
        """Return the same options for the weights after an update."""
        return replace(self, weights_epoch=weights_epoch)

    def tls(self) -> TlsConfig | None:
        """Return the TLS identity, if any.

        Raises:
            InvalidArgument: a certificate without its key, or a key without its certificate.
        """
        if not (self.tls_ca or self.tls_cert or self.tls_key or self.tls_server_name):
            return None
        ca, cert, key = (Path(path) if path else None for path in (self.tls_ca, self.tls_cert, self.tls_key))
        return TlsConfig(ca=ca, cert=cert, key=key, server_name=self.tls_server_name or None)

    def connect(
        self,
        spec: CacheSpec,
        options: ClientOptions | None = None,
        *,
        device: ArenaPinner | None = None,
        gds: DiskReaderFactory | None = None,
    ) -> KVClient:
        """Connect to the store in one namespace. Call it after forking.

        Args:
            spec: the namespace.
            options: used instead of ``client_options()``.
            device: copies blocks to and from the engine's device; None: blocks are in host memory.
            gds: reads the node's volumes directly into memory of that device; None: the node reads them.

        Raises:
            KVStoreError: the store does not answer and ``require_store`` is set, or an option is invalid.
        """
        return KVClient.connect(
            self.metadata or None,
            spec,
            node=None if self.node in {"", "none"} else self.node,
            tls=self.tls(),
            options=options or self.client_options(),
            device=device,
            gds=gds,
        )
