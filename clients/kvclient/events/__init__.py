"""Block events as an application sees them: a subscription and a mirror of the stored blocks."""

from kvclient.events.mirror import BlockMirror, Change, MirroredVolume
from kvclient.events.watcher import BlockWatcher

__all__ = ["BlockMirror", "BlockWatcher", "Change", "MirroredVolume"]
