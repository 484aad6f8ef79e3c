"""triax.Trainer on pipe x tensor x data x context, and LoRA on each axis, beside transformers' own in float64."""

from __future__ import annotations

import functools
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers.trainer  # noqa: F401 (so that the pool imports it once for all ranks, and not each rank in 3 s)
from safetensors.torch import load_file

import triax
from triax.base.errors import ConfigError
from triax.testing.pool import RankFailure

from support.trainer_in_float64 import SECTION, STEPS, TARGETS, exact, exported, model_of, near, run

# Steps of the quick tests, and their rows of training and evaluation: an epoch is 3 steps of 2 microbatches and one
# of 1, and the last two steps are of a second epoch.
FEW, FEW_ROWS = 6, (28, 8)


def on(stage: int = 0, lora: str = "", **grid: int) -> dict[str, Any]:
    section = {"lora": {**SECTION, "targets": TARGETS[lora]}} if lora else {}
    return {"grid": grid, "triax": {"zero_optimization": {"stage": stage}, **section}}


def runs(ranks: Any, out: Path, options: dict[str, Any] | None, steps: int = STEPS, **job: Any) -> list[dict[str, Any]]:
    """Run on the grid of the options, transformers' own without. It is saved and evaluated half-way and at its end."""
    grid = {} if options is None else options["grid"]
    job |= {"max_steps": steps, "eval_steps": steps // 2, "save_steps": steps // 2}
    job |= {} if steps == STEPS else {"rows": FEW_ROWS}
    found: list[dict[str, Any]] = ranks(
        math.prod(grid.values()), run, str(out), grid.get("data", 1), options, timeout=300, **job
    )
    return found


@pytest.fixture(scope="module")
def plain(ranks: Any, tmp_path_factory: Any) -> Any:
    """transformers' own run on one process, once for each case, kind of adapters and number of steps."""

    @functools.cache
    def of(case: str, lora: str = "", steps: int = STEPS) -> tuple[dict[str, Any], Path]:
        out = tmp_path_factory.mktemp("plain")
        return runs(ranks, out, None, steps, case=case, lora=lora)[0], out

    return of


GRIDS = [on(1, pipe=2, tensor=2, data=2), on(0, pipe=2, tensor=2, context=2)]
SWEEP = [
    on(2, tensor=2, data=2, context=2),
    on(3, pipe=2, data=2, context=2),
    on(3, pipe=2, tensor=2, data=2),
    on(0, tensor=2, context=2),
    on(1, context=4),
]
AGAIN = on(3, data=2)  # the grid of the second half
# Replicas beside stages and tensor shards: test_lora_on_every_axis_trains_as_peft.
CASES = [("llama", GRIDS[1], FEW)] + [
    pytest.param(case, each, STEPS, marks=pytest.mark.exhaustive)
    for case in ("gpt2", "llama")
    for each in GRIDS + SWEEP
]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("case", "options", "steps"), CASES, ids=str)
def test_all_axes_together_train_as_transformers(
    ranks: Any, plain: Any, tmp_path: Path, case: str, options: dict[str, Any], steps: int
) -> None:
    """All steps equal transformers', and the second half on another grid; the folder has the weights, bit for bit."""
    wanted, _ = plain(case, steps=steps)
    for found in runs(ranks, tmp_path, options, steps, case=case):
        near(found, wanted, steps)
    half = str(tmp_path / f"checkpoint-{steps // 2}")
    for again in runs(ranks, tmp_path / "again", AGAIN, steps, case=case, resume=half):
        near(again, wanted, steps)
    read = exported(str(tmp_path / "last"))
    for name, value in wanted["weights"].items():
        torch.testing.assert_close(read[name], value, rtol=0, atol=1e-10, msg=name)
        assert "weights" not in found or torch.equal(read[name], found["weights"][name]), name


def factors(folder: Path, case: str) -> dict[str, Any]:
    """Return the factors of a saved adapter, which PEFT has loaded as they lie in the file."""
    import peft

    with exact():
        model: Any = peft.PeftModel.from_pretrained(model_of(case), str(folder))
    stored = load_file(folder / "adapter_model.safetensors")
    held = {name.replace(".default", ""): value for name, value in model.state_dict().items() if ".lora_" in name}
    assert held.keys() == stored.keys() and all(torch.equal(held[name], value) for name, value in stored.items())
    return stored


