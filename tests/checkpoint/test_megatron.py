"""Import of Megatron-LM's checkpoints, which are built here by other code: logits equal those of the original model.

The formats are those that Megatron writes: two tensor ranks, two pipe ranks, a padded vocabulary, queries, keys and
values by query group, gate and up in each shard, and classes of Megatron in the arguments.
"""

from __future__ import annotations

import argparse
import enum
import json
import pickle
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

import triax
from triax.checkpoint.convert.inert import Inert, read_pickle, read_torch_file

from support.command_line import output_of, run_triax

WORDS, PADDED, LAYERS, T = 51, 64, 4, 2
CONFIGS: dict[str, Any] = {
    "gpt": triax.GPTConfig(WORDS, 16, 32, LAYERS, 4),
    "llama": triax.LlamaConfig(WORDS, 16, 32, LAYERS, 8, 4, 24),
    "qwen": triax.LlamaConfig(WORDS, 16, 32, LAYERS, 8, 2, 24, 8, qkv_bias=True, tie_word_embeddings=True),
}


def original(case: str) -> Any:
    config = CONFIGS[case]
    layers = triax.gpt_layers(config) if case == "gpt" else triax.llama_layers(config)
    module = triax.PipelineModule(layers, grid=triax.Grid(), seed=7)
    with torch.no_grad():
        for index, parameter in enumerate(module.parameters()):
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(index)), alpha=0.1)
    return module.eval()


def logits_of(module: Any) -> Tensor:
    with torch.no_grad():
        logits: Tensor = module(torch.arange(24).view(2, 12) * 2)
    return logits


