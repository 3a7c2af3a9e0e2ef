"""How far the words of this repository are from plain technical English: a count of constructions that readers stumble over.

Docstrings, comments, error and log messages, help texts, Markdown, comments of proto and configuration files, and descriptions of
alerts are searched for patterns such as headless relative clauses, "where" in place of "if", archaic words, and "a" in place of
"per" (``PATTERNS``). The rate per 1,000 words of each package may only fall: ``tests/test_prose.py`` holds it to
``tests/prose_limits.json``.

    python scripts/prose.py [--list N] [--lower]
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import re
import subprocess
import tokenize
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
LIMITS = REPOSITORY / "tests" / "prose_limits.json"
GOAL = 2.0
"""Goal of every area, in hits per 1,000 words."""
MOST_EXAMPLES = 3

PATTERNS: Mapping[str, str] = {
    "relative clause without a noun": r"(?:^|[.:;,(\"`] ?|\b(?:and|of|in|by|for|to|with|from|but|or|that|than|as|is|behind|on) )"
    r"(?:[Ww]ho(?:ever)?|[Ww]hatever|[Ww]hat)(?! (?:le|if|kind|about|happens|it does|to)\b) [a-z]+",
    "'where' for 'if'": r"\b[Ww]here (?:there|it|they|that|nothing|nobody|none|no|one|the|a|an|some|this|he|its|these|those"
    r"|somebody)\b",
    "'so many' without 'that'": r"\bso (?:many|much|long|often|far|few)\b(?! as| that)",
    "archaic word": r"\b(?:anew|anybody|somebody|nobody|whoever|thereby|likewise|meanwhile|hitherto|ere)\b",
    "things that lie or stand": r"\b(?:lie|lies|lay|stands)\b",
    "'is no' with a noun": r"\b(?:is|are|was|were|has|have) no (?!longer\b|more\b|less\b|such\b|need\b|effect\b|way\b)\w+",
    "'is told'": r"\b(?:is|are|was|were|be|been) (?:told|said)\b|\bsays so\b|\btells\b",
    "'behind' for 'after'": r"\bbehind (?:it|them|one|the|a|an|that|what|its|all|each|this)\b",
    "'takes' for 'requires'": r"\b(?:takes|take) (?:a|an|one|two|no|only|what|whole)\b",
    "article for 'per'": r"\b(?:one|two|bytes|blocks|keys|times|launch|lock|entry|row|record|checksum|copy|call|event|thread)s? "
    r"an? (?:block|layer|key|node|call|request|row|second|file|page|rank|slot|load|step|host|volume|lookup|run|tick|round"
    r"|group)\b",
    "empty phrase": r"\bfor ever\b|\bat all times\b|\bof course\b|\bby itself\b|\bof its own\b|\bon (?:its|their) way\b",
    "verbs of coming and going": r"\b(?:has|have|had|is|are|was) (?:come|gone|come back|gone on)\b|\bgoes on\b|\bcomes back\b"
    r"|\bgives? way\b|\bleaves? alone\b|\bleft alone\b",
}
COMPILED = {name: re.compile(pattern, re.MULTILINE) for name, pattern in PATTERNS.items()}
LOG_CALLS = {"debug", "info", "warning", "error", "exception", "critical", "log", "report"}
TEXT_CALLS = LOG_CALLS | {"echo", "print", "add_argument", "option"}
TEXT_ARGUMENTS = {"help", "description", "message", "detail", "short_help"}
CONFIGURATION = {".yaml", ".yml", ".tpl", ".toml", ".env", ".conf", ".service"}
"""Suffixes of files whose comments begin with ``#``; a Dockerfile is one too."""
SUFFIXES = {".py", ".md", ".proto", ".js", ".html", ".json"} | CONFIGURATION
LEFT_OUT = re.compile(r"_pb2|/results/|LICENSE|scripts/prose\.py")


@dataclass(slots=True)
class Rate:
    """Words and hits of one area."""

    words: int = 0
    hits: int = 0

    @property
    def per_thousand(self) -> float:
        """Hits per 1,000 words."""
        return 1000 * self.hits / self.words if self.words else 0.0


