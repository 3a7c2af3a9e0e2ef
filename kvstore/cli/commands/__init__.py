"""Subcommands of ``kvstore``, grouped by the object that they act on."""
