"""Check every kind of model by every method on every axis, and write docs/proved.md.

    python tests/laws/proved.py                          # every cell, some five minutes on two cores
    python tests/laws/proved.py --methods kto grpo       # these methods; the page keeps the tables of the others
    python tests/laws/proved.py --types llama --print    # some types, without writing the page

Each cell is a run of ``triax check`` on 2 ranks: a toy model of the type, as its config.json would make it, trains two
steps, and losses, metrics, norm and every gradient are those of one process to 1e-10, in float64. A cell that triax
refuses has its message.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent.parent)]

import torch
from torch import Tensor

import triax
from triax import Grid, PipelineModule
from triax.models import EncoderConfig
from triax.models.huggingface.config import from_hf
from triax.models.huggingface.families import FAMILIES
from triax.testing.check import check
from triax.train.methods import distill_loss, grpo_loss, kto_loss, preference_loss, reward_layers, reward_loss
from triax.train.model import loss_for

from support.toy_families import COMMON, DENSE, HYBRIDS, MIXTURES

PAGE = Path(__file__).resolve().parents[2] / "docs" / "proved.md"
AXES = ("pipe", "data", "context", "tensor", "expert")
METHODS = {
    "full": "all weights, next token",
    "lora": "low-rank adapters (`lora=triax.Lora(rank=2)`), next token",
    "sft": "all weights, the loss of answers alone: labels of prompts are -100",
    "dpo": "preferences, `triax.methods.preference_loss`, with the reference's log-probabilities as labels",
    "kto": "answers with a label, `triax.methods.kto_loss`, with the reference's log-probabilities and the baseline",
    "reward": "a score, `triax.methods.reward_layers` and `reward_loss`, with margins and centering",
    "distill": "a teacher's logits as labels, `triax.methods.distill_loss`, reverse divergence",
    "grpo": "drawn answers as labels, `triax.methods.grpo_loss`, with a reference (beta 0.04)",
}
VOCABULARY, LENGTH, MICROBATCHES = 64, 16, 4


def settings(kind: str) -> dict[str, Any]:
    """Return the config.json of a toy model: the first case of its family in the tests against transformers."""
    import transformers

    if kind == "kimi_k2":
        return settings("deepseek_v3") | {"model_type": kind}
    if kind in MIXTURES:
        family, options = MIXTURES[kind]
        architecture, options = f"{family}ForCausalLM", COMMON | options
    else:
        architecture, options = FAMILIES[kind].architecture, (DENSE | HYBRIDS)[kind][1]
    made = transformers.AutoConfig.for_model(kind, **options | {"vocab_size": VOCABULARY})
    made.architectures = [architecture]
    found: dict[str, Any] = made.to_dict()
    return found


def build(kind: str, method: str, config: dict[str, Any], grid: Grid) -> PipelineModule:
    """The model of a cell."""
    model = from_hf(config, Path(f"{kind}/config.json"))
    layers = model.layers()
    losses: dict[str, Callable[[], Any]] = {
        "dpo": lambda: preference_loss(grid, model.vocab_size),
        "kto": lambda: kto_loss(grid, model.vocab_size),
        "reward": lambda: reward_loss(grid, center=0.1),
        "distill": lambda: distill_loss(grid, model.vocab_size),
        "grpo": lambda: grpo_loss(grid, model.vocab_size, beta=0.04),
    }
    loss = losses.get(method, lambda: loss_for(model, grid))()
    if method == "reward":
        layers = reward_layers(layers)
    return PipelineModule(layers, grid=grid, loss_fn=loss, dtype=torch.float64, seed=0)


def batches(method: str) -> list[list[tuple[Tensor, Any]]]:
    """Two batches of random tokens."""
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(VOCABULARY, (2, MICROBATCHES, 2, LENGTH + 1), generator=generator)

    def labels(rows: Tensor) -> Any:
        wanted = rows[:, 1:].clone()
        if method not in ("full", "lora"):
            wanted[:, :5] = -100

        def random(*shape: int) -> Tensor:
            return torch.rand(shape, generator=generator).double()

        if method == "dpo":
            return {"labels": wanted, "reference": -random(2)}
        if method == "kto":
            more = {"desirable": random(2) < 0.5, "baseline": random(1).expand(2)}
            return {"labels": wanted, "reference": -random(2), **more}
        if method == "reward":
            return {"lengths": torch.tensor([LENGTH, LENGTH - 5]), "margin": random(1)}
        if method == "distill":
            return {"labels": wanted, "teacher": 4 * random(2, LENGTH, VOCABULARY)}
        if method == "grpo":
            old, known = (math.log(1 / VOCABULARY) + 0.2 * (random(2, LENGTH) - 0.5) for _ in range(2))
            return {"labels": wanted, "old": old, "reference": known, "advantages": random(2) - 0.5}
        return wanted

    return [[(rows[:, :-1], labels(rows)) for rows in batch] for batch in text]


def cells(kind: str, method: str) -> dict[str, str]:
    """Axis -> "" if its numbers are those of one process, else what the check says."""
    options: dict[str, Any] = {"lora": triax.Lora(rank=2)} if method == "lora" else {}
    made, data = partial(build, kind, method, settings(kind)), partial(batches, method)
    found = dict.fromkeys(AXES, "not run")
    for row in check(made, data, AXES, ranks=2, timeout=120, **options):
        axes = [axis for axis in AXES if f"{axis}=" in row.what or row.what == f"axis {axis}"]
        for axis in axes[-1:]:  # experts lie on the data axis
            said = "" if row.holds else re.sub(r"^rank \d+ raised: ", "", row.difference)
            found[axis] = said if found[axis] == "not run" else found[axis] or said
        if not axes and not row.holds:
            return dict.fromkeys(AXES, f"{row.what}: {row.difference}")
    return found


def kinds() -> list[str]:
    """Every type of decoder that triax has layers for, as config.json has it under ``model_type``."""
    return sorted(name for name, each in FAMILIES.items() if each.config not in (None, EncoderConfig))


def page(results: Iterator[tuple[str, str, dict[str, str]]]) -> str:
    """The page: for each method a table of types and axes, and below it the messages."""
    tables: dict[str, list[str]] = {method: [] for method in METHODS}
    said: list[str] = []
    for kind, method, found in results:
        row = []
        for axis in AXES:
            text = found[axis]
            if text and text not in said:
                said.append(text)
            word = "refused" if re.match(r"\w+Error: ", text) else "differs"
            row.append(f"{word} ({said.index(text) + 1})" if text else "equal")
        tables[method].append(f"| {kind} | {' | '.join(row)} |")
    parts = [INTRODUCTION]
    for method, rows in tables.items():
        if rows:
            head = f"| type | {' | '.join(AXES)} |\n|{'---|' * (len(AXES) + 1)}"
            parts.append(f"## {method}: {METHODS[method]}\n\n{head}\n" + "\n".join(rows))
    if said:
        parts.append("## Messages\n\n" + "\n".join(f"{n}. {text}" for n, text in enumerate(said, 1)))
    return "\n\n".join(parts) + "\n"


def written() -> dict[str, list[tuple[str, dict[str, str]]]]:
    """Method -> its rows (type, cells) on the page as it is."""
    found: dict[str, list[tuple[str, dict[str, str]]]] = {}
    text = PAGE.read_text() if PAGE.exists() else ""
    messages = dict(re.findall(r"^(\d+)\. (.*)$", text.partition("## Messages")[2], re.MULTILINE))
    for title, table in re.findall(r"^## (\w+): .*\n\n((?:\|.*\n)+)", text, re.MULTILINE):
        rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
        found[title] = [
            (kind, {axis: "" if cell == "equal" else messages[cell.split("(")[1].rstrip(")")] for axis, cell in pairs})
            for kind, *cells in rows
            for pairs in [[*zip(AXES, cells, strict=True)]]
        ]
    return found


INTRODUCTION = f"""# What was proved: types of models, methods and axes

