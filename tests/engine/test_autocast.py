"""``torch_autocast`` and ``amp``: gradients against plain PyTorch under the same ``torch.autocast`` in one process.

Bitwise where the same products are computed in the same order. Elsewhere to a stated rounding, and never further from
the float64 gradients than plain autocast is by more than that.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import triax
from triax import Grid, LayerSpec, PipelineModule
from triax.base.errors import ConfigError
from triax.models.gpt import GPTConfig, gpt_layers

from support.differences import largest
from support.reference import gpt_logits
from support.toys import error_text
from support.training import small_config

VOCABULARY, LENGTH, WIDTH, LAYERS, HEADS, MICRO, COUNT = 48, 8, 32, 4, 4, 2, 4
ROUNDING = 2.0**-8  # of bfloat16, between neighbours
Gradients = dict[str, Tensor]


def loss_fn(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def model(grid: Grid, tie: bool = False, chunks: int = 1, loss: Any = loss_fn, **more: Any) -> PipelineModule:
    shape = GPTConfig(
        vocab_size=VOCABULARY,
        max_position_embeddings=LENGTH,
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        tie_word_embeddings=tie,
        initializer_range=0.2,
    )
    return PipelineModule(
        gpt_layers(shape, sequence_parallel=more.pop("sequence_parallel", False)),
        grid=grid,
        loss_fn=loss,
        chunks=chunks,
        partition="uniform",
        **more,
    )


def batch() -> list[tuple[Tensor, Tensor]]:
    ids = torch.randint(VOCABULARY, (MICRO * COUNT, LENGTH + 1), generator=torch.Generator().manual_seed(3))
    return [(part[:, :-1], part[:, 1:]) for part in ids.split(MICRO)]


def plain(weights: Gradients, dtype: torch.dtype | None, scale: float = 1.0) -> tuple[float, Gradients]:
    """The mean loss over the microbatches, and its gradients: torch's functions alone; float64 without a dtype."""
    kind = torch.float32 if dtype is not None else torch.float64
    w = {name: value.to(kind, copy=True).requires_grad_() for name, value in weights.items()}
    total = 0.0
    for ids, labels in batch():
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            logits = gpt_logits(w, ids, LAYERS, HEADS, attend=fused)
            loss = F.cross_entropy((logits.float() if dtype else logits).flatten(0, 1), labels.flatten())
        (loss * scale).backward()
        total += loss.item()
    return total / COUNT, {name: value.grad / (COUNT * scale) for name, value in w.items() if value.grad is not None}


def fused(q: Tensor, k: Tensor, v: Tensor, _: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)


class Stepped(NamedTuple):
    """Values of one step on a grid, and those of one process under plain autocast.

    ``plain_*`` are computed on rank 0, where as many threads compute: a norm's sums depend on that.
    """

    initial: Gradients
    loss: float
    gradients: Gradients
    dtypes: set[torch.dtype]  # of the parameters
    scale: float | None
    plain_loss: float
    plain_gradients: Gradients
    unscaled: Gradients  # of the plain loss without the scale


def stepped(
    sizes: dict[str, Any],
    schedule: str = "1f1b",
    stage: int = 0,
    chunks: int = 1,
    tie: bool = False,
    vocabulary: bool = False,
    autocast: Any = None,
    model_options: Any = None,
    **config: Any,
) -> Stepped | None:
    """Take one step on a grid; rank 0 returns its values."""
    grid = Grid(**sizes, timeout=60)
    loss: Any = loss_fn
    if vocabulary:  # sharded over the tensor axis
        loss = triax.NextTokenLoss(grid, vocab_size=VOCABULARY)
    module = model(grid, tie, chunks, loss, **(model_options or {}))
    made, *_ = triax.initialize(
        model=module,
        config={
            "train_batch_size": MICRO * COUNT,
            "train_micro_batch_size_per_gpu": MICRO,
            "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
            "zero_optimization": {"stage": stage, "reduce_bucket_size": 4000},
            "pipeline": {"schedule": schedule},
            **(autocast or {"torch_autocast": {"enabled": True}}),
            **config,
        },
    )
    initial = made.gather()
    share = COUNT // grid.data.size
    mine = batch()[grid.data.rank * share : (grid.data.rank + 1) * share]
    value = made.train_batch(iter(mine)).item()
    dtypes = {p.dtype for p in made.module.parameters()}
    gradients, scale = made.gather("gradients"), made.loss_scale()
    if grid.rank:
        return None
    dtype = torch.bfloat16 if scale is None else torch.float16
    wanted, unscaled = plain(initial, dtype, scale or 1.0), plain(initial, dtype)[1] if scale else {}
    return Stepped(initial, value, gradients, dtypes, scale, *wanted, unscaled)


