"""`parallelize`: plain modules and Hugging Face models, sharded in place, against themselves on one process."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import triax
from triax.grid import Grid
from triax.grid.layout import layout_of
from triax.models.huggingface.parallelize import parallelize
from triax.tensor_parallel.plans import Column, KeyValue, Local, Row
from triax.zero import ShardedOptimizer, gathered

from support.differences import largest
from support.sharding_plans import PLAN, Model, worst
from support.toys import error_text
from support.training import small_config

# An odd vocabulary, an MLP whose width 2 and 4 do not divide, 6 heads: uneven over 4 ranks.
SMALL: dict[str, dict[str, Any]] = {
    "gpt2": {"vocab_size": 43, "n_positions": 16, "n_embd": 24, "n_layer": 2, "n_head": 6, "n_inner": 37},
    "llama": {"num_key_value_heads": 2},
    "qwen2": {"num_key_value_heads": 3, "tie_word_embeddings": True},
    "qwen3": {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 6},
    "bert": {"num_attention_heads": 4, "intermediate_size": 37},
}

_COMMON = {
    "vocab_size": 43,
    "hidden_size": 24,
    "intermediate_size": 37,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "max_position_embeddings": 16,
}
_NO_TOKENS = {"bos_token_id": None, "eos_token_id": None}
_NO_DROPOUT = {
    "gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "bert": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "pad_token_id": 3},
}


def make(family: str, **changes: Any) -> nn.Module:
    """A small random model of a family, in float64, the same wherever it is made."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

    common = {} if family == "gpt2" else _COMMON
    options = common | SMALL[family] | _NO_TOKENS | _NO_DROPOUT.get(family, {}) | changes
    torch.manual_seed(3)
    auto = AutoModelForMaskedLM if family == "bert" else AutoModelForCausalLM
    made: nn.Module = auto.from_config(AutoConfig.for_model(family, **options)).double()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)  # biases and norms are no longer 0 and 1
    return made


def exactly(model: nn.Module) -> nn.Module:
    """The model, its RMSNorms computing in its own dtype: theirs round to float32, and so do their gradients."""
    for norm in model.modules():
        if type(norm).__name__.endswith("RMSNorm"):
            norm.forward = functools.partial(_rms_norm, norm)
    return model


def _rms_norm(self: Any, x: Tensor) -> Tensor:
    return nn.functional.rms_norm(x, x.shape[-1:], self.weight, self.variance_epsilon)


def batch(length: int = 11) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return torch.randint(43, (3, length), generator=generator), torch.randint(43, (3, length), generator=generator)


def run(model: nn.Module, ids: Tensor, labels: Tensor) -> Tensor:
    """The logits; gradients are left in the parameters."""
    logits: Tensor = model(input_ids=ids).logits
    nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
    return logits.detach()


def compare(grid: Grid, family: str, train: bool, changes: dict[str, Any]) -> dict[str, float]:
    """Relative differences of the sharded model's outputs and gradients from the whole model's, by name."""
    exact = changes.pop("exact", False)
    whole, model = (make(family, **changes).train(train) for _ in range(2))
    if exact:
        whole, model = exactly(whole), exactly(model)
    assert parallelize(model, grid) is model
    ids, labels = batch()
    found = {"logits": worst(run(model, ids, labels), run(whole, ids, labels))}
    reference = dict(whole.named_parameters())
    assert dict(model.named_parameters()).keys() == reference.keys()  # names and ties are as they were
    rank, size = grid.tensor.rank, grid.tensor.size
    for name, parameter in model.named_parameters():
        layout = layout_of(parameter)
        assert layout.name == name and layout.shape == tuple(reference[name].shape)
        assert torch.equal(parameter, layout.shard(reference[name], rank, size))
        gradient = reference[name].grad
        assert parameter.grad is not None and gradient is not None
        found[name] = worst(parameter.grad, layout.shard(gradient, rank, size))
    return found


