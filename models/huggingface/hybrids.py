"""Hybrids of attention and recurrent layers in Hugging Face's form: settings and names of their recurrent layers.

``hybrid_families.py`` has their entries. The table of a hybrid's names depends on its ``config.json``, because blocks
differ.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..config import DecoderConfig
from ..recurrent.sizes import DeltaNetSizes, Mamba2Sizes
from .names import Names, Pattern, RowsOf

Config = Mapping[str, Any]  # content of a config.json
_LINEAR, _FULL = "linear_attention", "full_attention"
_FORMER = {"mamba": _LINEAR, "attention": _FULL}  # words of Transformers 4
_PATTERN = {"M": _LINEAR, "E": "moe", "*": _FULL, "-": "mlp"}  # letters of Nemotron-H
_LARGEST = 2**30


def count_of(config: Config, key: str, default: int) -> int:
    """Return the number that a key has as its value, at least 1; the default if there is none."""
    value = config.get(key, default)
    if type(value) is not int or not 1 <= value <= _LARGEST:
        raise ValueError(f"{key} is {value!r:.60}, but must be a whole number from 1 to {_LARGEST}.")
    return value


def flag_of(config: Config, key: str, default: bool) -> bool:
    """Return the value of a key that is true or false; the default if there is none."""
    value = config.get(key, default)
    if type(value) is not bool:
        raise ValueError(f"{key} is {value!r:.60}, but must be true or false.")
    return value


def _words(config: Config, key: str, depth: int | None = None) -> tuple[str, ...]:
    """Return the kinds of the blocks, which a key lists, in today's words; () if there is no list."""
    types = config.get(key)
    if types is None:
        return ()
    if not isinstance(types, (list, tuple)) or not all(isinstance(kind, str) for kind in types):
        raise ValueError(f"{key} is {types!r:.60}, but must be a list of words.")
    if depth is not None and len(types) != depth:
        raise ValueError(f"{key} has {len(types)} entries, but num_hidden_layers is {depth}. Give one for each block.")
    return tuple(_FORMER.get(kind, kind) for kind in map(str, types))


# -------------------------------------------------------------------------------------------------- Gated DeltaNet


def qwen_types(config: Config) -> tuple[str, ...]:
    """Return the kinds of the blocks of a Qwen3-Next or Qwen3.5."""
    depth = count_of(config, "num_hidden_layers", 32)
    if types := _words(config, "layer_types", depth):
        return types
    interval = count_of(config, "full_attention_interval", 4)
    return tuple(_LINEAR if (i + 1) % interval else _FULL for i in range(depth))


def _delta_net(config: Config) -> DeltaNetSizes:
    return DeltaNetSizes(
        count_of(config, "linear_num_value_heads", 32),
        count_of(config, "linear_value_head_dim", 128),
        count_of(config, "linear_num_key_heads", 16),
        count_of(config, "linear_key_head_dim", 128),
        count_of(config, "linear_conv_kernel_dim", 4),
    )


def qwen_read(config: Config) -> dict[str, Any]:
    """Return the fields of the recurrent layers of a Qwen3-Next or Qwen3.5."""
    types = qwen_types(config)
    return {"layer_types": types, "linear_attention": _delta_net(config) if _LINEAR in types else None}


def qwen_write(config: DecoderConfig) -> dict[str, Any]:
    """Return the keys of the recurrent layers of a Qwen3-Next or Qwen3.5."""
    sizes, types = config.linear_attention, config.layer_types or (_FULL,) * config.num_hidden_layers
    if not isinstance(sizes, DeltaNetSizes):
        return {"layer_types": list(types)}
    return {
        "layer_types": list(types),
        "linear_num_value_heads": sizes.num_value_heads,
        "linear_value_head_dim": sizes.value_head_dim,
        "linear_num_key_heads": sizes.num_key_heads,
        "linear_key_head_dim": sizes.key_head_dim,
        "linear_conv_kernel_dim": sizes.conv_kernel,
    }


