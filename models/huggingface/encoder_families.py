"""Encoders, T5 and Whisper: their keys, names and settings, and their entries in ``FAMILIES``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from ..config import EncoderConfig, T5Config, WhisperConfig
from .dense_families import number_of
from .family import BIASES, COMMON, NO_DROPOUT, SIZES, Config, Family, Key, block_names, like, score_count
from .names import FolderName, Names, OneRow, RowsOf
from .sharding_plans import bert_plan, t5_plan, vit_plan

# Endings of transformers' classes without classes of rows, and with them.
_ENDINGS = {
    **dict.fromkeys(("bert", "roberta", "modernbert"), ("ForMaskedLM", "ForSequenceClassification")),
    "vit": ("", "ForImageClassification"),
    "dinov2": ("Model", "ForImageClassification"),
    "siglip_vision_model": ("Model", ""),
    **dict.fromkeys(("t5", "mt5", "whisper"), ("ForConditionalGeneration", "")),
}
_ACTS = ("gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "silu")

# -------------------------------------------------------------------------------------------------- keys of config.json

_TEXT_ONLY: dict[str, tuple[Any, ...]] = {"hidden_act": _ACTS, "position_embedding_type": ("absolute",)}
_TEXT_ONLY |= {"tie_word_embeddings": (True,), "classifier_dropout": (None,)}
_TEXT_ONLY |= dict.fromkeys(("is_decoder", "add_cross_attention"), (False,))
_KEYS: dict[str, Key] = {"initializer_range": 0.02, "layer_norm_eps": 1e-12, "hidden_act": ("hidden_act", "gelu")}
_TEXT_KEYS: dict[str, Key] = COMMON | _KEYS
_TEXT_KEYS |= {"tie_word_embeddings": True, "type_vocab_size": 2, "dropout": ("hidden_dropout_prob", 0.1)}
_IMAGE_KEYS: dict[str, Key] = {name: name for name in (*SIZES[2:], "intermediate_size")} | _KEYS
_IMAGE_KEYS |= {"dropout": ("hidden_dropout_prob", 0.0), "qkv_bias": True}
_IMAGE_KEYS |= {"image_size": 224, "patch_size": 16, "num_channels": 3}
_MODERN_KEYS: dict[str, Key] = COMMON | BIASES | {"tie_word_embeddings": True, "layer_norm_eps": ("norm_eps", 1e-5)}
_MODERN_KEYS |= {"norm_bias": False, "head_bias": ("classifier_bias", False)}
_MODERN_KEYS |= {"classifier_pooling": ("classifier_pooling", "cls")}
_MODERN_ONLY: dict[str, tuple[Any, ...]] = {"tie_word_embeddings": (True,), "rope_scaling": (None,)}
_MODERN_ONLY |= {"decoder_bias": (True,), "hidden_activation": ("gelu",), "classifier_activation": ("gelu",)}
_MODERN_ONLY |= dict.fromkeys([f"{part}_dropout" for part in ("embedding", "attention", "mlp", "classifier")], (0.0,))
_T5_KEYS: dict[str, Key] = {
    "vocab_size": "vocab_size",
    "max_position_embeddings": ("n_positions", 512),
    "hidden_size": "d_model",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "intermediate_size": "d_ff",
    "num_decoder_layers": 0,
    "head_dim": "d_kv",
    "relative_attention_num_buckets": 32,
    "relative_attention_max_distance": 128,
    "layer_norm_epsilon": 1e-6,
    "dropout": ("dropout_rate", 0.1),
    "initializer_range": ("initializer_factor", 1.0),
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
    "tie_word_embeddings": True,
}
_WHISPER_KEYS: dict[str, Key] = {"vocab_size": "vocab_size", "hidden_size": "d_model"}
_WHISPER_KEYS |= {"num_hidden_layers": "encoder_layers", "num_attention_heads": "encoder_attention_heads"}
_WHISPER_KEYS |= {"intermediate_size": "encoder_ffn_dim", "num_decoder_layers": ("decoder_layers", 4)}
_WHISPER_KEYS |= {"max_source_positions": 1500, "max_position_embeddings": ("max_target_positions", 448)}
_WHISPER_KEYS |= {"num_mel_bins": 80, "dropout": ("dropout", 0.0), "hidden_act": ("activation_function", "gelu")}
_WHISPER_KEYS |= {"initializer_range": ("init_std", 0.02), "decoder_start_token_id": 50257, "pad_token_id": 50256}
_WHISPER_ONLY: dict[str, tuple[Any, ...]] = {"activation_function": _ACTS, "tie_word_embeddings": (True,)}
_WHISPER_ONLY |= dict.fromkeys(("attention_dropout", "activation_dropout"), (0.0, 0))
_WHISPER_ONLY |= dict.fromkeys(("encoder_layerdrop", "decoder_layerdrop"), (0.0, 0)) | {"apply_spec_augment": (False,)}

# -------------------------------------------------------------------------------------------------- names of parameters


def _text_names(base: str, masked: tuple[str, str, str], classes: tuple[str, str]) -> Callable[[Config], Names]:
    """Return the function that makes the table of BERT's names.

    Args:
        base: name of the base model.
        masked: names of the linear layer, the norm and the bias in front of the logits of masked tokens.
        classes: names of the pooler and of the layer of the classes.
    """
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
    }
    tied = {"layers.{n+2}.weight": f"{ends}.word_embeddings.weight", "layers.{n+2}.bias": masked[2]}
    first, second = (f"layers.{{n+1}}.{part}.*" for part in ("dense", "norm"))
    of_masked = {first: f"{masked[0]}.*", second: f"{masked[1]}.*", **tied}
    of_classes = {first: f"{classes[0]}.*", "layers.{n+1}.out.*": f"{classes[1]}.*"}
    return lambda config: {**names, **(of_classes if _labels_of(config) else of_masked)}


_BERT_HEADS = ("cls.predictions.transform.dense", "cls.predictions.transform.LayerNorm", "cls.predictions.bias")
_ROBERTA_HEADS = ("lm_head.dense", "lm_head.layer_norm", "lm_head.bias")


def _modern_names(config: Config) -> Names:
    """Return the table of ModernBERT's names: queries, keys and values are the rows of one tensor."""
    at, first, width = "model.layers.{i}", "model.embeddings.tok_embeddings.weight", config["hidden_size"]
    head = "layers.{n+2}.transform" if _labels_of(config) else "layers.{n+2}"
    ends = {"layers.{n+2}.out.*": "classifier.*"}
    if not _labels_of(config):
        ends = {"layers.{n+3}.weight": first, "layers.{n+3}.bias": "decoder.bias"}
    return {
        "layers.0.weight": first,
        "layers.0.norm.*": "model.embeddings.norm.*",
        **block_names(
            1,
            norm1=f"{at}.attn_norm.*",
            attention__q=RowsOf(f"{at}.attn.Wqkv.*", ((0, width),), 3 * width),
            attention__kv=RowsOf(f"{at}.attn.Wqkv.*", ((width, 3 * width),), 3 * width),
            attention__out=f"{at}.attn.Wo.*",
            norm2=f"{at}.mlp_norm.*",
            mlp__gate_up=f"{at}.mlp.Wi.*",
            mlp__down=f"{at}.mlp.Wo.*",
        ),
        "layers.{n+1}.*": "model.final_norm.*",
        f"{head}.dense.*": "head.dense.*",
        f"{head}.norm.*": "head.norm.*",
        **ends,
    }


