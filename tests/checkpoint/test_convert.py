"""Checkpoints of others made ours, and ours made theirs: torch's DCP, DeepSpeed's universal format, Hugging Face."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard

import triax
from triax.base.errors import CheckpointError
from triax.models.config import DecoderConfig, RopeScaling
from triax.models.gpt import GPTConfig, GPTLoss, gpt_layers
from triax.models.llama import LlamaConfig, llama_layers
from triax.models.recurrent.sizes import DeltaNetSizes

from support.checkpoint_jobs import command
from support.paths import DOCS
from support.rank_checks import float64_by_default
from support.readme_blocks import blocks, commands, programs
from support.toys import error_text
from support.training import small_config

STEPS, AFTER, RATE = 3, 3, 0.01


class Net(nn.Module):
    """Buffers of two kinds, a parameter that is used twice, one that no gradient reaches, one that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 4)
        self.again = nn.Linear(4, 6)
        self.again.weight = self.first.weight
        self.idle, self.frozen = nn.Parameter(torch.ones(3)), nn.Parameter(torch.arange(5.0), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """(B, 4) -> (B, 4)."""
        y: Tensor = self.last(self.norm(self.first(x)) + self.again(x))
        return y


def batch(step: int) -> Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(step))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int, schedule: Any = None) -> None:
    for step in range(first, last):
        optimizer.zero_grad()
        model(batch(step)).square().mean().backward()
        optimizer.step()
        if schedule is not None:
            schedule.step()


def resume_and_train(model: nn.Module, folder: Path, first: int, last: int, **section: Any) -> Any:
    config = small_config("AdamW", lr=RATE, batch=8, **section)
    engine = triax.initialize(model=model, config=config)[0]
    engine.load_checkpoint(folder)
    for step in range(first, last):
        engine.backward(engine(batch(step)).square().mean())
        engine.step()
    return engine


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor], bound: float = 1e-7) -> None:
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=bound, msg=name)


# -------------------------------------------------------------------------------------- DeepSpeed's universal format


class Scaler:
    """An object of DeepSpeed's that its common file of the optimizer holds."""


