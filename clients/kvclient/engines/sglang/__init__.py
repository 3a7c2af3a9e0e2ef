"""SGLang: a storage backend for HiCache, loaded with ``--hicache-storage-backend dynamic``. See README.md beside this file.

``backend`` is the class that SGLang loads; ``options`` what it may be told; ``host_pages`` SGLang's host pools as pages of bytes;
``namespaces`` what makes such bytes differ; ``page_keys`` SGLang's page hashes as keys; ``page_store`` the two ways in which
pages lie in the store; ``pools`` a backend's pools; ``pool_hits`` what several pools can restore together; ``stats`` counters.
"""
