"""Write the documentation page of each health code, and the list of all codes, from ``kvstore/health/codes.py``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from kvstore.health.codes import CODES, HealthCode

REPOSITORY: Final = Path(__file__).resolve().parent.parent
FOLDER: Final = REPOSITORY / "docs" / "reference" / "health"


def index() -> str:
    """Return the list of all codes."""
    rows = "\n".join(
        f"| [{code.name}]({Path(code.docs).name}) | {code.severity.value} | {code.title} |"
        for code in sorted(CODES.values(), key=_name)
    )
    return (
        "# Health codes\n\n"
        "The first line of `kvstore status` is `HEALTH_OK`, `HEALTH_WARN` or `HEALTH_ERR`. A line per finding follows, with"
        " a code and the facts. The web page and `GET /v1/health` show the same findings. Scripts may rely on the codes;"
        " the sentences may change.\n\n"
        "An *error* means that something does not work now. A *warning* means that it will not work soon, or that capacity"
        " is missing. An *info* is something to know, and does not change the health. `kvstore status` exits with 5 if there"
        " is an error or a warning, with 1 if the metadata server does not answer,"
        " and with 3 if it refuses the token: then the health is not known.\n\n"
        f"| code | severity | meaning |\n|---|---|---|\n{rows}\n"
    )


def _name(code: HealthCode) -> str:
    return code.name


def pages() -> Iterator[tuple[Path, str]]:
    """Yield each file and its text."""
    yield FOLDER / "index.md", index()
    for code in CODES.values():
        yield REPOSITORY / code.docs, code.page


def main() -> None:
    """Write all pages, and delete pages of codes that no longer exist."""
    written = dict(pages())
    for old in set(FOLDER.glob("*.md")) - written.keys():
        old.unlink()
    for path, text in written.items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
