"""The benchmark page and its results agree, and a goal is judged by its own figure. Kind: structural, unit."""

from __future__ import annotations

import page
from measure import Goal, Ratio


def test_the_page_of_benchmarks_holds_the_stored_results() -> None:
    """docs/evidence/benchmarks.md is what benchmarks/page.py writes from the results, and leaves out no table."""
    text, results = page.PAGE.read_text(encoding="utf-8"), page.stored()
    assert page.filled(text, results) == text
    assert page.filled(text.replace("| 1.94 |", "| 1.49 |"), results) == text
    shown = {(name, what) for _, name, what, _ in page.MARKED.findall(text)}
    for name in set(page.BENCHMARKS) & set(results):
        assert {(name, "measured"), *((name, table) for table in results[name]["tables"])} <= shown


def test_a_table_that_nobody_measured_says_so() -> None:
    text = "<!-- bench: nothing table -->\n| old | 3 |\n<!-- end of bench -->"
    assert "old" not in page.filled(text, {})


def test_a_goal_is_met_by_its_own_figure() -> None:
    """The bound's sense decides: 1.49 meets "at most 1.5", 1.51 does not; of "at least" the reverse."""
    judged = {("<= 1.5", 1.49): True, ("<= 1.5", 1.51): False, (">= 1.8", 1.9): True, (">= 1.8", 1.7): False}
    assert {key: Goal("a figure", key[1], key[0]).met for key in judged} == judged


def test_a_ratio_is_of_repeats_that_ran_side_by_side() -> None:
    """A machine that was busy during one repeat slows both contestants: 1.5 each time, whatever that repeat took."""
    ratio = Ratio.of([3.0, 30.0, 3.0, 6.0], [2.0, 20.0, 2.0, 4.0])
    assert (ratio.value, ratio.spread) == (1.5, 0.0)
