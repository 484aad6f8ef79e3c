"""Weights from and to Hugging Face: logits against transformers' own, and files that it reads back bitwise."""

from __future__ import annotations

import json
import math
import os
import random
import re
import sys
import types
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
from triax.models.huggingface import reader as hf_read
from triax.models.huggingface.config import from_hf, to_hf
from triax.models.huggingface.load import config_from_hf, load_hf
from triax.models.huggingface.names import Names, Transposed, expand
from triax.models.huggingface.save import save_hf
from triax.models.layers import NextTokenLoss
from triax.models.llama import llama_layers
from triax.tensor_parallel import gather_logits

from paths import DOCS

Sizes = tuple[int, int, int]  # pipe, data, tensor

_NO_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
_GPT2 = {"n_positions": 16, "n_embd": 32, "n_layer": 3, "n_head": 8, "resid_pdrop": 0.0} | _NO_TOKENS
_LLAMA = {
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "max_position_embeddings": 32,
} | _NO_TOKENS
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2", _GPT2 | {"vocab_size": 53}),
    "gpt2-untied": ("GPT2", _GPT2 | {"vocab_size": 41, "n_inner": 64, "tie_word_embeddings": False}),
    "llama": ("Llama", _LLAMA | {"vocab_size": 61, "num_key_value_heads": 2}),
    "llama-tied": ("Llama", _LLAMA | {"vocab_size": 43, "num_key_value_heads": 8, "tie_word_embeddings": True}),
    "qwen2": ("Qwen2", _LLAMA | {"vocab_size": 43, "num_key_value_heads": 1, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3", _LLAMA | {"vocab_size": 47, "num_key_value_heads": 4, "head_dim": 6}),
}


def make(family: str, options: dict[str, Any]) -> Any:
    """A random model in which no bias is 0 and no norm 1."""
    import transformers

    config = getattr(transformers, f"{family}Config")(**options)
    torch.manual_seed(3)
    model = getattr(transformers, f"{family}{'LMHeadModel' if family == 'GPT2' else 'ForCausalLM'}")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    return model.eval()


def ids_of(model: Any) -> Tensor:
    return torch.randint(model.config.vocab_size, (4, 13), generator=torch.Generator().manual_seed(5))


def logits_of(model: Any) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(input_ids=ids_of(model)).logits
    return logits


def saved(folder: Path, case: str, **options: Any) -> tuple[Path, Tensor, Tensor]:
    """A model's folder, and what it makes of some ids."""
    model = make(CASES[case][0], CASES[case][1] | options)
    model.save_pretrained(folder / case)
    return folder / case, ids_of(model), logits_of(model)


def weights_of(folder: Path, case: str) -> dict[str, Tensor]:
    """Weights of a folder as transformers reads them."""
    import transformers

    reader: Any = transformers.AutoModelForCausalLM
    model, info = reader.from_pretrained(folder, output_loading_info=True)
    assert not any(info.get(key) for key in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs")), info
    assert type(model).__name__.startswith(CASES[case][0])
    return dict(model.state_dict())


def assert_bitwise(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


# --------------------------------------------------------------------------------------------- on ranks


def pipeline(sizes: Sizes, layers: list[Any], vocab: int, **options: Any) -> triax.PipelineModule:
    grid = Grid(*sizes)
    return triax.PipelineModule(
        layers,
        grid=grid,
        loss_fn=NextTokenLoss(grid, vocab),
        output_fn=lambda logits: gather_logits(logits, grid=grid, vocab_size=vocab),
        **options,
    )


def engine_of(model: triax.PipelineModule, stage: int, bf16: bool = False) -> triax.PipelineEngine:
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": bf16},
    }
    return triax.initialize(model=model, config=config)[0]


def logits_from(engine: triax.PipelineEngine, ids: Tensor) -> Tensor:
    _, outputs = engine.eval_batch(iter([(ids, ids)]), return_logits=True, num_micro_batches=1)
    logits: Tensor = outputs[0]
    return logits


def there_and_back(sizes: Sizes, folder: str, ids: Tensor, stage: int, out: str) -> dict[str, Any]:
    """Load, count what was read, run, save."""
    read = 0
    plain = hf_read._Folder.read

    def counted(self: Any, name: str, part: tuple[slice, ...]) -> Tensor:
        nonlocal read
        tensor = plain(self, name, part)
        read += tensor.numel() * tensor.element_size()
        return tensor

    hf_read._Folder.read = counted  # type: ignore[method-assign]
    try:
        model = pipeline(sizes, load_hf(folder), config_from_hf(folder).vocab_size, device="meta")
        share = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
        engine = engine_of(model, stage)
    finally:
        hf_read._Folder.read = plain  # type: ignore[method-assign]
    logits = logits_from(engine, ids)
    save_hf(engine, out, max_file_bytes=20_000)
    return {"read": read, "share": share, "logits": logits}


def check_round_trip(ranks: Any, tmp_path: Path, case: str, sizes: Sizes, stage: int) -> None:
    # 8 stages take 8 layers, of which the blocks are 5.
    depth = {"n_layer" if CASES[case][0] == "GPT2" else "num_hidden_layers": 5} if sizes[0] == 8 else {}
    folder, ids, wanted = saved(tmp_path, case, **depth)
    count = sizes[0] * sizes[1] * sizes[2]
    found = ranks(count, there_and_back, sizes, str(folder), ids, stage, str(tmp_path / "out"), timeout=60)
    for rank in found:
        assert rank["read"] == rank["share"]  # to the byte: its own part, and what is whole everywhere
        assert (rank["logits"] - wanted).abs().max() <= 1e-5
    assert (tmp_path / "out" / "model.safetensors.index.json").is_file()
    assert_bitwise(weights_of(tmp_path / "out", case), weights_of(folder, case))


@pytest.mark.parametrize(
    ("case", "sizes", "stage"),
    [
        ("gpt2-untied", (1, 1, 1), 0),
        ("gpt2", (2, 1, 1), 1),
        ("llama", (1, 1, 4), 0),
        ("qwen2", (1, 2, 2), 2),
        ("gpt2", (2, 2, 2), 3),
        ("llama-tied", (2, 2, 2), 3),
        ("qwen3", (1, 1, 8), 1),
    ],
)
def test_there_and_back(ranks: Any, tmp_path: Path, case: str, sizes: Sizes, stage: int) -> None:
    """Logits to 1e-5 in float32, each rank reads its share to the byte, and saves bitwise what it loaded."""
    check_round_trip(ranks, tmp_path, case, sizes, stage)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "sizes", [(8, 1, 1), (1, 8, 1), (1, 1, 8), (4, 2, 1), (4, 1, 2), (2, 4, 1), (2, 1, 4), (1, 4, 2), (1, 2, 4)]
)
@pytest.mark.parametrize("case", CASES)
def test_there_and_back_on_every_grid_of_8(ranks: Any, tmp_path: Path, case: str, sizes: Sizes) -> None:
    check_round_trip(ranks, tmp_path, case, sizes, stage=len(case) % 4)


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(12))
def test_random_configurations(ranks: Any, tmp_path: Path, monkeypatch: Any, seed: int) -> None:
    draw = random.Random(seed)
    heads, tied = draw.choice([8, 9, 10, 12]), draw.random() < 0.5
    width, vocab = heads * draw.choice([2, 4, 6]), draw.randrange(31, 99)
    if seed % 2:
        case: tuple[str, dict[str, Any]] = (
            "GPT2",
            _GPT2 | {"n_embd": width, "n_head": heads, "n_inner": width * draw.randint(1, 4)},
        )
    else:
        kv_heads = draw.choice([n for n in range(1, heads + 1) if heads % n == 0])
        case = (
            "Llama",
            _LLAMA
            | {
                "hidden_size": width,
                "num_attention_heads": heads,
                "num_key_value_heads": kv_heads,
                "intermediate_size": draw.randrange(17, 70),
                "rms_norm_eps": draw.choice([1e-5, 1e-6]),
                "rope_parameters": {"rope_type": "default", "rope_theta": draw.choice([1e3, 1e4, 5e5])},
            },
        )
    monkeypatch.setitem(CASES, "drawn", (case[0], case[1] | {"vocab_size": vocab, "tie_word_embeddings": tied}))
    sizes = draw.choice([(1, 1, 8), (2, 1, 4), (2, 2, 2), (4, 1, 2), (1, 2, 4)])
    check_round_trip(ranks, tmp_path, "drawn", sizes, stage=seed % 4)


