"""Runs of training files: the numbers of one process in plain PyTorch, on every grid and after a resume elsewhere."""

from __future__ import annotations

import contextlib
import io
import logging
import math
import os
import resource
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from triax.data.token_data import TokenData
from triax.engine.monitor.records import StepMetrics
from triax.pipe.program.simulate import timeline_of
from triax.pipe.schedules.choose import make_schedule
from triax.train import loop
from triax.train.file import read_training_file
from triax.train.job import resolve
from triax.train.loop import TrainingRun
from triax.train.progress import Reporter, in_lines, step_figures

from support.command_line import output_of
from support.file_runs import Recorder, Tensors, Watch, numbers_of, rows_of, run_watched, validations
from support.rank_checks import triax_warnings
from support.reference import gpt_logits
from support.tokenized import folder

RUN = """\
name: one
model: {preset: bytes-tiny}
data: {training: tokens, held_out: 0.2, threads: 0}
training:
  steps: 4
  sequence: 32
  learning_rate: {peak: 1e-2, warmup_steps: 2, minimum: 0.2}
evaluate: {every: 2, sequences: 21}
checkpoint: {every: 2}
monitor: {trace: false}
batch:
  size: 8
  microbatch: 2
precision: fp64
clip: 0.5
"""
STEPS, PEAK = 4, 1e-2


def run(root: str, *changes: str, pictures: bool = False) -> tuple[Tensors, list[tuple[float, Tensors, Tensors]]]:
    """Be a rank of the run of ``root/run.yaml``; return the initial weights, and what each step left."""
    recorder = Recorder()
    run_watched(recorder, root, "run.yaml", *changes, pictures=pictures)
    return recorder.initial, recorder.steps


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    folder(root, 60)
    (root / "run.yaml").write_text(RUN)
    return root


def mean_loss(weights: dict[str, Tensor], batch: Any) -> Tensor:
    (ids, documents), labels = batch
    logits = gpt_logits(weights, ids, 2, 4, documents)
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def held_out_loss(place: Path, weights: dict[str, Tensor]) -> float:
    held_out = TokenData(place / "tokens", 32, held_out=0.2, part="held_out")
    rows = min(21, held_out.rows(0).count)
    return float(mean_loss(weights, next(held_out.loader(rows, rows, threads=0))).detach())


def test_a_run_resumed_on_another_grid_equals_plain_pytorch(ranks: Any, place: Path) -> None:
    """2 x 1 x 2 over slices, stopped by a limit, resumed on 1 x 2 x 1: losses, gradients and weights to 1e-10."""
    start = ["grid={pipe: 2, tensor: 2}", "schedule.slices=3", "training.time_limit=0.001s"]
    initial, first = ranks(4, run, str(place), *start)[0]
    assert len(first) == 1  # ended by the limit, with a checkpoint
    again = ["grid.data=2", "zero=2", "batch.microbatch=1"]
    _, rest = ranks(2, run, str(place), *again)[0]
    found = first + rest
    assert len(found) == STEPS

    weights = {name: value.clone().requires_grad_() for name, value in initial.items()}
    matrices = [w for name, w in weights.items() if w.dim() == 2 and name not in ("layers.0.weight", "layers.1.weight")]
    spared = [w for w in weights.values() if all(w is not each for each in matrices)]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": spared, "weight_decay": 0.0}]
    adam = torch.optim.AdamW(groups, lr=PEAK, betas=(0.9, 0.95))
    batches = TokenData(place / "tokens", 32, held_out=0.2).loader(8, 8, threads=0)
    for step, (loss, gradients, after) in enumerate(found):
        # The warmup of 2 steps, then a half cosine over the other 2, down to 0.2.
        rate = (step + 1) / 2 if step < 2 else 0.2 + 0.8 * (1 + math.cos(math.pi * (step - 2) / 2)) / 2
        for group in adam.param_groups:
            group["lr"] = PEAK * rate
        adam.zero_grad()
        value = mean_loss(weights, next(batches))
        value.backward()
        torch.nn.utils.clip_grad_norm_(weights.values(), 0.5)
        assert loss == pytest.approx(value.item(), abs=1e-10, rel=0)
        for name, weight in weights.items():
            assert weight.grad is not None
            torch.testing.assert_close(gradients[name], weight.grad, atol=1e-10, rtol=0)
        adam.step()
        for name, weight in weights.items():
            torch.testing.assert_close(after[name], weight.detach(), atol=1e-10, rtol=0)

    assert validations(place / "runs" / "one")[-1] == pytest.approx(held_out_loss(place, weights), abs=1e-10, rel=0)
    model = place / "runs" / "one" / "model"
    texts = {"tokenizer.json", "tokenizer_config.json", "generation_config.json"}
    assert {path.name for path in model.iterdir()} == {"config.json", "model.safetensors", *texts}


