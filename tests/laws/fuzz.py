"""Random compositions of everything: each equals one process, or is refused with a clear message.

    python tests/laws/fuzz.py --seconds 600 --seed 1      draw cases for ten minutes
    python tests/laws/fuzz.py --case '{"grid": [2, 1, 1]}'   run one case again

A case is layers of torch's families x schedule x chunks x ZeRO stage and options x recomputation x ties x precision x
compression x offload x a grid of 1 to 8 ranks x generation: ``tests/support/compositions.py``. In float64 loss, every
gradient, norm and stepped weights equal those of plain PyTorch in one process to 1e-10. A case in half precision equals
the same case in one process as far as its dtype allows; one with lossy compression the same case on as many replicas
without other axes. Whatever is silent, or an error that triax did not raise in words of its own, is a finding.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
import sys
import tempfile
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

sys.path[:0] = [str(Path(__file__).parent.parent)]

import torch

from triax.pipe.schedules.registry import RECIPES
from triax.testing import pool
from triax.testing.pool import RankFailure, run_ranks

from support.compositions import DEFAULT, HALF, OPTIMIZERS, Case, describe, full, on_rank, plainly, whole
from support.shrink import shrink

GRIDS = [
    *([1, 1, 1], [2, 1, 1], [1, 2, 1], [1, 1, 2]),
    *([3, 1, 1], [1, 3, 1], [1, 1, 3]),
    *([4, 1, 1], [2, 2, 1], [2, 1, 2], [1, 2, 2], [1, 4, 1], [1, 1, 4]),
    *([2, 2, 2], [4, 2, 1], [2, 4, 1], [8, 1, 1], [1, 8, 1], [3, 2, 1], [1, 5, 1], [6, 1, 1]),
]
PLAIN = ["linear", "no_bias", "stack", "conv", "depthwise", "deconv", "conv2d", "layer_norm", "rms_norm", "group_norm"]
PLAIN += ["batch_norm", "attention", "encoder", "gru", "lstm", "rnn", "bilinear", "prelu", "weight_norm", "positions"]
PLAIN += ["bag", "activation", "checkpointed", "scale", "lists", "partly", "frozen", "in_place", "transposed"]
PLAIN += ["expanded", "custom", "spectrum", "tanh", "same", "relu_in_place", "sharded", "table", "head"]
UNUSUAL = ["rare", "cut", "in_place_input", "dropout"]
NESTS = ["tuple", "dict", "list", "views", "twice", "constants", "complex"]
SCHEDULES = [name for name in RECIPES if name != "forward"]


class Verdict(NamedTuple):
    """Outcome of a case: ``equal``, ``refused``, or a finding."""

    kind: str
    text: str = ""

    @property
    def finding(self) -> bool:
        return self.kind not in ("equal", "refused", "invalid")

    @property
    def signature(self) -> str:
        """The kind and the words of the text, without its numbers."""
        words = re.sub(r"rank \d+ \([^)]*\)|[\d.e+-]*\d[\d.e+-]*", "#", self.text)
        return f"{self.kind}: {words[:90]}"


# ------------------------------------------------------------------------------------------------------------ cases


def draw(choose: random.Random) -> Case:
    """Draw a case. Most can run; some must be refused."""
    case: Case = {"seed": choose.randrange(1000)}
    ranks = choose.choices((1, 2, 3, 4, 8), (2, 8, 3, 6, 1))[0]
    case["grid"] = choose.choice([g for g in GRIDS if math.prod(g) == ranks or (ranks == 8 and math.prod(g) > 4)])
    case["engine"] = choose.choices(("pipeline", "module", "optimizer"), (7, 2, 1))[0]
    if case["engine"] != "pipeline":
        case["grid"] = [1, case["grid"][0] * case["grid"][1], case["grid"][2]]
        if case["engine"] == "optimizer":
            case["grid"] = [1, math.prod(case["grid"]), 1]
    case["precision"] = choose.choices(("fp64", "fp32", "bf16", "fp16", "autocast"), (14, 1, 2, 2, 1))[0]
    case["micro"], case["accumulation"] = choose.choice((1, 1, 2, 3)), choose.choice((1, 2, 3, 4, 6))
    case["steps"] = choose.choice((1, 2, 2))
    case["optimizer"] = choose.choice([*OPTIMIZERS]) if case["precision"] == "fp64" else "SGD"
    case["clip"] = choose.choice((0.0, 0.3, 1e9))
    if case["engine"] == "pipeline":
        _draw_pipeline(case, choose)
    else:
        case["layers"] = _draw_layers(choose, choose.randint(1, 5), case)
    if case["engine"] == "optimizer":
        _draw_plain_loop(case, choose)
    else:
        case["config"] = _draw_config(case, choose)
    recipe = RECIPES.get(case.get("schedule", ""), RECIPES["forward"])
    if case.get("model") and recipe.sliced and not case.get("then") and choose.random() < 0.5:
        slices = choose.choice((2, 3))
        if case["schedule"] != "interleaved" or case["accumulation"] * slices % case["grid"][0] == 0:
            case["slices"] = slices
    return {key: value for key, value in case.items() if value != DEFAULT[key]}


def _draw_pipeline(case: Case, choose: random.Random) -> None:
    case["schedule"] = choose.choice(SCHEDULES) if choose.random() < 0.98 else "auto"
    recipe = RECIPES.get(case["schedule"], RECIPES["gpipe"])
    fits = [chunks for chunks in (1, 2, 3, 4) if recipe.accepts(chunks) and chunks * case["grid"][0] <= 8]
    case["chunks"] = choose.choice(fits) if fits and choose.random() < 0.95 else choose.randint(1, 2)
    stages = case["chunks"] * case["grid"][0]
    case["partition"] = choose.choice(("uniform", "uniform", "parameters"))
    case["meta"] = choose.random() < 0.15
    if choose.random() < 0.2:
        case["model"] = _draw_model(choose, stages)
        case["generate"] = choose.random() < 0.4 and case["precision"] == "fp64"
    else:
        case["layers"] = _draw_layers(choose, choose.randint(stages, stages + 4), case)
        case["loss"] = choose.choice(("mean", "summed"))
        case["ragged"] = choose.random() < 0.2
    if choose.random() < 0.12 and case["precision"] == "fp64":
        total = case["accumulation"] * case["grid"][1]
        grid = choose.choice([g for g in GRIDS[:13] if total % g[1] == 0 and g[0] <= len(case.get("layers", "1234"))])
        names = [name for name in SCHEDULES if RECIPES.get(name, RECIPES["gpipe"]).accepts(1)]
        case["then"] = {"grid": grid, "schedule": choose.choice(names), "stage": choose.randrange(4)}
        case["steps"] = 2


def _draw_model(choose: random.Random, stages: int) -> dict[str, Any]:
    family = choose.choice(("gpt", "llama"))
    model: dict[str, Any] = {
        "family": family,
        "layers": max(2, stages - 3),
        "tie_word_embeddings": choose.random() < 0.5,
    }
    model["sequence_parallel"] = choose.random() < 0.4
    if choose.random() < 0.3:
        model["dropout"] = 0.2
    if family == "llama":
        model["num_key_value_heads"] = choose.choice((1, 2, 4))
        model["qkv_bias"], model["qk_norm"] = choose.random() < 0.3, choose.random() < 0.3
    return model


def _draw_layers(choose: random.Random, count: int, case: Case) -> list[list[Any]]:
    layers: list[list[Any]] = []
    case["inputs"] = choose.choices(("float", "tuple", "dict", "ids"), (6, 1, 1, 3))[0]
    if case["inputs"] == "ids":
        layers.append(["sparse_tokens" if choose.random() < 0.05 else "tokens"])
    pool = PLAIN + (UNUSUAL if choose.random() < 0.3 else [])
    if case["precision"] not in ("fp64", "fp32"):
        pool = [name for name in pool if name not in ("rare", "batch_norm", "in_place_input")]
    ties = choose.random() < 0.35
    nested = case["inputs"] in ("tuple", "dict")
    while len(layers) < count:
        shape = choose.random()
        if shape < 0.12 and len(layers) + 2 <= count:
            if nested:
                layers.append(["merge"])
            layers.append([f"split_{choose.choice(NESTS)}"])
            nested = True
            if layers[-1][0] == "split_views":
                layers.append(["merge"])
                nested = False
        elif nested and shape < 0.4:
            layers.append(["merge"])
            nested = False
        elif ties and shape < 0.6:
            kind = choose.random()
            if kind < 0.5:
                layers.append([choose.choice(("table", "head")), "w"])
            elif kind < 0.8:
                layers.append(["linear", "a"])
            else:
                layers.append(["stack", "built", choose.randrange(2)])
        else:
            layers.append([choose.choice(pool)])
    return layers


def _draw_config(case: Case, choose: random.Random) -> dict[str, Any]:
    config: dict[str, Any] = {}
    stage = choose.choice((0, 1, 1, 2, 2, 3, 3, 3))
    zero: dict[str, Any] = {"stage": stage} if stage else {}
    options: list[tuple[str, Any]] = [
        ("reduce_bucket_size", choose.choice((1, 50, 300))),
        ("reduce_scatter", False),
        ("reduce_each_microbatch", False),
        ("allgather_partitions", False),
        ("allgather_bucket_size", choose.choice((1, 64, 500))),
        ("overlap_comm", False),
        ("stage3_keep_gathered", True),
        ("stage3_prefetch_bucket_size", choose.choice((0, 1, 200))),
        ("stage3_param_persistence_threshold", choose.choice((8, 64, 10**6))),
        ("stage3_max_live_parameters", choose.choice((0, 100))),
        ("stage3_max_reuse_distance", choose.choice((10, 10**6))),
        ("sub_group_size", choose.choice((1, 30, 1000))),
        ("mics_shard_size", choose.choice([n for n in (1, 2, 4) if case["grid"][1] % n == 0])),
        ("round_robin_gradients", True),
    ]
    zero |= dict(choose.sample(options, choose.choice((0, 1, 2, 4))))
    where = choose.choices((None, "cpu", "nvme"), (7, 2, 1))[0]
    for key in ("offload_optimizer", "offload_param") if where else ():
        if key == "offload_optimizer" or stage == 3:
            zero[key] = {"device": where, **({"nvme_path": "SCRATCH"} if where == "nvme" else {})}
    if choose.random() < 0.04:
        zero |= choose.choice(
            [
                {"zero_hpz_partition_size": 2},
                {"zero_quantized_weights": True},
                {"zero_quantized_gradients": True},
            ]
        )
    if zero:
        config["zero_optimization"] = zero
    if choose.random() < 0.35 and case["engine"] == "pipeline":
        config["activation_checkpointing"] = choose.choice(
            [
                {"interval": choose.randint(1, 3)},
                {"granularity": choose.choice(("full", "matmul", "selective"))},
                {"number_checkpoints": choose.randint(1, 4)},
                {"interval": 1, "partition_activations": True},
                {"interval": 1, "cpu_checkpointing": True},
                {"granularity": "full", "preserve_rng_state": False, "profile": True},
                {"number_checkpoints": 4, "partition_activations": True, "contiguous_memory_optimization": True},
            ]
        )
    if choose.random() < 0.14:
        config |= choose.choice(
            [
                {"communication_data_type": choose.choice(("fp32", "bf16", "fp16"))},
                {"gradient_compression": {"type": "topk", "ratio": choose.choice((1.0, 0.2))}},
                {"gradient_compression": {"type": "powersgd", "rank": choose.choice((1, 2)), "min_compression": 1.0}},
                {"gradient_compression": {"type": "topk", "start_step": 9}},
                {"sparse_gradients": True},
                {"prescale_gradients": True},
                {"gradient_predivide_factor": 3.0},
                {"local_updates": {"type": "local_sgd", "every": choose.randint(1, 2)}},
                {"local_updates": {"type": "diloco", "every": 1}},
            ]
        )
    if choose.random() < 0.1:
        config |= choose.choice(
            [
                {"wall_clock_breakdown": True, "steps_per_print": 1},
                {"json_monitor": {"enabled": True, "output_path": "SCRATCH"}},
                {"timeline": {"step": 1, "file": "SCRATCH/timeline.json"}},
                {"comms_logger": {"enabled": True}},
                {"nan_loss": "skip"},
                {"flops_profiler": {"enabled": True, "profile_step": 0, "output_file": "SCRATCH/flops.txt"}},
                {"checkpoint": {"dir": "SCRATCH/saved", "every": 1, "keep": 1, "async": True}},
                {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 3, "warmup_type": "linear"}}},
            ]
        )
    return config


def _draw_plain_loop(case: Case, choose: random.Random) -> None:
    case["config"] = {"stage": choose.randrange(4), "bucket_size": choose.choice((1, 50, 2**20))}
    if choose.random() < 0.2:
        case["config"]["keep_gathered"] = True
    if choose.random() < 0.3:
        case["config"]["shard_size"] = choose.choice([n for n in (1, 2, 4) if case["grid"][1] % n == 0])
    if choose.random() < 0.2:
        case["compression"] = choose.choice(
            ["bf16", {"type": "topk", "ratio": 1.0}, {"type": "topk", "ratio": 0.3}, {"type": "powersgd", "rank": 1}]
        )


# ---------------------------------------------------------------------------------------------------------- the law


def law(case: Case) -> tuple[str, float]:
    """Return with what a case is compared, ``plain``, ``alone`` or ``replicas``, and how closely.

    1e-10: equal in float64. Otherwise the limit of the relative difference of all gradients together.
    """
    config, precision = case["config"], case["precision"]
    zero = config.get("zero_optimization", {})
    compression = case["compression"] or config.get("gradient_compression") or {}
    kind = compression if isinstance(compression, str) else compression.get("type", "")
    dropped = any("dropout" in layer for layer in case["layers"]) or bool((case["model"] or {}).get("dropout"))
    scheduled = "scheduler" in config
    if "local_updates" in config:
        return "replicas", 1e-10 if precision == "fp64" else 0.05
    exact = kind == "topk" and compression.get("ratio") == 1.0
    lossy = kind in ("topk", "powersgd") and not exact and not compression.get("start_step")
    if (zero.get("zero_quantized_gradients") or zero.get("zero_quantized_weights")) and not lossy:
        return "alone" if dropped or scheduled or precision in HALF else "plain", 0.5
    if lossy:
        return "replicas", 1e-8 if precision == "fp64" else 0.05
    if precision in (*HALF, "autocast"):
        return "alone", 0.05
    low = config.get("communication_data_type", "fp32" if kind != "bf16" else kind)
    near = {"fp64": 1e-10, "fp32": 1e-3}[precision] if low == "fp32" else 0.05
    if config.get("communication_data_type") == "fp32" and precision == "fp64":
        near = 1e-5
    return "alone" if dropped or scheduled else "plain", near


def reference(case: Case, which: str, scratch: str) -> dict[str, Any]:
    """Return what the law compares a case with."""
    if which == "plain":
        return plainly(case)
    data = case["grid"][1]
    simple = {
        **case,
        "chunks": 1,
        "slices": 1,
        "schedule": "gpipe",
        "partition": "uniform",
        "meta": False,
        "then": None,
    }
    keep = ("gradient_compression", "local_updates", "sparse_gradients", "scheduler", "prescale_gradients")
    simple["config"] = {key: value for key, value in case["config"].items() if key in keep}
    if case["engine"] == "optimizer":
        simple["config"] = {"stage": 0}
    if which == "replicas":
        compression = case["compression"] or case["config"].get("gradient_compression") or {}
        shards = "powersgd" in str(compression)  # which approximates each shard of a tensor axis by itself
        simple["grid"] = [1, data, case["grid"][2] if shards else 1]
    else:
        simple |= {"grid": [1, 1, 1], "accumulation": case["accumulation"] * data}
        for key in ("gradient_compression", "sparse_gradients"):
            simple["config"].pop(key, None)
    return _run(simple, 0, case["steps"], scratch=scratch)[0]


# Errors of torch's own under autocast on a CPU, in plain PyTorch too: oneDNN's LSTM needs a processor that has products
# in half precision, and F.bilinear casts nothing.
_TORCHS_OWN = re.compile("could not create a primitive descriptor|must have the same dtype, got input1")


_EXPLODED = 1e12  # largest norm of gradients: products of layers have then multiplied the rounding as much


def judge(case: Case) -> Verdict:
    """Run a case and compare it with what the law says. A case that torch cannot run is invalid."""
    try:
        verdict = _judge(full(case))
    except Exception as error:
        if _TORCHS_OWN.search(str(error)):
            return Verdict("invalid", str(error))
        raise
    mine = verdict.kind == "equal" or not _TORCHS_OWN.search(verdict.text)
    return verdict if mine else Verdict("invalid", verdict.text)


def _judge(case: Case) -> Verdict:
    which, near = law(case)
    with tempfile.TemporaryDirectory(prefix="triax-fuzz-", ignore_cleanup_errors=True) as folder:
        try:
            plain = reference(case, "plain", folder)  # a case that torch cannot run is none
        except Exception as error:
            return Verdict("invalid", f"{type(error).__name__}: {error}")
        if (largest := max(norm for _, norm, *_ in plain["steps"])) > _EXPLODED:
            return Verdict("invalid", f"the gradients' norm is {largest:.0e}, where rounding alone is a large error")
        try:
            found = _on_grid(case, folder)
        except RankFailure as failure:
            return _failed(failure)
        except Exception as error:
            return Verdict("raw", json.dumps(describe(error)))
        if which != "plain":
            try:
                wanted = reference(case, which, f"{folder}/reference")
            except RankFailure as failure:
                return Verdict("uneven", f"runs, but not {which}: {_failed(failure).text}")
        else:
            wanted = plain
    return compare(case, found, wanted, near)


def _on_grid(case: Case, folder: str) -> list[dict[str, Any]]:
    then, steps = case["then"], case["steps"]
    if then is None:
        return _run(case, 0, steps, scratch=folder)
    saved = f"{folder}/checkpoints"
    first = _run(case, 0, 1, save=saved, scratch=folder)
    config = {**case["config"], "zero_optimization": {"stage": then.get("stage", 0)}}
    config.pop("activation_checkpointing", None)
    total = case["accumulation"] * case["grid"][1]
    second = {
        **case,
        "grid": then.get("grid", [1, 1, 1]),
        "accumulation": total // then.get("grid", [1, 1, 1])[1],
        "schedule": then.get("schedule", "gpipe"),
        "chunks": 1,
        "config": config,
        "partition": "uniform",
    }
    last = _run(second, 1, steps, load=saved, scratch=folder)
    last[0] |= {"initial": first[0]["initial"], "steps": first[0]["steps"] + last[0]["steps"]}
    for rank in last[1:]:
        rank["losses"] = first[0]["losses"] + rank["losses"]
    last[0]["losses"] = first[0]["losses"] + last[0]["losses"]
    return last


def _run(case: Case, first: int, last: int, **folders: str) -> list[dict[str, Any]]:
    """Train on the grid of a case; whole tensors are in what rank 0 found."""
    return whole(case["grid"], run_ranks(math.prod(case["grid"]), on_rank, case, first, last, timeout=60, **folders))


def _failed(failure: RankFailure) -> Verdict:
    """Return what the reports of a failed job say."""
    errors = []
    for report in failure.reports:
        if report.kind == "died":
            return Verdict("died", f"rank {report.rank} {report.summary}")
        if report.kind == "raised" and "CaseError: {" in report.summary:
            errors.append(json.loads(report.summary.partition("CaseError: ")[2]))
        elif report.kind == "raised":
            return Verdict("raw", report.summary)
    stuck = [report for report in failure.reports if report.kind == "stuck"]
    if not errors:
        return Verdict("hang", f"ranks {[report.rank for report in stuck]}: {stuck[0].text[-300:]}")
    roots = [error for error in errors if error["clear"]] or [e for e in errors if not e["follows"]] or errors
    first = errors[0] if errors[0]["clear"] or not roots[0]["clear"] else roots[0]
    alone = len(stuck) + sum(report.kind == "returned" for report in failure.reports)
    text = f"{first['type']} at {first['at']}: {first['text']}"
    raw = [error for error in errors if not error["clear"] and not error["follows"]]
    if raw and not first["clear"]:
        return Verdict("raw", f"{raw[0]['type']} at {raw[0]['at']}: {raw[0]['text']}")
    if alone or raw:
        others = f"; {alone} ranks go on" if alone else f"; another rank: {raw[0]['type']}: {raw[0]['text'][:200]}"
        return Verdict("uneven", f"one rank alone refuses: {text}{others}")
    return Verdict("refused", text)


# ------------------------------------------------------------------------------------------------------- comparison


def compare(case: Case, ranks: list[dict[str, Any]], wanted: dict[str, Any], near: float) -> Verdict:
    """Compare what the ranks saw with the reference."""
    found = ranks[0]
    for rank in ranks[1:]:
        same = repr(rank.get("losses")) == repr(found.get("losses"))  # an overflow's norm is nan
        if "local_updates" not in case["config"] and not same:
            return Verdict("wrong", f"ranks disagree: losses and norms {rank.get('losses')} and {found.get('losses')}")
    if "local_updates" not in case["config"]:
        known: dict[tuple[int, str], str] = {}
        for rank in ranks:
            for name, each in rank["digests"].items():
                if known.setdefault((rank["tensor"], name), each) != each:
                    return Verdict("wrong", f"replicas or ties have drifted apart: {name}")
        if any(rank["generated"] != found["generated"] for rank in ranks):
            return Verdict("wrong", "ranks generate different tokens")
    for name, tensor in wanted["initial"].items():
        if name not in found["initial"]:
            return Verdict("wrong", f"there is no parameter {name}")
        if not torch.equal(found["initial"][name].double(), _rounded(case, tensor).double()):
            return Verdict("wrong", f"{name} starts otherwise than on one process")
    if found["skipped"] != wanted["skipped"]:
        return Verdict("wrong", f"{found['skipped']} skipped steps, and one process {wanted['skipped']}")
    for number, (step, want) in enumerate(zip(found["steps"], wanted["steps"], strict=True)):
        problem = _differ(step, want, near, number, _amplification(case))
        if problem:
            return Verdict("wrong", f"step {number}: {problem}")
    return Verdict("equal")


def _rounded(case: Case, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(HALF[case["precision"]]) if case["precision"] in HALF and tensor.is_floating_point() else tensor


def _amplification(case: Case) -> float:
    """Return by how much an optimizer may amplify the rounding of a gradient that is 0, such as a key bias's."""
    options = OPTIMIZERS[case["optimizer"]]
    return options["lr"] / options["eps"] if "eps" in options else options["lr"]


