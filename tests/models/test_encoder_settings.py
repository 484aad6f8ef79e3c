"""Settings of encoders: what is refused and with which words, padding, packed rows, losses, adapters, folders."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

import triax
from triax import Grid, PipelineModule
from triax.models import ClassificationLoss, EncoderConfig, MaskedLMLoss, classification_layers, encoder_layers
from triax.models.huggingface.config import from_hf, to_hf
from triax.models.shapes import built_on_meta
from triax.testing.check import check

from support.command_line import run_main
from support.encoder_models import CASES, batch_of, make
from support.exact_norms import exact
from support.toys import same

TINY = EncoderConfig.preset("encoder-tiny")
CLASSES = EncoderConfig.preset("encoder-tiny", num_labels=3)
IMAGES = EncoderConfig.preset("vit-tiny")


def module(config: EncoderConfig, **options: Any) -> PipelineModule:
    return PipelineModule(encoder_layers(config), dtype=torch.float64, seed=0, **options).eval()


def rows(count: int = 3, length: int = 9) -> Tensor:
    return torch.randint(3, 256, (count, length), generator=torch.Generator().manual_seed(0))


# -------------------------------------------------------------------------------------------------------- rows


def test_padding_changes_no_value_of_an_encoders_tokens() -> None:
    model, ids = module(TINY), rows()
    mask = (torch.arange(9) < torch.tensor([[9], [4], [6]])).long()
    found = model({"input_ids": ids, "attention_mask": mask})
    for row, length in enumerate([9, 4, 6]):
        same(found[row, :length], model(ids[row : row + 1, :length])[0])


def test_packed_texts_have_the_values_of_single_texts() -> None:
    model, ids = module(TINY), rows(1)
    found = model((ids, torch.tensor([[0, 0, 0, 0, 1, 1, 1, 2, 2]])))
    same(found, torch.cat([model(ids[:, a:b]) for a, b in ((0, 4), (4, 7), (7, 9))], 1))


def test_a_sliding_window_hides_tokens_on_both_sides() -> None:
    config = EncoderConfig.preset("encoder-tiny", sliding_window=3, num_hidden_layers=1)
    model, ids = module(config), rows(1)
    layer: Any = model.layers["1"].attention
    q, k, v = torch.randn(3, 1, 4, 9, 8, dtype=torch.float64).unbind()
    near = (torch.arange(9)[:, None] - torch.arange(9)).abs() < 3
    same(layer.attend(q, k, v), F.scaled_dot_product_attention(q, k, v, attn_mask=near))
    assert model(ids).isfinite().all()


@pytest.mark.parametrize(
    ("config", "inputs", "message"),
    [
        (
            TINY,
            {"input_ids": rows(), "attention_mask": torch.tensor([[0] * 3 + [1] * 6] * 3)},
            "decrease along a row.* pad rows of an attention_mask on the right",
        ),
        (TINY, {"input_ids": rows(), "attention_mask": torch.ones(3, 5)}, r"integers of the shape \(3, 9\)"),
        (
            TINY,
            {"input_ids": rows(), "position_ids": rows()},
            "input_ids, attention_mask, token_type_ids, not the field 'position_ids'",
        ),
        (
            EncoderConfig.preset("encoder-tiny", position_offset=2),
            torch.tensor([[5, 1, 6, 1]]),
            "2 tokens are 1, padding without a position. Give attention_mask",
        ),
        (
            EncoderConfig.preset("encoder-tiny", type_vocab_size=0),
            {"input_ids": rows(), "token_type_ids": rows()},
            "takes input_ids, attention_mask, not the field 'token_type_ids'",
        ),
        (TINY, rows(1, 65), "the sequence has 65 tokens, but the model has 64 positions"),
        (IMAGES, torch.zeros(2, 3, 12, 8), r"image is \(3, 12, 8\), but the model takes \(3, 8, 8\)"),
    ],
)
def test_inputs_that_encoders_cannot_take_are_refused(config: EncoderConfig, inputs: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        module(config)(inputs)


def test_token_types_beyond_the_table_are_refused() -> None:
    with pytest.raises(IndexError, match="token type"):
        module(TINY)({"input_ids": rows(), "token_type_ids": torch.full((3, 9), 2)})


# ------------------------------------------------------------------------------------------------------ settings


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_attention_heads": 5}, "num_attention_heads=5 does not divide hidden_size=32. Give hidden_size=30"),
        ({"image_size": 8, "patch_size": 3, "num_labels": 2}, "patch_size=3 does not divide image_size=8"),
        (
            {"image_size": 8, "patch_size": 4, "num_labels": 2, "class_token": False},
            "num_labels is 2, which needs class_token=True",
        ),
        ({"layer_scale": 0.5}, "layer_scale is 0.5, which needs norm_place='before'"),
        ({"mean_pool": True}, "mean_pool is True, which needs pooler=False"),
        ({"norm_place": "embedding", "image_size": 8, "patch_size": 4}, "norm_place is 'embedding', which needs image"),
        ({"classifier_pooling": "mean"}, "classifier_pooling is 'mean', which needs pooler=False"),
        ({"learned_positions": False, "hidden_size": 36}, "learned_positions is False, which needs text, and even"),
        ({"layer_types": ("full_attention",)}, "layer_types has 1 entries, but num_hidden_layers is 2"),
        ({"layer_types": ("full_attention", "mlp")}, "layer_types has 'mlp'"),
        ({"layer_types": ("full_attention", "sliding_attention")}, "but sliding_window is None"),
        ({"norm_place": "after"}, "norm_place"),
        ({"hidden_act": "tanh"}, "hidden_act"),
    ],
)
def test_encoder_settings_that_contradict_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EncoderConfig.preset("encoder-tiny", **options)


def test_tensor_ranks_that_cannot_share_an_encoder_are_refused() -> None:
    with pytest.raises(ValueError, match=r"num_attention_heads is 4, but tensor=5 needs at least 5"):
        TINY.check_tensor(5)
    IMAGES.check_tensor(4)  # an encoder of images has no vocabulary
    with pytest.raises(ValueError, match="tensor=2 does not divide the 5 tokens of an image"):
        built_on_meta(IMAGES, tensor=(0, 2), sequence_parallel=True)


def built_over_context(config: EncoderConfig) -> None:
    PipelineModule(encoder_layers(config), grid=Grid(context=2))


def test_classes_of_rows_over_a_context_axis_are_refused(ranks: Any) -> None:
    with pytest.raises(Exception, match="classes of rows need context=1, but the grid has context=2"):
        ranks(2, built_over_context, CLASSES)


def test_generation_and_slices_of_an_encoder_are_refused() -> None:
    with pytest.raises(ValueError, match=r"the model has an encoder \(causal=False\)"):
        triax.init_inference(module(TINY))
    block: Any = module(TINY).layers["1"]
    assert block.attention.refuses_slices == "attends to later tokens too (causal=False)"


def test_training_files_and_plans_refuse_encoders(tmp_path: Path) -> None:
    (tmp_path / "bert.yaml").write_text(
        "model: {preset: encoder-tiny}\ndata: {training: text}\ntraining: {steps: 3, sequence: 32}\nbatch: 4\n"
        "optimizer: {type: AdamW, params: {lr: 0.001}}\n"
    )
    _, _, error = run_main("train", tmp_path / "bert.yaml")
    assert "and an encoder trains on masked tokens or on classes" in error
    _, _, error = run_main("memory", "bert-base")
    assert "triax plan and triax memory count decoders" in error


@pytest.mark.parametrize("name", EncoderConfig.presets())
def test_presets_of_encoders_list_as_many_layers_as_they_say(name: str) -> None:
    config = EncoderConfig.preset(name)
    assert len(encoder_layers(config)) == config.layer_count
    assert from_hf(to_hf(config)) == config
    assert eval(repr(config), {"EncoderConfig": EncoderConfig}) == config


@pytest.mark.parametrize(
    ("name", "count"), [("bert-base", 109_514_298), ("roberta-base", 124_697_433), ("modernbert-base", 149_655_232)]
)
def test_published_encoders_have_the_published_number_of_parameters(name: str, count: int) -> None:
    assert EncoderConfig.preset(name).parameter_count == count


# -------------------------------------------------------------------------------------------------------- losses


@pytest.mark.parametrize("kind", ["single_label_classification", "multi_label_classification", "regression"])
def test_losses_of_classes_equal_those_of_transformers(kind: Any) -> None:
    model = make(CASES["bert-classes"])
    model.config.problem_type = kind
    inputs = batch_of(model.config)
    inputs.pop("labels")
    count = 1 if kind == "regression" else 3
    model.num_labels = model.config.num_labels = count
    model.classifier = torch.nn.Linear(24, count, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    labels: Tensor = torch.randint(count, (8,), generator=generator)
    if kind != "single_label_classification":
        labels = torch.rand(8, count, generator=generator).double()
        labels = labels.round() if kind == "multi_label_classification" else labels[:, 0]
    theirs = model(**inputs, labels=labels)
    loss = ClassificationLoss(kind)
    total, weight = loss(theirs.logits, labels)
    same(total / weight, theirs.loss)
    assert weight == loss.weight(labels)


def test_unknown_problem_types_and_labels_are_refused() -> None:
    kind: Any = "ranking"
    with pytest.raises(ValueError, match=r"problem_type is 'ranking'\. Give one of single_label_classification, multi"):
        ClassificationLoss(kind)
    with pytest.raises(ValueError, match=r"labels are \(2,\), but the logits \(2, 3\)"):
        ClassificationLoss("multi_label_classification")(torch.zeros(2, 3), torch.zeros(2))


# ------------------------------------------------------------------------------------------------------- folders


def folder_of(tmp_path: Path, case: str, **changes: Any) -> Path:
    """The folder of a model whose config.json has some other values."""
    make(CASES[case]).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return tmp_path


@pytest.mark.parametrize(
    ("case", "changes", "message"),
    [
        (
            "bert",
            {"architectures": ["BertForTokenClassification"]},
            "has BertForTokenClassification, but of a bert triax has ForMaskedLM and ForSequenceClassification",
        ),
        ("bert", {"architectures": None}, "architectures has nothing, but"),
        ("bert", {"position_embedding_type": "relative_key"}, "position_embedding_type='relative_key' is not impl"),
        ("bert", {"is_decoder": True}, "is_decoder=True is not implemented"),
        ("bert", {"tie_word_embeddings": False}, "tie_word_embeddings=False is not implemented"),
        ("roberta", {"hidden_act": "relu"}, "hidden_act='relu' is not implemented, only with hidden_act='gelu'"),
        ("roberta", {"pad_token_id": None}, "pad_token_id is None, but must be a whole number"),
        ("modernbert", {"embedding_dropout": 0.1}, "embedding_dropout=0.1 is not implemented"),
        ("modernbert", {"classifier_activation": "silu"}, "classifier_activation='silu' is not implemented"),
        ("modernbert", {"rope_scaling": {"factor": 2.0}}, r"rope_scaling=\{'factor': 2.0\} is not implemented"),
        ("vit", {"architectures": ["ViTModel"]}, "has ViTModel, but of a vit triax has ForImageClassification"),
        ("dinov2", {"use_swiglu_ffn": True}, "use_swiglu_ffn=True is not implemented"),
        ("vit", {"image_size": [8, 12]}, r"image_size is \[8, 12\], but must be of the type int"),
    ],
)
def test_folders_of_other_encoders_are_refused(
    tmp_path: Path, case: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        triax.load_hf(folder_of(tmp_path, case, **changes))


def test_the_first_bert_files_are_read_by_their_first_names(tmp_path: Path) -> None:
    """gamma and beta in LayerNorms, and weights of the heads for pretraining beside that for masked tokens."""
    folder, now = folder_of(tmp_path, "bert"), PipelineModule(triax.load_hf(make(CASES["bert"])))
    weights = load_file(folder / "model.safetensors")
    former = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): each
        for name, each in weights.items()
    }
    word = weights["bert.embeddings.word_embeddings.weight"]
    former |= {"cls.seq_relationship.weight": torch.zeros(2, 24), "bert.pooler.dense.weight": torch.zeros(24, 24)}
    former["cls.predictions.decoder.weight"] = word.clone()
    save_file(former, folder / "model.safetensors")
    found = PipelineModule(triax.load_hf(folder))
    assert {name: p.tolist() for name, p in found.named_parameters()} == {
        name: p.tolist() for name, p in now.named_parameters()
    }
    save_file(former | {"cls.predictions.decoder.weight": word + 1}, folder / "model.safetensors")
    with pytest.raises(ValueError, match="tie_word_embeddings=False is not implemented"):
        triax.load_hf(folder)


@pytest.mark.parametrize("case", ["bert", "roberta", "modernbert", "dinov2-features"])
def test_a_loaded_encoder_gets_a_head_for_other_classes(tmp_path: Path, case: str) -> None:
    """transformers reads the folder that is written then, with the weights that were loaded and the new head."""
    import transformers

    model = make(CASES[case])
    model.save_pretrained(tmp_path / "a")
    found = PipelineModule(classification_layers(triax.load_hf(tmp_path / "a"), 4), dtype=torch.float64).eval()
    triax.save_hf(found, tmp_path / "b")
    written = json.loads((tmp_path / "b" / "config.json").read_text())
    theirs, info = getattr(transformers, written["architectures"][0]).from_pretrained(
        tmp_path / "b", output_loading_info=True, dtype=torch.float64
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    batch = batch_of(model.config)
    batch.pop("labels")
    with exact(theirs):
        right = theirs.eval()(**batch).logits
    same(found(batch), right)
    base, kept = theirs.base_model.state_dict(), getattr(model, model.base_model_prefix, model).state_dict()
    assert all(torch.equal(base[name], weight) for name, weight in kept.items())


def test_classes_of_other_layers_are_refused() -> None:
    with pytest.raises(ValueError, match="the layers have no EncoderConfig"):
        classification_layers(triax.gpt_layers(triax.GPTConfig.preset("bytes-tiny")), 2)


def test_names_of_classes_go_with_a_model_to_its_next_folder(tmp_path: Path) -> None:
    labels = {"id2label": {"0": "no", "1": "maybe", "2": "yes"}, "label2id": {"no": 0, "maybe": 1, "yes": 2}}
    folder = folder_of(tmp_path / "a", "bert-classes", **labels, problem_type="single_label_classification")
    triax.save_hf(PipelineModule(triax.load_hf(folder)), tmp_path / "b")
    written = json.loads((tmp_path / "b" / "config.json").read_text())
    assert {key: written[key] for key in labels} == labels
    assert written["problem_type"] == "single_label_classification"


# ------------------------------------------------------------------------------------------------------ adapters


def built(grid: Grid) -> PipelineModule:
    return PipelineModule(encoder_layers(CLASSES), grid=grid, loss_fn=ClassificationLoss(), dtype=torch.float64, seed=0)


def class_batches() -> list[list[tuple[Any, Tensor]]]:
    mask = (torch.arange(9) < torch.tensor([[9], [4]])).long()
    return [[({"input_ids": ids, "attention_mask": mask}, torch.tensor([1, 2])) for ids in rows(8).split(2)]]


def test_adapters_of_an_encoder_train_as_on_one_process() -> None:
    found = list(check(built, class_batches, ("tensor", "data"), ranks=2, lora=triax.Lora(rank=2)))
    assert [row for row in found if not row.holds] == []
    assert len(found) > 2


def test_a_masked_batch_of_dicts_divides_by_all_masked_tokens() -> None:
    loss = MaskedLMLoss(Grid(), TINY.vocab_size)
    optimizer = partial(torch.optim.SGD, lr=0.0)
    model = module(TINY, loss_fn=loss)
    engine = triax.Engine(model, optimizer=optimizer, batch=triax.Batch(size=4, microbatch=2))
    ids = rows(4)
    labels = torch.full_like(ids, -100)
    labels[0, :7], labels[3, 2] = 5, 6
    found = engine.train_batch(
        {"input_ids": a, "labels": b} for a, b in zip(ids.split(2), labels.split(2), strict=True)
    )
    same(found, F.cross_entropy(module(TINY)(ids).flatten(0, 1), labels.flatten()).detach())
