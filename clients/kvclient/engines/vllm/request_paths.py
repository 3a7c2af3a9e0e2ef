"""The storage links that a request names in its ``kv_transfer_params``.

``decode_node`` is the store's node on the host that will decode the request, and ``path_policy`` the name of a policy, see
``HookOptions``. The fields come from clients: invalid ones are ignored.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from kvclient import Paths
from kvclient.engines.options import HookOptions

NODE = re.compile(r"[A-Za-z0-9._-]{1,128}")
_POLICY = re.compile(r"[a-z_]{1,64}")


def request_paths(request: object, options: HookOptions) -> Paths | None:
    """Return the storage links for the load of a vLLM request; None: it names none, so the client's default applies."""
    params = getattr(request, "kv_transfer_params", None)
    if not isinstance(params, Mapping):
        return None
    node, policy = params.get("decode_node"), params.get("path_policy")
    node = node if isinstance(node, str) and NODE.fullmatch(node) else ""
    policy = policy if isinstance(policy, str) and _POLICY.fullmatch(policy) else ""
    return options.paths(node, policy) if node or policy else None
