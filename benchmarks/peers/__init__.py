"""What the store is held against: each module runs one peer on this machine, in the same run as our own measurement."""


class PeerMissingError(RuntimeError):
    """A peer is not installed here or does not run: the figure is then kept without it, and says so."""