def universal(folder: Path, stage: int) -> nn.Module:
    """A folder as ds_to_universal.py of DeepSpeed 0.19.8 leaves it: written from torch's own optimizer."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    # WarmupLR of DeepSpeed: its last_batch_iteration is one less than the steps taken.
    warm = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda at: min(1.0, max(0, at - 1) / 5))
    train(model, optimizer, 0, STEPS, warm)
    place = folder / "step3_universal"
    names = dict(model.named_parameters())

    def put(name: str, key: str, value: Any) -> None:
        (place / "zero" / name).mkdir(parents=True, exist_ok=True)
        if isinstance(value, Tensor) and key != "step":
            value = value.detach().clone()
            value = value.reshape(-1) if stage == 3 else {"cat_dim": 0, "param": value}
        torch.save(value, place / "zero" / name / f"{key}.pt")

    trained = {name: parameter for name, parameter in names.items() if parameter.requires_grad}
    for name, parameter in trained.items():
        state = optimizer.state.get(parameter, {})
        if stage < 3 and not state:
            continue  # its fragments are of what has a gradient; the rest comes from the module, below
        put(name, "fp32", parameter)
        for key in ("exp_avg", "exp_avg_sq"):
            put(name, key, state.get(key, torch.zeros_like(parameter)))
        if stage < 3:
            put(name, "step", state["step"])
    if stage < 3:
        for name, tensor in model.state_dict().items():
            if not (place / "zero" / name).exists():
                put(name, "fp32", tensor.float())
    torch.save({"loss_scaler": Scaler(), "zero_stage": stage}, place / "zero" / "optimizer_state.pt")
    buffers = [name for name, _ in model.named_buffers()]
    states = {
        "module": model.state_dict() if stage < 3 else {name: model.state_dict()[name] for name in buffers},
        "buffer_names": buffers,
        "param_shapes": [{name: parameter.shape for name, parameter in trained.items()}],
        "shared_params": {"again.weight": "first.weight"},
        "lr_scheduler": {"last_batch_iteration": STEPS - 1},
        "global_steps": STEPS,
        "skipped_steps": 0,
        "global_samples": 8 * STEPS,
        "ds_config": {"scheduler": {"type": "WarmupLR", "params": {}}},
    }
    if stage < 3:
        torch.save(states, place / "mp_rank_00_model_states.pt")
    else:  # a file of each rank, with its part of what is not trained
        states["frozen_param_shapes"] = {"frozen": torch.Size([5])}
        for rank, part in enumerate(torch.cat([model.frozen.detach(), torch.zeros(7)]).view(12, 1)):
            file = place / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"
            torch.save({**states, "frozen_param_fragments": {"frozen": part.clone()}}, file)
    (folder / "latest_universal").write_text(place.name)
    train(model, optimizer, STEPS, STEPS + AFTER, warm)
    return model


@pytest.mark.parametrize("stage", [1, 3])
def test_deepspeed_universal_checkpoints_are_imported(tmp_path: Path, stage: int) -> None:
    """Weights, moments, steps, buffers, ties and the schedule: the next steps are those of torch's optimizer."""
    wanted = universal(tmp_path / "theirs", stage)
    code, text = command("import", tmp_path / "theirs", tmp_path / "runs")
    assert code and "are pickles" in text and "pass --unpickle" in text and not (tmp_path / "runs").exists()
    code, text = command("import", tmp_path / "theirs", tmp_path / "runs", "--unpickle")
    assert code == 0 and "zero/optimizer_state.pt" in text
    assert stage == 3 or "again.weight (the same as first.weight)" in text
    torch.manual_seed(1)
    schedule = {"type": "WarmupLR", "params": {"warmup_max_lr": RATE, "warmup_num_steps": 5, "warmup_type": "linear"}}
    engine = resume_and_train(Net(), tmp_path / "runs", STEPS, STEPS + AFTER, scheduler=schedule)
    assert engine.global_steps == STEPS + AFTER and engine.global_samples == 8 * (STEPS + AFTER)
    assert_same(engine.module_state_dict(), wanted.state_dict())
    assert engine.module.norm.num_batches_tracked == STEPS + AFTER


def test_importing_renames_deepspeed_pipeline_layers(tmp_path: Path) -> None:
    """DeepSpeed's names are layer numbers, and tied layers have names of their own: --rename maps the first of them."""
    for name in ("3.weight", "tied_modules.embed.weight"):
        (tmp_path / "zero" / name).mkdir(parents=True)
        torch.save({"param": torch.ones(2, 3)}, tmp_path / "zero" / name / "fp32.pt")
    words = ("--unpickle", "--rename", "tied_modules.embed=layers.0")
    assert command("import", tmp_path, tmp_path / "runs", *words)[0] == 0
    code, text = command("show", tmp_path / "runs")
    assert code == 0 and "weights/layers.0.weight" in text and "weights/layers.3.weight" in text


def test_importing_never_runs_code_of_a_pickle(tmp_path: Path) -> None:
    """Even with --unpickle a universal checkpoint is read as tensors and numbers alone."""
    mark = tmp_path / "ran"
    evil = b"cos\nsystem\n(S'touch " + str(mark).encode() + b"'\ntR."
    universal(tmp_path / "theirs", 1)
    place = tmp_path / "theirs" / "step3_universal"
    (place / "mp_rank_00_model_states.pt").write_bytes(evil)
    code, text = command("import", place, tmp_path / "runs", "--unpickle", "--buffers", "norm.running*")
    assert code == 0 and "mp_rank_00_model_states.pt (" in text
    (place / "zero" / "last.bias" / "exp_avg.pt").write_bytes(evil)
    code, text = command("import", place, tmp_path / "again", "--unpickle")
    assert code and "exp_avg.pt cannot be read" in text and not (tmp_path / "again" / "imported").exists()
    assert not mark.exists()


def test_importing_refuses_folders_that_are_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt").touch()
    assert (
        "only DeepSpeed's universal format can be imported"
        in command("import", tmp_path, tmp_path / "runs", "--unpickle")[1]
    )
    assert "has a folder zero" in command("import", tmp_path / "nothing", tmp_path / "runs", "--unpickle")[1]
    (tmp_path / "zero").mkdir()
    assert "no folder of a parameter" in command("import", tmp_path, tmp_path / "runs", "--unpickle")[1]
    assert "Write OLD=NEW" in command("import", tmp_path, tmp_path / "runs", "--unpickle", "--rename", "a")[1]


