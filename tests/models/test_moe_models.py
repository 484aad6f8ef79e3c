"""Mixtures of experts of Hugging Face's families: logits and gradients against transformers' own, on every axis."""

from __future__ import annotations

import json
import re
import tomllib
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

import triax
from triax import hf_layers
from triax.cli.model_folder import family
from triax.context.order import gather
from triax.grid import Grid
from triax.models.config import DeepseekConfig, EncoderConfig, MixtralConfig, YarnScaling, config_from_fields
from triax.models.deepseek import deepseek_layers
from triax.models.encoder_decoder_config import EncoderDecoderFields
from triax.models.huggingface import reader
from triax.models.huggingface.config import INDEXED, entries, from_hf, read_config, text_part, to_hf
from triax.models.huggingface.export import export
from triax.models.huggingface.families import FAMILIES, WRAPPERS
from triax.models.huggingface.load import config_from_hf, load_hf
from triax.models.huggingface.names import expand
from triax.models.huggingface.save import save_hf, wrapping
from triax.models.layers import NextTokenLoss
from triax.models.mixtral import mixtral_layers
from triax.tensor_parallel import gather_logits
from triax.testing.pool import RankFailure

from support.exact_norms import exact
from support.huggingface_models import read_back
from support.paths import DOCS
from support.toy_families import COMMON, DENSE, HYBRIDS, VOCABULARY
from support.toy_families import MIXTURES as CASES

ROWS, LENGTH = 4, 14


def make(case: str, **changes: Any) -> Any:
    """A random model in fp64, whose weights are too large to be nearly linear, and no norm 1."""
    import transformers

    family, options = CASES[case]
    cls: Any = getattr(transformers, f"{family}ForCausalLM")
    config = cls.config_class(**COMMON | options | changes)
    torch.manual_seed(3)
    model = cls(config).double()
    # As much in Gated DeltaNet's convolutions and gates would multiply fp32's roundings, transformers' own too.
    factor = 4 if case.startswith("qwen3_next") else 8
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(factor if parameter.dim() > 1 else 1).add_(torch.randn_like(parameter), alpha=0.1)
        for name, held in (*model.named_buffers(), *model.named_parameters()):
            if "correction_bias" in name:  # numbers that fp32 has exactly
                held.copy_(torch.randn_like(held).mul(32).round() / 64)
    return model


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    ids, labels = (torch.randint(VOCABULARY, (ROWS, LENGTH), generator=generator) for _ in range(2))
    labels[:, ::5] = -100
    return ids, labels


@dataclass(frozen=True)
class Cell:
    """A model of Hugging Face on a grid."""

    case: str
    pipe: int = 1
    data: int = 1
    tensor: int = 1
    context: int = 1
    expert: int = 1
    sequence_parallel: bool = False
    kind: str = "ring"
    stage: int = 0

    @property
    def ranks(self) -> int:
        return self.pipe * self.data * self.tensor * self.context


def run(cells: list[Cell], folder: str) -> list[dict[str, Any]]:
    torch.set_default_dtype(torch.float64)
    try:
        return [train(cell, f"{folder}/{cell.case}", f"{folder}/{number}") for number, cell in enumerate(cells)]
    finally:
        torch.set_default_dtype(torch.float32)


