"""DeepSpeed's ``init_inference``: plain modules, transformers models, engines; each key acts, is refused or is said."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import triax
import triax.compat.deepspeed as deepspeed
from triax.base.errors import ConfigError
from triax.compat.deepspeed.inference import DeepSpeedInferenceConfig
from triax.compat.deepspeed.section_classes import (
    BaseQuantConfig,
    DeepSpeedMoEConfig,
    DeepSpeedTPConfig,
    InferenceCheckpointConfig,
)
from triax.inference.int8 import weight_bytes
from triax.models.gpt import GPTConfig, gpt_layers

from support.reference import gpt_logits
from support.varied_llama import varied_llama

GPT = GPTConfig(vocab_size=53, max_position_embeddings=32, hidden_size=24, num_hidden_layers=2, num_attention_heads=4)
IDS = torch.tensor([[5, 6, 7, 8], [1, 2, 3, 4]])


class Block(nn.Module):
    """A block whose layers an injection policy names."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())


def blocks() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(Block(), Block(), nn.Linear(8, 3)).double()


def sharded(size: int) -> dict[str, Any]:
    """Outputs of each kind of model on a tensor axis of this size."""
    x = torch.randn(3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    policy = {Block: ("down",)}
    plain = deepspeed.init_inference(blocks(), tensor_parallel={"tp_size": size}, injection_policy=policy)
    hugging = deepspeed.init_inference(varied_llama(), config={"tp": {"tp_size": size}})
    torch.manual_seed(torch.distributed.get_rank() if torch.distributed.is_initialized() else 0)
    results: dict[str, Any] = {"plain": plain(x).tolist(), "loss": float(hugging(IDS, labels=IDS).loss)}
    results["greedy"] = hugging.generate(input_ids=IDS, max_new_tokens=6, do_sample=False, pad_token_id=0).tolist()
    results["drawn"] = hugging.generate(IDS, max_new_tokens=6, do_sample=True, pad_token_id=0).tolist()
    quantized = deepspeed.init_inference(varied_llama(), dtype="int8", mp_size=size)
    results["int8"] = float(quantized(IDS, labels=IDS).loss)
    trained = deepspeed.tp_model_init(varied_llama(), tp_size=size, dtype=torch.float64)
    engine = deepspeed.initialize(
        model=trained,
        model_parameters=trained.parameters(),
        config={"train_batch_size": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}},
    )[0]
    results["tensor"] = engine.grid.tensor.size
    over = deepspeed.init_inference(engine.train())
    results["trained"] = float(over(IDS, labels=IDS).loss)
    assert trained.training  # it goes on as it was
    engine.backward(engine(IDS, labels=IDS).loss)
    engine.step()
    results["stepped"] = float(over(IDS, labels=IDS).loss)
    return results


def test_inference_on_two_tensor_ranks_equals_one_process(ranks: Any) -> None:
    (wanted,) = ranks(1, sharded, 1)
    found = ranks(2, sharded, 2, timeout=120)
    for result in found:
        assert result["tensor"] == 2 and result["greedy"] == wanted["greedy"]
        assert result["drawn"] == found[0]["drawn"]  # though each rank has another seed
        assert torch.tensor(result["plain"]).sub(torch.tensor(wanted["plain"])).abs().max() < 1e-10
        for name in ("loss", "trained", "stepped", "int8"):
            assert result[name] == pytest.approx(wanted[name], rel=1e-9), name
    model = varied_llama()
    with torch.no_grad():
        assert wanted["loss"] == pytest.approx(float(model(IDS, labels=IDS).loss), rel=1e-12)
    assert wanted["trained"] == wanted["loss"] != wanted["stepped"] < wanted["loss"]
    assert wanted["loss"] != wanted["int8"] == pytest.approx(wanted["loss"], rel=0.2)


def test_inference_of_a_pipeline_module_equals_plain_gpt() -> None:
    """Logits, and three greedy tokens for each prompt, are those of GPT's forward pass in plain PyTorch."""
    module = triax.PipelineModule(gpt_layers(GPT), dtype=torch.float64)
    weights = {name: parameter.detach() for name, parameter in module.named_parameters()}
    engine = deepspeed.init_inference(module, max_tokens=12)
    assert engine.engine.max_length == 12
    wanted = gpt_logits(weights, IDS, GPT.num_hidden_layers, GPT.num_attention_heads)
    torch.testing.assert_close(engine(IDS), wanted, rtol=0, atol=1e-10)
    ids = IDS
    for _ in range(3):
        logits = gpt_logits(weights, ids, GPT.num_hidden_layers, GPT.num_attention_heads)
        ids = torch.cat([ids, logits[:, -1:].argmax(-1)], dim=1)
    assert engine.generate(IDS.tolist(), 3, temperature=0) == ids.tolist()