def python_texts(source: str) -> Iterator[str]:
    """Docstrings, messages and comments of a module."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.value.value
        call = node.exc if isinstance(node, ast.Raise) else node
        if not isinstance(call, ast.Call):
            continue
        name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        if isinstance(node, ast.Raise) or name in TEXT_CALLS or name.startswith("Field"):
            for value in (*call.args, *(one.value for one in call.keywords if one.arg in TEXT_ARGUMENTS)):
                for part in [value] if isinstance(value, ast.Constant) else getattr(value, "values", []):
                    if isinstance(part, ast.Constant) and isinstance(part.value, str) and " " in part.value:
                        yield part.value
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and not re.match(r"#\s*(noqa|type:|ruff:|fmt:|!)", token.string):
            yield token.string.lstrip("#")


def texts(path: Path) -> str:
    """Extract the text of one file that people read."""
    content = path.read_text(encoding="utf-8", errors="replace")
    if path.suffix == ".py":
        return "\n".join(python_texts(content))
    if path.suffix == ".proto":
        return "\n".join(re.findall(r"//(.*)", content))
    if path.suffix in (".js", ".html"):
        found = re.findall(r"//(.*)|/\*(.*?)\*/|[\"'`>]([^\"'`<>{}]* [^\"'`<>{}]*)[\"'`<]", content)
        return "\n".join("".join(parts) for parts in found)
    if path.suffix == ".json":
        return "\n".join(re.findall(r'"(?:description|title)": "(.*?)"', content))
    if _is_configuration(path):
        comments = "\n".join(re.findall(r"(?m)(?:^|\s)#+ (.*)", content))
        values = re.findall(r"\b(?:summary|description): (.*(?:\n {12}\S.*)*)", content)
        return "\n".join([comments, *values])
    return re.sub(r"```.*?```", "", content, flags=re.DOTALL)


def _is_configuration(path: Path) -> bool:
    return path.suffix in CONFIGURATION or path.name == "Dockerfile"


def area_of(name: str) -> str:
    """``kvstore/node/x.py`` -> ``kvstore/node``; ``tests/node/x.py`` -> ``tests/node``; ``README.md`` -> itself."""
    parts = name.split("/")
    if len(parts) == 1:
        return name
    return "/".join(parts[:2]) if parts[0] in ("kvstore", "clients", "tests") and len(parts) > 2 else parts[0]


def hits_in(text: str) -> dict[str, list[str]]:
    """Find the hits of each pattern."""
    found = {name: [match.group(0).strip() for match in pattern.finditer(text)] for name, pattern in COMPILED.items()}
    return {name: matches for name, matches in found.items() if matches}


def tracked_files() -> list[str]:
    """List the files of the repository that contain text."""
    listed = subprocess.run(["git", "ls-files"], cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout.split()
    readable = (name for name in listed if Path(name).suffix in SUFFIXES or _is_configuration(Path(name)))
    return [name for name in readable if not LEFT_OUT.search(name)]


@cache
def measure() -> tuple[dict[str, Rate], list[tuple[float, str, dict[str, list[str]]]]]:
    """Rates by area, and the files with hits, worst first."""
    areas: dict[str, Rate] = {}
    worst = []
    for name in tracked_files():
        path = REPOSITORY / name
        if not path.is_file():  # deleted but not committed
            continue
        text = texts(path)
        words = len(text.split())
        found = hits_in(text)
        hits = sum(map(len, found.values()))
        rate = areas.setdefault(area_of(name), Rate())
        rate.words += words
        rate.hits += hits
        if hits:
            worst.append((1000 * hits / max(words, 100), name, found))
    return areas, sorted(worst, key=lambda row: -row[0])


def read_limits() -> dict[str, float]:
    """The highest rate that each area may have."""
    limits: dict[str, float] = json.loads(LIMITS.read_text(encoding="utf-8"))
    return limits


def lowered(areas: Mapping[str, Rate], limits: Mapping[str, float]) -> dict[str, float]:
    """Limits for today's rates: never higher than before, never below the goal; new areas start at the goal."""
    return {
        area: max(GOAL, min(limits.get(area, GOAL), round(rate.per_thousand + 0.05, 1)))
        for area, rate in sorted(areas.items())
        if rate.words
    }


def main() -> int:
    """Print the rates, worst area first."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", type=int, default=0, metavar="N", help="also print the N worst files, with examples")
    parser.add_argument("--lower", action="store_true", help="lower the limits to today's rates")
    options = parser.parse_args()
    areas, worst = measure()
    for area, rate in sorted(areas.items(), key=lambda item: -item[1].per_thousand):
        print(f"{rate.per_thousand:6.1f} per 1,000 words {rate.words:8,} words   {area}")
    for per_thousand, name, found in worst[: options.list]:
        print(f"{per_thousand:6.1f} {name}")
        for pattern, matches in found.items():
            print(f"         {pattern}: {', '.join(map(repr, matches[:MOST_EXAMPLES]))}")
    whole = Rate(sum(rate.words for rate in areas.values()), sum(rate.hits for rate in areas.values()))
    print(f"{whole.per_thousand:.1f} per 1,000 words over {whole.words:,} words")
    if options.lower:
        limits = lowered(areas, read_limits())
        LIMITS.write_text(json.dumps(limits, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
