"""triax.Trainer against transformers' own on one process: losses, checkpoints on other grids, exports, "auto"."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import triax

from support.trainer_jobs import (
    ACCUMULATION,
    BATCH,
    CASES,
    STEPS,
    Text,
    logged,
    model_of,
    replicas_here,
    trainer_of,
    weights,
    zero,
)


def run(
    case: str, out: str, replicas: int, config: Any = None, resume: str | None = None, **options: Any
) -> dict[str, Any]:
    """Train, predict, and say what happened."""
    trainer = trainer_of(case, out, replicas, config, **options)
    trainer.train(resume_from_checkpoint=resume)
    found: dict[str, Any] = logged(trainer)
    found["predicted"] = trainer.predict(Text(7, 200)).predictions
    found["best"] = trainer.state.best_model_checkpoint
    trainer.save_model(f"{out}/last")
    return found


FEW = 8  # steps of the quick tests: the last two are of a second epoch


def of_steps(steps: int) -> dict[str, int]:
    """Return the options of a run of STEPS or FEW steps: it is evaluated and saved four times, or twice."""
    every = max(steps // 4, 4)
    return {"max_steps": steps, "eval_steps": every, "save_steps": every}


def near(found: dict[str, Any], wanted: dict[str, Any], steps: int) -> None:
    """Compare whole histories; the first part of a resumed run's history is that of the first run."""
    evaluations = steps // of_steps(steps)["eval_steps"]
    for key, count in (("loss", steps), ("grad_norm", steps), ("learning_rate", steps), ("eval_loss", evaluations)):
        assert len(found[key]) == len(wanted[key]) == count
        assert found[key] == pytest.approx(wanted[key], abs=1e-4, rel=0), key
    assert found["predicted"].shape == wanted["predicted"].shape and len(found["predicted"]) == 7
    assert abs(found["predicted"] - wanted["predicted"]).max() < 1e-3


@pytest.fixture(scope="module")
def plain(ranks: Any, tmp_path_factory: Any) -> Any:
    """transformers' own run on one process, once a case and number of steps."""

    @functools.cache
    def of(case: str, steps: int = STEPS) -> Any:
        return ranks(1, run, case, str(tmp_path_factory.mktemp(case)), 1, **of_steps(steps))[0]

    return of


def require_equal_to_transformers(
    ranks: Any,
    plain: Any,
    tmp_path: Path,
    case: str,
    grid: tuple[int, int],
    stage: int,
    then: tuple[int, int, int],
    steps: int = STEPS,
) -> None:
    """A run on one grid, and the second half of it on another one and in another stage."""
    wanted, job = plain(case, steps), {**of_steps(steps), "timeout": 240}
    data, tensor = grid
    out = str(tmp_path / "out")
    for found in ranks(data * tensor, run, case, out, data, zero(stage, tensor), **job):
        near(found, wanted, steps)
    first = weights(f"{out}/last")
    data, tensor, stage = then
    again = str(tmp_path / "again")
    where = f"{out}/checkpoint-{steps // 2}"
    for found in ranks(data * tensor, run, case, again, data, zero(stage, tensor), resume=where, **job):
        near(found, wanted, steps)
    for name, value in weights(f"{again}/last").items():
        assert torch.allclose(value, first[name], atol=2e-4), name
    exported = weights(f"{out}/checkpoint-{steps}")  # nothing happened since
    assert all(torch.equal(exported[name], value) for name, value in first.items())