def train(cell: Cell, folder: str, out: str) -> dict[str, Any]:
    """Load, count what was read, run, save, and train a step."""
    read = 0
    plain = reader._Folder.read_slice

    def counted(self: Any, name: str, part: tuple[slice, ...]) -> Tensor:
        nonlocal read
        tensor = plain(self, name, part)
        read += tensor.nbytes
        return tensor

    grid = Grid(cell.pipe, cell.data, cell.tensor, context=cell.context, expert=cell.expert)
    config = config_from_hf(folder)
    layers = config.layers(sequence_parallel=cell.sequence_parallel, attention=cell.kind)

    def logits_of(x: Tensor) -> Tensor:
        return gather(gather_logits(x, grid=grid, vocab_size=VOCABULARY), grid.context, LENGTH)

    reader._Folder.read_slice = counted  # type: ignore[method-assign]
    try:
        model = triax.PipelineModule(
            load_hf(folder, layers),
            grid=grid,
            loss_fn=NextTokenLoss(grid, VOCABULARY),
            output_fn=logits_of,
            device="meta",
        )
        table = entries(None, read_config(Path(folder)))
        stored = [buffer for name, buffer in model.named_buffers() if name in table]  # biases of routers
        share = sum(x.numel() * 8 for x in [*model.parameters(), *stored])
        settings = {
            "train_batch_size": ROWS,
            "gradient_accumulation_steps": ROWS // cell.data,
            "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
            "zero_optimization": {"stage": cell.stage},
        }
        engine, *_ = triax.initialize(model=model, config=settings)
    finally:
        reader._Folder.read_slice = plain  # type: ignore[method-assign]
    ids, labels = batch()
    each = ROWS // cell.data
    mine = slice(grid.data.rank * each, (grid.data.rank + 1) * each)
    _, outputs = engine.eval_batch(iter([(ids[mine], labels[mine])]), return_logits=True, num_micro_batches=1)
    save_hf(engine, out)
    loss = engine.train_batch(iter([(ids[i : i + 1], labels[i : i + 1]) for i in range(ROWS)[mine]]))
    gradients = engine.gather("gradients")
    found = {"read": read, "share": share, "logits": outputs[0], "rows": mine}
    return found if grid.rank else {**found, "loss": float(loss), "gradients": gradients}


def wanted(model: Any, length: int = LENGTH) -> tuple[Tensor, float, dict[str, Tensor]]:
    """Logits, the loss, and the gradients with the auxiliary loss, by transformers on one process."""
    ids, labels = (each[:, :length] for each in batch())
    with exact(model):
        output = model(input_ids=ids)
        loss = F.cross_entropy(output.logits.flatten(0, 1), labels.flatten())
        total = loss
        coefficient = getattr(model.config, "router_aux_loss_coef", 0.0)
        if coefficient:
            losses = [model(input_ids=row[None], output_router_logits=True).aux_loss for row in ids]
            total = total + coefficient * torch.stack(losses).mean()
    total.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    return output.logits.detach(), loss.item(), gradients


def assert_as_transformers(ranks: Any, folder: Path, cells: list[Cell]) -> None:
    import transformers

    for cell in cells:
        make(cell.case).save_pretrained(folder / cell.case)
    (count,) = {cell.ranks for cell in cells}
    reference = {case: wanted(make(case)) for case in dict.fromkeys(cell.case for cell in cells)}
    by_rank = ranks(count, run, cells, str(folder), timeout=300)
    for number, (cell, *found) in enumerate(zip(cells, *by_rank, strict=True)):
        logits, loss, gradients = reference[cell.case]
        for rank in found:
            torch.testing.assert_close(rank["logits"], logits[rank["rows"]], rtol=1e-10, atol=1e-10, msg=str(cell))
            assert rank["read"] == rank["share"], cell  # each rank reads its own experts and shards only
        assert found[0]["loss"] == pytest.approx(loss, rel=1e-10), cell
        # The gradients by their names, through the tables that save_hf uses.
        written: Any = transformers.AutoModelForCausalLM.from_config(make(cell.case).config).double()
        layers = config_from_hf(written).layers()
        model = triax.PipelineModule(layers, grid=Grid(), dtype=torch.float64)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(found[0]["gradients"][name])
        save_hf(model, folder / "gradients")
        same_as(folder / "gradients", gradients, cell, exactly=False)
        same_as(folder / str(number), dict(make(cell.case).state_dict()), cell)


