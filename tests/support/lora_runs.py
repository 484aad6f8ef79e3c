"""Runs of models with adapters, by triax on a grid and by PEFT on one process, in float64."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import triax
from triax.grid import Grid
from triax.grid.randomness.random import Dropout, DropoutState
from triax.models.layers import NextTokenLoss
from triax.tensor_parallel.nf4 import NF4

from support.exact_norms import exact

Sizes = tuple[int, ...]  # pipe, data, tensor, context, expert
Run = tuple[list[float], dict[str, Tensor], dict[str, Tensor], dict[str, Tensor], dict[str, int]]

VOCAB, MICRO, STEPS, LR = 61, 4, 2, 1e-2
EPS = 1e-3  # of AdamW: with 1e-8 it multiplies the last bits of tiny gradients by 1e8
_SIZES = {"hidden_size": 32, "intermediate_size": 44, "num_hidden_layers": 2, "num_attention_heads": 8}
_NO_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
_LLAMA = {**_SIZES, **_NO_TOKENS, "max_position_embeddings": 32, "vocab_size": VOCAB, "num_key_value_heads": 2}
_GPT2 = {"n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 8, "resid_pdrop": 0.0, "vocab_size": VOCAB}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", _LLAMA),
    "qwen2": ("Qwen2ForCausalLM", _LLAMA | {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "gpt2": ("GPT2LMHeadModel", _GPT2 | _NO_TOKENS | {"embd_pdrop": 0.0, "attn_pdrop": 0.0}),
}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.0}
MODELS["mixtral"] = ("MixtralForCausalLM", _LLAMA | _EXPERTS)
_LATENT = {"q_lora_rank": 12, "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 6}
_DEEPSEEK = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "first_k_dense_replace": 1}
MODELS["deepseek"] = (
    "DeepseekV2ForCausalLM",
    _LLAMA | _LATENT | _DEEPSEEK | {"num_key_value_heads": 8, "aux_loss_alpha": 0.0, "n_shared_experts": 1},
)
MODELS["wide"] = ("LlamaForCausalLM", _LLAMA | {"hidden_size": 96, "intermediate_size": 176})
MODELS["phi3"] = ("Phi3ForCausalLM", _LLAMA)
_FALCON = {"multi_query": True, "new_decoder_architecture": False, "parallel_attn": True, "alibi": False}
MODELS["falcon"] = ("FalconForCausalLM", {**_SIZES, **_NO_TOKENS, **_FALCON, "vocab_size": VOCAB, "bias": False})
# PEFT's names of the keys: both libraries take them.
SOME = {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "v_proj", "gate_proj", "down_proj"]}
EVERY = {"r": 3, "lora_alpha": 8, "target_modules": "all-linear", "use_rslora": True}


def make(case: str) -> Any:
    """A random model in float64 in which no bias is 0 and no norm 1."""
    import transformers

    architecture, options = MODELS[case]
    cls = getattr(transformers, architecture)
    torch.manual_seed(3)
    model = cls(cls.config_class(**options)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    return with_eager_experts(model)


def with_eager_experts(model: Any) -> Any:
    """The model, whose experts' grouped product has no float64."""
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    return model


def saved(folder: Path, case: str) -> Path:
    make(case).save_pretrained(folder)
    return folder


def batch(replica: int, step: int, index: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + 10 * index + replica)
    ids = torch.randint(VOCAB, (2, 9), generator=generator)
    return ids[:, :-1], ids[:, 1:]


def engine_of(
    folder: Path,
    sizes: Sizes,
    lora: dict[str, Any] | None,
    stage: int = 2,
    schedule: str = "zb-v",
    sequence_parallel: bool = False,
    device: str | None = None,
    micro: int = MICRO,
    **config: Any,
) -> Any:
    context, expert = (*sizes[3:], 1, 1)[:2]
    grid = Grid(*sizes[:3], context=context, expert=expert)
    module = triax.PipelineModule(
        triax.load_hf(folder, sequence_parallel=sequence_parallel),
        grid=grid,
        loss_fn=NextTokenLoss(grid, VOCAB),
        chunks=2 if schedule == "zb-v" else 1,
        dtype=torch.float64,
        device=device,
    )
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": micro,
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": 0.01, "eps": EPS}},
        "zero_optimization": {"stage": stage},
        "pipeline": {"schedule": schedule},
        **({} if lora is None else {"lora": lora}),
        **config,
    }
    return triax.initialize(model=module, config=settings)[0]


def step(engine: Any, number: int, micro: int = MICRO) -> float:
    return engine.train_batch(iter([batch(engine.grid.data.rank, number, i) for i in range(micro)])).item()


def factors(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if ".lora." in name}


def train(
    folder: Path, sizes: Sizes, lora: dict[str, Any], out: Path | None = None, steps: int = STEPS, **options: Any
) -> Run:
    """Losses, the factors at the start, the gradients of the last step, the factors at the end, bytes held."""
    engine = engine_of(folder, sizes, lora, **options)
    start = factors(engine.gather())
    losses = [step(engine, number) for number in range(steps)]
    if out is not None:
        triax.save_lora(engine, out / "adapter")
        triax.save_hf(engine, out / "merged", merge_lora=True)
    return losses, start, engine.gather("gradients"), factors(engine.gather()), engine.memory_report()["held"]