def qwen_names(common: Names, fused: bool) -> Callable[[Config], Names]:
    """Return the function that makes the table of a Qwen3-Next (``fused``) or Qwen3.5.

    Args:
        common: names of all but the recurrent layers, and the queries of the attention.
        fused: the projections are two tensors, whose rows are grouped by the heads of the keys; False: four.
    """

    def names(config: Config) -> Names:
        entries, types, sizes = dict(common), qwen_types(config), _delta_net(config)
        heads, dim = count_of(config, "num_attention_heads", 16), count_of(config, "head_dim", 256)
        for ours, first in (("q", 0), ("gate", dim)):  # head by head
            rows = [(at * dim + first, at * dim + first + dim) for at in range(0, 2 * heads, 2)]
            name = "model.layers.{i}.self_attn.q_proj.*"
            entries[f"layers.{{i+1}}.attention.{ours}.*"] = RowsOf(name, tuple(rows), 2 * heads * dim)
        for i in (i for i, kind in enumerate(types) if kind == _LINEAR):
            entries |= _delta_net_names(f"layers.{i + 1}.attention", f"model.layers.{i}.linear_attn", sizes, fused)
        return entries

    return names


def _olmo_types(config: Config) -> tuple[str, ...]:
    depth = count_of(config, "num_hidden_layers", 32)
    types = _words(config, "layer_types", depth) or tuple(_FULL if i % 4 == 3 else _LINEAR for i in range(depth))
    return types if _FULL in types else (*types[:-1], _FULL)


def _olmo_sizes(config: Config) -> DeltaNetSizes:
    config = {key: value for key, value in config.items() if value is not None}
    heads = count_of(config, "num_attention_heads", 30)
    keys = count_of(config, "linear_num_key_heads", heads)
    dim = count_of(config, "linear_key_head_dim", int(0.75 * count_of(config, "hidden_size", 3840) / keys))
    return DeltaNetSizes(
        count_of(config, "linear_num_value_heads", heads),
        count_of(config, "linear_value_head_dim", 2 * dim),
        keys,
        dim,
        count_of(config, "linear_conv_kernel_dim", 4),
        flag_of(config, "linear_allow_neg_eigval", True),
        norm_eps=1e-5,  # whatever rms_norm_eps is
    )


def olmo_read(config: Config) -> dict[str, Any]:
    """Return the fields of the recurrent layers of an OLMo-Hybrid, and of its positions, which may be none."""
    types, rope = _olmo_types(config), config.get("rope_scaling") or config.get("rope_parameters") or {}
    options = {"layer_types": types, "linear_attention": _olmo_sizes(config) if _LINEAR in types else None}
    theta = rope["rope_theta"] if "rope_theta" in rope else config.get("rope_theta", 1e4)
    return options | ({"no_rope_layers": (0,) * len(types)} if theta is None else {})


def olmo_write(config: DecoderConfig) -> dict[str, Any]:
    """Return the keys of the recurrent layers of an OLMo-Hybrid, and of its positions if it has none."""
    written, sizes = qwen_write(config), config.linear_attention
    if isinstance(sizes, DeltaNetSizes):
        written["linear_allow_neg_eigval"] = sizes.allow_neg_eigval
    if config.no_rope_layers:
        written |= {"rope_parameters": {"rope_type": "default", "rope_theta": None}, "rope_theta": None}
    return written


def olmo_names(common: Names) -> Callable[[Config], Names]:
    """Return the function that makes the table of an OLMo-Hybrid, from the names of all but norms and recurrent layers.

    Files have other names of two norms, and a tensor of each convolution.
    """

    def names(config: Config) -> Names:
        entries, sizes = dict(common), _olmo_sizes(config)
        for i, kind in enumerate(_olmo_types(config)):
            ours, theirs = f"layers.{i + 1}", f"model.layers.{i}"
            middle: list[Pattern] = [
                f"{theirs}.post_attention_layernorm.weight",
                f"{theirs}.feedforward_layer_norm.weight",
            ]
            if kind != _LINEAR:
                entries[f"{ours}.post_norm1.weight"] = middle
                entries[f"{ours}.post_norm2.weight"] = f"{theirs}.post_feedforward_layernorm.weight"
                continue
            entries[f"{ours}.norm1.weight"] = [
                f"{theirs}.input_layernorm.weight",
                f"{theirs}.attention_layer_norm.weight",
            ]
            entries[f"{ours}.norm2.weight"] = middle
            entries |= _olmo_delta_net(f"{ours}.attention", f"{theirs}.linear_attn", sizes)
        return entries

    return names


