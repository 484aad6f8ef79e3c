"""lm-eval's tasks from local files: numbers of its own class for transformers, on grids, from a command and a run."""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch

import triax
from triax.base.errors import ConfigError
from triax.cli.main import app
from triax.models.huggingface.load import load_hf
from triax.train.file import read_training_file

from support.file_runs import losses_of, numbers_of
from support.toy_answers import LETTERS, model_of, quiet, tokenizer
from support.trl_in_float64 import exact

ROWS = 7
GRIDS: list[dict[str, int]] = [{"pipe": 2, "tensor": 2}, {"data": 2, "context": 2}]  # of four ranks
COMMON = """\
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {file}}}
test_split: train
metadata: {{version: 1}}
"""
TASKS = {
    "choices": "output_type: multiple_choice\ndoc_to_text: 'is {{text}}'\ndoc_to_choice: '{{choices}}'\n"
    "doc_to_target: label\nnum_fewshot: 1\nfewshot_split: train\nmetric_list: [{metric: acc}, {metric: acc_norm}]\n",
    "endings": "output_type: loglikelihood\ndoc_to_text: ''\ndoc_to_target: '{{ending}}'\ntarget_delimiter: ''\n"
    "metric_list: [{metric: perplexity}, {metric: acc}]\n",
    "texts": "output_type: loglikelihood_rolling\ndoc_to_text: ''\ndoc_to_target: '{{long}}'\n"
    "metric_list: [{metric: word_perplexity}, {metric: bits_per_byte}]\n",
    "answers": "output_type: generate_until\ndoc_to_text: '{{text}}'\ndoc_to_target: 'a'\n"
    "generation_kwargs: {until: ['zz', ' ', 'e'], max_gen_toks: 12}\nmetric_list: [{metric: exact_match}]\n",
}
ROWS_OF_RUN = [{"prompt": "is ", "completion": letter * 3} for letter in "abcdefgh"]
RUN = """\
name: tasks
method: {name: sft}
model: {folder: model}
data: {training: rows.jsonl}
grid: {pipe: 2}
training:
  steps: 9
  sequence: 16
  learning_rate: {peak: 0.05, schedule: constant, warmup_steps: 0}
evaluate: {every: 1, tasks: endings.yaml, metric: endings/perplexity, best: true, patience: 2}
checkpoint: false
monitor: {trace: false}
batch:
  size: 4
  microbatch: 2
optimizer: {type: SGD, decays: all}
precision: fp64
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a model, its tokenizer, task files and their data."""
    quiet()
    root = tmp_path_factory.mktemp("lm-eval")
    with exact():
        model = model_of()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= 6
    model.save_pretrained(root / "model")
    tokenizer().save_pretrained(root / "model")
    draw = random.Random(0)
    letters = [each for each in LETTERS if each not in "._"]
    text = lambda length: "".join(draw.choices(letters, k=length)).strip() or "b"  # noqa: E731
    with torch.no_grad():
        likeliest = list(LETTERS)[int(model(torch.tensor([[1]])).logits[0, -1].argmax())]
    rows = [
        {"text": text(3 + i % 4), "long": text(20 + 9 * i), "choices": [text(2 + k) for k in range(3)], "label": i % 3}
        | {"ending": text(3) if i else likeliest}
        for i in range(ROWS)
    ]
    (root / "data.json").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (root / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS_OF_RUN))
    (root / "run.yaml").write_text(RUN)
    for name, rest in TASKS.items():
        (root / f"{name}.yaml").write_text(COMMON.format(name=name, file=root / "data.json") + rest)
    return root


def engine_of(root: Path, sizes: dict[str, Any]) -> Any:
    grid = triax.Grid(**sizes)
    module = triax.PipelineModule(load_hf(root / "model"), grid=grid, dtype=torch.float64)
    return triax.Engine(module, batch=triax.Batch(size=2 * grid.data.size, microbatch=2))


