"""Llama's family: its sizes, its math against plain torch and transformers, its shards, packed rows."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from triax.grid import Grid
from triax.grid.layout import Layout
from triax.models.config import LlamaConfig, RopeScaling
from triax.models.llama import LlamaLoss, llama_layers
from triax.pipe.module import PipelineModule
from triax.pipe.spec import TiedLayerSpec

from support.paths import DOCS, ROOT
from support.readme_blocks import programs, run_page_program
from support.reference import llama_logits, rms_norm
from support.sweeps import some
from support.toys import token_batch

CLOSE: dict[str, Any] = {"rtol": 1e-10, "atol": 1e-11}  # gradients here reach 15

# An uneven vocabulary, a hidden width that 4 does not divide, heads of another width than width / heads.
PLAIN = LlamaConfig(
    vocab_size=53,
    max_position_embeddings=16,
    hidden_size=20,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=30,
    head_dim=6,
)
CONFIGS = {
    "llama": PLAIN,
    "every head its own keys": replace(PLAIN, num_key_value_heads=4),
    "scaled rope, tied": replace(
        PLAIN,
        max_position_embeddings=128,
        rope_theta=5e2,
        rope_scaling=RopeScaling(original_max_position_embeddings=100),
        tie_word_embeddings=True,
    ),
    "qwen2": replace(PLAIN, qkv_bias=True, rms_norm_eps=1e-6, rope_theta=1e6),
    "qwen3": replace(
        PLAIN, num_attention_heads=6, num_key_value_heads=3, qk_norm=True, rms_norm_eps=1e-6, rope_theta=1e6
    ),
}


def build(config: LlamaConfig, grid: Grid, sequence_parallel: bool = False) -> PipelineModule:
    """Build layers with weights too large to be nearly linear, and with biases and norms that have an effect."""
    model = PipelineModule(llama_layers(config, sequence_parallel), grid=grid, seed=5, dtype=torch.float64)
    with torch.no_grad():
        for placed in model.local_parameters():
            whole = torch.linspace(-0.5, 0.5, math.prod(placed.layout.shape), dtype=torch.float64)
            shift = placed.layout.shard(whole.view(placed.layout.shape), grid.tensor.rank, grid.tensor.size)
            if placed.parameter.dim() == 1:
                placed.parameter.add_(shift, alpha=len(placed.layout.name))
            else:
                placed.parameter.mul_(25 if placed.layout.name == "layers.0.weight" else 8)
    return model


def batch(config: LlamaConfig, rows: int = 3, length: int = 12) -> tuple[Tensor, Tensor, Tensor]:
    return token_batch(config.vocab_size, rows, length)


def train_on_rank(size: int, cases: list[tuple[LlamaConfig, bool, bool]]) -> list[dict[str, Any]]:
    grid, found = Grid(tensor=size), []
    for config, sequence_parallel, packed in cases:
        model = build(config, grid, sequence_parallel)
        ids, labels, documents = batch(config)
        logits = model((ids, documents) if packed else ids)
        total, weight = LlamaLoss(grid, config.vocab_size)(logits, labels)
        (total / weight).backward()
        placed = {p.layout.name: p for p in model.local_parameters()}
        found.append(
            {
                "loss": (total / weight).detach(),
                "logits": logits.detach(),
                "weights": {name: p.parameter.detach() for name, p in placed.items()},
                "grads": {name: p.parameter.grad for name, p in placed.items()},
                "layouts": {name: p.layout for name, p in placed.items()},
            }
        )
    return found


@pytest.mark.parametrize("size", [1, 2, 4])
def test_llama_gradients_equal_those_of_plain_torch(ranks: Any, size: int) -> None:
    cases = [(config, i % 2 == 1, i % 3 == 1) for i, config in enumerate(CONFIGS.values())]
    by_rank = ranks(size, train_on_rank, size, cases)
    for (config, _, packed), *found in zip(cases, *by_rank, strict=True):
        layouts: dict[str, Layout] = found[0]["layouts"]
        weights = {name: layout.assemble([f["weights"][name] for f in found]) for name, layout in layouts.items()}
        weights = {name: w.clone().requires_grad_() for name, w in weights.items()}
        ids, labels, documents = batch(config)
        wanted = llama_logits(weights, ids, config, documents if packed else None)
        loss = F.cross_entropy(wanted.flatten(0, 1), labels.flatten())
        loss.backward()
        logits = Layout((3, 12, 53), shard_dim=2).assemble([f["logits"] for f in found])
        torch.testing.assert_close(logits, wanted.detach(), **CLOSE)
        for f in found:
            torch.testing.assert_close(f["loss"], loss.detach(), rtol=1e-10, atol=0)
        for name, layout in layouts.items():
            parts = [f["grads"][name] for f in found]
            grad = sum(parts) if layout.partial else layout.assemble(parts)
            torch.testing.assert_close(grad, weights[name].grad, **CLOSE, msg=f"{config} {name}: {{}}".format)


# --------------------------------------------------------------------------------- against transformers


def theirs(config: LlamaConfig) -> nn.Module:
    """The model of ``transformers`` of the same shape, its norms in the dtype of what they norm (not float32)."""
    transformers = pytest.importorskip("transformers")
    kind = "Qwen2" if config.qkv_bias else "Qwen3" if config.qk_norm else "Llama"
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.rope_scaling is not None:
        s = config.rope_scaling
        assert isinstance(s, RopeScaling)
        rope |= {
            "rope_type": "llama3",
            "factor": s.factor,
            "original_max_position_embeddings": s.original_max_position_embeddings,
        }
        rope |= {"low_freq_factor": s.low_freq_factor, "high_freq_factor": s.high_freq_factor}
    made = getattr(transformers, f"{kind}Config")(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_position_embeddings,
        rms_norm_eps=config.rms_norm_eps,
        tie_word_embeddings=config.tie_word_embeddings,
        rope_parameters=rope,
        attn_implementation="sdpa",
    )
    model: nn.Module = getattr(transformers, f"{kind}ForCausalLM")(made).double()
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            norm = lambda self, x: rms_norm(x, self.weight, self.variance_epsilon)  # noqa: E731
            module.forward = MethodType(norm, module)
    return model


def their_names(config: LlamaConfig) -> dict[str, tuple[str, ...]]:
    """Our names, and theirs: several where ours are fused."""
    names: dict[str, tuple[str, ...]] = {"layers.0.weight": ("model.embed_tokens.weight",)}
    for i in range(config.num_hidden_layers):
        ours, layer = f"layers.{i + 1}.", f"model.layers.{i}."
        names[f"{ours}norm1.weight"] = (f"{layer}input_layernorm.weight",)
        names[f"{ours}norm2.weight"] = (f"{layer}post_attention_layernorm.weight",)
        names[f"{ours}mlp.gate_up.weight"] = (f"{layer}mlp.gate_proj.weight", f"{layer}mlp.up_proj.weight")
        names[f"{ours}mlp.down.weight"] = (f"{layer}mlp.down_proj.weight",)
        names[f"{ours}attention.out.weight"] = (f"{layer}self_attn.o_proj.weight",)
        for end in ("weight", "bias") if config.qkv_bias else ("weight",):
            names[f"{ours}attention.q.{end}"] = (f"{layer}self_attn.q_proj.{end}",)
            names[f"{ours}attention.kv.{end}"] = (f"{layer}self_attn.k_proj.{end}", f"{layer}self_attn.v_proj.{end}")
        if config.qk_norm:
            for norm in ("q_norm", "k_norm"):
                names[f"{ours}attention.{norm}.weight"] = (f"{layer}self_attn.{norm}.weight",)
    names[f"layers.{config.num_hidden_layers + 1}.weight"] = ("model.norm.weight",)
    if not config.tie_word_embeddings:
        names[f"layers.{config.num_hidden_layers + 2}.weight"] = ("lm_head.weight",)
    return names


@pytest.mark.parametrize("name", CONFIGS)
def test_llama_logits_and_gradients_equal_transformers(name: str) -> None:
    config = CONFIGS[name]
    model, peer = build(config, Grid()), theirs(config)
    ours = {p.layout.name: p.parameter for p in model.local_parameters()}
    names, parameters = their_names(config), dict(peer.named_parameters())
    assert sorted(sum(names.values(), ())) == sorted(parameters) and names.keys() == ours.keys()
    with torch.no_grad():
        for mine, parts in names.items():
            for part, value in zip(parts, ours[mine].chunk(len(parts)), strict=True):
                parameters[part].copy_(value)
    ids, labels, _ = batch(config)
    logits, wanted = model(ids), peer(input_ids=ids).logits
    torch.testing.assert_close(logits, wanted, **CLOSE)
    F.cross_entropy(wanted.flatten(0, 1), labels.flatten()).backward()
    total, weight = LlamaLoss(Grid(), config.vocab_size)(logits, labels)
    (total / weight).backward()
    for mine, parts in names.items():
        grads = [parameters[part].grad for part in parts]
        torch.testing.assert_close(ours[mine].grad, torch.cat(grads), **CLOSE, msg=f"{mine}: {{}}".format)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------- packed rows


def test_llama_treats_packed_documents_separately() -> None:
    """Logits and gradients: 5 + 1 + 6 tokens in one row, and then each in a row of its own."""
    for name in ("llama", "qwen3"):
        config = CONFIGS[name]
        ids, labels, _ = batch(config, rows=1)
        documents = torch.tensor([[3] * 5 + [4] + [8] * 6])
        packed, alone = build(config, Grid()), build(config, Grid())
        loss = LlamaLoss(Grid(), config.vocab_size)
        together = packed((ids, documents))
        total, weight = loss(together, labels)
        (total / weight).backward()
        for start, stop in ((0, 5), (5, 6), (6, 12)):
            logits = alone(ids[:, start:stop])
            torch.testing.assert_close(together[:, start:stop].detach(), logits.detach(), **CLOSE)
            (loss(logits, labels[:, start:stop])[0] / weight).backward()
        for (key, a), b in zip(packed.named_parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad, **CLOSE, msg=f"{name} {key}: {{}}".format)


def test_llama_layers_have_the_expected_kinds_and_names() -> None:
    specs = llama_layers(CONFIGS["scaled rope, tied"])
    assert [spec.typename for spec in specs] == [
        "TokenEmbedding",
        "LlamaBlock",
        "LlamaBlock",
        "FinalRMSNorm",
        "TokenEmbedding",
    ]
    assert all(isinstance(spec, TiedLayerSpec) and spec.key == "embed" for spec in (specs[0], specs[-1]))
    untied = llama_layers(PLAIN)
    assert untied[-1].typename == "VocabParallelHead"
    names = {name for name, _ in untied[1].build(Grid()).named_parameters()}
    ends = ("norm1", "attention.q", "attention.kv", "attention.out", "norm2", "mlp.gate_up", "mlp.down")
    assert names == {f"{end}.weight" for end in ends}


# -------------------------------------------------------------------------------------- docs/models.md


PROGRAMS: list[tuple[str, list[int]]] = [
    ("tiny_llama.py", []),
    ("presets.py", []),
    ("packed.py", []),
    ("packed.py", [1, 2, 2]),
    ("hybrid.py", [1, 1, 1, 2]),
    ("masked.py", []),
    ("masked.py", [2, 1, 2]),
    ("images.py", [2, 1, 2, 1]),
    ("backwards.py", []),
    ("backwards.py", [2, 1, 2]),
    ("spell.py", []),
    ("spell.py", [2, 1, 2]),
    ("own.py", []),
    ("own.py", [1, 1, 4]),
]


@pytest.mark.parametrize(("name", "sizes"), some(PROGRAMS, (0, 1, 2, 4, 6, 7, 9, 11, 12)))
def test_the_programs_of_the_models_page_run(ranks: Any, name: str, sizes: list[int], tmp_path: Path) -> None:
    job = ("models.md", str(tmp_path), name, sizes)
    printed, *_ = ranks(math.prod(sizes), run_page_program, *job, timeout=60)
    if name == "images.py":  # a guess is right for 26 of them
        assert int(printed.split()[2]) > 128, printed


def test_every_program_of_the_models_page_is_run() -> None:
    run = {name for name, _ in PROGRAMS} | {"replaced.py"}  # by the test below
    assert 'programs(page)["mtp.py"]' in (ROOT / "tests" / "models" / "test_mtp.py").read_text()
    assert {*programs((DOCS / "models.md").read_text())} == run | {"mtp.py"}


def test_the_gpt_of_the_docs_has_the_gradients_of_one_process(ranks: Any, tmp_path: Path) -> None:
    """The program compares all gradients, in float64 to 1e-10, with those that one process wrote."""
    job = ("models.md", str(tmp_path), "replaced.py")
    (alone,) = ranks(1, run_page_program, *job, timeout=60)
    first, *others = ranks(4, run_page_program, *job, [2, 1, 2], timeout=60)
    assert alone == first and "gradients equal" in first and not any(others)
    assert len(torch.load(tmp_path / "one.pt")) == int(first.split()[2]) > 20
