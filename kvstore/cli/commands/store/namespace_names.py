"""Find a namespace by its id, the first digits of its id, or the name of its model."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from kvstore.cli.support.output import clean, short
from kvstore.cli.support.store_client import Refusal, StoreConnection

if TYPE_CHECKING:
    from kvstore.control_api.schemas.store import Namespace

_LEAST_DIGITS: Final = 4
_ID_PREFIX: Final = re.compile(f"[0-9a-f]{{{_LEAST_DIGITS},32}}")
_SHORT_PREFIX: Final = re.compile(f"[0-9a-f]{{1,{_LEAST_DIGITS - 1}}}")
_SHOWN_DIGITS: Final = 8
_MOST_SHOWN: Final = 5


async def find(store: StoreConnection, text: str) -> Namespace:
    """Find a registered namespace.

    Raises:
        Refusal: no namespace or several namespaces match.
    """
    known = {one.namespace_id: one async for one in store.queries.namespaces()}
    return known[_only({namespace_id: one.spec.model for namespace_id, one in known.items()}, text)]


async def find_ruled(store: StoreConnection, text: str) -> bytes:
    """Like ``find``, but return the id, and also find namespaces that have a retention rule and are not registered.

    Raises:
        Refusal: no namespace or several namespaces match.
    """
    models = {one.namespace_id: one.spec.model async for one in store.queries.namespaces()}
    if not _matching(models, text):
        models |= dict.fromkeys((one.namespace_id for one in await store.queries.rules()), "")
    return bytes.fromhex(_only(models, text))


def _matching(models: Mapping[str, str], text: str) -> list[str]:
    """Ids of the namespaces that a text names."""
    prefix = text.lower()
    by_id = [found for found in models if found.startswith(prefix)] if _ID_PREFIX.fullmatch(prefix) else []
    return by_id or [found for found, model in models.items() if model == text]


def _only(models: Mapping[str, str], text: str) -> str:
    found = _matching(models, text)
    if len(found) == 1:
        return found[0]
    shown = clean(short(text))
    if found:
        some = ", ".join(one[:_SHOWN_DIGITS] for one in found[:_MOST_SHOWN]) + (", …" if len(found) > _MOST_SHOWN else "")
        raise Refusal(
            f"{len(found)} namespaces match '{shown}': {some}; give more digits of the id, or kvstore namespaces lists them"
        )
    if _SHORT_PREFIX.fullmatch(text.lower()):
        raise Refusal(f"no namespace has the model '{shown}'; of an id, give at least {_LEAST_DIGITS} digits")
    near = difflib.get_close_matches(text, set(models.values()), n=1)
    hint = f"did you mean '{clean(short(near[0]))}'? " if near else ""
    raise Refusal(f"no namespace has the model '{shown}' or an id that begins with it; {hint}kvstore namespaces lists them")
