"""transformers' own Trainer and Accelerate's DeepSpeedPlugin over triax, after ``install()``, against one process.

Each run has processes of its own, because ``install`` is called before transformers is imported.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

# A user's file, as transformers' documentation shows it.
ZERO: dict[str, Any] = {
    "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16},
    "bf16": {"enabled": "auto"},
    "zero_optimization": {"overlap_comm": True, "contiguous_gradients": True, "reduce_bucket_size": "auto"},
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": 2000,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
}
OPTIMIZER = {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}}
OF_STAGE: dict[int, dict[str, Any]] = {
    2: {"stage": 2, "allgather_partitions": True, "allgather_bucket_size": 2e8, "reduce_scatter": True},
    3: {
        "stage": 3,
        "sub_group_size": 1e9,
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
}
SIZES: dict[str, Any] = {"vocab_size": 53, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 4}
SIZES |= {"resid_pdrop": 0.0, "attn_pdrop": 0.0, "embd_pdrop": 0.0}
SIZES |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


class Text(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 44

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = (7 * index + torch.arange(12) * (1 + index % 3)) % 53
        labels = ids.clone()
        labels[: 2 * (index % 5)] = -100
        return {"input_ids": ids, "labels": labels}


def train(out: str, config: str | None, resume: str | None) -> dict[str, Any]:
    """A script for transformers' Trainer, as it is; ``deepspeed=`` is the path of a file, or None."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    replicas = int(os.environ.get("WORLD_SIZE", "1"))
    options: dict[str, Any] = {"per_device_train_batch_size": 4 // replicas}
    options |= {"per_device_eval_batch_size": 4 // replicas, "gradient_accumulation_steps": 2, "max_steps": 6}
    options |= {"learning_rate": 1e-2, "warmup_steps": 3, "logging_steps": 1, "save_steps": 3, "eval_steps": 3}
    options |= {"eval_strategy": "steps", "report_to": "none", "disable_tqdm": True, "use_cpu": True}
    args = transformers.TrainingArguments(out, deepspeed=config, **options)
    torch.manual_seed(0)
    if resume is None:
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**SIZES))
    else:  # with stage 3, from_pretrained reads into shards
        model = transformers.GPT2LMHeadModel.from_pretrained(resume)
    trainer = transformers.Trainer(
        model, args, train_dataset=Text(), eval_dataset=torch.utils.data.Subset(Text(), range(8))
    )
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model(f"{out}/last")
    keys = ("loss", "grad_norm", "eval_loss")
    return {key: [row[key] for row in trainer.state.log_history if key in row] for key in keys}


def accelerated(out: str, stage: int) -> dict[str, Any]:
    """A loop for Accelerate; with a stage, its DeepSpeedPlugin. Saved in the middle, and run again from there."""
    from accelerate import Accelerator, PartialState
    from accelerate.utils import DeepSpeedPlugin

    replicas = int(os.environ.get("WORLD_SIZE", "1"))
    torch.manual_seed(0)
    model: Any = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))
    data = torch.utils.data.TensorDataset(torch.randn(32, 8), torch.randint(3, (32,)))
    loader: Any = torch.utils.data.DataLoader(data, batch_size=4 // replicas)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    PartialState(cpu=True)
    if stage:
        plugin = DeepSpeedPlugin(zero_stage=stage, gradient_accumulation_steps=2, gradient_clipping=1.0)
        accelerator = Accelerator(deepspeed_plugin=plugin)
    else:
        accelerator = Accelerator(gradient_accumulation_steps=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses: list[float] = []
    norms: list[float] = []

    def epoch() -> None:
        for inputs, labels in loader:
            with accelerator.accumulate(model):
                loss = torch.nn.functional.cross_entropy(model(inputs), labels)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norm: Any = accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    norms.append(float(norm))
                optimizer.step()
                optimizer.zero_grad()
            losses.append(float(accelerator.gather(loss.detach().reshape(1)).mean()))

    epoch()
    accelerator.save_state(out)
    epoch()
    accelerator.load_state(out)
    epoch()
    return {"losses": losses, "norms": norms}


def run(count: int, job: str, installed: bool, *words: str) -> dict[str, Any]:
    """Run a function of this file in processes of its own, and return the result of rank 0."""
    launcher = ["-m", "torch.distributed.run", "--local-addr", "127.0.0.1", "--nproc-per-node", str(count)]
    words = (job, str(installed), *words)
    done = subprocess.run(
        [sys.executable, *launcher, "--master-port", "0", "--rdzv-backend", "c10d", __file__, *words],
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1].removeprefix("result "))
    return found


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
@pytest.mark.parametrize("own_optimizer", [False, True])
@pytest.mark.parametrize("stage", OF_STAGE)
def test_transformers_trainer_with_a_zero_file_trains_as_without(
    tmp_path: Path, stage: int, own_optimizer: bool
) -> None:
    """Losses equal one process's without DeepSpeed; a run resumes from its checkpoint; the folder is transformers'."""
    config = {**ZERO, "zero_optimization": {**ZERO["zero_optimization"], **OF_STAGE[stage]}}
    config |= {} if own_optimizer else {"optimizer": OPTIMIZER}
    file = tmp_path / "ds_config.json"
    file.write_text(json.dumps(config))
    wanted = run(1, "train", False, str(tmp_path / "plain"))
    out = str(tmp_path / "out")
    for count, resume in ((2, None), (2, f"{out}/checkpoint-3")):
        words = [out, str(file)] if resume is None else [f"{out}-again", str(file), resume]
        found = run(count, "train", True, *words)
        for key, values in wanted.items():
            assert found[key] == pytest.approx(values, rel=1e-6), (key, resume)

    import transformers

    reader: Any = transformers.AutoModelForCausalLM
    first, again = (reader.from_pretrained(f"{out}{more}/last").state_dict() for more in ("", "-again"))
    assert all(torch.equal(value, again[name]) for name, value in first.items())


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
@pytest.mark.parametrize("stage", OF_STAGE)
def test_accelerates_deepspeed_plugin_trains_as_accelerate(tmp_path: Path, stage: int) -> None:
    wanted = run(1, "accelerated", False, str(tmp_path / "plain"), "0")
    found = run(2, "accelerated", True, str(tmp_path / "out"), str(stage))
    assert found["losses"] == pytest.approx(wanted["losses"], rel=1e-6)
    assert found["norms"] == pytest.approx(wanted["norms"], rel=1e-6)
    assert found["losses"][8:16] == found["losses"][16:]


if __name__ == "__main__":
    name, installed, *rest = sys.argv[1:]
    if installed == "True":
        import triax.compat.deepspeed

        triax.compat.deepspeed.install()
    if name == "train":
        result = train(rest[0], *[*rest[1:], None, None][:2])
    else:
        result = accelerated(rest[0], int(rest[1]))
    if os.environ["RANK"] == "0":
        print("\nresult", json.dumps(result), flush=True)
