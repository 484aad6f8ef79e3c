"""Every family of ``families.py`` against transformers: logits and gradients, at pipe 2 and tensor 2, and back again.

The models are of toy size, with random weights. The table in docs/models.md is this file's (``table``).
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

import triax
from triax import Grid, PipelineModule, hf_layers
from triax.grid import layout_of
from triax.models import EncoderConfig, T5Config
from triax.models.huggingface.config import entries, from_hf, read_config, to_hf
from triax.models.huggingface.families import FAMILIES
from triax.models.huggingface.load import config_from_hf, load_hf
from triax.models.huggingface.parallelize import parallelize
from triax.models.huggingface.save import save_hf, wrapping
from triax.models.layers import NextTokenLoss
from triax.tensor_parallel import gather_logits
from triax.tensor_parallel.plans import Column, Row

from support.encoder_models import CASES as ENCODER_CASES
from support.exact_norms import exact
from support.huggingface_models import read_back
from support.paths import DOCS
from support.toy_families import DENSE, HYBRIDS, MIXTURES, NOT_GENERATED, NOT_LISTED, NOT_SHARDED, T5, VOCABULARY

CASES = DENSE | HYBRIDS
Sizes = tuple[int, int, int]  # pipe, data, tensor

ROWS, LENGTH = 2, 14  # a length that two tensor ranks share evenly


def make(case: str, **changes: Any) -> Any:
    """A random model in fp64 in which no bias is 0 and no norm 1."""
    import transformers

    family, options = CASES[case]
    torch.manual_seed(3)
    config = transformers.AutoConfig.for_model(family, **options | changes)
    torch.set_default_dtype(torch.float64)
    try:
        model = getattr(transformers, FAMILIES[family].architecture)(config)
    finally:
        torch.set_default_dtype(torch.float32)
    for module in model.modules():
        if hasattr(module, "embed_positions") and family == "gptj":  # sines, which transformers computes in fp32
            table = transformers.models.gptj.modeling_gptj.create_sinusoidal_positions
            module.embed_positions = table(module.max_positions, module.pos_embd_dim)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4 if parameter.dim() > 1 else 1).add_(torch.randn_like(parameter), alpha=0.05)
            parameter.data = parameter.double()  # a few are of fp32 in any model
    return model


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    ids, labels = (torch.randint(4, VOCABULARY, (ROWS, LENGTH), generator=generator) for _ in range(2))
    labels[:, ::5] = -100
    return ids, labels


def wanted(case: str) -> dict[str, Any]:
    """Logits, the loss and its gradients, by transformers on one process."""
    model, (ids, labels) = make(case), batch()
    with exact(model):
        logits = model(input_ids=ids).logits
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return {"logits": logits.detach(), "loss": loss.item(), "gradients": gradients}


def require_equal(found: dict[str, Any], right: dict[str, Any], what: str) -> None:
    torch.testing.assert_close(found["logits"], right["logits"], rtol=1e-10, atol=1e-10, msg=f"{what}: {{}}".format)
    assert found["loss"] == pytest.approx(right["loss"], rel=1e-10), what
    assert found["gradients"].keys() == right["gradients"].keys(), what
    for name, gradient in right["gradients"].items():
        told = f"{what} {name}: {{}}".format
        torch.testing.assert_close(found["gradients"][name], gradient, rtol=1e-10, atol=1e-11, msg=told)


def by_their_names(gradients: dict[str, Tensor], config: dict[str, Any]) -> dict[str, Tensor]:
    """Gradients of triax's parameters under transformers' names, through the family's table."""
    table = entries(None, config)
    found: dict[str, Tensor] = {}
    for ours, gradient in gradients.items():
        entry = table[ours]
        if entry.rows:
            whole = found.setdefault(entry.theirs[0], torch.full((entry.of, *gradient.shape[1:]), torch.nan).double())
            for piece, (start, stop) in zip(gradient.split([b - a for a, b in entry.rows]), entry.rows, strict=True):
                whole[start:stop] = piece
        else:
            pieces = gradient.unbind() if entry.per_expert else gradient.chunk(len(entry.theirs))
            for name, piece in zip(entry.theirs, pieces, strict=True):
                found[name] = piece.t() if entry.transposed else piece
    return found


