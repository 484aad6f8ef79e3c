"""``tensor_parallel`` in DeepSpeed's configuration: the model is sharded by the configuration alone, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import triax.compat.deepspeed as deepspeed
from triax.compat.deepspeed.autotp import plan_of
from triax.tensor_parallel.plans import Column, Row

SIZES: Any = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 4}
KERNEL: Any = {"attn_implementation": "eager"}
LLAMA = LlamaConfig(vocab_size=32, num_key_value_heads=2, **KERNEL, **SIZES)
IDS = torch.tensor([[3, 5, 7, 9], [2, 4, 6, 8]])
CONFIG: dict[str, Any] = {
    "train_batch_size": 2,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    "gradient_clipping": 0.5,
}
SPECS = [
    {"patterns": [r".*\.o_proj\.weight$", r".*\.down_proj\.weight$"], "partition_type": "row"},
    {"patterns": [r".*\.[qkv]_proj\.weight$", r".*\.(gate|up)_proj$"], "partition_type": "column"},
]


class Attention(nn.Module):
    """Attention of one fused layer of q, k and v; heads are counted by an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 4
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.num_heads, 2)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        y = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + self.out(y)
        z: Tensor = x + self.down(torch.tanh(self.up(x)))
        return z


FUSED = [
    {"patterns": [r"(.*\.)?qkv\.weight$"], "partition_type": "column", "shape": [3, -1], "partition_dim": 0},
    {"patterns": ["(.*[.])?up"], "partition_type": "column"},
    {"patterns": ["(.*[.])?out", "(.*[.])?down"], "partition_type": "row"},
]


def made(kind: str) -> nn.Module:
    torch.manual_seed(1)
    return (LlamaForCausalLM(LLAMA) if kind == "llama" else Attention()).double()


def loss_of(kind: str, model: Any) -> Tensor:
    if kind == "llama":
        loss: Tensor = model(IDS, labels=IDS).loss
        return loss
    x = torch.randn(2, 3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return (model(x) - 1).square().mean()


def trained(cells: list[tuple[str, dict[str, Any]]]) -> list[tuple[int, dict[str, Tensor]]]:
    """Tensor ranks, and weights after two steps. The optimizer is the script's, over the parameters before."""
    results = []
    for kind, section in cells:
        model = made(kind)
        config = {key: value for key, value in CONFIG.items() if key != "optimizer"}
        config |= {"zero_optimization": {"stage": 1}, "tensor_parallel": section}
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        for _ in range(2):
            engine.backward(loss_of(kind, engine))
            engine.step()
        results.append((engine.grid.tensor.size, engine.gather()))
    return results


def test_models_sharded_by_the_configuration_train_as_torch(ranks: Any) -> None:
    cells: list[tuple[str, dict[str, Any]]] = [
        ("llama", {"autotp_size": 2}),
        ("llama", {"autotp_size": 2, "preset_model": "llama"}),
        ("llama", {"autotp_size": 2, "partition_config": {"use_default_specs": False, "layer_specs": SPECS}}),
        ("attention", {"tp_size": 2, "partition_config": {"layer_specs": FUSED, "strict_mode": True}}),
    ]
    for found in ranks(2, trained, cells, timeout=120):
        for (kind, section), (tensor, weights) in zip(cells, found, strict=True):
            model = made(kind)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for _ in range(2):
                optimizer.zero_grad()
                loss_of(kind, model).backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
            assert tensor == 2
            for name, value in model.named_parameters():
                torch.testing.assert_close(
                    weights[name], value.detach(), rtol=1e-10, atol=1e-12, msg=f"{kind} {section} {name}"
                )


def test_a_partition_config_gives_the_plan_of_each_layer() -> None:
    plan = plan_of(made("llama"), {"partition_config": {"layer_specs": SPECS}})
    attention = plan["model.layers.0.self_attn.q_proj"]
    assert isinstance(attention, Column) and attention.unit == 4  # whole heads, as the family's plan has it
    assert isinstance(plan["model.layers.0.mlp.down_proj"], Row) and "lm_head" not in plan
    gathered = [{"patterns": ["lm_head"], "gather_output": True}, {"patterns": [r".*o_proj"], "partition_type": "row"}]
    found = plan_of(made("llama"), {"partition_config": {"layer_specs": gathered}})["lm_head"]
    assert isinstance(found, Column) and found.gather_output
    skipped = [{"patterns": [r".*\.down$"], "partition_type": "skip"}, *FUSED]
    assert "down" in plan_of(made("attention"), {"partition_config": {"layer_specs": skipped}})  # no dot before it


@pytest.mark.parametrize(
    ("section", "text"),
    [
        ({}, "there is no built-in plan for a Attention.*In the configuration, tensor_parallel.partition_config takes"),
        ({"preset_model": "llama"}, "preset_model is 'llama', but the model's model_type is None"),
        ({"partition_config": {"layers": []}}, "partition_config has no key 'layers'; known are layer_specs"),
        ({"partition_config": {"layer_specs": FUSED[:1], "strict_mode": True}}, "no entry of layer_specs matches out"),
        ({"partition_config": {"layer_specs": [{"patterns": "x"}]}}, r"layer_specs\[0\].patterns is 'x': give a list"),
        ({"partition_config": {"layer_specs": [{"patterns": ["("]}]}}, "has '\\(', which is no regular expression"),
        (
            {"partition_config": {"layer_specs": [{"patterns": [], "partition_dim": 1}]}},
            "partition_dim is 1, but a col",
        ),
        (
            {"partition_config": {"layer_specs": [{"patterns": [], "shape": [4, -1, 8]}]}},
            r"shape is \[4, -1, 8\]: give",
        ),
        ({"partition_config": {"layer_specs": [{"patterns": [], "partition_type": "diag"}]}}, "give column, row or"),
    ],
)
def test_models_that_autotp_cannot_shard_are_refused(section: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        plan_of(made("attention"), section)
