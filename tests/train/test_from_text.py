"""docs/train.md: the commands of its first example; each loss and gradient of its run beside PyTorch on one process."""

from __future__ import annotations

import io
import itertools
import json
import math
import os
import re
import runpy
import shlex
import signal
import sys
import time
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from triax.data import TokenData
from triax.grid.environment import read_environment
from triax.train.file import read_training_file
from triax.train.loop import train
from triax.train.start import make_job

from support.command_line import output_of
from support.file_runs import NoPictures, written_losses
from support.paths import DOCS
from support.processes import started
from support.readme_blocks import blocks, commands, make_text, makes_text, programs

pytest.importorskip("transformers")

TEXT = (DOCS / "train.md").read_text().partition("\n## A program\n")[0]
TYPED = [command for _, command in commands(TEXT) if not makes_text(command)]
EXPLAIN, FIRST, SECOND, THIRD = (command for command in TYPED if command.startswith("triax train "))
WORDS = ["the", "a", "cat", "dog", "sat", "ran", "on", "under"]
WORDS += ["mat", "tree", "house", "and", "then", "came", "old", "red"]
STEPS, BATCH, LENGTH, VOCABULARY = 20, 8, 32, 300  # of run.yaml, as are the numbers in ``one_process``
LOSS = {torch.float64: torch.float64, torch.bfloat16: torch.float32}  # dtype of the cross entropy


def make_folder(folder: Path) -> Path:
    """Write a text of few words, the page's programs and its training file."""
    drawn = torch.Generator().manual_seed(1)
    (folder / "text").mkdir()
    for number in range(4):
        lengths = torch.randint(3, 40, (30,), generator=drawn).tolist()
        picks = [torch.randint(len(WORDS), (length,), generator=drawn).tolist() for length in lengths]
        (folder / "text" / f"{number}.txt").write_text("\n\n".join(" ".join(WORDS[i] for i in pick) for pick in picks))
    for name, source in programs(TEXT).items():
        (folder / name).write_text(source)
    (written,) = (block.text for block in blocks(TEXT) if block.language == "yaml")
    (folder / "run.yaml").write_text(written)
    return folder


def typed(command: str) -> str:
    """Run a command of the page in this process; return what it prints."""
    return output_of(*shlex.split(command)[1:])


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: Any) -> Path:
    """A folder with tokenizer, tokens and the tiny Llama, made by the page's commands."""
    folder = make_folder(tmp_path_factory.mktemp("page"))
    before = Path.cwd()
    os.chdir(folder)
    try:
        for command in TYPED[:3]:
            assert typed(command)
        assert TYPED[3] == "python make_model.py"
        runpy.run_path("make_model.py")
    finally:
        os.chdir(before)
    return folder


# ----------------------------------------------------------------------------------------------------- on ranks

Tensors = dict[str, Tensor]


@dataclass
class Taken:
    """A step: its number, its loss, the weights before it and the gradients, by the names of triax."""

    step: int
    loss: float
    weights: Tensors
    gradients: Tensors


class Recorder:
    """Watch that keeps each step, with the weights before it if asked, and sends a SIGTERM to rank 0 before a step."""

    def __init__(self, stop: int | None, with_weights: bool) -> None:
        self.taken: list[Taken] = []
        self._stop, self._with_weights = stop, with_weights

    def start(self, run: Any) -> None:
        self._weights = run.engine.gather() if self._with_weights else {}

    def after_step(self, run: Any, loss: float) -> None:
        self.taken.append(Taken(run.step, loss, self._weights, run.engine.gather("gradients")))
        self.start(run)
        if run.step + 1 == self._stop and run.grid.rank == 0:
            os.kill(os.getpid(), signal.SIGTERM)