# ---------------------------------------------------------------------------------------------------- on ranks

_SETTINGS: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": ROWS,
    "optimizer": {"type": "SGD", "params": {"lr": 0.0}},
}


def loaded(cases: list[str], sizes: Sizes, folder: str, sequence_parallel: bool) -> list[dict[str, Any]]:
    """Load each case's folder with ``load_hf`` on a grid, train a step and save the model again."""
    return [_loaded(case, Grid(*sizes), f"{folder}/{case}", sequence_parallel) for case in cases]


def _loaded(case: str, grid: Grid, folder: str, sequence_parallel: bool) -> dict[str, Any]:
    model = PipelineModule(
        load_hf(f"{folder}/model", sequence_parallel=sequence_parallel),
        grid=grid,
        loss_fn=NextTokenLoss(grid, VOCABULARY),
        output_fn=lambda x: gather_logits(x, grid=grid, vocab_size=VOCABULARY),
        device="meta",
        dtype=torch.float64,
    )
    found = _trained(model, f"{folder}/saved")
    return found | {"gradients": by_their_names(found["gradients"], read_config(Path(f"{folder}/model")))}


def _trained(model: Any, folder: str) -> dict[str, Any]:
    engine, *_ = triax.initialize(model=model, config=_SETTINGS)
    ids, labels = batch()
    _, outputs = engine.eval_batch(iter([(ids, labels)]), return_logits=True, num_micro_batches=1)
    save_hf(engine, folder)
    loss = engine.train_batch(iter([(ids, labels)]))
    return {"logits": outputs[0], "loss": float(loss), "gradients": engine.gather("gradients")}


def whole_logits_loss(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return total, torch.count_nonzero(labels != -100)


def piped(cases: list[str], folder: str, pipe: int, tensor: int) -> list[dict[str, Any]]:
    """Train a step with ``hf_layers`` on stages and tensor ranks."""
    found = []
    for case in cases:
        model, grid = make(case), Grid(pipe=pipe, tensor=tensor)
        module = PipelineModule(hf_layers(model), grid=grid, loss_fn=whole_logits_loss)
        with exact(module):
            each = _trained(module, f"{folder}/{case}/piped")
        table = entries(wrapping(module).names(), model.config.to_dict())
        each["gradients"] = {table[name].theirs[0]: gradient for name, gradient in each["gradients"].items()}
        found.append(each)
    return found


def parallelized(cases: list[str]) -> list[dict[str, Any]]:
    """Train a step with transformers' model on two tensor ranks."""
    found = []
    for case in cases:
        grid, (ids, labels) = Grid(tensor=2), batch()
        model = parallelize(make(case), grid)
        with exact(model):
            logits = model(input_ids=ids).logits
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        loss.backward()
        gradients = {n: layout_of(p).gather(grid.tensor, p.grad) for n, p in model.named_parameters()}
        found.append({"logits": logits.detach(), "loss": loss.item(), "gradients": gradients})
    return found


def generated(cases: list[str], sizes: Sizes, folder: str, prompts: list[list[int]]) -> list[Any]:
    found = []
    for case in cases:
        model = PipelineModule(load_hf(f"{folder}/{case}/model"), grid=Grid(*sizes), dtype=torch.float64)
        found.append(triax.init_inference(model, max_length=20).generate(prompts, max_new_tokens=6, temperature=0))
    return found


# -------------------------------------------------------------------------------------------------------- tests

PIPE_AND_TENSOR = (2, 1, 2)


def require_loaded_equal_transformers(
    ranks: Any, folder: Path, cases: list[str], sizes: Sizes, sequence_parallel: bool = False
) -> None:
    for case in cases:
        make(case).save_pretrained(folder / case / "model")
    right = {case: wanted(case) for case in cases}
    count = math.prod(sizes)
    for rank in ranks(count, loaded, cases, sizes, str(folder), sequence_parallel, timeout=300):
        for case, found in zip(cases, rank, strict=True):
            require_equal(found, right[case], case)
    for case in cases:
        same_as(folder / case / "saved", case)


def same_as(folder: Path, case: str) -> None:
    """Check that transformers reads a folder as the same model, bitwise."""
    model, right = read_back(folder, dtype=torch.float64), make(case)
    assert type(model) is type(right)
    for name, tensor in right.state_dict().items():
        assert torch.equal(model.state_dict()[name].to(tensor.dtype), tensor), f"{case} {name}"
    ids, _ = batch()
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(input_ids=ids).logits, right.eval()(input_ids=ids).logits)