def largest_relative_difference(found: Gradients, wanted: Gradients) -> float:
    """The largest difference of a gradient, by the norm of that gradient."""
    assert found.keys() == wanted.keys()
    return largest((found[n] - w).norm() / w.norm() for n, w in wanted.items())


def assert_bitwise(found: Gradients, wanted: Gradients) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert found[name].dtype == torch.float32
        assert torch.equal(found[name], value), f"{name}: {(found[name] - value).abs().max()}"


def assert_as_near_as_plain_autocast(made: Stepped) -> None:
    """Assert: no further from plain autocast than that is from float64, and as near to float64 as that is."""
    found, narrow = made.gradients, made.plain_gradients
    truth_loss, truth = plain(made.initial, None)
    assert made.loss == pytest.approx(made.plain_loss, rel=ROUNDING)
    assert made.loss == pytest.approx(truth_loss, rel=ROUNDING)
    assert largest_relative_difference(found, narrow) < largest_relative_difference(narrow, truth)
    nothing = dict.fromkeys(truth, torch.zeros(()))
    error, theirs, whole = (
        torch.stack([(a[n] - b[n]).double().norm() for n in truth]).norm()
        for a, b in ((found, truth), (narrow, truth), (truth, nothing))
    )
    assert error < theirs + ROUNDING / 4 * whole


# ---------------------------------------------------------------------------------------------- the pipe executor


@pytest.mark.parametrize(
    ("pipe", "schedule", "chunks", "options"),
    [
        (1, "1f1b", 1, {}),
        (2, "1f1b", 1, {}),
        (2, "interleaved", 2, {}),
        (2, "1f1b", 1, {"activation_checkpoint_interval": 1}),
    ],
)
def test_pipeline_gradients_equal_plain_autocast_bitwise(
    ranks: Any, pipe: int, schedule: str, chunks: int, options: Any
) -> None:
    made = ranks(pipe, stepped, {"pipe": pipe}, schedule, chunks=chunks, model_options=options)[0]
    assert made.loss == pytest.approx(made.plain_loss, rel=1e-6)
    assert made.scale is None and made.dtypes == {torch.float32}
    assert_bitwise(made.gradients, made.plain_gradients)


@pytest.mark.parametrize(
    ("schedule", "chunks", "options"), [("zb-h1", 1, {}), ("zb-v", 2, {"activation_checkpoint_interval": 1})]
)
def test_a_split_backward_is_near_plain_autocast(ranks: Any, schedule: str, chunks: int, options: Any) -> None:
    """The input gradient now and the weight gradient later: the same products, which may round the other way."""
    made = ranks(2, stepped, {"pipe": 2}, schedule, chunks=chunks, model_options=options)[0]
    assert_as_near_as_plain_autocast(made)


