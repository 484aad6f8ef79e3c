"""Hugging Face's folders and models that cannot be read or written, and the docs' programs."""

from __future__ import annotations

import json
import math
import os
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import triax
from triax.grid import Grid
from triax.models.config import GPTConfig, LlamaConfig
from triax.models.gpt import gpt_layers
from triax.models.huggingface import folder_writer as hf_write
from triax.models.huggingface.config import entries, to_hf
from triax.models.huggingface.load import config_from_hf, load_hf
from triax.models.huggingface.names import Fused, Names, Transposed, expand
from triax.models.huggingface.save import save_hf
from triax.models.llama import llama_layers
from triax.options.table import markdown
from triax.train.sections import WHOLE, TrainingFile

from support.huggingface_models import _GPT2, _LLAMA, CASES, assert_bitwise, ids_of, logits_of, make, saved
from support.paths import DOCS
from support.readme_blocks import programs, run_page_program

MISTRAL: Names = {
    "layers.0.weight": "model.embed_tokens.weight",
    "layers.{i+1}.norm1.weight": "model.layers.{i}.input_layernorm.weight",
    "layers.{i+1}.attention.q.weight": "model.layers.{i}.self_attn.q_proj.weight",
    "layers.{i+1}.attention.kv.weight": (
        "model.layers.{i}.self_attn.k_proj.weight",
        "model.layers.{i}.self_attn.v_proj.weight",
    ),
    "layers.{i+1}.attention.out.weight": "model.layers.{i}.self_attn.o_proj.weight",
    "layers.{i+1}.norm2.weight": "model.layers.{i}.post_attention_layernorm.weight",
    "layers.{i+1}.mlp.gate_up.weight": (
        "model.layers.{i}.mlp.gate_proj.weight",
        "model.layers.{i}.mlp.up_proj.weight",
    ),
    "layers.{i+1}.mlp.down.weight": "model.layers.{i}.mlp.down_proj.weight",
    "layers.{n+1}.weight": "model.norm.weight",
    "layers.{n+2}.weight": "lm_head.weight",
}