def _image_names(base: str, live: str, norms: tuple[str, str], mlp: tuple[str, str]) -> Names:
    """Return the table of ViT's names.

    Args:
        base: name of the base model, with a dot, or empty.
        live: name of its list of blocks in a live model; in a folder it is ``encoder.layer``.
        norms, mlp: names of the norms of a block, and of its linear layers, in a folder.
    """

    def of_block(name: str, now: str) -> FolderName:
        return FolderName(f"{base}encoder.layer.{{i}}.{name}.*", f"{base}{live}.{{i}}.{now}.*")

    own, first = "attention.attention", f"{base}embeddings"
    return {
        "layers.0.weight": f"{first}.patch_embeddings.projection.weight",
        "layers.0.bias": f"{first}.patch_embeddings.projection.bias",
        "layers.0.cls": OneRow(f"{first}.cls_token"),
        "layers.0.positions.weight": OneRow(f"{first}.position_embeddings"),
        **block_names(
            1,
            norm1=of_block(norms[0], norms[0]),
            attention__q=of_block(f"{own}.query", "attention.q_proj"),
            attention__kv=(of_block(f"{own}.key", "attention.k_proj"), of_block(f"{own}.value", "attention.v_proj")),
            attention__out=of_block("attention.output.dense", "attention.o_proj"),
            norm2=of_block(norms[1], norms[1]),
            mlp__up=of_block(mlp[0], "mlp.fc1"),
            mlp__down=of_block(mlp[1], "mlp.fc2"),
        ),
        "layers.{n+1}.*": f"{base}layernorm.*",
        "layers.{n+2}.out.*": "classifier.*",
    }