@pytest.mark.parametrize("kind", ["local_sgd", "diloco", "async_diloco"])
def test_local_update_runs_write_the_common_model(ranks: Any, place: Path, kind: str) -> None:
    """Outer steps after step 3 and at the end, step 5: the loss of the common weights, and of the written model."""
    lr, momentum = (1.0, 0.0) if kind == "local_sgd" else (0.7, 0.5)
    outer = "" if kind == "local_sgd" else f", outer_lr: {lr}, outer_momentum: {momentum}"
    outer += ", max_staleness: 0" if kind == "async_diloco" else ""
    changes = [f"name={kind}", "zero=0", f"local_updates={{type: {kind}, every: 3{outer}}}", "training.steps=5"]
    changes += ["checkpoint=false"] if kind == "async_diloco" else ["evaluate.best=true", "checkpoint.every=100"]
    everyone = ranks(2, run, str(place), "grid={data: 2}", *changes)
    initial, middle = everyone[0][0], everyone[0][1][2][2]
    final = {}
    for name, first in initial.items():
        velocity = (first - middle[name]) / (lr * (1 + momentum))
        difference = middle[name] - sum(steps[4][2][name] for _, steps in everyone) / 2
        velocity = momentum * velocity + difference
        final[name] = middle[name] - lr * (difference + momentum * velocity)
    losses = [held_out_loss(place, weights) for weights in (initial, middle, final)]
    models = {"model": losses[-1]}
    if kind != "async_diloco":  # there a replica evaluates its own rows
        assert validations(place / "runs" / kind) == pytest.approx(losses, abs=1e-10, rel=0)
        models["best"] = min(losses)
        shutil.rmtree(place / "runs" / kind / "model")
        ranks(2, run, str(place), "grid={data: 2}", *changes)  # killed before its end: it goes on from the checkpoint
    for written, loss in models.items():
        again = [f"name={kind}-{written}", f"model={{folder: {place}/runs/{kind}/{written}}}", "tokenizer=bytes"]
        again += ["training.learning_rate={peak: 1.0e-30, schedule: constant, warmup_steps: 0}"]
        ranks(1, run, str(place), *again, "evaluate.every=1", "training.steps=1")
        assert validations(place / "runs" / f"{kind}-{written}")[0] == pytest.approx(loss, abs=1e-10, rel=0)


@pytest.mark.parametrize("torchs", [False, True], ids=["", "a LambdaLR was saved"])
def test_a_resumed_run_has_the_rates_of_its_own_file(
    place: Path, monkeypatch: pytest.MonkeyPatch, torchs: bool
) -> None:
    """More steps and another peak than before: each step of plain SGD moves the weights by the new file's rate."""
    monkeypatch.chdir(place)
    changes = [f"name=rates-{torchs}", "optimizer={type: SGD}", "clip=null"]
    with monkeypatch.context() as before:
        if torchs:
            before.setattr(loop, "FileSchedule", lambda optimizer, rate: LambdaLR(optimizer, rate.share))
        _, first = run(str(place), *changes)
    _, rest = run(str(place), *changes, "training.steps=8", "training.learning_rate.peak=3e-3")
    assert (len(first), len(rest)) == (4, 4)
    weights = first[-1][2]
    for step, (_, gradients, after) in enumerate(rest, 4):
        rate = 3e-3 * (0.2 + 0.8 * math.cos(math.pi / 2 * (step - 2) / 6) ** 2)
        for name, weight in weights.items():
            torch.testing.assert_close(after[name], weight - rate * gradients[name], rtol=1e-12, atol=1e-15)
        weights = after


