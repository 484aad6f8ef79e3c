"""Encoders against transformers: logits, loss and every gradient on grids, saved weights, and refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from support.encoder_models import CASES, Case, make, random_case, trained, wanted
from support.huggingface_models import assert_bitwise
from support.sweeps import on_every_axis, some


def require_equal(
    ranks: Any, folder: Path, cases: dict[str, Case], sizes: tuple[int, int, int], **options: Any
) -> None:
    """Compare a step on a grid with transformers', and the saved folder with the loaded one, bit for bit."""
    right: dict[str, dict[str, Any]] = {}
    for name, case in cases.items():
        right[name] = wanted(make(case), folder / name)
    count = sizes[0] * sizes[1] * sizes[2] * options.get("context", 1)
    for rank in ranks(count, trained, [str(folder / name) for name in cases], sizes, timeout=300, **options):
        for name, found in zip(cases, rank, strict=True):
            require_step_equal(found, right[name], f"{name} {cases[name]}")
    for name in cases:
        theirs, mine = (load_file(folder / name / kind / "model.safetensors") for kind in ("model", "saved"))
        assert_bitwise(mine, theirs)


def require_step_equal(found: dict[str, Any], right: dict[str, Any], what: str) -> None:
    assert found["loss"] == pytest.approx(right["loss"], rel=1e-10), what
    if found["logits"] is not None:
        rows, logits = found["logits"]
        close(logits, right["logits"][rows], what)
    assert found["gradients"].keys() == right["gradients"].keys(), what
    for name, gradient in right["gradients"].items():
        close(found["gradients"][name], gradient, f"{what} {name}")


def close(found: Tensor, right: Tensor, what: str) -> None:
    torch.testing.assert_close(found, right, rtol=1e-10, atol=1e-11, msg=f"{what}: {{}}".format)


@on_every_axis
def test_encoders_train_as_in_transformers_on_every_axis(
    ranks: Any, tmp_path: Path, sizes: tuple[int, int, int], options: dict[str, Any]
) -> None:
    require_equal(ranks, tmp_path, CASES, sizes, **options)


def test_encoders_train_with_sequence_parallelism(ranks: Any, tmp_path: Path) -> None:
    cases = {name: CASES[name] for name in ("bert", "roberta-classes", "modernbert", "modernbert-classes")}
    cases["vit"] = Case("ViTForImageClassification", CASES["vit"].options | {"image_size": 12})  # 10 tokens
    require_equal(ranks, tmp_path, cases, (1, 1, 2), sequence_parallel=True)


_RANDOM = [("", range(8)), ("ModernBert", range(4)), ("", range(8, 108)), ("ModernBert", range(4, 104))]


@pytest.mark.parametrize(("family", "seeds"), some(_RANDOM, kept={0, 1}))
def test_random_encoders_equal_those_of_transformers(ranks: Any, tmp_path: Path, family: str, seeds: range) -> None:
    require_equal(ranks, tmp_path, {str(seed): random_case(seed, family) for seed in seeds}, (1, 1, 2))


def test_masked_tokens_train_over_a_context_axis(ranks: Any, tmp_path: Path) -> None:
    require_equal(
        ranks, tmp_path, {name: CASES[name] for name in ("bert", "roberta", "modernbert")}, (1, 1, 1), context=2
    )