# ---------------------------------------------------------------------------------------------------- torch's DCP


def train_and_save_with_fsdp(folder: str) -> dict[str, Tensor]:
    """Two ranks of FSDP2: a checkpoint after some steps, and the weights after some more."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 7), nn.GELU(), nn.Linear(7, 4))
    for layer in (model[0], model[2]):
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    train(model, optimizer, 0, STEPS)
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder)
    train(model, optimizer, STEPS, STEPS + AFTER)
    return {name: parameter.full_tensor() for name, parameter in model.named_parameters()}  # type: ignore[attr-defined]


def test_a_checkpoint_of_fsdp_on_two_ranks_is_imported(ranks: Any, tmp_path: Path) -> None:
    wanted = ranks(2, train_and_save_with_fsdp, str(tmp_path / "dcp"), timeout=60)[0]
    words = ("--unpickle", "--rename", "0.=layers.0.", "--rename", "2.=layers.2.")
    assert command("import", tmp_path / "dcp", tmp_path / "runs", *words)[0] == 0
    layers = [triax.LayerSpec(nn.Linear, 4, 7), triax.LayerSpec(nn.GELU), triax.LayerSpec(nn.Linear, 7, 4)]
    model = triax.PipelineModule(layers, grid=triax.Grid(), loss_fn=lambda y, _: y.square().mean(), seed=1)
    config = {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": RATE}}}
    engine = triax.initialize(model=model, config=config)[0]
    engine.load_checkpoint(tmp_path / "runs")
    engine.module.train()
    for step in range(STEPS, STEPS + AFTER):
        engine.train_batch(iter([(batch(step), batch(step))]))
    assert engine.global_steps == STEPS + AFTER
    assert_same(engine.gather(), {f"layers.{name}": weight for name, weight in wanted.items()})


def save_on_two_stages(folder: str) -> dict[str, Tensor]:
    grid = triax.Grid(pipe=2, data=1)
    layers = [triax.LayerSpec(nn.Linear, 4, 7), triax.LayerSpec(nn.BatchNorm1d, 7), triax.LayerSpec(nn.Linear, 7, 4)]
    model = triax.PipelineModule(layers, grid=grid, loss_fn=lambda y, _: y.square().mean(), seed=3)
    engine = triax.Engine(model, optimizer=partial(torch.optim.AdamW, lr=RATE), batch=8)
    engine.train_batch(iter([(batch(0), batch(0))]))
    engine.save_checkpoint(folder)
    return engine.gather()


def load_into_fsdp(folder: str) -> dict[str, Tensor]:
    """Two ranks of FSDP2 read a folder in torch's format into a model of the same names."""
    model = nn.ModuleDict({"layers": nn.Sequential(nn.Linear(4, 7), nn.BatchNorm1d(7), nn.Linear(7, 4))})
    fully_shard(model["layers"])
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    found = {name: parameter.full_tensor() for name, parameter in model.named_parameters()}  # type: ignore[attr-defined]
    return found | dict(model.named_buffers())


def test_fsdp_on_two_ranks_reads_an_exported_checkpoint(ranks: Any, tmp_path: Path) -> None:
    parts = ranks(2, save_on_two_stages, str(tmp_path / "runs"), timeout=60)
    code, text = command("export", tmp_path / "runs", tmp_path / "dcp", "--format", "dcp")
    assert code == 0 and "9 tensors" in text, text
    assert command("export", tmp_path / "runs", tmp_path / "all.safetensors")[0] == 0
    wanted = safetensors.torch.load_file(tmp_path / "all.safetensors")
    assert wanted.keys() >= parts[0].keys() and len(wanted) == 9
    for found in ranks(2, load_into_fsdp, str(tmp_path / "dcp"), timeout=60):
        assert_same(found, wanted)
    assert command("import", tmp_path / "dcp", tmp_path / "again", "--unpickle", "--buffers", "*.running_*")[0] == 0
    half = ("--format", "dcp", "--dtype", "bfloat16")
    assert command("export", tmp_path / "runs", tmp_path / "half", *half)[0] == 0
    entries: Any = dcp.FileSystemReader(tmp_path / "half").read_metadata().state_dict_metadata
    assert {entry.properties.dtype for entry in entries.values()} == {torch.bfloat16, torch.int64}
    refused = command("export", tmp_path / "runs", tmp_path / "no", "--format", "dcp", "--tokenizer", "x")[1]
    assert "--tokenizer is used only with --format hf, and not with --format dcp" in refused


