"""transformers' Trainer and triax's in float64: models, rows of unlike lengths, runs and their comparison."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset

import triax

from support import trainer_jobs
from support.trainer_jobs import STEPS, steps_of

_NO_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
GPT2: dict[str, Any] = {"vocab_size": 53, "n_positions": 16, "n_embd": 24, "n_layer": 3, "n_head": 4}
GPT2 |= {"resid_pdrop": 0.0, "attn_pdrop": 0.0, "embd_pdrop": 0.0} | _NO_TOKENS
LLAMA: dict[str, Any] = {"vocab_size": 53, "hidden_size": 24, "intermediate_size": 36, "num_hidden_layers": 3}
LLAMA |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32} | _NO_TOKENS
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", GPT2),
    "llama": ("LlamaConfig", "LlamaForCausalLM", LLAMA),
}
_WIDE = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"} | {"hidden_size": 32}
_STILL = dict.fromkeys(("embd_pdrop", "resid_pdrop", "dropout", "residual_dropout", "embedding_dropout"), 0.0)
OTHERS: dict[str, dict[str, Any]] = {
    "OPT": {"ffn_dim": 36, "word_embed_proj_dim": 32, "attention_dropout": 0.0},
    "GPTNeoX": {},
    "Phi": {"partial_rotary_factor": 0.5},
    "Starcoder2": {"num_key_value_heads": 2},
}
CASES |= {name: (f"{name}Config", f"{name}ForCausalLM", _WIDE | _STILL | more) for name, more in OTHERS.items()}


class Text(Dataset[dict[str, list[int]]]):
    """Rows of unlike lengths: 44 of them are 5 steps of 2 microbatches, and one of 1."""

    def __init__(self, length: int = 44, first: int = 0) -> None:
        self.length, self.first = length, first

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        if not 0 <= index < self.length:
            raise IndexError
        place = self.first + index
        ids = [(7 * place + (1 + place % 3) * step) % 53 for step in range(5 + place % 8)]
        return {"input_ids": ids, "labels": [-100] * (place % 4) + ids[place % 4 :]}


def padded(rows: list[dict[str, list[int]]], left: bool = False) -> dict[str, Tensor]:
    """Pad on the right, with a mask."""
    longest = max(len(row["input_ids"]) for row in rows)
    whole = [{**row, "attention_mask": [1] * len(row["input_ids"])} for row in rows]
    fill = {"input_ids": 0, "labels": -100, "attention_mask": 0}
    more = {key: [[value] * (longest - len(row[key])) for row in whole] for key, value in fill.items()}
    return {
        key: torch.tensor([extra + row[key] if left else row[key] + extra for row, extra in zip(whole, more[key])])
        for key in fill
    }


def exact_loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """transformers' loss rounds the logits to fp32; this one does not."""
    logits, labels = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    count = (labels != -100).sum() if num_items_in_batch is None else num_items_in_batch
    return F.cross_entropy(logits, labels, reduction="sum") / count


@contextmanager
def exact() -> Iterator[None]:
    """Compute in float64, with RMSNorms that do not round to fp32 as transformers' do."""
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    def forward(self: Any, x: Tensor) -> Tensor:
        y: Tensor = self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon)
        return y

    kind: Any = LlamaRMSNorm
    rounds, kind.forward = kind.forward, forward
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        kind.forward = rounds
        torch.set_default_dtype(torch.float32)


def model_of(case: str = "gpt2") -> Any:
    return trainer_jobs.model_of(case, CASES)


TARGETS = {"gpt2": ["c_attn", "mlp.c_proj"], "llama": ["q_proj", "v_proj", "o_proj", "down_proj"]}
SECTION = {"rank": 2, "alpha": 6}


