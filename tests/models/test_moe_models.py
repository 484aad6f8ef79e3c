"""Mixtures of experts of Hugging Face's families: logits and gradients against transformers' own, on every axis."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

import triax
from triax.context.order import gather
from triax.grid import Grid
from triax.models.huggingface import reader
from triax.models.huggingface.config import from_hf, to_hf
from triax.models.huggingface.load import LAYERS, config_from_hf, load_hf
from triax.models.huggingface.save import save_hf
from triax.models.layers import NextTokenLoss
from triax.tensor_parallel import gather_logits

ROWS, LENGTH, VOCABULARY = 4, 14, 61
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 32,
    "router_aux_loss_coef": 0.0,
    "experts_implementation": "eager",
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
}
_QWEN = {"num_experts": 4, "moe_intermediate_size": 20, "head_dim": 6, "num_key_value_heads": 2}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_key_value_heads": 2}),
    "mixtral-window": (
        "Mixtral",
        {"num_local_experts": 6, "num_key_value_heads": 4} | {"sliding_window": 5, "tie_word_embeddings": True},
    ),
    # One block with experts: a loss of all blocks together is then a loss of each block.
    "qwen3_moe": ("Qwen3Moe", _QWEN | {"mlp_only_layers": [0], "router_aux_loss_coef": 0.5}),
    "qwen3_moe-step": ("Qwen3Moe", _QWEN | {"num_hidden_layers": 5, "decoder_sparse_step": 2, "norm_topk_prob": True}),
    "olmoe": ("Olmoe", {"num_experts": 4, "clip_qkv": 0.4}),
    "olmoe-grouped": ("Olmoe", {"num_experts": 8, "num_key_value_heads": 2, "norm_topk_prob": True}),
}


def make(case: str, **changes: Any) -> Any:
    """A random model in fp64, whose weights are too large to be nearly linear, and no norm 1."""
    import transformers

    family, options = CASES[case]
    config = getattr(transformers, f"{family}Config")(**_COMMON | options | changes)
    torch.manual_seed(3)
    model = getattr(transformers, f"{family}ForCausalLM")(config).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8 if parameter.dim() > 1 else 1).add_(torch.randn_like(parameter), alpha=0.1)
    return model


class Exact(TorchFunctionMode):
    """transformers' norms, routers and losses round fp64 to fp32. Within this they do not, save for rotary angles."""

    def __init__(self) -> None:
        super().__init__()
        self.rounds = 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self.rounds:
            function = Tensor.double if function is Tensor.float else function
            args = tuple(torch.float64 if value is torch.float32 else value for value in args)
            kwargs = {name: torch.float64 if value is torch.float32 else value for name, value in kwargs.items()}
        return function(*args, **kwargs)


@contextmanager
def exact(model: Any) -> Iterator[None]:
    mode = Exact()

    def begin(*_: Any) -> None:
        mode.rounds += 1

    def end(module: Any, inputs: Any, output: Any) -> Any:
        mode.rounds -= 1

    rotary = model.model.rotary_emb
    hooks = [rotary.register_forward_pre_hook(begin), rotary.register_forward_hook(end)]
    with mode:
        yield
    for hook in hooks:
        hook.remove()


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    ids, labels = (torch.randint(VOCABULARY, (ROWS, LENGTH), generator=generator) for _ in range(2))
    labels[:, ::5] = -100
    return ids, labels


@dataclass(frozen=True)
class Cell:
    """A model of Hugging Face on a grid."""

    case: str
    pipe: int = 1
    data: int = 1
    tensor: int = 1
    context: int = 1
    expert: int = 1
    sequence_parallel: bool = False
    kind: str = "ring"
    stage: int = 0

    @property
    def ranks(self) -> int:
        return self.pipe * self.data * self.tensor * self.context


def run(cells: list[Cell], folder: str) -> list[dict[str, Any]]:
    torch.set_default_dtype(torch.float64)
    try:
        return [train(cell, f"{folder}/{cell.case}", f"{folder}/{number}") for number, cell in enumerate(cells)]
    finally:
        torch.set_default_dtype(torch.float32)


def train(cell: Cell, folder: str, out: str) -> dict[str, Any]:
    """Load, count what was read, run, save, and train a step."""
    read = 0
    plain = reader._Folder.read

    def counted(self: Any, name: str, part: tuple[slice, ...]) -> Tensor:
        nonlocal read
        tensor = plain(self, name, part)
        read += tensor.nbytes
        return tensor

    grid = Grid(cell.pipe, cell.data, cell.tensor, context=cell.context, expert=cell.expert)
    config = config_from_hf(folder)
    layers = LAYERS[type(config)](config, cell.sequence_parallel, cell.kind)

    def logits_of(x: Tensor) -> Tensor:
        return gather(gather_logits(x, grid=grid, vocab_size=VOCABULARY), grid.context, LENGTH)

    reader._Folder.read = counted  # type: ignore[method-assign]
    try:
        model = triax.PipelineModule(
            load_hf(folder, layers),
            grid=grid,
            loss_fn=NextTokenLoss(grid, VOCABULARY),
            output_fn=logits_of,
            device="meta",
        )
        share = sum(x.numel() * 8 for x in model.parameters())
        settings = {
            "train_batch_size": ROWS,
            "gradient_accumulation_steps": ROWS // cell.data,
            "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
            "zero_optimization": {"stage": cell.stage},
        }
        engine, *_ = triax.initialize(model=model, config=settings)
    finally:
        reader._Folder.read = plain  # type: ignore[method-assign]
    ids, labels = batch()
    each = ROWS // cell.data
    mine = slice(grid.data.rank * each, (grid.data.rank + 1) * each)
    _, outputs = engine.eval_batch(iter([(ids[mine], labels[mine])]), return_logits=True, num_micro_batches=1)
    save_hf(engine, out)
    loss = engine.train_batch(iter([(ids[i : i + 1], labels[i : i + 1]) for i in range(ROWS)[mine]]))
    gradients = engine.gather("gradients")
    found = {"read": read, "share": share, "logits": outputs[0], "rows": mine}
    return found if grid.rank else {**found, "loss": float(loss), "gradients": gradients}


