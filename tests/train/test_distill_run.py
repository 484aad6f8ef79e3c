"""Training files with ``method: distill``: the equations on one process, on grids and after a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from triax.data.answers import Answers

from support.file_runs import numbers_of
from support.method_runs import (
    BATCH,
    PAIRS,
    RATE,
    STOP,
    batches_of,
    refusal_of,
    run,
    same_run,
    write_model,
    write_samples,
)
from support.method_steps import descend
from support.paths import ROOT
from support.toy_answers import SIZES, model_of
from support.trl_in_float64 import exact

K, TEMPERATURE = 5, 1.5
KINDS = {
    "reverse": "method={name: distill, teacher: teacher, hard: 0.5}",
    "jsd": "method={name: distill, teacher: teacher, kind: jsd, beta: 0.3, temperature: 1.5}",
    "top": "method={name: distill, teacher: teacher, kind: forward, top_k: 5, temperature: 1.5}",
    "stored": "method={name: distill, teacher: stored.safetensors, kind: forward, temperature: 1.5}",
}


def samples() -> list[dict[str, Any]]:
    return [{"prompt": prompt, "completion": answer} for prompt, answer, _ in PAIRS]


def teacher_of() -> Any:
    import transformers

    torch.manual_seed(1)
    sizes = SIZES | {"hidden_size": 24, "num_hidden_layers": 3, "initializer_range": 0.3}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).double()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a student, a teacher, samples, and the teacher's log-probabilities of them."""
    import transformers

    root = tmp_path_factory.mktemp("distill")
    write_model(root / "first")
    write_samples(root, "distill", samples())
    with exact(), torch.no_grad():
        teacher = teacher_of()
        teacher.save_pretrained(root / "teacher")
        small = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES | {"num_hidden_layers": 1}))
        small.save_pretrained(root / "small")
        rows = [
            torch.from_numpy(row.ids).long() for row in Answers(root / "distill.jsonl", "sft", root / "first", 16).rows
        ]
        logits = torch.cat([teacher(input_ids=row[None, :-1]).logits[0] for row in rows])
        kept = (logits / TEMPERATURE).log_softmax(-1).topk(K, -1)
    tokens, temperature = torch.cat([row[1:] for row in rows]), torch.tensor(TEMPERATURE)
    found = {"log_probs": kept.values, "ids": kept.indices, "tokens": tokens, "temperature": temperature}
    save_file(found, root / "stored.safetensors")
    return root


def divergence(kind: str, logits: Any, theirs: Any, wanted: Any) -> Any:
    """Return the mean loss of tokens with labels (N,) by the equations."""
    temperature = 1.0 if kind == "reverse" else TEMPERATURE
    s, t = ((z / temperature).softmax(-1) for z in (logits, theirs))
    if kind == "reverse":
        return (s * (s / t).log()).sum(-1).mean() + 0.5 * F.cross_entropy(logits, wanted)
    if kind == "jsd":
        m = 0.7 * s + 0.3 * t
        return (0.3 * t * (t / m).log() + 0.7 * s * (s / m).log()).sum(-1).mean()
    kept = t.topk(K, -1).indices
    s, t = (torch.cat([p.gather(-1, kept), 1 - p.gather(-1, kept).sum(-1, True)], -1) for p in (s, t))
    return (t * (t / s).log()).sum(-1).mean()


def plain_run(root: str, kind: str) -> list[float]:
    """Train by the equations in plain PyTorch on one process; return the losses, and save the weights."""
    with exact(), torch.enable_grad():
        student, teacher = model_of(), teacher_of()
        data = Answers(f"{root}/distill.jsonl", "sft", f"{root}/first", 16)
        losses = []
        for numbers in batches_of(data):
            ids, labels = data.collate(numbers)
            counts = labels >= 0
            logits, theirs = student(input_ids=ids).logits[counts], teacher(input_ids=ids).logits[counts].detach()
            loss = divergence(kind, logits, theirs, labels[counts])
            losses.append(descend(student, loss, RATE))
        student.save_pretrained(f"{root}/last-{kind}")
    return losses