@float64_by_default()
def test_a_checkpoint_of_a_ddp_loop_continues_as_the_page_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The module, the optimizer and the scheduler as torch.save wrote them; the program and commands of the page."""
    page = (DOCS / "moving-from" / "ddp.md").read_text()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "old_script", SimpleNamespace(build=lambda: Net().double()))
    rate = partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=lambda step: 1 / (step + 1))
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    schedule = rate(optimizer)
    train(model, optimizer, 0, STEPS, schedule)
    parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "scheduler": schedule}
    torch.save({name: part.state_dict() for name, part in parts.items()}, "ddp.pt")
    train(model, optimizer, STEPS, STEPS + AFTER, schedule)

    exec(programs(page)["to_dcp.py"], {})
    (words,) = (shlex.split(text) for _, text in commands(page) if "checkpoint import" in text)
    other = Net()
    other.again.weight = nn.Parameter(other.first.weight + 1.0)
    weights = {"model": other.state_dict()}
    dcp.save(weights, checkpoint_id="untied")
    assert command(*words[2:])[0] == command("import", "untied", "runs/untied", *words[5:])[0] == 0
    engine: Any = triax.Engine(Net(), optimizer=partial(torch.optim.AdamW, lr=RATE), lr_scheduler=rate, batch=8, zero=2)
    (resume,) = (block.text for block in blocks(page) if "lr_scheduler.load_state_dict" in block.text)
    differ = "again.weight and first.weight have different values, but are one parameter of the model"
    load = partial(engine.load_checkpoint, "runs/untied", load_optimizer_states=False)
    assert differ in error_text(load, CheckpointError)
    exec(resume, {"engine": engine, "torch": torch})
    for step in range(STEPS, STEPS + AFTER):
        engine.backward(engine(batch(step)).square().mean())
        engine.step()
    assert_same(dict(engine.module.state_dict()), dict(model.state_dict()), 1e-10)


# -------------------------------------------------------------------------------------------------- Hugging Face

MODELS: dict[str, Any] = {
    "gpt2": GPTConfig(53, 16, 24, 2, 4, tie_word_embeddings=True),
    "gpt2-untied": GPTConfig(47, 16, 24, 2, 4, tie_word_embeddings=False, mlp_ratio=2),
    "llama": LlamaConfig(53, 32, 24, 3, 4, num_key_value_heads=2, intermediate_size=40, rope_scaling=RopeScaling()),
    "qwen2": LlamaConfig(
        53, 32, 24, 2, 4, num_key_value_heads=2, intermediate_size=40, qkv_bias=True, tie_word_embeddings=True
    ),
    # Tensors of which several parameters have rows, which do not follow one another.
    "qwen3_5_text": DecoderConfig(
        *(53, 32, 24, 2, 4),
        num_key_value_heads=2,
        intermediate_size=40,
        head_dim=8,
        partial_rotary_factor=0.25,
        norm="rms_offset",
        qk_norm=True,
        attn_output_gate=True,
        layer_types=("linear_attention", "full_attention"),
        linear_attention=DeltaNetSizes(4, 6, 2, 5),
    ),
}


def trained_and_saved(folder: str, case: str, sizes: tuple[int, int, int], half: bool) -> None:
    config, grid = MODELS[case], triax.Grid(*sizes)
    layers = gpt_layers(config) if isinstance(config, GPTConfig) else llama_layers(config)
    model = triax.PipelineModule(layers, grid=grid, loss_fn=GPTLoss(grid, vocab_size=config.vocab_size), seed=3)
    settings = small_config("AdamW", lr=RATE, micro=2, accumulation=2, stage=1, bf16={"enabled": half})
    engine = triax.initialize(model=model, config=settings)[0]
    ids = torch.arange(2 * 9).view(2, 9)
    engine.train_batch(iter(lambda: (ids[:, :-1], ids[:, 1:]), None))
    assert engine.save_checkpoint(Path(folder) / "runs")
    triax.save_hf(engine, Path(folder) / "run's own")


def content(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    return json.loads((folder / "config.json").read_text()), safetensors.torch.load_file(folder / "model.safetensors")


@pytest.mark.parametrize(
    ("case", "sizes", "half"),
    [
        ("gpt2", (2, 1, 2), False),
        ("gpt2-untied", (1, 1, 1), False),
        ("llama", (1, 2, 2), True),
        ("qwen2", (2, 1, 1), False),
        ("qwen3_5_text", (1, 1, 2), True),
    ],
)
def test_transformers_loads_exported_checkpoints(
    ranks: Any, tmp_path: Path, case: str, sizes: tuple[int, int, int], half: bool
) -> None:
    """The command exports from the files alone: bitwise what save_hf writes in the run, and masters in bf16."""
    import transformers

    ranks(sizes[0] * sizes[1] * sizes[2], trained_and_saved, str(tmp_path), case, sizes, half, timeout=60)
    words = ("--dtype", "bfloat16") if half else ()
    code, text = command("export", tmp_path / "runs", tmp_path / "hf", "--format", "hf", *words)
    assert code == 0 and "tensors" in text, text
    (config, found), (own_config, own) = content(tmp_path / "hf"), content(tmp_path / "run's own")
    assert config == own_config and found.keys() == own.keys()
    for name, tensor in own.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name
    reader: Any = transformers.AutoModelForCausalLM
    model, info = reader.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not any(info.get(key) for key in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs")), info
    state = model.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in found.items())
    assert command("export", tmp_path / "runs", tmp_path / "wide", "--format", "hf")[0] == 0
    assert {tensor.dtype for tensor in content(tmp_path / "wide")[1].values()} == {torch.float32}


def test_a_trained_transformers_model_is_exported(tmp_path: Path) -> None:
    import transformers

    sizes: dict[str, Any] = {"vocab_size": 31, "hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 1}
    torch.manual_seed(0)
    theirs: Any = transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(**sizes, num_attention_heads=2, num_key_value_heads=1, head_dim=8)
    )
    config = {"train_batch_size": 2, "optimizer": {"type": "AdamW", "params": {"lr": RATE}}}
    engine = triax.initialize(model=theirs, config=config)[0]
    ids = torch.arange(12).view(2, 6)
    engine.backward(engine(input_ids=ids, labels=ids).loss)
    engine.step()
    assert engine.save_checkpoint(tmp_path / "runs")
    assert command("export", tmp_path / "runs", tmp_path / "hf", "--format", "hf")[0] == 0
    again: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert type(again) is transformers.Qwen3ForCausalLM
    wanted = engine.module_state_dict()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in again.state_dict().items())


def test_export_errors_say_which_option_to_give(tmp_path: Path) -> None:
    config = {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": RATE}}}
    engine = triax.initialize(model=nn.Linear(4, 4), config=config)[0]
    assert engine.save_checkpoint(tmp_path / "runs")
    words = ("export", tmp_path / "runs", tmp_path / "hf")
    assert "Give " in command(*words)[1] and "--format hf for a folder" in command(*words)[1]
    assert "give one of safetensors, dcp, hf" in command(*words, "--format", "gguf")[1]
    assert "does not tell the model's configuration. Pass --config" in command(*words, "--format", "hf")[1]
    (tmp_path / "config.json").write_text('{"model_type": "gpt2", "n_layer": 1}')
    said = command(*words, "--format", "hf", "--config", tmp_path / "config.json")[1]
    assert "names have no entry for bias" in said
    file = tmp_path / "m.safetensors"
    assert (
        "--config, but it is used only with --format hf"
        in command(*words[:2], file, "--config", tmp_path / "config.json")[1]
    )
    shutil.rmtree(tmp_path / "runs")
