"""Distillation on grids, beside TRL's DistillationTrainer and the equations in plain PyTorch, over 3 or 20 steps."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import triax
from triax import Grid
from triax.train.methods import distill_loss, with_teacher

from support.method_steps import STEPS, Place, descend, engine_at, gets_data, grids, same_steps
from support.toy_answers import SIZES, quiet, run_of, steps, tokenizer
from support.trl_in_float64 import exact

ROWS, PROMPT, LENGTH, WORDS, RATE, K = 4, 4, 12, 29, 0.2, 5
SMALL = SIZES | {"vocab_size": WORDS, "initializer_range": 0.2}
LARGER = SMALL | {"hidden_size": 24, "num_hidden_layers": 3}
# Arguments of distill_loss, and TRL's of the same loss.
LOSSES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "reverse": ({"kind": "reverse"}, {"beta": 1.0}),
    "jsd": ({"kind": "jsd", "beta": 0.3, "temperature": 2.0}, {"beta": 0.3, "temperature": 2.0}),
}


def model_of(seed: int, sizes: dict[str, Any]) -> Any:
    import transformers

    torch.manual_seed(seed)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).double()


def rows_of(step: int) -> tuple[Tensor, Tensor]:
    """Return ids (4, 13) of a step, and how many of them count in each row: prompts of 4 tokens, then answers."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(2, WORDS, (ROWS, LENGTH + 1), generator=generator)
    lengths = torch.tensor([LENGTH + 1, 7, 9, 6])
    return ids * (torch.arange(LENGTH + 1) < lengths[:, None]), lengths


