"""Options of torchrun, ``deepspeed``, ``horovodrun`` and Megatron-LM, by launchers.toml, for triax's commands."""

from __future__ import annotations

import shlex

from ..base.foreign_tables import answers, read_table

TABLES = read_table(__file__, "launchers.toml")


def _with_values(rows: dict[str, str]) -> dict[str, tuple[int, str]]:
    """Return the number of an option's values (0 or 1), and its answer, by its name without the = behind it."""
    return {name.removesuffix("="): (int(name.endswith("=")), answer) for name, answer in rows.items()}


# Option of triax run -> its names in other launchers.
SAME = {option: tuple(names.split()) for option, names in TABLES["same"].items()}
# Option of another launcher -> the number of its values, and the options of triax run in its place, {} for the value.
REPLACED = {name: (count, tuple(shlex.split(ours))) for name, (count, ours) in _with_values(TABLES["replaced"]).items()}
# Option -> the number of its values, and why it does nothing.
IDLE = _with_values(answers(TABLES["idle"]))
# Option -> what to write instead.
REFUSED = answers(TABLES["refused"])
# DeepSpeed's launchers that start the ranks themselves -> what to type.
STARTERS = answers(TABLES["starters"])
# triax's option -> what other libraries call it; a command suggests those of its own options.
EQUIVALENTS = {option: tuple(names.split()) for option, names in TABLES["equivalents"].items()}