def require_piped_equal_transformers(ranks: Any, folder: Path, cases: list[str], pipe: int, tensor: int) -> None:
    run = ranks(pipe * tensor, piped, cases, str(folder), pipe, tensor, timeout=300)
    for case, found in zip(cases, run[-1], strict=True):
        require_equal(found, wanted(case), f"{case}, hf_layers")
        same_as(folder / case / "piped", case)


def require_parallelized_equal_transformers(ranks: Any, cases: list[str]) -> None:
    right = {case: wanted(case) for case in cases}
    for rank in ranks(2, parallelized, cases, timeout=300):
        for case, found in zip(cases, rank, strict=True):
            require_equal(found, right[case], f"{case}, parallelize")


def require_generated_equal_transformers(run: Any, folder: Path, cases: list[str], sizes: Sizes) -> None:
    prompts = [[3, 1, 4, 1, 5, 9, 2], [6, 5, 3, 5, 8, 9, 7, 9, 3]]
    for case in cases:
        make(case).save_pretrained(folder / case / "model")
    for case, texts in zip(cases, run(cases, sizes, str(folder), prompts), strict=True):
        model = make(case).eval()
        for prompt, tokens in zip(prompts, texts, strict=True):
            with exact(model):
                theirs = model.generate(torch.tensor([prompt]), max_new_tokens=6, do_sample=False)
            assert tokens == theirs[0].tolist(), case


REPRESENTATIVE = ["mistral", "gemma2", "gpt_neox", "falcon", "qwen3_5_text", "nemotron_h"]
REPRESENTATIVE += ["granite", "cohere2", "stablelm-norms", "opt-350m", "bloom", "nanochat"]


# The others of them on two ranks: `make test-all` has every family on every grid.
@pytest.mark.parametrize(
    ("cases", "sizes"),
    [(REPRESENTATIVE[::3], PIPE_AND_TENSOR), (REPRESENTATIVE[1::3], (2, 1, 1)), (REPRESENTATIVE[2::3], (1, 1, 2))],
)
def test_representative_families_load_as_in_transformers(
    ranks: Any, tmp_path: Path, cases: list[str], sizes: Sizes
) -> None:
    require_loaded_equal_transformers(ranks, tmp_path, cases, sizes)


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
@pytest.mark.parametrize("sizes", [(2, 1, 1), (1, 1, 2), PIPE_AND_TENSOR], ids=str)
def test_every_family_loads_and_saves_as_transformers(ranks: Any, tmp_path: Path, sizes: Sizes) -> None:
    require_loaded_equal_transformers(ranks, tmp_path, list(CASES), sizes)


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
def test_every_family_runs_with_sequence_parallelism(ranks: Any, tmp_path: Path) -> None:
    require_loaded_equal_transformers(ranks, tmp_path, list(CASES), (1, 1, 2), sequence_parallel=True)


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("pipe", "tensor"), [(2, 1), (1, 2), (2, 2)])
def test_hf_layers_of_every_family_train_as_transformers(ranks: Any, tmp_path: Path, pipe: int, tensor: int) -> None:
    unlisted = {*NOT_LISTED, *(NOT_SHARDED if tensor > 1 else ())}
    require_piped_equal_transformers(ranks, tmp_path, [case for case in DENSE if case not in unlisted], pipe, tensor)


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
def test_parallelized_families_train_as_transformers(ranks: Any) -> None:
    planned = [case for case, (family, _) in DENSE.items() if FAMILIES[family].plan is not None]
    require_parallelized_equal_transformers(ranks, [case for case in planned if case not in NOT_SHARDED])


