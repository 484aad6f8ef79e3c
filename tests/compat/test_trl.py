"""TRL's trainers over triax's: the losses and the stepped weights of TRL's own trainer on one process."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import triax
from triax.testing.pool import RankFailure

from support import toy_answers
from support.toy_answers import quiet, tokenizer
from support.trainer_jobs import steps_of
from support.trl_in_float64 import exact

STEPS = 3
SIZES = toy_answers.SIZES | {"hidden_size": 24, "intermediate_size": 36, "max_position_embeddings": 64}
KEYS = ["loss", "grad_norm", "eval_loss", "entropy", "mean_token_accuracy", "num_tokens", "rewards/margins", "margin"]
KEYS += ["reward", "frac_reward_zero_std", "completions/mean_length"]


def model_of(tied: bool, seed: int = 0, kind: str = "SFT") -> Any:
    import transformers

    torch.manual_seed(seed)
    config = transformers.LlamaConfig(**SIZES, tie_word_embeddings=tied)
    if kind != "Reward":
        return transformers.LlamaForCausalLM(config).double()
    config.num_labels = 1
    return transformers.LlamaForSequenceClassification(config).double()


def early_letters(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Reward of a completion: the mean place of its letters."""
    return [sum(ids) / len(ids) for ids in completion_ids]


def trained(
    out: str, kind: str, replicas: int, options: dict[str, Any] | None, tied: bool = False, **more: Any
) -> dict[str, list[float]]:
    """Train with one of TRL's trainers, TRL's own without options; return the logs, save the weights.

    The kind is the name of the trainer, such as SFT, perhaps with "+LoRA".
    """
    kind, _, lora = kind.partition("+")
    quiet()
    import datasets
    import transformers
    import trl

    trainer_class, config_class = getattr(trl, f"{kind}Trainer"), getattr(trl, f"{kind}Config")

    @dataclass
    class Cfg(config_class, triax.TrainingArguments): ...  # type: ignore[misc, valid-type]

    class Tr(trainer_class, triax.Trainer): ...  # type: ignore[misc, valid-type]

    Cfg.__qualname__, globals()["Cfg"] = "Cfg", Cfg  # a saved model pickles the arguments
    words = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy"]
    pairs = [(a, b) for a in words for b in words if a != b]
    rows = [{"text": f"{a} {b}"} for a, b in pairs]
    if kind in ("DPO", "Reward"):
        rows = [{"prompt": f"{a} ", "chosen": b, "rejected": a} for a, b in pairs]
    if kind == "DPO" and not lora:
        more = {"ref_model": model_of(tied, seed=1), **more}
    if kind == "GRPO":
        rows = [{"prompt": f"{a} {b}"} for a, b in pairs]
        more = {"reward_funcs": early_letters, **more}
    if lora:
        import peft

        targets = ["q_proj", "v_proj", "down_proj"]
        more = {"peft_config": peft.LoraConfig(r=2, lora_alpha=8, target_modules=targets), **more}
    common = steps_of(
        out,
        replicas,
        max_steps=STEPS,
        warmup_steps=0,
        weight_decay=0.0,
        eval_steps=STEPS,
        save_strategy="no",
        bf16=False,
        gradient_checkpointing=bool(lora),  # TRL then adds a hook to the embedding
    )
    if kind == "GRPO":
        common |= {
            "num_generations": 4,
            "max_completion_length": 6,
            "eval_strategy": "no",
        }
    with exact():
        config, trainer = (config_class, trainer_class) if options is None else (Cfg, Tr)
        args = config(**common, **({"use_cpu": True} if options is None else options))
        data = datasets.Dataset.from_list(rows)
        given = {
            "train_dataset": data,
            "eval_dataset": data.select(range(8)),
            "processing_class": tokenizer(),
        }
        running = trainer(model_of(tied, kind=kind), args=args, **given, **more)
        running.remove_callback(transformers.PrinterCallback)
        running.train()
        running.save_model(f"{out}/last")
        history = running.state.log_history
    return {key: [row[key] for row in history if key in row] for key in KEYS}


KINDS = ("SFT", "DPO", "Reward", "SFT+LoRA", "DPO+LoRA", "GRPO")
MEANS = ("eval_loss", "entropy", "mean_token_accuracy", "rewards/margins", "margin")
Case = tuple[int, dict[str, Any] | None]  # replicas, triax's options