def on_rank(size: int, family: str, train: bool = True, changes: dict[str, Any] | None = None) -> dict[str, float]:
    return compare(Grid(tensor=size), family, train, dict(changes or {}))


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.exhaustive), 4])
@pytest.mark.parametrize("family", SMALL)
def test_a_sharded_hugging_face_model_computes_as_the_whole(ranks: Any, family: str, size: int) -> None:
    """Logits and every gradient, to 1e-9 in float64."""
    for found in ranks(size, on_rank, size, family, timeout=60):
        assert largest(found.values()) < 1e-9, {name: error for name, error in found.items() if error >= 1e-9}
        assert len(found) > 15


@pytest.mark.exhaustive
@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("gpt2", {"tie_word_embeddings": False}),
        ("gpt2", {"_attn_implementation": "eager"}),
        ("llama", {"num_key_value_heads": 6, "attention_bias": True, "mlp_bias": True}),
        ("llama", {"num_key_value_heads": 1, "_attn_implementation": "eager"}),
        ("llama", {"num_key_value_heads": 2, "attention_bias": True, "tie_word_embeddings": True}),
        ("qwen2", {"num_key_value_heads": 2, "tie_word_embeddings": False}),
        # Keys that several ranks use: each one's gradient goes through the norm, whose float32 would round the parts.
        ("qwen3", {"num_attention_heads": 6, "num_key_value_heads": 3, "attention_bias": True, "exact": True}),
        ("qwen3", {"num_attention_heads": 6, "num_key_value_heads": 1, "exact": True}),
        ("bert", {"num_attention_heads": 6, "_attn_implementation": "eager"}),
    ],
)
def test_sharded_variants_of_families_compute_as_the_whole(
    ranks: Any, family: str, changes: dict[str, Any], size: int, train: bool
) -> None:
    for found in ranks(size, on_rank, size, family, train, changes, timeout=60):
        assert largest(found.values()) < 1e-9, {name: error for name, error in found.items() if error >= 1e-9}


def continued(size: int, family: str) -> tuple[list[int], list[int]]:
    models: list[Any] = [make(family).eval(), parallelize(make(family).eval(), Grid(tensor=size))]
    ids = torch.arange(5)[None] + 7
    whole, sharded = (m.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0)[0].tolist() for m in models)
    return whole, sharded


@pytest.mark.parametrize(("family", "size"), [("gpt2", 4), ("llama", 4)])
def test_transformers_generate_works_on_a_sharded_model(ranks: Any, family: str, size: int) -> None:
    """Transformers' ``generate`` works with a cache of this rank's heads: 6 heads (Llama 2 kv heads) over 4 ranks."""
    for whole, sharded in ranks(size, continued, size, family):
        assert whole == sharded and len(whole) == 13


def bytes_sent(size: int, family: str) -> tuple[int, float]:
    grid = Grid(tensor=size)
    model = parallelize(make(family, intermediate_size=40), grid)
    grid.traffic.clear()
    ids, labels = batch()
    run(model, ids, labels)
    return ids.numel() * 24 * 8, grid.traffic.report()["tensor"]["all_reduce"].bytes


@pytest.mark.parametrize("family", ["llama", "bert"])
def test_a_transformer_layer_sends_four_all_reduces(ranks: Any, family: str) -> None:
    """Two forward and two backward, as in the paper, though q, k and v are called one by one; and the vocabulary's."""
    for hidden, sent in ranks(2, bytes_sent, 2, family):
        layers, vocabulary = 2, 2  # the embedding's forward, the head's backward
        assert sent == (4 * layers + vocabulary) * 2 * hidden // 2


