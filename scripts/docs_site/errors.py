"""The error tree, with gRPC and HTTP status of each kind."""

from __future__ import annotations

import inspect

from docs_site.markdown import code, fenced, plain, table
from kvstore.core import errors
from kvstore.core.status import ERROR_CLASSES, STATUS


def pages() -> str:
    """Write the tree from the module's docstring, and a line per kind."""
    tree = inspect.cleandoc(errors.__doc__ or "").partition("::\n\n")[2].partition("\n\n``kind``")[0]
    rows = [
        (
            code(kind.value),
            code(found.__name__),
            plain(inspect.getdoc(found) or ""),
            "yes" if found.retryable else "no",
            code(STATUS[kind].grpc.name),
            str(STATUS[kind].http),
        )
        for kind, found in ERROR_CLASSES.items()
    ]
    return f"{fenced(inspect.cleandoc(tree))}\n{table(('kind', 'class', 'meaning', 'retryable', 'gRPC', 'HTTP'), rows)}"