def same_as(folder: Path, tensors: dict[str, Tensor], cell: Cell, exactly: bool = True) -> None:
    """Check what transformers reads from a folder."""
    model, stored = read_back(folder, dtype=torch.float64), load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        found = model.state_dict()[name]
        if found.dtype == torch.float32:  # transformers rounds some, such as a router's weight: what the file has
            found = stored.get(name, found).double()
        bounds = (0.0, 0.0) if exactly else (1e-10, 1e-11)
        torch.testing.assert_close(found, tensor, rtol=bounds[0], atol=bounds[1], msg=f"{cell} {name}: {{}}".format)


# Each family, on two ranks or on four.
TWO = [
    Cell("olmoe", context=2, expert=2, kind="gather"),
    Cell("qwen2_moe-window", data=2, expert=2, stage=1),
    Cell("llama4_text-mixed", tensor=2, sequence_parallel=True),
    Cell("qwen3_next", context=2, expert=2),
]
FOUR = [
    Cell("mixtral", pipe=2, tensor=2),
    Cell("qwen3_moe", data=2, tensor=2, expert=2, sequence_parallel=True, stage=3),
    Cell("gpt_oss", tensor=2, context=2, expert=2, sequence_parallel=True),
    Cell("deepseek_v3", tensor=2, context=2, expert=2, sequence_parallel=True),
]
MORE_FOUR = [
    Cell("olmoe", tensor=2, context=2, expert=2, kind="gather"),
    Cell("qwen2_moe-window", data=2, tensor=2, expert=2, stage=1),
    Cell("llama4_text-mixed", tensor=2, context=2, expert=2, sequence_parallel=True),
    Cell("qwen3_next", tensor=2, context=2, expert=2),
]


@pytest.mark.parametrize(
    "cells", [TWO, FOUR, pytest.param(MORE_FOUR, marks=pytest.mark.exhaustive)], ids=["two", "four", "more"]
)
def test_weights_of_moe_models_load_and_save_bit_by_bit(ranks: Any, tmp_path: Path, cells: list[Cell]) -> None:
    """Logits and gradients to 1e-10; each rank reads its share to the byte, and saves bitwise what it loaded."""
    assert_as_transformers(ranks, tmp_path, cells)


PLACES: list[dict[str, Any]] = [
    {"pipe": 2, "tensor": 2, "data": 2, "expert": 2},
    {"pipe": 2, "context": 2, "data": 2, "expert": 2},
    {"tensor": 2, "context": 2, "data": 2, "expert": 2, "sequence_parallel": True},
    {"tensor": 4, "context": 2, "expert": 2},
]


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", CASES)
def test_each_moe_family_loads_trains_and_saves_on_8_ranks(ranks: Any, tmp_path: Path, case: str) -> None:
    kinds = ("ring", "gather", "ulysses")
    cells = [Cell(case, **place, kind=kinds[i % 3], stage=i) for i, place in enumerate(PLACES)]
    if case in ("olmoe-grouped", "minimax_m2-partial", "flex_olmo-biases"):  # norms over all of 2 heads of keys
        cells = [cell for cell in cells if cell.tensor * cell.context <= 2]
    assert_as_transformers(ranks, tmp_path, cells)


