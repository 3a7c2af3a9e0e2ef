"""Find the ``kvstore`` commands in shell code without running it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

_NAMES = {"kvstore", ".venv/bin/kvstore", "/opt/kvstore/bin/kvstore"}
_BETWEEN = "();<>|&\n"
_COMMENT = re.compile(r"(?m)(^|\s)#(\s.*)?$")


def kvstore_commands(shell: str) -> Iterator[list[str]]:
    """List the arguments of each call, also after variables, ``sudo`` or ``docker compose exec``.

    Raises:
        ValueError: a quotation mark is not closed.
    """
    if "kvstore" not in shell:
        return
    joined = _COMMENT.sub(r"\1", shell.replace("\\\n", " "))
    lexer = shlex.shlex(joined, posix=True, punctuation_chars=_BETWEEN)
    lexer.whitespace = " \t\r"
    lexer.whitespace_split = True
    lexer.commenters = ""
    words: list[str] = []
    for token in [*lexer, "\n"]:
        if token.strip(_BETWEEN):
            words.append(token)
            continue
        places = [number for number, word in enumerate(words) if word in _NAMES]
        if places:
            yield words[places[-1] + 1 :]
        words = []
