"""The tier above DRAM: a pool of whole blocks in device memory, in the engine's own process.

    from kvclient.hbm import HbmPool

    with HbmPool("cuda:0", share=0.1, metadata="127.0.0.1:7400") as pool:
        client = KVClient.connect("127.0.0.1:7400", spec, hbm=pool)

Loads look there first, loads and stores leave a copy there, what leaves it is offered to the host's DRAM once more, and the
index shows it as a replica of this engine. ``device="cpu"`` is the same in host memory: for tests, and for engines that compute
on CPUs.

**The pool is a small node.** It registers with the metadata server by itself: one volume of tier HBM, one life, heartbeats, an
ordered stream of what came and went, a data plane that peers read from. The other way, telling the host's node and letting it
publish for its engines, was left: a node's volumes are fixed for a boot, it cannot read its engines' device memory and so would
answer for blocks that it cannot serve, and an engine without a node on its host would have no pool. As it is, neither the
metadata server nor the node daemon knows anything of pools, and a dead engine is hidden like any silent node.

So this package, unlike the rest of ``kvclient``, is made of a node's parts: block table, replica log, publisher, allocator and
eviction policies are those of the daemon. It imports torch, and nothing in ``kvclient`` imports it.
"""

from __future__ import annotations

from kvclient.hbm.pool import HbmPool

__all__ = ["HbmPool"]
