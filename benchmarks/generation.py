"""Tokens a second: the cache beside the whole forward for each token, and beside transformers.

    python benchmarks/generation.py                                   # bytes-small, one process
    python benchmarks/generation.py --preset bytes-medium --pipe 2    # the same model on two stages

Every row continues the same prompts of 4 tokens to the model's last position, drawing from all of the vocabulary.
Before anything is timed, the greedy tokens of each are compared in float64: were they not the same, it would fail.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

PROMPT = 4


def main() -> None:
    """Measure here, or on the ranks that this starts."""
    from triax.grid.environment import read_environment
    from triax.launcher.launch import launch

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="bytes-small", help="of GPTConfig (bytes-small)")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32], help="sequences at once (1 8 32)")
    parser.add_argument("--pipe", type=int, default=1, help="stages (1)")
    parser.add_argument("--tensor", type=int, default=1, help="shards (1)")
    parser.add_argument("--rounds", type=int, default=3, help="of which the best counts (3)")
    parser.add_argument("--only", nargs="+", help="triax, 'without a cache', transformers: some of them")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    processes = options.pipe * options.tensor
    if processes > 1 and read_environment() is None:
        sys.exit(launch(measure, options, ranks=processes))
    measure(options)


def measure(options: argparse.Namespace) -> None:
    """Measure generation on this rank."""
    import torch

    import triax
    from triax.models.gpt import GPTConfig, gpt_layers

    if options.pipe * options.tensor == 1:
        torch.set_num_threads(1)  # for as many cores as a rank would have
    grid = triax.Grid(pipe=options.pipe, tensor=options.tensor)
    config = GPTConfig.preset(options.preset)
    new = config.max_position_embeddings - PROMPT
    module = triax.PipelineModule(gpt_layers(config), grid=grid).eval()
    for parameter in module.parameters():
        parameter.data *= 3  # at their initial size, all logits are nearly alike

    def cached(batch: int, greedy: bool) -> Any:
        engine = engines.setdefault(batch, triax.init_inference(module, max_batch=batch))
        return engine.generate(prompts(batch), new, temperature=0.0 if greedy else 1.0)

    def whole(batch: int, greedy: bool) -> Any:
        ids = torch.tensor(prompts(batch))
        with torch.no_grad():
            for _ in range(new):
                logits = module(ids)[:, -1]
                drawn = torch.multinomial(logits.softmax(-1), 1) if not greedy else logits.argmax(-1, keepdim=True)
                ids = torch.cat([ids, drawn], dim=1)
        return ids.tolist()

    engines: dict[int, triax.InferenceEngine] = {}
    contenders: dict[str, Callable[[int, bool], Any]] = {"triax": cached}
    if grid.size == 1:
        contenders |= {"without a cache": whole} | theirs(module, new)
    module.double()
    contenders = {name: run for name, run in contenders.items() if name in (options.only or contenders)}
    answers = [run(2, True) for run in contenders.values()]
    assert all(answer == answers[0] for answer in answers), "the greedy tokens differ"
    module.float()
    engines.clear()

    rows = []
    for batch in options.batches:
        seconds: dict[str, list[float]] = {name: [] for name in contenders}
        for _ in range(options.rounds):  # in turns: what else the machine does hits all of them
            for name, run in contenders.items():
                begin = time.perf_counter()
                run(batch, False)
                seconds[name].append(time.perf_counter() - begin)
        rows += [
            {"name": name, "batch": batch, "tokens_per_second": batch * new / min(took)}
            for name, took in seconds.items()
        ]
    if grid.rank == 0:
        report(options, rows)
    grid.close()


def theirs(module: Any, new: int) -> dict[str, Callable[[int, bool], Any]]:
    """transformers' own generate of the same model, if it is installed."""
    import torch

    try:
        import transformers
    except ImportError:
        return {}
    from triax.models.huggingface.save import save_hf

    with tempfile.TemporaryDirectory() as folder:
        save_hf(module, folder)
        model = transformers.GPT2LMHeadModel.from_pretrained(folder).eval()
    model.generation_config.eos_token_id = None

    def run(batch: int, greedy: bool) -> Any:
        model.double() if greedy else model.float()
        ids = torch.tensor(prompts(batch))
        draw = {"do_sample": False} if greedy else {"do_sample": True, "top_k": 0}
        made = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, pad_token_id=0, **draw)
        return made.tolist()

    return {"transformers": run}


def prompts(batch: int) -> list[list[int]]:
    """Different ones."""
    return [[(17 * row + place) % 256 for place in range(PROMPT)] for row in range(batch)]


def report(options: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    """On the terminal, or as JSON."""
    if options.json:
        print(json.dumps({"preset": options.preset, "rows": rows}))
        return
    print(f"{options.preset}, {options.pipe} pipe x {options.tensor} tensor, {os.cpu_count()} cores: tokens a second")
    for row in rows:
        print(f"{row['name']:>16}  batch {row['batch']:>3}  {row['tokens_per_second']:>8,.0f}")


if __name__ == "__main__":
    main()
