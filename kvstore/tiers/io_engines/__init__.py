"""I/O engines of slab files: ``posix`` always, ``gds`` (kvikio) if GPUDirect Storage works."""