def deferred_on_rank() -> list[int]:
    """Number of queued weight gradients after each pass: split or not, autocast or not."""
    from triax.base.deferred import Deferred
    from triax.pipe.backward import SplitBackward, deferring

    found = []
    for enabled in (False, True):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.Flatten(), nn.Linear(48, 8), nn.Linear(8, 4))
        table = nn.Embedding(5, 32)
        deferred = Deferred()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled), SplitBackward(deferred):
            out = net(table(torch.tensor([0, 1])).view(2, 2, 4, 4)).float().square().sum()
        with deferring(deferred):
            out.backward()
        found.append(sum(map(len, deferred._queue.values())))
        assert all(p.grad is None for p in (*net.parameters(), *table.parameters()))
        deferred.run(lambda parameter: None, lambda parameter: None)
        split = [p.grad for p in (*net.parameters(), *table.parameters())]
        whole, rows = copy.deepcopy(net), copy.deepcopy(table)
        for parameter in (*whole.parameters(), *rows.parameters()):
            parameter.grad = None
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            whole(rows(torch.tensor([0, 1])).view(2, 2, 4, 4)).float().square().sum().backward()
        for mine, parameter in zip(split, (*whole.parameters(), *rows.parameters()), strict=True):
            torch.testing.assert_close(mine, parameter.grad, rtol=2 * ROUNDING, atol=ROUNDING)
    return found


def test_autocast_defers_the_same_number_of_weight_gradients() -> None:
    plainly, narrowly = deferred_on_rank()
    assert plainly == narrowly == 7  # weight and bias of three layers, and the table


# ------------------------------------------------------------------------------------------- replicas and shards


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_zero_stage_sums_plain_autocasts_gradients(ranks: Any, stage: int) -> None:
    """Sums over replicas are in fp32, so only their order differs from one process."""
    made = ranks(2, stepped, {"data": 2}, stage=stage)[0]
    assert made.dtypes == {torch.float32}
    bound = 1e-6 if stage < 3 else 2 * ROUNDING  # whose products keep weights, and are computed as a split's are
    assert largest_relative_difference(made.gradients, made.plain_gradients) < bound


@pytest.mark.parametrize(
    ("sizes", "schedule", "stage", "options"),
    [
        ({"tensor": 2}, "1f1b", 0, {"sequence_parallel": True}),
        pytest.param({"tensor": 2}, "1f1b", 0, {}, marks=pytest.mark.exhaustive),
        pytest.param({"pipe": 2, "tensor": 2}, "zb-h1", 0, {"sequence_parallel": True}, marks=pytest.mark.exhaustive),
        ({"data": 2, "tensor": 2}, "1f1b", 3, {"activation_checkpoint_interval": 1}),
    ],
)
def test_tensor_shards_round_once_more_than_plain_autocast(
    ranks: Any, sizes: Any, schedule: str, stage: int, options: Any
) -> None:
    """Partial sums of products travel in bfloat16, so each rounds once more."""
    size = math.prod(sizes.values())
    made = ranks(size, stepped, sizes, schedule, stage, vocabulary=True, tie=True, model_options=options)[0]
    assert_as_near_as_plain_autocast(made)


def traffic_on_rank(enabled: bool) -> float:
    """Bytes that the tensor axis carries in a step."""
    grid = Grid(tensor=2, timeout=60)
    module = model(grid, loss=triax.NextTokenLoss(grid, vocab_size=VOCABULARY))
    config = small_config(batch=MICRO, torch_autocast={"enabled": enabled})
    made, *_ = triax.initialize(model=module, config=config)
    made.train_batch(iter(batch()))
    return float(sum(entry["bytes"] for entry in made.traffic_report()["sent"]["tensor"].values()))


def test_autocast_sends_products_over_the_tensor_axis_in_bf16(ranks: Any) -> None:
    """2 all-reduces a block forward, 2 backward, and 1 into the head: half the bytes; the embedding's and the
    loss's stay."""
    wide, narrow = (ranks(2, traffic_on_rank, enabled)[0] for enabled in (False, True))
    tokens = MICRO * LENGTH
    assert wide - narrow == (4 * LAYERS + 1) * tokens * WIDTH * (4 - 2)  # 2 (n - 1) / n = 1 at n = 2


# -------------------------------------------------------------------------------------------------- fp16 and amp