_VIT_NAMES = _image_names(
    "vit.", "layers", ("layernorm_before", "layernorm_after"), ("intermediate.dense", "output.dense")
)


def _dino_names(config: Config) -> Names:
    base = "dinov2." if _labels_of(config) else ""
    scales = {
        f"layers.{{i+1}}.post_norm{n}.weight": f"{base}encoder.layer.{{i}}.layer_scale{n}.lambda1" for n in (1, 2)
    }
    return {**_image_names(base, "encoder.layer", ("norm1", "norm2"), ("mlp.fc1", "mlp.fc2")), **scales}


_AT = "encoder.layers.{i}"
_SIGLIP_NAMES: Names = {
    "layers.0.weight": "embeddings.patch_embedding.weight",
    "layers.0.bias": "embeddings.patch_embedding.bias",
    "layers.0.positions.weight": "embeddings.position_embedding.weight",
    **block_names(
        1,
        norm1=f"{_AT}.layer_norm1.*",
        attention__q=f"{_AT}.self_attn.q_proj.*",
        attention__kv=(f"{_AT}.self_attn.k_proj.*", f"{_AT}.self_attn.v_proj.*"),
        attention__out=f"{_AT}.self_attn.out_proj.*",
        norm2=f"{_AT}.layer_norm2.*",
        mlp__up=f"{_AT}.mlp.fc1.*",
        mlp__down=f"{_AT}.mlp.fc2.*",
    ),
    "layers.{n+1}.*": "post_layernorm.*",
}