def into_an_engine(sizes: Sizes, folder: str, ids: Tensor, stage: int, out: str) -> dict[str, Any]:
    """An engine that trained takes new weights; one that started from them has the same masters; both train on."""
    config = config_from_hf(folder)
    assert isinstance(config, LlamaConfig)
    vocab = config.vocab_size
    engine = engine_of(pipeline(sizes, llama_layers(config), vocab), stage, bf16=True)
    other = engine_of(pipeline(sizes, load_hf(folder), vocab), stage, bf16=True)
    assert load_hf(folder, engine) is engine
    masters = [
        [bucket.master.detach().clone() for bucket in e.data_axis.buckets if bucket.master is not None]
        for e in (engine, other)
    ]
    losses = [float(e.train_batch(iter([(ids, ids)] * 2))) for e in (engine, other)]
    save_hf(engine, out)
    save_hf(engine, f"{out}-fp32", dtype=torch.float32)
    return {"masters": masters, "losses": losses, "weights": engine.gather()}


@pytest.mark.parametrize("stage", [1, 3])
def test_an_engine_takes_weights_unrounded(ranks: Any, tmp_path: Path, stage: int) -> None:
    folder, ids, _ = saved(tmp_path, "llama")
    found = ranks(4, into_an_engine, (1, 2, 2), str(folder), ids, stage, str(tmp_path / "out"), timeout=60)
    for rank in found:
        mine, other = rank["masters"]
        assert mine and all(torch.equal(a, b) for a, b in zip(mine, other, strict=True))
        assert any(not torch.equal(a, a.bfloat16().float()) for a in mine)
        assert rank["losses"][0] == rank["losses"][1]
    # What it saves after a step is what it has: under their names, in bf16 and, widened, in fp32.
    ours = found[0]["weights"]
    theirs, wide = weights_of(tmp_path / "out", "llama"), weights_of(tmp_path / "out-fp32", "llama")
    assert {tensor.dtype for tensor in theirs.values()} == {torch.bfloat16}
    k, v = ours["layers.2.attention.kv.weight"].chunk(2)
    assert torch.equal(theirs["model.layers.1.self_attn.v_proj.weight"], v)
    assert torch.equal(theirs["model.layers.1.self_attn.k_proj.weight"], k)
    assert torch.equal(theirs["model.embed_tokens.weight"], ours["layers.0.weight"])
    assert_bitwise(wide, {name: tensor.float() for name, tensor in theirs.items()})


