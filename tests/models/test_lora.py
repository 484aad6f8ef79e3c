"""LoRA, DoRA and QLoRA on any grid against PEFT on one process, in float64; adapters in and out."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import triax
from triax.grid import Grid
from triax.models.huggingface.adapters import CARRIED, HARMLESS, peft_options
from triax.models.layers import NextTokenLoss
from triax.tensor_parallel.embedding import gather_logits

from support.command_line import output_of
from support.exact_norms import exact
from support.lora_runs import (
    EPS,
    EVERY,
    LR,
    MICRO,
    SOME,
    STEPS,
    VOCAB,
    Run,
    Sizes,
    batch,
    close,
    engine_of,
    equals_peft,
    factors,
    in_bits,
    loaded,
    loaded_by_peft,
    logits_of,
    make,
    peft_model,
    reference,
    saved,
    step,
    train,
)
from support.paths import DOCS
from support.readme_blocks import programs, run_page_program

LATENT = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
SEQUENCE, RECOMPUTED = {"sequence_parallel": True}, {"activation_checkpointing": {"interval": 1}}
GPT2_SOME = SOME | {"target_modules": ["c_attn", "mlp.c_proj"]}
DORA = {"r": 3, "lora_alpha": 5, "use_dora": True, "target_modules": ["q_proj", "v_proj", "up_proj", "down_proj"]}
DROPS = EVERY | {"lora_dropout": 0.3}
DORA_DROPS = DROPS | {"use_dora": True}
PLAIN = {"r": 3, "lora_alpha": 8, "target_modules": "all-linear"}
FEW = PLAIN | {"target_modules": ["q_proj", "v_proj", "down_proj"]}
ATTENTION = {"target_modules": ["q_proj", "k_proj", "o_proj"]}
Case = tuple[int, Sizes, str, str | None, dict[str, Any], dict[str, Any]]  # steps, grid, model, base, lora, options
QUICK: list[Case] = [
    (2, (1, 2, 2), "llama", None, SOME, {"stage": 2}),
    (3, (1, 2, 1), "llama", None, DORA_DROPS, {"stage": 3, "device": "meta"}),
    (3, (2, 1, 2), "wide", "nf4", DORA_DROPS, {"stage": 1, "schedule": "zb-v"}),
    (3, (2, 2, 1), "wide", "nf4", FEW, {"stage": 3, "device": "meta"}),
]
LORA: list[Case] = [
    (2, (2, 2, 2), "llama", None, SOME, {"stage": 2, "schedule": "zb-v"}),
    (2, (1, 1, 1), "llama", None, EVERY, {"stage": 0, "schedule": "1f1b"}),
    (2, (1, 2, 2), "gpt2", None, EVERY, {"stage": 3, "schedule": "1f1b"}),
    (2, (2, 2, 1), "gpt2", None, EVERY, {"stage": 3, "schedule": "gpipe", "device": "meta"}),
    (2, (2, 2, 2), "gpt2", None, GPT2_SOME, {"stage": 2, "schedule": "zb-v"}),
    (2, (2, 1, 4), "qwen2", None, EVERY, {"stage": 1, "schedule": "zb-h1"}),
    (2, (1, 1, 4), "qwen2", None, SOME, {"stage": 1, "schedule": "1f1b", "sequence_parallel": True}),
    (2, (2, 2, 2), "llama", None, EVERY, {"stage": 3, "schedule": "zb-v", "device": "meta"}),
    (2, (2, 1, 2), "llama", None, EVERY, {"stage": 1, "schedule": "zb-v", "sequence_parallel": True}),
    (2, (1, 2, 4), "llama", None, EVERY, {"stage": 2, "schedule": "1f1b", "sequence_parallel": True}),
    (2, (1, 2, 2), "mixtral", None, SOME | ATTENTION, {"schedule": "1f1b"}),
    (2, (2, 1, 2), "deepseek", None, EVERY | {"target_modules": LATENT}, {"stage": 1, "schedule": "zb-v"}),
    (2, (1, 1, 2), "deepseek", None, EVERY | {"target_modules": LATENT}, {"schedule": "1f1b", **SEQUENCE}),
    (2, (1, 1, 2), "llama", None, SOME | {"target_modules": ["lm_head", "q_proj"]}, {"schedule": "1f1b"}),
    (2, (4, 2, 1), "llama", None, SOME, {"stage": 2, "schedule": "1f1b"}),
    (2, (2, 1, 2), "llama", None, EVERY, {"stage": 1, "schedule": "1f1b", **RECOMPUTED}),
]
WITH_DORA: list[Case] = [
    (20, (2, 1, 2), "llama", None, DORA_DROPS, {"stage": 1, "schedule": "1f1b"}),
    (20, (2, 2, 1), "llama", None, DORA_DROPS, {"stage": 3, "device": "meta"}),
    (20, (1, 1, 1), "llama", None, DORA, {"stage": 0, "schedule": "1f1b"}),
    (20, (2, 2, 1), "llama", None, DORA, {"stage": 1}),
    (20, (2, 1, 2), "gpt2", None, DORA_DROPS, {"stage": 2, "schedule": "zb-h1"}),
    (20, (1, 2, 2), "llama", None, DORA_DROPS, {"stage": 3, "schedule": "1f1b", "device": "meta"}),
    (20, (1, 1, 2), "llama", None, DORA_DROPS, {"stage": 1, "schedule": "1f1b", "sequence_parallel": True}),
    (20, (1, 1, 4), "qwen2", None, DORA_DROPS, {"stage": 1, "schedule": "1f1b"}),
    (20, (1, 1, 2, 2), "llama", None, DORA_DROPS, {"stage": 2, "schedule": "1f1b"}),
    (20, (1, 1, 2, 2), "llama", None, PLAIN | {"lora_dropout": 0.3}, {"schedule": "1f1b", **SEQUENCE}),
    (20, (1, 2, 1, 1, 2), "mixtral", None, PLAIN | {"lora_dropout": 0.3} | ATTENTION, {"schedule": "1f1b"}),
    (
        20,
        (1, 1, 2),
        "llama",
        None,
        DORA_DROPS,
        {"schedule": "1f1b", "compile": {"enabled": True, "backend": "aot_eager"}},
    ),
    (20, (1, 1, 2), "llama", None, DORA_DROPS, {"schedule": "1f1b", **RECOMPUTED}),
]
IN_BITS: list[Case] = [
    (5, (2, 1, 2), "wide", "nf4", DORA_DROPS, {"stage": 1, "schedule": "1f1b"}),
    (5, (2, 2, 1), "wide", "nf4", FEW, {"stage": 3, "device": "meta"}),
    (5, (2, 1, 2), "wide", "nf4", PLAIN | {"use_dora": True}, {"stage": 1, "schedule": "1f1b"}),
    (5, (1, 1, 1), "wide", "nf4", DORA_DROPS, {"stage": 0, "schedule": "1f1b"}),
    (5, (2, 1, 4), "wide", "nf4", PLAIN, {"stage": 1, "schedule": "zb-h1"}),
    (5, (1, 1, 2), "wide", "nf4", PLAIN, {"stage": 1, "schedule": "1f1b", "sequence_parallel": True}),
    (5, (1, 2, 2), "wide", "int8", PLAIN | {"use_dora": True}, {"stage": 3, "schedule": "1f1b", "device": "meta"}),
    (5, (1, 1, 2, 2), "wide", "nf4", FEW, {"stage": 2, "schedule": "1f1b"}),
    (5, (1, 1, 4), "qwen2", "int8", PLAIN, {"schedule": "1f1b"}),
    (5, (1, 2, 1, 1, 2), "mixtral", "nf4", FEW | ATTENTION, {"schedule": "1f1b"}),
    (5, (1, 1, 2), "wide", "nf4", PLAIN, {"schedule": "1f1b", **RECOMPUTED}),
]
SWEEP = [pytest.param(*case, marks=pytest.mark.exhaustive) for case in LORA + WITH_DORA + IN_BITS]


@pytest.mark.parametrize(("steps", "sizes", "case", "form", "lora", "options"), [*QUICK, *SWEEP])
def test_lora_runs_equal_peft_on_one_process(
    ranks: Callable[..., list[Any]],
    tmp_path: Path,
    steps: int,
    sizes: Sizes,
    case: str,
    form: str | None,
    lora: dict[str, Any],
    options: dict[str, Any],
) -> None:
    """Over PEFT's model, whose base a plain loop has rounded where ``form`` has 4 or 8 bits.

    With dropout, PEFT's layers have triax's masks in place of their own.
    """
    folder, base = saved(tmp_path / "model", case), in_bits(form) if form else None
    given = lora | ({"base": form} if form else {})
    runs: list[Run] = ranks(
        torch.Size(sizes[:4]).numel(), train, folder, sizes, given, tmp_path, steps=steps, **options
    )
    equals_peft(runs, case, lora, sizes[1], steps, base)
    logits = logits_of(peft_model(case, lora, runs[0][3], base))
    assert (logits - logits_of(make(case))).abs().max() > 1e-3
    torch.testing.assert_close(logits_of(loaded_by_peft(case, tmp_path / "adapter", base)), logits, rtol=0, atol=1e-10)
    torch.testing.assert_close(logits_of(loaded(tmp_path / "merged")), logits, rtol=0, atol=1e-10)


def parallelized(folder: Path, sizes: Sizes, lora: dict[str, Any], stage: int) -> Run:
    """As ``train``, of transformers' own model under ``parallelize`` in a plain loop."""
    import transformers

    grid = Grid(*sizes)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    triax.parallelize(model, grid)
    settings = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": MICRO,
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": 0.01, "eps": EPS}},
        "zero_optimization": {"stage": stage},
        "lora": lora,
    }
    engine, *_ = triax.initialize(model=model, config=settings, grid=grid)
    start, losses = factors(engine.gather()), []
    for number in range(STEPS):
        total = 0.0
        for index in range(MICRO):
            ids, labels = batch(grid.data.rank, number, index)
            with exact(model):
                loss = F.cross_entropy(engine(input_ids=ids).logits.flatten(0, 1), labels.flatten())
                engine.backward(loss)
            total += loss.item() / MICRO / grid.data.size
            engine.step()
        losses.append(total)
    return losses, start, engine.gather("gradients"), factors(engine.gather()), {}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("case", "tensor", "data", "stage"), [("gpt2", 2, 1, 1), ("llama", 2, 2, 3), ("qwen2", 4, 1, 2)]
)
def test_parallelized_lora_models_equal_peft(
    ranks: Any, tmp_path: Path, case: str, tensor: int, data: int, stage: int
) -> None:
    folder = saved(tmp_path / "model", case)
    runs = ranks(tensor * data, parallelized, folder, (1, data, tensor), EVERY, stage)
    _, start, gradients, end, _ = runs[0]
    wanted = reference(case, EVERY, start, data)
    assert [sum(each) for each in zip(*(run[0] for run in runs[::tensor]), strict=True)] == pytest.approx(
        wanted[0], rel=1e-10
    )
    close(gradients, wanted[2])
    close(end, wanted[3])