@pytest.mark.parametrize("case", CASES)
def test_a_live_models_logits_in_fp32_are_transformers(case: str) -> None:
    model = make(case).float().eval()
    grid = Grid()
    mine = triax.PipelineModule(load_hf(model), grid=grid)
    ids, _ = batch()
    with torch.no_grad():
        torch.testing.assert_close(mine(ids), model(input_ids=ids).logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_moe_configurations_survive_a_round_trip(case: str) -> None:
    config = config_from_hf(make(case))
    assert from_hf(to_hf(config)) == config


def generated(sizes: tuple[int, int, int], folder: str, prompts: list[list[int]]) -> list[list[int]]:
    model = triax.PipelineModule(load_hf(folder), grid=Grid(*sizes), device="meta")
    model.fill()
    return triax.init_inference(model, max_length=20).generate(prompts, max_new_tokens=6, temperature=0)


def assert_generates_as_transformers(tmp_path: Path, case: str, run: Any, sizes: tuple[int, int, int]) -> None:
    model = make(case).float().eval()
    model.save_pretrained(tmp_path / case)
    prompts = [[3, 1, 4, 1, 5, 9, 2], [6, 5, 3, 5, 8, 9, 7, 9, 3]]
    found = run(sizes, str(tmp_path / case), prompts)
    for prompt, tokens in zip(prompts, found, strict=True):
        theirs = model.generate(torch.tensor([prompt]), max_new_tokens=6, do_sample=False)
        assert tokens == theirs[0].tolist()


GENERATING = ["mixtral-window", "qwen2_moe-window", "qwen3_next", "gpt_oss", "gpt_oss-plain", "olmoe-grouped"]
GENERATING += ["glm4_moe", "dots1-window", "exaone_moe-mixed", "minimax_m2-partial", "ernie4_5_moe-interval"]
GENERATING += ["llama4_text", "llama4_text-mixed"]
GENERATING += ["deepseek_v2-yarn", "deepseek_v3"]


@pytest.mark.parametrize("case", GENERATING)
def test_moe_models_generate_as_transformers(tmp_path: Path, case: str) -> None:
    assert_generates_as_transformers(tmp_path, case, generated, (1, 1, 1))


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", CASES)
def test_moe_models_generate_as_transformers_on_8_ranks(ranks: Any, tmp_path: Path, case: str) -> None:
    def run(*args: Any) -> Any:
        return ranks(8, generated, *args, timeout=120)[-1]

    assert_generates_as_transformers(tmp_path, case, run, (2, 2, 2))


def piped(cases: list[str], folder: str, sizes: dict[str, Any]) -> list[dict[str, Any]]:
    """Train a step with ``hf_layers``, transformers' own blocks."""
    found = []
    for case in cases:
        grid, (ids, labels) = Grid(**sizes), (each[:, :EVEN] for each in batch())
        layers = hf_layers(make(case, router_aux_loss_coef=0.0), attention="gather")
        pipe = triax.PipelineModule(layers, grid=grid, loss_fn=NextTokenLoss(grid, VOCABULARY), dtype=torch.float64)
        settings = {"train_batch_size": ROWS, "optimizer": {"type": "SGD", "params": {"lr": 0.0}}}
        mine = slice(grid.data.rank * ROWS // grid.data.size, (grid.data.rank + 1) * ROWS // grid.data.size)
        microbatches = list(zip(ids[mine].chunk(2), labels[mine].chunk(2), strict=True))
        engine, *_ = triax.initialize(model=pipe, config=settings | {"gradient_accumulation_steps": 2})
        save_hf(engine, f"{folder}/{case}")
        with exact(pipe):
            loss = engine.train_batch(iter(microbatches))
        table: Any = wrapping(pipe).names()
        live = {ours: form[-1] if isinstance(form, list) else form for ours, form in table.items()}  # not of files
        theirs = expand(live, int((COMMON | CASES[case][1])["num_hidden_layers"]))
        gradients = {theirs[ours].theirs[0]: gradient for ours, gradient in engine.gather("gradients").items()}
        found.append({"loss": float(loss), "gradients": gradients})
    return found


def assert_blocks_train_as_transformers(ranks: Any, folder: Path, cases: list[str], count: int, **sizes: int) -> None:
    for case, found in zip(cases, ranks(count, piped, cases, str(folder), sizes, timeout=300)[0], strict=True):
        _, loss, gradients = wanted(make(case, router_aux_loss_coef=0.0), EVEN)
        assert found["loss"] == pytest.approx(loss, rel=1e-10), case
        assert found["gradients"].keys() == gradients.keys(), case
        for name, gradient in gradients.items():
            told = f"{case} {name}: {{}}".format
            torch.testing.assert_close(found["gradients"][name], gradient, rtol=1e-10, atol=1e-11, msg=told)
        same_as(folder / case, dict(make(case).state_dict()), Cell(case))


EVEN = 12  # tokens of a row that context=2 can cut
PIPED = ["qwen3_moe-step", "gpt_oss", "exaone_moe", "deepseek_v3"]


def test_transformers_moe_blocks_train_on_two_stages(ranks: Any, tmp_path: Path) -> None:
    assert_blocks_train_as_transformers(ranks, tmp_path, PIPED, 2, pipe=2)


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
@pytest.mark.parametrize("sizes", [{"pipe": 2}, {"data": 2}, {"context": 2}], ids=str)
def test_every_transformers_moe_block_trains_as_in_transformers(
    ranks: Any, tmp_path: Path, sizes: dict[str, int]
) -> None:
    kept = [case for case in CASES if not case.startswith("qwen3_next")]  # a hybrid: refused below
    kept = [case for case in kept if "context" not in sizes or "llama4" not in case]  # see the next test
    assert_blocks_train_as_transformers(ranks, tmp_path, kept, 2, **sizes)


def test_transformers_own_blocks_have_no_chunks_over_the_context_axis(ranks: Any) -> None:
    with pytest.raises(
        RankFailure, match=r"cannot spread attention in chunks \(attention_chunk_size=5\) over context=2"
    ):
        ranks(2, piped, ["llama4_text"], "", {"context": 2})


@pytest.mark.parametrize("case", ["gpt_oss", "llama4_text", "llama4_text-mixed"])
def test_moe_models_treat_packed_documents_separately(case: str) -> None:
    """Sinks, chunks and temperatures of packed documents are those of the documents one by one."""
    model = triax.PipelineModule(load_hf(make(case)), grid=Grid(), dtype=torch.float64)
    ids, _ = batch()
    documents = torch.tensor([[0] * 9 + [1] * (LENGTH - 9)]).expand(ROWS, -1).contiguous()
    with torch.no_grad():
        together, apart = model((ids, documents)), [model(ids[:, :9]), model(ids[:, 9:])]
    torch.testing.assert_close(together, torch.cat(apart, 1), rtol=1e-10, atol=1e-10)


def test_deepseek_v32_is_read_in_its_dense_form(tmp_path: Path) -> None:
    """Rows that the indexer does not shorten have transformers' logits and gradients; it is saved as a DeepSeek-V3."""
    import transformers

    options = COMMON | CASES["deepseek_v3"][1] | {"index_topk": 32, "index_head_dim": 8, "index_n_heads": 2}
    torch.manual_seed(3)
    model = transformers.DeepseekV32ForCausalLM(transformers.DeepseekV32Config(**options)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8 if parameter.dim() > 1 else 1).add_(torch.randn_like(parameter), alpha=0.1)
    model.save_pretrained(tmp_path / "theirs")
    ids, labels = batch()
    for source in (tmp_path / "theirs", model):
        mine = triax.PipelineModule(load_hf(source), grid=Grid(), dtype=torch.float64)
        found = mine(ids)
        with exact(model):
            right = model(input_ids=ids).logits
            torch.testing.assert_close(found, right, rtol=1e-10, atol=1e-10)
            loss = F.cross_entropy(right.flatten(0, 1), labels.flatten())
            model.zero_grad()
            loss.backward()
        F.cross_entropy(found.flatten(0, 1), labels.flatten()).backward()
        embedding = next(iter(mine.parameters())).grad
        assert embedding is not None and model.model.embed_tokens.weight.grad is not None
        torch.testing.assert_close(embedding, model.model.embed_tokens.weight.grad, rtol=1e-10, atol=1e-10)
    save_hf(mine, tmp_path / "ours")
    about = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert (about["model_type"], about["architectures"]) == ("deepseek_v3", ["DeepseekV3ForCausalLM"])
    theirs, ours = (load_file(tmp_path / name / "model.safetensors") for name in ("theirs", "ours"))
    assert {name for name in theirs if ".indexer." not in name} == ours.keys()
    assert all(torch.equal(theirs[name], ours[name]) for name in ours)
    bad = json.loads((tmp_path / "theirs" / "config.json").read_text()) | {"mlp_layer_types": ["sparse", "dense"]}
    with pytest.raises(ValueError, match="mlp_layer_types must have 'dense' for the first blocks"):
        text_part(bad)


def test_kimi_k2_folders_load_and_save_as_deepseek_v3(tmp_path: Path) -> None:
    """transformers has no such model: its folder as Moonshot publishes it, without fp8, and its weights come back."""
    model = make("deepseek_v3").eval()
    model.save_pretrained(tmp_path / "theirs")
    file = tmp_path / "theirs" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_type": "kimi_k2", "aux_loss_alpha": 0.0}))
    mine = triax.PipelineModule(load_hf(tmp_path / "theirs"), grid=Grid(), dtype=torch.float64)
    ids, _ = batch()
    with torch.no_grad():
        found = mine(ids)
        with exact(model):
            torch.testing.assert_close(found, model(input_ids=ids).logits, rtol=1e-10, atol=1e-10)
    save_hf(mine, tmp_path / "ours")
    theirs, ours = (load_file(tmp_path / name / "model.safetensors") for name in ("theirs", "ours"))
    assert theirs.keys() == ours.keys() and all(torch.equal(theirs[name], ours[name]) for name in theirs)
    about = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert (about["model_type"], about["architectures"]) == ("kimi_k2", ["DeepseekV3ForCausalLM"])


def test_transformers_own_blocks_have_no_load_balancing_loss() -> None:
    with pytest.raises(ValueError, match="hf_layers does not add the load-balancing loss, but router_aux_loss_coef is"):
        hf_layers(make("mixtral", router_aux_loss_coef=0.25))
    with pytest.raises(ValueError, match="but the model is of the family 'qwen3_next'"):
        hf_layers(make("qwen3_next"))


CONFIG = MixtralConfig.preset("mixtral-tiny")
DEEPSEEK = DeepseekConfig.preset("deepseek-tiny")


def of(case: str, **keys: Any) -> Any:
    """The configuration of a case, with other keys in its config.json."""
    return from_hf(make(case).config.to_dict() | keys)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: replace(CONFIG, num_experts_per_tok=5), "num_experts_per_tok is 5, but there are 4 experts"),
        (lambda: replace(CONFIG, decoder_sparse_step=3), "no block of 2 has experts"),
        (lambda: replace(CONFIG, mlp_only_layers=(2,)), "mlp_only_layers has 2, but the blocks are 0 to 1"),
        (lambda: replace(CONFIG, qk_norm=True, qk_norm_all_heads=True), "qk_norm is True and qk_norm_all_heads"),
        (lambda: replace(CONFIG, clip_qkv=0.0), "clip_qkv = 0.0"),
        (lambda: replace(CONFIG, router_aux_loss_coef=-1.0), "router_aux_loss_coef = -1.0"),
        (lambda: replace(DEEPSEEK, topk_group=5), "topk_group=5 of n_group=4"),
        (lambda: replace(DEEPSEEK, first_k_dense_replace=2), "first_k_dense_replace is 2, but there are 2"),
        (lambda: replace(DEEPSEEK, qk_rope_head_dim=3), "qk_rope_head_dim is 3"),
        (lambda: replace(DEEPSEEK, scoring_func="max"), "scoring_func = 'max'"),  # type: ignore[arg-type]
        (lambda: replace(DEEPSEEK, q_lora_rank=0), "q_lora_rank = 0"),
        (lambda: replace(DEEPSEEK, sliding_window=4), "sliding_window is 4"),
        (lambda: YarnScaling(factor=0.5), "factor is 0.5"),
        (lambda: YarnScaling(beta_slow=40.0), "beta_slow is 40.0"),
        (lambda: mixtral_layers(CONFIG, ballance="bias"), "decoder_layers has no option ballance"),
        (lambda: deepseek_layers(DEEPSEEK, top_k=2), "deepseek_layers has no option top_k"),
        (lambda: to_hf(replace(CONFIG, clip_qkv=1.0)), "Hugging Face's Mixtral has no clip_qkv"),
        (lambda: to_hf(replace(CONFIG, mlp_only_layers=(0,))), "Mixtral has no mlp_only_layers"),
        (lambda: to_hf(replace(CONFIG, qk_norm_all_heads=True, sliding_window=4)), "Olmoe has no sliding_window"),
        (lambda: to_hf(replace(DEEPSEEK, scoring_func="softmax")), "DeepseekV2 has no norm_topk_prob=True"),
        (lambda: replace(CONFIG, n_group=3), "num_experts=4 cannot be chosen from topk_group=1 of n_group=3"),
        (lambda: replace(CONFIG, scoring_func="max"), "scoring_func = 'max'"),  # type: ignore[arg-type]
        (lambda: replace(CONFIG, swiglu_limit=-1.0), "swiglu_limit = -1.0"),
        (lambda: replace(CONFIG, swiglu_limit=7.0, shared_expert_intermediate_size=8), "swiglu_limit is 7.0 and"),
        (lambda: replace(CONFIG, moe_bias=True, shared_expert_intermediate_size=8), "moe_bias is True and"),
        (lambda: replace(CONFIG, shared_expert_intermediate_size=-8), "shared_expert_intermediate_size = -8"),
        (lambda: replace(CONFIG, attention_chunk_size=0), "attention_chunk_size = 0"),
        (lambda: replace(CONFIG, attention_chunk_size=8, sliding_window=4), "sliding_window is 4 and attention_chunk"),
        (lambda: replace(CONFIG, layer_types=("chunked_attention", "full_attention")), "attention_chunk_size is None"),
        (lambda: of("minimax_m2", output_router_logits=True), "minimax_m2 with output_router_logits=True"),
        (lambda: of("ernie4_5_moe", output_router_logits=True), "ernie4_5_moe with output_router_logits=True"),
        (lambda: of("ernie4_5_moe", moe_norm_min=0.5), "ernie4_5_moe with moe_norm_min=0.5"),
        (
            lambda: of("ernie4_5_moe", moe_layer_interval=0),
            "moe_layer_interval is 0, but must be a whole number, 1 or more",
        ),
        (lambda: of("ernie4_5_moe", moe_layer_start_index=None), "moe_layer_start_index is None"),
        (lambda: of("glm4_moe", n_shared_experts="2"), "n_shared_experts is '2'"),
        (lambda: of("glm4_moe", n_shared_experts=0), "n_shared_experts is 0, but must be a whole number, 1 or more"),
        (lambda: of("exaone_moe", layer_types=None, sliding_window_pattern="LG"), "sliding_window_pattern is 'LG'"),
        (lambda: of("llama4_text", moe_layers=None, interleave_moe_layer_step=0), "interleave_moe_layer_step is 0"),
        (lambda: of("glm4_moe", first_k_dense_replace=9), "no block of 2 has experts"),
        (lambda: of("exaone_moe", mlp_layer_types=["dense"]), "mlp_layer_types must be a list of 'dense' and 'sparse'"),
        (lambda: of("solar_open", partial_rotary_factor=0.5), "solar_open with partial_rotary_factor=0.5"),
        (lambda: of("llama4_text", moe_layers="all"), "moe_layers is all, but must be a list"),
        (lambda: of("gpt_oss", attention_dropout=0.1), "gpt_oss with attention_dropout=0.1"),
        (lambda: from_hf(to_hf(CONFIG) | {"attention_bias": True}), "mixtral with attention_bias=True"),
        (lambda: from_hf(to_hf(CONFIG) | {"router_jitter_noise": 0.1}), "router_jitter_noise=0.1"),
        (lambda: from_hf(to_hf(DEEPSEEK) | {"seq_aux": False}), "deepseek_v3 with seq_aux=False"),
        (lambda: from_hf(to_hf(DEEPSEEK) | {"quantization_config": {}}), "quantization_config={}"),
    ],
)
def test_moe_models_refuse_options_they_lack(call: Any, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=re.escape(message)):
        call()