def _olmo_delta_net(ours: str, theirs: str, sizes: DeltaNetSizes) -> Names:
    keys, values = sizes.num_key_heads * sizes.key_head_dim, sizes.num_value_heads * sizes.value_head_dim
    conv = _parts(f"{theirs}.conv1d.weight", {f"{ours}.conv_pair": 2 * keys, f"{ours}.conv_value": values})
    q, k, v, b, a, g, o = (f"{theirs}.{name}_proj.weight" for name in "qkvbago")
    qc, kc, vc = (f"{theirs}.{name}_conv1d.weight" for name in "qkv")
    return {
        f"{ours}.a_log": f"{theirs}.A_log",
        f"{ours}.dt_bias": f"{theirs}.dt_bias",
        f"{ours}.norm.weight": f"{theirs}.o_norm.weight",
        f"{ours}.pair.weight": (q, k),
        f"{ours}.value.weight": v,
        f"{ours}.gate.weight": g,
        f"{ours}.numbers.weight": (b, a),
        f"{ours}.out.weight": o,
        f"{ours}.conv_pair": [conv[f"{ours}.conv_pair"], (qc, kc)],
        f"{ours}.conv_value": [conv[f"{ours}.conv_value"], vc],
    }


def _delta_net_names(ours: str, theirs: str, sizes: DeltaNetSizes, fused: bool) -> Names:
    keys, values = sizes.num_key_heads * sizes.key_head_dim, sizes.num_value_heads * sizes.value_head_dim
    entries: dict[str, Pattern] = {
        f"{ours}.a_log": f"{theirs}.A_log",
        f"{ours}.dt_bias": f"{theirs}.dt_bias",
        f"{ours}.norm.weight": f"{theirs}.norm.weight",
        f"{ours}.out.weight": f"{theirs}.out_proj.weight",
        **_parts(f"{theirs}.conv1d.weight", {f"{ours}.conv_pair": 2 * keys, f"{ours}.conv_value": values}),
    }
    if not fused:
        projected = {f"{ours}.pair.weight": 2 * keys, f"{ours}.value.weight": values}
        entries |= _parts(f"{theirs}.in_proj_qkv.weight", projected)
        entries[f"{ours}.gate.weight"] = f"{theirs}.in_proj_z.weight"
        return entries | {f"{ours}.numbers.weight": (f"{theirs}.in_proj_b.weight", f"{theirs}.in_proj_a.weight")}
    groups, share = sizes.num_key_heads, sizes.num_value_heads // sizes.num_key_heads
    key, value = sizes.key_head_dim, share * sizes.value_head_dim
    q, k, v, z = _grouped(groups, (key, key, value, value))
    b, a = _grouped(groups, (share, share))
    for name, rows in (("pair", q + k), ("value", v), ("gate", z)):
        entries[f"{ours}.{name}.weight"] = RowsOf(f"{theirs}.in_proj_qkvz.weight", rows, 2 * keys + 2 * values)
    entries[f"{ours}.numbers.weight"] = RowsOf(f"{theirs}.in_proj_ba.weight", b + a, 2 * sizes.num_value_heads)
    return entries


# ---------------------------------------------------------------------------------------------------------- Mamba2