def whole_weights(case: str) -> dict[str, Tensor]:
    """Megatron-core's names, with each layer's number in the model, and the whole tensors; the vocabulary padded."""
    config, given = CONFIGS[case], dict(original(case).named_parameters())
    ours = {name: parameter.detach() for name, parameter in given.items()}
    first = 2 if case == "gpt" else 1

    def padded(rows: Tensor) -> Tensor:
        return torch.cat([rows, torch.full((PADDED - WORDS, rows.shape[1]), 9.0)])

    found = {"embedding.word_embeddings.weight": padded(ours["layers.0.weight"])}
    if case == "gpt":
        found["embedding.position_embeddings.weight"] = ours["layers.1.weight"]
    heads = config.num_attention_heads
    groups = heads if case == "gpt" else config.num_key_value_heads
    dim = config.head_dim
    for layer in range(LAYERS):
        there, here = f"decoder.layers.{layer}", f"layers.{layer + first}"
        for kind in ("weight", "bias"):
            if f"{here}.norm1.{kind}" in ours:
                found[f"{there}.input_layernorm.{kind}"] = ours[f"{here}.norm1.{kind}"]
                found[f"{there}.pre_mlp_layernorm.{kind}"] = ours[f"{here}.norm2.{kind}"]
            if f"{here}.attention.out.{kind}" in ours:
                found[f"{there}.self_attention.linear_proj.{kind}"] = ours[f"{here}.attention.out.{kind}"]
            for mlp, name in (("up", "linear_fc1"), ("gate_up", "linear_fc1"), ("down", "linear_fc2")):
                if f"{here}.mlp.{mlp}.{kind}" in ours:
                    found[f"{there}.mlp.{name}.{kind}"] = ours[f"{here}.mlp.{mlp}.{kind}"]
            if f"{here}.attention.qkv.{kind}" in ours:
                q, k, v = ours[f"{here}.attention.qkv.{kind}"].chunk(3)
            elif f"{here}.attention.q.{kind}" in ours:
                q, (k, v) = ours[f"{here}.attention.q.{kind}"], ours[f"{here}.attention.kv.{kind}"].chunk(2)
            else:
                continue
            rows: list[Tensor] = []
            for group in range(groups):
                for head in range(group * heads // groups, (group + 1) * heads // groups):
                    rows += q[head * dim : (head + 1) * dim]
                rows += k[group * dim : (group + 1) * dim]
                rows += v[group * dim : (group + 1) * dim]
            found[f"{there}.self_attention.linear_qkv.{kind}"] = torch.stack(rows)
    for kind in ("weight", "bias"):
        if f"layers.{LAYERS + first}.{kind}" in ours:
            found[f"decoder.final_layernorm.{kind}"] = ours[f"layers.{LAYERS + first}.{kind}"]
    if f"layers.{LAYERS + first + 1}.weight" in ours:
        found["output_layer.weight"] = padded(ours[f"layers.{LAYERS + first + 1}.weight"])
    return found


def shard(name: str, whole: Tensor, rank: int, gated: bool) -> Tensor:
    """A tensor rank's part."""
    if "linear_fc1" in name and gated:
        gate, up = whole.chunk(2)
        return torch.cat([gate.chunk(T)[rank], up.chunk(T)[rank]])
    if any(part in name for part in ("linear_qkv", "linear_fc1", "word_embeddings", "output_layer")):
        return whole.chunk(T)[rank]
    if name.endswith(("linear_proj.weight", "linear_fc2.weight")):
        return whole.chunk(T, dim=1)[rank]
    return whole


class ModelType(enum.Enum):
    encoder_or_decoder = 1


@dataclass
class MCoreMetadata(Metadata):
    mcore_data: Any = None


@pytest.fixture
def megatron() -> Iterator[None]:
    """Modules in which Megatron's classes lie while a checkpoint is written. They are gone when it is read."""
    places = {"megatron.core.enums": ModelType, "megatron.core.dist_checkpointing.strategies.torch": MCoreMetadata}
    before = {cls: cls.__module__ for cls in places.values()}
    for name, cls in places.items():
        words = name.split(".")
        for stop in range(1, len(words) + 1):
            sys.modules.setdefault(".".join(words[:stop]), types.ModuleType(".".join(words[:stop])))
        setattr(sys.modules[name], cls.__name__, cls)
        cls.__module__ = name
    yield
    forget()
    for cls, place in before.items():
        cls.__module__ = place


def forget() -> None:
    for name in [name for name in sys.modules if name.startswith("megatron")]:
        del sys.modules[name]


def arguments(case: str, **more: Any) -> argparse.Namespace:
    config, llama = CONFIGS[case], case != "gpt"
    return argparse.Namespace(
        num_layers=LAYERS,
        hidden_size=32,
        ffn_hidden_size=24 if llama else 128,
        num_attention_heads=config.num_attention_heads,
        group_query_attention=llama,
        num_query_groups=config.num_key_value_heads if llama else 1,
        kv_channels=config.head_dim,
        max_position_embeddings=16,
        padded_vocab_size=PADDED,
        position_embedding_type="rope" if llama else "learned_absolute",
        normalization="RMSNorm" if llama else "LayerNorm",
        norm_epsilon=1e-5,
        swiglu=llama,
        add_bias_linear=not llama,
        add_qkv_bias=case == "qwen",
        untie_embeddings_and_output_weights=not config.tie_word_embeddings,
        hidden_dropout=0.0,
        bias_gelu_fusion=not llama,
        rotary_base=10000,
        params_dtype=torch.float32,
        model_type=ModelType.encoder_or_decoder,
        save=Path("/somewhere"),
        **more,
    )


def older(name: str) -> tuple[str, ...]:
    """The path of a tensor in a model of before Megatron-core."""
    for new, old in (
        ("decoder.layers", "encoder.layers"),
        ("decoder.final_layernorm", "encoder.final_norm"),
        ("linear_qkv", "query_key_value"),
        ("linear_proj", "dense"),
        ("input_layernorm", "input_norm"),
        ("pre_mlp_layernorm", "post_attention_norm"),
        ("linear_fc1", "dense_h_to_4h"),
        ("linear_fc2", "dense_4h_to_h"),
    ):
        name = name.replace(new, old)
    head, _, rest = name.partition(".")
    if head == "embedding":
        return "language_model", "embedding", *rest.split(".")
    return "language_model", head, rest


def write_legacy(folder: Path, case: str, names: str, virtual: int) -> Path:
    """``mp_rank_TT_PPP/model_optim_rng.pt`` for two pipe ranks, with ``virtual`` chunks of layers on each."""
    weights, pipes = whole_weights(case), 2
    each = LAYERS // pipes // virtual
    for pipe in range(pipes):
        for rank in range(T):
            content: dict[str, Any] = {"args": arguments(case), "checkpoint_version": 3.0, "iteration": 40}
            for chunk in range(virtual):
                model: dict[str, Any] = {}
                begin = (chunk * pipes + pipe) * each
                for name, whole in weights.items():
                    part, local = shard(name, whole, rank, case != "gpt").clone(), name
                    if name.startswith("decoder.layers."):
                        layer = int(name.split(".")[2])
                        if not begin <= layer < begin + each:
                            continue
                        local = name.replace(f"layers.{layer}.", f"layers.{layer - begin}.")
                    elif (begin > 0) if name.startswith("embedding") else (begin + each < LAYERS):
                        continue
                    if names == "old":
                        *above, last = older(local)
                        inner = model
                        for key in above:
                            inner = inner.setdefault(key, {})
                        inner[last] = part
                        continue
                    if names == "transformer engine":
                        local = local.replace("input_layernorm.", "self_attention.linear_qkv.layer_norm_")
                        local = local.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")
                        model["decoder.layers.0.mlp.linear_fc1._extra_state"] = None
                    model[local] = part
                content["model" if virtual == 1 else f"model{chunk}"] = model
            place = folder / "iter_0000040" / f"mp_rank_{rank:02d}_{pipe:03d}"
            place.mkdir(parents=True)
            torch.save(content, place / "model_optim_rng.pt")
    (folder / "latest_checkpointed_iteration.txt").write_text("40")
    return folder


def write_distributed(folder: Path, case: str, stacked: bool) -> Path:
    """``torch_dist``: parts of two tensor ranks; stacked layers and ``common.pt``, or both as of late."""
    place, gated = folder / "iter_0000040", case != "gpt"
    place.mkdir(parents=True)
    entries: dict[str, Any] = {}
    stored: dict[MetadataIndex, _StorageInfo] = {}
    file = (place / "__0_0.distcp").open("wb")

    def put(name: str, offset: tuple[int, ...] | None, value: Any) -> None:
        begin = file.tell()
        torch.save(value, file)
        index = MetadataIndex(name, None if offset is None else torch.Size(offset))
        stored[index] = _StorageInfo("__0_0.distcp", begin, file.tell() - begin)

    def tensor(name: str, whole: Tensor, pieces: list[tuple[tuple[int, ...], Tensor]]) -> None:
        chunks = [ChunkStorageMetadata(torch.Size(at), part.shape) for at, part in pieces]
        if name not in entries:
            entries[name] = TensorStorageMetadata(TensorProperties(dtype=whole.dtype), whole.shape, [])
        entries[name].chunks.extend(chunks)
        for at, part in pieces:
            put(name, at, part.clone())

    for name, whole in whole_weights(case).items():
        halves, at = [(0,) * whole.dim()], [whole]
        if "linear_fc1" in name and gated and not stacked:  # gate and up apart
            for letter, half in zip("wv", whole.chunk(2), strict=True):
                tensor(f"{name}_{letter}", half, [((0, 0), half[:7]), ((7, 0), half[7:])])
            continue
        if whole.dim() == 2 and "position" not in name:
            at = [*whole.chunk(2)]
            halves = [(0, 0), (len(at[0]), 0)]
        layer = name.split(".")[2] if name.startswith("decoder.layers.") else None
        if stacked and layer is not None:
            joined = name.replace(f"layers.{layer}.", "layers.")
            tall = whole.expand(LAYERS, *whole.shape)
            tensor(joined, tall, [((int(layer), *h), part[None]) for h, part in zip(halves, at, strict=True)])
        else:
            tensor(name, whole, list(zip(halves, at, strict=True)))
    tensor("optimizer.state.exp_avg.output_layer.weight", torch.zeros(2, 2), [((0, 0), torch.zeros(2, 2))])
    common = {"args": arguments(case), "iteration": 40, "checkpoint_version": 3.0}
    if stacked:
        torch.save(common, place / "common.pt")
    else:
        entries["common_state/shard_0_1"] = BytesStorageMetadata()
        put("common_state/shard_0_1", None, [common])
    file.close()
    with (place / ".metadata").open("wb") as opened:
        pickle.dump(MCoreMetadata(entries, None, stored, mcore_data={}), opened)
    (place / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1}))
    (folder / "latest_checkpointed_iteration.txt").write_text("40")
    return folder