def test_load_hf_takes_an_unknown_family_with_given_names(tmp_path: Path) -> None:
    options: dict[str, Any] = _LLAMA | {"vocab_size": 43, "num_key_value_heads": 4, "head_dim": 4, "bos_token_id": 1}
    options |= {"layer_types": ["full_attention"] * 3, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    model = make("Cwm", options)
    model.save_pretrained(tmp_path / "theirs")
    with pytest.raises(ValueError, match="model_type is 'cwm', but the known ones are gpt2, llama"):
        load_hf(tmp_path / "theirs")
    config = LlamaConfig(
        vocab_size=43,
        hidden_size=32,
        intermediate_size=44,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=32,
    )
    mine = triax.PipelineModule(load_hf(tmp_path / "theirs", llama_layers(config), names=MISTRAL), grid=Grid()).eval()
    assert (mine(ids_of(model)) - logits_of(model)).abs().max() <= 1e-5
    save_hf(mine, tmp_path / "mine", names=MISTRAL, config=model.config.to_dict())
    again = type(model).from_pretrained(tmp_path / "mine")
    assert_bitwise(dict(again.state_dict()), dict(model.state_dict()))


def test_a_tied_weight_needs_only_one_name() -> None:
    model = make("Cwm", _LLAMA | {"vocab_size": 43, "head_dim": 4, "bos_token_id": 1, "tie_word_embeddings": True})
    names = {name: theirs for name, theirs in MISTRAL.items() if theirs != "lm_head.weight"}
    config = LlamaConfig(43, 32, 32, 3, 8, num_key_value_heads=8, intermediate_size=44, tie_word_embeddings=True)
    triax.PipelineModule(load_hf(model, llama_layers(config), names=names), grid=Grid())
    model.lm_head.weight = nn.Parameter(model.lm_head.weight + 1.0)
    with pytest.raises(ValueError, match=r"no parameter takes lm_head.weight"):
        load_hf(model, llama_layers(config), names=names)


def test_fused_tensors_of_an_unknown_family_are_split_by_heads() -> None:
    """The rows of queries, keys and values, by the usual keys of a configuration."""
    heads, groups, width = 6, 2, 4
    table: Names = {f"{part}.weight": Fused("qkv.weight", part) for part in ("q", "kv")}
    sizes = {"num_attention_heads": heads, "hidden_size": heads * width, "num_hidden_layers": 1}
    found = entries(table, {"model_type": "mine", "num_key_value_heads": groups, **sizes})
    rows = torch.arange((heads + 2 * groups) * width).view(groups, heads // groups + 2, width)  # grouped by key/value
    wanted = {"q": rows[:, :-2].flatten(), "kv": torch.cat([rows[:, -2].flatten(), rows[:, -1].flatten()])}
    for part, each in wanted.items():
        ranges = found[f"{part}.weight"].rows
        assert [row for start, stop in ranges for row in range(start, stop)] == each.tolist()
    with pytest.raises(ValueError, match=r"Fused\('qkv.weight'\) needs the numbers of heads.*Give RowsOf"):
        entries(table, {"model_type": "mine", "n_head": 6, "num_hidden_layers": 1})


def test_folders_without_a_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"config.json does not exist, or is no file \(no such folder\)"):
        load_hf(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(FileNotFoundError, match=r"no \*.safetensors \(config.json\)"):
        load_hf(tmp_path)
    with pytest.raises(TypeError, match="got a Linear"):
        load_hf(nn.Linear(2, 2))
    with pytest.raises(TypeError, match="the model is a int"):
        load_hf(make(*CASES["gpt2"]), 3)


@pytest.mark.parametrize(
    ("family", "change", "complaint"),
    [
        ("GPT2", {"activation_function": "relu"}, "gpt2 with activation_function='relu' is not implemented"),
        ("GPT2", {"n_inner": 50}, "n_inner=50 is not a multiple of n_embd=32"),
        ("GPT2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True"),
        ("Llama", {"hidden_act": "gelu", "num_key_value_heads": 2}, "llama with hidden_act='gelu'"),
        (
            "Llama",
            {"rope_parameters": {"rope_type": "proportional", "rope_theta": 1e4}},
            "rope_type='proportional' is not implemented for llama, only 'default', 'llama3', 'yarn', 'linear'",
        ),
    ],
)
def test_configurations_that_triax_cannot_compute_are_refused(
    family: str, change: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ValueError, match=complaint):
        config_from_hf(make(family, (_GPT2 if family == "GPT2" else _LLAMA) | {"vocab_size": 41} | change))


class _Fake:
    """Weights of some names and shapes, under a configuration."""

    def __init__(self, config: dict[str, Any], weights: dict[str, Tensor]) -> None:
        self.config, self._weights = self, weights
        self.to_dict = lambda: config

    def state_dict(self) -> dict[str, Tensor]:
        return self._weights


@pytest.mark.parametrize(
    ("lost", "added", "names", "words"),
    [
        ("h.1.mlp.c_fc.bias", {}, None, "layers.3.mlp.up.bias is loaded from transformer.h.1.mlp.c_fc.bias, but the"),
        ("", {"extra": (2,)}, None, "no parameter takes transformer.extra of the _Fake. Add them"),
        (
            "",
            {"wte.weight": (52, 32)},
            None,
            "layers.0.weight is (53, 32) here, but transformer.wte.weight (52, 32) in",
        ),
        ("", {}, {"layers.{j}.weight": "a"}, "{j}. Write {i} for a block's index"),
    ],
)
def test_missing_and_misshapen_weights_are_refused(lost: str, added: Any, names: Any, words: str) -> None:
    model = make(*CASES["gpt2"])
    weights = {name: value for name, value in model.state_dict().items() if name != f"transformer.{lost}"}
    weights |= {f"transformer.{name}": torch.ones(shape) for name, shape in added.items()}
    with pytest.raises(ValueError, match=re.escape(words)):
        triax.PipelineModule(load_hf(_Fake(model.config.to_dict(), weights), names=names), grid=Grid())


def small(device: str | None = None) -> Any:
    return triax.PipelineModule(gpt_layers(GPTConfig(53, 16, 32, 3, 8)), grid=Grid(), device=device)


@pytest.mark.parametrize(
    ("into", "words"),
    [
        (lambda: gpt_layers(GPTConfig(53, 16, 32, 3, 8, layer_norm_epsilon=0.01)), "is 0.01 here, 1e-05 there"),
        (lambda: llama_layers(LlamaConfig(53, 16, 32, 3, 8)), "is a LlamaConfig here, a GPTConfig there"),
        (lambda: nn.Linear(2, 2), "Write load_hf(path, module, grid=grid)"),
        (lambda: small("meta"), "layers.0.weight has no values"),
    ],
)
def test_a_model_that_takes_no_weights_is_refused(into: Any, words: str) -> None:
    with pytest.raises((ValueError, RuntimeError), match=re.escape(words)):
        load_hf(make(*CASES["gpt2"]), into())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "has no configuration that can be written. Pass save_hf(model, path, config="),
        (
            {"config": {"model_type": "mine"}, "names": {"layers.0.weight": "w"}},
            "names have no entry for layers.0.bias",
        ),
        ({"config": {"model_type": "mine"}}, "no table of names for model_type 'mine'"),
    ],
)
def test_saving_without_a_known_configuration_is_refused(tmp_path: Path, options: Any, words: str) -> None:
    """Nothing is touched before all is known."""
    with pytest.raises(ValueError, match=re.escape(words)):
        save_hf(triax.PipelineModule([nn.Linear(2, 3)], grid=Grid()), tmp_path, **options)
    assert not list(tmp_path.iterdir())


