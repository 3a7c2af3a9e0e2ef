"""What a request says about the session that it belongs to. Routers and engine hooks pass it on as a JSON object."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Self

from kvstore.core.errors import InvalidArgument
from kvstore.core.limits import MAX_HINT_PRIORITY, MAX_KEEP_MS, MAX_TRANSFER_ID_BYTES

HINT_FIELD: Final = "kvstore_hint"
"""Name of the hint's field in ``kv_transfer_params``."""
DEFAULT_KEEP_S: Final = 300.0
_MAX_KEEP_S: Final = MAX_KEEP_MS / 1000
_FIELDS: Final = frozenset({"session", "keep_for_s", "next_turn_s", "priority", "end"})


@dataclass(frozen=True, slots=True)
class RequestHint:
    """What happens next in a session.

    Attributes:
        session: its name, of 1 to 64 bytes.
        keep_for_s: how long its blocks are protected.
        next_turn_s: seconds until its next turn is expected; None: unknown.
        priority: 0 to 9.
        end: whether this is its last request.
    """

    session: str
    keep_for_s: float = DEFAULT_KEEP_S
    next_turn_s: float | None = None
    priority: int = 0
    end: bool = False

    def __post_init__(self) -> None:
        name = self.session
        if not isinstance(name, str) or not name.isprintable() or not 0 < len(name.encode()) <= MAX_TRANSFER_ID_BYTES:
            raise InvalidArgument(f"session must be printable text of 1 to {MAX_TRANSFER_ID_BYTES} bytes", got=ascii(name)[:80])
        for field, value in (("keep_for_s", self.keep_for_s), ("next_turn_s", self.next_turn_s)):
            if value is not None and (
                isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _MAX_KEEP_S
            ):
                raise InvalidArgument(f"{field} must be a number from 0 to {_MAX_KEEP_S:.0f}", got=ascii(value)[:80])
        priority = self.priority
        if isinstance(priority, bool) or not isinstance(priority, int) or not 0 <= priority <= MAX_HINT_PRIORITY:
            raise InvalidArgument(f"priority must be an integer from 0 to {MAX_HINT_PRIORITY}", got=ascii(priority)[:80])
        if not isinstance(self.end, bool):
            raise InvalidArgument("end must be true or false", got=ascii(self.end)[:80])

    @classmethod
    def read(cls, fields: object) -> Self:
        """Read a hint from its JSON object.

        Raises:
            InvalidArgument: not an object, an unknown field, or a value of another type or out of its range.
        """
        if not isinstance(fields, Mapping) or "session" not in fields:
            raise InvalidArgument("a hint must be an object with the field session")
        for name in fields:
            if name not in _FIELDS:
                raise InvalidArgument("unknown field of a hint", got=ascii(name)[:80])
        return cls(**fields)

    def fields(self) -> dict[str, object]:
        """Return the JSON object."""
        return {name: getattr(self, name) for name in sorted(_FIELDS)}
