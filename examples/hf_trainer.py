"""Train a small GPT-2 of transformers with triax.Trainer, on bytes, without a download.

    python examples/hf_trainer.py
    torchrun --nproc-per-node 4 examples/hf_trainer.py --triax '{"zero_optimization": {"stage": 3}}'
    torchrun --nproc-per-node 4 examples/hf_trainer.py --triax ds_config.json --bf16 --max_steps 500

The data are the source of Python's standard library, or the text given by ``--text``. All options of transformers'
TrainingArguments are accepted; ``--resume`` continues from the last checkpoint, on any number of processes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from corpus import find, open_parts
from torch import Tensor
from torch.utils.data import Dataset

import triax
from triax.data import TokenData

LENGTH = 128  # bytes of a sample


@dataclass
class Options:
    """Options beside those of TrainingArguments."""

    text: list[str] = field(default_factory=list, metadata={"help": "Files and folders of text."})
    resume: bool = field(default=False, metadata={"help": "Continue from the last checkpoint in output_dir."})
    layers: int = 4
    width: int = 128
    heads: int = 4


class Rows(Dataset[dict[str, Tensor]]):
    """Rows of packed text; transformers shifts the labels itself."""

    def __init__(self, data: TokenData, most: int | None = None) -> None:
        self.rows = data.rows(0)
        self.count = min(self.rows.count, most or self.rows.count)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids, labels = np.empty((2, 1, LENGTH), np.int64)
        self.rows.fill(index, 1, ids, labels, None)
        return {"input_ids": torch.from_numpy(ids[0]), "labels": torch.from_numpy(ids[0])}


def main() -> None:
    """Train, evaluate, and save a folder that transformers reads."""
    kinds: Any = (triax.TrainingArguments, Options)
    parser = transformers.HfArgumentParser(kinds)
    parser.set_defaults(
        output_dir="runs/hf",
        max_steps=200,
        per_device_train_batch_size=8,
        learning_rate=1e-3,
        warmup_steps=20,
        logging_steps=20,
        save_steps=100,
        report_to="none",
    )
    args, options = parser.parse_args_into_dataclasses()
    Path(args.output_dir).mkdir(parents=True, exist_ok=True)
    training, held_out = open_parts(find(options.text), Path(args.output_dir) / "text", LENGTH)
    config = transformers.GPT2Config(
        vocab_size=256,
        n_positions=LENGTH,
        n_embd=options.width,
        n_layer=options.layers,
        n_head=options.heads,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(args.seed)
    model = transformers.GPT2LMHeadModel(config)
    datasets = {"train_dataset": Rows(training), "eval_dataset": Rows(held_out, most=64)}
    trainer = triax.Trainer(model=model, args=args, **datasets)
    trainer.train(resume_from_checkpoint=options.resume or None)
    loss = trainer.evaluate()["eval_loss"]
    trainer.save_model(str(Path(args.output_dir) / "model"))
    if trainer.is_world_process_zero():
        print(f"step {trainer.state.global_step}: held-out loss {loss:.3f} nats a byte; {args.output_dir}/model")


if __name__ == "__main__":
    main()