def _t5_names(config: Config) -> Names:
    """Return the table of T5's names; the blocks of the encoder are counted by n, and here those of the decoder too."""
    depth = config.get("num_decoder_layers") or config.get("num_layers") or 0
    table = "block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    names: dict[str, Any] = {
        "layers.0.weight": "shared.weight",
        "layers.1.weight": f"encoder.{table}",
        "layers.{n+2}.weight": "encoder.final_layer_norm.weight",
        "layers.{n+4}.weight": f"decoder.{table}",
        f"layers.{{n+{5 + depth}}}.weight": "decoder.final_layer_norm.weight",
        f"layers.{{n+{6 + depth}}}.weight": "lm_head.weight",
    }
    blocks: list[tuple[str, str, tuple[str, ...]]] = [("{i+2}", "encoder.block.{i}.layer", ("attention",))]
    blocks += [(f"{{n+{5 + i}}}", f"decoder.block.{i}.layer", ("attention", "cross")) for i in range(depth)]
    for layer, at, branches in blocks:
        for n, branch in enumerate(branches):
            of, norm = f"{at}.{n}.{('SelfAttention', 'EncDecAttention')[n]}", f"layers.{layer}.norm{n + 1}.weight"
            names[norm], parts = f"{at}.{n}.layer_norm.weight", {"q": "q", "k": "k", "v": "v", "out": "o"}
            names |= {f"layers.{layer}.{branch}.{p}.weight": f"{of}.{their}.weight" for p, their in parts.items()}
        of = f"{at}.{len(branches)}.DenseReluDense"
        names[f"layers.{layer}.norm3.weight"] = f"{at}.{len(branches)}.layer_norm.weight"
        names[f"layers.{layer}.mlp.up.weight"] = f"{of}.wi.weight"
        names[f"layers.{layer}.mlp.gate_up.weight"] = f"{of}.wi_0.weight", f"{of}.wi_1.weight"
        names[f"layers.{layer}.mlp.down.weight"] = f"{of}.wo.weight"
    return names


_WHISPER_BLOCK = {"norm1": "self_attn_layer_norm", "norm2": "encoder_attn_layer_norm", "norm3": "final_layer_norm"}
_WHISPER_BLOCK |= {"mlp.up": "fc1", "mlp.down": "fc2"}
_WHISPER_BLOCK |= {f"attention.{part}": f"self_attn.{part}_proj" for part in ("q", "k", "v", "out")}
_WHISPER_BLOCK |= {f"cross.{part}": f"encoder_attn.{part}_proj" for part in ("q", "k", "v", "out")}


def _whisper_names(config: Config) -> Names:
    """Return the table of Whisper's names; as in T5's, n counts the blocks of the encoder."""
    depth = number_of(config, "decoder_layers", 4)
    names = {
        "layers.0.conv1.*": "model.encoder.conv1.*",
        "layers.0.conv2.*": "model.encoder.conv2.*",
        "layers.0.positions": "model.encoder.embed_positions.weight",
        "layers.{n+1}.*": "model.encoder.layer_norm.*",
        "layers.{n+2}.weight": "model.decoder.embed_tokens.weight",
        "layers.{n+3}.weight": "model.decoder.embed_positions.weight",
        f"layers.{{n+{4 + depth}}}.*": "model.decoder.layer_norm.*",
        f"layers.{{n+{5 + depth}}}.weight": "proj_out.weight",
    }
    blocks = [("{i+1}", "encoder.layers.{i}")] + [(f"{{n+{4 + i}}}", f"decoder.layers.{i}") for i in range(depth)]
    for layer, at in blocks:
        names |= {f"layers.{layer}.{ours}.*": f"model.{at}.{theirs}.*" for ours, theirs in _WHISPER_BLOCK.items()}
    return names


# ------------------------------------------------------------------------------------------------------------- settings


def _labels_of(config: Config) -> int:
    """Return the number of classes of the class under ``architectures``; 0 of one for masked tokens, or features."""
    listed, endings = config.get("architectures"), _ENDINGS[config["model_type"]]
    name = str(listed[0]) if isinstance(listed, (list, tuple)) and listed else "nothing"
    if not any(ending and name.endswith(ending) for ending in endings):
        known = " and ".join(filter(None, endings))
        raise ValueError(
            f"architectures has {name[:60]}, but of a {config['model_type']} triax has {known}. triax.parallelize "
            "shards the Hugging Face model itself."
        )
    return score_count(config) if endings[1] and name.endswith(endings[1]) else 0


def _read(config: Config) -> dict[str, Any]:
    return {"num_labels": _labels_of(config)}


