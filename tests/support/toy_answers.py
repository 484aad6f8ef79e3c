"""A toy Llama of letters, prompts with answers as rows of tokens, and TRL's options for runs that are compared."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

LENGTH = 16  # tokens of a row
LETTERS = {letter: number for number, letter in enumerate("._abcdefghijklmnopqrstuvwxyz ")}
SIZES: dict[str, Any] = {"vocab_size": len(LETTERS), "hidden_size": 16, "intermediate_size": 24}
SIZES |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32}
SIZES |= {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}


def quiet() -> None:
    """Turn off progress bars, telemetry and logs of TRL and what it uses; call it before TRL is imported."""
    os.environ.update(CI="1", HF_HUB_OFFLINE="1", TQDM_DISABLE="1")
    import datasets
    import transformers

    transformers.utils.logging.set_verbosity_error()
    datasets.disable_progress_bars()


def model_of() -> Any:
    """Return a Llama in float64, the same one at each call."""
    import transformers

    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).double()


def tokenizer() -> Any:
    """Return a tokenizer whose tokens are letters, for transformers."""
    import tokenizers
    import transformers

    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(LETTERS, unk_token="."))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    inner.decoder = tokenizers.decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, pad_token=".", eos_token="_")


def steps(folder: str, rows: int, count: int, rate: float) -> dict[str, Any]:
    """Return the options of a trainer of TRL: steps of SGD with a batch of ``rows``, whose losses are logged."""
    return {
        "output_dir": f"{folder}/out",
        "per_device_train_batch_size": rows,
        "max_steps": count,
        "learning_rate": rate,
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        "max_grad_norm": 0.0,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "bf16": False,
        "use_cpu": True,
        "gradient_checkpointing": False,
    }


def in_order(trainer: Any, numbers: Iterable[int]) -> Any:
    """Return a class of TRL's trainer that reads the samples of these numbers, one after another."""

    class InOrder(trainer):
        def _get_train_sampler(self, dataset: Any = None) -> Any:
            return numbers

    return InOrder


def run_of(trainer: Any, folder: str) -> list[dict[str, float]]:
    """Train with a trainer of TRL, save the weights after it, and return the log of its steps."""
    import transformers

    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    trainer.save_model(f"{folder}/last")
    return [row for row in trainer.state.log_history if "loss" in row]


def row_of(prompt: str, answer: str) -> tuple[Tensor, Tensor]:
    """Return ids and labels (T,): the answer and its end count."""
    text = [LETTERS[letter] for letter in prompt + answer] + [1]
    ids = torch.tensor(text + [0] * (LENGTH + 1 - len(text)))
    labels = torch.full((LENGTH,), -100)
    labels[len(prompt) - 1 : len(text) - 1] = ids[len(prompt) : len(text)]
    return ids[:-1], labels
