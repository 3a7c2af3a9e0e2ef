"""A robust fit of few non-negative coefficients to few samples, by relative error.

A sample of 2 s and one of 2 ms count the same, and a sample that is far too slow counts little: its relative error is below 1.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

ROUNDS = 3
"""Rounds in which samples far from the fit get less weight."""
CLOSE = 0.1
"""Relative error above which a sample gets less weight."""


def fit(rows: Sequence[Sequence[float]], weights: Sequence[float], ridge: Sequence[float], rounds: int = ROUNDS) -> list[float]:
    """Return coefficients ``c >= 0`` for which the sum of ``c * row`` is close to 1 in each row.

    Args:
        rows: the features of each sample, divided by its measured value; at least one row.
        weights: importance of each row.
        ridge: by feature: cost of its part of the sum. If samples cannot tell features apart, cheap ones explain them.
        rounds: 1: all samples keep their weight.
    """
    width = len(ridge)
    scale = [sum(row[at] for row in rows) / len(rows) or 1.0 for at in range(width)]
    scaled = [[row[at] / scale[at] for at in range(width)] for row in rows]
    found = [0.0] * width
    robust = list(weights)
    for _ in range(rounds):
        found = _solve(scaled, robust, ridge)
        errors = [abs(sum(map(float.__mul__, found, row)) - 1.0) for row in scaled]
        robust = [weight * min(1.0, CLOSE / max(error, CLOSE)) for weight, error in zip(weights, errors, strict=True)]
    return [one / by for one, by in zip(found, scale, strict=True)]


def _solve(rows: Sequence[Sequence[float]], weights: Sequence[float], ridge: Sequence[float]) -> list[float]:
    """Least squares with non-negative coefficients: the best of all subsets of features whose free solution is feasible."""
    width, total = len(ridge), sum(weights)
    gram = [[0.0] * width for _ in range(width)]
    target = [0.0] * width
    for row, weight in zip(rows, weights, strict=True):
        for at in range(width):
            target[at] += weight * row[at]
            for other in range(at, width):
                gram[at][other] += weight * row[at] * row[other]
    for at in range(width):
        gram[at][at] += ridge[at] * total
        for other in range(at):
            gram[at][other] = gram[other][at]
    best, best_gain = [0.0] * width, 0.0
    for count in range(1, width + 1):
        for chosen in itertools.combinations(range(width), count):
            part = _linear([[gram[a][b] for b in chosen] for a in chosen], [target[a] for a in chosen])
            if part is None or min(part) < 0:
                continue
            gain = sum(one * target[at] for one, at in zip(part, chosen, strict=True))  # by how much the error falls
            if gain > best_gain:
                best_gain, best = gain, [0.0] * width
                for one, at in zip(part, chosen, strict=True):
                    best[at] = one
    return best


def _linear(matrix: list[list[float]], right: list[float]) -> list[float] | None:
    """Solve a small symmetric positive system by elimination; None: it is singular."""
    size = len(right)
    for at in range(size):
        pivot = matrix[at][at]
        if pivot <= 1e-12:
            return None
        for row in range(at + 1, size):
            factor = matrix[row][at] / pivot
            for column in range(at, size):
                matrix[row][column] -= factor * matrix[at][column]
            right[row] -= factor * right[at]
    found = [0.0] * size
    for at in reversed(range(size)):
        rest = sum(matrix[at][column] * found[column] for column in range(at + 1, size))
        found[at] = (right[at] - rest) / matrix[at][at]
    return found