@pytest.mark.parametrize(
    ("kind", "every"),
    [("top", False), *(pytest.param(kind, True, marks=pytest.mark.exhaustive) for kind in ("reverse", "jsd", "top"))],
)
def test_distill_runs_on_grids_follow_the_equations(ranks: Any, place: Path, kind: str, every: bool) -> None:
    """pipe 2 x tensor 2, in the sweep data 2 x pipe 2 with zb-v; of top-k resumed with the stored file on context 2."""
    (losses,) = ranks(1, plain_run, str(place), kind, timeout=300)
    wanted, then = (losses, place / f"last-{kind}"), KINDS["stored" if kind == "top" else kind]
    resumed = (2, f"{then}; zero=1; grid.context=2; batch.microbatch=2")
    if not every:
        parts = (4, f"{KINDS[kind]}; grid={{pipe: 2, tensor: 2}}; schedule=zb-v; {STOP}"), resumed
        same_run(ranks, place, "distill", f"c-{kind}", *wanted, *parts)
        return
    same_run(ranks, place, "distill", f"a-{kind}", *wanted, (4, f"{KINDS[kind]}; grid={{pipe: 2, tensor: 2}}"))
    parts = (4, f"{KINDS[kind]}; zero=1; grid={{data: 2, pipe: 2}}; schedule=zb-v; {STOP}"), resumed
    same_run(ranks, place, "distill", f"b-{kind}", *wanted, *parts)


def test_distill_runs_evaluate_held_out_samples(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The log-probabilities of the teacher are in a file, with rows for all samples."""
    import transformers

    monkeypatch.chdir(place)
    run(str(place), "distill", KINDS["stored"], "name=c", "data.held_out=0.3", "evaluate.every=6")
    (found,) = numbers_of(place / "runs" / "c", "Validation/")
    data = Answers("distill.jsonl", "sft", "first", 16)
    _, held_out = data.split(0.3)
    ids, labels = data.collate([held_out[at] for at in range(len(held_out) // BATCH * BATCH)])
    with exact(), torch.no_grad():
        student = transformers.LlamaForCausalLM.from_pretrained("runs/c/model", dtype=torch.float64)
        logits, theirs = (model(input_ids=ids).logits[labels >= 0] for model in (student, teacher_of()))
        wanted = divergence("top", logits, theirs, labels[labels >= 0])
        s = (logits / TEMPERATURE).softmax(-1)
    assert found["loss"] == pytest.approx(wanted.item(), rel=1e-10)
    assert found["entropy"] == pytest.approx(-(s * s.log()).sum(-1).mean().item(), rel=1e-10)


def test_the_guides_program_writes_a_file_of_a_teacher(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    text = (ROOT / "docs" / "guides" / "distillation.md").read_text()
    (block,) = [each for each in text.split("```python\n") if each.startswith("# store_teacher.py")]
    changes = {"answers.jsonl": "distill.jsonl", "student": "first", "1024": "16", "topk(64)": "topk(5)"}
    for old, new in changes.items():
        assert old in block
        block = block.replace(old, new)
    exec(block.partition("```")[0], {})
    top = "kind: forward"
    live = run(str(place), "distill", f"method={{name: distill, teacher: teacher, top_k: 5, {top}}}", "name=e")
    stored = run(str(place), "distill", f"method={{name: distill, teacher: t.safetensors, {top}}}", "name=f")
    assert stored == pytest.approx(live, rel=1e-5)  # the file's numbers are float32


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["method=distill"], "method: name is distill, which needs teacher: give it"),
        (["method={name: distill, teacher: teacher, kind: grpo}"], "kind is grpo, which distill does not have"),
        (["method={name: distill, teacher: teacher, beta: 0.5}"], "beta belongs to the kind jsd, and kind is reverse"),
        (["method={name: distill, teacher: teacher, top_k: 29}"], "method.top_k is 29, but the model's vocabulary"),
        (["method={name: distill, teacher: nowhere}"], "method.teacher nowhere: "),
        (
            ["method={name: distill, teacher: small}", "grid.pipe=5"],
            "teacher small has 4 layers for grid.pipe 5",
        ),
        ([KINDS["stored"].replace("1.5", "1.0")], "is of temperature 1.5, and method.temperature is 1.0"),
        ([KINDS["stored"], "data=other.jsonl"], "stored.safetensors is not of this data: it has"),
        ([KINDS["stored"].replace("stored.", "none.")], "method.teacher none.safetensors cannot be read"),
    ],
)
def test_distill_runs_refuse_mistakes(
    place: Path, monkeypatch: pytest.MonkeyPatch, changes: list[str], message: str, capsys: Any
) -> None:
    monkeypatch.chdir(place)
    (place / "other.jsonl").write_text("".join((place / "distill.jsonl").read_text().splitlines(True)[1:]))
    assert message in refusal_of("distill", changes, capsys)
