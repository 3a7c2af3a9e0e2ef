"""Memory available to a process, from files in the form in which kernels write them."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore.process.memory.host_memory import huge_pages_free, memory_available, memory_total

GIB = 1 << 30


def host(folder: Path, groups: str, limits: dict[str, str]) -> int | None:
    """Files of a host with 8 GiB, whose process is in ``groups``."""
    (folder / "meminfo").write_text("MemFree: 12 kB\nMemTotal:        8388608 kB\n")
    (folder / "groups").write_text(groups)
    for name, limit in limits.items():
        path = folder / "tree" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(limit + "\n")
    return memory_total(folder / "meminfo", folder / "groups", folder / "tree")


@pytest.mark.parametrize(
    ("groups", "limits", "most"),
    [
        ("", {}, 8 * GIB),
        ("0::/\n", {"memory.max": str(GIB)}, GIB),
        ("0::/pods/one\n", {"pods/one/memory.max": "max", "pods/memory.max": str(2 * GIB)}, 2 * GIB),
        ("0::/pods/one\n", {"pods/one/memory.max": str(64 * GIB)}, 8 * GIB),
        ("0::/../elsewhere\n", {"memory.max": str(3 * GIB)}, 3 * GIB),
        ("4:cpu:/a\n3:memory:/a\n", {"memory/a/memory.limit_in_bytes": str(GIB // 2)}, GIB // 2),
        ("3:memory:/a\n", {"memory/memory.limit_in_bytes": "9223372036854771712"}, 8 * GIB),
        ("nonsense\n\n::\n0:\n", {"memory.max": "many"}, 8 * GIB),
    ],
)
def test_memory_lowest_limit_applies(groups: str, limits: dict[str, str], most: int, tmp_path: Path) -> None:
    assert host(tmp_path, groups, limits) == most


@pytest.mark.parametrize(
    ("groups", "files", "space"),
    [
        ("", {}, 6 * GIB),
        ("0::/a\n", {"a/memory.max": "2", "a/memory.current": "1.5"}, GIB // 2),
        ("0::/a\n", {"a/memory.max": "2", "a/memory.current": "1.5", "a/memory.stat": ("inactive_file", 1)}, 3 * GIB // 2),
        ("0::/a\n", {"a/memory.max": "2", "a/memory.current": "2.5"}, 0),
        ("0::/a\n", {"a/memory.max": "64", "a/memory.current": "1"}, 6 * GIB),
        ("0::/a/b\n", {"a/b/memory.max": "4", "a/b/memory.current": "1", "a/memory.max": "5", "a/memory.current": "4"}, GIB),
        (
            "3:memory:/a\n",
            {
                "memory/a/memory.limit_in_bytes": "2",
                "memory/a/memory.usage_in_bytes": "1.5",
                "memory/a/memory.stat": ("total_inactive_file", 1),
            },
            3 * GIB // 2,
        ),
    ],
)
def test_memory_used_by_group_is_not_available(
    groups: str, files: dict[str, str | tuple[str, int]], space: int, tmp_path: Path
) -> None:
    """Files of a host with 6 GiB available; values in GiB."""
    (tmp_path / "meminfo").write_text("MemTotal: 8388608 kB\nMemAvailable:    6291456 kB\n")
    (tmp_path / "groups").write_text(groups)
    for name, content in files.items():
        path = tmp_path / "tree" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, str):
            path.write_text(f"{int(float(content) * GIB)}\n")
        else:
            path.write_text(f"anon 5\n{content[0]} {content[1] * GIB}\nactive_file 7\n")
    assert memory_available(tmp_path / "meminfo", tmp_path / "groups", tmp_path / "tree") == space


def test_a_host_that_does_not_say(tmp_path: Path) -> None:
    assert memory_total(tmp_path / "a", tmp_path / "b", tmp_path / "c") is None
    (tmp_path / "a").write_text("MemTotal: much\n")
    assert memory_total(tmp_path / "a", tmp_path / "b", tmp_path / "c") is None


def test_memory_of_this_host_is_known() -> None:
    assert (memory_total() or 0) > 64 << 20
    assert 0 < (memory_available() or 0) < (memory_total() or 0)


@pytest.mark.parametrize(
    ("lines", "free"),
    [
        ("HugePages_Free:     512\nHugePages_Rsvd:      0\nHugepagesize:       2048 kB\n", GIB),
        ("HugePages_Free:     512\nHugePages_Rsvd:    256\nHugepagesize:       2048 kB\n", GIB // 2),
        ("MemTotal: 1 kB\n", 0),
        ("nonsense\n", 0),
    ],
)
def test_huge_pages_free_excludes_promised_ones(lines: str, free: int, tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text(lines)
    assert huge_pages_free(tmp_path / "meminfo") == free
    assert huge_pages_free(tmp_path / "none") == 0