ADAPTED = [
    ("llama", "peft", on(2, pipe=2, data=2)),
    ("llama", "section", on(3, "llama", tensor=2, data=2)),
]
MORE = [
    ("llama", "peft", on(2, pipe=2, tensor=2, data=2)),
    ADAPTED[1],
    ("llama", "section", on(1, "llama", pipe=2, context=2)),
    ("llama", "peft", on(1, tensor=2, data=2)),
]
MORE += [(case, "peft", each) for case in ("gpt2", "llama") for each in [on(3, data=2), *GRIDS, *SWEEP]]
MORE += [
    (case, "section", on(each["triax"]["zero_optimization"]["stage"], case, **each["grid"]))
    for case in ("gpt2", "llama")
    for each in [on(3, data=2), *GRIDS, *SWEEP]
]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("case", "lora", "options", "steps"),
    [*((*each, FEW) for each in ADAPTED), *(pytest.param(*each, STEPS, marks=pytest.mark.exhaustive) for each in MORE)],
    ids=str,
)
def test_lora_on_every_axis_trains_as_peft(
    ranks: Any, plain: Any, tmp_path: Path, case: str, lora: str, options: dict[str, Any], steps: int
) -> None:
    """All steps equal those of PEFT with transformers' Trainer; adapters of a section begin with the same factors.

    So does the second half, on another grid.
    """
    wanted, out = plain(case, lora, steps)
    job = {"case": case, "lora": "peft" if lora == "peft" else ""}
    again = on(1, "" if lora == "peft" else case, tensor=2)
    for grid, resume in ((options, None), (again, str(tmp_path / f"checkpoint-{steps // 2}"))):
        for found in runs(ranks, tmp_path, grid, steps, resume=resume, **job):
            if lora == "section":
                found.pop("weights", None)  # under triax's names
            near(found, wanted, steps)
    saved, right = factors(tmp_path / "last", case), factors(out / "last", case)
    assert saved.keys() == right.keys()
    for name, value in right.items():
        torch.testing.assert_close(saved[name], value, rtol=0, atol=1e-10, msg=name)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("options", "steps"),
    [
        (on(1, tensor=2), FEW),
        *(
            pytest.param(each, STEPS, marks=pytest.mark.exhaustive)
            for each in (on(1, tensor=2), on(3, tensor=2, data=2))
        ),
    ],
    ids=str,
)
def test_adapters_with_dropout_and_whole_layers_train_as_peft(
    ranks: Any, plain: Any, tmp_path: Path, options: dict[str, Any], steps: int
) -> None:
    """PEFT's layers stay on tensor ranks. Two replicas draw other masks than one process: losses must be finite."""
    wanted, out = plain("llama", "more", steps)
    for found in runs(ranks, tmp_path, options, steps, case="llama", lora="more"):
        if "data" not in options["grid"]:
            near(found, wanted, steps)
        assert all(map(math.isfinite, found["loss"]))
    saved, right = (load_file(folder / "last" / "adapter_model.safetensors") for folder in (tmp_path, out))
    assert saved.keys() == right.keys() and any("lm_head" in name for name in right)
    second = load_file(tmp_path / "last" / "second" / "adapter_model.safetensors")
    assert all(
        torch.equal(second[name], value)
        for name, value in load_file(out / "last" / "second" / "adapter_model.safetensors").items()
    )
    for name, value in right.items() if "data" not in options["grid"] else ():
        torch.testing.assert_close(saved[name], value, rtol=0, atol=1e-10, msg=name)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("steps", [FEW, pytest.param(STEPS, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("lora", ["", "peft"])
def test_a_run_resumes_from_a_folder_of_transformers(
    ranks: Any, plain: Any, tmp_path: Path, lora: str, steps: int
) -> None:
    """The second half of transformers' own run, on two grids."""
    wanted, out = plain("llama", lora, steps)
    for number, options in enumerate((on(2, pipe=2, tensor=2), on(3, data=2))):
        folder, resume = tmp_path / str(number), str(out / f"checkpoint-{steps // 2}")
        for found in runs(ranks, folder, options, steps, case="llama", lora=lora, resume=resume):
            near(found, wanted, steps)


def in_model_order(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def in_reverse(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([*model.parameters()][::-1], lr=1e-2, weight_decay=0.1)


def test_resume_with_a_given_optimizer_goes_on_as_transformers(ranks: Any, tmp_path: Path) -> None:
    """The folder numbers the parameters as the given optimizer does, not as transformers' own two groups do."""
    job: dict[str, Any] = {"case": "llama", "optimizer": in_model_order}
    (wanted,) = runs(ranks, tmp_path / "plain", None, 4, **job)
    resume = str(tmp_path / "plain" / "checkpoint-2")
    for number, options in enumerate((on(2, data=2), on(pipe=2))):
        for found in runs(ranks, tmp_path / str(number), options, 4, resume=resume, **job):
            near(found, wanted, 4)


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [  # None: transformers' own, with one group of 23 matrices, which decay, and one of 7 norms
        (None, "has groups of [30] parameters, but this run has [23, 7]: resume with"),
        (in_reverse, "for parameter 1, but this run's parameter 1 is model.norm.weight of the shape (24,)"),
    ],
    ids=["other groups", "another order"],
)
def test_resume_with_another_optimizers_parameters_is_refused(
    ranks: Any, tmp_path: Path, optimizer: Any, message: str
) -> None:
    ranks(1, run, str(tmp_path), 1, None, case="llama", optimizer=in_model_order, max_steps=2, save_steps=2)
    resume = str(tmp_path / "checkpoint-2")
    with pytest.raises(RankFailure, match="(?s)ConfigError.*" + re.escape(message)):
        ranks(1, run, str(tmp_path), 1, on(), resume=resume, optimizer=optimizer, case="llama", max_steps=4)


def refused(out: str, grid: dict[str, int]) -> list[str]:
    """Return the messages for models with adapters that the grid cannot share."""
    import peft
    import transformers

    def message(model: Any, section: bool = False) -> str:
        options = on(lora="llama" if section else "", **grid)
        args = triax.TrainingArguments(out, **options, report_to="none")
        with pytest.raises((ConfigError, ValueError)) as error:
            triax.Trainer(model, args)
        return str(error.value)

    def adapted(config: Any) -> Any:
        return peft.get_peft_model(model_of("llama"), config)

    plain: dict[str, Any] = {"r": 2, "target_modules": ["q_proj"]}
    found = [
        message(adapted(peft.LoraConfig(**plain, use_dora=True))),
        message(adapted(peft.IA3Config(target_modules=["q_proj"], feedforward_modules=[]))),
        message(adapted(peft.LoraConfig(**plain)), section=True),
    ]
    if "pipe" not in grid:
        for key, value in (("dropout", 0.1), ("use_dora", True), ("base", "nf4")):
            options: dict[str, Any] = {"grid": grid, "triax": {"lora": {"rank": 2, "alpha": 4, key: value}}}
            args = triax.TrainingArguments(out, **options, report_to="none")
            with pytest.raises(ConfigError, match=f"section lora has no {key}"):
                triax.Trainer(model_of("llama"), args)
        return found
    one_head = transformers.LlamaConfig(hidden_size=24, num_attention_heads=1, num_hidden_layers=1, vocab_size=8)
    return [
        *found,
        message(adapted(peft.LoraConfig(**plain, modules_to_save=["lm_head"]))),
        message(adapted(peft.LoraConfig(**plain, lora_dropout=0.1))),
        message(adapted(peft.LoraConfig(**plain, lora_bias=True))),
        message(transformers.LlamaForCausalLM(one_head)),
    ]


def test_adapters_that_a_grid_cannot_share_are_refused(ranks: Any, tmp_path: Path) -> None:
    for messages in ranks(2, refused, str(tmp_path), {"tensor": 2}):
        dora, other, both = messages
        assert "DoraLinearVariant" in dora and "tensor=1" in dora and "IA3" in other and "section lora" in both
    for messages in ranks(4, refused, str(tmp_path), {"pipe": 2, "tensor": 2}):
        dora, other, both, whole, drops, bias, heads = messages
        assert "use_dora=True" in dora and "IA3" in other and "section lora" in both
        assert "modules_to_save" in whole and "lora_dropout=0.1" in drops and "lora_bias=True" in bias
        assert "cannot be cut into the parts of pipe=2" in heads
