"""Encoders: their keys, names and settings, and their entries in ``FAMILIES``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from ..config import EncoderConfig
from .family import COMMON, SIZES, Config, Family, Key, block_names, score_count
from .names import FolderName, Names, OneRow
from .sharding_plans import bert_plan, vit_plan

_CLASSES = {"masked_lm": "MaskedLM", "classification": "SequenceClassification"}  # endings of transformers' classes
_ACTS = ("gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "silu")

# -------------------------------------------------------------------------------------------------- keys of config.json

_TEXT_KEYS: dict[str, Key] = COMMON | {
    "tie_word_embeddings": True,
    "layer_norm_eps": 1e-12,
    "type_vocab_size": 2,
    "hidden_act": ("hidden_act", "gelu"),
    "dropout": ("hidden_dropout_prob", 0.1),
}
_TEXT_ONLY: dict[str, tuple[Any, ...]] = {
    "position_embedding_type": ("absolute",),
    "is_decoder": (False,),
    "add_cross_attention": (False,),
    "classifier_dropout": (None,),
    "tie_word_embeddings": (True,),
}
_IMAGE_KEYS: dict[str, Key] = {name: name for name in (*SIZES[2:], "intermediate_size")} | {
    "initializer_range": 0.02,
    "layer_norm_eps": 1e-12,
    "hidden_act": ("hidden_act", "gelu"),
    "dropout": ("hidden_dropout_prob", 0.0),
    "qkv_bias": True,
    "image_size": 224,
    "patch_size": 16,
    "num_channels": 3,
}

# -------------------------------------------------------------------------------------------------- names of parameters


def _text_names(base: str, heads: Mapping[str, Names]) -> Callable[[Config], Names]:
    """Return the function that makes BERT's table, whose base model has a name, with the names of its head."""
    at, ends = f"{base}.encoder.layer.{{i}}", f"{base}.embeddings"
    names: Names = {
        "layers.0.weight": f"{ends}.word_embeddings.weight",
        "layers.0.types": f"{ends}.token_type_embeddings.weight",
        "layers.0.positions.weight": f"{ends}.position_embeddings.weight",
        "layers.0.norm.*": f"{ends}.LayerNorm.*",
        **block_names(
            1,
            attention__q=f"{at}.attention.self.query.*",
            attention__kv=(f"{at}.attention.self.key.*", f"{at}.attention.self.value.*"),
            attention__out=f"{at}.attention.output.dense.*",
            post_norm1=f"{at}.attention.output.LayerNorm.*",
            mlp__up=f"{at}.intermediate.dense.*",
            mlp__down=f"{at}.output.dense.*",
            post_norm2=f"{at}.output.LayerNorm.*",
        ),
        "layers.{n+2}.weight": f"{ends}.word_embeddings.weight",  # tied
    }
    return lambda config: _with_former_norms({**names, **heads[_head_of(config)]})


def _with_former_norms(names: Names) -> Names:
    """Return a table in which LayerNorms may also have the names of the first files, gamma and beta."""
    table: dict[str, Any] = {}
    for ours, theirs in names.items():
        if str(theirs).endswith("LayerNorm.*"):
            for ending, former in (("weight", "gamma"), ("bias", "beta")):
                now = f"{theirs}".removesuffix("*")
                table[ours.removesuffix("*") + ending] = [now + ending, now + former]
        else:
            table[ours] = theirs
    return table


_BERT_HEADS: dict[str, Names] = {
    "masked_lm": {
        "layers.{n+1}.dense.*": "cls.predictions.transform.dense.*",
        "layers.{n+1}.norm.*": "cls.predictions.transform.LayerNorm.*",
        "layers.{n+2}.bias": "cls.predictions.bias",
    },
    "classification": {"layers.{n+1}.dense.*": "bert.pooler.dense.*", "layers.{n+1}.out.*": "classifier.*"},
}
_ROBERTA_HEADS: dict[str, Names] = {
    "masked_lm": {
        "layers.{n+1}.dense.*": "lm_head.dense.*",
        "layers.{n+1}.norm.*": "lm_head.layer_norm.*",
        "layers.{n+2}.bias": "lm_head.bias",
    },
    "classification": {"layers.{n+1}.dense.*": "classifier.dense.*", "layers.{n+1}.out.*": "classifier.out_proj.*"},
}


def _of_vit(name: str, live: str) -> FolderName:
    return FolderName(f"vit.encoder.layer.{{i}}.{name}.*", f"vit.layers.{{i}}.{live}.*")


