"""Sizes and durations for people: in findings, in the output of commands, in reports."""

from __future__ import annotations


def show_size(size: float, *, space: bool = True) -> str:
    """Format a number of bytes, rounded. Without a space it is one word, for columns that are split at spaces."""
    gap = " " if space else ""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f}{gap}{unit}" if unit == "B" else f"{size:.1f}{gap}{unit}"
        size /= 1024
    return f"{size:.2f}{gap}TiB"


def show_duration(seconds: float) -> str:
    """Format a duration in words, for a sentence. ``kvstore.cli.support.output.duration`` is for columns."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7_200:
        return f"{seconds / 60:.0f} minutes"
    return f"{seconds / 3_600:.0f} hours" if seconds < 172_800 else f"{seconds / 86_400:.0f} days"
