"""Weights from and to Hugging Face: logits against transformers' own, and files that it reads back bitwise."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import triax
from triax.grid import Grid
from triax.models.config import GPTConfig, LlamaConfig
from triax.models.gpt import gpt_layers
from triax.models.huggingface import reader as hf_read
from triax.models.huggingface.config import from_hf, to_hf
from triax.models.huggingface.load import config_from_hf, load_hf
from triax.models.huggingface.save import save_hf
from triax.models.layers import NextTokenLoss
from triax.models.llama import llama_layers
from triax.tensor_parallel import gather_logits

from support.huggingface_models import _GPT2, _LLAMA, CASES, assert_bitwise, ids_of, logits_of, make, read_back, saved

Sizes = tuple[int, int, int]  # pipe, data, tensor


def weights_of(folder: Path, case: str) -> dict[str, Tensor]:
    """Weights of a folder as transformers reads them."""
    model = read_back(folder)
    assert type(model).__name__.startswith(CASES[case][0])
    return dict(model.state_dict())


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
    plain = hf_read._Folder.read_slice

    def counted(self: Any, name: str, part: tuple[slice, ...]) -> Tensor:
        nonlocal read
        tensor = plain(self, name, part)
        read += tensor.numel() * tensor.element_size()
        return tensor

    hf_read._Folder.read_slice = counted  # type: ignore[method-assign]
    try:
        model = pipeline(sizes, load_hf(folder), config_from_hf(folder).vocab_size, device="meta")
        share = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
        engine = engine_of(model, stage)
    finally:
        hf_read._Folder.read_slice = plain  # type: ignore[method-assign]
    logits = logits_from(engine, ids)
    save_hf(engine, out, max_file_bytes=20_000)
    return {"read": read, "share": share, "logits": logits}


def require_round_trip_is_bitwise(ranks: Any, tmp_path: Path, case: str, sizes: Sizes, stage: int) -> None:
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
        ("llama-tied", (2, 2, 1), 3),
        ("qwen3", (1, 1, 2), 1),
        *(
            pytest.param(*each, marks=pytest.mark.exhaustive)
            for each in (("gpt2", (2, 2, 2), 3), ("llama-tied", (2, 2, 2), 3), ("qwen3", (1, 1, 8), 1))
        ),
    ],
)
def test_weights_load_and_save_bit_by_bit(ranks: Any, tmp_path: Path, case: str, sizes: Sizes, stage: int) -> None:
    """Logits to 1e-5 in float32, each rank reads its share to the byte, and saves bitwise what it loaded."""
    require_round_trip_is_bitwise(ranks, tmp_path, case, sizes, stage)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "sizes", [(8, 1, 1), (1, 8, 1), (1, 1, 8), (4, 2, 1), (4, 1, 2), (2, 4, 1), (2, 1, 4), (1, 4, 2), (1, 2, 4)]
)
@pytest.mark.parametrize("case", CASES)
def test_weights_survive_a_round_trip_on_every_grid_of_8(ranks: Any, tmp_path: Path, case: str, sizes: Sizes) -> None:
    require_round_trip_is_bitwise(ranks, tmp_path, case, sizes, stage=len(case) % 4)


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(12))
def test_random_configurations_have_transformers_logits(
    ranks: Any, tmp_path: Path, monkeypatch: Any, seed: int
) -> None:
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
    require_round_trip_is_bitwise(ranks, tmp_path, "drawn", sizes, stage=seed % 4)


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
def test_parallelized_models_load_and_save_bit_by_bit(ranks: Any, tmp_path: Path, case: str) -> None:
    folder, ids, wanted = saved(tmp_path, case)
    for logits in ranks(4, sharded_hugging_face, (1, 2, 2), str(folder), ids, str(tmp_path / "out"), timeout=60):
        assert (logits - wanted).abs().max() <= 1e-5
    for written in ("out", "out-engine"):
        assert_bitwise(weights_of(tmp_path / written, case), weights_of(folder, case))


def test_gpt2_loads_live_or_from_names_without_a_prefix(tmp_path: Path) -> None:
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


def test_a_double_precision_model_stays_in_double_precision() -> None:
    model = make(*CASES["llama"]).double()
    mine = triax.PipelineModule(load_hf(model), grid=Grid()).eval()
    assert {parameter.dtype for parameter in mine.parameters()} == {torch.float64}
    assert (mine(ids_of(model)) - logits_of(model)).abs().max() < 1e-6  # their norms compute in float32


@pytest.mark.parametrize("case", CASES)
def test_huggingface_configurations_survive_a_round_trip(case: str) -> None:
    config = from_hf(make(*CASES[case]).config.to_dict())
    assert from_hf(to_hf(config)) == config


def test_llama_31s_rope_has_transformers_logits(tmp_path: Path) -> None:
    rope = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    options = CASES["llama"][1] | {"rope_parameters": rope | {"original_max_position_embeddings": 8}}
    model = make("Llama", options)
    mine = triax.PipelineModule(load_hf(model), grid=Grid()).eval()
    assert (mine(ids_of(model)) - logits_of(model)).abs().max() <= 1e-5
    old = {key: value for key, value in model.config.to_dict().items() if key != "rope_parameters"}
    old |= {"rope_theta": 5e5, "rope_scaling": {k: v for k, v in rope.items() if k != "rope_theta"}}
    old["rope_scaling"]["original_max_position_embeddings"] = 8
    assert from_hf(old) == from_hf(model.config.to_dict()) == from_hf(to_hf(config_from_hf(model)))