# Keys of the sizes in ``config.json``: of ``Mamba2Sizes`` in order, without the last two, with transformers' defaults.
_KEYS = ("num_heads", "head_dim", "state_size", "n_groups", "conv_kernel", "use_conv_bias", "use_bias")
_NEMOTRON: dict[str, tuple[str, Any]] = dict(
    zip(
        _KEYS,
        (
            *(("mamba_num_heads", 128), ("mamba_head_dim", 64), ("ssm_state_size", 128), ("n_groups", 8)),
            *(("conv_kernel", 4), ("use_conv_bias", True), ("use_bias", False)),
        ),
        strict=True,
    )
)
_BAMBA: dict[str, tuple[str, Any]] = dict(
    zip(
        _KEYS,
        (
            *(("mamba_n_heads", 128), ("mamba_d_head", "auto"), ("mamba_d_state", 256), ("mamba_n_groups", 1)),
            *(("mamba_d_conv", 4), ("mamba_conv_bias", True), ("mamba_proj_bias", False)),
        ),
        strict=True,
    )
)
_MAMBA2: dict[str, tuple[str, Any]] = dict(
    zip(_KEYS, zip(_KEYS, (128, 64, 128, 8, 4, True, False), strict=True), strict=True)
)
# Keys of the first Nemotron-H, which transformers lets win.
_NEMOTRON_FORMER = {
    "mamba_n_groups": "n_groups",
    "mamba_d_conv": "conv_kernel",
    "mamba_dt_min": "time_step_min",
    "mamba_conv_bias": "use_conv_bias",
}


def _mamba2(config: Config, keys: Mapping[str, tuple[str, Any]], step_min: float) -> Mamba2Sizes:
    options: dict[str, Any] = {}
    for ours, (key, default) in keys.items():
        options[ours] = (flag_of if ours.startswith("use_") else count_of)(config, key, default)
    sizes = Mamba2Sizes(**options, time_step_min=step_min)
    if keys is not _NEMOTRON:
        expand = "expand" if keys is _MAMBA2 else "mamba_expand"
        width, inner = count_of(config, "hidden_size", 4096), sizes.num_heads * sizes.head_dim
        if count_of(config, expand, 2) * width != inner:
            raise ValueError(
                f"{keys['num_heads'][0]}={sizes.num_heads} heads of {keys['head_dim'][0]}={sizes.head_dim} channels "
                f"are {inner}, but hidden_size={width} times {expand}={count_of(config, expand, 2)} must be the same."
            )
    return sizes


def _step_min(config: Config) -> float:
    """Return the lower one of the limits of the time step, of which there may be no upper one."""
    limits = config.get("time_step_limit")
    if limits is None:
        return 0.0
    pair: tuple[Any, Any] = (None, None)
    low, high = limits if isinstance(limits, (list, tuple)) and len(limits) == 2 else pair
    if type(low) not in (int, float) or not 0 <= low < math.inf or high not in (math.inf, {"__float__": "Infinity"}):
        raise ValueError(f"time_step_limit is {limits!r:.60}, but only [0 or more, Infinity] is implemented.")
    return float(low)


def _written(sizes: Any, keys: Mapping[str, tuple[str, Any]]) -> dict[str, Any]:
    return {} if sizes is None else {key: getattr(sizes, ours) for ours, (key, _) in keys.items()}


def _limits(sizes: Any) -> dict[str, Any]:
    """Return the key of the limits of the time step, which JSON cannot write as a number."""
    low = 0.0 if sizes is None else sizes.time_step_min
    return {"time_step_limit": [low, {"__float__": "Infinity"}]} if low else {}


def nemotron_types(config: Config) -> tuple[str, ...]:
    """Return the kinds of the blocks of a Nemotron-H."""
    types, pattern = _words(config, "layers_block_type"), config.get("hybrid_override_pattern")
    if not types and isinstance(pattern, str):
        types = tuple(_PATTERN.get(letter, letter) for letter in pattern)
    types = types or (_LINEAR, "moe", _FULL, "mlp")
    if unknown := sorted(set(types) - {_LINEAR, _FULL, "mlp"}):
        raise ValueError(
            f"layers_block_type has {unknown[0]!r}, but nemotron_h is implemented only with 'linear_attention', "
            "'full_attention' and 'mlp'."
        )
    return types