def test_save_hf_refuses_modules_it_cannot_write(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"Write save_hf\(module, path, grid=grid\)"):
        save_hf(nn.Linear(2, 3), tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        save_hf(small(), tmp_path / "file")
    with pytest.raises(ValueError, match="Qwen2 has no qk_norm=True; Qwen3 has no qkv_bias=True"):
        to_hf(LlamaConfig(53, 16, 32, 3, 8, qkv_bias=True, qk_norm=True))


def test_load_hf_refuses_a_bias_without_a_parameter() -> None:
    """Error for a bias without a parameter, in an unknown family."""
    model = make(*CASES["llama"])
    weights = dict(model.state_dict()) | {"model.layers.1.self_attn.q_proj.bias": torch.ones(32)}
    names = MISTRAL | {"layers.{i+1}.attention.q.*": "model.layers.{i}.self_attn.q_proj.*"}  # type: ignore[operator]
    layers = llama_layers(LlamaConfig(61, 32, 32, 3, 8, 2, intermediate_size=44, rms_norm_eps=1e-6))
    fake = _Fake({"model_type": "mine", "num_hidden_layers": 3}, weights)
    complaint = r"q_proj.bias, but the model has no layers.2.attention.q.bias to take it"
    with pytest.raises(ValueError, match=complaint):
        triax.PipelineModule(load_hf(fake, layers, names=names), grid=Grid())
    module = triax.PipelineModule(layers, grid=Grid())
    before = [parameter.clone() for parameter in module.parameters()]
    with pytest.raises(ValueError, match=complaint):
        load_hf(fake, module, names=names)
    assert all(torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))


def failures(folder: str, out: str) -> list[str]:
    """Errors that this rank raises when only one rank fails."""
    grid = Grid(pipe=2)
    config = config_from_hf(folder)
    assert isinstance(config, GPTConfig)
    model = triax.PipelineModule(gpt_layers(config), grid=grid)
    said = []

    def hear(call: Any) -> None:
        with pytest.raises((OSError, RuntimeError, ValueError)) as error:
            call()
        said.append(f"{error.type.__name__}: {error.value}")

    hear(lambda: save_hf(model, Path(folder) / "config.json"))  # a file, where rank 0 wants a folder

    def full(self: Any, name: str, tensor: Tensor) -> None:
        if name == "transformer.h.1.mlp.c_fc.weight":
            raise OSError("no space left")

    plain, hf_write.FolderWriter.write_tensor = hf_write.FolderWriter.write_tensor, full  # type: ignore[method-assign]
    try:
        hear(lambda: save_hf(model, out))
    finally:
        hf_write.FolderWriter.write_tensor = plain  # type: ignore[method-assign]
    if grid.rank == 1:
        model.layers.register_parameter("stray", nn.Parameter(torch.ones(2)))
    hear(lambda: load_hf(folder, model))
    return said


