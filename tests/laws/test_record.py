"""The program that compares the bits of two states of the library."""

from __future__ import annotations

from typing import Any

from laws.record import case_digests, cases, compare, five


def test_the_record_reports_only_bits_that_differ(ranks: Any) -> None:
    runs = dict(cases())
    assert len(runs) + len(dict(five())) == 75
    case = runs["pipeline [1, 2, 1] stage 2"]
    first, again, other = (
        ranks(2, case_digests, each) for each in (case, case, {**case, "clip": case["clip"] * (1 + 1e-15)})
    )
    assert compare({"run": again}, {"run": first}) == []
    # The gradients are clipped to other bits. The next steps' losses may have other bits too, or round to these.
    (line,) = compare({"run": other}, {"run": first})
    assert line in ("run: gradients of ranks [0] differ", "run: losses of ranks [0, 1] differ")
    assert compare({}, {"run": first}) == ["run: missing"]
