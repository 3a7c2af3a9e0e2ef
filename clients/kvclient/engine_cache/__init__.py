"""The engine's own prefix cache in the index: which blocks an engine holds in the pages of its KV cache, published for routers.

Theory of operation:

1. A *tracker* gets the keys of blocks from the engine's scheduling steps. It checks them, and a few others in turn, against the
   engine's pool. Blocks that the pool holds are published, and those that it no longer holds are unpublished. Nothing is copied,
   and the engine keeps all its pages.
2. The cache registers with the metadata server as a node without addresses: one volume of tier HBM, heartbeats, an ordered stream
   of changes, and anti-entropy, with the code of the node. A cache whose engine dies is hidden like any silent node.
3. The blocks are in a separate namespace (``cache_spec``), under separate keys. So no lookup, load, store or copy of the store's
   blocks can meet them: only the engine can read such a replica, and it must count neither as a hit nor as durable. To find the
   engine that holds a prefix, look it up in that namespace (``cache_keys``).

An index that is late costs a router a worse choice, never a wrong answer: the engine finds the blocks itself, by its own hashes.
"""