def run_part(
    folder: str, changes: list[str], stop: int | None = None, with_weights: bool = False
) -> tuple[list[Taken], list[float]]:
    """Be a rank of ``triax train run.yaml``; return the steps and the losses that it prints, both empty on others."""
    os.chdir(folder)
    file, _ = read_training_file("run.yaml", changes)
    recorder = Recorder(stop, with_weights)
    out = io.StringIO()
    with redirect_stdout(out), nullcontext() if stop is None else pytest.raises(SystemExit, match="143"):
        train(make_job(file), [recorder, NoPictures()])
    first = read_environment() is None or int(os.environ["RANK"]) == 0
    return recorder.taken if first else [], printed_losses(out.getvalue())


def as_transformers(tensors: Tensors) -> Tensors:
    """Return tensors of a Llama of 3 blocks under the names of transformers."""
    found = {
        "model.embed_tokens.weight": tensors["layers.0.weight"],
        "model.norm.weight": tensors["layers.4.weight"],
        "lm_head.weight": tensors["layers.5.weight"],
    }
    for block in range(3):
        of, to = f"layers.{block + 1}.", f"model.layers.{block}."
        key, value = tensors[of + "attention.kv.weight"].chunk(2)
        gate, up = tensors[of + "mlp.gate_up.weight"].chunk(2)
        found |= {
            f"{to}self_attn.q_proj.weight": tensors[of + "attention.q.weight"],
            f"{to}self_attn.k_proj.weight": key,
            f"{to}self_attn.v_proj.weight": value,
            f"{to}self_attn.o_proj.weight": tensors[of + "attention.out.weight"],
            f"{to}mlp.gate_proj.weight": gate,
            f"{to}mlp.up_proj.weight": up,
            f"{to}mlp.down_proj.weight": tensors[of + "mlp.down.weight"],
            f"{to}input_layernorm.weight": tensors[of + "norm1.weight"],
            f"{to}post_attention_layernorm.weight": tensors[of + "norm2.weight"],
        }
    return found


# --------------------------------------------------------------------------------------- plain PyTorch, one process


def llama(folder: Path, dtype: torch.dtype) -> Any:
    """Load the tiny Llama. In float64 its norms compute in float64: those of transformers round to float32."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    model: Any = transformers.LlamaForCausalLM.from_pretrained(folder / "llama", dtype=dtype)
    for name, module in [*model.named_modules()]:
        if dtype == torch.float64 and type(module).__name__ == "LlamaRMSNorm":
            norm = torch.nn.RMSNorm(module.weight.shape, module.variance_epsilon, dtype=dtype)
            norm.weight = module.weight
            model.set_submodule(name, norm)
    return model.train()


def batches(folder: Path) -> Any:
    """Return the global batches: rows of the documents that are not held out."""
    return TokenData(folder / "tokens", LENGTH, held_out=0.1).loader(BATCH, BATCH, seed=0, threads=0)


def gradients_of(model: Any, batch: Any) -> tuple[float, Tensors]:
    (ids, documents), labels = batch
    model.zero_grad()
    loss = F.cross_entropy(logits_of(model, ids, documents).flatten(0, 1).to(LOSS[model.dtype]), labels.flatten())
    loss.backward()
    return loss.item(), {name: p.grad.clone() for name, p in model.named_parameters()}


def one_process(folder: Path) -> dict[int, tuple[float, Tensors]]:
    """Train in float64 by a plain loop: step -> loss and gradients."""
    model = llama(folder, torch.float64)
    spared = [p for name, p in model.named_parameters() if p.dim() < 2 or "embed" in name]
    decaying = [p for name, p in model.named_parameters() if not (p.dim() < 2 or "embed" in name)]
    groups = [{"params": decaying, "weight_decay": 0.1}, {"params": spared, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    found = {}
    for step, batch in enumerate(itertools.islice(batches(folder), STEPS)):
        share = (step + 1) / 3 if step < 3 else 0.1 + 0.45 * (1 + math.cos(math.pi * (step - 3) / (STEPS - 3)))
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * share
        loss, _ = gradients_of(model, batch)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        found[step + 1] = loss, {name: p.grad.clone() for name, p in model.named_parameters()}
        optimizer.step()
    return found


def logits_of(model: Any, ids: Tensor, documents: Tensor) -> Tensor:
    """Return the logits of packed rows: each token sees its document's tokens up to itself, at positions from 0."""
    rows, length = ids.shape
    seen = (documents[:, :, None] == documents[:, None, :]) & torch.ones(length, length, dtype=torch.bool).tril()
    mask = torch.zeros(rows, 1, length, length, dtype=model.dtype).masked_fill(~seen[:, None], -torch.inf)
    found: Tensor = model(input_ids=ids, attention_mask=mask, position_ids=seen.sum(-1) - 1, use_cache=False).logits
    return found


