"""The words of each package are plain technical English, or nearer to it than before: a ratchet that only falls."""

from __future__ import annotations

from pathlib import Path

import pytest
from prose import GOAL, area_of, hits_in, lowered, measure, python_texts, read_limits, texts, tracked_files
from prose import Rate as AreaRate


def test_prose_every_area_is_within_its_limit() -> None:
    areas, worst = measure()
    limits = read_limits()
    over = {area: round(rate.per_thousand, 1) for area, rate in areas.items() if rate.per_thousand > limits.get(area, GOAL)}
    files = [name for _, name, _ in worst if area_of(name) in over][:10]
    assert over == {}, f"python scripts/prose.py --list 20 shows examples; begin with {files}"


def test_prose_limits_name_existing_areas_only() -> None:
    assert set(read_limits()) - set(measure()[0]) == set()


@pytest.mark.parametrize(
    "text",
    [
        "Whoever asks is answered.",
        "Counts the bytes of what was read.",
        "Returns None where there is none.",
        "The index is made anew.",
        "The block lies on a volume.",
        "It takes an integer.",
        "Sends one call a node.",
    ],
)
def test_prose_pattern_finds_the_construction(text: str) -> None:
    assert hits_in(text)


@pytest.mark.parametrize(
    "text",
    [
        "Return None if the node lacks a volume.",
        "The index is rebuilt.",
        "Requires an integer.",
        "Sends one call per node.",
        "A client that stops reading is disconnected.",
    ],
)
def test_prose_pattern_passes_plain_english(text: str) -> None:
    assert not hits_in(text)


def test_prose_python_texts_holds_what_people_read() -> None:
    source = '"""A docstring."""\n# a comment\nlog.info("a log line %d", 1)\nraise Bad("an error text")\nx = "a mere value"\n'
    found = "\n".join(python_texts(source))
    assert all(text in found for text in ("A docstring.", "a comment", "a log line %d", "an error text"))
    assert "a mere value" not in found


def test_prose_configuration_files_are_searched(tmp_path: Path) -> None:
    rules = tmp_path / "rules.yml"
    rules.write_text(
        '# A comment.\n- alert: KVStoreX\n  expr: a metric\n    annotations:\n          summary: "A summary"\n'
        "          description: >-\n            First line.\n            Second line.\n"
    )
    found = texts(rules)
    assert all(text in found for text in ("A comment.", "A summary", "First line.", "Second line."))
    assert "a metric" not in found
    assert {"deploy/prometheus/alerts.yml", "deploy/systemd/node.env", "deploy/docker/Dockerfile"} <= set(tracked_files())


def test_prose_limits_only_fall() -> None:
    areas = {"better": AreaRate(1000, 5), "worse": AreaRate(1000, 50), "new": AreaRate(1000, 9), "done": AreaRate(1000, 0)}
    expected = {"better": 5.0, "done": GOAL, "new": GOAL, "worse": 20.0}
    assert lowered(areas, {"better": 20.0, "worse": 20.0, "done": 3.0}) == expected