def train(sizes: tuple[int, int, int], family: str, stage: int) -> list[float]:
    """Three steps of AdamW over replicas and tensor shards; how far weights are from one process's, relative."""
    grid = Grid(*sizes)
    whole, model = make(family), parallelize(make(family), grid)
    ids, labels = (x.repeat(2, 1)[:4] for x in batch())
    share = 4 // grid.data.size
    mine = slice(grid.data.rank * share, (grid.data.rank + 1) * share)
    reference = torch.optim.AdamW(whole.parameters(), lr=1e-2)
    optimizer = ShardedOptimizer(
        torch.optim.AdamW, model.parameters(), grid, stage=stage, module=model, lr=1e-2, reduction="mean"
    )
    for _ in range(3):
        reference.zero_grad()
        run(whole, ids, labels)
        reference.step()
        optimizer.zero_grad()
        run(model, ids[mine], labels[mine])
        optimizer.step()
    expected = dict(whole.named_parameters())
    rank, size = grid.tensor.rank, grid.tensor.size
    with gathered(model):
        return [
            worst(p.detach(), layout_of(p).shard(expected[name].detach(), rank, size))
            for name, p in model.named_parameters()
        ]


@pytest.mark.parametrize(("family", "stage"), [("gpt2", 1), ("qwen3", 3)])
def test_parallelized_models_train_over_replicas(ranks: Any, family: str, stage: int) -> None:
    """ShardedOptimizer sums over the data axis alone: what tensor ranks share has whole gradients already."""
    for errors in ranks(4, train, (1, 2, 2), family, stage, timeout=60):
        assert largest(errors) < 1e-6  # Adam divides by the gradient's size: elements near 0 are where rounding shows


