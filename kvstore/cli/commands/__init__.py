"""Subcommands of ``kvstore``, grouped by what they act on."""