# ------------------------------------------------------------------------------------------------------ the page


def test_a_run_resumed_on_another_grid_equals_one_process(ranks: Any, prepared: Path, monkeypatch: Any) -> None:
    """Losses and gradients to 1e-10, the exported model's logits to 1e-5 in float32, and the same greedy text."""
    taken, printed = ranks(4, run_part, str(prepared), changes_of(FIRST), 8, timeout=240)[0]
    more, printed_again = ranks(2, run_part, str(prepared), changes_of(SECOND), timeout=240)[0]
    taken += more
    assert printed + printed_again == written_losses(prepared / "runs" / "notes")  # step 8 too
    assert [each.step for each in taken] == [*range(1, 8), *range(9, STEPS + 1)]  # step 8 ended in a checkpoint
    wanted = one_process(prepared)
    assert written_losses(prepared / "runs" / "notes") == pytest.approx(
        [wanted[n][0] for n in wanted], rel=1e-10, abs=0
    )
    for each in taken:
        assert each.loss == pytest.approx(wanted[each.step][0], rel=1e-10, abs=0)
        for name, gradient in as_transformers(each.gradients).items():
            where = f"step {each.step}: {name}"
            torch.testing.assert_close(gradient, wanted[each.step][1][name], rtol=1e-10, atol=1e-12, msg=where)
    monkeypatch.chdir(prepared)
    assert "pipe 2 x tensor 2: 4 processes" in typed(EXPLAIN)
    check_model(typed(next(command for command in TYPED if command.startswith("triax generate"))))


@pytest.mark.exhaustive
def test_a_bf16_run_equals_one_process_within_rounding(ranks: Any, prepared: Path) -> None:
    """Each step beside float64 at the same weights, from which it differs by the rounding of its arithmetic alone.

    K rounded operations one after another, with relative errors of at most u = 2^-8, give an error of about sqrt(K) u
    (Higham and Mary 2019, SIAM J. Sci. Comput. 41, A2815). Where terms of a sum cancel, as in the gradients of queries
    and keys, the error is larger, in plain PyTorch in bf16 too: twice its largest error over the steps is added. In the
    loss errors of many tokens cancel: it is compared with plain PyTorch's alone.
    """
    common = ["precision=bf16", "clip=0", "name=half"]
    taken, _ = ranks(4, run_part, str(prepared), common, 8, with_weights=True, timeout=240)[0]
    taken += ranks(
        2, run_part, str(prepared), [*changes_of(SECOND), *common], stop=None, with_weights=True, timeout=240
    )[0][0]
    exact, plain = llama(prepared, torch.float64), llama(prepared, torch.bfloat16)
    rows = dict(enumerate(itertools.islice(batches(prepared), STEPS), 1))
    unit, count = 2.0**-8, 2 * (3 * 13 + 3)  # operations of 3 blocks, embedding, norm and head, forward and backward
    names = as_transformers(taken[0].weights)
    found: dict[str, list[float]] = {name: [] for name in (*names, "loss")}  # errors of triax, less sqrt(K) u
    plainly: dict[str, list[float]] = {name: [] for name in found}  # of plain PyTorch in bf16
    for each in taken:
        weights, gradients = as_transformers(each.weights), as_transformers(each.gradients)
        exact.load_state_dict(weights)
        plain.load_state_dict(weights)
        loss, wanted = gradients_of(exact, rows[each.step])
        plain_loss, usual = gradients_of(plain, rows[each.step])
        found["loss"].append(abs(each.loss - loss))
        plainly["loss"].append(abs(plain_loss - loss))
        for name, gradient in wanted.items():
            error = float((gradients[name].double() - gradient).norm())
            found[name].append(error - count**0.5 * unit * float(gradient.norm()))
            plainly[name].append(float((usual[name].double() - gradient).norm()))
    for name, errors in found.items():
        assert max(errors) <= 2 * max(plainly[name]), name


