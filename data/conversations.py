"""Conversations without a column ``messages``: the columns of ShareGPT and of Alpaca, as lists of messages.

| | columns |
|---|---|
| ShareGPT | ``conversations``: a list of {"from": "human" or "gpt", "value": the text}; ``system`` |
| Alpaca | ``instruction``, ``input``, ``output``; ``system``; ``history``: earlier pairs of a question and an answer |

Names and meanings are those that LLaMA-Factory and TRL read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from .bad_document import BadDocument

# What ShareGPT's ``from`` says -> the role.
_ROLES = {"system": "system", "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant"}
_ROLES |= {"tool": "tool", "observation": "tool"}


def is_conversation(names: Iterable[str]) -> bool:
    """Return True if columns of these names are those of ShareGPT or of Alpaca."""
    return "conversations" in names or {"instruction", "output"} <= {*names}


def messages_of(row: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return the messages of a row with the columns of ShareGPT or of Alpaca.

    Raises:
        BadDocument: the row is in neither form.
    """
    system = [_message("system", "system", row["system"])] if row.get("system") else []
    if "conversations" in row:
        turns = row["conversations"]
        if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns) or not turns:
            raise BadDocument("'conversations' is not a list of objects with 'from' and 'value'")
        return [*system, *(_turn(number, turn) for number, turn in enumerate(turns, 1))]
    parts = [part for part in (row["instruction"], row.get("input")) if part]
    question = "\n".join(parts) if all(isinstance(part, str) for part in parts) else None
    pairs = [*(row.get("history") or ()), (question, row["output"])]
    messages = []
    for pair in pairs:
        if not isinstance(pair, (list, tuple)) or len(pair) != 2:
            raise BadDocument("'history' is not a list of pairs of a question and an answer")
        messages += [_message("instruction", "user", pair[0]), _message("output", "assistant", pair[1])]
    return [*system, *messages]


def _turn(number: int, turn: Mapping[str, Any]) -> dict[str, str]:
    """Return the message of an entry of ``conversations``."""
    speaker = turn.get("from", turn.get("role"))
    if speaker not in _ROLES:
        raise BadDocument(f"turn {number} of 'conversations' is from {speaker!r}: known are {', '.join(_ROLES)}")
    return _message(f"turn {number} of 'conversations'", _ROLES[speaker], turn.get("value", turn.get("content")))


def _message(what: str, role: str, text: Any) -> dict[str, str]:
    if not isinstance(text, str):
        raise BadDocument(f"{what} is {type(text).__name__}, but a text is needed")
    return {"role": role, "content": text}
