"""Whisper against transformers: logits, loss and every gradient on grids, saved weights, settings, and refusals."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import triax
from triax import Grid, PipelineModule
from triax.models import WhisperConfig, WhisperLoss, whisper_layers
from triax.models.huggingface.config import from_hf, to_hf
from triax.models.shapes import built_on_meta
from triax.testing.check import check

from support.command_line import run_main
from support.encoder_decoder_models import (
    GRIDS_WITH_OPTIONS,
    WHISPER_CASES,
    batch_of,
    make_model,
    random_whisper,
    require_equal,
)
from support.sweeps import on_every_axis, some
from support.toys import same

TOY = WhisperConfig.preset("whisper-toy")

# ----------------------------------------------------------------------------------------------- beside transformers


@on_every_axis
def test_whisper_trains_as_in_transformers_on_every_axis(
    ranks: Any, tmp_path: Path, sizes: tuple[int, int, int], options: dict[str, Any]
) -> None:
    require_equal(ranks, tmp_path, WHISPER_CASES, sizes, **options)


@pytest.mark.parametrize(("sizes", "options"), some(GRIDS_WITH_OPTIONS, (2, 3)), ids=str)
def test_whisper_trains_as_in_transformers_with_options(
    ranks: Any, tmp_path: Path, sizes: tuple[int, int, int], options: dict[str, Any]
) -> None:
    require_equal(ranks, tmp_path, WHISPER_CASES, sizes, **options)


@pytest.mark.parametrize("seeds", [range(6), pytest.param(range(6, 106), marks=pytest.mark.exhaustive)], ids=len)
def test_random_whispers_equal_those_of_transformers(ranks: Any, tmp_path: Path, seeds: range) -> None:
    require_equal(ranks, tmp_path, {str(seed): random_whisper(seed) for seed in seeds}, (1, 1, 2))


def test_transformers_reads_the_whisper_that_triax_writes(tmp_path: Path) -> None:
    import transformers

    model = make_model(WHISPER_CASES["whisper"])
    triax.save_hf(PipelineModule(triax.load_hf(model)), tmp_path)
    reader: Any = transformers.WhisperForConditionalGeneration
    read = reader.from_pretrained(tmp_path, dtype=torch.float64).eval()
    for key, value in model.state_dict().items():
        assert torch.equal(read.state_dict()[key], value), key
    batch = batch_of(model.config)
    same(read(**batch).logits, model(**batch).logits)


# ------------------------------------------------------------------------------------------------------------ inputs


def module(config: WhisperConfig = TOY, **options: Any) -> PipelineModule:
    return PipelineModule(whisper_layers(config), dtype=torch.float64, seed=0, **options).eval()


def sound(count: int = 3, frames: int = 24) -> Tensor:
    return torch.randn(count, 5, frames, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def rows(count: int = 3, length: int = 9) -> Tensor:
    return torch.randint(3, 256, (count, length), generator=torch.Generator().manual_seed(1))


def test_labels_are_moved_to_be_the_input_of_whispers_decoder() -> None:
    config = WhisperConfig.preset("whisper-toy", decoder_start_token_id=7, pad_token_id=5)
    model, labels = module(config), torch.tensor([[8, 9, -100, 4]])
    given = model({"input_features": sound(1), "decoder_input_ids": torch.tensor([[7, 8, 9, 5]])}, labels=None)
    for form in (labels, (labels, torch.ones(1, 4)), {"labels": labels}):
        same(model({"input_features": sound(1)}, labels=form), given)
    same(model(sound(1), labels=labels), given)


def test_positions_of_whispers_encoder_are_sinusoids_without_gradient() -> None:
    """The formula is that of Vaswani et al. 2017 with sines first, whose last wavelength is 10,000 times the first."""
    first: Any = module().layers["0"]
    assert not first.positions.requires_grad
    for place, channel in ((0, 0), (3, 5), (11, 15), (7, 20), (11, 31)):
        rate = 10_000 ** (-(channel % 16) / 15)
        wave = math.sin if channel < 16 else math.cos
        assert float(first.positions[place, channel]) == pytest.approx(wave(place * rate), abs=1e-6)


@pytest.mark.parametrize(
    ("inputs", "labels", "message"),
    [
        (
            {"input_features": sound(), "attention_mask": rows()},
            rows(),
            "Whisper takes input_features, decoder_input_ids and labels, not the field 'attention_mask'",
        ),
        ({"input_features": sound(frames=23)}, rows(), r"of a row are \(5, 23\), but the model takes \(5, 24\)"),
        ({"decoder_input_ids": rows()}, rows(), r"of a row are \(\), but the model takes \(5, 24\)"),
        (sound(), None, "Whisper needs labels or decoder_input_ids"),
        (sound(), rows(length=17), "the sequence has 17 tokens, but the model has 16 positions"),
    ],
)
def test_inputs_that_a_whisper_cannot_take_are_refused(inputs: Any, labels: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        module()(inputs, labels=labels)


# -------------------------------------------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hidden_size": 33, "num_attention_heads": 3}, "hidden_size is 33, but sinusoids need an even width"),
        ({"num_attention_heads": 5}, "num_attention_heads=5 does not divide hidden_size=32"),
        ({"tie_word_embeddings": False}, "the output layer of Whisper is tied"),
        ({"sliding_window": 4}, "sliding_window is 4, which Whisper lacks"),
        ({"hidden_act": "tanh"}, "hidden_act"),
    ],
)
def test_whisper_settings_that_contradict_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        WhisperConfig.preset("whisper-toy", **options)


def test_tensor_ranks_that_cannot_share_a_whisper_are_refused() -> None:
    with pytest.raises(ValueError, match="num_attention_heads is 4, but tensor=5 needs at least 5"):
        built_on_meta(TOY, tensor=(0, 5))
    with pytest.raises(ValueError, match="tensor=3 does not divide the 8 tokens of the encoder"):
        built_on_meta(
            WhisperConfig.preset("whisper-toy", max_source_positions=8), tensor=(0, 3), sequence_parallel=True
        )


def built_over_context() -> None:
    PipelineModule(whisper_layers(TOY), grid=Grid(context=2))


def test_a_whisper_over_a_context_axis_is_refused(ranks: Any) -> None:
    with pytest.raises(Exception, match="Whisper needs context=1, but the grid has context=2"):
        ranks(2, built_over_context)


def test_what_a_whisper_does_not_do_is_refused(tmp_path: Path) -> None:
    model = module(loss_fn=WhisperLoss(Grid(), TOY.vocab_size))
    with pytest.raises(ValueError, match=r"the model has an encoder \(causal=False\)"):
        triax.init_inference(model)
    for part in (model.layers["1"].attention, model.layers["7"].cross):
        assert part.refuses_slices == "attends to later tokens too (causal=False)"  # type: ignore[union-attr]
    (tmp_path / "whisper.yaml").write_text(
        "model: {preset: whisper-toy}\ndata: {training: text}\ntraining: {steps: 3, sequence: 16}\nbatch: 4\n"
        "optimizer: {type: AdamW, params: {lr: 0.001}}\n"
    )
    assert "a Whisper on pairs of sound and text" in run_main("train", tmp_path / "whisper.yaml")[2]
    assert "count decoders, and no WhisperConfig" in run_main("memory", "whisper-tiny")[2]
    attention: Any = model.layers["7"].cross
    attention.sparsity = object()
    with pytest.raises(ValueError, match="Whisper has no sparse attention"):
        model(sound(), labels=rows())


@pytest.mark.parametrize("name", WhisperConfig.presets())
def test_presets_of_whisper_list_as_many_layers_as_they_say(name: str) -> None:
    config = WhisperConfig.preset(name)
    assert len(whisper_layers(config)) == config.layer_count
    assert from_hf(to_hf(config)) == config
    assert eval(repr(config), {"WhisperConfig": WhisperConfig}) == config


@pytest.mark.parametrize("name", [name for name in WhisperConfig.presets() if name != "whisper-toy"])
def test_published_whispers_have_transformers_number_of_parameters(name: str) -> None:
    import transformers

    config = WhisperConfig.preset(name)
    with torch.device("meta"):
        model = transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(**to_hf(config)))
    assert config.parameter_count == sum(parameter.numel() for parameter in model.parameters())


def test_whisper_tiny_has_the_published_number_of_parameters() -> None:
    """That of openai/whisper-tiny on the Hub, with the positions of the encoder."""
    assert WhisperConfig.preset("whisper-tiny").parameter_count == 37_760_640


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["WhisperModel"]}, "has WhisperModel, but of a whisper triax has ForConditionalGeneration"),
        ({"activation_function": "tanh"}, "whisper with activation_function='tanh' is not implemented"),
        ({"decoder_attention_heads": 2}, "decoder_attention_heads is 2, but encoder_attention_heads is 3"),
        ({"decoder_ffn_dim": 9}, "decoder_ffn_dim is 9, but encoder_ffn_dim is 37"),
        ({"decoder_layers": 10**6}, "decoder_layers is 1000000, but must be a whole number"),
        ({"decoder_layers": 0}, "decoder_layers is 0, but must be a whole number, 1 or more"),
        ({"encoder_layerdrop": 0.1}, "encoder_layerdrop=0.1 is not implemented"),
        ({"apply_spec_augment": True}, "apply_spec_augment=True is not implemented"),
        ({"d_model": None}, "there is null as d_model, which a whisper must have"),
    ],
)
def test_folders_of_other_whispers_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    make_model(WHISPER_CASES["whisper"]).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(ValueError, match=message):
        triax.load_hf(tmp_path)


@pytest.mark.parametrize("equal", [True, False])
def test_an_output_layer_in_a_whispers_folder_must_be_tied(tmp_path: Path, equal: bool) -> None:
    """Folders of older versions have the tied weight twice."""
    make_model(WHISPER_CASES["whisper"]).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    embedding = tensors["model.decoder.embed_tokens.weight"]
    save_file(tensors | {"proj_out.weight": embedding.clone() if equal else embedding.flip(0)}, file, {"format": "pt"})
    if equal:
        model: Any = PipelineModule(triax.load_hf(tmp_path))
        assert torch.equal(model.layers["4"].weight.double(), embedding)
    else:
        with pytest.raises(ValueError, match="tie_word_embeddings=False is not implemented"):
            triax.load_hf(tmp_path)


# ----------------------------------------------------------------------------------------------- adapters, dropout


def built(grid: Grid) -> PipelineModule:
    config = WhisperConfig.preset("whisper-toy", dropout=0.2)
    return PipelineModule(
        whisper_layers(config), grid=grid, loss_fn=WhisperLoss(grid, 256), dtype=torch.float64, seed=0
    )


def pairs() -> list[list[tuple[Any, Tensor]]]:
    texts = zip(sound(8).split(2), rows(8, 7).split(2), strict=True)
    return [[({"input_features": features}, labels) for features, labels in texts]]


@pytest.mark.parametrize("options", [{}, {"lora": triax.Lora(rank=2)}], ids=["dropout", "lora"])
def test_a_whisper_with_dropout_trains_as_on_one_process(options: dict[str, Any]) -> None:
    found = list(check(built, pairs, ("pipe", "tensor", "data"), ranks=2, **options))
    assert [row for row in found if not row.holds] == []
    assert len(found) > 3