def _differ(step: Any, want: Any, near: float, number: int, amplification: float) -> str | None:
    loss, norm, gradients, weights = step
    tight = near <= 1e-5
    limit = near if tight else near * (1 + number)
    if not math.isclose(loss, want[0], rel_tol=limit, abs_tol=limit / 100):
        return f"loss {loss!r}, not {want[0]!r}"
    if not math.isfinite(norm) and not math.isfinite(want[1]):  # both skipped an overflow
        return None
    if not math.isclose(norm, want[1], rel_tol=limit * (1 if tight else 2), abs_tol=limit / 100):
        return f"norm {norm!r}, not {want[1]!r}"
    if not tight and number:
        return None
    whole = max(float(sum(float(t.double().square().sum()) for t in want[2].values())) ** 0.5, 1e-6)
    for what, mine, theirs in (("gradient", gradients, want[2]), ("weight", weights, want[3])):
        if missing := theirs.keys() ^ mine.keys():
            return f"{what}s differ in {sorted(missing)[:3]}"
        for name, tensor in theirs.items():
            a, b = mine[name].double(), tensor.double()
            if a.shape != b.shape:
                return f"{what} of {name} has shape {tuple(a.shape)}, not {tuple(b.shape)}"
            gap, size = float((a - b).norm()), float(b.norm())
            rounding = 0.0 if what == "gradient" else 10 * whole * sys.float_info.epsilon * amplification
            if not gap <= rounding + limit * (size + (whole if what == "gradient" else 1.0) * (0.1 if tight else 0.5)):
                return f"{what} of {name} differs by {gap:.3g} of {size:.3g}"
    return None


