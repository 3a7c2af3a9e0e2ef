"""Options of the connector for engines that prefill or decode: those of the connector, and these."""

from __future__ import annotations

from dataclasses import dataclass

from kvclient import InvalidArgument, Paths
from kvclient.call.arguments import check_seconds
from kvclient.engines.vllm.options import ConnectorOptions


@dataclass(frozen=True, slots=True)
class PdOptions(ConnectorOptions):
    """What ``kv_connector_extra_config`` may hold.

    Attributes:
        prompt_deadline_s: how long a decode engine waits for a prompt. Then it loads what the store has, and computes the rest.
        handoff_deadline_s: bound of the handoff of one step of a prefill engine.
        path_policy: over which hosts' storage links a prefill engine reads, by name: ``split``, ``shorter_queue``,
            ``round_robin``, ``prefill_only``; empty: the metadata server's choice.
        path_layer_group: layers that are read together over all blocks; 0: whole blocks. With ``load_mode`` ``layerwise`` it lets
            the first layers be computed while the later ones are still read.
        max_prompts: prompts that a decode engine waits for at once; more wait for their turn.
    """

    prompt_deadline_s: float = 30.0
    handoff_deadline_s: float = 10.0
    path_policy: str = ""
    path_layer_group: int = 0
    max_prompts: int = 256

    def __post_init__(self) -> None:
        ConnectorOptions.__post_init__(self)  # slots make a new class, which `super` without arguments does not know
        for name in ("prompt_deadline_s", "handoff_deadline_s"):
            object.__setattr__(self, name, check_seconds(name, getattr(self, name)))
        if not isinstance(self.max_prompts, int) or isinstance(self.max_prompts, bool) or self.max_prompts < 1:
            raise InvalidArgument("the option must be an integer of at least 1", option="max_prompts", value=self.max_prompts)
        self.paths("", "")

    def paths(self, decode_node: str, policy: str) -> Paths:
        """How the prefix of a request is loaded that will be decoded on ``decode_node``'s host.

        Args:
            decode_node: the store's node there.
            policy: of this request; empty: the option's.

        Raises:
            InvalidArgument: an impossible option.
        """
        return Paths(decode_node or None, policy or self.path_policy or None, layer_group=self.path_layer_group)