def adapted(model: Any, case: str, kind: str = "peft") -> Any:
    """Return a model with LoRA of PEFT. Its factors are both random, or those that triax draws for a section."""
    import peft

    torch.manual_seed(1)
    options: dict[str, Any] = {"r": 2, "lora_alpha": 6, "use_rslora": kind == "peft"}
    config = peft.LoraConfig(**options, target_modules=TARGETS[case], task_type="CAUSAL_LM")
    if kind == "more":  # of column-parallel layers: each rank drops what one process drops
        targets = ["q_proj", "k_proj", "up_proj"]
        config = peft.LoraConfig(r=2, target_modules=targets, lora_dropout=0.2, modules_to_save=["lm_head"])
    drawn = kind == "section"
    if drawn:
        other = model_of(case)
        other.seed = 42  # the Trainer's
        triax.add_lora(other, {**SECTION, "targets": TARGETS[case]})
    with_lora: Any = peft.get_peft_model(model, config)
    for name, parameter in with_lora.named_parameters():
        if drawn and "lora_A" in name:
            layer = other.get_submodule(name.removeprefix("base_model.model.").partition(".lora_A")[0])
            (adapter,) = layer.lora.children()
            parameter.data.copy_(adapter.A)
        elif not drawn and "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    if kind == "more":
        with_lora.add_adapter("second", peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
        with_lora.set_adapter("default")
    return with_lora


def trainer_of(
    out: str,
    replicas: int,
    triax_options: dict[str, Any] | None,
    case: str = "gpt2",
    model: Any = None,
    lora: str = "",
    rows: tuple[int, int] = (44, 16),
    kinds: Any = None,
    **options: Any,
) -> Any:
    """Trainer of the same run on any grid; transformers' own if ``triax_options`` is None.

    With lora="peft" the model has adapters of PEFT; with lora="section", those that a section ``lora`` would add; with
    lora="more", adapters with dropout, a second one, and a whole output layer that is trained. ``rows`` are those of
    training and evaluation; ``kinds`` are other classes than transformers' Trainer and triax's.
    """
    import transformers

    model = model_of(case) if model is None else model
    model = adapted(model, case, lora) if lora else model

    common = steps_of(out, replicas, **{"eval_steps": 10, "save_steps": 10, **options})
    data: dict[str, Any] = {"train_dataset": Text(rows[0]), "eval_dataset": Text(rows[1], 100)}
    data["data_collator"] = padded
    plain, ours = kinds or (transformers.Trainer, triax.Trainer)
    if triax_options is None:
        arguments = transformers.TrainingArguments(use_cpu=True, **common)
        trainer: Any = plain(model, arguments, compute_loss_func=exact_loss, **data)
    else:
        sizes = triax_options.get("grid", {})
        if sizes.get("pipe", 1) == sizes.get("context", 1) == 1:
            data["compute_loss_func"] = exact_loss
        trainer = ours(model, triax.TrainingArguments(**triax_options, **common), **data)
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


@exact()
def run(
    out: str,
    replicas: int,
    triax_options: dict[str, Any] | None,
    resume: str | None = None,
    optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Train in float64 and evaluate; what was logged, predictions, and the model's weights when it ends."""
    trainer = trainer_of(out, replicas, triax_options, **options)
    if optimizer is not None:
        trainer.optimizer = optimizer(trainer.model)
    trainer.train(resume_from_checkpoint=resume)
    history = trainer.state.log_history
    keys = ("loss", "grad_norm", "learning_rate", "eval_loss")
    found: dict[str, Any] = {key: [row[key] for row in history if key in row] for key in keys}
    found["predicted"] = trainer.predict(Text(8, 200)).predictions
    trainer.save_model(f"{out}/last")
    if not hasattr(trainer.model, "triax_parameter_share"):  # else it has shards
        with trainer.engine.whole_weights() if hasattr(trainer, "engine") else nullcontext():
            found["weights"] = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    return found


def near(found: dict[str, Any], wanted: dict[str, Any], steps: int = STEPS) -> None:
    for key, count in (("loss", steps), ("grad_norm", steps), ("learning_rate", steps), ("eval_loss", 2)):
        assert len(found[key]) == len(wanted[key]) == count, key
        assert found[key] == pytest.approx(wanted[key], rel=1e-10, abs=1e-12), key
    assert found["predicted"].shape == wanted["predicted"].shape
    for index in range(8):  # logits of padding have no meaning
        length = len(Text(8, 200)[index]["input_ids"])
        assert abs(found["predicted"][index, :length] - wanted["predicted"][index, :length]).max() < 1e-8
    for name, value in wanted["weights"].items() if "weights" in found else ():
        torch.testing.assert_close(found["weights"][name], value, rtol=0, atol=1e-9, msg=name)


def exported(folder: str) -> dict[str, Tensor]:
    """Read a folder as transformers does, in float64."""
    return trainer_jobs.weights(folder, dtype=torch.float64)
