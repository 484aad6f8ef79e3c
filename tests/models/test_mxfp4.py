"""MXFP4: experts of gpt-oss in 4 bits, read from a folder: against transformers' own dequantization, bit by bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import triax
from triax.grid import Grid
from triax.models.huggingface.load import config_from_hf, load_hf
from triax.models.huggingface.mxfp4 import dequantized
from triax.models.huggingface.reader import open_source
from triax.models.mixtral import mixtral_layers
from triax.tensor_parallel import gather_logits

from support.exact_norms import exact
from support.toy_families import COMMON, MIXTURES, VOCABULARY

SIZES = {"hidden_size": 64, "intermediate_size": 96}


def theirs(blocks: Tensor, scales: Tensor) -> Tensor:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    found: Tensor = convert_moe_packed_tensors(blocks, scales)
    return found


def test_mxfp4_decodes_every_byte_and_scale_as_transformers() -> None:
    """All pairs of values, with scales from the smallest to the largest that bfloat16 has."""
    scales = torch.arange(256, dtype=torch.uint8)[None, :, None].repeat(16, 1, 1)
    blocks = torch.arange(256, dtype=torch.uint8).view(16, 1, 1, 16).repeat(1, 256, 1, 1)
    found, wanted = dequantized(blocks, scales).transpose(1, 2), theirs(blocks, scales)
    assert found.dtype == wanted.dtype == torch.bfloat16 and found.shape == wanted.shape == (16, 32, 256)
    assert torch.equal(found.contiguous().view(torch.int16), wanted.view(torch.int16))


def quantized_folder(folder: Path) -> Any:
    """Write a folder as gpt-oss is published; return transformers' model of the same weights, in fp64."""
    import transformers

    config = transformers.GptOssConfig(**COMMON | MIXTURES["gpt_oss"][1] | SIZES)
    torch.manual_seed(2)
    model = transformers.GptOssForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():  # larger than theirs, and such as bfloat16 has; not the rotary tables
            parameter.copy_(parameter.mul(8 if parameter.dim() > 1 else 1).bfloat16())
    tensors, generator = dict(model.state_dict()), torch.Generator().manual_seed(3)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors[name].shape
        shape = (experts, outputs, inputs // 32)
        blocks = torch.randint(256, (*shape, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(122, 126, shape, generator=generator, dtype=torch.uint8)
        tensors[name].copy_(theirs(blocks, scales))
        del tensors[name]
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    folder.mkdir()
    stored = {n: t if t.dtype == torch.uint8 else t.bfloat16().contiguous() for n, t in tensors.items()}
    save_file(stored, folder / "model.safetensors")
    quantized = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(config.to_dict() | {"quantization_config": quantized}))
    return model.double()


def test_reading_a_slice_of_mxfp4_equals_slicing_the_whole(tmp_path: Path) -> None:
    model = quantized_folder(tmp_path / "oss")
    source = open_source(tmp_path / "oss")
    for name, tensor in model.state_dict().items():
        if name.endswith(("gate_up_proj", "down_proj")):
            assert source.shapes[name] == tensor.shape
            for inputs in (slice(0, 64), slice(32, 64), slice(7, 39), slice(40, 41)):
                part = (slice(1, 3), inputs, slice(10, 50))
                assert torch.equal(source.read_slice(name, part).double(), tensor[part])


def logits(sizes: dict[str, Any], shard_tensor: bool, folder: str) -> Tensor:
    torch.set_default_dtype(torch.float64)
    try:
        grid = Grid(**sizes)
        config: Any = config_from_hf(folder)
        layers = load_hf(folder, mixtral_layers(config, shard_tensor=shard_tensor))
        model = triax.PipelineModule(layers, grid=grid)
        with torch.no_grad():
            return gather_logits(model(ids()), grid=grid, vocab_size=VOCABULARY)
    finally:
        torch.set_default_dtype(torch.float32)


def ids() -> Tensor:
    return torch.randint(VOCABULARY, (2, 14), generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("shard_tensor", [False, True])
def test_mxfp4_folders_have_transformers_logits(ranks: Any, tmp_path: Path, shard_tensor: bool) -> None:
    model = quantized_folder(tmp_path / "oss")
    with torch.no_grad(), exact(model):
        wanted = model(input_ids=ids()).logits
    places, folder = {"tensor": 2, "data": 2, "expert": 2}, str(tmp_path / "oss")
    for found in (logits({}, shard_tensor=False, folder=folder), *ranks(4, logits, places, shard_tensor, folder)):
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)


def test_quantizations_other_than_mxfp4_are_refused(tmp_path: Path) -> None:
    quantized_folder(tmp_path / "oss")
    file = tmp_path / "oss" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(ValueError, match="quant_method than 'mxfp4' is not implemented"):
        config_from_hf(tmp_path / "oss")
