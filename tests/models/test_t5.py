"""T5 against transformers: logits, loss and every gradient on grids, saved weights, settings, and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import triax
from triax import Grid, PipelineModule
from triax.models import T5Config, T5Loss, t5_layers
from triax.models.huggingface.config import from_hf, to_hf
from triax.models.shapes import built_on_meta
from triax.models.t5 import buckets
from triax.testing.check import check

from support.command_line import run_main
from support.encoder_decoder_models import GRIDS_WITH_OPTIONS, T5_CASES, batch_of, make_model, random_t5, require_equal
from support.encoder_models import Case
from support.sweeps import on_every_axis, some
from support.toys import same

TINY = T5Config.preset("t5-tiny")

# ----------------------------------------------------------------------------------------------- beside transformers


@on_every_axis
def test_t5_trains_as_in_transformers_on_every_axis(
    ranks: Any, tmp_path: Path, sizes: tuple[int, int, int], options: dict[str, Any]
) -> None:
    require_equal(ranks, tmp_path, T5_CASES, sizes, **options)


@pytest.mark.parametrize(("sizes", "options"), some(GRIDS_WITH_OPTIONS, (2, 3)), ids=str)
def test_t5_trains_as_in_transformers_with_options(
    ranks: Any, tmp_path: Path, sizes: tuple[int, int, int], options: dict[str, Any]
) -> None:
    require_equal(ranks, tmp_path, T5_CASES, sizes, **options)


@pytest.mark.parametrize("seeds", [range(6), pytest.param(range(6, 106), marks=pytest.mark.exhaustive)], ids=len)
def test_random_t5s_equal_those_of_transformers(ranks: Any, tmp_path: Path, seeds: range) -> None:
    require_equal(ranks, tmp_path, {str(seed): random_t5(seed) for seed in seeds}, (1, 1, 2))


@pytest.mark.parametrize("name", T5_CASES)
def test_transformers_reads_the_t5_that_triax_writes(tmp_path: Path, name: str) -> None:
    import transformers

    model = make_model(T5_CASES[name])
    triax.save_hf(PipelineModule(triax.load_hf(model)), tmp_path)
    read = getattr(transformers, T5_CASES[name].cls).from_pretrained(tmp_path, dtype=torch.float64).eval()
    for key, value in model.state_dict().items():
        assert torch.equal(read.state_dict()[key], value), key
    batch = batch_of(model.config)
    same(read(**batch).logits, model(**batch).logits)


@pytest.mark.parametrize("both", [True, False])
def test_buckets_of_distances_are_those_of_transformers(both: bool) -> None:
    from transformers.models.t5.modeling_t5 import T5Attention

    distances = torch.arange(-1500, 1500)
    for count, longest in ((4, 3), (5, 40), (8, 5), (9, 11), (31, 600), (32, 128), (64, 256), (77, 1000)):
        config = T5Config(relative_attention_num_buckets=count, relative_attention_max_distance=longest)
        theirs = T5Attention._relative_position_bucket(distances, both, count, longest)
        assert torch.equal(buckets(distances, config, both), theirs), (count, longest)


def test_the_factor_of_logits_stays_with_a_head_of_its_own(tmp_path: Path) -> None:
    """A folder that says nothing of the factor, and has another output layer than its embedding."""
    make_model(Case(T5_CASES["t5"].cls, T5_CASES["t5"].options | {"untied": True})).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    content = json.loads(file.read_text())
    assert content.pop("scale_decoder_outputs") is True
    file.write_text(json.dumps(content))
    (config,) = {spec.args[0] for spec in triax.load_hf(tmp_path) if isinstance(spec.args[0], T5Config)}
    assert config.scale_decoder_outputs
    assert not config.tie_word_embeddings


# ---------------------------------------------------------------------------------------------------------- inputs


def module(config: T5Config = TINY, **options: Any) -> PipelineModule:
    return PipelineModule(t5_layers(config), dtype=torch.float64, seed=0, **options).eval()


def rows(count: int = 3, length: int = 9, seed: int = 0) -> Tensor:
    return torch.randint(3, 256, (count, length), generator=torch.Generator().manual_seed(seed))


def test_padding_changes_no_logit_of_a_t5() -> None:
    model, ids, labels = module(), rows(), rows(length=7, seed=1)
    mask = (torch.arange(9) < torch.tensor([[9], [4], [6]])).long()
    found = model({"input_ids": ids, "attention_mask": mask}, labels=labels)
    for row, length in enumerate([9, 4, 6]):
        same(found[row], model(ids[row : row + 1, :length], labels=labels[row : row + 1])[0])


def test_labels_are_moved_to_be_the_input_of_the_decoder() -> None:
    config = T5Config.preset("t5-tiny", decoder_start_token_id=7, pad_token_id=5)
    model, ids = module(config), rows(1)
    given = model({"input_ids": ids, "decoder_input_ids": torch.tensor([[7, 8, 9, 5]])}, labels=None)
    for labels in (torch.tensor([[8, 9, -100, 4]]), (torch.tensor([[8, 9, -100, 4]]), torch.ones(1, 4))):
        same(model(ids, labels=labels), given)


@pytest.mark.parametrize(
    ("inputs", "labels", "message"),
    [
        (
            {"input_ids": rows(), "token_type_ids": rows()},
            rows(),
            "decoder_input_ids and labels, not the field 'token_ty",
        ),
        (
            {"input_ids": rows(), "attention_mask": torch.ones(3, 5)},
            rows(),
            r"attention_mask is \(3, 5\), but input_ids",
        ),
        ((rows(), rows()), rows(), r"a tensor \(B, S\), not a tuple. Rows cannot be packed"),
        (rows(), None, "needs labels or decoder_input_ids"),
    ],
)
def test_inputs_that_a_t5_cannot_take_are_refused(inputs: Any, labels: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        module()(inputs, labels=labels)


# -------------------------------------------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"relative_attention_max_distance": 16},
            "relative_attention_max_distance is 16, but half .* Give at least 17",
        ),
        ({"relative_attention_num_buckets": 3}, "relative_attention_num_buckets"),
        ({"sliding_window": 4}, "sliding_window is 4, which T5 lacks"),
        ({"hidden_act": "tanh"}, "hidden_act"),
    ],
)
def test_t5_settings_that_contradict_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        T5Config.preset("t5-tiny", **options)


def test_tensor_ranks_that_cannot_share_a_t5_are_refused() -> None:
    with pytest.raises(ValueError, match="num_attention_heads is 4, but tensor=5 needs at least 5"):
        built_on_meta(TINY, tensor=(0, 5))


def built_over_context() -> None:
    PipelineModule(t5_layers(TINY), grid=Grid(context=2))


def test_a_t5_over_a_context_axis_is_refused(ranks: Any) -> None:
    with pytest.raises(Exception, match="T5 needs context=1, but the grid has context=2"):
        ranks(2, built_over_context)


def test_what_a_t5_does_not_do_is_refused(tmp_path: Path) -> None:
    model = module(loss_fn=T5Loss(Grid(), TINY.vocab_size))
    with pytest.raises(ValueError, match=r"the model has an encoder \(causal=False\)"):
        triax.init_inference(model)
    for part in (model.layers["2"].attention, model.layers["7"].cross):
        assert part.refuses_slices == "attends to later tokens too (causal=False)"  # type: ignore[union-attr]
    (tmp_path / "t5.yaml").write_text(
        "model: {preset: t5-tiny}\ndata: {training: text}\ntraining: {steps: 3, sequence: 32}\nbatch: 4\n"
        "optimizer: {type: AdamW, params: {lr: 0.001}}\n"
    )
    assert "a T5 on pairs of texts" in run_main("train", tmp_path / "t5.yaml")[2]
    assert "count decoders, and no T5Config" in run_main("memory", "t5-base")[2]
    attention: Any = model.layers["7"].cross
    attention.sparsity = object()
    with pytest.raises(ValueError, match="T5 has no sparse attention"):
        model(rows(), labels=rows())


@pytest.mark.parametrize("name", T5Config.presets())
def test_presets_of_t5_list_as_many_layers_as_they_say(name: str) -> None:
    config = T5Config.preset(name)
    assert len(t5_layers(config)) == config.layer_count
    assert from_hf(to_hf(config)) == config
    assert eval(repr(config), {"T5Config": T5Config}) == config


@pytest.mark.parametrize(
    ("name", "count"),
    [("t5-small", 60_506_624), ("t5-base", 222_903_552), ("flan-t5-small", 76_961_152), ("flan-t5-base", 247_577_856)],
)
def test_published_t5s_have_the_published_number_of_parameters(name: str, count: int) -> None:
    assert T5Config.preset(name).parameter_count == count


@pytest.mark.parametrize(("tied", "scaled"), [(True, True), (False, True), (False, False)])
def test_first_logits_of_a_t5_have_deviation_one(tied: bool, scaled: bool) -> None:
    model = module(T5Config.preset("t5-tiny", tie_word_embeddings=tied, scale_decoder_outputs=scaled))
    assert float(model(rows(8), labels=rows(8, seed=1)).detach().std()) == pytest.approx(1.0, rel=0.2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["T5EncoderModel"]}, "has T5EncoderModel, but of a t5 triax has ForConditionalGeneration"),
        ({"feed_forward_proj": "gated-tanh"}, "hidden_act"),
        ({"num_decoder_layers": 10**6}, "num_decoder_layers is 1000000, but must be a whole number"),
        ({"d_kv": None}, "there is null as d_kv, which a t5 must have"),
    ],
)
def test_folders_of_other_t5s_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    make_model(T5_CASES["t5"]).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(ValueError, match=message):
        triax.load_hf(tmp_path)


def test_a_gated_gelu_that_transformers_lacks_is_not_written() -> None:
    with pytest.raises(ValueError, match="T5 has no hidden_act='gelu'"):
        to_hf(T5Config(hidden_act="gelu", gated=True))


# ----------------------------------------------------------------------------------------------- adapters, dropout


def built(grid: Grid) -> PipelineModule:
    config = T5Config.preset("t5-tiny", dropout=0.2)
    return PipelineModule(t5_layers(config), grid=grid, loss_fn=T5Loss(grid, 256), dtype=torch.float64, seed=0)


def pairs() -> list[list[tuple[Any, Tensor]]]:
    mask = (torch.arange(9) < torch.tensor([[9], [4]])).long()
    texts = zip(rows(8).split(2), rows(8, 7, seed=1).split(2), strict=True)
    return [[({"input_ids": ids, "attention_mask": mask}, labels) for ids, labels in texts]]


@pytest.mark.parametrize("options", [{}, {"lora": triax.Lora(rank=2)}], ids=["dropout", "lora"])
def test_a_t5_with_dropout_trains_as_on_one_process(options: dict[str, Any]) -> None:
    found = list(check(built, pairs, ("pipe", "tensor", "data"), ranks=2, **options))
    assert [row for row in found if not row.holds] == []
    assert len(found) > 3