def batch_of(step: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Return inputs and labels of a step."""
    ids, lengths = rows_of(step)
    places = torch.arange(1, LENGTH + 1)
    labels = ids[:, 1:].masked_fill((places < PROMPT) | (places >= lengths[:, None]), -100)
    return ids[:, :-1], {"labels": labels}


def trl_steps(folder: str, count: int, **options: Any) -> list[list[float]]:
    """Train with TRL on one process; return losses and entropies, and save both models before and the one after."""
    quiet()
    import datasets
    import trl

    class Fixed(trl.DistillationTrainer):
        """Answers that are given, in place of those that the student writes."""

        def _prepare_inputs(self, generation_batch: Any) -> Any:
            ids, lengths = rows_of(self.state.global_step)
            mask = (torch.arange(LENGTH + 1) < lengths[:, None]).long()
            fixed = {"prompt_ids": ids[:, :PROMPT], "completion_ids": ids[:, PROMPT:]}
            fixed |= {"prompt_mask": mask[:, :PROMPT], "completion_mask": mask[:, PROMPT:]}
            return fixed | {"num_items_in_batch": mask[:, PROMPT:].sum()}

    args = trl.DistillationConfig(**steps(folder, ROWS, count, RATE), **options)
    with exact():
        student, teacher = model_of(0, SMALL), model_of(1, LARGER)
        student.save_pretrained(f"{folder}/first")
        teacher.save_pretrained(f"{folder}/teacher")
        data = datasets.Dataset.from_list([{"prompt": "."}] * ROWS)
        trainer = Fixed(student, teacher, args=args, train_dataset=data, processing_class=tokenizer())
        return [[row["loss"], row["entropy"]] for row in run_of(trainer, folder)]


def plain_steps(folder: str, steps: int, top_k: int | None, temperature: float, hard: float) -> list[list[float]]:
    """Train by the equations of the forward divergence in plain PyTorch, and save as ``trl_steps``."""
    with exact(), torch.enable_grad():
        student, teacher = model_of(0, SMALL), model_of(1, LARGER)
        student.save_pretrained(f"{folder}/first")
        teacher.save_pretrained(f"{folder}/teacher")
        found = []
        for step in range(steps):
            ids, labels = batch_of(step)
            counts = labels["labels"] >= 0
            logits, theirs = student(input_ids=ids).logits[counts], teacher(input_ids=ids).logits[counts].detach()
            s, t = ((z / temperature).softmax(-1) for z in (logits, theirs))
            entropy = -(s * s.log()).sum(-1).mean()
            if top_k is not None:
                kept = t.topk(top_k, -1).indices
                s, t = (torch.cat([p.gather(-1, kept), p.scatter(-1, kept, 0.0).sum(-1, True)], -1) for p in (s, t))
            loss = (t * (t / s).log()).sum(-1).mean() + hard * F.cross_entropy(logits, labels["labels"][counts])
            found.append([descend(student, loss, RATE), entropy.item()])
        student.save_pretrained(f"{folder}/last")
    return found


def trained(
    folder: str, steps: int, place: Place, loss: dict[str, Any], how: str, top_k: int | None = None
) -> tuple[list[list[float]], dict[str, Any]]:
    """Train with a live teacher, or with its logits as a file has them; return losses with entropies, and metrics."""
    grid = Grid(**place.axes, timeout=60)
    place = place._replace(sequence_parallel="tensor" in place.axes and loss["kind"] == "forward")
    loss_fn = distill_loss(grid, WORDS, chunk_tokens=6, **loss)
    rows = 1 if grid.data.size > 1 else 2
    engine = engine_at(place, grid, f"{folder}/first", loss_fn, ROWS, rows, RATE)
    # The teacher's last stage is on another rank than zb-v's.
    teacher = engine_at(place._replace(schedule="1f1b"), grid, f"{folder}/teacher", loss_fn, ROWS, rows, None)
    share = ROWS // grid.data.size
    found = []
    for step in range(steps):
        ids, whole = batch_of(step)
        if how == "stored":
            whole["teacher"] = torch.load(f"{folder}/{step}.pt")
        starts = range(grid.data.rank * share, (grid.data.rank + 1) * share, rows)
        data: Any = [(ids[i : i + rows], {n: each[i : i + rows] for n, each in whole.items()}) for i in starts]
        data = data if gets_data(engine, place) else []
        if how == "live":
            data = with_teacher(engine, teacher, data, top_k)
        mean = engine.train_batch(iter(data) if data else None).item()
        found.append([mean, engine.metrics["entropy"]])
    triax.save_hf(engine, f"{folder}/triax")
    return found, engine.metrics


@STEPS
@pytest.mark.parametrize("kind", ["reverse", pytest.param("jsd", marks=pytest.mark.exhaustive)])
def test_distillation_losses_and_weights_equal_trls(ranks: Any, tmp_path: Path, kind: str, steps: int) -> None:
    loss, options = LOSSES[kind]
    (wanted,) = ranks(1, trl_steps, str(tmp_path), steps, timeout=300, **options)
    assert len(wanted) == len({*map(tuple, wanted)}) == steps
    for place in grids(steps):
        same_steps(ranks, trained, tmp_path, wanted, place, loss, "live")


@STEPS
@pytest.mark.parametrize(("top_k", "temperature", "hard"), [(K, 1.5, 0.0), (None, 2.0, 0.5)])
def test_distillation_losses_and_weights_follow_the_equations(
    ranks: Any, tmp_path: Path, top_k: int | None, temperature: float, hard: float, steps: int
) -> None:
    loss = {"kind": "forward", "temperature": temperature, "hard": hard}
    (wanted,) = ranks(1, plain_steps, str(tmp_path), steps, top_k, temperature, hard, timeout=300)
    if top_k is None:
        with exact(), torch.no_grad():
            teacher = model_of(1, LARGER)
            for step in range(steps):
                torch.save(teacher(input_ids=batch_of(step)[0]).logits, tmp_path / f"{step}.pt")
    for place in grids(steps)[:: 1 if top_k else 2]:
        same_steps(ranks, trained, tmp_path, wanted, place, loss, "live" if top_k else "stored", top_k)


def sent_bytes(top_k: int | None) -> float:
    """Bytes that with_teacher sends on a grid whose teacher ends on another rank than the student."""
    grid = Grid(pipe=2, tensor=2)
    config = triax.LlamaConfig(vocab_size=WORDS, hidden_size=16, num_hidden_layers=2, num_attention_heads=4)
    loss_fn = distill_loss(grid, WORDS)
    models = [triax.PipelineModule(triax.llama_layers(config), grid=grid, loss_fn=loss_fn) for _ in range(2)]
    batch = triax.Batch(size=4, microbatch=2)
    sgd = partial(torch.optim.SGD, lr=0.1)
    engine: Any = triax.Engine(models[0], optimizer=sgd, batch=batch, schedule="zb-v")
    teacher: Any = triax.Engine(models[1], batch=batch)
    data = [(torch.ones(2, 6, dtype=torch.long), {"labels": torch.ones(2, 6, dtype=torch.long)}) for _ in range(2)]
    teacher.eval_batch(iter(data), compute_loss=False)  # schemas are sent once
    sent = []
    for run in (
        lambda: teacher.eval_batch(iter(data), compute_loss=False),
        lambda: with_teacher(engine, teacher, data, top_k),
    ):
        before = sent_so_far(grid)
        run()
        sent.append(sent_so_far(grid) - before)
    return sent[1] - sent[0]


def sent_so_far(grid: Grid) -> float:
    found = grid.traffic.report().get("pipe", {}).get("send")
    return 0.0 if found is None else found.bytes


@pytest.mark.parametrize("top_k", [None, K])
def test_with_teacher_sends_the_bytes_of_its_docstring(ranks: Any, top_k: int | None) -> None:
    everyone = ranks(4, sent_bytes, top_k)
    for rank, more in enumerate(everyone):
        wanted = 2 * 2 * 6 * (15 * 4 if top_k is None else K * (4 + 4))
        schemas = more - wanted if rank >= 2 else 0
        assert more == (wanted + schemas if rank >= 2 else 0) and 0 <= schemas < 2 * 300