def nemotron_read(config: Config) -> dict[str, Any]:
    """Return the fields of a Nemotron-H's blocks, which have no rotary positions."""
    types = nemotron_types(config)
    config = {**config, **{new: config[old] for old, new in _NEMOTRON_FORMER.items() if old in config}}
    step_min = config.get("time_step_min", 0.001)
    if type(step_min) not in (int, float) or not 0 <= step_min < math.inf:
        raise ValueError(f"time_step_min is {step_min!r:.60}, but must be a number of at least 0.")
    return {
        "num_hidden_layers": len(types),
        "layer_types": types,
        "no_rope_layers": (0,) * len(types),
        "linear_attention": _mamba2(config, _NEMOTRON, float(step_min)) if _LINEAR in types else None,
    }


def nemotron_write(config: DecoderConfig) -> dict[str, Any]:
    """Return the keys of a Nemotron-H's blocks."""
    sizes = config.linear_attention
    written = {"layers_block_type": list(config.layer_types), **_written(sizes, _NEMOTRON)}
    return written if sizes is None else written | {"time_step_min": getattr(sizes, "time_step_min", None)}


def nemotron_names(config: Config) -> Names:
    """Return the table of a Nemotron-H. Files have ``backbone`` in place of ``model`` before Transformers 5."""
    names: dict[str, Any] = {"layers.0.weight": "model.embeddings.weight", "layers.{n+1}.weight": "model.norm_f.weight"}
    read = nemotron_read(config)
    for i, kind in enumerate(read["layer_types"]):
        ours, theirs = f"layers.{i + 1}", f"model.layers.{i}"
        names[f"{ours}.norm{2 if kind == 'mlp' else 1}.weight"] = f"{theirs}.norm.weight"
        if kind == _LINEAR:
            names |= _mamba2_names(f"{ours}.attention", f"{theirs}.mixer", read["linear_attention"])
        elif kind == "mlp":
            names |= {f"{ours}.mlp.{name}.*": f"{theirs}.mixer.{name}_proj.*" for name in ("up", "down")}
        else:
            q, k, v, o = (f"{theirs}.mixer.{name}_proj.weight" for name in "qkvo")
            names |= {f"{ours}.attention.{name}.weight": form for name, form in (("q", q), ("kv", (k, v)), ("out", o))}
    both: dict[str, Any] = {ours: [form, _renamed(form, "model.", "backbone.")] for ours, form in names.items()}
    return both | {"layers.{n+2}.weight": "lm_head.weight"}


def bamba_types(config: Config) -> tuple[str, ...]:
    """Return the kinds of the blocks of a Bamba."""
    attends = config.get("attn_layer_indices") or ()
    if not isinstance(attends, (list, tuple)) or not all(type(layer) is int for layer in attends):
        raise ValueError(f"attn_layer_indices is {attends!r:.60}, but must be a list of numbers.")
    return tuple(_FULL if i in attends else _LINEAR for i in range(count_of(config, "num_hidden_layers", 32)))