# ---------------------------------------------------------------------------------------------------------- program


def run(seconds: float, seed: int, cases: int | None = None, shrinking: bool = True) -> tuple[Counter[str], list[str]]:
    """Draw and judge cases until the time is over; the counts by outcome, and the findings."""
    counts: Counter[str] = Counter()
    refusals: Counter[str] = Counter()
    findings: dict[str, str] = {}
    pool.GRACE = 30.0  # under load the ranks of one case are seconds apart
    start = time.monotonic()
    number = 0
    while (cases is None or number < cases) and time.monotonic() - start < seconds:
        case = draw(random.Random(f"{seed}/{number}"))
        number += 1
        verdict = judge(case)
        counts[verdict.kind] += 1
        if verdict.kind == "refused":
            refusals[verdict.signature] += 1
        if not verdict.finding or verdict.signature in findings:
            continue
        if shrinking:
            case = shrink(case, DEFAULT, partial(_again, verdict.signature), tries=40)
        findings[verdict.signature] = report(case, verdict)
        print(findings[verdict.signature], flush=True)
    spent = time.monotonic() - start
    print(f"fuzz: {number} cases in {spent:.0f} s (seed {seed}): {_counted(counts)}")
    for text, count in refusals.most_common():
        print(f"  {count:4} {text}")
    return counts, [*findings.values()]


def _counted(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in counts.most_common()) or "none"


def report(case: Case, verdict: Verdict) -> str:
    """Return a finding as text, with the command that repeats it."""
    return f"{verdict.kind.upper()}: {verdict.text}\n  python tests/laws/fuzz.py --case '{json.dumps(case)}'"


def _again(signature: str, case: Case) -> bool:
    return judge(case).signature == signature


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int)
    parser.add_argument("--case", help="one case, as JSON")
    parser.add_argument("--no-shrink", action="store_true")
    options = parser.parse_args()
    if options.case:
        pool.GRACE = 30.0
        verdict = judge(json.loads(options.case))
        print(verdict.kind, verdict.text)
        return int(verdict.finding)
    _, findings = run(options.seconds, options.seed, options.cases, not options.no_shrink)
    return int(bool(findings))


if __name__ == "__main__":
    from laws import fuzz  # so that ranks find its functions under their module's name

    sys.exit(fuzz.main())
