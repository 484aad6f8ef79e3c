"""Train a byte-level GPT in three dimensions: pipe (stages) x data (ZeRO replicas) x tensor (shards).

Two more axes are there: ``--context 2`` spreads each sequence over two ranks, and ``--experts 8 --expert-parallel 2``
trains a mixture of experts, which are spread over two ranks.

    python examples/train_gpt.py --pipe 2 --data 2 --tensor 2                                      # starts its own 8
    torchrun --nproc-per-node 8 examples/train_gpt.py --pipe 2 --data 2 --tensor 2                 # the same
    python examples/train_gpt.py --text ~/texts poem.txt                                           # your own text

It learns the source of Python's standard library, or the text that ``--text`` names, and is measured on files it
never saw, against a model that counts pairs of bytes. ``runs/NAME/`` gets metrics.jsonl, a trace of one step, a page
about it all, report.html, pictures, and the model, which ``triax generate runs/NAME --prompt "class "`` reads. Whatever
the grid, the same options give the same losses.

The options become a training file, as ``triax train`` reads it (docs/training-files.md).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from corpus import Bigram, find, tokens

from triax.launcher.launch import user_error
from triax.pipe.schedules.registry import RECIPES
from triax.train import loop
from triax.train.data import open_data
from triax.train.evaluation import Evaluation
from triax.train.job import Job
from triax.train.schema import TrainingFile
from triax.train.start import make_job, start


def main() -> None:
    """Check what was asked for; then be one rank of it, or start them all."""
    options = parse()
    try:
        # Tokenized here once, before there are ranks; under torchrun the first one that comes does it.
        file = training_file(options, tokens(find(options.text), options.runs / "corpus"))
        job = make_job(file, options.processes)
    except ValueError as error:
        user_error(error)
    start(job, train)


def train(job: Job) -> None:
    """Train on this rank."""

    def bigrams(evaluation: Evaluation) -> tuple[str, float]:
        text = open_data(job.file, job.sequence, "training").loader(1024, 1024, threads=0, epochs=1)
        return "byte bigrams", Bigram(text).loss(evaluation.batches())

    loop.train(job, baseline=bigrams)


def training_file(options: argparse.Namespace, data: dict[str, Any]) -> TrainingFile:
    """The options as a training file.

    Raises:
        ConfigError: a value that cannot be.
    """
    shape: dict[str, Any] = {
        "vocab_size": 256,
        "max_position_embeddings": options.sequence,
        "hidden_size": options.width,
        "num_hidden_layers": options.layers,
        "num_attention_heads": options.heads,
        "dropout": options.dropout,
    }
    if options.experts:
        shape |= {"intermediate_size": 2 * options.width, "num_key_value_heads": options.heads}
        shape |= {"num_experts": options.experts}
    axes = {"pipe": options.pipe, "context": options.context, "tensor": options.tensor}
    grid = {**axes, "expert": options.expert_parallel, "sequence_parallel": options.sequence_parallel}
    # Generation needs the experts of a layer on one rank. ``triax generate`` has them.
    writes = options.sample and options.expert_parallel == 1
    sample = {"prompt": options.prompt, "tokens": options.sample, "temperature": options.temperature}
    saves = {"every": options.validate_every, "keep": None, "resume": "auto" if options.resume else "never"}
    values = {
        "name": options.name,
        "runs": str(options.runs),
        "seed": options.seed,
        "model": {"preset": "mixtral-tiny" if options.experts else "bytes-small", "overrides": shape},
        "data": {**data, "document_mask": False},
        "grid": grid | ({} if options.data is None else {"data": options.data}),
        "schedule": options.schedule,
        "training": {
            "steps": options.steps,
            "batch": options.batch,
            "microbatch": options.microbatch,
            "precision": {"float32": "fp32", "float64": "fp64"}[options.dtype],
            "optimizer": {"type": "AdamW", "weight_decay": options.weight_decay},
            "learning_rate": {"peak": options.lr, "warmup_steps": options.warmup},
            "clip": options.clip,
            "zero": options.zero,
            "time_limit": f"{options.time_limit:f}m" if options.time_limit else None,
        },
        "evaluate": {"every": options.validate_every, "sequences": options.validation},
        "checkpoint": {**saves, "folder": str(options.save)} if options.save else False,
        "sample": sample if writes else None,
        "monitor": {
            "log_every": options.log_every,
            "print_losses": options.print_losses,
            "trace": options.trace,
        },
    }
    if options.context > 1:
        values["model"]["attention"] = options.attention
    if options.resume and options.save is None:
        raise ValueError("--resume continues from the last checkpoint of a folder: give that folder as --save too")
    return TrainingFile.of(values)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line. The defaults, with two of everything, train for some minutes on two cores."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument_group("the grid").add_argument
    add("--pipe", type=int, default=1, metavar="P", help="stages of layers (1)")
    add("--data", type=int, metavar="D", help="replicas (processes divided by the other axes)")
    add("--context", type=int, default=1, metavar="C", help="parts of each sequence (1)")
    add("--tensor", type=int, default=1, metavar="T", help="shards of each layer (1)")
    add("--expert-parallel", type=int, default=1, metavar="E", help="shards of each layer's experts (1)")
    add("--processes", type=int, metavar="N", help="number of processes to start (P x D x C x T)")
    add("--schedule", default="1f1b", choices=list(RECIPES), help="pipeline schedule (1f1b)")
    add(
        "--zero",
        type=int,
        default=1,
        metavar="STAGE",
        help="ZeRO stage (1)",
    )
    add = parser.add_argument_group("the model").add_argument
    add("--layers", type=int, default=4, help="blocks (4)")
    add("--width", type=int, default=128, help="width of the residual stream (128)")
    add("--heads", type=int, default=4, help="attention heads (4)")
    add("--sequence", type=int, default=128, metavar="BYTES", help="maximum length of the context (128)")
    add("--dropout", type=float, default=0.0, help="dropout probability (0)")
    add("--experts", type=int, default=0, metavar="N", help="number of experts in each block; 0: a plain GPT (0)")
    add(
        "--attention",
        default="ring",
        choices=["ring", "ulysses", "gather"],
        help="kind of attention over --context (ring)",
    )
    add("--sequence-parallel", action="store_true", help="norms and dropout on the tensor ranks' shares of a sequence")
    add("--dtype", default="float32", choices=["float32", "float64"], help="dtype of weights and arithmetic (float32)")
    add = parser.add_argument_group("the training").add_argument
    add("--steps", type=int, default=600, help="optimizer steps (600)")
    add("--batch", type=int, default=32, help="sequences per step, over all replicas (32)")
    add("--microbatch", type=int, default=4, help="sequences that pass through the pipeline at once (4)")
    add("--lr", type=float, default=4e-3, help="the highest learning rate (4e-3)")
    add("--warmup", type=int, default=50, metavar="STEPS", help="steps until the highest learning rate (50)")
    add("--weight-decay", type=float, default=0.1, help="weight decay of matrices (0.1)")
    add("--clip", type=float, default=1.0, help="limit of the gradient norm; 0: no limit (1)")
    add("--seed", type=int, default=0, help="seed of weights, batches and the sample (0)")
    add("--time-limit", type=float, default=5.0, metavar="MINUTES", help="minutes until the run ends; 0: no limit (5)")
    add("--save", type=Path, metavar="FOLDER", help="folder for a checkpoint at each evaluation (none)")
    add("--resume", action="store_true", help="continue from the last checkpoint in --save, on any grid")
    add = parser.add_argument_group("the text").add_argument
    add("--text", nargs="+", default=[], metavar="PATH", help="files and folders (Python's standard library)")
    add("--validation", type=int, default=256, metavar="N", help="number of held-out sequences to evaluate (256)")
    add(
        "--validate-every",
        type=int,
        default=100,
        metavar="STEPS",
        help="evaluate every so many steps, and at the end (100)",
    )
    add("--prompt", default="def ", help='beginning of the sample ("def ")')
    add(
        "--sample", type=int, default=200, metavar="BYTES", help="length of the sample, if there is room; 0: none (200)"
    )
    add("--temperature", type=float, default=0.7, help="temperature of the sample (0.7)")
    add = parser.add_argument_group("the report").add_argument
    add("--name", default="gpt", help="name of the folder in runs/ (gpt)")
    add("--runs", type=Path, default=Path("runs"), metavar="FOLDER", help="folder of all runs (runs)")
    add(
        "--log-every",
        type=int,
        default=20,
        metavar="STEPS",
        help="without a terminal, print a line every so many steps (20)",
    )
    add("--print-losses", action="store_true", help="print every loss in full")
    add(
        "--trace",
        type=int,
        default=20,
        metavar="STEP",
        help="step to trace in timeline.json (20, or the last); 0: none",
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
