"""The dual-path demo, small, as it is run by people who have root."""

from __future__ import annotations

from kvstore.replay.dual_demo import DualDemoPlan, loads_of, run_dual_demo, spark


def test_bars_show_a_series() -> None:
    assert spark([], 10.0) == ""
    assert spark([0.0, 5.0, 10.0, 20.0], 10.0) == " ▄██"
    assert len(spark([1.0] * 1000, 10.0)) == 48


def test_the_demo_shows_that_two_links_are_faster_than_one(lab_possible: None) -> None:
    plan = DualDemoPlan(snic_mbit=200.0, blocks=128, layers=8, block_bytes=128 << 10, rounds=1, in_flight=2)
    steps: list[int] = []
    lines: list[str] = []
    results = {one.policy: one for one in run_dual_demo(plan, lines.append, steps.append)}
    assert steps == list(range(1, loads_of(plan) + 1))
    assert any("P/D" in line for line in lines), "the bed's bound is told"
    assert [one.wrong_bytes for one in results.values()] == [0, 0, 0]
    assert results["prefill_only"].paths.keys() == {"prefill"}
    assert {"prefill", "decode"} <= results["split"].paths.keys()
    assert results["split"].single_s[0] < results["prefill_only"].single_s[0]
    assert sum(results["split"].links["decode-0"]) > 0
    assert sum(results["prefill_only"].links["decode-0"]) < 0.1 * sum(results["prefill_only"].links["prefill-0"])