@pytest.mark.parametrize("case", NOT_SHARDED)
def test_settings_that_a_plan_does_not_shard_are_refused(case: str) -> None:
    with pytest.raises(ValueError, match=f"{NOT_SHARDED[case]}.*load_hf"):
        parallelize(make(case), Grid())


@pytest.mark.parametrize("case", NOT_LISTED)
def test_settings_that_hf_layers_does_not_run_are_refused(case: str) -> None:
    with pytest.raises(ValueError, match=f"hf_layers does not implement {NOT_LISTED[case]}"):
        hf_layers(make(case))


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
def test_every_family_generates_as_transformers(ranks: Any, tmp_path: Path) -> None:
    def on_four(*args: Any) -> Any:
        return ranks(4, generated, *args, timeout=300)[-1]

    cases = [case for case in CASES if case not in NOT_GENERATED]
    require_generated_equal_transformers(generated, tmp_path, cases, (1, 1, 1))
    require_generated_equal_transformers(on_four, tmp_path, cases, PIPE_AND_TENSOR)


@pytest.mark.parametrize("case", NOT_GENERATED)
def test_generation_that_would_change_earlier_keys_is_refused(case: str) -> None:
    model = PipelineModule(load_hf(make(case)), grid=Grid(), dtype=torch.float64)
    with pytest.raises(ValueError, match=r"\b8\b"):
        triax.init_inference(model, max_length=20)


def wrapped() -> tuple[Any, Any]:
    """A multimodal Gemma 3 with random weights in fp64, and the configuration of its language model."""
    import transformers

    text = {**CASES["gemma3_text"][1], "rope_parameters": None, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    vision = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 8, "patch_size": 4}
    tokens: dict[str, Any] = {
        "boi_token_index": 1,
        "eoi_token_index": 2,
        "image_token_index": 3,
        "mm_tokens_per_image": 4,
    }
    torch.manual_seed(3)
    config = transformers.Gemma3Config(text_config=text, vision_config=vision, **tokens)
    torch.set_default_dtype(torch.float64)
    try:
        return transformers.Gemma3ForConditionalGeneration(config), config.text_config
    finally:
        torch.set_default_dtype(torch.float32)


FIRST = {family: case for case, (family, _) in reversed(CASES.items())}  # one case of each family


@pytest.mark.parametrize(
    "cases", [["gpt2", "gemma", "nemotron_h"], pytest.param([*FIRST.values()], marks=pytest.mark.exhaustive)], ids=len
)
def test_an_untied_output_layer_is_loaded_from_a_tied_config(tmp_path: Path, cases: list[str]) -> None:
    """transformers 5 ties only weights that are one tensor or equal. The folder and the live model are loaded."""
    import transformers

    for case in cases:
        model = make(case, tie_word_embeddings=True).eval()
        head = model.get_output_embeddings()
        head.weight = nn.Parameter(torch.randn_like(head.weight))
        model.config.tie_word_embeddings = True
        folder, again, (ids, _) = tmp_path / case, tmp_path / f"{case}-again", batch()
        model.config.save_pretrained(folder)
        weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
        save_file(weights, folder / "model.safetensors")
        with exact(model):
            wanted = model(ids, use_cache=False).logits
        for source in (folder, model):
            mine = PipelineModule(load_hf(source), grid=Grid()).eval()
            torch.testing.assert_close(mine(ids), wanted, rtol=1e-10, atol=1e-10, msg=case)
            save_hf(mine, again)
            theirs = transformers.AutoModelForCausalLM.from_pretrained(again, dtype=torch.float64).eval()
            for name, weight in model.named_parameters():
                assert torch.equal(theirs.get_parameter(name), weight), (case, name)
        if case in ("gpt2", "gemma"):
            listed = PipelineModule(hf_layers(folder), grid=Grid()).eval()
            with exact(listed):
                torch.testing.assert_close(listed(ids), wanted, rtol=1e-10, atol=1e-10, msg=case)


