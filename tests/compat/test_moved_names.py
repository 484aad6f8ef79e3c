"""Public names at their older places: they are found there, and a warning says where they are now."""

from __future__ import annotations

import importlib

import pytest

from triax.compat.moved_names import MOVED


@pytest.mark.parametrize("older", MOVED)
def test_a_moved_name_is_found_with_a_warning(older: str) -> None:
    package, _, name = older.rpartition(".")
    new = f"triax.{MOVED[older]}"
    with pytest.warns(DeprecationWarning, match=rf"^triax\.{older} has moved, .*: write {new}\.{name}$") as warned:
        found = getattr(importlib.import_module(f"triax.{package}"), name)
    assert found is getattr(importlib.import_module(new), name)
    places = {each.filename for each in warned if str(each.message).startswith(f"triax.{older} has moved")}
    assert places == {__file__}  # the first import of a package may warn of other things