def said_of_resuming(root: str, *changes: str) -> list[str]:
    """Be a rank of a run; return what the log says of a checkpoint from which it resumes."""
    with triax_warnings() as warnings:
        run(root, "export=false", "evaluate.every=9", *changes)
    return [line for line in warnings if "resumes" in line]


def test_the_log_says_from_which_checkpoint_a_run_resumes(ranks: Any, place: Path) -> None:
    """The checkpoint is given as auto, by its path and by its tag."""
    assert ranks(1, said_of_resuming, str(place), "name=two", "training.steps=2") == [[]]
    last = "runs/two/checkpoints/global_step2"
    for name, resume in (("other", last), ("two", "global_step2"), ("two", "auto")):
        changes = (f"name={name}", f"checkpoint.resume={resume}", "training.steps=3", "checkpoint.every=9")
        (said,) = ranks(1, said_of_resuming, str(place), *changes)
        assert said == [f"the run resumes from {last}, after step 2"]
        shutil.rmtree(place / "runs" / "two" / "checkpoints" / "global_step3", ignore_errors=True)


def test_a_run_cut_by_measured_layers_equals_one_process(ranks: Any, place: Path) -> None:
    """A cut by time on two ranks, then a cut by the file of costs that this run has written."""
    changes = ["training.steps=2", "export=false", "checkpoint=false"]
    _, wanted = ranks(1, run, str(place), "name=whole", *changes)[0]
    changes += ["grid.pipe=2", "schedule.limit=10"]
    costs = "schedule.layer_costs=runs/cut/layer_costs.json"
    for name, partition in (("cut", ["schedule.partition=time"]), ("again", ["schedule.partition=auto", costs])):
        for _, steps in ranks(2, run, str(place), f"name={name}", *partition, *changes, timeout=120):
            for (loss, gradients, _), (own, gradient, _) in zip(steps, wanted, strict=True):
                assert loss == pytest.approx(own, abs=1e-10, rel=0)
                torch.testing.assert_close(gradients, gradient, atol=1e-10, rtol=0)
    os.chdir(place)
    job = resolve(read_training_file("run.yaml", ["schedule.partition=auto", costs, *changes])[0])
    assert job.cut is not None and job.cut.method == "auto"
    assert job.schedule == job.cut.schedule and job.cut.boundaries[-1] == job.layers