@pytest.mark.exhaustive
def test_commands_of_the_page_work_in_a_shell(tmp_path: Path) -> None:
    """Every command in a shell of its own, with a Ctrl-C during the first run."""
    make_folder(tmp_path)
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    printed, run = [], tmp_path / "runs" / "notes"
    for command in TYPED:
        with started("bash", "-c", f"exec {command}", cwd=tmp_path, env=environment) as process:
            if command == FIRST:
                while process.poll() is None and not (
                    (run / "metrics.jsonl").exists() and len(written_losses(run)) >= 5
                ):
                    time.sleep(0.01)
                os.killpg(process.pid, signal.SIGINT)
            out, err = process.communicate(timeout=120)
        assert process.returncode == (130 if command == FIRST else 0), f"{command}: {out}{err}"
        printed.append(out)
    wanted = one_process(tmp_path)
    exact = pytest.approx([wanted[n][0] for n in wanted], rel=1e-10, abs=0)
    assert written_losses(tmp_path / "runs" / "notes") == exact
    assert printed_losses(printed[TYPED.index(FIRST)] + printed[TYPED.index(SECOND)]) == exact
    assert printed_losses(printed[TYPED.index(THIRD)]) == exact
    assert (tmp_path / "runs" / "notes" / "comparison.html").is_file()
    assert printed[-2].strip() == printed[-1].strip() and "the file" in printed[-1]


def printed_losses(out: str) -> list[float]:
    """Return the losses that a run prints in full."""
    return [float(loss) for loss in re.findall(r"^step \d+ loss (\S+)$", out, re.MULTILINE)]


def changes_of(command: str) -> list[str]:
    """Return the changes in a command of the page."""
    words = shlex.split(command)
    assert words[:3] == ["triax", "train", "run.yaml"]
    return words[3:]


def check_model(generated: str) -> None:
    """Compare the exported model in transformers with triax: logits, and greedy text."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import triax

    folder = Path("runs/notes/model")
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer("the file", return_tensors="pt")
    text = tokenizer.decode(model.generate(**prompt, do_sample=False, max_new_tokens=20)[0], skip_special_tokens=True)
    assert generated.strip() == text.strip() and len(text) > 20
    grid = triax.Grid()
    module = triax.PipelineModule(triax.load_hf(folder), grid=grid, dtype=torch.float32)
    ids = torch.randint(VOCABULARY, (3, LENGTH), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        found = ids
        for layer in module.layers.values():
            found = layer(found)
        assert (found - model(input_ids=ids).logits).abs().max() <= 1e-5
    written = TokenData("tokens", LENGTH, tokenizer=folder)  # its tokenizer is the one that made the tokens
    assert written.length == LENGTH


def test_the_text_of_the_page_fills_all_training_steps(tmp_path: Path, monkeypatch: Any) -> None:
    make_text(TEXT, tmp_path)
    monkeypatch.chdir(tmp_path)
    for command in TYPED[:3]:
        assert typed(command)
    assert len(json.loads(Path("tokenizer/tokenizer.json").read_text())["model"]["vocab"]) <= VOCABULARY
    assert sum(1 for _ in itertools.islice(batches(tmp_path), STEPS)) == STEPS


def test_commands_of_the_page_on_training_are_the_tested_ones() -> None:
    kinds = [" ".join(command.split()[:2]) for command in TYPED]
    assert kinds == [
        *["triax data"] * 3,
        "python make_model.py",
        *["triax train"] * 4,
        "triax report",
        "triax generate",
        "python check.py",
    ]
    assert list(programs(TEXT)) == ["make_model.py", "check.py"]