def test_int8_inference_of_a_pipeline_module_holds_fewer_bytes() -> None:
    """With asymmetric quantization, each quantized weight has zero points."""
    module = triax.PipelineModule(gpt_layers(GPT), dtype=torch.float64)
    before = weight_bytes(module)
    deepspeed.init_inference(module, dtype=torch.int8, quant={"weight": {"q_groups": 3, "q_type": "asymmetric"}})
    quantized = [name for name, buffer in module.named_buffers() if buffer.dtype == torch.int8]
    zero_points = [name for name, _ in module.named_buffers() if name.endswith("weight_zero")]
    assert weight_bytes(module) < before and len(zero_points) == len(quantized) > 0


def test_the_inference_engine_has_deepspeeds_attributes() -> None:
    engine = deepspeed.init_inference(blocks(), dtype=torch.half, replace_with_kernel_inject=True)
    assert {p.dtype for p in engine.module.parameters()} == {torch.float16} and not engine.module.training
    assert isinstance(engine, deepspeed.InferenceEngine)
    assert engine.module[0].up.weight.dtype == torch.float16
    engine.profile_model_time()
    engine(torch.zeros(1, 8).half())
    assert len(engine.model_times()) == 1 and engine.model_times() == []
    hugging = deepspeed.init_inference(varied_llama(), max_out_tokens=3)
    assert hugging.config.vocab_size == 53 and hugging.can_generate()
    with pytest.raises(RuntimeError, match="the input has 4 tokens, but max_out_tokens is 3"):
        hugging.generate(IDS, max_new_tokens=1)
    with pytest.raises(AttributeError, match="a Sequential has no method generate: call the engine instead"):
        engine.generate(IDS)


def test_the_inference_engine_loads_checkpoints(tmp_path: Path) -> None:
    wanted = blocks()
    with torch.no_grad():
        for parameter in wanted.parameters():
            parameter.add_(1.0)
    state, x = wanted.state_dict(), torch.ones(1, 8).double()
    names = list(state)
    torch.save({name: state[name] for name in names[:4]}, tmp_path / "a.pt")
    torch.save({"module": {name: state[name] for name in names[4:]}}, tmp_path / "b.pt")
    listed = {"type": "ds_model", "checkpoints": ["a.pt", "b.pt"], "version": 1.0}
    (tmp_path / "list.json").write_text(json.dumps(listed))
    torch.save(state, tmp_path / "whole.pt")
    with torch.device("meta"):
        empty = blocks()
    ways: list[tuple[nn.Module, dict[str, Any]]] = [
        (blocks(), {"checkpoint": str(tmp_path / "list.json")}),
        (blocks(), {"checkpoint": listed, "base_dir": str(tmp_path)}),
        (blocks(), {"checkpoint_config": InferenceCheckpointConfig(checkpoint_dir=str(tmp_path / "whole.pt"))}),
        (empty, {"checkpoint": str(tmp_path / "whole.pt"), "set_empty_params": True}),
    ]
    for module, options in ways:
        assert torch.equal(deepspeed.init_inference(module, **options)(x), wanted(x))
    with pytest.raises(ValueError, match=r"the checkpoint lacks 6 of the model's tensors, such as 1.up.weight"):
        deepspeed.init_inference(blocks(), checkpoint=str(tmp_path / "a.pt"))
    model = varied_llama()
    model.save_pretrained(tmp_path / "hf")
    engine = deepspeed.init_inference(type(model)(model.config).double(), checkpoint=str(tmp_path / "hf"))
    with torch.no_grad():
        assert torch.equal(engine(IDS).logits, model(IDS).logits)