def test_a_run_with_multi_token_prediction_names_its_terms(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(place)
    modules = "model={preset: deepseek-tiny, overrides: {num_nextn_predict_layers: 1, aux_loss_alpha: 0.0}}"
    losses = [loss for loss, *_ in run(str(place), "name=mtp", modules, "data.document_mask=false")[1]]
    terms = [(row["main"], row["mtp_1"]) for row in numbers_of(place / "runs" / "mtp", "Train/Metrics/")]
    assert losses == pytest.approx([main + 0.3 * further for main, further in terms], rel=1e-12)
    main, further = terms[-1]
    assert f"loss {losses[-1]:.4f}  main {main:.4f}  mtp_1 {further:.4f}" in capsys.readouterr().out


def test_the_first_picture_is_drawn_during_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    schedule = make_schedule("1f1b", 2, 4)
    report, path = Reporter(tmp_path, True, steps=100, every=20), tmp_path / "schedule.png"
    report.pipeline(10, None, schedule)
    assert not path.exists()
    report.pipeline(10, timeline_of(schedule), schedule)
    assert path.read_bytes()[:4] == b"\x89PNG"
    assert capsys.readouterr().out == f"picture {path}: the pipeline of step 10 as measured\n"
    path.unlink()
    report.pipeline(20, timeline_of(schedule), schedule)
    Reporter(tmp_path, True, steps=10, every=20).pipeline(10, timeline_of(schedule), schedule)  # it ends here
    Reporter(tmp_path, False, steps=100, every=20).pipeline(10, timeline_of(schedule), schedule)  # another rank
    assert not path.exists()


def fill_the_disk(run: TrainingRun, loss: float) -> None:
    """Leave no room for any file of this process, after step 2."""
    if run.step == 2:
        run.engine.wait_for_checkpoint()
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


FULL = ("name=full", "evaluate={every: 1, best: true}")


def on_a_full_disk(root: str, *changes: str) -> tuple[int, str, str]:
    """Be the only rank of a run whose disk is full after step 2; return its exit code, what it says, and the log."""
    before, said, log, code = resource.getrlimit(resource.RLIMIT_FSIZE), io.StringIO(), io.StringIO(), 0
    handler = logging.StreamHandler(log)
    logging.getLogger("triax").addHandler(handler)
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            more = ("sample={prompt: of, tokens: 3}", "monitor.trace=1", *changes)
            run_watched(Watch(fill_the_disk), root, "run.yaml", *more, pictures=True)
    except SystemExit as end:
        code = int(str(end.code))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        logging.getLogger("triax").removeHandler(handler)
    return code, said.getvalue(), log.getvalue()


def test_a_line_of_progress_has_terms_and_metrics(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = Reporter(tmp_path, True, steps=10, every=5)
    shown: dict[str, float | list[float]] = {"main": 1.5, "mtp_1": 1.25, "histogram": [1.0, 2.0]}
    report.step(5, 2.0, step_figures(None, 1234.0), 75.0, shown)
    wanted = "step  5/10  loss 2.0000  main 1.5000  mtp_1 1.2500  1,234 tokens/s  1:15 left"
    assert capsys.readouterr().out.splitlines() == [wanted]


def test_a_line_of_progress_has_the_figures_of_the_step(tmp_path: Path) -> None:
    """MFU stands in it where the peak is known; no part is broken at 80 columns."""
    timings = {"peak_memory_gb": 1.256, "mfu": 0.4123}
    numbers = StepMetrics(5, 40, torch.tensor(2.0), [3e-4], None, 0.8125, 0, timings)
    figures = step_figures(numbers, 12345.0)
    assert figures == ["lr 0.0003", "norm 0.812", "12,345 tokens/s", "1.26 GB", "MFU 41.2%"]
    assert step_figures(replace(numbers, timings={}, grad_norm=None), 10.0) == ["lr 0.0003", "10 tokens/s"]
    parts = ["━" * 16, "step    5/10000", "loss 2.0000", *figures, "10:15 left"]
    lines = in_lines(parts, 80)
    assert len(lines) == 2 and max(map(len, lines)) <= 80
    assert [part for line in lines for part in line.split("  ") if part] == [
        word for part in parts for word in part.split("  ") if word
    ]


def test_a_run_on_a_full_disk_trains_all_steps(ranks: Any, place: Path) -> None:
    """Metrics, checkpoints, trace, pictures and page have no room; all steps are taken, and the model is missed."""
    ((code, said, log),) = ranks(1, on_a_full_disk, str(place), *FULL)
    results = place / "runs" / "full"
    assert "trained 4 steps" in said and said.count("nats per byte") == 1 and code == 2, said + log
    assert "the model was not written to runs/full/model: " in said and "File too large" in said
    assert "it goes on from the last checkpoint in runs/full/checkpoints" in said
    # The best model so far stays, and is not announced as that of the last step.
    assert "of step 4: the model was not written to runs/full/best: " in said
    assert "its model is in" not in said and (results / "best" / "config.json").is_file()
    assert len(load_file(results / "best" / "model.safetensors")) > 5
    assert log.count("the numbers of a step cannot be written") == 1
    assert (
        "'global_step4' was not written" in log and (results / "checkpoints" / "latest").read_text() == "global_step2"
    )
    # Without a model to write, the checkpoint is all that the run leaves.
    ((code, said, log),) = ranks(1, on_a_full_disk, str(place), "name=unsaved", "export=null")
    assert code == 2 and "the last checkpoint, of step 4, was not written to runs/unsaved/checkpoints" in said, said
    # There is room again: the run goes on, and the model is there.
    ranks(1, run, str(place), *FULL, pictures=True)
    assert (results / "model" / "model.safetensors").is_file() and (results / "report.html").is_file()
    assert {row["step"] for row in rows_of(results)} == {1, 2, 3, 4}


def test_the_best_model_is_kept_and_patience_ends_the_run(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A rate at which the loss falls and then grows. The run stops on the way, and goes on with what it knew."""
    monkeypatch.chdir(place)
    changes = ["name=low", "evaluate={every: 1, best: true, patience: 3}", "training.steps=40", "checkpoint.every=1"]
    changes += ["training.learning_rate={peak: 3.0, schedule: constant, warmup_steps: 0}", "clip=null"]
    changes += ["optimizer={type: SGD}"]
    run(str(place), *changes, "training.time_limit=0.001s")
    first = capsys.readouterr().out
    assert "min ended it" in first
    run(str(place), *changes)
    shown, losses = capsys.readouterr().out, validations(place / "runs" / "low")
    lowest = min(losses)
    step = losses.index(lowest) + 1
    assert step < len(losses) < 40 and len(losses) == step + 3
    assert "of 40 steps in" not in shown and "no lower held-out loss in 3 evaluations (evaluate.patience)" in shown
    assert f"lowest  {lowest:.4f} of step {step}: its model is in runs/low/best" in shown
    # The kept model has this loss.
    folder = str(place / "runs" / "low" / "best")
    run(
        str(place),
        "name=again",
        f"model={{folder: {folder}}}",
        "evaluate.every=1",
        "training.steps=1",
        "training.learning_rate={peak: 1.0e-30, schedule: constant, warmup_steps: 0}",
        "tokenizer=bytes",
    )
    assert validations(place / "runs" / "again")[0] == pytest.approx(lowest, rel=1e-10)
    run(str(place), *changes)
    assert "give a larger evaluate.patience" in capsys.readouterr().out.replace("\n", " ")


def test_a_model_of_bytes_is_exported_with_its_tokenizer(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' pipeline continues a prompt as triax generate does; all bytes go there and back."""
    import transformers

    monkeypatch.chdir(place)
    for preset in ("bytes-tiny", "llama-tiny"):
        run(str(place), f"name={preset}", f"model={{preset: {preset}}}", "export={dtype: float32}")
        exported = place / "runs" / preset / "model"
        tokenizer = transformers.AutoTokenizer.from_pretrained(exported)
        for text in ("of the  people,\n\tby Ā é 你好 \U0001f642", "".join(map(chr, range(1, 500)))):
            assert tokenizer(text)["input_ids"] == [*text.encode()]
            assert tokenizer.decode([*text.encode()]) == text
        assert transformers.GenerationConfig.from_pretrained(exported).eos_token_id == tokenizer.eos_token_id == 0
        ours = output_of("generate", exported, "--prompt", "of the", "--max-new-tokens", 12, "--temperature", 0)
        pipeline = transformers.pipeline("text-generation", str(exported), device="cpu")
        (theirs,) = pipeline("of the", max_new_tokens=12, do_sample=False)
        assert theirs["generated_text"].strip() == ours.strip()
