"""Import of Megatron-LM's checkpoints of GPT and Llama-like models, on one process and without Megatron's code.

Two formats, and within the second two sets of names:

torch_dist   metadata.json, and a DCP folder with whole tensors; layers are stacked, "decoder.layers.mlp...", (L, ...),
             or numbered, "decoder.layers.3.mlp..."
legacy       mp_rank_TT[_PPP]/model_optim_rng.pt of each tensor rank and pipe rank, with layers numbered from 0 in each;
             names of Megatron-core, or older ones, "language_model.encoder.layers.3.mlp.dense_h_to_4h..."

    Megatron                              triax
    linear_qkv, by query group q..q k v   q of all groups, then k, then v
    linear_fc1, [gate; up] per shard      gate, then up
    padded_vocab_size rows                vocab_size rows
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...base.files import read_object
from ...base.foreign_tables import read_table
from ...checkpoint.convert.dcp_folder import DcpFolder
from ...checkpoint.convert.inert import Inert, read_torch_file
from ...checkpoint.convert.whole_tensors import write_whole
from ...checkpoint.snapshot import WEIGHTS, Snapshot

_LATEST, _SHARD = "latest_checkpointed_iteration.txt", "model_optim_rng.pt"
Tensors = Mapping[str, Callable[[], Tensor]]  # Megatron-core's name, with the layer's number in the model -> its reader

_TABLES = read_table(__file__, "arguments.toml")
_GPT, _LLAMA = _TABLES["gpt"], _TABLES["llama"]
_NO_WEIGHT = re.compile(r"_extra_state|rotary_pos_emb|inv_freq|^word_embeddings_for_head")
_BY_ROWS = re.compile(r"(linear_qkv|linear_fc1|output_layer)\.(weight|bias)$|word_embeddings\.weight$")
_BY_COLUMNS = re.compile(r"(linear_proj|linear_fc2)\.weight$")


def find_megatron(source: Path) -> Path | None:
    """Return the folder of a Megatron checkpoint: ``source`` itself, or the last iteration in it; None if it is none.

    Raises:
        ValueError: it is one of a format that is not read.
    """
    latest = source / _LATEST
    if latest.is_file():
        text = latest.read_text(encoding="utf-8").strip()
        source = source / (f"iter_{int(text):07d}" if text.isdigit() else text)
    file = source / "metadata.json"
    kind = read_object(file).get("sharded_backend") if file.is_file() else None
    if kind not in (None, "torch_dist"):
        raise ValueError(
            f"{source} is in Megatron's format {kind}, but only torch_dist and the legacy format can be imported: load "
            "it in Megatron, and save it with --ckpt-format torch_dist"
        )
    return source if kind or [*source.glob(f"mp_rank_*/{_SHARD}")] else None


def import_megatron(source: Path, folder: Path, tag: str, vocab_size: int | None = None) -> list[str]:
    """Read the weights of a Megatron checkpoint, and write them as a checkpoint. Optimizer state is left out.

    Args:
        source: the folder of one iteration, as ``find_megatron`` returns it.
        folder, tag: folder of checkpoints to write to, and the new checkpoint's name.
        vocab_size: number of tokens, without the rows that pad the embedding. None: the checkpoint's own number or, if
            it has none, all rows.

    Returns:
        The names that were left out, with the reason.

    Raises:
        ValueError: a file cannot be read, or the model is not one that triax has. The message says which argument of
            Megatron differs.
        RuntimeError: the checkpoint could not be written.
    """
    tensors, args, iteration = _distributed(source) if (source / ".metadata").is_file() else _legacy(source)
    model, llama = _model(args, tensors, vocab_size)
    fields = model["fields"]
    snapshot = Snapshot()
    taken: set[str] = set()
    for name, value in _weights(tensors, fields, llama, bool(args.get("apply_layernorm_1p")), taken):
        snapshot.add(f"{WEIGHTS}/{name}", value)
    left = [f"{name} (triax's {model['class'].removesuffix('Config')} has no such weight)" for name in tensors]
    left = [text for text, name in zip(left, tensors, strict=True) if name not in taken]
    if fields["tie_word_embeddings"]:
        left = [text for text in left if not text.startswith("output_layer.weight ")]  # the embedding again
    if left:
        raise ValueError(f"the checkpoint has weights that the model of its arguments does not have: {', '.join(left)}")
    write_whole(folder, tag, snapshot, {"global_steps": iteration}, f"Megatron-LM, {source}", model)
    rows = tensors["embedding.word_embeddings.weight"]().shape[0] - fields["vocab_size"]
    return ["the optimizer's state", *([f"{rows} rows that pad the vocabulary"] if rows else [])]


def _distributed(source: Path) -> tuple[Tensors, Inert, int]:
    """Return tensors, arguments and iteration of a checkpoint in the format torch_dist."""
    dcp = DcpFolder(source)
    common: Any = None
    if (source / "common.pt").is_file():
        common = read_torch_file(source / "common.pt")
    else:  # newer versions
        name = next((name for name in dcp.objects if name.startswith("common_state/")), None)
        if name is not None:
            common = dcp.read_object(name)
            common = common[0] if isinstance(common, list) else common
    if not isinstance(common, dict) or not isinstance(common.get("args"), Inert):
        raise ValueError(f"{source} has no arguments of a training run: its common.pt is missing or is not Megatron's")
    readers: dict[str, Callable[[], Tensor]] = {}
    for stored, shape in dcp.shapes.items():
        name = _renamed(stored)
        if name.startswith(("optimizer", "chained_", "rng_state", "rerun")) or _NO_WEIGHT.search(name):
            continue
        if name.startswith("decoder.layers.") and not name.split(".")[2].isdigit():
            for layer in range(shape[0]):  # all layers in one tensor
                numbered = name.replace("decoder.layers.", f"decoder.layers.{layer}.", 1)
                readers[numbered] = partial(dcp.read_row, stored, layer)
        else:
            readers[name] = partial(dcp.read_tensor, stored)
    for name in [name for name in readers if name.endswith("_w")]:  # gate and up apart
        gate, up = readers.pop(name), readers.pop(f"{name[:-1]}v")
        readers[name[:-2]] = partial(lambda gate, up: torch.cat([gate(), up()]), gate, up)
    return readers, common["args"], int(common.get("iteration") or 0)


def _legacy(source: Path) -> tuple[Tensors, Inert, int]:
    """Return tensors, arguments and iteration of a checkpoint with a file for each tensor rank and pipe rank."""
    shards: dict[tuple[int, int], dict[str, Any]] = {}  # (pipe, tensor) -> content
    for path in source.glob(f"mp_rank_*/{_SHARD}"):
        numbers = [*map(int, path.parent.name.removeprefix("mp_rank_").split("_"))]
        if len(numbers) > 2:
            raise ValueError(f"{path.parent} is of a model with experts, which cannot be imported")
        shards[numbers[1] if len(numbers) > 1 else 0, numbers[0]] = read_torch_file(path)
    first = shards.get((0, 0))
    if first is None or not isinstance(first.get("args"), Inert):
        raise ValueError(f"{source} has no file mp_rank_00[_000]/{_SHARD} with the arguments of a training run")
    if float(first.get("checkpoint_version") or 0) < 2:
        raise ValueError(
            f"{source} has version {first.get('checkpoint_version')} of the format, whose order of queries, keys and "
            "values differs: load it in a newer Megatron, and save it again"
        )
    pipes, size = max(pipe for pipe, _ in shards) + 1, max(tensor for _, tensor in shards) + 1
    missing = [(pipe, tensor) for pipe in range(pipes) for tensor in range(size) if (pipe, tensor) not in shards]
    if missing:
        raise ValueError(f"{source} lacks mp_rank_{missing[0][1]:02d}_{missing[0][0]:03d}/{_SHARD}: copy all folders")
    chunks = sorted((key for key in first if re.fullmatch(r"model\d*", key)), key=lambda key: int(key[5:] or 0))
    gated = bool(first["args"].get("swiglu"))
    readers: dict[str, Callable[[], Tensor]] = {}
    before = 0  # layers of the chunks before
    for chunk in chunks:
        for pipe in range(pipes):
            ranks = [_flat(shards[pipe, tensor][chunk]) for tensor in range(size)]
            count = 0
            for name in ranks[0]:
                match = re.match(r"decoder\.layers\.(\d+)\.", name)
                global_name = name
                if match is not None:
                    count = max(count, int(match[1]) + 1)
                    global_name = f"decoder.layers.{before + int(match[1])}.{name[match.end() :]}"
                readers.setdefault(global_name, partial(_joined, name, [rank[name] for rank in ranks], gated))
            before += count
    return readers, first["args"], int(first.get("iteration") or 0)


def _flat(model: Mapping[str, Any], prefix: str = "") -> dict[str, Tensor]:
    """Return the tensors of a nested dict of a tensor rank, under Megatron-core's names."""
    tensors: dict[str, Tensor] = {}
    for key, value in model.items():
        if isinstance(value, Mapping):
            tensors |= _flat(value, f"{prefix}{key}.")
        elif isinstance(value, Tensor) and not _NO_WEIGHT.search(name := _renamed(f"{prefix}{key}")):
            tensors[name] = value
    return tensors