@pytest.mark.parametrize(
    "autocast",
    [
        {"torch_autocast": {"enabled": True, "dtype": "float16"}, "fp16": {"enabled": False, "loss_scale": 64}},
        {"amp": {"enabled": True, "loss_scale": 64}},
    ],
)
def test_float16_gradients_equal_autocast_with_a_scaled_loss(ranks: Any, autocast: Any) -> None:
    made = ranks(2, stepped, {"pipe": 2}, autocast=autocast)[0]
    assert made.scale == 64.0 and made.dtypes == {torch.float32}
    assert made.loss == pytest.approx(made.plain_loss, rel=1e-6)
    assert_bitwise(made.gradients, made.plain_gradients)
    assert any(not torch.equal(made.gradients[name], value) for name, value in made.unscaled.items())


def test_amps_loss_scale_falls_to_its_minimum_as_in_apex() -> None:
    amp = {"enabled": True, "opt_level": "O1", "loss_scale": "dynamic", "min_loss_scale": 4}
    made = module_engine(amp=amp, nan_loss="ignore")  # the loss is infinite too, which no scale mends
    assert made.loss_scale() == 2.0**16
    x = torch.full((2, 4), 1e6)  # beyond float16
    for _ in range(16):
        made.backward(made(x).float().sum())
        made.step()
    assert made.skipped_steps == 16 and made.loss_scale() == 4.0
    assert module_engine(amp={"enabled": True, "opt_level": "O0"})(x).dtype == torch.float32
    assert module_engine(amp={"enabled": "auto", "opt_level": "auto"}).loss_scale() is None


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"amp": {"enabled": True, "opt_level": "O2"}}, 'write "fp16": {"enabled": true}'),
        ({"amp": {"enabled": True, "opt_level": "O3"}}, 'write "fp16": {"enabled": true}'),
        ({"amp": {"enabled": True, "opt_level": "O4"}}, "amp.opt_level = 'O4'"),
        ({"amp": {"enabled": True, "keep_batchnorm_fp32": False, "master_weights": True}}, "leave it out, or enable"),
        ({"amp": {"enabled": True}, "bf16": {"enabled": True}}, "bf16.enabled and amp.enabled are both true"),
        ({"torch_autocast": {"enabled": True}, "fp16": {"enabled": True}}, "enable one of them"),
        ({"torch_autocast": {"enabled": True, "dtype": "float32"}}, "torch_autocast.dtype = 'float32'"),
        (
            {
                "torch_autocast": {"lower_precision_safe_modules": ["torch.nn.Linear"]},
                "communication_data_type": "bf16",
            },
            "both set the dtype in which gradients are summed",
        ),
        (
            {"torch_autocast": {"enabled": True, "lower_precision_safe_modules": ["torch.nn.Linaer"]}},
            "there is no 'torch.nn.Linaer'; did you mean 'torch.nn.Linear'?",
        ),
    ],
)
def test_autocast_options_that_cannot_act_are_refused(given: Any, words: str) -> None:
    assert words in error_text(lambda: module_engine(**given), ConfigError)


# ---------------------------------------------------------------------------------------------- any module


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(4, 16)
        self.blocks = nn.ModuleList([nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 16)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return F.linear(x, self.enter.weight.T)  # tied


def net() -> Net:
    torch.manual_seed(5)
    return Net()


def module_engine(grid: Grid | None = None, **config: Any) -> Any:
    base = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.5}}}
    return triax.initialize(model=net(), grid=grid or Grid(), config={**base, **config})[0]


def inputs(index: int) -> Tensor:
    return torch.randn(2, 4, generator=torch.Generator().manual_seed(index))


def plain_net() -> list[Gradients]:
    """Gradients of each of the four microbatches on one process."""
    found = []
    for index in range(4):
        module = net()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = module(inputs(index)).float().square().mean()
        loss.backward()
        found.append({name: p.grad for name, p in module.named_parameters() if p.grad is not None})
    return found


def added(parts: list[Gradients]) -> Gradients:
    """Sum of the gradients in their order and in their dtype."""
    return {name: functools.reduce(torch.add, [part[name] for part in parts]) for name in parts[0]}


