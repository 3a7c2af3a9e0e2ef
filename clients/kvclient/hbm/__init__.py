"""The tier above DRAM: a pool of whole blocks in device memory, in the engine's own process.

    from kvclient.hbm import HbmPool

    with HbmPool("cuda:0", share=0.1, metadata="127.0.0.1:7400") as pool:
        client = KVClient.connect("127.0.0.1:7400", spec, hbm=pool)

Loads search the pool first. Loads and stores leave a copy in it, evicted blocks are offered to the host's DRAM, and the index
lists the pool as a replica of this engine. ``device="cpu"`` is the same in host memory: for tests, and for engines on CPUs.

**The pool is a small node.** It registers itself with the metadata server: one volume of tier HBM, one volume epoch,
heartbeats, an ordered stream of changes, and a data plane that peers read from. The alternative, publication by the host's
node, was rejected: a node's volumes are fixed for a boot, a node cannot read its engines' device memory and would answer for
blocks that it cannot serve, and an engine without a node on its host would have no pool. The metadata server treats a pool like a
node, except that it cannot be drained, and the pool of a dead engine is hidden like any silent node. The host's node needs two
things for pools: it names its volumes' paths, and ``Locate`` names the slots of blocks, from which a pool reads NVMe directly.

This package therefore consists of a node's components, unlike the rest of ``kvclient``: block table, replica log, publisher,
allocator and eviction policies of the daemon. It imports torch. Engines and their hooks import it; the client's other modules
know a pool only by the contracts in ``kvclient.memory``.
"""

from __future__ import annotations

from kvclient.hbm.pool import HbmPool

__all__ = ["HbmPool"]