def test_an_error_on_one_rank_is_raised_on_all_ranks(ranks: Any, tmp_path: Path) -> None:
    folder, *_ = saved(tmp_path, "gpt2")
    first, second = ranks(2, failures, str(folder), str(tmp_path / "out"), timeout=60)
    assert first[0].startswith("FileExistsError") and second[0].startswith("RuntimeError: on another rank: FileExists")
    for said in (first[1], second[1]):
        assert "rank 0 could not write" in said and "no space left" in said
    assert second[2].startswith("ValueError: names have no entry for layers.stray (of a PipelineModule)")
    assert first[2] == f"RuntimeError: on another rank: {second[2]}"


def test_patterns_of_weight_names_expand_for_each_layer() -> None:
    entries = expand({"a.{i+2}.*": Transposed("b.{i}.c.*"), "d.{n-1}": ("e", "f.{n}")}, 2)
    assert {ours: entry.theirs for ours, entry in entries.items()} == {
        "a.2.weight": ("b.0.c.weight",),
        "a.2.bias": ("b.0.c.bias",),
        "a.3.weight": ("b.1.c.weight",),
        "a.3.bias": ("b.1.c.bias",),
        "d.1": ("e", "f.2"),
    }
    assert [entry.transposed for entry in entries.values()] == [True] * 4 + [False]


KEYS = markdown(TrainingFile, WHOLE)


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        pytest.param("finetune.py", [2, 2, 2], marks=pytest.mark.exhaustive),
        ("finetune.py", []),
        ("tensor_trainer.py", [2]),
        ("stages_trainer.py", [2, 2]),
        ("lora_trainer.py", [2, 2]),
        pytest.param("sft.py", [2], marks=pytest.mark.exhaustive),  # importing trl takes seconds
        ("experts.py", [1, 1, 2, 2]),
        ("hf_stages.py", [2, 2]),
        ("cwm.py", []),
        ("bigcode.py", []),
        ("shard.py", [1, 2, 2]),
        ("plan.py", [1, 1, 4]),
        ("plan.py", []),
    ],
)
def test_the_programs_of_the_huggingface_page_run(ranks: Any, tmp_path: Path, name: str, sizes: list[int]) -> None:
    ranks(math.prod(sizes), run_page_program, "huggingface.md", str(tmp_path), name, sizes, timeout=60)


def evaluated(folder: str) -> list[float]:
    """The losses of the evaluations of trainer.py, as its last checkpoint has them."""
    os.makedirs(folder, exist_ok=True)
    run_page_program("huggingface.md", folder, "trainer.py")
    state = json.loads((Path(folder) / "runs/fox/checkpoint-10/trainer_state.json").read_text())
    return [row["eval_loss"] for row in state["log_history"] if "eval_loss" in row]


def test_the_docs_trainer_has_equal_losses_on_four_ranks(ranks: Any, tmp_path: Path) -> None:
    (alone,) = ranks(1, evaluated, str(tmp_path / "one"), timeout=60)
    assert len(alone) == 2 and alone[1] < alone[0]
    for found in ranks(4, evaluated, str(tmp_path / "four"), timeout=60):
        assert found == pytest.approx(alone, abs=1e-4, rel=0)


def test_the_docs_table_of_arguments_names_options() -> None:
    transformers = pytest.importorskip("transformers")
    table = (DOCS / "huggingface.md").read_text().partition("### `TrainingArguments`, and")[2].partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| `")][1:]
    theirs, keys = set(transformers.TrainingArguments.__dataclass_fields__), set(re.findall(r"`(\S+?)`", KEYS))
    names = {"partial": partial, "torch": torch, "transformers": transformers, "triax": triax}
    for arguments, options, ours in rows:
        assert set(re.findall(r"`(\w+)`", arguments)) <= theirs
        for written in re.findall(r"`(\w+=[^`]+)`", options):
            assert eval(f"triax.EngineOptions({written})", names) != triax.EngineOptions() or "drop_last" in written
        for key in re.findall(r"`([\w.]+)`", ours):
            assert any(known == key or known.startswith(f"{key}.") for known in keys), key


def test_every_program_of_the_huggingface_page_is_run() -> None:
    assert list(programs((DOCS / "huggingface.md").read_text())) == [
        *("trainer.py", "tensor_trainer.py", "stages_trainer.py", "lora_trainer.py", "sft.py", "finetune.py"),
        *("experts.py", "hf_stages.py", "cwm.py", "bigcode.py", "shard.py", "plan.py"),
    ]
