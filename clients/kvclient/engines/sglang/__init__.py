"""SGLang: a storage backend for HiCache, loaded with ``--hicache-storage-backend dynamic``. See README.md beside this file.

``backend`` has the class that SGLang loads, ``options`` its options. ``host_pages`` presents host pools as pages of bytes,
``namespaces`` and ``model_facts`` identify them, ``page_keys`` turns page hashes into keys, ``page_store`` stores pages in one of
two ways. ``pools`` holds a backend's pools, ``pool_hits`` computes the prefix that all of them can restore, ``stats`` counts.
"""
