"""`triax check` on right models, and on models with a mistake each, at layers and sizes that are drawn."""

from __future__ import annotations

import json
import random
import re
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from typer.testing import CliRunner

import triax
from triax import Grid, LayerSpec, PipelineModule
from triax.cli.main import app
from triax.context.order import shard
from triax.grid.comm.regions import all_reduce_copy
from triax.testing.check import CheckRow, check

from support import planted_faults
from support.command_line import run_triax

DRAWS = random.Random(20)


class Block(nn.Module):
    """A residual layer in shards over tokens (B, T, D), with a mistake if one is named."""

    def __init__(self, width: int, mistake: str, grid: Grid) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = triax.ColumnParallelLinear(width, 2 * width, grid=grid)
        self.down = triax.RowParallelLinear(2 * width, width, grid=grid)
        self.mistake, self.grid, self.calls = mistake, grid, 0
        if mistake == "no region":
            self.extra = nn.Parameter(torch.eye(width))
        if mistake == "scaled gradient":
            self.norm.weight.register_hook(lambda gradient: gradient * grid.tensor.size)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        h = self.norm(x)
        h = self.up(h)
        match self.mistake:
            case "mean over a shard":
                h = h - h.mean(-1, keepdim=True)
            case "default generator":
                h = F.dropout(h, 0.2)
            case "state":
                h = h * self.calls
            case "rank in a value":
                h = h * (1 + 0.1 * self.grid.tensor.rank)
            case "positions":
                h = h * torch.arange(1.0, x.shape[1] + 1, dtype=x.dtype)[:, None]
            case "mean over tokens":
                h = h - h.mean(1, keepdim=True)
        h = torch.tanh(h)
        y: Tensor = x + self.down(h)
        axis = self.grid.tensor
        match self.mistake:
            case "whole values summed":
                y = y + all_reduce_copy(self.norm(x), axis)
            case "no region":  # each rank has some columns, and nothing sums the weight's gradient
                mine = slice(axis.rank * x.shape[-1] // axis.size, (axis.rank + 1) * x.shape[-1] // axis.size)
                y = y + all_reduce_copy(x[..., mine] @ self.extra[mine], axis)
        return y


class Words(nn.Module):
    """Embedding whose ids are those of this context rank."""

    def __init__(self, words: int, width: int, grid: Grid) -> None:
        super().__init__()
        self.table, self.grid = nn.Embedding(words, width), grid

    def forward(self, ids: Tensor) -> Tensor:
        y: Tensor = self.table(shard(ids, self.grid.context))
        return y


class OwnLoss:
    """Cross entropy of whole logits, with a mistake if one is named."""

    def __init__(self, mistake: str, grid: Grid) -> None:
        self.mistake, self.grid = mistake, grid

    def __call__(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Any]:
        labels = shard(labels, self.grid.context)
        total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        if self.mistake == "loss by rank":
            total = total / (dist.get_world_size() if dist.is_initialized() else 1)
        return total, labels.numel()


def build(mistake: str, at: int, sizes: tuple[int, int, int], grid: Grid) -> PipelineModule:
    width, words, blocks = sizes
    if mistake == "raises":
        raise RuntimeError("no weights here")
    if mistake == "hangs" and grid.size > 1 and grid.rank == 1:
        time.sleep(600)
    specs = [LayerSpec(Block, width, mistake if i == at else "") for i in range(blocks)]
    head: Any = LayerSpec(nn.Linear, width, words)
    if mistake == "shard in a whole loss":
        head = LayerSpec(triax.ColumnParallelLinear, width, words)
    return PipelineModule(
        [LayerSpec(Words, words, width), *specs, head],
        grid=grid,
        loss_fn=OwnLoss(mistake, grid),
        dtype=torch.float64,
        seed=2,
        partition="uniform",
    )


def batches(words: int) -> list[list[tuple[Tensor, Tensor]]]:
    draw = partial(torch.randint, words, (1, 8), generator=torch.Generator().manual_seed(5))
    return [[(draw(), draw() % 4) for _ in range(4)]]


def rows(mistake: str, axes: list[str]) -> tuple[list[CheckRow], str]:
    """Return what a check says of a model, and the name of the layer with the mistake."""
    blocks = DRAWS.randint(2, 4)
    at, sizes = DRAWS.randrange(blocks), (4 * DRAWS.randint(1, 3), 2 * DRAWS.randint(4, 8), blocks)
    limit = 4 if mistake == "hangs" else 30
    found = check(partial(build, mistake, at, sizes), partial(batches, sizes[1]), axes, 2, timeout=limit)
    return list(found), f"layers.{at + 1}"


def test_triax_check_passes_right_models() -> None:
    for _ in range(2):
        found, _ = rows("", ["pipe", "data", "tensor", "context"])
        assert len(found) == 8 and all(row.holds and not row.difference for row in found), found


# Other models: with ties, dropout, experts, sequence parallelism and regions of their own; and with a fault each.
QUICK = ("tied_sequence", "experts", "unsummed_norm", "equal_masks", "smoothing_over_a_shard")
SAID = {
    "mean_over_a_shard": r"aten\.mean runs along a dim that is split among the ranks",
    "smoothing_over_a_shard": r"aten\.mean runs along a dim that is split among the ranks",
    "missing_reduce": "part of a sum over the ranks: sum it over the axis before the op",
    "bias_on_every_rank": "part of a sum over the ranks: sum it over the axis before the op",
    "averaged_over_context": "part of a sum over the ranks: sum it over the axis before the op",
    "gathered_logits": "2 times one process's: it is summed over the 2 ranks once too often",
    "summed_twice": "2 times one process's: it is summed over the 2 ranks once too often",
    "unsummed_norm": r"1 of \d+ gradients are not, first layers\.\d+\.mlp\.norm\.weight",
    "equal_masks": "only training differs: dropout",
    "missing_combine": "a weight that the combination leaves out",
    "tied_twice": r"first layers\.0\.weight, are 2 times one process's",
    "default_generator": "randomness that no seed keys",
    "state": "a state that one microbatch leaves",
    "missing_copy": "without triax.tensor_parallel's copy region",
    "scaled_gradient": r"mlp\.bias, are [\d.]+ times one process's",
}


OPS = {  # where the row says that numbers differ first
    "equal_masks": r"^the output of layers\.\d+\.mlp\.drop \(Dropout, .* differs, and its input does not",
    "mean_over_a_shard": r"first op: aten\.mean in planted_faults\.py:\d+, whose input is right",
    "missing_reduce": r"first op: aten\.add in .*, whose input is right",
    "smoothing_over_a_shard": r"first op: aten\.mean in .*, whose input is right",
    "gathered_logits": r"first op: aten\.log in .*, whose input differs",
    "averaged_over_context": r"first op: aten\.div in .*, whose input is right",
    "bias_on_every_rank": r"first op: aten\.add in .*, whose input is right",
    "unmasked_embedding": r"first op: aten\.embedding in .*, whose input is right",
    "summed_twice": r"first op: aten\.add in .*, whose input differs",
}


def planted(kind: str, seed: int, grid: Grid) -> PipelineModule:
    torch.set_default_dtype(torch.float64)
    return planted_faults.build(kind, seed, grid)


@pytest.mark.parametrize(
    "kind",
    [
        kind if kind in QUICK else pytest.param(kind, marks=pytest.mark.exhaustive)
        for kind in (*planted_faults.RIGHT, *planted_faults.FAULTS)
    ],
)
def test_triax_check_finds_planted_faults_only(kind: str) -> None:
    words = planted_faults.sizes_of(1).words
    fault = planted_faults.FAULTS.get(kind)
    axes = ["pipe", "data", "tensor"] if fault is None else [fault.axis]
    found = [*check(partial(planted, kind, 1), partial(batches, words), axes, 2, timeout=60)]
    wrong = [row for row in found if not row.holds]
    assert bool(wrong) == (fault is not None), found
    assert not wrong or re.search(SAID.get(kind, ""), wrong[0].cause), wrong
    assert kind not in OPS or re.search(OPS[kind], wrong[0].where), wrong


MISTAKES: dict[str, tuple[str, str, str, str]] = {  # the axis, or the run; what differs; where, with {at}; the cause
    "mean over a shard": (
        "tensor",
        "loss",
        r"input of {at}\.down .* in the forward of {at} \(Block, test_check.*; first op: aten\.mean in test_check\.py",
        "mean",
    ),
    "rank in a value": ("tensor", "loss", r"input of {at}\.down .* after {at}\.up.*first op: aten\.mul in", "shard"),
    "whole values summed": (
        "tensor",
        "loss",
        r"output of {at} \(Block, test_check\.py:\d+\) differs.* op: aten\.add",
        "an input of the op is 2 times one process",
    ),
    "no region": ("tensor", "gradient of", "", "the forward pass is right, .* not summed over the ranks"),
    "scaled gradient": ("tensor", r"gradient of {at}\.norm\.weight", "", "are 2 times .* counted by each of 2 tensor"),
    "shard in a whole loss": ("tensor", "", "loss_fn, as no module before it differs|RuntimeError|File", ""),
    "default generator": ("one process, twice", "gradient|loss", "", "randomness that no seed keys"),
    "state": ("microbatches in another order", "loss|gradient", "", "a state that one microbatch leaves"),
    "positions": ("context", "loss", r"input of {at}\.down .* in the forward of {at}", "positions that start again"),
    "mean over tokens": (
        "context",
        "loss",
        r"input of {at}\.down .* first op: aten\.mean in",
        "runs along a dim that is split among the ranks",
    ),
    "loss by rank": ("tensor", "loss", "loss_fn, as no module before it differs", "whole one"),
    "hangs": ("tensor", "rank 1 did not end|rank 0", "", ""),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_triax_check_names_the_layer_and_cause_of_a_mistake(mistake: str) -> None:
    axis, difference, where, cause = MISTAKES[mistake]
    axes = [axis] if axis in ("tensor", "context") else ["tensor"]
    found, at = rows(mistake, axes)
    wrong = [row for row in found if not row.holds]
    assert len(wrong) == 1, found
    (row,) = wrong
    assert axis in row.what, row
    for pattern, text in ((difference, row.difference), (where, row.where), (cause, row.cause)):
        pattern = pattern.replace("{at}", at.replace(".", r"\."))
        assert re.search(pattern, text), (pattern, row)


SCRIPT = """
import torch
from torch import nn
import triax

def build(grid):
    layers = [triax.LayerSpec(nn.Linear, 4, 4) for _ in range(2)]
    {line}
    return triax.PipelineModule(layers, grid=grid, loss_fn=nn.functional.mse_loss, dtype=torch.{dtype})

def batches():
    x = torch.ones(1, 4, dtype=torch.{dtype})
    return [[(x * i, 0 * x) for i in range(1, 5)]]
"""


def typed(folder: Path, *words: str, line: str = "", dtype: str = "float64") -> tuple[int, str]:
    file = folder / f"model_{len([*folder.iterdir()])}.py"  # a rank imports a file of one name once
    file.write_text(SCRIPT.format(line=line, dtype=dtype))
    return run_triax("check", f"{file}:build", *words, columns=200)


def test_triax_check_prints_a_table_and_json(tmp_path: Path) -> None:
    code, text = typed(tmp_path, "--axes", "pipe", "--json")
    found = json.loads(text)
    assert code == 0 and found["holds"]
    assert [run["what"] for run in found["runs"]] == [
        "one process, twice",
        "microbatches in another order",
        "Grid(pipe=2), schedule 1f1b, ZeRO stage 0",
        "Grid(pipe=2), schedule zb-h1, ZeRO stage 0",
    ]
    assert found["runs"][0]["notes"] == [] and found["runs"][2]["sent"]["pipe"] > 0
    code, text = typed(tmp_path, "--axes", "pipe", "--json", line="raise RuntimeError('no weights here')")
    (run,) = json.loads(text)["runs"]
    assert (
        code == 1 and run["difference"] == "RuntimeError: no weights here" and re.search(r"model_\d\.py", run["where"])
    )
    code, text = typed(tmp_path, "--axes", "pipe", "--processes", "1", "--json")
    last = json.loads(text)["runs"][-1]
    assert code == 1 and last["what"] == "axis pipe" and "an axis needs 2 ranks, and ranks=1" in last["difference"]
    code, text = typed(tmp_path, "--json", dtype="float32")
    (run,) = json.loads(text)["runs"]
    assert code == 1 and "make the model in float64, as PipelineModule(..., dtype=torch.float64)" in run["difference"]
    assert run["where"] == ""  # the error is no line of anybody's code
    code, text = typed(tmp_path, "--json", line="return triax.PipelineModule(layers, grid=grid, chunks=9)")
    (run,) = json.loads(text)["runs"]
    assert code == 1 and re.search(r'^File ".*/model_\d\.py", line 8, in build$', run["where"]), run  # not triax's line
    code, text = typed(tmp_path, "--json", line="return layers[0].build()")
    (run,) = json.loads(text)["runs"]
    assert code == 1 and run["difference"] == "TypeError: build(grid) returned a Linear: return a triax.PipelineModule"
    for words, says in (
        (["--axes", "pipes"], "--axes has 'pipes': give some of pipe, data, context, tensor, expert"),
        (["--data", "rows"], "has no function 'rows', which --data names; it has build, batches"),
    ):
        code, text = typed(tmp_path, *words)
        assert code == 2 and says in text
    code, text = run_triax("check", "model.py")
    assert code == 2 and "model.py is neither FILE.py:FUNCTION" in text


OWN_LAYER = """
class Own(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.matrix, self.unused = nn.Parameter(torch.eye(width)), nn.Parameter(torch.ones(width))

    def forward(self, x):
        return torch.tanh(x @ self.matrix)

"""


def test_triax_check_names_missing_and_undeferred_gradients(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    script = SCRIPT.format(line="layers.append(triax.LayerSpec(Own, 4))", dtype="float64")
    file.write_text(script.replace("def build", OWN_LAYER + "def build"))
    run = CliRunner().invoke(app, ["check", f"{file}:build", "--axes", "data", "--json", "--costs"])
    found = json.loads(run.output)
    assert "(2): Own(20, 33.33% Params, 16 MACs" in found["costs"], found["costs"]
    # Each linear layer keeps its input, of 4 numbers; Own its input and tanh's output, which no linear layer keeps.
    assert found["kept"] == {"layers.0": 32, "layers.1": 32, "layers.2": 64}
    data = found["runs"][2]
    flat = 6 * 16  # numbers: each of six parameters, of 16 or 4, begins at a multiple of 16 numbers
    assert data["formula"]["data"] == 2 * flat * 8 * 1 / 2 and data["sent"]["data"] >= data["formula"]["data"]
    assert found["runs"][0]["notes"] == [
        "no gradient in the first step: layers.2.unused",
        "zero-bubble schedules defer the gradients of 2 of 3 matrices, and not of layers.2.matrix",
    ]


def test_triax_check_makes_a_random_batch_if_none_is_given(tmp_path: Path) -> None:
    script = SCRIPT.format(line="", dtype="float64").partition("def batches")[0]
    for loss, code, says in (
        ("mse_loss", 0, ""),
        ("cross_entropy", 0, ""),
        ("ctc_loss", 2, "has no function 'batches', and ValueError: triax check cannot make a batch for this model"),
    ):
        file = tmp_path / f"alone_{loss}.py"
        file.write_text(script.replace("mse_loss", loss))
        found, text = run_triax("check", f"{file}:build", "--axes", "data", "--processes", "2")
        assert found == code and says in text, text
    file = tmp_path / "without_grid.py"
    file.write_text("def layers():\n    return []\n")
    code, text = run_triax("check", f"{file}:layers")
    assert code == 2 and "layers(grid) raised TypeError" in text, text
    code, text = run_triax("check", f"{file}:layers", "--dry-run", "data=2")
    assert code == 2 and "has no function 'batches', which --dry-run and --types need" in text


def test_triax_check_dry_says_if_a_grid_is_possible(tmp_path: Path) -> None:
    code, text = typed(tmp_path, "--dry-run", "pipe=2,data=32")
    assert code == 0 and "dry run of 64 ranks: pipe 2 x data 32" in text and "nothing would have failed" in text
    code, text = typed(tmp_path, "--dry-run", "pipe=4", "--json")
    found = json.loads(text)
    assert code == 1 and not found["holds"] and "2 layers cannot fill 4 stages" in found["problems"][0]
    code, text = typed(tmp_path, "--dry-run", "pip=4")
    assert code == 2 and "--dry-run has 'pip=4': give axes and sizes" in text


def test_triax_check_takes_training_files_and_model_folders(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 24, "hidden_size": 16, "intermediate_size": 24, "max_position_embeddings": 16}
    heads = {"num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 2}
    transformers.LlamaConfig(architectures=["LlamaForCausalLM"], **sizes, **heads).save_pretrained(tmp_path / "llama")
    file = tmp_path / "run.yaml"
    file.write_text("model: {preset: bytes-small}\ndata: {training: text}\nbatch: 4\ntraining: {tokens: 1000}\n")

    def run(*words: str) -> tuple[int, str]:
        return run_triax("check", *words, "--axes", "tensor", "--json")

    for target, key in ((tmp_path / "llama", ""), (file, "model.overrides.")):
        code, text = run(str(target), f"{key}num_hidden_layers=1")
        assert code == 0 and [each["holds"] for each in json.loads(text)["runs"]] == [True] * 3, text
    for words, says in (
        ((str(file), "model.preset=llama3-70b"), "has 70.6 billion parameters: a check in float64 needs"),
        ((str(file), "model.preste=bytes-small"), "did you mean 'preset'"),
        ((str(tmp_path / "llama"), "num_layers=1"), "there is no 'num_layers'"),
        ((str(tmp_path / "llama"), "num_hidden_layers"), "is not KEY=VALUE"),
        ((str(file), "--data", "batches"), "--data batches names a function of a Python file"),
        ((f"{__file__}:build", "a=1"), "a=1 changes a training file or a folder"),
    ):
        code, text = run(*words)
        assert code == 2 and says in text, text
