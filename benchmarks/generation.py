"""Time of generation beside transformers' ``generate``: the same model, the same prompts of unequal length.

    python benchmarks/generation.py                                            # 42 M parameters, one process
    python benchmarks/generation.py --preset llama-42m --batches 1 8           # Llama's layers
    python benchmarks/generation.py --preset bytes-medium --pipe 2             # on two stages, without transformers

The contenders take turns, so that what else the machine does hits all of them: a round is one call of each. Of one
process it is the processor's time, on one thread. All draw from the whole vocabulary, or take the most likely token
(``--greedy``). Before anything is timed, the greedy tokens of each are compared in float64.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

from limits import spread
from measuring import in_turn
from rounds import Row, beside, parser, print_json, show

CONTENDERS = ("triax", "transformers", "without a cache")
SHAPE: dict[str, Any] = {
    "vocab_size": 32000,
    "max_position_embeddings": 256,
    "hidden_size": 512,
    "num_hidden_layers": 8,
}
SHAPE |= {"num_attention_heads": 8}


def main() -> None:
    """Measure here, or on the ranks that this starts."""
    from triax.grid.environment import read_environment
    from triax.grid.launcher.launch import launch

    arguments = parser(__doc__, rounds=7, ranks=False)
    arguments.add_argument("--preset", default="gpt-42m", help="gpt-42m, llama-42m, or a preset of GPTConfig (gpt-42m)")
    arguments.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32], help="sequences at once (1 8 32)")
    arguments.add_argument("--new", type=int, default=32, help="new tokens of each sequence (32)")
    arguments.add_argument("--greedy", action="store_true", help="take the most likely token instead of drawing")
    arguments.add_argument("--pipe", type=int, default=1, help="stages (1)")
    arguments.add_argument("--tensor", type=int, default=1, help="shards (1)")
    arguments.add_argument("--only", nargs="+", default=CONTENDERS[:2], choices=CONTENDERS, help="the contenders")
    options = arguments.parse_args()
    processes = options.pipe * options.tensor
    if processes > 1 and read_environment() is None:
        sys.exit(launch(measure, options, ranks=processes))
    measure(options)


def measure(options: argparse.Namespace) -> None:
    """Measure generation on this rank."""
    import torch

    import triax
    from triax.models.gpt import GPTConfig, gpt_layers
    from triax.models.llama import LlamaConfig, llama_layers

    grid = triax.Grid(pipe=options.pipe, tensor=options.tensor)
    if grid.size == 1:
        torch.set_num_threads(1)
    if options.preset == "llama-42m":
        layers = llama_layers(LlamaConfig(**SHAPE, num_key_value_heads=8, intermediate_size=1365))
    else:
        layers = gpt_layers(GPTConfig(**SHAPE) if options.preset == "gpt-42m" else GPTConfig.preset(options.preset))
    module = triax.PipelineModule(layers, grid=grid).eval()
    for parameter in module.parameters():
        parameter.data *= 3  # at their initial size, all logits are nearly alike
    engines: dict[int, triax.InferenceEngine] = {}

    def cached(given: list[list[int]], greedy: bool) -> Any:
        engine = engines.setdefault(len(given), triax.init_inference(module, max_batch=len(given)))
        return engine.generate(given, options.new, temperature=0.0 if greedy else 1.0)

    def whole(given: list[list[int]], greedy: bool) -> Any:
        made = []
        for prompt in given:
            ids = torch.tensor([prompt])
            with torch.no_grad():
                for _ in range(options.new):
                    logits = module(ids)[:, -1]
                    drawn = torch.multinomial(logits.softmax(-1), 1) if not greedy else logits.argmax(-1, keepdim=True)
                    ids = torch.cat([ids, drawn], dim=1)
            made += ids.tolist()
        return made

    contenders: dict[str, Callable[[list[list[int]], bool], Any]] = {"triax": cached}
    if grid.size == 1:
        contenders |= theirs(module, options.new) | {"without a cache": whole}
    contenders = {name: run for name, run in contenders.items() if name in options.only}
    module.double()
    answers = [run(prompts(2), True) for run in contenders.values()]
    assert all(answer == answers[0] for answer in answers), "the greedy tokens differ"
    module.float()
    engines.clear()

    clock = time.process_time if grid.size == 1 else time.perf_counter
    found: dict[str, list[Row]] = {}
    for batch in options.batches:
        found[f"batch {batch}"] = rows = [Row(name) for name in contenders]
        for run in contenders.values():  # the first call is not measured
            run(prompts(batch), options.greedy)
        for row in in_turn(rows, options.rounds):
            begin = clock()
            contenders[row.name](prompts(batch), options.greedy)
            row.times.append((clock() - begin) / options.new)
    if grid.rank == 0:
        report(options, found)
    grid.close()


def theirs(module: Any, new: int) -> dict[str, Callable[[list[list[int]], bool], Any]]:
    """transformers' own generate of the same model, if it is installed: rows are padded on the left."""
    import torch

    try:
        import transformers
    except ImportError:
        return {}
    from triax.models.huggingface.save import save_hf

    with tempfile.TemporaryDirectory() as folder:
        save_hf(module, folder)
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None

    def run(given: list[list[int]], greedy: bool) -> Any:
        model.to(next(iter(module.parameters())).dtype)
        width = max(map(len, given))
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in given])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in given])
        draw = {"do_sample": False} if greedy else {"do_sample": True, "top_k": 0}
        with torch.no_grad():
            made = model.generate(ids, attention_mask=mask, max_new_tokens=new, pad_token_id=0, **draw)
        return [row[width - len(prompt) :].tolist() for row, prompt in zip(made, given)]

    return {"transformers": run}


def prompts(batch: int) -> list[list[int]]:
    """Different ones, of 8 to 32 tokens."""
    return [[(17 * row + place) % 256 for place in range(8 + 7 * row % 25)] for row in range(batch)]


def report(options: argparse.Namespace, found: dict[str, list[Row]]) -> None:
    """Print tables, or one object."""
    if options.json:
        print_json(found, preset=options.preset)
        return
    what = f"{options.preset}, {options.pipe} pipe x {options.tensor} tensor, {os.cpu_count()} cores, "
    what += "greedy" if options.greedy else "drawn"
    for (title, rows), batch in zip(found.items(), options.batches, strict=True):
        show_batch(f"{what}, {title}", rows, batch)


def show_batch(title: str, rows: list[Row], batch: int) -> None:
    """Print the table of one number of sequences."""
    theirs = next((row.times for row in rows if row.name == "transformers"), [])
    columns: dict[str, Callable[[Row], str]] = {
        "ms a step": lambda row: spread([1e3 * each for each in row.times], ".1f"),
        "tokens a second": lambda row: f"{batch / row.step:,.0f}",
        "of transformers' time": lambda row: beside(row.times, theirs),
    }
    show(title, rows, columns)


if __name__ == "__main__":
    main()
