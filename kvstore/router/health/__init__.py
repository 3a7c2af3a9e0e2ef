"""Health of engines: active checks, outlier detection, and the metrics that engines export."""
