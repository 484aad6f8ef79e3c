"""Models, texts and Trainers that several tests of Hugging Face's Trainer use."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

import triax

from support.huggingface_models import read_back

_NO_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
_NO_DROPOUT = {"resid_pdrop": 0.0, "attn_pdrop": 0.0, "embd_pdrop": 0.0}
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2": (
        "GPT2Config",
        "GPT2LMHeadModel",
        {"vocab_size": 53, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 4} | _NO_DROPOUT | _NO_TOKENS,
    ),
    "llama": (
        "LlamaConfig",
        "LlamaForCausalLM",
        {
            "vocab_size": 61,
            "hidden_size": 32,
            "intermediate_size": 44,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 32,
        }
        | _NO_TOKENS,
    ),
}
STEPS, BATCH, ACCUMULATION = 20, 4, 2  # the batch of all replicas


class Text(Dataset[dict[str, Tensor]]):
    """Rows with unlike numbers of labels that count: 44 of them are 5 steps of 2 microbatches, and one of 1."""

    def __init__(self, length: int = 44, first: int = 0) -> None:
        self.length, self.first = length, first

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < self.length:
            raise IndexError
        generator = torch.Generator().manual_seed(self.first + index)
        start = int(torch.randint(40, (), generator=generator))
        ids = (start + torch.arange(12) * (1 + index % 3)) % 53
        labels = ids.clone()
        labels[: 2 * (index % 5)] = -100
        return {"input_ids": ids, "labels": labels}


def model_of(case: str, cases: dict[str, Any] = CASES) -> Any:
    """Return a model of transformers with drawn weights, the same one at each call."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    config, model, sizes = cases[case]
    torch.manual_seed(0)
    return getattr(transformers, model)(getattr(transformers, config)(**sizes))


def steps_of(out: str, replicas: int, **options: Any) -> dict[str, Any]:
    """Return arguments of a Trainer: 20 steps of a global batch of 4 x 2, which are logged, evaluated and saved."""
    return {
        "output_dir": out,
        "per_device_train_batch_size": BATCH // replicas,
        "per_device_eval_batch_size": BATCH // replicas,
        "gradient_accumulation_steps": ACCUMULATION,
        "max_steps": STEPS,
        "learning_rate": 1e-2,
        "warmup_steps": 3,
        "weight_decay": 0.1,
        "max_grad_norm": 1.0,
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 5,
        "save_steps": 5,
        "report_to": "none",
        "disable_tqdm": True,
    } | options


def trainer_of(
    case: str, out: str, replicas: int, config: Any = None, model: Any = None, data: Any = None, **options: Any
) -> Any:
    """Trainer of the same run on a number of replicas; transformers' own Trainer without a configuration."""
    import transformers

    model = model_of(case) if model is None else model
    common = steps_of(out, replicas, **options)
    kinds: tuple[Any, Any] = (transformers.Trainer, transformers.TrainingArguments)
    if config is None:
        common["use_cpu"] = True
    else:
        common["triax"] = config
        kinds = (triax.Trainer, triax.TrainingArguments)
    train, held_out = data or (Text(), Text(16, 100))
    trainer = kinds[0](model=model, args=kinds[1](**common), train_dataset=train, eval_dataset=held_out)
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


def replicas_here() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def logged(trainer: Any) -> dict[str, list[float]]:
    """Return the logged values: losses, norms, rates, and losses of evaluations."""
    history = trainer.state.log_history
    keys = ("loss", "grad_norm", "learning_rate", "eval_loss")
    return {key: [row[key] for row in history if key in row] for key in keys}


def zero(stage: int, tensor: int = 1) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": "auto",
        "zero_optimization": {"stage": stage},
        "tensor_parallel": {"autotp_size": tensor},
    }


def weights(folder: str, **options: Any) -> dict[str, Tensor]:
    """Read a folder as transformers does."""
    return dict(read_back(folder, **options).state_dict())