def test_only_adapters_have_gradients_and_optimizer_state(ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    """Bytes by kind, of fp32 training in ZeRO stage 1 on two replicas: the formulas of the adapters' sizes alone."""
    folder = saved(tmp_path / "model", "llama")
    (_, start, gradients, _, held), _ = ranks(2, train, folder, (1, 2, 1), SOME, stage=1, schedule="1f1b")
    elements = sum(tensor.numel() for tensor in start.values())
    assert elements == 2 * 4 * (2 * 32 + (32 + 8) + (32 + 44) + (44 + 32))  # layers x r x (inputs + outputs)
    assert gradients.keys() == start.keys()
    assert held["gradients"] == elements * 8
    assert held["optimizer"] - 2 * elements // 2 * 8 in range(65)  # two moments of half; alignment, and a step


def exchange(folder: Path, adapter: Path, out: Path, sizes: Sizes) -> float:
    """PEFT's adapter into an engine, and out again."""
    engine = engine_of(folder, sizes, triax.lora_config(adapter), stage=3, schedule="1f1b")
    triax.load_lora(adapter, engine)
    triax.save_lora(engine, out)
    plain = triax.PipelineModule(triax.load_hf(folder), grid=engine.grid, dtype=torch.float64)
    triax.load_lora(adapter, plain)
    if sizes[0] == 1:
        logits = gather_logits(plain.eval()(batch(0, 9, 0)[0]), grid=engine.grid, vocab_size=VOCAB)
        torch.save(logits.detach(), out.with_suffix(".pt"))
    return engine.eval_batch(iter([batch(0, 9, 0)] * MICRO)).item()


ADAPTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"target_modules": ["v_proj", "o_proj", "up_proj"]}),
    "gpt2": ("gpt2", {"target_modules": ["attn.c_proj", "c_fc"]}),
    "dora": ("llama", DORA | {"lora_dropout": 0.25, "use_rslora": True}),
}