def check_import(source: Path, case: str, tmp_path: Path) -> None:
    forget()
    output = output_of("checkpoint", "import", source, tmp_path / "ours", "--vocab-size", WORDS, columns=200)
    assert f"{PADDED - WORDS} rows that pad the vocabulary" in output
    config = CONFIGS[case]
    layers = triax.gpt_layers(config) if case == "gpt" else triax.llama_layers(config)
    module = triax.PipelineModule(layers, grid=triax.Grid(), seed=1)
    triax.load_weights(module, tmp_path / "ours")
    assert torch.equal(logits_of(module.eval()), logits_of(original(case)))


@pytest.mark.usefixtures("megatron")
@pytest.mark.parametrize(
    ("case", "names", "virtual"),
    [
        ("gpt", "old", 1),
        pytest.param("llama", "core", 2, marks=pytest.mark.exhaustive),
        pytest.param("qwen", "transformer engine", 1, marks=pytest.mark.exhaustive),
        pytest.param("gpt", "core", 2, marks=pytest.mark.exhaustive),
    ],
)
def test_legacy_megatron_checkpoints_give_equal_logits(tmp_path: Path, case: str, names: str, virtual: int) -> None:
    check_import(write_legacy(tmp_path / "theirs", case, names, virtual), case, tmp_path)


