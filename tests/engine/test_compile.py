"""Compiled layers: gradients and steps equal those of uncompiled layers and of one process, and graphs are run.

The backend is aot_eager, which traces and differentiates graphs as inductor does, and compiles no kernels.
"""

from __future__ import annotations

import copy
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import triax
from triax import Grid, PipelineModule
from triax.base.errors import ConfigError
from triax.compat.deepspeed.config.to_options import notes_of, parse_config
from triax.models.gpt import GPTConfig, GPTLoss, gpt_layers
from triax.models.llama import LlamaConfig, llama_layers
from triax.models.mixtral import MixtralConfig, mixtral_layers

from support.differences import largest
from support.module_training import CLIP, net
from support.module_training import microbatch as module_microbatch
from support.rank_checks import triax_warnings
from support.training import small_config

ON = {"enabled": True, "backend": "aot_eager"}
VOCABULARY, LENGTH, SAMPLES, STEPS = 24, 8, 8, 2
# Sizes of the axes that are not 1, and keys of the configuration; "model" and "chunks" are arguments of the model.
Case = dict[str, Any]
CASES: dict[str, Case] = {
    "1f1b": {"pipe": 2},
    "zb-v": {"pipe": 2, "pipeline": {"schedule": "zb-v"}},
    "zb-h1, recomputed, stage 2": {
        "pipe": 2,
        "data": 2,
        "pipeline": {"schedule": "zb-h1"},
        "activation_checkpointing": {"interval": 1},
        "zero_optimization": {"stage": 2},
    },
    "interleaved": {"pipe": 2, "pipeline": {"schedule": "interleaved"}},
    "stage 0": {"data": 2},
    "stage 1": {"data": 2, "zero_optimization": {"stage": 1}},
    "stage 2": {"data": 2, "zero_optimization": {"stage": 2}},
    "stage 3": {"data": 2, "zero_optimization": {"stage": 3}},
    "stage 3, pipe": {"pipe": 2, "data": 2, "zero_optimization": {"stage": 3}},
    "stage 3, recomputed": {
        "data": 2,
        "zero_optimization": {"stage": 3},
        "activation_checkpointing": {"interval": 2},
        "dropout": 0.2,
    },
    "offload": {"data": 2, "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}},
    "tensor": {"tensor": 2},
    "tensor, zb-v": {"pipe": 2, "tensor": 2, "pipeline": {"schedule": "zb-v"}},
    "sequence": {"tensor": 2, "sequence_parallel": True, "dropout": 0.2},
    "sequence, recomputed": {"tensor": 2, "sequence_parallel": True, "activation_checkpointing": {"interval": 1}},
    "context": {"context": 2},
    "experts": {"data": 2, "expert": 2, "model": "mixtral"},
    "llama": {"tensor": 2, "model": "llama", "zero_optimization": {"stage": 3}},
    "dropout": {"dropout": 0.2},
}
AXES = ("pipe", "data", "context", "tensor", "expert")
DEFAULT = "stage 3, recomputed"


def data(grid: Grid) -> Iterator[tuple[Tensor, Tensor]]:
    generator, share = torch.Generator().manual_seed(1), SAMPLES // grid.data.size
    while True:
        text = torch.randint(VOCABULARY, (SAMPLES, LENGTH + 1), generator=generator)
        for part in text[grid.data.rank * share : (grid.data.rank + 1) * share].split(2):
            yield part[:, :-1], part[:, 1:]


def made(case: Case, compiled: Any = None, sizes: Any = None) -> triax.PipelineEngine:
    """An engine of a case; ``sizes`` are the axes of another grid."""
    case = dict(case)
    axes = {axis: case.pop(axis, 1) for axis in AXES}
    grid = Grid(**(axes if sizes is None else sizes))
    options = {"sequence_parallel": case.pop("sequence_parallel", False)}
    common: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2}
    common |= {"num_attention_heads": 2, "max_position_embeddings": LENGTH}
    dropout, kind = case.pop("dropout", 0.0), case.pop("model", "gpt")
    llama: dict[str, Any] = {"num_key_value_heads": 2, "intermediate_size": 16}
    if kind == "gpt":
        layers = gpt_layers(GPTConfig(**common, dropout=dropout), **options)
    elif kind == "llama":
        layers = llama_layers(LlamaConfig(**common, **llama), **options)
    else:
        layers = mixtral_layers(MixtralConfig(**common, **llama, num_experts=2), **options)
    loss = GPTLoss(grid, vocab_size=VOCABULARY)
    model = PipelineModule(layers, grid=grid, loss_fn=loss, seed=3, dtype=torch.float64)
    config = small_config("AdamW", lr=1e-2, batch=SAMPLES, micro=2, clip=0.5, seed=5, **{} if sizes else case)
    return triax.initialize(model=model, config=config | ({} if compiled is None else {"compile": compiled}))[0]


