"""Public names and modules at their older places: they are still found, and a warning names the new place."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

from triax.base.moved import MODULES, NAMES

# Places that older versions of triax had, and those of today, both within triax: what users' programs may still type.
COMPRESSION = ("OneBitAdam", "OneBitLamb", "OneBitSGD", "PowerSGD", "SparseRows", "TopK", "ZeroOneAdam")
MOVED_NAMES = {f"zero.{name}": f"gradient_compression.{name}" for name in COMPRESSION} | {
    "grid.VERSION": "base.VERSION"
}
MOVED_MODULES = {
    "agreement": "grid.agreement",
    "dry_run": "plugins.dry_run",
    "fault_tolerance": "plugins.fault_tolerance",
    "gradient_compression": "plugins.gradient_compression",
    "launcher": "grid.launcher",
    "local_sgd": "plugins.local_sgd",
    "methods": "train.methods",
    "monitor": "engine.monitor",
    "optim": "engine.optim",
    "optim.lr_schedules": "compat.deepspeed.lr_schedules",
    "plan": "plugins.plan",
    "randomness": "grid.randomness",
}


def test_moved_names_and_modules_are_the_expected_ones() -> None:
    assert {older: f"{home}.{older.rpartition('.')[2]}" for older, home in NAMES.items()} == MOVED_NAMES
    assert MODULES == MOVED_MODULES


@pytest.mark.parametrize(("older", "now"), MOVED_NAMES.items())
def test_a_moved_name_is_found_with_a_warning(older: str, now: str) -> None:
    (package, name), (home, _) = older.rsplit(".", 1), now.rsplit(".", 1)
    with pytest.warns(DeprecationWarning, match=rf"^triax\.{older} has moved, .*: write triax\.{now}$") as warned:
        found = getattr(importlib.import_module(f"triax.{package}"), name)
    assert found is getattr(importlib.import_module(f"triax.{home}"), name)
    places = {each.filename for each in warned if str(each.message).startswith(f"triax.{older} has moved")}
    assert places == {__file__}  # the first import of a package may warn of other things


OLDER_MODULES = f"""
import importlib, sys, warnings
with warnings.catch_warnings(record=True) as warned:
    warnings.simplefilter("always")
    import triax.plan.memory
    from triax.monitor.report.svg import line_chart
    import triax.methods as methods
    for older in {sorted(MOVED_MODULES)}:
        __import__("triax." + older)
texts = [str(each.message) for each in warned if "has moved" in str(each.message)]
assert len(texts) == {len(MOVED_MODULES) - 2}, texts  # triax.methods and triax.gradient_compression stay
assert "triax.plan has moved, and is there until triax 0.3: write triax.plugins.plan" in texts
assert {{each.filename for each in warned if "has moved" in str(each.message)}} == {{"<string>"}}
for older, now in {MOVED_MODULES!r}.items():
    assert sys.modules["triax." + older] is importlib.import_module("triax." + now), older
import triax.plugins.plan.memory, triax.engine.monitor.report.svg
assert triax.plan.memory is triax.plugins.plan.memory and triax.plan.memory.__name__ == "triax.plugins.plan.memory"
assert triax.plugins.plan.memory.__spec__.name == "triax.plugins.plan.memory"
assert line_chart is triax.engine.monitor.report.svg.line_chart and methods is triax.train.methods
"""


def test_a_moved_module_is_one_object_under_both_names() -> None:
    subprocess.run([sys.executable, "-c", OLDER_MODULES], check=True)
