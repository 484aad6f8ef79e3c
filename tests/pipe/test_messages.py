"""Classes of values between layers: kept or refused, whether the next layer runs on this rank or on another."""

from __future__ import annotations

import math
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

import triax
from triax import Grid, PipelineModule
from triax.base.nest import map_tensors
from triax.pipe.schema import Schema, flatten, unflatten

from support.toys import error_text, same

transformers = pytest.importorskip("transformers")
BaseModelOutput = transformers.modeling_outputs.BaseModelOutput

WIDTH, MICRO = 6, 4


class Pair(NamedTuple):
    first: Tensor
    second: Tensor | None
    scale: float = 1.0


@dataclass
class Plain:
    first: Tensor


class MyDict(dict[str, Any]):
    pass


class MyList(list[Any]):
    pass


class MyTuple(tuple[Any, ...]):
    pass


class MyTensor(Tensor):
    pass


def packed(x: Tensor) -> PackedSequence:
    return pack_padded_sequence(x, torch.tensor([3, 1]), batch_first=True, enforce_sorted=False)


# How a layer returns its output, and how the next one reads it.
KEPT: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "named": (lambda x: Pair(x, None, 0.5), lambda v: v.first * v.scale if v.second is None else v.second),
    "nested": (lambda x: [{"a": Pair(x * 2, x)}], lambda v: v[0]["a"].first + v[0]["a"].second),
    "output": (
        lambda x: BaseModelOutput(last_hidden_state=x, hidden_states=(x * 2, None)),
        lambda v: v.last_hidden_state + v.hidden_states[0] if v.attentions is None else v[0],
    ),
    "packed": (packed, lambda v: pad_packed_sequence(v, batch_first=True, total_length=3)[0]),
    "ordered": (lambda x: OrderedDict(b=x, a=x * 3), lambda v: v.popitem(last=False)[1] + v["a"]),
    "size": (lambda x: (x, x.shape), lambda v: v[0] * v[1].numel()),
    "maximum": (lambda x: x.max(dim=-1, keepdim=True), lambda v: v.values.expand(-1, -1, WIDTH)),
}
REFUSED: dict[str, Callable[[Tensor], Any]] = {
    "Plain": Plain,
    "MyDict": lambda x: MyDict(x=x),
    "MyList": lambda x: MyList([x]),
    "MyTuple": lambda x: MyTuple([x]),
    "defaultdict": lambda x: defaultdict(list, x=x),
    "Local": lambda x: local_class()(x),
    "set": lambda x: (x, {1}),
    "MyTensor": lambda x: x.as_subclass(MyTensor),
    "sparse Tensor": lambda x: x.flatten(1).to_sparse(),
}


def local_class() -> Any:
    class Local(NamedTuple):
        x: Tensor

    return Local