def values(engine: triax.PipelineEngine) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor], Any]:
    """Losses, first gradients, last weights, and bytes sent."""
    batches, losses = data(engine.grid), []
    gradients: dict[str, Tensor] = {}
    for _ in range(STEPS):
        losses.append(engine.train_batch(batches).item())
        gradients = gradients or {k: v.clone() for k, v in engine.gather("gradients").items()}
    return losses, gradients, engine.gather(), engine.traffic_report()["sent"]


def largest_difference(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    assert found.keys() == wanted.keys()
    return largest((found[name] - wanted[name]).abs().max() for name in wanted)


def train_compiled_and_uncompiled(case: Case) -> tuple[Any, ...]:
    """On a rank: a case compiled and not; its differences, and the graphs."""
    import torch._dynamo

    torch._dynamo.reset()  # the process has run other tests
    losses, gradients, weights, sent = values(made(case))
    engine = made(case, ON)
    found = values(engine)
    assert found[0] == pytest.approx(losses, abs=1e-12)
    assert found[3] == sent
    assert largest_difference(found[1], gradients) < 1e-12
    assert largest_difference(found[2], weights) < 1e-10
    counts = engine.compilation
    assert counts is not None and engine.is_compiled
    ran = counts.runs
    evaluated = engine.eval_batch(data(engine.grid)).item()  # runs no graph
    assert counts.runs == ran
    return losses, gradients, weights, evaluated, (len(counts.layers), counts.graphs, counts.runs)


def require_equal_to_uncompiled(ranks: Any, case: Case, logged: Any = None) -> list[tuple[int, int, int]]:
    size = 1
    for axis in AXES[:-1]:
        size *= case.get(axis, 1)
    results = ranks(size, train_compiled_and_uncompiled, case, timeout=180)
    whole = dict.fromkeys(AXES, 1)
    losses, gradients, weights, _ = values(made(case, sizes=whole))
    for result in results:
        assert result[0] == pytest.approx(losses, abs=1e-10)
        assert largest_difference(result[1], gradients) < 1e-10
        assert largest_difference(result[2], weights) < 1e-10
    return [result[4] for result in results]


@pytest.mark.exhaustive
def test_compiled_layers_have_the_gradients_of_uncompiled_ones(ranks: Any) -> None:
    for layers, graphs, runs in require_equal_to_uncompiled(ranks, CASES[DEFAULT]):
        assert layers == 5  # embedding, positions, 2 blocks, norm; the head is the embedding
        assert layers <= graphs + 1 <= 3 * layers  # the two blocks share their graphs
        assert runs > layers * STEPS * 2  # the forward pass and the recomputation


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", CASES)
def test_compiled_layers_train_as_uncompiled_on_every_grid(ranks: Any, name: str) -> None:
    for layers, graphs, runs in require_equal_to_uncompiled(ranks, CASES[name]):
        assert graphs >= layers - 1 and runs >= layers * STEPS


# --------------------------------------------------------------------------------------------------- packed rows


def packed_rows(context: int) -> None:
    """On a rank: a Llama on packed rows of an odd length, compiled and not."""
    import torch._dynamo

    torch._dynamo.reset()  # the process has run other tests
    ids = torch.randint(VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    documents = torch.tensor([[0, 0, 0, 1, 1, 1, 2], [0, 1, 1, 1, 1, 1, 1]])
    found = []
    for compiled in (None, ON):
        engine = made({"model": "llama", "context": context, "train_batch_size": 4}, compiled)
        batches = iter(lambda: ((ids[:, :-1], documents), ids[:, 1:]), None)
        losses = [engine.train_batch(batches).item() for _ in range(STEPS)]
        found.append((losses, engine.gather("gradients"), engine.gather()))
    counts = engine.compilation
    assert counts is not None and counts.graphs >= len(counts.layers) and counts.runs >= len(counts.layers) * STEPS * 2
    (losses, gradients, weights), (compiled_losses, compiled_gradients, compiled_weights) = found
    assert compiled_losses == pytest.approx(losses, abs=1e-12)
    assert largest_difference(compiled_gradients, gradients) < 1e-12
    assert largest_difference(compiled_weights, weights) < 1e-10


@pytest.mark.parametrize("context", [pytest.param(1, marks=pytest.mark.exhaustive), 2])
def test_compiled_rotary_layers_take_packed_rows(ranks: Any, context: int) -> None:
    ranks(context, packed_rows, context, timeout=180)


# ------------------------------------------------------------------------------------------------- plain modules


def module_trained(config: dict[str, Any], replicas: int = 1) -> tuple[dict[str, Tensor], Any]:
    """Gradients of a step of a plain module, of which each block has a frozen and an unused parameter."""
    import torch._dynamo

    torch._dynamo.reset()
    base = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, "gradient_clipping": CLIP}
    optimizer = {"type": "AdamW", "params": {"lr": 1e-2}}
    grid = Grid()
    engine = triax.initialize(model=net(), config={**base, "optimizer": optimizer, **config}, grid=grid)[0]
    for step in range(STEPS):
        for index in range(2):
            x, y = module_microbatch(step, index, grid.data.rank % replicas)
            engine.backward(((engine(x) - y) ** 2).mean())
            engine.step()
    return {**engine.gather(), **{f"d {k}": v for k, v in engine.gather("gradients").items()}}, engine.compilation


def counted(config: dict[str, Any]) -> tuple[dict[str, Tensor], tuple[list[str], int, int]]:
    found, counts = module_trained({**config, "compile": ON}, 1)
    return found, (counts.layers, counts.graphs, counts.runs)


@pytest.mark.parametrize(
    "config",
    [
        {"zero_optimization": {"stage": 3}, "activation_checkpointing": {"interval": 1}},
        *(pytest.param({"zero_optimization": {"stage": s}}, marks=pytest.mark.exhaustive) for s in range(4)),
    ],
)
def test_the_blocks_of_a_plain_module_are_compiled(ranks: Any, config: dict[str, Any]) -> None:
    """Both replicas compute the same microbatches, so their gradients are those of one process."""
    wanted, _ = module_trained({})
    for found, (layers, graphs, runs) in ranks(2, counted, config, timeout=120):
        assert largest_difference(found, wanted) < 1e-10
        again = 2 if "activation_checkpointing" in config else 1
        assert (layers, graphs, runs) == ([f"blocks.{i}" for i in range(3)], 1, 3 * 2 * STEPS * again)


# ------------------------------------------------------------------------------------------------ the key, and calls


def test_the_compile_key_turns_compilation_on_and_off() -> None:
    assert parse_config({"compile": True}).compile.enabled
    assert not parse_config({"compile": False}).compile.enabled
    assert not parse_config({"compile": {"deepcompile": False}}).compile.enabled
    assert "without enabled" in "".join(notes_of(parse_config({"compile": {"backend": "aot_eager"}})))


@pytest.mark.parametrize("granularity", ["selective", "matmul"])
def test_compiled_layers_refuse_recomputing_parts_of_a_layer(granularity: str) -> None:
    with pytest.raises(ConfigError, match=f"granularity is {granularity}, which recomputes parts"):
        made({"activation_checkpointing": {"granularity": granularity}}, compiled=True)


def calls() -> dict[str, Any]:
    """On a rank of its own: what calls of the engine do with compiled layers."""
    import torch._dynamo

    torch._dynamo.reset()
    found: dict[str, Any] = {}
    with pytest.raises(ConfigError, match=r"there is no backend none: give one of .*aot_eager"):
        made({}, {"enabled": True, "backend": "none"})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shutil.which", lambda name: None)
        with pytest.raises(
            ConfigError,
            match=r"needs a C\+\+ compiler on a CPU, and g\+\+ is not in the PATH: install it \(apt install g\+\+\)",
        ):
            made({}, True)

    plain, late = made({}), made({})
    late.compile("aot_eager", {"dynamic": False})
    first = late.compilation
    late.compile("aot_eager")  # no effect
    assert late.compilation is first is not None
    found["late"] = values(late)[0], values(plain)[0]
    found["runs"] = first.runs

    before = first.runs
    late.record_memory = True
    late.train_batch(data(late.grid))
    assert first.runs == before, "a mode that records operations would see none"
    assert late.memory_report()["held"]["activations"] > 0

    copied: Any = copy.deepcopy(late.module.layers["2"])
    x = torch.randn(2, LENGTH, 16, dtype=torch.float64)
    with torch.no_grad():
        copied.mlp.down.weight.zero_()
        copied.mlp.down.bias.zero_()
        copied.attention.out.weight.zero_()
        copied.attention.out.bias.zero_()
    assert torch.equal(copied(x), x), "a copy of a layer runs its own weights"
    assert first.runs == before + 1
    return found


@pytest.mark.exhaustive
def test_a_model_compiled_after_a_step_keeps_its_outputs(ranks: Any) -> None:
    (found,) = ranks(1, calls, timeout=180)
    assert found["late"][0] == pytest.approx(found["late"][1], abs=1e-12)
    assert found["runs"] > 0


class Uncompilable(nn.Module):
    """Layer that forbids the compiler to compile it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.compiler.disable(lambda: x * self.weight)()


def warnings_of_two_steps(schedule: str) -> list[str]:
    with triax_warnings() as found:
        model = PipelineModule([triax.LayerSpec(Uncompilable)] * 2, grid=Grid(), loss_fn=nn.functional.mse_loss)
        engine = triax.initialize(model=model, config=small_config(micro=2, schedule=schedule, compile=ON))[0]
        x = torch.ones(2, 4)
        for _ in range(2):
            engine.train_batch(iter([(x, 2 * x)]))
    return found


@pytest.mark.exhaustive
def test_layers_that_run_uncompiled_are_reported_once(ranks: Any) -> None:
    layers = [f"compile: layer layers.{i} ran uncompiled" for i in (0, 1)]
    for schedule, more in (("1f1b", []), ("zb-h1", ["compile: zb-h1 computes weight gradients apart"])):
        (found,) = ranks(1, warnings_of_two_steps, schedule, timeout=120)
        for wanted in [*layers, *more]:
            assert sum(each.startswith(wanted) for each in found) == 1, found


def with_inductor(folder: str) -> tuple[Any, Any, Any]:
    import os

    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
    case = CASES["stage 3, recomputed"] | {"data": 1}
    wanted = values(made(case))
    engine = made(case, True)
    return wanted, values(engine), engine.compilation and engine.compilation.runs


@pytest.mark.exhaustive
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs g++")
def test_inductors_kernels_give_the_gradients_of_plain_layers(ranks: Any, tmp_path: Path) -> None:
    ((wanted, found, runs),) = ranks(1, with_inductor, str(tmp_path), timeout=300)
    assert found[0] == pytest.approx(wanted[0], abs=1e-10)
    assert largest_difference(found[1], wanted[1]) < 1e-10
    assert runs > 0