@pytest.mark.parametrize("sizes", [(1, 1, 2), pytest.param((2, 2, 2), marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("adapters", ["llama", pytest.param("gpt2", marks=pytest.mark.exhaustive), "dora"])
def test_an_adapter_of_peft_is_loaded_and_written(ranks: Any, tmp_path: Path, adapters: str, sizes: Sizes) -> None:
    """Bit for bit, with PEFT's loss and logits."""
    import peft
    from safetensors.torch import load_file

    case, options = ADAPTERS[adapters]
    folder, adapter, out = saved(tmp_path / "model", case), tmp_path / "peft", tmp_path / "ours"
    torch.manual_seed(1)
    model = peft.get_peft_model(make(case), peft.LoraConfig(**{"r": 3, "lora_alpha": 5} | options))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1 * parameter.requires_grad)
    model.save_pretrained(str(adapter))
    found = ranks(sizes[0] * sizes[1] * sizes[2], exchange, folder, adapter, out, sizes)[0]
    logits, labels = logits_of(model), batch(0, 9, 0)[1]
    assert found == pytest.approx(F.cross_entropy(logits.flatten(0, 1), labels.flatten()).item(), rel=1e-10)
    if sizes[0] == 1:
        torch.testing.assert_close(torch.load(out.with_suffix(".pt")), logits, rtol=0, atol=1e-10)
    mine, theirs = (load_file(each / "adapter_model.safetensors") for each in (out, adapter))
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
    assert any(name.endswith("lora_magnitude_vector") for name in mine) == (adapters == "dora")
    assert triax.lora_config(out) | {"targets": 0} == triax.lora_config(adapter) | {"targets": 0}


# Settings of PEFT's LoraConfig that are refused if they are used: they change what the stored factors compute or train.
REFUSED = {"peft_type", "bias", "init_lora_weights", "modules_to_save", "layers_to_transform", "rank_pattern"}
REFUSED |= {"alpha_pattern", "trainable_token_indices", "exclude_modules", "target_parameters", "layer_replication"}
REFUSED |= {"alora_invocation_tokens", "use_qalora", "lora_bias", "use_bdlora", "ensure_weight_tying"}
REFUSED |= {"arrow_config", "kasa_config", "velora_config", "monteclora_config"}


def test_every_setting_of_pefts_adapters_is_known() -> None:
    import peft

    known = {each.name for each in fields(peft.LoraConfig)}
    assert known == REFUSED | HARMLESS | CARRIED.keys()  # a new one: decide what it is
    config = peft.LoraConfig(r=3, lora_alpha=5, target_modules=["q_proj"]).to_dict()
    assert peft_options(config, "it")["rank"] == 3
    for name in REFUSED:
        with pytest.raises(ValueError, match=f"it has {name}="):
            peft_options({**config, name: "pissa"}, "it")
    with pytest.raises(ValueError, match="it has beta_of_tomorrow=3"):
        peft_options({**config, "beta_of_tomorrow": 3}, "it")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa', which triax's adapters do not have"),
        ({"init_lora_weights": "olora"}, "init_lora_weights='olora'"),
        ({"alora_invocation_tokens": [1, 2]}, "alora_invocation_tokens"),
        ({"r": 0}, "rank = 0: give 1 or more"),
        ({"r": 10**4}, "has rank 3, but adapter_config.json has r=10000"),
        ({"lora_alpha": math.nan}, "give a finite number"),
        ({"lora_alpha": 10**400}, "give"),
        ({"lora_alpha": -2}, "give a number above 0"),
        ({"target_modules": "q_proj("}, "unterminated subpattern"),
        ({"target_modules": None}, "it has no target_modules"),
        ({}, "has the dtype C64: give real floating-point factors"),
    ],
)
def test_unsupported_peft_adapters_are_refused_in_one_line(tmp_path: Path, change: Any, words: str) -> None:
    import peft
    from safetensors.torch import load_file, save_file

    model = peft.get_peft_model(make("llama"), peft.LoraConfig(r=3, lora_alpha=5, target_modules=["v_proj"]))
    model.save_pretrained(str(tmp_path))
    file, weights = tmp_path / "adapter_config.json", tmp_path / "adapter_model.safetensors"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    if not change:
        save_file({name: value.to(torch.complex64) for name, value in load_file(weights).items()}, weights)
    module = triax.PipelineModule(triax.load_hf(make("llama")), grid=Grid())
    with pytest.raises(ValueError) as caught:
        triax.load_lora(tmp_path, module)
    assert words in str(caught.value) and "\n" not in str(caught.value)
    assert not any("lora" in name for name, _ in module.named_parameters())


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", ["llama", "gpt2"])
def test_a_checkpoint_is_exported_for_peft_and_merged(ranks: Any, tmp_path: Path, case: str) -> None:
    folder, out = saved(tmp_path / "model", case), tmp_path / "checkpoints"
    lora = EVERY if case == "llama" else GPT2_SOME
    end = ranks(4, save_only, folder, out, (2, 1, 2), lora)[0]
    output_of("checkpoint", "export", out, tmp_path / "adapter", "--format", "hf")
    output_of("checkpoint", "export", out, tmp_path / "merged", "--format", "hf", "--merge-lora")
    logits = logits_of(peft_model(case, lora, end))
    torch.testing.assert_close(logits_of(loaded_by_peft(case, tmp_path / "adapter")), logits, rtol=0, atol=1e-10)
    torch.testing.assert_close(logits_of(loaded(tmp_path / "merged")), logits, rtol=0, atol=1e-10)


