"""docs/proved.md lists every type of model, and says of each what `triax check` finds."""

from __future__ import annotations

import os
import re

import pytest

from laws import proved


def test_the_page_of_proofs_lists_every_type() -> None:
    found = proved.written()
    page = proved.page((kind, method, row) for method, rows in found.items() for kind, row in rows)
    assert page == proved.PAGE.read_text()
    types = {method: [kind for kind, _ in rows] for method, rows in found.items()}
    assert all(types[method] == proved.kinds() for method in ("full", "lora", "sft", "dpo"))
    assert types.keys() == proved.METHODS.keys()
    assert all({"llama", "mixtral", "mamba2"} <= {*kinds} <= {*proved.kinds()} for kinds in types.values())
    texts = {text for rows in found.values() for _, row in rows for text in row.values()}
    assert all(not text or re.match(r"\w+Error: ", text) for text in texts)  # no cell differs


KINDS = [
    (kind, method)
    if (kind, method) in (("qwen3_moe", "dpo"),)
    else pytest.param(kind, method, marks=pytest.mark.exhaustive)
    for kind in proved.kinds()
    for method in proved.METHODS
]


@pytest.mark.parametrize(("kind", "method"), KINDS)
def test_the_page_of_proofs_says_what_a_check_finds(kind: str, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "HF_HUB_OFFLINE", "1")
    said = dict(proved.written()[method])
    if kind not in said:
        pytest.skip("the page says nothing of it")
    assert proved.cells(kind, method) == said[kind]