def evaluated(model: Any, root: Path) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """Metrics of each task, and the model's answer to each request."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    files = [str(root / f"{name}.yaml") for name in TASKS]
    manager = TaskManager(include_defaults=False)
    found = lm_eval.simple_evaluate(model, tasks=files, bootstrap_iters=0, task_manager=manager)
    answers = {name: [each["resps"] for each in samples] for name, samples in found["samples"].items()}
    return found["results"], answers


def on_grids(root: Path) -> list[Any]:
    quiet()
    from triax.compat.lm_eval import LanguageModel

    found = []
    for sizes in GRIDS:
        model = LanguageModel(engine_of(root, sizes), tokenizer())
        found.append(model.run(lambda model=model: evaluated(model, root)))  # type: ignore[misc]
    return found


def flat(value: Any) -> list[Any]:
    return [leaf for each in value for leaf in flat(each)] if isinstance(value, (list, tuple)) else [value]


def test_task_metrics_equal_those_of_lm_evals_own_class(ranks: Any, place: Path) -> None:
    from lm_eval.models.huggingface import HFLM
    from transformers import AutoModelForCausalLM

    with exact():
        theirs = AutoModelForCausalLM.from_pretrained(place / "model", dtype=torch.float64)
        metrics, answers = evaluated(HFLM(theirs, tokenizer=tokenizer(), batch_size=3), place)
    assert len(set(flat(answers["answers"]))) > 3 and any(flat(answers["answers"]))
    assert 0 < metrics["endings"]["acc,none"] < 1
    everyone = ranks(4, on_grids, place)
    for sizes, first, *others in zip(GRIDS, *everyone, strict=True):
        assert others == [None] * 3
        for name in TASKS:
            for key, value in metrics[name].items():
                same = pytest.approx(value, abs=1e-10, rel=1e-10) if isinstance(value, float) else value
                assert first[0][name][key] == same, (sizes, name, key)
            for wanted, got in zip(flat(answers[name]), flat(first[1][name]), strict=True):
                assert got == (pytest.approx(wanted, abs=1e-10, rel=0) if isinstance(wanted, float) else wanted)


def inside(root: Path, *words: object) -> tuple[int, str, str]:
    """Return exit code, output and error output of ``triax evaluate`` on this rank of torchrun's environment."""
    os.chdir(root)
    quiet()
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            app(["evaluate", *map(str, words)], standalone_mode=False)
        except SystemExit as left:
            return int(str(left.code)), out.getvalue(), err.getvalue()
    return 0, out.getvalue(), err.getvalue()


def trained(root: Path, *changes: str) -> str:
    """Be a rank of a run of ``run.yaml``, and return what it printed."""
    quiet()
    with contextlib.redirect_stdout(io.StringIO()) as out:
        losses_of(str(root), "run.yaml", *changes)
    return out.getvalue()


def test_a_run_keeps_the_model_of_the_best_metric(ranks: Any, place: Path) -> None:
    """Two stages train; the command evaluates the kept model on two replicas, and finds the run's best number."""
    shown, _ = ranks(2, trained, place, init_group=False)
    values = [row["endings/perplexity"] for row in numbers_of(place / "runs" / "tasks", "Tasks/")]
    best, step = min(values), values.index(min(values)) + 1
    assert len(values) == step + 2 < 9, values  # patience ended it
    assert "no better endings/perplexity in 2 evaluations (evaluate.patience)" in shown
    assert f"best    endings/perplexity {best:.4f} of step {step}" in shown
    words = ("runs/tasks/best", "--tasks", "endings.yaml,choices.yaml")
    (code, text, error), other = ranks(2, inside, place, *words, "--json", init_group=False)
    assert (code, other[:2]) == (0, (0, "")), error
    assert json.loads(text)["endings/perplexity"] == pytest.approx(best, rel=1e-10)
    code, text, error = ranks(1, inside, place, *words, "--samples", 3, init_group=False)[0]
    assert code == 0 and "endings/perplexity" in text and "choices/acc_norm" in text, error


def test_lm_eval_tasks_that_cannot_run_are_refused(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for change, text in (
        ("evaluate.tasks=[missing.yaml]", "evaluate.tasks: there is no file missing.yaml"),
        ("evaluate.metric=endings/accuracy", "evaluate.metric: there is no metric 'endings/accuracy'; did you mean"),
        ("evaluate.metric=loss", "evaluate.metric is loss, but no documents are held out"),
    ):
        with pytest.raises(SystemExit):
            trained(place, "grid.pipe=1", change)
        assert text in capsys.readouterr().err
    (place / "code.py").write_text("raise RuntimeError('it ran')\n")
    (place / "code.yaml").write_text((place / "endings.yaml").read_text() + "process_docs: !function code.change\n")
    (place / "outer.yaml").write_text("include: code.yaml\ntask: outer\n")
    for file in ("code.yaml", "outer.yaml"):
        code, _, error = inside(place, "model", "--tasks", file)
        assert code and "runs Python code of its folder (!function code.change)" in " ".join(error.split()), error
        with pytest.raises(RuntimeError, match="it ran"):
            inside(place, "model", "--tasks", file, "--confirm-run-unsafe-code")
    with pytest.raises(ConfigError, match="task_samples has no effect without tasks"):
        read_training_file(place / "run.yaml", ["evaluate={task_samples: 3}"])