class Narrow(nn.Module):
    """An embedding whose columns can be sharded, and a layer that takes them as inputs."""

    def __init__(self, tied: bool = False, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.words, self.down = nn.Embedding(5, 6, **options), nn.Linear(6, 5)
        if tied:
            self.down.weight = self.words.weight
        self.double()

    def forward(self, ids: Tensor) -> Tensor:
        y: Tensor = self.down(self.words(ids))
        return y


def columns_of_an_embedding(tied: bool, options: dict[str, Any]) -> float:
    grid, whole = Grid(tensor=2), Narrow(tied, **options)
    model = parallelize(Narrow(tied, **options), grid, {"words": "column", "down": "row"})
    for each in (whole, model):
        each(torch.tensor([[0, 1, 0, 2, 2, 4]])).square().sum().backward()
    whole_gradients = [parameter.grad for parameter in whole.parameters()]
    shares = [
        (parameter.grad, layout_of(parameter).shard(gradient, grid.tensor.rank, 2))
        for parameter, gradient in zip(model.parameters(), whole_gradients, strict=True)
        if gradient is not None
    ]
    return largest(worst(gradient, share) for gradient, share in shares if gradient is not None)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("options", [{}, {"padding_idx": 0}, {"padding_idx": -1}], ids=str)
def test_column_sharded_embeddings_train_as_the_whole(ranks: Any, tied: bool, options: dict[str, Any]) -> None:
    assert largest(ranks(2, columns_of_an_embedding, tied, options)) < 1e-10


class Siblings(nn.Module):
    """Two layers with a common input."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.q, self.k = nn.Linear(4, 6), nn.Linear(4, 6)


def _scale(tensor: Tensor) -> None:
    with torch.no_grad():
        tensor.mul_(3)


def _replace(layer: Any) -> None:
    layer.bias = nn.Parameter(layer.bias.detach() + 1)


CHANGES: dict[str, Any] = {
    "nothing": lambda model, x: None,
    "weight": lambda model, x: _scale(model.k.weight),
    "bias": lambda model, x: _scale(model.k.bias),
    "another bias": lambda model, x: _replace(model.k),
    "input": lambda model, x: _scale(x),
}
MODES: dict[str, Any] = {
    "gradients": torch.enable_grad,
    "no gradients": torch.no_grad,
    "inference": torch.inference_mode,
}


def between_calls(model: Any, change: str, mode: str) -> list[Tensor]:
    """The output of a layer after its sibling's call with the same input and a change, and the gradients."""
    start = torch.arange(8.0, dtype=torch.float64).view(2, 4)
    with MODES[mode]():
        start.requires_grad_(mode == "gradients")
        x = start + 1
        model.q(x)
        CHANGES[change](model, x)
        y = model.k(x)
    if mode == "gradients":
        y.square().sum().backward()
    return [y.detach(), *(p.grad for p in (start, model.k.weight, model.k.bias) if p.grad is not None)]


SIBLINGS = {"q": Column(group="g"), "k": Column(group="g")}


def differences_between_calls() -> dict[str, float]:
    """The largest difference from one process by each change between two calls of a group, in each mode."""
    grid, found = Grid(tensor=2), {}
    for change in CHANGES:
        for mode in MODES:
            mine = between_calls(parallelize(Siblings().double(), grid, SIBLINGS), change, mode)
            y, *gradients = between_calls(Siblings().double(), change, mode)
            rank = grid.tensor.rank
            wanted = [y.chunk(2, 1)[rank], *gradients[:1], *(g.chunk(2)[rank] for g in gradients[1:])]
            pairs = zip(mine, wanted, strict=True)
            found[f"{change}, {mode}"] = largest((ours - theirs).abs().max() for ours, theirs in pairs)
    return found


def test_grouped_layers_notice_changes_between_their_calls(ranks: Any) -> None:
    for found in ranks(2, differences_between_calls):
        assert len(found) == len(CHANGES) * len(MODES)
        assert all(difference < 1e-10 for difference in found.values()), found


def dtype_under_autocast() -> torch.dtype:
    model, x = parallelize(Siblings(), Grid(tensor=2), SIBLINGS), torch.ones(2, 4, requires_grad=True)
    model.q(x)
    with torch.autocast("cpu", torch.bfloat16):
        dtype: torch.dtype = model.k(x).dtype
    return dtype


def test_grouped_layers_notice_autocast_between_their_calls(ranks: Any) -> None:
    assert ranks(2, dtype_under_autocast) == [torch.bfloat16] * 2


def one_step_of_the_engine(sizes: tuple[int, int, int]) -> dict[str, float]:
    """The whole model as a list of one layer."""
    grid = Grid(*sizes)
    whole, model = make("qwen2"), parallelize(make("qwen2"), grid)
    ids, labels = (x.repeat(2, 1)[:4] for x in batch())

    def loss_fn(outputs: Any, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten())

    engine, *_ = triax.initialize(
        model=triax.PipelineModule([model], grid=grid, loss_fn=loss_fn),
        config=small_config(micro=2, accumulation=1, stage=2),
    )
    mine = slice(grid.data.rank * 2, grid.data.rank * 2 + 2)
    engine.train_batch(iter([(ids[mine], labels[mine])]))
    run(whole, ids, labels)
    found = engine.gather("gradients")
    wanted = {f"layers.0.{name}": parameter.grad for name, parameter in whole.named_parameters()}
    assert found.keys() == wanted.keys()
    return {name: worst(gradient, wanted[name]) for name, gradient in found.items()}  # type: ignore[arg-type]


def test_parallelized_models_train_under_the_engine(ranks: Any) -> None:
    for found in ranks(4, one_step_of_the_engine, (1, 2, 2), timeout=60):
        assert largest(found.values()) < 1e-9


ODD: list[dict[str, Any]] = [{"max_norm": 1.0}, {"scale_grad_by_freq": True}, {"sparse": True}]


BUFFERS = (torch.bool, torch.int16, torch.uint16, torch.float16, torch.complex64, torch.float8_e4m3fn)


def buffers_of(rank: int) -> dict[str, Tensor]:
    """Return buffers with values of this rank: one of each dtype, one without elements, and one without dims."""
    typed = {f"buffer{i}": torch.tensor([[rank + 1.0, 0.0]]).to(dtype) for i, dtype in enumerate(BUFFERS)}
    return {**typed, "none": torch.empty(0), "number": torch.tensor(rank, dtype=torch.int16)}


def parallelized_buffers() -> dict[str, Tensor]:
    grid, model = Grid(tensor=2), Narrow()
    for name, buffer in buffers_of(grid.tensor.rank).items():
        model.register_buffer(name, buffer)
    return dict(parallelize(model, grid, {"words": "column", "down": "row"}).named_buffers())


def test_parallelize_copies_buffers_from_the_first_rank(ranks: Any) -> None:
    wanted = buffers_of(rank=0)
    for found in ranks(2, parallelized_buffers):
        assert found.keys() == wanted.keys()
        for name, buffer in found.items():
            assert (buffer.dtype, buffer.shape) == (wanted[name].dtype, wanted[name].shape)
            # As bytes: torch.equal does not know all of these dtypes.
            assert torch.equal(*(each.reshape(-1).view(torch.uint8) for each in (buffer, wanted[name])))


def messages(size: int) -> list[str]:
    """Error messages of wrong plans."""

    def said(model: nn.Module, plan: dict[str, Any] | None) -> str:
        before = {name: parameter.clone() for name, parameter in model.named_parameters()}
        try:
            parallelize(model, grid, plan)
        except (ValueError, TypeError) as error:
            # Refused before anything was touched.
            assert all(torch.equal(before[name], parameter) for name, parameter in model.named_parameters())
            return f"{type(error).__name__}: {error}"
        raise AssertionError("not refused")

    grid = Grid(tensor=size)
    few_heads = make("llama", num_attention_heads=2, num_key_value_heads=1)
    again = parallelize(Model(), grid, {"up": "column", "down": "row", "twice": "row"})
    without_head = {pattern: style for pattern, style in PLAN.items() if pattern != "head"}
    encoder = nn.Sequential(nn.TransformerEncoderLayer(8, 2))
    return [
        said(Model(), None),
        said(Model(), {"up": "column", "*.gone": "row", "down": "row"}),
        said(Model(), {"up": "diagonal"}),
        said(Model(), {"embedding": "row"}),
        said(Model(), {"attention": "column"}),
        said(Model(), without_head),
        said(Model(), {"*.project": Column(parts=(24, 24))}),
        said(Model(), {"*.merge": Row(unit=12)}),
        said(Model(), {"attention": Local({"heads": 4})}),
        said(Model(), {"up": KeyValue(6, 2, 4)}),
        said(encoder, {"*linear1": "column"}),
        said(nn.Linear(4, 4), {"*": "column"}),
        said(few_heads, None),
        *(said(Narrow(**odd), {"words": "column", "down": "row"}) for odd in ODD),
        said(Narrow(), {"words": "column_gather"}),
        *(_said_then_right(Narrow(tied=True), wrong, grid) for wrong in WRONG_TIES),
        _said_twice(again, grid),
    ]


WRONG_TIES: list[dict[str, Any]] = [
    {"words": "column", "down": "column_gather"},
    {"words": "vocab", "down": "row"},
    {"words": "vocab", "down": Column(unit=5)},
    {"down": "row"},
]


def _said_then_right(model: nn.Module, plan: dict[str, Any], grid: Grid) -> str:
    """The message for a wrong plan, after which the right plan is taken."""
    message = error_text(lambda: parallelize(model, grid, plan), ValueError)
    parallelize(model, grid, {"words": "vocab", "down": "column_gather"})
    return f"ValueError: {message}"


def _said_twice(model: nn.Module, grid: Grid) -> str:
    with pytest.raises((ValueError, TypeError)) as error:
        parallelize(model, grid, {"up": "column"})
    return f"{error.type.__name__}: {error.value}"


EXPECTED = [
    "ValueError: there is no built-in plan for a Model without a model_type, only for gpt2, llama, mistral, ",
    "ValueError: the plan has '*.gone', but no module of this Model has a name that matches. Its linear and embedding",
    "ValueError: the plan has 'up': 'diagonal', which is not a style. Give 'column', 'column_gather', 'row', 'vocab',",
    "TypeError: embedding is a Embedding, but the style Row needs an nn.Linear or a Conv1D. Change the plan's pattern",
    "TypeError: attention is a Attention, but the style Column needs an nn.Linear or a Conv1D. Change the plan's",
    "ValueError: head shares its weight with embedding, which the plan shards. Add head to the plan too, with",
    "ValueError: attention.project has 72 outputs, but its parts (24, 24) add up to 48. Change parts.",
    "ValueError: attention.merge: the number of inputs is 24, which is 2 units of 12, but tensor=3",
    "ValueError: attention.heads is 6, not a multiple of unit=4. Give a unit that divides 6.",
    "ValueError: up has 21 outputs, but the plan gives it kv_heads=2 of head_dim=4 for heads=6",
    "TypeError: 0.linear1 is part of a TransformerEncoderLayer, which uses the weights without calling",
    "TypeError: the plan's pattern matches the whole Linear. Put it into an nn.Sequential.",
    "ValueError: model.layers.0.self_attn.q_proj: the number of outputs is 24, which is 2 units of 12",
    "ValueError: words has max_norm=1.0, which a sharded embedding lacks. Leave words out of the plan.",
    "ValueError: words has scale_grad_by_freq=True, which a sharded embedding lacks.",
    "ValueError: words has sparse=True, which a sharded embedding lacks.",
    "ValueError: words is an embedding, which is sharded by 'column' or 'vocab', not by Column(",
    "ValueError: down.weight and words.weight are tied, but the plan shards them differently. Give both one style.",
    "ValueError: down.weight and words.weight are tied, but the plan shards them differently.",
    "ValueError: down: the number of outputs is 5, which is 1 units of 5, but tensor=3",
    "ValueError: words shares its weight with down, which the plan shards. Add words to the plan too",
    "TypeError: up is a ColumnSharded, but the style Column needs an nn.Linear or a Conv1D",
]


def test_plan_errors_name_the_module_and_what_fits(ranks: Any) -> None:
    for found in ranks(3, messages, 3, timeout=60):
        for said, expected in zip(found, EXPECTED, strict=True):
            assert said.startswith(expected)


def adapted_llama() -> Any:
    """A Llama with one key/value head and PEFT's adapters of rank 2 at all its linear layers."""
    import peft
    import transformers

    torch.manual_seed(0)
    sizes: Any = {"hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 1, "vocab_size": 13}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=1)
    adapters = peft.LoraConfig(r=2, target_modules="all-linear")
    model: Any = peft.get_peft_model(transformers.LlamaForCausalLM(config).double(), adapters)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    return model


def differences_of_adapted_models() -> dict[str, float]:
    """How far the logits, and the gradient of each adapter, on this rank are from those of the whole model."""
    grid, ids = Grid(tensor=2), torch.arange(12).view(2, 6)
    whole, sharded = adapted_llama(), parallelize(adapted_llama(), grid)
    logits = []
    for model in (whole, sharded):
        output = model(input_ids=ids, labels=ids)
        output.loss.backward()
        logits.append(output.logits.detach())
    found, own = {"logits": (logits[0] - logits[1]).abs().max().item()}, dict(sharded.named_parameters())
    for name, parameter in whole.named_parameters():
        if parameter.requires_grad:
            wanted = layout_of(own[name]).shard(parameter.grad, grid.tensor.rank, 2)
            found[name] = (own[name].grad - wanted).abs().max().item()
    return found


def test_peft_adapters_on_shards_compute_as_the_whole(ranks: Any) -> None:
    for found in ranks(2, differences_of_adapted_models):
        assert len(found) == 1 + 7 * 2  # A and B of four layers of attention and three of the MLP
        assert all(difference < 1e-10 for difference in found.values()), found


def refusal_of_a_plan() -> str:
    return error_text(lambda: parallelize(adapted_llama(), Grid(tensor=2), {"*.q_proj": "column"}), TypeError)


def test_a_plan_for_a_layer_of_peft_is_refused(ranks: Any) -> None:
    for message in ranks(2, refusal_of_a_plan):
        assert "self_attn.q_proj is a layer of PEFT" in message and "Leave the plan out" in message