def into_a_module(sizes: Sizes, folder: str, ids: Tensor) -> Tensor:
    config = config_from_hf(folder)
    assert isinstance(config, GPTConfig)
    model = pipeline(sizes, gpt_layers(config), config.vocab_size)
    load_hf(folder, model)
    return logits_from(engine_of(model, stage=2), ids)


def test_a_module_takes_weights_before_the_engine(ranks: Any, tmp_path: Path) -> None:
    """Weights come from several files, and from bf16, which float32 represents exactly."""
    model = make(*CASES["gpt2"]).bfloat16()
    model.save_pretrained(tmp_path / "b", max_shard_size="20KB")
    assert len(list((tmp_path / "b").glob("*.safetensors"))) > 2
    wanted = logits_of(model.float())
    for logits in ranks(4, into_a_module, (2, 1, 2), str(tmp_path / "b"), ids_of(model), timeout=60):
        assert (logits - wanted).abs().max() <= 1e-5


def sharded_hugging_face(sizes: Sizes, folder: str, ids: Tensor, out: str) -> Tensor:
    """A parallelized Hugging Face model alone, and as the only layer of an engine's model."""
    import transformers

    grid = Grid(*sizes)
    config = transformers.AutoConfig.from_pretrained(folder)
    model = triax.parallelize(transformers.AutoModelForCausalLM.from_config(config).eval(), grid)
    load_hf(folder, model, grid=grid)
    save_hf(model, out, grid=grid)
    with torch.no_grad():
        logits: Tensor = model(input_ids=ids).logits
        for parameter in model.parameters():
            parameter.zero_()
    engine = engine_of(triax.PipelineModule([model], grid=grid, loss_fn=_no_loss), stage=3)
    load_hf(folder, engine)
    save_hf(engine, f"{out}-engine")
    return logits