_VIT = "vit.embeddings"
_VIT_NAMES: Names = {
    "layers.0.weight": f"{_VIT}.patch_embeddings.projection.weight",
    "layers.0.bias": f"{_VIT}.patch_embeddings.projection.bias",
    "layers.0.cls": OneRow(f"{_VIT}.cls_token"),
    "layers.0.positions.weight": OneRow(f"{_VIT}.position_embeddings"),
    **block_names(
        1,
        norm1=_of_vit("layernorm_before", "layernorm_before"),
        attention__q=_of_vit("attention.attention.query", "attention.q_proj"),
        attention__kv=(
            _of_vit("attention.attention.key", "attention.k_proj"),
            _of_vit("attention.attention.value", "attention.v_proj"),
        ),
        attention__out=_of_vit("attention.output.dense", "attention.o_proj"),
        norm2=_of_vit("layernorm_after", "layernorm_after"),
        mlp__up=_of_vit("intermediate.dense", "mlp.fc1"),
        mlp__down=_of_vit("output.dense", "mlp.fc2"),
    ),
    "layers.{n+1}.*": "vit.layernorm.*",
    "layers.{n+2}.out.*": "classifier.*",
}

# ------------------------------------------------------------------------------------------------------------- settings


def _head_of(config: Config) -> str:
    """Return the head of the class under ``architectures``."""
    listed = config.get("architectures") or ["nothing"]
    name = str(listed[0]).replace("ForImageClassification", "ForSequenceClassification")
    head = next((head for head, ending in _CLASSES.items() if name.endswith(f"For{ending}")), None)
    if head is None:
        raise ValueError(
            f"architectures has {listed[0]}, but triax has encoders with the heads ForMaskedLM, "
            "ForSequenceClassification and ForImageClassification. triax.parallelize shards the Hugging Face model "
            "itself."
        )
    return head


def _read(config: Config) -> dict[str, Any]:
    head = _head_of(config)
    return {"head": head, **({"num_labels": score_count(config)} if head == "classification" else {})}


def _write(prefix: str, config: EncoderConfig) -> dict[str, Any]:
    ending = "ImageClassification" if config.image_size else _CLASSES[config.head]
    names = {str(label): f"LABEL_{label}" for label in range(config.num_labels)}
    labels = {"id2label": names, "label2id": {name: int(label) for label, name in names.items()}}
    return {
        "architectures": [f"{prefix}For{ending}"],
        "attention_probs_dropout_prob": 0.0,
        **(labels if config.head == "classification" else {}),
    }


def _roberta_read(config: Config) -> dict[str, Any]:
    offset = config.get("pad_token_id", 1)
    if type(offset) is not int or offset < 0:
        raise ValueError(f"pad_token_id is {offset}, but positions count from it. Write its number, such as 1.")
    longest = config["max_position_embeddings"] - offset - 1
    return {**_read(config), "position_offset": offset + 1, "max_position_embeddings": longest}


def _roberta_write(config: EncoderConfig) -> dict[str, Any]:
    rows = config.max_position_embeddings + config.position_offset
    written = {"pad_token_id": config.position_offset - 1, "max_position_embeddings": rows}
    return {**_write("Roberta", config), **written}


ENCODERS: dict[str, Family] = {
    "bert": Family(
        "Bert",
        bert_plan,
        EncoderConfig,
        _text_names("bert", _BERT_HEADS),
        _TEXT_KEYS,
        only={**_TEXT_ONLY, "hidden_act": _ACTS},
        read=_read,
        write=partial(_write, "Bert"),
        blocks=False,
        unread=("bert.pooler.", "bert.embeddings.position_ids", "cls.predictions.decoder.", "cls.seq_relationship."),
    ),
    "roberta": Family(
        "Roberta",
        bert_plan,
        EncoderConfig,
        _text_names("roberta", _ROBERTA_HEADS),
        _TEXT_KEYS,
        only={**_TEXT_ONLY, "hidden_act": ("gelu",)},  # that of the head for masked tokens
        read=_roberta_read,
        write=_roberta_write,
        blocks=False,
        unread=("roberta.pooler.", "roberta.embeddings.position_ids", "lm_head.decoder."),
    ),
    "vit": Family(
        "ViT",
        vit_plan,
        EncoderConfig,
        _VIT_NAMES,
        _IMAGE_KEYS,
        flags={"norm_place": "before", "pooler": False},
        only={"hidden_act": _ACTS},
        read=_read,
        write=partial(_write, "ViT"),
        blocks=False,
        unread=("vit.pooler.",),
    ),
}
