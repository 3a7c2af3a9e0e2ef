"""Second copies of durable blocks on other nodes, for namespaces with ``copies = 2``."""