def _renamed(name: str) -> str:
    for pattern, new in _TABLES["names"].items():
        name = re.sub(pattern, new, name)
    return name


def _joined(name: str, parts: list[Tensor], gated: bool) -> Tensor:
    """Return a whole tensor, given the shards of the tensor ranks."""
    if ".mlp.linear_fc1." in name and gated:  # each shard has its gate, then its up
        return torch.cat([half for index in (0, 1) for half in (part.chunk(2)[index] for part in parts)])
    if _BY_ROWS.search(name):
        return torch.cat(parts)
    return torch.cat(parts, dim=1) if _BY_COLUMNS.search(name) else parts[0]


def _model(args: Inert, tensors: Tensors, vocab_size: int | None) -> tuple[dict[str, Any], bool]:
    """Return the description of triax's model, and True for a Llama.

    Raises:
        ValueError: Megatron's arguments describe another model.
    """
    for key, allowed in _TABLES["needs"].items():
        if args.get(key) not in (allowed, None):
            raise ValueError(f"the model has {key}={args.get(key)!r}, which triax's models do not have")
    given = {
        "normalization": args.get("normalization") or "LayerNorm",
        "position_embedding_type": args.get("position_embedding_type") or "learned_absolute",
        "swiglu": bool(args.get("swiglu")),
        "add_bias_linear": args.get("add_bias_linear", not args.get("disable_bias_linear", False)),
    }
    heads, width = int(args.get("num_attention_heads")), int(args.get("hidden_size"))
    groups = int(args.get("num_query_groups") or heads) if args.get("group_query_attention") else heads
    hidden, dim = int(args.get("ffn_hidden_size") or 4 * width), int(args.get("kv_channels") or width // heads)
    plain = groups == heads and dim * heads == width and hidden % width == 0 and not args.get("qk_layernorm")
    if given != _LLAMA and not (given == _GPT and plain):
        shown = ", ".join(f"{key}={value!r}" for key, value in given.items())
        raise ValueError(
            f"the model has {shown}, {groups} query groups of {heads} heads. triax's GPT has {_GPT} and one query "
            f"group per head, and its Llama has {_LLAMA}. Other models cannot be imported."
        )
    llama = given == _LLAMA
    if not llama and args.get("bias_gelu_fusion") is False and not args.get("openai_gelu"):
        raise ValueError(
            "the model has bias_gelu_fusion=False without openai_gelu, which is GELU by the error function, but "
            "triax's GPT computes GELU by tanh. It cannot be imported."
        )
    padded = tensors["embedding.word_embeddings.weight"]().shape[0]
    vocabulary = int(vocab_size or args.get("vocab_size") or padded)
    if vocabulary > padded:
        raise ValueError(f"the vocabulary has {vocabulary} tokens, but the embedding only {padded} rows")
    fields: dict[str, Any] = {
        "vocab_size": vocabulary,
        "max_position_embeddings": int(args.get("max_position_embeddings")),
        "hidden_size": width,
        "num_hidden_layers": int(args.get("num_layers")),
        "num_attention_heads": heads,
        "dropout": float(args.get("hidden_dropout") or 0.0),
        "tie_word_embeddings": not args.get("untie_embeddings_and_output_weights"),
    }
    epsilon = float(args.get("norm_epsilon") or args.get("layernorm_epsilon") or 1e-5)
    if not llama:
        return {
            "class": "GPTConfig",
            "fields": fields | {"mlp_ratio": hidden // width, "layer_norm_epsilon": epsilon},
        }, False
    scaling = None
    if args.get("use_rope_scaling"):
        scaling = {"factor": float(args.get("rope_scaling_factor") or 8.0)}
    return {
        "class": "LlamaConfig",
        "fields": fields
        | {
            "num_key_value_heads": groups,
            "head_dim": dim,
            "intermediate_size": hidden,
            "rms_norm_eps": epsilon,
            "rope_theta": float(args.get("rotary_base") or 1e4),
            "rope_scaling": scaling,
            "qkv_bias": bool(args.get("add_qkv_bias")),
            "qk_norm": bool(args.get("qk_layernorm")),
        },
    }, True


def _weights(
    tensors: Tensors, fields: Mapping[str, Any], llama: bool, zero_centered: bool, taken: set[str]
) -> Iterator[tuple[str, Tensor]]:
    """Yield triax's name and the value of each weight.

    Args:
        tensors: Megatron's.
        fields: of the model's configuration.
        llama: True for a Llama, False for a GPT.
        zero_centered: norms are stored as their difference from 1.
        taken: gets the names of Megatron's tensors that are used.

    Raises:
        ValueError: a tensor is missing.
    """

    def read(name: str, optional: bool = False) -> Tensor | None:
        if name not in tensors:
            if optional:
                return None
            raise ValueError(f"the checkpoint has no {name}")
        taken.add(name)
        value = tensors[name]()
        return value + 1 if zero_centered and name.endswith("layernorm.weight") else value

    def both(theirs: str, ours: str, change: Callable[[Tensor], Tensor] = lambda x: x) -> Iterator[tuple[str, Tensor]]:
        for kind in ("weight", "bias"):
            value = read(f"{theirs}.{kind}", optional=kind == "bias")
            if value is not None:
                yield f"{ours}.{kind}", change(value)

    layers, words = fields["num_hidden_layers"], fields["vocab_size"]
    first = 1 if llama else 2
    yield from both("embedding.word_embeddings", "layers.0", lambda x: x[:words])
    if not llama:
        yield from both("embedding.position_embeddings", "layers.1")
    for layer in range(layers):
        theirs, ours = f"decoder.layers.{layer}", f"layers.{layer + first}"
        yield from both(f"{theirs}.input_layernorm", f"{ours}.norm1")
        yield from both(f"{theirs}.pre_mlp_layernorm", f"{ours}.norm2")
        yield from both(f"{theirs}.self_attention.linear_proj", f"{ours}.attention.out")
        yield from both(f"{theirs}.mlp.linear_fc1", f"{ours}.mlp.{'gate_up' if llama else 'up'}")
        yield from both(f"{theirs}.mlp.linear_fc2", f"{ours}.mlp.down")
        for name, fused in both(f"{theirs}.self_attention.linear_qkv", ours):
            kind = name.rpartition(".")[2]
            q, k, v = _split(fused, fields["num_attention_heads"], fields.get("num_key_value_heads"))
            if llama:
                yield f"{ours}.attention.q.{kind}", q
                yield f"{ours}.attention.kv.{kind}", torch.cat([k, v])
            else:
                yield f"{ours}.attention.qkv.{kind}", torch.cat([q, k, v])
        if fields.get("qk_norm"):
            for letter in "qk":
                yield from both(f"{theirs}.self_attention.{letter}_layernorm", f"{ours}.attention.{letter}_norm")
    yield from both("decoder.final_layernorm", f"layers.{layers + first}")
    if not fields["tie_word_embeddings"]:
        yield from both("output_layer", f"layers.{layers + first + 1}", lambda x: x[:words])


def _split(fused: Tensor, heads: int, groups: int | None) -> list[Tensor]:
    """Return queries, keys and values, given rows that are ordered by query group: its queries, its key, its value."""
    groups = groups or heads
    heads_per_group = heads // groups
    grouped = fused.unflatten(0, (groups, heads_per_group + 2, -1))  # (groups, heads + 2, head_dim, ...)
    return [part.flatten(0, 2) for part in grouped.split([heads_per_group, 1, 1], dim=1)]