def adapted(out: str, replicas: int, config: Any = None) -> list[float]:
    """Train LoRA's adapters and a whole output layer with PEFT, and save them."""
    import peft

    torch.manual_seed(1)
    options: Any = {"r": 2, "target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}
    model = peft.get_peft_model(model_of("llama"), peft.LoraConfig(**options))
    trainer = trainer_of("llama", out, replicas, config, model, max_steps=4, save_steps=4, eval_strategy="no")
    trainer.train()
    return logged(trainer)["loss"]


def test_modules_that_peft_trains_whole_are_saved_in_stage_3(ranks: Any, tmp_path: Path) -> None:
    (wanted,) = ranks(1, adapted, str(tmp_path / "plain"), 1)
    for losses in ranks(2, adapted, str(tmp_path / "sharded"), 2, zero(3), timeout=120):
        assert losses == pytest.approx(wanted, abs=1e-4, rel=0)
    file = "checkpoint-4/adapter_model.safetensors"
    plain, sharded = (load_file(tmp_path / name / file) for name in ("plain", "sharded"))
    assert "base_model.model.lm_head.weight" in plain and plain.keys() == sharded.keys()
    for name, value in plain.items():
        assert torch.allclose(sharded[name], value, atol=2e-4), name


def test_two_replicas_in_stage_3_resume_on_one_process(ranks: Any, plain: Any, tmp_path: Path) -> None:
    """As (replicas, tensor ranks) and a stage: (2, 1) in stage 3, and then (1, 1) in stage 1."""
    require_equal_to_transformers(ranks, plain, tmp_path, case="gpt2", grid=(2, 1), stage=3, then=(1, 1, 1), steps=FEW)


def test_two_tensor_ranks_resume_on_two_replicas(ranks: Any, plain: Any, tmp_path: Path) -> None:
    require_equal_to_transformers(ranks, plain, tmp_path, "llama", (1, 2), 1, (2, 1, 2), FEW)


GRIDS = [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (1, 4)]  # replicas, tensor ranks


@pytest.mark.exhaustive
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_every_grid_and_stage_trains_as_transformers(
    ranks: Any, plain: Any, tmp_path: Path, case: str, grid: tuple[int, int], stage: int
) -> None:
    """Each run resumes in the next stage, on another grid: the one that is 1 to 4 places further in the list."""
    data, tensor = GRIDS[(GRIDS.index(grid) + stage + 1) % len(GRIDS)]
    require_equal_to_transformers(ranks, plain, tmp_path, case, grid, stage, (data, tensor, (stage + 1) % 4))


def best(out: str, config: Any) -> dict[str, Any]:
    """The best shall be that of the largest loss, which is not the last one; one more checkpoint is kept."""
    options = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": True}
    trainer = trainer_of("gpt2", out, replicas_here(), config, save_total_limit=2, max_steps=15, **options)
    trainer.train()
    trainer.save_model(f"{out}/last")
    losses = logged(trainer)["eval_loss"]
    again = trainer.evaluate()["eval_loss"]
    trainer.accelerator.wait_for_everyone()
    return {"losses": losses, "again": again, "best": trainer.state.best_model_checkpoint, "kept": os.listdir(out)}


def test_the_best_model_is_loaded_at_the_end(ranks: Any, tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    first, second = ranks(2, best, out, zero(3), timeout=120)
    assert first["losses"] == second["losses"] and first["best"] == second["best"]
    losses = first["losses"]
    at = losses.index(max(losses))
    assert first["best"].endswith(f"checkpoint-{5 * (at + 1)}") and at < 2  # not the last one
    assert first["again"] == pytest.approx(losses[at], abs=1e-6)
    kept = [name for name in first["kept"] if name.startswith("checkpoint-")]
    assert sorted(kept) == sorted({Path(first["best"]).name, "checkpoint-15"})
    assert weights(first["best"]).keys() == weights(f"{out}/last").keys()
    for name, value in weights(first["best"]).items():
        assert torch.equal(value, weights(f"{out}/last")[name]), name


def narrow(out: str, key: str, stage: int) -> Any:
    section: dict[str, Any] = {"enabled": "auto"} | ({"initial_scale_power": 20} if key == "fp16" else {})
    config = {"zero_optimization": {"stage": stage}, key: section}
    trainer = trainer_of("gpt2", out, replicas_here(), config, **{key: True})
    trainer.train()
    trainer.save_model(f"{out}/last")
    return logged(trainer), {str(p.dtype) for p in trainer.model.parameters()}, trainer.engine.skipped_steps


@pytest.mark.exhaustive
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize(("key", "stage"), [("bf16", 0), ("bf16", 3), ("fp16", 1), ("fp16", 2)])
def test_bf16_and_fp16_train_with_narrow_weights(
    ranks: Any, plain: Any, tmp_path: Path, key: str, stage: int, count: int
) -> None:
    out = str(tmp_path / "out")
    for found, kinds, skipped in ranks(count, narrow, out, key, stage, timeout=120):
        assert kinds == {f"torch.{'bfloat16' if key == 'bf16' else 'float16'}"}
        assert (key == "fp16") == (skipped > 0)  # the scale starts too high, and rates wait with the weights
        assert len({*found["learning_rate"]}) == STEPS - skipped
        if key == "bf16":
            assert found["loss"] == pytest.approx(plain("gpt2")["loss"], rel=0.02)
        assert found["loss"][-1] < 0.9 * found["loss"][0]
    stored = {tensor.dtype for tensor in weights(f"{out}/last").values()}
    assert stored == {torch.bfloat16 if key == "bf16" else torch.float16}


def recomputed(case: str, stage: int, section: dict[str, Any], itself: bool) -> tuple[dict[str, Tensor], int, int]:
    """Gradients of a model in a plain loop, elements that its forward pass saves, and calls of its first block."""
    model = model_of(case).double()
    if itself:
        # The older of the two names is that of transformers until 5.22.
        getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    calls, saved = 0, 0
    block = (model.transformer.h if case == "gpt2" else model.model.layers)[0]
    inner = block.mlp.forward

    def counted(x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return inner(x)

    def pack(tensor: Tensor) -> Tensor:
        nonlocal saved
        saved += tensor.numel()
        return tensor

    block.mlp.forward = counted
    config = {"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    config |= {"zero_optimization": {"stage": stage}, "activation_checkpointing": section}
    engine, *_ = triax.initialize(model=model, config=config)
    rows = [Text()[i] for i in range(4)]
    batch = {key: torch.stack([row[key] for row in rows]) for key in rows[0]}
    torch.manual_seed(3)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = engine(**batch).loss
    engine.backward(loss)
    engine.step()
    return {name: g.clone() for name, g in engine.gather("gradients").items()}, saved, calls


@pytest.mark.parametrize(("case", "stage"), [("gpt2", 1), ("llama", 3)])
def test_blocks_in_a_plain_loop_are_recomputed_exactly_once(ranks: Any, case: str, stage: int) -> None:
    """By the section of the configuration, by the blocks themselves, or by both."""
    ((wanted, most, once),) = ranks(1, recomputed, case, stage, {}, False)
    for section, itself in (({"enabled": True}, False), ({"enabled": True}, True), ({}, True)):
        for found, saved, calls in ranks(2, recomputed, case, stage, section, itself):
            torch.testing.assert_close(found, wanted, rtol=0, atol=1e-10)
            assert once == 1 and calls == 2 and saved < 0.6 * most, (section, itself, calls, saved, most)


class Named(triax.Trainer):
    """A Trainer whose loss has two terms and a metric."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
        logits, labels = model(input_ids=inputs["input_ids"]).logits[:, :-1], inputs["labels"][:, 1:]
        words = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        count = (labels != -100).sum()
        hits = (logits.argmax(-1) == labels).sum()
        terms = {"words": (words, count), "size": logits.square().mean()}
        return triax.Loss(terms, {"size": 0.5}, {"accuracy": (hits, count)})


def named_run(out: str) -> tuple[list[dict[str, float]], list[dict[str, Any]]]:
    """Train with named losses; return the logged rows, and the metrics of the engine after each step."""
    import transformers

    seen: list[dict[str, Any]] = []

    class Keep(transformers.TrainerCallback):
        def on_step_end(self, *args: Any, **options: Any) -> None:
            seen.append(trainer.engine.metrics)

    args = triax.TrainingArguments(
        out,
        triax=zero(1),
        per_device_train_batch_size=BATCH // replicas_here(),
        gradient_accumulation_steps=ACCUMULATION,
        max_steps=3,
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
        save_strategy="no",
    )
    trainer: Any = Named(model=model_of("gpt2"), args=args, train_dataset=Text(), callbacks=[Keep()])
    trainer.train()
    return [row for row in trainer.state.log_history if "loss" in row], seen


@pytest.mark.parametrize("size", [1, 2])
def test_the_trainer_logs_named_terms_and_metrics(ranks: Any, tmp_path: Path, size: int) -> None:
    rows, seen = ranks(size, named_run, str(tmp_path))[0]
    assert len(rows) == len(seen) == 3 and rows[2]["words"] < rows[0]["words"]
    for row, metrics in zip(rows, seen, strict=True):
        assert {name: row[name] for name in ("words", "size", "accuracy")} == metrics
        assert row["loss"] == pytest.approx(row["words"] + 0.5 * row["size"], abs=1e-3)