def wanted(model: Any) -> tuple[Tensor, float, dict[str, Tensor]]:
    """Logits, the loss, and the gradients with the auxiliary loss, by transformers on one process."""
    ids, labels = batch()
    with exact(model):
        output = model(input_ids=ids)
        loss = F.cross_entropy(output.logits.flatten(0, 1), labels.flatten())
        total = loss
        coefficient = getattr(model.config, "router_aux_loss_coef", 0.0)
        if coefficient:
            losses = [model(input_ids=row[None], output_router_logits=True).aux_loss for row in ids]
            total = total + coefficient * torch.stack(losses).mean()
    total.backward()
    return output.logits.detach(), loss.item(), {name: p.grad for name, p in model.named_parameters()}


def check(ranks: Any, folder: Path, cells: list[Cell]) -> None:
    import transformers

    for cell in cells:
        make(cell.case).save_pretrained(folder / cell.case)
    (count,) = {cell.ranks for cell in cells}
    reference = {case: wanted(make(case)) for case in dict.fromkeys(cell.case for cell in cells)}
    by_rank = ranks(count, run, cells, str(folder), timeout=300)
    for number, (cell, *found) in enumerate(zip(cells, *by_rank, strict=True)):
        logits, loss, gradients = reference[cell.case]
        for rank in found:
            torch.testing.assert_close(rank["logits"], logits[rank["rows"]], rtol=1e-10, atol=1e-10, msg=str(cell))
            assert rank["read"] == rank["share"], cell  # each rank reads its own experts and shards only
        assert found[0]["loss"] == pytest.approx(loss, rel=1e-10), cell
        # The gradients by their names, through the tables that save_hf uses.
        written: Any = transformers.AutoModelForCausalLM.from_config(make(cell.case).config).double()
        layers = LAYERS[type(config_from_hf(written))](config_from_hf(written))
        model = triax.PipelineModule(layers, grid=Grid(), dtype=torch.float64)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(found[0]["gradients"][name])
        save_hf(model, folder / "gradients")
        same_as(folder / "gradients", gradients, cell, exactly=False)
        same_as(folder / str(number), dict(make(cell.case).state_dict()), cell)


def same_as(folder: Path, tensors: dict[str, Tensor], cell: Cell, exactly: bool = True) -> None:
    """Check what transformers reads from a folder."""
    import transformers

    reading: Any = transformers.AutoModelForCausalLM
    model, info = reading.from_pretrained(folder, output_loading_info=True, dtype=torch.float64)
    assert not any(info.get(key) for key in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs")), info
    for name, tensor in tensors.items():
        found = model.state_dict()[name]
        bounds = (0.0, 0.0) if exactly else (1e-10, 1e-11)
        torch.testing.assert_close(found, tensor, rtol=bounds[0], atol=bounds[1], msg=f"{cell} {name}: {{}}".format)


def test_there_and_back(ranks: Any, tmp_path: Path) -> None:
    """Logits and gradients to 1e-10; each rank reads its share to the byte, and saves bitwise what it loaded."""
    check(
        ranks,
        tmp_path,
        [
            Cell("mixtral", pipe=2, tensor=2),
            Cell("mixtral-window", data=2, context=2, expert=2, stage=1),
            Cell("qwen3_moe", data=2, tensor=2, expert=2, sequence_parallel=True, stage=3),
            Cell("olmoe", tensor=2, context=2, expert=2, kind="gather"),
        ],
    )


PLACES: list[dict[str, Any]] = [
    {"pipe": 2, "tensor": 2, "data": 2, "expert": 2},
    {"pipe": 2, "context": 2, "data": 2, "expert": 2},
    {"tensor": 2, "context": 2, "data": 2, "expert": 2, "sequence_parallel": True},
    {"tensor": 4, "context": 2, "expert": 2},
]


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", CASES)
def test_there_and_back_on_8_ranks(ranks: Any, tmp_path: Path, case: str) -> None:
    kinds = ("ring", "gather", "ulysses")
    cells = [Cell(case, **place, kind=kinds[i % 3], stage=i) for i, place in enumerate(PLACES)]
    if case == "olmoe-grouped":  # 2 heads of keys
        cells = [cell for cell in cells if cell.tensor * cell.context <= 2]
    check(ranks, tmp_path, cells)


@pytest.mark.parametrize("case", CASES)
def test_a_live_model_in_single_precision(case: str) -> None:
    model = make(case).float().eval()
    grid = Grid()
    mine = triax.PipelineModule(load_hf(model), grid=grid)
    ids, _ = batch()
    with torch.no_grad():
        torch.testing.assert_close(mine(ids), model(input_ids=ids).logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_configurations_there_and_back(case: str) -> None:
    config = config_from_hf(make(case))
    assert from_hf(to_hf(config)) == config
    with torch.device("meta"):
        model = triax.PipelineModule(LAYERS[type(config)](config), grid=Grid(), device="meta")
    assert sum(parameter.numel() for parameter in model.parameters()) == config.parameter_count
