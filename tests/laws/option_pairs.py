"""Try each option of an engine on each axis and ZeRO stage, and with each other option; write docs/option-pairs.md.

    python tests/laws/option_pairs.py            # every cell, some minutes on two cores
    python tests/laws/option_pairs.py --print    # print the page instead of writing it

A toy model takes two steps on 2 or 4 ranks, with ``triax.testing``. The reference of an option that must not change a
number is one process without it.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache, partial
from itertools import combinations
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from torch import Tensor

import triax
from triax import Grid, PipelineModule
from triax.models import MixtralConfig, mixtral_layers
from triax.options.local_updates import DiLoCo, LocalSGD
from triax.options.named import GradientCompression
from triax.testing.equality import Step, difference
from triax.testing.pool import RankFailure, run_ranks

PAGE = Path(__file__).resolve().parents[2] / "docs" / "option-pairs.md"
VOCABULARY, LENGTH, MICROBATCHES = 32, 8, 4
FOLDER = TemporaryDirectory()  # of offload to nvme
# Errors by which triax refuses an option; any other error is a fault.
REFUSALS = re.compile(r"(OptionError|ConfigError|ValueError|TypeError|NotImplementedError): ")


class Feature(NamedTuple):
    """An option.

    Attributes:
        name: the keyword of ``triax.Engine``, as a user writes it.
        options: the keyword; those of ``Zero`` under ``zero``.
        kind: ``same`` if it must not change a number, ``other`` if the reference has it too, ``rounds`` if the numbers
            are not compared, because it rounds or lets replicas differ.
        stages: stages of ZeRO in which it acts.
    """

    name: str
    options: dict[str, Any]
    kind: str = "same"
    stages: tuple[int, ...] = (0, 1, 2, 3)

    @property
    def stage(self) -> int:
        """Stage in which it runs on other axes."""
        return 1 if 1 in self.stages else self.stages[-1]


def named(name: str, **arguments: Any) -> dict[str, Any]:
    return {"optimizer": triax.Optimizer(name, lr=1e-2, **arguments)}


FEATURES = [
    Feature('recompute="full"', {"recompute": "full"}),
    Feature('recompute="matmul"', {"recompute": "matmul"}),
    Feature('recompute="selective"', {"recompute": "selective"}),
    Feature('compile=Compile(backend="aot_eager")', {"compile": triax.Compile(backend="aot_eager")}),
    Feature("clip=0.1", {"clip": 0.1}, "other"),
    Feature('nan_loss="skip"', {"nan_loss": "skip"}),
    Feature("lora=Lora(rank=2)", {"lora": triax.Lora(rank=2)}, "other"),
    Feature("lora=Lora(rank=2, dora=True)", {"lora": triax.Lora(rank=2, dora=True)}, "other"),
    Feature('lora=Lora(rank=2, base="nf4")', {"lora": triax.Lora(rank=2, base="nf4")}, "rounds"),
    Feature('optimizer=Optimizer("Muon")', named("Muon"), "other"),
    Feature('optimizer=Optimizer("Lamb")', named("Lamb"), "other"),
    Feature('optimizer=Optimizer("OneBitAdam")', named("OneBitAdam", freeze_step=1), "rounds", (0,)),
    Feature('optimizer=Optimizer("AdamW", state="int8")', named("AdamW", state="int8"), "rounds"),
    Feature('zero=Zero(offload_optimizer="cpu")', {"zero": {"offload_optimizer": "cpu"}}),
    Feature(
        'zero=Zero(offload_optimizer="nvme")',
        {"zero": {"offload_optimizer": {"device": "nvme", "path": FOLDER.name}}},
    ),
    Feature('zero=Zero(offload_parameters="cpu")', {"zero": {"offload_parameters": "cpu"}}, "same", (3,)),
    Feature("zero=Zero(keep_gathered=True)", {"zero": {"keep_gathered": True}}, "same", (3,)),
    Feature("zero=Zero(hpz_partition_size=2)", {"zero": {"hpz_partition_size": 2}}, "same", (3,)),
    Feature("zero=Zero(shard_size=1)", {"zero": {"shard_size": 1}}, "same", (1, 2, 3)),
    Feature("zero=Zero(quantized_weights=True)", {"zero": {"quantized_weights": True}}, "rounds", (3,)),
    Feature("zero=Zero(quantized_gradients=True)", {"zero": {"quantized_gradients": True}}, "rounds", (1, 2, 3)),
    Feature('reduction=GradientReduction(dtype="bf16")', {"reduction": {"dtype": "bf16"}}, "rounds"),
    Feature(
        'compression=GradientCompression("powersgd")',
        {"compression": GradientCompression("powersgd")},
        "rounds",
        (0, 1),
    ),
    Feature('compression=GradientCompression("topk")', {"compression": GradientCompression("topk")}, "rounds", (0, 1)),
    Feature("sparse_attention=SparseAttention(block=2)", {"sparse_attention": triax.SparseAttention(block=2)}, "other"),
    Feature("local_updates=LocalSGD(every=2)", {"local_updates": LocalSGD(every=2)}, "rounds", (0,)),
    Feature("local_updates=DiLoCo(every=2)", {"local_updates": DiLoCo(every=2)}, "rounds", (0,)),
    Feature('precision="bf16"', {"precision": "bf16"}, "rounds"),
    Feature(
        'precision=Precision(weights="fp16")',
        {"precision": {"weights": "fp16", "loss_scale": {"initial_power": 8}}},
        "rounds",
    ),
    Feature('precision=Precision(autocast="bf16")', {"precision": {"autocast": "bf16"}}, "rounds"),
]
PLACES: dict[str, tuple[dict[str, int], str, int | None]] = {
    "pipe, 1F1B": ({"pipe": 2, "data": 2}, "1f1b", None),
    "pipe, ZB-H1": ({"pipe": 2, "data": 2}, "zb-h1", None),
    "tensor": ({"data": 2, "tensor": 2}, "1f1b", None),
    "context": ({"data": 2, "context": 2}, "1f1b", None),
    "expert": ({"data": 2, "expert": 2}, "1f1b", None),
    **{f"ZeRO {stage}": ({"data": 2}, "1f1b", stage) for stage in range(4)},
}


def build(dtype: torch.dtype, experts: bool, grid: Grid) -> PipelineModule:
    """Return a toy Llama, or a Mixtral."""
    sizes: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 2, "intermediate_size": 24, "max_position_embeddings": LENGTH}
    layers = (
        mixtral_layers(MixtralConfig(num_experts=2, **sizes))
        if experts
        else triax.llama_layers(triax.LlamaConfig(**sizes))
    )
    return PipelineModule(layers, grid=grid, loss_fn=triax.NextTokenLoss(grid, VOCABULARY), dtype=dtype, seed=0)


def batches() -> list[list[tuple[Tensor, Tensor]]]:
    """Return two batches of random tokens."""
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(VOCABULARY, (2, MICROBATCHES, 2, LENGTH + 1), generator=generator)
    return [[(rows[:, :-1], rows[:, 1:]) for rows in batch] for batch in text]


def joined(features: tuple[Feature, ...]) -> dict[str, Any] | None:
    """Return the options of all features; None if two of them give one keyword."""
    options: dict[str, Any] = {"zero": {}}
    for feature in features:
        for key, value in feature.options.items():
            if key == "zero" and not value.keys() & options["zero"].keys():
                options["zero"] |= value
            elif key != "zero" and key not in options:
                options[key] = value
            else:
                return None
    return options


def train(features: tuple[Feature, ...], axes: dict[str, Any], schedule: str, stage: int, dtype: torch.dtype) -> Any:
    """Take two steps on this rank; return their numbers, or, if they are not compared, their losses."""
    options = joined(features)
    assert options is not None
    grid = Grid(**axes)
    if "compile" in options:  # torch compiles a function 8 times in a process, and then runs it plainly
        torch.compiler.reset()
    given: dict[str, Any] = {
        "optimizer": partial(torch.optim.SGD, lr=0.1),
        "batch": triax.Batch(size=2 * MICROBATCHES, microbatch=2),
    }
    given |= options | {"zero": triax.Zero.of({**options["zero"], "stage": stage}), "schedule": schedule}
    engine = triax.Engine(build(dtype, "expert" in axes, grid), **given)
    found: list[Any] = []
    share = MICROBATCHES // grid.data.size
    for batch in batches():
        loss = engine.train_batch(iter(batch[grid.data.rank * share : (grid.data.rank + 1) * share])).item()
        if dtype != torch.float64:
            found.append(loss)
            continue
        numbers = {"gradients": engine.gather("gradients"), "weights": engine.gather()}
        found.append(Step(0.0, loss, engine.grad_norm or 0.0, engine.metrics, sent={}, formula={}, **numbers))
    assert not engine.skipped_steps, "the steps must be taken"
    return found


@cache
def reference(names: tuple[str, ...], experts: bool) -> Any:
    """Return the numbers of one process, with the options that may change them."""
    features = tuple(each for each in FEATURES if each.name in names)
    axes = {"expert": 1} if experts else {}
    return run_ranks(1, train, features, axes, "1f1b", 0, torch.float64)[0]


def cell(features: tuple[Feature, ...], axes: dict[str, int], schedule: str, stage: int) -> str:
    """Return ``equal``, ``runs``, ``differs: ...``, or the error."""
    kinds = {each.kind for each in features}
    dtype = torch.float32 if "rounds" in kinds else torch.float64
    ranks = math.prod(size for name, size in axes.items() if name != "expert")
    try:
        found = run_ranks(ranks, train, features, axes, schedule, stage, dtype, timeout=120)
    except RankFailure as failure:
        return failure.first.summary.partition("\n")[0].removeprefix("triax.base.option_error.")
    if dtype == torch.float32:
        return "runs" if all(math.isfinite(loss) for steps in found for loss in steps) else f"not finite: {found}"
    wanted = reference(tuple(each.name for each in features if each.kind == "other"), "expert" in axes)
    for steps in found:
        for step, own in zip(steps, wanted, strict=True):
            if text := difference(step, own, 1e-10):
                return f"differs: {text}"
    return "equal"


def alone() -> Iterator[tuple[Feature, list[str]]]:
    """Yield each option with its cells in ``PLACES``."""
    for feature in FEATURES:
        row = []
        for axes, schedule, stage in PLACES.values():
            idle = stage is not None and stage not in feature.stages
            row.append("" if idle else cell((feature,), axes, schedule, feature.stage if stage is None else stage))
        yield feature, row


def pairs() -> Iterator[tuple[Feature, Feature]]:
    """Yield the pairs of options that one engine can be given."""
    yield from (pair for pair in combinations(FEATURES, 2) if joined(pair) is not None)


def stage_of(features: tuple[Feature, ...]) -> int:
    """Return a stage of ZeRO in which all features act."""
    common = [stage for stage in features[0].stages if all(stage in each.stages for each in features)]
    return 1 if 1 in common else common[-1] if common else max(each.stage for each in features)


def together(pair: tuple[Feature, Feature]) -> str:
    """Return the cell of two options, on two replicas, in a stage of ZeRO in which both act."""
    return cell(pair, {"data": 2}, "1f1b", stage_of(pair))


INTRODUCTION = f"""# What works with what