def train_and_merge(folder: Path, out: Path, sizes: Sizes) -> float:
    targets = ["attention.q", "attention.kv", "attention.out"]
    engine = engine_of(folder, sizes, {"rank": 3, "alpha": 7, "targets": targets}, stage=1, schedule="1f1b")
    for number in range(STEPS):
        step(engine, number)
    triax.save_hf(engine, out, merge_lora=True)
    with pytest.raises((ValueError, RuntimeError), match="part of a fused layer"):
        triax.save_lora(engine, out)
    return engine.eval_batch(iter([batch(0, 9, 0)] * MICRO)).item()


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", ["phi3", "falcon"])
def test_layers_that_are_fused_in_transformers_are_merged(ranks: Any, tmp_path: Path, case: str) -> None:
    folder, out = saved(tmp_path / "model", case), tmp_path / "merged"
    loss = ranks(2, train_and_merge, folder, out, (1, 1, 2))[0]
    labels = batch(0, 9, 0)[1].flatten()
    assert loss == pytest.approx(F.cross_entropy(logits_of(loaded(out)).flatten(0, 1), labels).item(), rel=1e-9)
    assert abs(loss - F.cross_entropy(logits_of(make(case)).flatten(0, 1), labels).item()) > 1e-4


def save_only(folder: Path, out: Path, sizes: Sizes, lora: dict[str, Any]) -> dict[str, Tensor]:
    engine = engine_of(folder, sizes, lora, stage=1)
    for number in range(STEPS):
        step(engine, number)
    engine.save_checkpoint(out)
    with pytest.raises(ValueError, match="merge_lora=True"):
        triax.save_hf(engine, out / "hf")
    plain = triax.PipelineModule(triax.load_hf(folder), grid=engine.grid)
    with pytest.raises(triax.CheckpointError, match="has LoRA adapters, but the model has none"):
        triax.load_weights(plain, out)
    return factors(engine.gather())


