"""``python -m kvstore.cli``: the same as ``kvstore``."""

from kvstore.cli.app import main

main()
