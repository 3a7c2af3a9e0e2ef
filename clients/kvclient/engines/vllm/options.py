"""Options of the vLLM connector: those of every hook, and its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Self

from kvclient import InvalidArgument
from kvclient.engines.options import HookOptions

RECONNECT_S = 0.5
"""Maximum time that a running engine waits for the connection of a new namespace. After it, the connection completes later."""
RESET_GRACE_S = 0.5
"""Time that stores in progress get to complete before they are cancelled, if the engine needs their pages."""
LOAD_MODES = ("async", "layerwise")
LOAD_CHOICES = ("auto", "measured", "always")
DEVICE_GDS = ("auto", "required", "off", "forced")
DEVICE_COPIES = ("auto", "staged", "batched", "direct")
LOCALITIES = ("", "LOCAL", "REMOTE")
STORED_DTYPES = ("engine", "int8")
KV_LAYOUTS = ("block_major", "engine")
_MS = 1_000
_HEADS_FIRST = 10
"""Major compute capability on which FlashInfer, vLLM's default there, has the tokens of a page within its heads."""


@dataclass(frozen=True, slots=True)
class ConnectorOptions:
    """Options of ``kv_connector_extra_config``.

    Attributes:
        hook: options common to all hooks.
        load_mode: ``async``: a request waits, outside of the batch, until its prefix is there; ``layerwise``: it joins the batch
            at once, and each layer waits for its part of the prefix.
        lookup_wait_ms: how long one scheduling step may wait, all its requests together, for answers of the metadata server;
            later answers are used in the next step.
        min_load_tokens: shorter hits (beyond what the engine's own prefix cache holds) are computed rather than loaded.
        load_choice: ``auto``: found blocks are loaded only as far as that is predicted to be faster than to compute them, by
            measured loads and by the planner's queues; ``measured``: by measured loads alone; ``always``: all are loaded,
            whatever it takes.
        read_ahead_requests: requests in the engine's queue whose prefix is read into the DRAM of this host, at the same time; 0:
            none. The node bounds the bytes (``node.read_ahead``).
        pinned_share: the part of the engine's blocks that may wait to be stored; more are not stored.
        weights_epoch_file: a file that names the weights epoch, instead of ``weights_epoch``: read at start, and after a reset of
            the engine's cache in the first step that computes.
        idle_wait_ms: how long a step without tokens waits for a load or store to end, so that an idle engine does not spin.
        block_labels: whether tokens and hashes of stored blocks are stored beside them, so that ``kvstore events --model`` can
            publish these blocks to routers.
        events_locality: ``locality`` of the KV events of this engine: ``LOCAL``, ``REMOTE`` or empty for unspecified. Dynamo's
            router ignores ``REMOTE``.
        events_blocks: stored blocks that this engine announces as KV events, if vLLM publishes them; older ones are retracted.
        published_blocks: blocks of the engine's own prefix cache that are published to the index at most, so that routers prefer
            this engine for prompts that it holds; 0: none.
        stored_dtype: numbers in stored blocks. ``engine``: those of the engine's pages; ``int8``: 8-bit integers with scales,
            which take 58 % of the bytes and change the output (see ``kvclient.device.int8``). Engines with different
            settings share no blocks.
        kv_layout: order of vLLM's KV cache on a GPU. ``block_major``: the layers of a page lie side by side, so that copies have
            long pieces, if ``load_mode`` is ``async`` and the attention backend supports it; ``engine``: vLLM decides.
        device_copies: how pages on a GPU are copied: ``batched``, ``staged`` or ``direct`` (see
            ``kvclient.device.copy_strategies``). ``auto``: the fastest of them, as measured by trial copies at start.
        device_staging_bytes: device memory of each of four staging buffers of a group, taken when first needed.
        device_checksums: whether a GPU computes the checksums of the blocks that it stores or verifies. False: the host does.
        device_gds: whether blocks on the NVMe volumes of this host's node are read directly into device memory, by GPUDirect
            Storage. ``auto``: if it works there; ``required``: else the engine does not start; ``off``; ``forced``: by any
            method, for tests.
        device_gds_bytes: device memory of the landing ring of a group, taken at its first direct read.
        device_pin_wait_s: how long the start of a worker on a GPU waits until the node's arena is pinned. Copies of
            memory that is not pinned yet are slower.
        allow_untested_vllm: whether versions of vLLM with which the connector is not tested are accepted.
    """

    hook: HookOptions = field(default_factory=HookOptions)
    load_mode: str = "async"
    lookup_wait_ms: float = 2.0
    min_load_tokens: int = 0
    load_choice: str = "auto"
    read_ahead_requests: int = 8
    pinned_share: float = 0.5
    weights_epoch_file: str = ""
    idle_wait_ms: float = 5.0
    block_labels: bool = False
    events_locality: str = ""
    events_blocks: int = 262_144
    published_blocks: int = 131_072
    stored_dtype: str = "engine"
    kv_layout: str = "block_major"
    device_copies: str = "auto"
    device_staging_bytes: int = 64 << 20
    device_checksums: bool = True
    device_gds: str = "auto"
    device_gds_bytes: int = 128 << 20
    device_pin_wait_s: float = 30.0
    allow_untested_vllm: bool = False

    def __post_init__(self) -> None:
        if self.load_mode not in LOAD_MODES:
            raise InvalidArgument("unknown choice", option="load_mode", value=self.load_mode, choices=LOAD_MODES)
        if self.load_choice not in LOAD_CHOICES:
            raise InvalidArgument("unknown choice", option="load_choice", value=self.load_choice, choices=LOAD_CHOICES)
        if self.device_copies not in DEVICE_COPIES:
            raise InvalidArgument("unknown choice", option="device_copies", value=self.device_copies, choices=DEVICE_COPIES)
        if self.stored_dtype not in STORED_DTYPES:
            raise InvalidArgument("unknown choice", option="stored_dtype", value=self.stored_dtype, choices=STORED_DTYPES)
        if self.stored_dtype == "int8" and self.device_copies not in {"auto", "staged"}:
            raise InvalidArgument("stored_dtype int8 requires device_copies auto or staged", device_copies=self.device_copies)
        if self.kv_layout not in KV_LAYOUTS:
            raise InvalidArgument("unknown choice", option="kv_layout", value=self.kv_layout, choices=KV_LAYOUTS)
        if self.device_gds not in DEVICE_GDS:
            raise InvalidArgument("unknown choice", option="device_gds", value=self.device_gds, choices=DEVICE_GDS)
        if self.events_locality not in LOCALITIES:
            raise InvalidArgument("unknown choice", option="events_locality", value=self.events_locality, choices=LOCALITIES)
        for name in ("block_labels", "device_checksums", "allow_untested_vllm"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidArgument("the option must be true or false", option=name, value=getattr(self, name))
        for name, most in (
            ("lookup_wait_ms", 100.0),
            ("pinned_share", 1.0),
            ("idle_wait_ms", 100.0),
            ("device_pin_wait_s", 3600.0),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most:
                raise InvalidArgument("the option is out of its range", option=name, value=value, least=0, most=most)
        if not isinstance(self.weights_epoch_file, str) or (self.weights_epoch_file and self.hook.weights_epoch):
            raise InvalidArgument("weights_epoch_file must be a path, without weights_epoch beside it")
        for name, least in (
            ("min_load_tokens", 0),
            ("read_ahead_requests", 0),
            ("device_staging_bytes", 1),
            ("device_gds_bytes", 1),
            ("events_blocks", 1),
            ("published_blocks", 0),
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise InvalidArgument(f"the option must be an integer of at least {least}", option=name, value=value)

    @classmethod
    def from_mapping(cls, given: Mapping[str, Any]) -> Self:
        """Return the options of ``kv_connector_extra_config``.

        Raises:
            InvalidArgument: an unknown key, or a value of the wrong type or range.
        """
        own = tuple(one.name for one in fields(cls) if one.name != "hook")
        hook = HookOptions.from_mapping(given, known_elsewhere=own)
        return cls(hook=hook, **{name: given[name] for name in own if name in given})

    def required_layout(self, device_type: str, capability: tuple[int, int] | None) -> str | None:
        """Return vLLM's name of the order that its KV cache should have; None: vLLM decides.

        A page of a layer has the order that it has by vLLM's default on the same device (tokens first, but heads first for
        FlashInfer on compute capability 10), so engines with ``kv_layout`` ``engine`` share its blocks. Layer-wise loads copy
        each layer by itself, and CPUs have no block-major kernels.

        Args:
            device_type: vLLM's name of the type of device.
            capability: compute capability of the device; None: it has none.
        """
        if self.kv_layout != "block_major" or self.load_mode != "async" or device_type != "cuda" or capability is None:
            return None
        return "BLHNC" if capability[0] == _HEADS_FIRST else "BLNHC"

    def check_groups(self, groups: int, parts: int) -> None:
        """Check that the options suit an engine's KV cache groups.

        Args:
            groups: number of vLLM's KV cache groups.
            parts: number of their parts: a group with pages of several formats has several.

        Raises:
            InvalidArgument: layer-wise loads of several groups, or parts. vLLM cannot learn that a load of several groups failed,
                and does not announce when it uses the pages of an indexer.
        """
        if self.load_mode == "layerwise" and groups > 1:
            raise InvalidArgument(
                "layerwise loads of several KV cache groups are not supported: use load_mode async", groups=groups
            )
        if self.load_mode == "layerwise" and parts > groups:
            raise InvalidArgument(
                "layerwise loads of a KV cache group with pages of several formats are not supported: use load_mode async",
                parts=parts,
            )

    @property
    def lookup_wait_s(self) -> float:
        """``lookup_wait_ms`` in seconds."""
        return self.lookup_wait_ms / _MS

    @property
    def idle_wait_s(self) -> float:
        """``idle_wait_ms`` in seconds."""
        return self.idle_wait_ms / _MS