def unknown_target(folder: Path) -> str:
    with pytest.raises(triax.ConfigError) as caught:
        engine_of(folder, (1, 1, 1), {"targets": ["q_proj", "c_attn"]}, stage=0, schedule="1f1b")
    return str(caught.value)


def parameters_without_adapters(folder: Path) -> str:
    grid = Grid()
    model = triax.PipelineModule(triax.load_hf(folder), grid=grid, loss_fn=NextTokenLoss(grid, VOCAB))
    config = {"train_batch_size": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "lora": {"r": 2}}
    before = list(model.parameters())
    with pytest.raises(triax.ConfigError) as caught:
        triax.initialize(model=model, model_parameters=before, config=config)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    triax.initialize(model=model, model_parameters=trained, config=config)
    return str(caught.value)


def test_lora_errors_say_what_to_write(ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", "llama")
    assert "'c_attn', but no layer has such a name" in ranks(1, unknown_target, folder)[0]
    assert "call triax.add_lora(model, ...) first" in ranks(1, parameters_without_adapters, folder)[0]


def test_lora_targets_proposed_by_an_error_are_accepted() -> None:
    config = triax.LlamaConfig.preset("llama-tiny", tie_word_embeddings=True)
    with pytest.raises(triax.ConfigError, match="a tied output layer is the embedding") as caught:
        triax.add_lora(triax.PipelineModule(triax.llama_layers(config)), triax.Lora(rank=2, targets=("lm_head",)))
    proposed = str(caught.value).partition("such as ")[2].partition(", or write")[0].split(", ")
    model = triax.PipelineModule(triax.llama_layers(config))
    triax.add_lora(model, triax.Lora(rank=2, targets=tuple(proposed)))
    assert len(proposed) == 7


def test_the_programs_of_the_lora_page_run(ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    for name in programs((DOCS / "lora.md").read_text()):
        ranks(1, run_page_program, "lora.md", str(tmp_path), name)