class Turned(nn.Module):
    """A layer with a table that no checkpoint has."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("table", torch.arange(3.0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.table


def test_inference_fills_every_value_of_meta_device_models(tmp_path: Path) -> None:
    """Checkpoints lack the tables of rotary positions, and have a tied weight once."""
    import transformers

    small: Any = {"num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 53, "initializer_range": 0.3}
    llama: Any = {"hidden_size": 16, "intermediate_size": 24, **small}
    scaled = {"rope_type": "linear", "rope_theta": 100.0, "factor": 4.0}
    configs: list[Any] = [
        transformers.LlamaConfig(**llama, rope_parameters=scaled),
        transformers.Gemma3TextConfig(**llama, num_key_value_heads=1, head_dim=8, tie_word_embeddings=True),
    ]
    for number, config in enumerate(configs):
        torch.manual_seed(2)
        model = transformers.AutoModelForCausalLM.from_config(config).double().eval()
        model.save_pretrained(tmp_path / str(number))
        for path in (tmp_path / str(number), tmp_path / str(number) / "model.safetensors"):
            with torch.device("meta"):
                empty = transformers.AutoModelForCausalLM.from_config(config).double()
            engine = deepspeed.init_inference(empty, checkpoint=str(path))
            with torch.no_grad():
                torch.testing.assert_close(engine(IDS).logits, model(IDS).logits, rtol=0, atol=1e-10)
    torch.save(Turned().state_dict(), tmp_path / "own.pt")
    with torch.device("meta"):
        own = Turned()
    with pytest.raises(ConfigError, match="table is a buffer without values, and no checkpoint has it"):
        deepspeed.init_inference(own, checkpoint=str(tmp_path / "own.pt"))
    own = Turned()
    own.linear.to("meta")  # as of accelerate's init_empty_weights, which leaves the buffers where they are
    engine = deepspeed.init_inference(own, checkpoint=str(tmp_path / "own.pt"))
    assert engine.table.tolist() == [0.0, 1.0, 2.0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "fp8"}, "dtype is 'fp8': give one of fp16, float16, half"),
        ({"nonsense": 1}, "init_inference: its configuration: there is no 'nonsense'; known are dtype"),
        ({"config": {"dtype": "fp16"}, "dtype": "fp32"}, "dtype is 'fp16' in config and 'fp32' beside it"),
        ({"ep_size": 2}, "moe.ep_size is 2, but generation keeps all experts on each rank"),
        ({"zero": {"stage": 3}}, "zero.stage is 3, but init_inference shards no weights"),
        ({"save_mp_checkpoint_path": "x"}, "save_mp_checkpoint_path is not possible"),
        ({"quant": {"weight": {"num_bits": 4}}}, "num_bits is 4, but weights are quantized in 8 bits: give 8"),
        ({"quant": {"qkv": {"enabled": False}}}, "quant.qkv.enabled is false, but all linear layers are quantized"),
        ({"checkpoint": {"type": "BLOOM"}}, "which names no file: give a folder"),
        ({"config": DeepSpeedTPConfig(tp_size=2)}, "init_inference(model, tensor_parallel=DeepSpeedTPConfig(...))"),
        ({"config": DeepSpeedMoEConfig()}, "init_inference(model, moe=DeepSpeedMoEConfig(...))"),
        ({"config": BaseQuantConfig()}, "(model, quant=QuantizationConfig(weight=BaseQuantConfig(...)))"),
        ({"config": InferenceCheckpointConfig()}, "(model, checkpoint_config=InferenceCheckpointConfig(...))"),
        ({"max_out_tokens": 0}, "max_out_tokens = 0: give a number above 0"),
    ],
)
def test_init_inference_refuses_options_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        deepspeed.init_inference(blocks(), **options)
    assert message in str(caught.value)


def test_triax_warns_once_of_arguments_without_effect(caplog: pytest.LogCaptureFixture) -> None:
    given = {
        "kernel_inject": True,
        "enable_cuda_graph": True,
        "use_triton": True,
        "tm": False,
        "return_tuple": False,
        "training_mp_size": 2,
        "min_out_tokens": 4,
        "transposed_mode": True,
        "replace_method": "none",
        "quant": {"activation": {"q_groups": 8}},
        "tensor_parallel": {"tp_grain_size": 8},
        "injection_policy": {Block: "down"},
        "moe": True,
    }
    with caplog.at_level(logging.WARNING, logger="triax"):
        deepspeed.init_inference(blocks(), config=given)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 12 and all("has no effect, because" in line for line in said), said
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="triax"):
        deepspeed.init_inference(blocks(), config=deepspeed.default_inference_config())
        deepspeed.init_inference(blocks(), config=DeepSpeedInferenceConfig(dtype="fp32"))  # type: ignore[arg-type]
    assert not caplog.records