def test_save_hf_refuses_a_selection_bias_that_a_family_lacks(tmp_path: Path) -> None:
    model = triax.PipelineModule(mixtral_layers(CONFIG, balance="bias"), grid=Grid())
    save_hf(model, tmp_path / "zero")  # as transformers' model, which has none
    (name, bias), *_ = ((name, b) for name, b in model.named_buffers() if name.endswith("correction_bias"))
    bias[0] = 0.5
    with pytest.raises(ValueError, match=f"{name} is not 0, but Hugging Face's mixtral has no bias"):
        save_hf(model, tmp_path / "bias")


@pytest.mark.parametrize("config", [CONFIG, DEEPSEEK, replace(DEEPSEEK, rope_scaling=YarnScaling())], ids=str)
def test_a_configuration_is_read_from_a_checkpoints_fields(config: Any) -> None:
    saved = json.loads(json.dumps(asdict(config)))
    assert config_from_fields(type(config).__name__, saved) == config


@pytest.mark.parametrize("family", ["exaone4", "exaone_moe"])
def test_an_unused_sliding_window_is_left_out_of_the_config(family: str) -> None:
    """EXAONE's blocks without a window have no rotary positions, but in a model without windows all have them."""
    from transformers import AutoConfig

    experts = {} if family == "exaone4" else {"num_experts": 4, "moe_intermediate_size": 8, "first_k_dense_replace": 0}
    about = AutoConfig.for_model(
        family,
        **COMMON | {"layer_types": ["full_attention"] * 2, "sliding_window": 9, "num_key_value_heads": 2} | experts,
    )
    config: Any = from_hf(about.to_dict())
    assert config.no_rope_layers == (0, 0) and config.sliding_window is None
    assert from_hf(to_hf(config)) == config