def bamba_read(config: Config) -> dict[str, Any]:
    """Return the fields of the recurrent layers of a Bamba."""
    types = bamba_types(config)
    if config.get("mamba_d_head", "auto") == "auto":
        inner = count_of(config, "mamba_expand", 2) * count_of(config, "hidden_size", 4096)
        config = {**config, "mamba_d_head": inner // count_of(config, "mamba_n_heads", 128)}
    sizes = _mamba2(config, _BAMBA, _step_min(config)) if _LINEAR in types else None
    return {"layer_types": types, "linear_attention": sizes}


def bamba_write(config: DecoderConfig) -> dict[str, Any]:
    """Return the keys of the recurrent layers of a Bamba."""
    sizes: Any = config.linear_attention
    attends = [i for i in range(config.num_hidden_layers) if config.type_of(i) == "attention"]
    written = {"attn_layer_indices": attends, **_written(sizes, _BAMBA), **_limits(sizes)}
    if isinstance(sizes, Mamba2Sizes):
        written["mamba_expand"] = _expand(config, sizes)
    return written


def bamba_names(common: Names) -> Callable[[Config], Names]:
    """Return the function that makes the table of a Bamba, from the names of all but the recurrent layers."""

    def names(config: Config) -> Names:
        entries, types, read = dict(common), bamba_types(config), bamba_read(config)
        for i in (i for i, kind in enumerate(types) if kind == _LINEAR):
            entries |= _mamba2_names(f"layers.{i + 1}.attention", f"model.layers.{i}.mamba", read["linear_attention"])
        return entries

    return names


def mamba2_read(config: Config) -> dict[str, Any]:
    """Return the fields of a Mamba2, which has recurrent layers alone, and so no longest sequence."""
    return {
        "num_attention_heads": 1,
        "max_position_embeddings": 2**20,
        "layer_types": (_LINEAR,) * count_of(config, "num_hidden_layers", 64),
        "linear_attention": _mamba2(config, _MAMBA2, _step_min(config)),
    }


def mamba2_write(config: DecoderConfig) -> dict[str, Any]:
    """Return the keys of a Mamba2's layers."""
    sizes: Any = config.linear_attention
    written = {**_written(sizes, _MAMBA2), **_limits(sizes)}
    return written | {"expand": _expand(config, sizes)} if isinstance(sizes, Mamba2Sizes) else written


def mamba2_names(config: Config) -> Names:
    """Return the table of a Mamba2."""
    entries: dict[str, Any] = {
        "layers.0.weight": "backbone.embeddings.weight",
        "layers.{i+1}.norm1.weight": "backbone.layers.{i}.norm.weight",
        "layers.{n+1}.weight": "backbone.norm_f.weight",
        "layers.{n+2}.weight": "lm_head.weight",
    }
    sizes = mamba2_read(config)["linear_attention"]
    return entries | dict(_mamba2_names("layers.{i+1}.attention", "backbone.layers.{i}.mixer", sizes))


def _expand(config: DecoderConfig, sizes: Mamba2Sizes) -> int:
    """Return the ratio of the inner width to the width, of which transformers has a whole number only."""
    return sizes.num_heads * sizes.head_dim // config.hidden_size


def _mamba2_names(ours: str, theirs: str, sizes: Mamba2Sizes) -> Names:
    inner, pair = sizes.num_heads * sizes.head_dim, 2 * sizes.n_groups * sizes.state_size
    projected = (("gate", inner), ("value", inner), ("pair", pair), ("numbers", sizes.num_heads))
    return {
        f"{ours}.a_log": f"{theirs}.A_log",
        f"{ours}.dt_bias": f"{theirs}.dt_bias",
        f"{ours}.skip": f"{theirs}.D",
        f"{ours}.norm": f"{theirs}.norm.weight",
        f"{ours}.out.*": f"{theirs}.out_proj.*",
        **_parts(f"{theirs}.in_proj.*", {f"{ours}.{name}.*": rows for name, rows in projected}),
        **_parts(f"{theirs}.conv1d.weight", {f"{ours}.conv_value": inner, f"{ours}.conv_pair": pair}),
        **_parts(f"{theirs}.conv1d.bias", {f"{ours}.conv_value_bias": inner, f"{ours}.conv_pair_bias": pair}),
    }


# ------------------------------------------------------------------------------------------------------------ rows


def _parts(theirs: str, lengths: Mapping[str, int]) -> dict[str, Pattern]:
    """Return the names of parameters that lie one behind the other in a tensor, from their numbers of rows."""
    patterns: dict[str, Pattern] = {}
    start, total = 0, sum(lengths.values())
    for ours, length in lengths.items():
        patterns[ours] = RowsOf(theirs, ((start, start + length),), total)
        start += length
    return patterns


def _grouped(groups: int, lengths: Sequence[int]) -> list[tuple[tuple[int, int], ...]]:
    """Return the rows of each part of a tensor that has for each group the rows of all parts."""
    starts = [sum(lengths[:index]) for index in range(len(lengths))]
    step = sum(lengths)
    return [
        tuple((group * step + start, group * step + start + length) for group in range(groups))
        for start, length in zip(starts, lengths, strict=True)
    ]


def _renamed(form: Any, old: str, new: str) -> Any:
    """Return a name, or several, with another prefix."""
    if isinstance(form, RowsOf):
        return RowsOf(_renamed(form.name, old, new), form.rows, form.of)
    if isinstance(form, tuple):
        return tuple(_renamed(inner, old, new) for inner in form)
    return new + form.removeprefix(old)