def theirs(name: str, case: str) -> str:
    """PEFT's name of a factor of triax's."""
    kind = f"lora_{name[-1]}" if name[-1] in "AB" else "lora_magnitude_vector"
    if not name.startswith("layers."):
        return f"base_model.model.{name.partition('.lora.')[0]}.{kind}.default.weight"
    if name.startswith("layers.4.lora."):
        return f"base_model.model.lm_head.{kind}.default.weight"
    _, block, *middle, part, _ = name.removesuffix(".weight").split(".")
    if case == "gpt2":
        inside = {"attention": "attn", "mlp": "mlp"}[middle[0]]
        return f"base_model.model.transformer.h.{int(block) - 2}.{inside}.{part}.{kind}.default.weight"
    inside = {"attention": "self_attn", "mlp": "mlp"}[middle[0]]
    return f"base_model.model.model.layers.{int(block) - 1}.{inside}.{part}.{kind}.default.weight"


def peft_model(case: str, lora: dict[str, Any], start: dict[str, Tensor], base: Any = None) -> Any:
    """PEFT's model with these factors; ``base`` changes the model before it gets adapters."""
    import peft

    made = make(case)
    if base is not None:
        base(made)
    model = peft.get_peft_model(made, peft.LoraConfig(**lora))
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert set(trained) == {theirs(name, case) for name in start}
    with torch.no_grad():
        for name, value in start.items():
            trained[theirs(name, case)].copy_(value)
    return model


def with_masks(model: Any, case: str, p: float, start: dict[str, Tensor]) -> DropoutState:
    """Give PEFT's layers dropouts with triax's masks; return the state to which they are bound."""
    state = DropoutState()
    for name in start:
        if name.endswith(".A"):
            layer = model.get_submodule(theirs(name, case).removesuffix(".lora_A.default.weight"))
            layer.lora_dropout["default"] = dropout = Dropout(p)
            dropout.bind(f"{name[:-2]}.dropout", state)
    return state


def reference(
    case: str, lora: dict[str, Any], start: dict[str, Tensor], replicas: int, steps: int = STEPS, base: Any = None
) -> Run:
    """PEFT's run over the same batches, on one process; ``base`` changes the model before it gets adapters."""
    model = peft_model(case, lora, start, base)
    masks = (
        with_masks(model, case, lora.get("lora_dropout", 0.0), start) if lora.get("lora_dropout") else DropoutState()
    )
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(trained.values(), lr=LR, weight_decay=0.01, eps=EPS)
    losses = []
    for number in range(steps):
        optimizer.zero_grad()
        masks.step = number
        rows = [batch(replica, number, i) for replica in range(replicas) for i in range(MICRO)]
        ids, labels = (torch.cat(each) for each in zip(*rows, strict=True))
        with exact(model):
            loss = F.cross_entropy(model(input_ids=ids).logits.flatten(0, 1), labels.flatten())
            loss.backward()
        losses.append(loss.item())
        optimizer.step()
    ours = {theirs(name, case): name for name in start}
    gradients = {ours[name]: p.grad for name, p in trained.items()}
    return losses, start, gradients, {ours[name]: p.detach() for name, p in trained.items()}, {}


def equals_peft(
    runs: list[Run], case: str, lora: dict[str, Any], replicas: int, steps: int = STEPS, base: Any = None
) -> None:
    """Check losses, gradients of the last step and factors of all ranks' runs against PEFT's run."""
    losses, start, gradients, end, _ = runs[0]
    wanted = reference(case, lora, start, replicas, steps, base)
    assert losses == pytest.approx(wanted[0], rel=1e-10)
    close(gradients, wanted[2])
    close(end, wanted[3])
    assert all(run[0] == losses for run in runs)


def rounded(form: str, weight: Tensor) -> Tensor:
    """The weight as a format keeps it, by a plain loop over its blocks."""
    found, table = weight.float().clone(), torch.tensor(NF4)
    for row in found:
        for block in [row] if form == "int8" else row.split(64):
            largest = block.abs().max()
            if form == "int8":
                block.copy_((block * (127 / largest)).round() * largest * (1 / 127))
            else:
                block.copy_(table[(block[:, None] / largest - table).abs().argmin(1)] * largest)
    return found.to(weight.dtype)


def in_bits(form: str) -> Callable[[nn.Module], None]:
    """A function that rounds the linear layers of transformers' model, but its output layer."""

    def change(model: nn.Module) -> None:
        for name, layer in model.named_modules():
            if isinstance(layer, nn.Linear) and name != "lm_head":
                layer.weight.data = rounded(form, layer.weight.data)

    return change


def logits_of(model: Any) -> Tensor:
    with torch.no_grad(), exact(model):
        logits: Tensor = model.eval()(input_ids=batch(0, 9, 0)[0]).logits
    return logits


def loaded_by_peft(case: str, folder: Path, base: Any = None) -> Any:
    import peft

    model = make(case)
    if base is not None:
        base(model)
    return peft.PeftModel.from_pretrained(model, folder)


def loaded(folder: Path) -> Any:
    import transformers

    return with_eager_experts(transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64))


def close(ours: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert ours.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-10, atol=1e-10, msg=f"{{}}, of {name}".format)