`python tests/laws/option_pairs.py` writes this page. It trains a toy Llama (on the expert axis a Mixtral) for two steps
with each option on each axis, and with each pair of options. [What was proved](proved.md) has the types of models and
the methods; [What works with what](huggingface.md#what-works-with-what) has the Hugging Face Trainer.

- **equal**: losses, norm, every gradient and the new weights equal one process to 1e-10 in float64. If an option must
  not change numbers, such as recomputation or offload, the one process trains without it.
- **runs**: the option rounds, or lets replicas differ. Both steps are taken, with finite losses.
- **refused (n)**: triax raises error n of the [list](#errors).

torch {torch.__version__.partition("+")[0]}, CPU, gloo.

## Each option on each axis and ZeRO stage

Each option ran on the axes pipe (1F1B and ZB-H1), tensor, context and expert, of 2 ranks with 2 replicas, and on 2
replicas in each ZeRO stage in which it has an effect. The result is the same everywhere, but for the exceptions:

| option | ZeRO stages | result | exceptions |
|---|---|---|---|
"""


def page(rows: list[tuple[Feature, list[str]]], found: list[tuple[Feature, Feature, str]]) -> str:
    """Return the page for the cells of ``alone`` and of all pairs."""
    errors: list[str] = []

    def shown(text: str) -> str:
        if text in ("equal", "runs"):
            return text
        if text not in errors:
            errors.append(text)
        word = "refused" if REFUSALS.match(text) else "fails"
        return f"{word} ({errors.index(text) + 1})"

    lines = []
    for each, row in rows:
        cells = {place: shown(text) for place, text in zip(PLACES, row, strict=True) if text}
        result = Counter(cells.values()).most_common(1)[0][0]
        exceptions = [f"{place}: {cell}" for place, cell in cells.items() if cell != result]
        lines.append(f"| `{each.name}` | {', '.join(map(str, each.stages))} | {result} | {'; '.join(exceptions)} |")
    counts = Counter(text for _, _, text in found)
    lines += ["", "## Pairs of options", ""]
    lines += [f"Each pair trained on 2 replicas, in a ZeRO stage in which both have an effect. Of {len(found)} pairs,"]
    lines += [f"{counts['equal']} are equal and {counts['runs']} run. These are the others:", ""]
    lines += ["| option | with | |", "|---|---|---|"]
    others: dict[tuple[str, str], list[str]] = {}
    for a, b, text in found:
        if text not in ("equal", "runs"):
            others.setdefault((a.name, shown(text)), []).append(f"`{b.name}`")
    lines += [f"| `{name}` | {', '.join(partners)} | {cell} |" for (name, cell), partners in others.items()]
    lines += ["", "## Errors", "", *(f"{n}. {text}" for n, text in enumerate(errors, 1))]
    return INTRODUCTION + "\n".join(line.replace("|  |", "| |") for line in lines) + "\n"


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--print", action="store_true", dest="shows", help="print the page instead of writing it")
    shows = arguments.parse_args().shows

    rows, found = [], []
    for feature, row in alone():
        print(f"{feature.name}: {row}", file=sys.stderr, flush=True)
        rows.append((feature, row))
    for a, b in pairs():
        text = together((a, b))
        print(f"{a.name} with {b.name}: {text}", file=sys.stderr, flush=True)
        found.append((a, b, text))
    text = page(rows, found)
    if shows:
        print(text)
    else:
        PAGE.write_text(text)


if __name__ == "__main__":
    main()