def all_trained(out: str, case: Case) -> list[dict[str, list[float]]]:
    kinds = KINDS if alone(case) else KINDS[:-1]
    return [trained(f"{out}/{kind}", kind, *case, tied=kind == "DPO") for kind in kinds]


def alone(case: Case) -> bool:
    """Return True for one process: others draw other completions, and tensor ranks are refused."""
    return case[0] == 1 and "tensor" not in ((case[1] or {}).get("grid") or {})


@pytest.fixture(scope="module")
def wanted(ranks: Any, tmp_path_factory: Any) -> tuple[Path, Any]:
    """Return TRL's own runs on one process, each trainer's once: their folder, and a function of the kind."""
    out = tmp_path_factory.mktemp("plain")

    @functools.cache
    def of(kind: str) -> dict[str, list[float]]:
        logs: dict[str, list[float]]
        (logs,) = ranks(1, trained, f"{out}/{kind}", kind, 1, None, tied=kind == "DPO", timeout=300)
        return logs

    return out, of


def stage(number: int, **grid: int) -> dict[str, Any]:
    return {"triax": {"zero_optimization": {"stage": number}}, **({"grid": grid} if grid else {})}


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("count", "case"),
    [
        (2, (1, stage(0, tensor=2))),
        *(
            pytest.param(count, case, marks=pytest.mark.exhaustive)
            for count, case in (
                (1, (1, stage(1))),
                (2, (2, stage(3))),
                (2, (1, stage(3, tensor=2))),
                *((4, (2, stage(number, tensor=2))) for number in range(4)),
            )
        ),
    ],
    ids=str,
)
def test_trl_losses_on_every_grid_equal_trls_own(
    ranks: Any, tmp_path: Path, wanted: Any, count: int, case: Case
) -> None:
    """TRL multiplies by the output layer's weight itself, and a tensor rank has a part of it only."""
    plain, of = wanted
    kinds = KINDS if alone(case) else KINDS[:-1]
    right = [of(kind) for kind in kinds]
    for found in ranks(count, all_trained, str(tmp_path), case, timeout=300):
        for kind, values, logs in zip(kinds, right, found, strict=True):
            for key, value in values.items():
                if case[0] > 1 and key in MEANS:
                    continue  # TRL takes the mean of each replica's mean
                assert logs[key] == pytest.approx(value, rel=1e-10, abs=1e-12), (kind, key)
    for kind in kinds:
        file = f"{kind}/last/{'adapter_' if 'LoRA' in kind else ''}model.safetensors"
        weights = load_file(tmp_path / file)
        for name, weight in load_file(plain / file).items():
            torch.testing.assert_close(weights[name], weight, rtol=0, atol=1e-10)


@pytest.mark.exhaustive
def test_grpo_on_two_replicas_equals_two_processes_of_trl(ranks: Any, tmp_path: Path) -> None:
    """Each replica draws the answers that TRL's own process with its number draws; groups lie on both."""
    right = ranks(2, trained, str(tmp_path / "plain"), "GRPO", 2, None, timeout=300)[0]
    assert min(right["grad_norm"]) > 0
    wanted = load_file(tmp_path / "plain" / "last" / "model.safetensors")
    for number in (0, 3):
        for found in ranks(2, trained, str(tmp_path), "GRPO", 2, stage(number), timeout=300):
            for key, value in right.items():
                assert found[key] == pytest.approx(value, rel=1e-10, abs=1e-12), key
        weights = load_file(tmp_path / "last" / "model.safetensors")
        for name, weight in wanted.items():
            torch.testing.assert_close(weights[name], weight, rtol=0, atol=1e-10)


def test_unsupported_grids_of_trl_trainers_are_refused(ranks: Any, tmp_path: Path) -> None:
    """The message comes when the arguments or the trainer are made, and names what to use."""
    for kind, message in (
        ("DPO", "DPOTrainer.compute_loss runs the whole model, but with pipe=2 .* use method: dpo of a training file"),
        ("Reward", "RewardTrainer.compute_loss runs the whole model, but with pipe=2 .* use method: reward"),
        ("GRPO", "Cfg divides its generations among all processes, .* triax.methods.grpo_loss"),
    ):
        with pytest.raises(RankFailure, match=message):
            ranks(2, trained, str(tmp_path), kind, 1, stage(0, pipe=2))
    with pytest.raises(RankFailure, match=r"or triax\.methods\.grpo_loss and triax\.methods\.Rollouts"):
        ranks(2, trained, str(tmp_path), "GRPO", 1, stage(0, tensor=2))
