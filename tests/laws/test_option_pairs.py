"""docs/option-pairs.md has every option, and a run finds what it says."""

from __future__ import annotations

import re
from dataclasses import fields

import pytest

from triax.options.engine import EngineOptions

from laws import option_pairs
from laws.option_pairs import FEATURES, PAGE, PLACES

# Options that the page leaves out: sizes, rates, names, and what a run writes.
LEFT_OUT = {"batch", "lr_scheduler", "schedule", "checkpoint", "monitor", "tuning", "drop_last", "seed", "names"}
LEFT_OUT |= {"fault_tolerance"}  # replicas in processes of their own: docs/faults.md


def test_the_page_of_option_pairs_has_every_option() -> None:
    tried = {keyword for feature in FEATURES for keyword in feature.options}
    assert tried | LEFT_OUT == {each.name for each in fields(EngineOptions)} and not tried & LEFT_OUT
    page = PAGE.read_text()
    single, _, rest = page.partition("## Pairs of options")
    rows = re.findall(r"^\| `(.+?)` \| ([\d, ]+) \| (equal|runs) \| (.*)\|$", single, re.MULTILINE)
    assert [(name, stages) for name, stages, *_ in rows] == [
        (feature.name, ", ".join(map(str, feature.stages))) for feature in FEATURES
    ]
    exceptions = [each.split(": ") for *_, cell in rows for each in cell.strip().split("; ") if each]
    assert {place for place, _ in exceptions} <= set(PLACES)
    listed = refused_pairs()
    every = [(a.name, b.name) for a, b in option_pairs.pairs()]
    assert listed.keys() <= set(every)
    counts = re.search(r"Of (\d+) pairs,\n(\d+) are equal and (\d+) run\.", rest)
    assert counts is not None and len(every) == int(counts[1]) == int(counts[2]) + int(counts[3]) + len(listed)
    numbers = {cell for _, cell in exceptions} | set(listed.values())
    assert all(re.fullmatch(r"refused \(\d+\)", cell) for cell in numbers), "an option fails"
    assert len(numbers) == len(re.findall(r"^\d+\. \S", rest, re.MULTILINE))


def refused_pairs() -> dict[tuple[str, str], str]:
    """Return the pairs of options that the page lists, with the cell of each."""
    rest = PAGE.read_text().partition("## Pairs of options")[2]
    rows = re.findall(r"^\| `(.+?)` \| (`.+`) \| (.*) \|$", rest, re.MULTILINE)
    return {(a, b): cell for a, partners, cell in rows for b in re.findall(r"`(.+?)`", partners)}


@pytest.mark.parametrize(
    "names",
    [
        ('recompute="full"', 'zero=Zero(offload_optimizer="cpu")'),
        ('reduction=GradientReduction(dtype="bf16")', 'compression=GradientCompression("powersgd")'),
    ],
)
def test_option_pairs_train_or_are_refused_as_the_page_says(names: tuple[str, str]) -> None:
    (pair,) = (pair for pair in option_pairs.pairs() if (pair[0].name, pair[1].name) == names)
    refused = names in refused_pairs()
    found = option_pairs.together(pair)
    assert bool(option_pairs.REFUSALS.match(found)) is refused and (refused or found == "equal"), found


@pytest.mark.exhaustive
def test_the_page_of_option_pairs_is_what_its_command_writes() -> None:
    rows = list(option_pairs.alone())
    found = [(a, b, option_pairs.together((a, b))) for a, b in option_pairs.pairs()]
    assert option_pairs.page(rows, found) == PAGE.read_text()
