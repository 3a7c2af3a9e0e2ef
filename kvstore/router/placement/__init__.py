"""Choice of the engine for each request: by the metadata server's scheduler, or by the router alone."""