def test_a_hybrid_without_attention_layers_is_loaded() -> None:
    """The settings of attention, such as the rotated share of a head, then belong to no layer."""
    model = make("qwen3_5_text", layer_types=["linear_attention"] * 4).eval()
    ids, _ = batch()
    with exact(model):
        wanted = model(ids, use_cache=False).logits
    mine = PipelineModule(load_hf(model), grid=Grid()).eval()
    torch.testing.assert_close(mine(ids), wanted, rtol=1e-10, atol=1e-10)


def test_the_text_part_of_a_multimodal_model_is_loaded(tmp_path: Path) -> None:
    """It is loaded from the folder and from the live model, and saved as a model of text."""
    import transformers

    whole, text = wrapped()
    whole.save_pretrained(tmp_path / "whole")
    names = safe_open(tmp_path / "whole" / "model.safetensors", "pt").keys()
    assert {name.partition(".")[0] for name in names} >= {"language_model", "vision_tower"}
    ids, _ = batch()
    with torch.no_grad(), exact(whole):
        right = whole.eval()(input_ids=ids, token_type_ids=torch.zeros_like(ids)).logits
    for source in (tmp_path / "whole", whole):
        model = PipelineModule(load_hf(source), grid=Grid(), dtype=torch.float64).eval()
        with torch.no_grad():
            torch.testing.assert_close(model(ids), right, rtol=1e-10, atol=1e-10)
        save_hf(model, tmp_path / "text")
    saved = transformers.Gemma3ForCausalLM.from_pretrained(tmp_path / "text", dtype=torch.float64)
    for name, tensor in saved.model.state_dict().items():
        assert torch.equal(tensor, whole.model.language_model.state_dict()[name]), name
    assert from_hf(saved.config.to_dict()) == from_hf(text.to_dict() | {"tie_word_embeddings": True})


# ----------------------------------------------------------------------------------------- encoders, parallelize

