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
import textwrap
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent.parent)]

import torch
from torch import Tensor

import triax
from triax import Grid, PipelineModule
from triax.models import EncoderConfig, WhisperConfig
from triax.models.huggingface.config import from_hf
from triax.models.huggingface.families import FAMILIES
from triax.testing.check import check
from triax.train.methods import distill_loss, grpo_loss, kto_loss, preference_loss, reward_layers, reward_loss
from triax.train.model import loss_for

from support.toy_families import COMMON, DENSE, HYBRIDS, MIXTURES, T5

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
    if kind in ("t5", "mt5"):
        architecture, options = f"{FAMILIES[kind].prefix}ForConditionalGeneration", T5
    elif kind in MIXTURES:
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
    """Every type that reads tokens and writes tokens, as config.json has it under ``model_type``."""
    return sorted(name for name, each in FAMILIES.items() if each.config not in (None, EncoderConfig, WhisperConfig))


SAME = "the same as above"


def page(results: Iterator[tuple[str, str, dict[str, str]]]) -> str:
    """Return the page: for each method the types that were run, and the cells that are not equal."""
    ran: dict[str, list[str]] = {method: [] for method in METHODS}
    others: dict[str, list[str]] = {method: [] for method in METHODS}
    for kind, method, found in results:
        ran[method].append(kind)
        others[method] += [f"| {kind} | {axis} | {text} |" for axis, text in found.items() if text]
    parts = [INTRODUCTION]
    above: list[str] = []
    for method in [method for method, kinds in ran.items() if kinds]:
        head = ["| type | axis | what the check says |", "|---|---|---|"] if others[method] else []
        listed = SAME if ran[method] == above else ", ".join(ran[method])
        lines, above = textwrap.wrap(f"Types: {listed}.", 120, break_on_hyphens=False), ran[method]
        parts += [f"## {method}: {METHODS[method]}", "\n".join(lines), "\n".join([*head, *others[method]])]
    return "\n\n".join(filter(None, parts)) + "\n"


def written() -> dict[str, list[tuple[str, dict[str, str]]]]:
    """Return what the page says as it is: method -> its types, with the text of each axis; "" for equal."""
    found: dict[str, list[tuple[str, dict[str, str]]]] = {}
    kinds: list[str] = []
    text = PAGE.read_text() if PAGE.exists() else ""
    for section in text.split("\n## ")[1:]:
        method, types = section.partition(":")[0], re.search(r"^Types: ([^.]*)\.$", section, re.MULTILINE)
        assert types is not None, f"{PAGE} does not list the types of {method}"
        rows = re.findall(r"^\| (\w+) \| (\w+) \| (.*) \|$", section, re.MULTILINE)
        said = {(kind, axis): text for kind, axis, text in rows}
        kinds = kinds if types[1] == SAME else types[1].replace("\n", " ").split(", ")
        found[method] = [(kind, {axis: said.get((kind, axis), "") for axis in AXES}) for kind in kinds]
    return found


BESIDE = """| models | tests |
|---|---|
| BERT, RoBERTa, ModernBERT, ViT, DINOv2, SigLIP's vision model | [test_encoders.py](../tests/models/test_encoders.py) |
| T5, T5 v1.1, Flan-T5, mT5 | [test_t5.py](../tests/models/test_t5.py) |
| Whisper | [test_whisper.py](../tests/models/test_whisper.py) |
| LLaVA, Gemma 3, Idefics3, SmolVLM, Qwen2-VL, Qwen2.5-VL, Qwen3-VL, also with LoRA, and from training files \
([Vision and language](guides/vision-language.md)) \
| [test_vision_language.py](../tests/models/test_vision_language.py) |
| diffusion transformers (DiT) | [test_dit.py](../tests/models/test_dit.py) |
| Flux | [test_flux.py](../tests/models/test_flux.py) |"""

INTRODUCTION = f"""# What was proved

`python tests/laws/proved.py` writes this page. For each method, type (`model_type` of Hugging Face) and axis,
a toy model trains two steps on 2 ranks of the axis. The axes are {", ".join(AXES[:-1])} and {AXES[-1]}. On each of
them losses, metrics, the norm and every gradient equal those of one process to 1e-10, in float64; a table below a
method has the exceptions, if there are any. The pipe axis runs 1F1B and a zero-bubble schedule, the data axis ZeRO
stages 0 and 3. For a type without experts, the expert axis means two replicas. Types that a method does not list were
not run with it.

Other tests compare one process with transformers, torch and TRL ([Models](models.md),
[Preferences](guides/preferences.md)), and run grids of several axes. These models they train on the pipe, data and
tensor axes beside transformers or diffusers: losses and every gradient are equal to 1e-10 in float64.

{BESIDE}

To check your own model, run `triax check`
([Test your model on grids](guides/testing.md)); for a grid of any size, `triax check --dry-run`.

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