`python tests/laws/proved.py` writes this page. For each cell, a toy model of a Hugging Face type (`model_type`) trains
two steps on 2 ranks of the axis. "equal" means that losses, metrics, the norm and every gradient equal those of one
process to 1e-10, in float64. The pipe axis runs 1F1B and a zero-bubble schedule, the data axis ZeRO stages 0 and 3.
For a type without experts, the expert axis means two replicas. Types that a method's table does not list were not run
with it.

Other tests compare one process with transformers, torch and TRL ([Models](models.md),
[Preferences](guides/preferences.md)), and run grids of several axes. To check your own model, run `triax check`
([Test your model on grids](guides/testing.md)); for a grid of any size, `triax check --dry`.

torch {torch.__version__.partition("+")[0]}, CPU, gloo."""


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--types", nargs="+", choices=kinds(), default=kinds())
    arguments.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    arguments.add_argument("--print", action="store_true", dest="shows", help="print the page instead of writing it")
    options = arguments.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"

    kept = {} if options.shows else {name: rows for name, rows in written().items() if name not in options.methods}

    def results() -> Iterator[tuple[str, str, dict[str, str]]]:
        for method in METHODS:
            yield from ((kind, method, found) for kind, found in kept.get(method, ()))
            for kind in options.types if method in options.methods else ():
                found = cells(kind, method)
                print(f"{method} {kind}: {found}", file=sys.stderr, flush=True)
                yield kind, method, found

    text = page(results())
    if options.shows:
        print(text)
    else:
        PAGE.write_text(text)


if __name__ == "__main__":
    main()