def rounded(gradients: Gradients) -> Gradients:
    """Gradients with those of Linears rounded to bfloat16."""
    norm = "blocks.1."
    return {n: g if n.startswith(norm) else g.bfloat16() for n, g in gradients.items()}


def divided(gradients: Gradients) -> Gradients:
    return {name: gradient.float() / 4 for name, gradient in gradients.items()}


def module_on_rank(stage: int, options: Any = None) -> Any:
    grid = Grid(timeout=60)
    autocast = {"enabled": True, **(options or {})}
    made = module_engine(
        grid,
        zero_optimization={"stage": stage},
        gradient_accumulation_steps=4 // grid.size,
        torch_autocast=autocast,
    )
    for index in range(4 // grid.size):
        out = made(inputs(grid.rank * (4 // grid.size) + index))
        made.backward(out.float().square().mean())
        made.step()
    with torch.no_grad():
        assert made.eval()(inputs(0)).dtype == torch.bfloat16
    return made.gather("gradients"), out.dtype, {b.communication_dtype for b in made.data_axis.buckets}, plain_net()


def test_module_gradients_equal_plain_autocast_bitwise() -> None:
    gradients, dtype, _, wanted = module_on_rank(0)
    assert dtype == torch.bfloat16
    assert_bitwise(gradients, divided(added(wanted)))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_any_module_trains_as_plain_autocast_in_each_stage(ranks: Any, stage: int) -> None:
    for gradients, dtype, _, wanted in ranks(2, module_on_rank, stage):
        assert dtype == torch.bfloat16
        assert largest_relative_difference(gradients, divided(added(wanted))) < 1e-6  # the order of a sum in fp32


@pytest.mark.parametrize("stage", [0, 2])
def test_gradients_of_safe_modules_are_reduced_in_bf16(ranks: Any, stage: int) -> None:
    """Linears' gradients are rounded to bfloat16 and summed in it over the replicas, the norm's are not: bit by bit. In
    stage 0 once a step, in stage 2 each microbatch."""
    named = {"lower_precision_safe_modules": ["torch.nn.Linear"]}
    for gradients, _, dtypes, parts in ranks(2, module_on_rank, stage, named):
        assert dtypes == {torch.bfloat16, torch.float32}
        if stage == 0:
            both = [rounded(added(parts[:2])), rounded(added(parts[2:]))]
            wanted = added(both)
        else:
            both = [added([rounded(parts[i]), rounded(parts[i + 2])]) for i in range(2)]
            wanted = added([{n: g.float() for n, g in each.items()} for each in both])
        assert_bitwise(gradients, divided(wanted))


def test_convolutions_and_functions_train_as_plain_autocast() -> None:
    """Any torch layer in a list, under a split schedule and not."""
    layers: list[Any] = [LayerSpec(nn.Conv1d, 2, 4, 3), torch.relu, LayerSpec(nn.Conv1d, 4, 2, 3), _flat]
    x, y = torch.randn(2, 2, 8, generator=torch.Generator().manual_seed(1)), torch.zeros(16)

    def made(schedule: str) -> Gradients:
        module = PipelineModule(layers, grid=Grid(), loss_fn=_square)
        config = small_config(batch=2, schedule=schedule, torch_autocast={"enabled": True})
        found, *_ = triax.initialize(model=module, config=config)
        twin = copy.deepcopy(module)
        found.train_batch(_once(x, y))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            _square(twin(x), y).backward()
        wanted = {n: p.grad for n, p in twin.named_parameters() if p.grad is not None}
        gradients: Gradients = found.gather("gradients")
        assert largest_relative_difference(gradients, wanted) < ROUNDING
        return gradients

    assert largest_relative_difference(made("zb-h1"), made("1f1b")) < ROUNDING


def _flat(x: Tensor) -> Tensor:
    return x.flatten()


def _square(x: Tensor, y: Tensor) -> Tensor:
    return (x.float()[: y.numel()] - y).square().mean()


def _once(x: Tensor, y: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    yield x, y