@pytest.mark.usefixtures("megatron")
@pytest.mark.parametrize(
    ("case", "stacked"),
    [("llama", True)]
    + [
        pytest.param(case, stacked, marks=pytest.mark.exhaustive)
        for case, stacked in [("gpt", True), ("gpt", False), ("llama", False), ("qwen", True), ("qwen", False)]
    ],
)
def test_torch_dist_megatron_checkpoints_give_equal_logits(tmp_path: Path, case: str, stacked: bool) -> None:
    check_import(write_distributed(tmp_path / "theirs", case, stacked), case, tmp_path)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("megatron")
def test_imported_megatron_checkpoints_export_to_hugging_face(tmp_path: Path) -> None:
    import transformers

    check_import(write_distributed(tmp_path / "theirs", "llama", True), "llama", tmp_path)
    output_of("checkpoint", "export", tmp_path / "ours", tmp_path / "hf", "--format", "hf")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    with torch.no_grad():
        logits = model(torch.arange(24).view(2, 12) * 2).logits
    torch.testing.assert_close(logits, logits_of(original("llama")), rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("megatron")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_experts": 8}, "num_experts=8"),
        pytest.param({"swiglu": False}, "swiglu=False", marks=pytest.mark.exhaustive),
        pytest.param({"rotary_percent": 0.5}, "rotary_percent=0.5", marks=pytest.mark.exhaustive),
    ],
)
def test_unsupported_megatron_models_are_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    folder = write_distributed(tmp_path / "theirs", "llama", True) / "iter_0000040"
    args = argparse.Namespace(**{**vars(arguments("llama")), **change})
    torch.save({"args": args, "iteration": 40}, folder / "common.pt")
    forget()
    code, output = run_triax("checkpoint", "import", folder, tmp_path / "ours")
    assert code == 2 and message in output


ran: list[str] = []


def test_reading_a_pickle_never_runs_its_code(tmp_path: Path) -> None:
    class Calls:
        def __reduce__(self) -> Any:
            return exec, ("import test_megatron; test_megatron.ran.append('ran')",)

    for protocol in (2, 4, 5):
        good = (1, -(2**70), "two", [3.5, None, True], {"a": ()})
        found = read_pickle(pickle.dumps({"evil": Calls(), "good": good}, protocol))
        assert found["good"] == good
        assert isinstance(found["evil"], Inert)
        assert found["evil"].name.endswith(".exec")
    torch.save({"evil": Calls(), "good": torch.ones(2)}, tmp_path / "file.pt")
    found = read_torch_file(tmp_path / "file.pt")
    assert isinstance(found["evil"], Inert)
    assert torch.equal(found["good"], torch.ones(2))
    assert not ran


def test_reading_a_damaged_pickle_raises_an_error(tmp_path: Path) -> None:
    data = pickle.dumps({"a": [1, 2], "b": argparse.Namespace(c=3)})
    for stop in range(len(data) - 1):
        with pytest.raises(ValueError, match="cannot be read"):
            read_pickle(data[:stop])
    (tmp_path / "file.pt").write_bytes(b"no zip file")
    with pytest.raises(ValueError, match="cannot be read"):
        read_torch_file(tmp_path / "file.pt")