class Gives(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear, self.kind = nn.Linear(WIDTH, WIDTH).double(), kind

    def forward(self, x: Tensor) -> Any:
        y = torch.tanh(self.linear(x))
        return KEPT[self.kind][0](y) if self.kind in KEPT else REFUSED[self.kind](y)


class Takes(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear, self.kind = nn.Linear(WIDTH, WIDTH).double(), kind

    def forward(self, value: Any) -> Tensor:
        y: Tensor = self.linear(KEPT[self.kind][1](value))
        return y


def layers(kind: str) -> list[nn.Module]:
    torch.manual_seed(1)
    return [Gives(kind), Takes(kind), nn.Linear(WIDTH, WIDTH).double(), nn.Linear(WIDTH, WIDTH).double()]


def loss_of(outputs: Tensor, labels: Any) -> Tensor:
    return (outputs - labels.first).square().mean()


def batch() -> list[tuple[Any, Any]]:
    x = torch.randn(MICRO, 2, 2, 3, WIDTH, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    return [(pair[0], Pair(pair[1], None)) for pair in x]


def made(grid: Grid, kind: str, stage: int, schedule: str, cut: list[int] | None) -> triax.PipelineEngine:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": MICRO // grid.data.size,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage, **({"stage3_param_persistence_threshold": 0} if stage == 3 else {})},
    }
    module = PipelineModule(layers(kind), grid=grid, loss_fn=loss_of, partition=cut or "uniform")
    return triax.initialize(model=module, config=config, schedule=schedule)[0]


def messages(sizes: tuple[int, int, int]) -> dict[str, dict[str, Tensor]]:
    grid, found = Grid(*sizes, timeout=60), {}
    cut = [0, 1, 4] if sizes[0] == 2 else None
    for number, kind in enumerate(KEPT):
        engine = made(grid, kind, number % 4, "zb-h1" if number % 2 else "1f1b", cut)
        engine.train_batch(iter(batch()[grid.data.rank :: grid.data.size]))
        found[kind] = engine.gather("gradients")
    return found


@pytest.mark.parametrize(
    "sizes",
    [
        (1, 1, 1),
        (2, 2, 1),
        *(pytest.param(sizes, marks=pytest.mark.exhaustive) for sizes in [(2, 1, 1), (1, 2, 1), (4, 1, 1)]),
    ],
    ids=str,
)
def test_messages_between_stages_keep_their_classes(ranks: Any, sizes: tuple[int, int, int]) -> None:
    for found in ranks(math.prod(sizes), messages, sizes):
        for kind, gradients in found.items():
            model = nn.Sequential(*layers(kind))
            sum(loss_of(model(x), y) / MICRO for x, y in batch()).backward()  # type: ignore[union-attr]
            same(gradients, {f"layers.{name}": p.grad for name, p in model.named_parameters()})


def refused(kind: str) -> str:
    engine = made(Grid(pipe=torch.distributed.get_world_size(), timeout=60), kind, 0, "1f1b", None)
    return error_text(lambda: engine.train_batch(iter(batch())), RuntimeError)


@pytest.mark.parametrize("kind", REFUSED)
def test_unsendable_classes_are_refused_on_one_process(kind: str) -> None:
    engine = made(Grid(), kind, 0, "1f1b", None)
    for call in (engine.train_batch, engine.eval_batch):
        assert f"a {kind} cannot be sent between stages" in error_text(partial(call, iter(batch())), RuntimeError)


def test_unsendable_classes_are_refused_on_two_ranks(ranks: Any) -> None:
    for text in ranks(2, refused, "MyDict"):
        assert "a MyDict cannot be sent between stages" in text


def test_map_tensors_keeps_the_classes_of_containers() -> None:
    x = torch.ones(2)
    default: dict[str, Any] = defaultdict(list, {"x": x})
    for value in (
        Pair(x, None),
        BaseModelOutput(last_hidden_state=x),
        OrderedDict(x=x),
        default,
        MyDict(x=x),
        MyList([x]),
    ):
        moved = map_tensors(lambda tensor: tensor * 2, value)
        assert type(moved) is type(value) and moved is not value
    assert torch.equal(map_tensors(lambda tensor: tensor * 2, default)["x"], x * 2) and torch.equal(default["x"], x)
    assert map_tensors(lambda tensor: tensor * 2, default)["new"] == []
    assert torch.equal(map_tensors(lambda t: t * 2, BaseModelOutput(last_hidden_state=x)).last_hidden_state, x * 2)


def test_a_schema_makes_only_classes_that_the_rank_knows() -> None:
    tensors, schema = flatten(Pair(torch.ones(2), None))
    assert str(schema) == "Pair(float32[2], None, 1.0)"
    back = unflatten(Schema.decode(schema.encode()), tensors)
    assert isinstance(back, Pair) and back.scale == 1.0
    for name in ("os:system", "subprocess:Popen", "builtins:dict", "no_such_module:A"):
        hostile = schema.encode().replace(f"{Pair.__module__}:Pair".encode(), name.encode())
        with pytest.raises(TypeError, match="this rank has no such class"):
            unflatten(Schema.decode(hostile), tensors)