def _write(kind: str, prefix: str, config: EncoderConfig) -> dict[str, Any]:
    numbers = range(config.num_labels)
    labels = {"id2label": {str(n): f"LABEL_{n}" for n in numbers}, "label2id": {f"LABEL_{n}": n for n in numbers}}
    architecture = prefix + _ENDINGS[kind][bool(numbers)]
    return {"architectures": [architecture], "attention_probs_dropout_prob": 0.0, **(labels if numbers else {})}


def _roberta_read(config: Config) -> dict[str, Any]:
    offset = number_of(config, "pad_token_id", 1) + 1
    longest = config["max_position_embeddings"] - offset
    return {**_read(config), "position_offset": offset, "max_position_embeddings": longest}


def _roberta_write(config: EncoderConfig) -> dict[str, Any]:
    rows = config.max_position_embeddings + config.position_offset
    written = {"pad_token_id": config.position_offset - 1, "max_position_embeddings": rows}
    return {**_write("roberta", "Roberta", config), **written}


def _modern_read(config: Config) -> dict[str, Any]:
    """Return the window: local_attention counts the tokens on both sides, and the field those on one and the token."""
    return {**_read(config), "sliding_window": number_of(config, "local_attention", 128) // 2 + 1}


def _modern_write(config: EncoderConfig) -> dict[str, Any]:
    side = (config.sliding_window or 65) - 1  # transformers sets local_attention by sliding_window too
    return {**_write("modernbert", "ModernBert", config), "local_attention": 2 * side, "sliding_window": side}


def _dino_write(config: EncoderConfig) -> dict[str, Any]:
    written = {"mlp_ratio": config.intermediate_size // config.hidden_size, "use_mask_token": False}
    return {**_write("dinov2", "Dinov2", config), **written}


def _t5_read(config: Config) -> dict[str, Any]:
    _labels_of(config)  # refuses other classes
    first = config["model_type"] == "t5"
    act = config.get("feed_forward_proj", "relu" if first else "gated-gelu")
    kind, scaled = str(act).removeprefix("gated-"), config.get("tie_word_embeddings") is not False
    return {
        "scale_decoder_outputs": first and config.get("scale_decoder_outputs", scaled),
        "gated": kind != act,
        "hidden_act": "gelu_new" if act == "gated-gelu" else kind,
    }


def _t5_write(prefix: str, config: T5Config) -> dict[str, Any]:
    act = "gelu" if config.gated and config.hidden_act == "gelu_new" else config.hidden_act
    return {
        "architectures": [f"{prefix}ForConditionalGeneration"],
        "is_encoder_decoder": True,
        "scale_decoder_outputs": config.scale_decoder_outputs,
        "feed_forward_proj": "gated-" * config.gated + act,
    }


def _whisper_read(config: Config) -> dict[str, Any]:
    """Return the number of blocks of the decoder, after a check that both stacks have the same sizes."""
    _labels_of(config)  # refuses other classes
    for part, default in (("attention_heads", 6), ("ffn_dim", 1536)):
        encoder, decoder = (config.get(f"{stack}_{part}", default) for stack in ("encoder", "decoder"))
        if encoder != decoder:
            raise ValueError(
                f"decoder_{part} is {decoder}, but encoder_{part} is {encoder}. triax has equal ones only."
            )
    return {"num_decoder_layers": number_of(config, "decoder_layers", 4, 1)}


def _whisper_write(config: WhisperConfig) -> dict[str, Any]:
    heads, width = config.num_attention_heads, config.intermediate_size
    architectures = {"architectures": ["WhisperForConditionalGeneration"], "is_encoder_decoder": True}
    return {**architectures, "decoder_attention_heads": heads, "decoder_ffn_dim": width}


_BERT = Family(
    "Bert",
    bert_plan,
    EncoderConfig,
    _text_names("bert", _BERT_HEADS, ("bert.pooler.dense", "classifier")),
    _TEXT_KEYS,
    only=_TEXT_ONLY,
    read=_read,
    write=partial(_write, "bert", "Bert"),
    blocks=False,
    unread=("bert.pooler.", "bert.embeddings.position_ids", "cls.predictions.decoder.", "cls.seq_relationship."),
)
_VIT = Family(
    "ViT",
    vit_plan,
    EncoderConfig,
    _VIT_NAMES,
    _IMAGE_KEYS,
    {"norm_place": "before", "pooler": False},
    {"hidden_act": _ACTS},
    read=_read,
    write=partial(_write, "vit", "ViT"),
    blocks=False,
    unread=("vit.pooler.",),
)
_T5 = Family(
    "T5",
    t5_plan,
    T5Config,
    _t5_names,
    _T5_KEYS,
    read=_t5_read,
    write=partial(_t5_write, "T5"),
    blocks=False,
    unread=("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.",),
)
ENCODERS: dict[str, Family] = {
    "bert": _BERT,
    "roberta": like(
        _BERT,
        "Roberta",
        names=_text_names("roberta", _ROBERTA_HEADS, ("classifier.dense", "classifier.out_proj")),
        only={"hidden_act": ("gelu",)},  # the head for masked tokens has this activation
        read=_roberta_read,
        write=_roberta_write,
        unread=("roberta.pooler.", "roberta.embeddings.position_ids", "lm_head.decoder."),
    ),
    "modernbert": Family(
        "ModernBert",
        None,
        EncoderConfig,
        _modern_names,
        _MODERN_KEYS,
        {"norm_place": "embedding", "learned_positions": False, "type_vocab_size": 0, "pooler": False, "gated": True},
        _MODERN_ONLY,
        {"rope_theta": 1.6e5, "rope_local_base_freq": 1e4, "rotary_emb_base": 1.6e5},  # of global_rope_theta
        ("linear", "yarn"),
        window="types",
        window_size=128,
        slides=lambda config, block: block % number_of(config, "global_attn_every_n_layers", 3, 1) > 0,
        read=_modern_read,
        write=_modern_write,
        blocks=False,
        aliases={"global_rope_theta": "rotary_emb_base", "local_rope_theta": "rope_local_base_freq"}
        | {"local_attention": "sliding_window"},
        unread=("decoder.weight",),
    ),
    "vit": _VIT,
    "dinov2": like(
        _VIT,
        "Dinov2",
        plan=None,
        names=_dino_names,
        keys={"layer_norm_eps": 1e-6, "patch_size": 14, "layer_scale": ("layerscale_value", 1.0)}
        | {"intermediate_size": None},
        flags={"mean_pool": True},
        only={"use_swiglu_ffn": (False,), "drop_path_rate": (0.0, 0), "hidden_dropout_prob": (0.0, 0)},
        read=lambda config: {
            **_read(config),
            "intermediate_size": number_of(config, "mlp_ratio", 4) * config["hidden_size"],
        },
        write=_dino_write,
        unread=("dinov2.embeddings.mask_token", "embeddings.mask_token"),
    ),
    "siglip_vision_model": like(
        _VIT,
        "SiglipVision",
        plan=None,
        names=_SIGLIP_NAMES,
        keys={"layer_norm_eps": 1e-6, "hidden_act": ("hidden_act", "gelu_pytorch_tanh")}
        | dict.fromkeys(("dropout", "qkv_bias")),
        flags={"class_token": False},
        only=NO_DROPOUT,
        write=lambda config: {**_write("siglip_vision_model", "SiglipVision", config), "vision_use_head": False},
        unread=("head.",),
    ),
    "t5": _T5,
    "mt5": like(_T5, "MT5", plan=None, write=partial(_t5_write, "MT5")),
    "whisper": Family(
        "Whisper",
        None,
        WhisperConfig,
        _whisper_names,
        _WHISPER_KEYS,
        {"mlp_bias": True},
        _WHISPER_ONLY,
        read=_whisper_read,
        write=_whisper_write,
        blocks=False,
        embedding="layers.{n+2}.weight",
    ),
}
