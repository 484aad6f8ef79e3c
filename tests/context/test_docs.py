"""The programs of docs/context.md run, on one rank and on two, and its table of balance is true."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from triax.context.block_sparse import BlockSparse
from triax.context.documents import Documents
from triax.context.mask import Mask
from triax.context.order import runs

from support.paths import ROOT
from support.processes import program
from support.readme_blocks import blocks, commands, programs

TEXT = (ROOT / "docs" / "context.md").read_text()


def run_program(source: str, arguments: list[str]) -> None:
    sys.argv = ["program.py", *arguments]
    space: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(source, "docs/context.md", "exec"), space)
    if "whole" in space:  # the sum over the ranks equals one process
        grid, project = space["grid"], space["project"]
        q, k, v = project(space["x"]).unflatten(2, (-1, 16)).transpose(1, 2).split([8, 2, 2], dim=1)
        seen = (space["documents"][:, None, :, None] == space["documents"][:, None, None, :]).tril()
        plain = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
        torch.testing.assert_close(space["whole"], plain)
        found = [parameter.grad.clone() for parameter in project.parameters()]
        expected = torch.autograd.grad(plain.square().sum(), list(project.parameters()))
        torch.testing.assert_close(found, list(expected))
        assert grid.context.size == int(arguments[0] if arguments else 1)


@pytest.mark.parametrize(("name", "size"), [("long.py", 1), ("long.py", 2), ("sparse.py", 1)])
def test_the_programs_of_the_context_page_run(ranks: Any, name: str, size: int) -> None:
    ranks(size, run_program, programs(TEXT)[name], [str(size)] if size > 1 else [])


@pytest.mark.parametrize("size", [1, 2])
def test_the_context_page_shows_what_its_training_prints(ranks: Any, size: int, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(programs(TEXT)["train.py"])
    (shown,) = [block.text for block in blocks(TEXT) if block.language == "text"]
    first, *others = ranks(size, program, ["train.py", str(size)], str(tmp_path))
    assert first == shown and not any(others)


def test_the_context_page_has_a_command_for_each_program() -> None:
    assert list(programs(TEXT)) == ["train.py", "long.py", "sparse.py"]
    typed = [command for _, command in commands(TEXT)]
    assert all(any(name in command for command in typed) for name in programs(TEXT))


def test_the_balance_table_of_the_context_page_is_true() -> None:
    length = 8192
    generator = torch.Generator().manual_seed(0)
    documents = (torch.rand(8, length, generator=generator) < 1 / 1024).cumsum(1)
    masks = {
        "causal, window of 1,024": Mask(length, True, window=1024),
        "causal, documents of 1,024 tokens on average, 8 rows": Mask(length, True, documents=Documents(documents)),
    }
    for name, mask in masks.items():
        found = []
        for size in (2, 4, 8):
            held = [runs(length, length // size, size, rank) for rank in range(size)]
            q = torch.empty(1 if mask.documents is None else 8, 1, length // size, 8)
            work = [sum(BlockSparse(q, q, mask, mine, theirs).work() for theirs in held) for mine in held]
            found.append(f"{max(work) / (sum(work) / size):.2f}")
        assert f"| {name} | {' | '.join(found)} |" in TEXT
