"""Draw the Mermaid diagrams of the documentation into ``docs/images/diagrams``, and remove images that no page uses.

Requires Chromium and the npm package ``@mermaid-js/mermaid-cli``:

    python scripts/draw_diagrams.py --mmdc node_modules/.bin/mmdc --chromium /usr/bin/chromium
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Final

from docs_site.diagrams import FOLDER, image_name, sources
from docs_site.included import REPOSITORY

_FONT: Final = "'DejaVu Sans', Verdana, sans-serif"
"""Wide fonts, so that a label fits its box in any font."""


def draw(source: str, image: Path, mmdc: str, chromium: str) -> None:
    """Draw one diagram in neutral colours on a transparent background."""
    with tempfile.TemporaryDirectory() as folder:
        options = Path(folder, "browser.json")
        options.write_text(json.dumps({"executablePath": chromium, "args": ["--no-sandbox", "--disable-background-networking"]}))
        style = Path(folder, "style.json")
        style.write_text(json.dumps({"theme": "neutral", "fontFamily": _FONT, "sequence": {"noteMargin": 14}}))
        diagram = Path(folder, "diagram.mmd")
        diagram.write_text(source, encoding="utf-8")
        command = [mmdc, "--quiet", "--backgroundColor", "transparent", "--puppeteerConfigFile", str(options)]
        command += ["--configFile", str(style), "--input", str(diagram), "--output", str(image), "--svgId", f"d{image.stem}"]
        subprocess.run(command, check=True, timeout=120, env={**os.environ, "PUPPETEER_SKIP_DOWNLOAD": "1"})


def main() -> None:
    """Draw the images that are missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mmdc", default="mmdc", help="the command of @mermaid-js/mermaid-cli (default: mmdc)")
    parser.add_argument("--chromium", default="/usr/bin/chromium", help="the browser that draws (default: /usr/bin/chromium)")
    arguments = parser.parse_args()
    folder = REPOSITORY / "docs" / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    used = set()
    for page, source in sources():
        image = folder / image_name(source)
        used.add(image)
        if not image.exists():
            print(f"drawing {image.name} for {page.relative_to(REPOSITORY)}")
            draw(source, image, arguments.mmdc, arguments.chromium)
    for image in set(folder.glob("*.svg")) - used:
        print(f"removing {image.name}: no page uses it")
        image.unlink()


if __name__ == "__main__":
    main()