# model_type of config.json: of the toy models, as transformers names them, and of those that no toy model has.
MODEL_TYPES = {family for family, _ in (DENSE | HYBRIDS).values()} | {case.partition("-")[0] for case in CASES}
MODEL_TYPES |= {"deepseek_v32", "gemma3", "kimi_k2"}


@pytest.mark.parametrize("model_type", sorted(MODEL_TYPES))
def test_triax_generate_reads_a_folder_of_each_model_type(model_type: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    assert family(tmp_path) is load_hf


def test_pyproject_declares_an_entry_point_of_each_family() -> None:
    declared = tomllib.loads((DOCS.parent / "pyproject.toml").read_text())["project"]["entry-points"]["triax.models"]
    assert declared == dict.fromkeys(MODEL_TYPES, "triax.models.huggingface.load:load_hf")
    others = EncoderConfig, EncoderDecoderFields  # they do not generate
    read = {name for name, each in FAMILIES.items() if each.config is not None and not issubclass(each.config, others)}
    assert declared.keys() == read | {*WRAPPERS, INDEXED}


@pytest.mark.parametrize("config", [CONFIG, DEEPSEEK, "gpt_oss", "glm4_moe"], ids=str)
def test_a_moe_checkpoint_is_exported_in_transformers_names(tmp_path: Path, config: Any) -> None:
    """Weights and biases under transformers' names; the loads of the step before are left out."""
    config = config_from_hf(make(config)) if isinstance(config, str) else config
    layers = config.layers(balance="batch")
    model = triax.PipelineModule(layers, grid=Grid()).eval()
    for name, buffer in model.named_buffers():
        if name.endswith("correction_bias"):
            buffer.copy_(torch.linspace(-0.5, 0.5, buffer.numel()))
    held = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    shapes = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in held.items()}
    about = {"class": type(config).__name__, "fields": json.loads(json.dumps(asdict(config)))}
    export(about, shapes, lambda name: held[name].detach(), tmp_path)
    ids, _ = batch()
    with torch.no_grad():
        torch.testing.assert_close(read_back(tmp_path)(input_ids=ids).logits, model(ids), rtol=0, atol=1e-5)