def _no_loss(outputs: Any, labels: Tensor) -> Tensor:
    raise AssertionError("nothing is trained")


@pytest.mark.parametrize("case", ["gpt2", "qwen2"])
def test_what_parallelize_sharded_loads_and_saves(ranks: Any, tmp_path: Path, case: str) -> None:
    folder, ids, wanted = saved(tmp_path, case)
    for logits in ranks(4, sharded_hugging_face, (1, 2, 2), str(folder), ids, str(tmp_path / "out"), timeout=60):
        assert (logits - wanted).abs().max() <= 1e-5
    for written in ("out", "out-engine"):
        assert_bitwise(weights_of(tmp_path / written, case), weights_of(folder, case))


# --------------------------------------------------------------------------------------- in one process


def test_a_live_model_and_the_names_without_a_prefix(tmp_path: Path) -> None:
    """GPT-2's released file has `wte.weight` where others have `transformer.wte.weight`, and masks besides."""
    from safetensors.torch import save_file

    model = make(*CASES["gpt2"])
    live = triax.PipelineModule(load_hf(model), grid=Grid()).eval()
    assert (live(ids_of(model)) - logits_of(model)).abs().max() <= 1e-5
    weights = {name: tensor.clone() for name, tensor in model.transformer.state_dict().items()}
    weights |= {f"h.{i}.attn.bias": torch.ones(1, 1, 16, 16) for i in range(3)}
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(model.config.to_dict()))
    bare = triax.PipelineModule(load_hf(tmp_path), grid=Grid())
    assert all(torch.equal(a, b) for a, b in zip(live.parameters(), bare.parameters(), strict=True))


def test_double_precision_stays() -> None:
    model = make(*CASES["llama"]).double()
    mine = triax.PipelineModule(load_hf(model), grid=Grid()).eval()
    assert {parameter.dtype for parameter in mine.parameters()} == {torch.float64}
    assert (mine(ids_of(model)) - logits_of(model)).abs().max() < 1e-6  # their norms compute in float32


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


def test_a_family_that_the_user_names(tmp_path: Path) -> None:
    options = _LLAMA | {"vocab_size": 43, "num_key_value_heads": 4, "head_dim": 4, "attention_bias": False}
    model = make("SeedOss", options)
    model.save_pretrained(tmp_path / "theirs")
    with pytest.raises(ValueError, match="model_type is 'seed_oss', but the known ones are gpt2, llama"):
        load_hf(tmp_path / "theirs")
    config = LlamaConfig(
        vocab_size=43,
        hidden_size=32,
        intermediate_size=44,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=4,
        rms_norm_eps=1e-6,
        max_position_embeddings=32,
    )
    mine = triax.PipelineModule(load_hf(tmp_path / "theirs", llama_layers(config), names=MISTRAL), grid=Grid()).eval()
    assert (mine(ids_of(model)) - logits_of(model)).abs().max() <= 1e-5
    save_hf(mine, tmp_path / "mine", names=MISTRAL, config=model.config.to_dict())
    again = type(model).from_pretrained(tmp_path / "mine")
    assert_bitwise(dict(again.state_dict()), dict(model.state_dict()))


@pytest.mark.parametrize("case", CASES)
def test_configurations_there_and_back(case: str) -> None:
    config = from_hf(make(*CASES[case]).config.to_dict())
    assert from_hf(to_hf(config)) == config


def test_llama_31s_rope(tmp_path: Path) -> None:
    rope = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    options = CASES["llama"][1] | {"rope_parameters": rope | {"original_max_position_embeddings": 8}}
    model = make("Llama", options)
    mine = triax.PipelineModule(load_hf(model), grid=Grid()).eval()
    assert (mine(ids_of(model)) - logits_of(model)).abs().max() <= 1e-5
    old = {key: value for key, value in model.config.to_dict().items() if key != "rope_parameters"}
    old |= {"rope_theta": 5e5, "rope_scaling": {k: v for k, v in rope.items() if k != "rope_theta"}}
    old["rope_scaling"]["original_max_position_embeddings"] = 8
    assert from_hf(old) == from_hf(model.config.to_dict()) == from_hf(to_hf(config_from_hf(model)))


