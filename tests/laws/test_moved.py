"""Public names and modules at their older places: they are found there, and a warning says where they are now."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

from triax.base.moved import MODULES, NAMES


@pytest.mark.parametrize("older", NAMES)
def test_a_moved_name_is_found_with_a_warning(older: str) -> None:
    package, _, name = older.rpartition(".")
    now = f"triax.{NAMES[older]}.{name}"
    with pytest.warns(DeprecationWarning, match=rf"^triax\.{older} has moved, .*: write {now}$") as warned:
        found = getattr(importlib.import_module(f"triax.{package}"), name)
    home, _, inner = NAMES[older].rpartition(".")
    assert found is getattr(getattr(importlib.import_module(f"triax.{home}".rstrip(".")), inner), name)
    places = {each.filename for each in warned if str(each.message).startswith(f"triax.{older} has moved")}
    assert places == {__file__}  # the first import of a package may warn of other things


OLDER_MODULES = f"""
import importlib, sys, warnings
with warnings.catch_warnings(record=True) as warned:
    warnings.simplefilter("always")
    import triax.plan.memory
    from triax.monitor.report.svg import line_chart
    import triax.methods as methods
    for older in {sorted(MODULES)}:
        __import__("triax." + older)
texts = [str(each.message) for each in warned if "has moved" in str(each.message)]
assert len(texts) == {len(MODULES) - 2}, texts  # triax.methods and triax.gradient_compression stay
assert "triax.plan has moved, and is there until triax 0.3: write triax.plugins.plan" in texts
assert {{each.filename for each in warned if "has moved" in str(each.message)}} == {{"<string>"}}
for older, now in {MODULES!r}.items():
    assert sys.modules["triax." + older] is importlib.import_module("triax." + now), older
import triax.plugins.plan.memory, triax.engine.monitor.report.svg
assert triax.plan.memory is triax.plugins.plan.memory and triax.plan.memory.__name__ == "triax.plugins.plan.memory"
assert triax.plugins.plan.memory.__spec__.name == "triax.plugins.plan.memory"
assert line_chart is triax.engine.monitor.report.svg.line_chart and methods is triax.train.methods
"""


def test_modules_are_found_at_their_older_places_and_are_the_same() -> None:
    subprocess.run([sys.executable, "-c", OLDER_MODULES], check=True)
