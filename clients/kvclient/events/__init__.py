"""Block events as an application sees them: a subscription and a mirror of what is stored."""

from kvclient.events.mirror import BlockMirror, Change, Volume
from kvclient.events.watcher import BlockWatcher

__all__ = ["BlockMirror", "BlockWatcher", "Change", "Volume"]