# ----------------------------------------------------------------------------------------------- errors


def test_errors_of_folders(tmp_path: Path) -> None:
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
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            "rope_type='dynamic' is not implemented for llama, only 'default', 'llama3', 'yarn', 'linear'",
        ),
    ],
)
def test_errors_of_configurations(family: str, change: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        config_from_hf(make(family, (_GPT2 if family == "GPT2" else _LLAMA) | {"vocab_size": 41} | change))


class _Fake:
    """Weights of some names and shapes, under a configuration."""

    def __init__(self, config: dict[str, Any], weights: dict[str, Tensor]) -> None:
        self.config, self._weights = self, weights
        self.to_dict = lambda: config

    def state_dict(self) -> dict[str, Tensor]:
        return self._weights


def test_errors_of_weights() -> None:
    model = make(*CASES["gpt2"])
    config, weights = model.config.to_dict(), dict(model.state_dict())

    def build(changed: dict[str, Tensor], **options: Any) -> None:
        triax.PipelineModule(load_hf(_Fake(config, changed), **options), grid=Grid())

    few = {name: tensor for name, tensor in weights.items() if name != "transformer.h.1.mlp.c_fc.bias"}
    with pytest.raises(ValueError, match=r"layers.3.mlp.up.bias is loaded from transformer.h.1.mlp.c_fc.bias, but the"):
        build(few)
    with pytest.raises(ValueError, match=r"no parameter takes transformer.extra of the _Fake. Add them"):
        build(weights | {"transformer.extra": torch.ones(2)})
    with pytest.raises(
        ValueError, match=r"layers.0.weight is \(53, 32\) here, but transformer.wte.weight \(52, 32\) in"
    ):
        build(weights | {"transformer.wte.weight": torch.ones(52, 32)})
    with pytest.raises(ValueError, match=r"\{j\}. Write \{i\} for a block's index"):
        build(weights, names={"layers.{j}.weight": "a"})
    with pytest.raises(ValueError, match=r"layer_norm_epsilon is 0\.01 here, 1e-05 there"):
        load_hf(model, gpt_layers(GPTConfig(53, 16, 32, 3, 8, layer_norm_epsilon=0.01)))
    with pytest.raises(ValueError, match="is a LlamaConfig here, a GPTConfig there"):
        load_hf(model, llama_layers(LlamaConfig(53, 16, 32, 3, 8)))
    with pytest.raises(ValueError, match=r"Write load_hf\(path, module, grid=grid\)"):
        load_hf(model, nn.Linear(2, 2))
    hollow = triax.PipelineModule(gpt_layers(GPTConfig(53, 16, 32, 3, 8)), grid=Grid(), device="meta")
    with pytest.raises(RuntimeError, match=r"layers.0.weight has no values"):
        load_hf(model, hollow)


def test_errors_of_saving(tmp_path: Path) -> None:
    plain = triax.PipelineModule([nn.Linear(2, 3)], grid=Grid())
    with pytest.raises(
        ValueError, match=r"has no configuration that can be written. Pass save_hf\(model, path, config="
    ):
        save_hf(plain, tmp_path)
    with pytest.raises(ValueError, match=r"names have no entry for layers.0.bias"):
        save_hf(plain, tmp_path, config={"model_type": "mine"}, names={"layers.0.weight": "w"})
    with pytest.raises(ValueError, match="no table of names for model_type 'mine'"):
        save_hf(plain, tmp_path, config={"model_type": "mine"})
    with pytest.raises(ValueError, match=r"Write save_hf\(module, path, grid=grid\)"):
        save_hf(nn.Linear(2, 3), tmp_path)
    assert not list(tmp_path.iterdir())  # nothing is touched before all is known
    (tmp_path / "file").touch()
    model = triax.PipelineModule(gpt_layers(GPTConfig(53, 16, 32, 3, 8)), grid=Grid())
    with pytest.raises(OSError, match="file"):
        save_hf(model, tmp_path / "file")
    with pytest.raises(ValueError, match="Qwen2 has no qk_norm=True; Qwen3 has no qkv_bias=True"):
        to_hf(LlamaConfig(53, 16, 32, 3, 8, qkv_bias=True, qk_norm=True))


def test_a_bias_that_has_no_place() -> None:
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

    plain, hf_write.FolderWriter.write = hf_write.FolderWriter.write, full  # type: ignore[method-assign]
    try:
        hear(lambda: save_hf(model, out))
    finally:
        hf_write.FolderWriter.write = plain  # type: ignore[method-assign]
    if grid.rank == 1:
        model.layers.register_parameter("stray", nn.Parameter(torch.ones(2)))
    hear(lambda: load_hf(folder, model))
    return said


def test_what_fails_on_one_rank_fails_on_all(ranks: Any, tmp_path: Path) -> None:
    folder, *_ = saved(tmp_path, "gpt2")
    first, second = ranks(2, failures, str(folder), str(tmp_path / "out"), timeout=60)
    assert first[0].startswith("FileExistsError") and second[0].startswith("RuntimeError: on another rank: FileExists")
    for said in (first[1], second[1]):
        assert "rank 0 could not write" in said and "no space left" in said
    assert second[2].startswith("ValueError: names have no entry for layers.stray (of a PipelineModule)")
    assert first[2] == f"RuntimeError: on another rank: {second[2]}"


def test_patterns() -> None:
    entries = expand({"a.{i+2}.*": Transposed("b.{i}.c.*"), "d.{n-1}": ("e", "f.{n}")}, 2)
    assert {ours: entry.theirs for ours, entry in entries.items()} == {
        "a.2.weight": ("b.0.c.weight",),
        "a.2.bias": ("b.0.c.bias",),
        "a.3.weight": ("b.1.c.weight",),
        "a.3.bias": ("b.1.c.bias",),
        "d.1": ("e", "f.2"),
    }
    assert [entry.transposed for entry in entries.values()] == [True] * 4 + [False]


# ------------------------------------------------------------------------------------ docs/huggingface.md


def programs() -> dict[str, str]:
    """Name -> source of each of its programs; a block without a name continues the one before."""
    text = (DOCS / "huggingface.md").read_text()
    found: dict[str, str] = {}
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        name = re.match(r"# (\w+\.py)\n", block)
        found[name[1] if name else list(found)[-1]] = found.get(name[1] if name else list(found)[-1], "") + block
    return found


def run_program(source: str, sizes: list[str], folder: str) -> None:
    os.chdir(folder)
    sys.argv = ["program.py", *sizes]
    main = sys.modules["__main__"]
    sys.modules["__main__"] = module = types.ModuleType("__main__")  # classes that are pickled are found there
    try:
        exec(compile(source, "docs/huggingface.md", "exec"), vars(module))
    finally:
        sys.modules["__main__"] = main


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("finetune.py", ["2", "2", "2"]),
        ("finetune.py", []),
        ("trainer.py", ["1", "2", "1"]),
        ("tensor_trainer.py", ["2"]),
        ("stages_trainer.py", ["2"]),
        pytest.param("sft.py", ["2"], marks=pytest.mark.exhaustive),  # importing trl takes seconds
        ("experts.py", ["1", "1", "2", "2"]),
        ("hf_stages.py", ["2", "2"]),
        ("seed_oss.py", []),
        ("shard.py", ["1", "2", "2"]),
        ("plan.py", ["1", "1", "4"]),
        ("plan.py", []),
    ],
)
def test_the_docs_programs_run(ranks: Any, tmp_path: Path, name: str, sizes: list[str]) -> None:
    count = math.prod(map(int, sizes))
    ranks(count, run_program, programs()[name], sizes, str(tmp_path), timeout=60)


def test_the_docs_programs_are_all_run() -> None:
    assert list(programs()) == [
        *(
            "trainer.py",
            "tensor_trainer.py",
            "stages_trainer.py",
            "sft.py",
            "finetune.py",
            "experts.py",
            "hf_stages.py",
            "seed_oss.py",
            "shard.py",
            "plan.py",
        ),
    ]