_ENCODER: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "intermediate_size": 44,
    "hidden_size": 32,
    "num_hidden_layers": 2,
}
_ENCODER |= {"num_attention_heads": 4, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
# Name -> transformers' class and its options.
ENCODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertForMaskedLM", _ENCODER),
    "roberta": ("RobertaForMaskedLM", _ENCODER | {"max_position_embeddings": 40}),
    "t5": ("T5ForConditionalGeneration", T5),
    "t5-gated": ("T5ForConditionalGeneration", T5 | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    "vit": (
        "ViTForImageClassification",
        {name: value for name, value in _ENCODER.items() if name != "vocab_size"} | {"image_size": 8, "patch_size": 4},
    ),
}


def encoder(case: str) -> tuple[Any, dict[str, Tensor]]:
    """A random encoder in fp64, and an input."""
    import transformers

    kind, options = ENCODERS[case]
    torch.manual_seed(3)
    made: Any = getattr(transformers, kind)
    model = made(made.config_class(**options)).double()
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(4, VOCABULARY, (2, 9), generator=generator)
    if case == "vit":
        return model, {"pixel_values": torch.randn(2, 3, 8, 8, generator=generator).double()}
    return model, {"input_ids": ids} | ({"decoder_input_ids": ids.flip(1)[:, :7]} if case.startswith("t5") else {})


def encoded(case: str, grid: Grid | None) -> dict[str, Any]:
    model, inputs = encoder(case)
    if grid is not None:
        parallelize(model, grid)
    with exact(model):
        logits = model(**inputs).logits
    loss = logits.square().sum()
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    if grid is not None:
        named = dict(model.named_parameters())
        gradients = {name: layout_of(named[name]).gather(grid.tensor, each) for name, each in gradients.items()}
    return {"logits": logits.detach(), "loss": loss.item(), "gradients": gradients}


def encoders_on(cases: list[str]) -> list[dict[str, Any]]:
    return [encoded(case, Grid(tensor=2)) for case in cases]


@pytest.mark.exhaustive
@pytest.mark.timeout(300)
def test_encoders_on_two_tensor_ranks_equal_the_whole_model(ranks: Any) -> None:
    for rank in ranks(2, encoders_on, list(ENCODERS), timeout=200):
        for case, found in zip(ENCODERS, rank, strict=True):
            require_equal(found, encoded(case, grid=None), case)


class _Attention(nn.Module):
    """An attention with a parameter, or a norm, over all heads."""

    def __init__(self, sinks: bool) -> None:
        super().__init__()
        self.q, self.o = nn.Linear(8, 8), nn.Linear(8, 8)
        if sinks:
            self.sinks = nn.Parameter(torch.zeros(4))
        else:
            self.q_norm = nn.RMSNorm(8)


def refused(sinks: bool) -> str:
    model = nn.Sequential(_Attention(sinks))
    before = model.state_dict()
    with pytest.raises(ValueError, match="heads") as error:
        parallelize(model, Grid(tensor=2), {"*.q": Column(unit=2), "*.o": Row(unit=2)})
    assert all(value is before[name] or torch.equal(value, before[name]) for name, value in model.state_dict().items())
    return str(error.value)


def test_plans_that_leave_head_sized_tensors_whole_are_refused(ranks: Any) -> None:
    for said in ranks(2, refused, sinks=True):
        assert "0.sinks has a number for each of 4 heads, which the plan shards with 0.q" in said
    for said in ranks(2, refused, sinks=False):
        assert "0.q_norm is a RMSNorm over all 8 outputs of 0.q, which the plan shards. Add '0.q_norm': OnAll" in said


def test_an_unknown_family_says_how_to_add_it() -> None:
    import transformers

    model = transformers.MptForCausalLM(transformers.MptConfig(n_layers=1, d_model=16, n_heads=4, vocab_size=9))
    for call in (load_hf, hf_layers, lambda x: parallelize(x, Grid())):
        with pytest.raises(ValueError, match=r"'mpt'.*docs/models.md, 'Add a family'"):
            call(model)


def table() -> list[str]:
    """The families' table of docs/models.md: what this file and its neighbors compare with transformers."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for name, family in FAMILIES.items():
        config = f"`{config_name(family.config)}`" if family.config is not None else ""
        cells = (config, "yes" if family.blocks else "", "yes" if family.plan is not None else "")
        rows.setdefault(cells, []).append(f"`{name}`")
    heads = ["| `model_type` | `load_hf`, `save_hf` | `hf_layers` | `parallelize` |", "|---" * 4 + "|"]
    lines = [f"| {', '.join(names)} | {' | '.join(cells)} |" for cells, names in rows.items()]
    return heads + [line.replace("|  |", "| |").replace("|  |", "| |") for line in lines]


def config_name(config: type[Any] | None) -> str:
    return "" if config is None else config.__name__


def test_the_table_of_families_in_the_docs_is_right() -> None:
    """Every family is in a test of this file or of test_moe_models.py, and in the table."""
    checked = {family for family, _ in DENSE.values()} | {case.split("-")[0] for case in MIXTURES}
    checked -= {"qwen3_next"}  # a hybrid, whose states hf_layers does not pass over a context axis
    assert {name for name, family in FAMILIES.items() if family.blocks} == checked
    planned = {name for name, each in FAMILIES.items() if each.config in (EncoderConfig, T5Config) and each.plan}
    assert planned == {case.split("-")[0] for case in ENCODERS}
    encoders = {name for name, each in FAMILIES.items() if each.config is EncoderConfig}
    assert encoders == {case.split("-")[0] for case in ENCODER_CASES}
    text = (DOCS / "models.md").read_text()
    assert "\n".join(table()) in text, "\n".join(table())


@pytest.mark.parametrize("case", CASES)
def test_family_configurations_survive_a_round_trip(case: str) -> None:
    config = from_hf(make(case).config.to_dict())
    assert from_hf(to_hf(config)) == config


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", CASES)
def test_families_have_transformers_logits_in_fp32(case: str) -> None:
    model = make(case).float().eval()
    mine = PipelineModule(load_hf(model), grid=Grid()).eval()
    ids, _ = batch()
    with torch.no_grad():
        torch.testing.assert_close(mine(ids), model(input_ids=ids).logits, rtol=1e-5, atol=1e-5)
    config: Any = config_from_hf(model)
    assert config.parameter_count == sum(parameter.numel() for parameter in model.parameters())
