"""The last rows of an epoch in the Trainer: each counts once, on every grid, as in transformers' own on one process."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers

import triax

from support.trainer_in_float64 import Text, exact, trainer_of

ROWS = (19, 7)  # 4 full batches of 4 rows and 3 more rows; 1 full batch of evaluation and 3 more rows


def losses_of_rows(outputs: Any, labels: Any) -> Any:
    logits, labels = outputs.logits[:, :-1], labels[:, 1:]
    return F.cross_entropy(logits.transpose(1, 2), labels, reduction="none").sum(1)


class Means(transformers.Trainer):
    """A loss that is a mean over rows, whatever the number of items is."""

    named = False

    def __init__(self, *args: Any, **options: Any) -> None:
        options["compute_loss_func"] = None
        super().__init__(*args, **options)
        self.model_accepts_loss_kwargs = False

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        outputs = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
        each = losses_of_rows(outputs, inputs["labels"])
        loss: Any = each.mean()
        if self.named and model.training:
            loss = triax.Loss({"half": loss / 2, "pair": (each.sum() / 2, each.numel())}, metrics={"rows": loss})
        return (loss, {"logits": outputs.logits}) if return_outputs else loss


class Stream(torch.utils.data.IterableDataset[Any]):
    """Rows without a length."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __iter__(self) -> Any:
        return (Text(self.rows)[index] for index in range(self.rows))


class OurMeans(Means, triax.Trainer):
    pass


class OurTerms(OurMeans):
    named = True


KINDS: dict[str, Any] = {"items": None, "stream": None, "means": (Means, OurMeans), "terms": (Means, OurTerms)}


@exact()
def run(out: str, replicas: int, options: dict[str, Any] | None, kind: str, **changes: Any) -> dict[str, Any]:
    """Two epochs, and the evaluations at their ends."""
    more: dict[str, Any] = {
        "num_train_epochs": 2,
        "max_steps": -1,
        "eval_strategy": "epoch",
        "save_strategy": "epoch",
    } | changes
    if kind == "stream":
        more |= {"max_steps": 6, "accelerator_config": {"dispatch_batches": False}}
    more["include_num_input_tokens_seen"] = "non_padding"
    resume = more.pop("resume", None)
    trainer = trainer_of(out, replicas, options, rows=ROWS, kinds=KINDS[kind], **more)
    if kind == "stream":
        trainer.train_dataset, trainer.eval_dataset = Stream(15), Stream(ROWS[1])  # 15: whole steps
    trainer.train(resume_from_checkpoint=resume)
    history = trainer.state.log_history
    found: dict[str, Any] = {
        key: [row[key] for row in history if key in row] for key in ("loss", "grad_norm", "eval_loss")
    }
    found["tokens"] = trainer.state.num_input_tokens_seen
    found["flos"] = trainer.state.total_flos
    lengths = [len(row["input_ids"]) for row in map(Text(5, 200).__getitem__, range(5))]
    predicted = trainer.predict(Text(5, 200))
    found["rows"] = len(predicted.predictions), len(predicted.label_ids)
    found["logits"] = [row[:length] for row, length in zip(predicted.predictions, lengths)]
    return found


QUICK: list[tuple[int, int, dict[str, Any], str]] = [
    (2, 1, {"grid": {"pipe": 2}}, "stream"),
    (2, 2, {"triax": {"zero_optimization": {"stage": 3}}}, "items"),
    (4, 2, {"grid": {"pipe": 2, "data": 2}}, "items"),
    (4, 4, {"triax": {"zero_optimization": {"stage": 2}}}, "terms"),
]
OTHERS: list[tuple[int, int, dict[str, Any], str]] = [
    (4, 4, {"triax": {"zero_optimization": {"stage": 3}}}, "items"),
    (2, 1, {"grid": {"pipe": 2}}, "items"),
    (2, 1, {"grid": {"tensor": 2}}, "items"),
    (2, 1, {"grid": {"context": 2}}, "items"),
    (2, 2, {"triax": {}}, "items"),
    (4, 2, {"grid": {"tensor": 2, "data": 2}}, "means"),
    (4, 4, {"triax": {}}, "means"),
]
GRIDS = [*QUICK, *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in OTHERS)]


@pytest.fixture(scope="module")
def plain(ranks: Any, tmp_path_factory: Any) -> Any:
    """transformers' own run on one process, once for each loss and batch of evaluation."""

    @functools.cache
    def of(kind: str, rows: int) -> Any:
        out = str(tmp_path_factory.mktemp("plain"))
        return ranks(1, run, out, 1, None, kind, per_device_eval_batch_size=rows)[0]

    return of


@pytest.mark.parametrize(("size", "replicas", "options", "kind"), GRIDS)
def test_last_rows_of_an_epoch_count_once_on_every_grid(
    ranks: Any, plain: Any, tmp_path: Path, size: int, replicas: int, options: dict[str, Any], kind: str
) -> None:
    own = "means" if kind == "terms" else kind
    wanted = plain(own, 4 if KINDS[kind] is None else 4 // replicas)  # only items are counted over all replicas
    for found in ranks(size, run, str(tmp_path), replicas, options, kind, timeout=120):
        for key in ("loss", "grad_norm", "eval_loss"):
            assert found[key] == pytest.approx(wanted[key], rel=1e-10), key
        assert (found["rows"], found["tokens"]) == (wanted["rows"], wanted["tokens"])
        for mine, theirs in zip(found["logits"], wanted["logits"], strict=True):
            assert abs(mine - theirs).max() < 1e-10


def test_last_rows_count_once_after_a_resume_in_the_epoch(ranks: Any, plain: Any, tmp_path: Path) -> None:
    """The rest of an epoch is read through another sampler of accelerate."""
    saves = {"save_strategy": "steps", "save_steps": 2, "resume": None}
    for resume in (None, f"{tmp_path}/checkpoint-2"):
        for found in ranks(4, run, str(tmp_path), 4, {"triax": {}}, "items", **saves | {"resume": resume}, timeout=120):
            assert found["loss"] == pytest.approx(plain("items", 4)["loss"], rel=1e-10)
