"""Peers of the store: each module runs one peer on this machine, in the same run as the store's measurement."""


class PeerMissingError(RuntimeError):
    """A peer is not installed or does not start. The figure is then recorded without it, with a note."""
