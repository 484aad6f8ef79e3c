"""Special tokens, generation settings and the tokenizer stay with a model: it stops where it stopped before."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import triax
from triax import CausalLMLoss, Grid, PipelineModule, hf_layers
from triax.cli.main import app
from triax.models.huggingface.load import load_hf
from triax.models.huggingface.parallelize import parallelize
from triax.models.huggingface.save import save_hf
from triax.models.layers import NextTokenLoss

from support.command_line import output_of

VOCABULARY, STOPS_AFTER, PROMPT = 40, 4, "w3 w1 w4 w1 w5"
TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"


def make(folder: Path) -> list[int]:
    """Write a model whose text ends with its fourth new token, and a tokenizer; return what it generates."""
    import tokenizers
    import transformers

    torch.manual_seed(11)
    config = transformers.MistralConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=44,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        sliding_window=None,
        initializer_range=0.5,
    )
    model = transformers.MistralForCausalLM(config).eval()
    model.generation_config.eos_token_id = None
    ids = torch.tensor([[int(word[1:]) for word in PROMPT.split()]])
    new = model.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :].tolist()
    end = new[STOPS_AFTER - 1]
    assert end not in new[: STOPS_AFTER - 1]
    others = iter(token for token in range(VOCABULARY) if token not in (*new, *ids[0].tolist()))
    bos, pad = next(others), next(others)
    for part in (model.config, model.generation_config):
        part.bos_token_id, part.eos_token_id, part.pad_token_id = bos, end, pad
    model.generation_config.max_new_tokens = 12
    model.save_pretrained(folder)
    table = tokenizers.models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0")
    raw = tokenizers.Tokenizer(table)
    raw.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    names = {"bos_token": f"w{bos}", "eos_token": f"w{end}", "pad_token": f"w{pad}"}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=raw, **names)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return new[:STOPS_AFTER]


def by_load_hf(folder: Path, out: Path) -> None:
    grid = Grid()
    save_hf(PipelineModule(load_hf(folder), grid=grid, loss_fn=NextTokenLoss(grid, VOCABULARY)), out)


def by_filling(folder: Path, out: Path) -> None:
    from triax.models.huggingface.load import config_from_hf

    config = config_from_hf(folder)
    save_hf(load_hf(folder, PipelineModule(config.layers(), grid=Grid())), out)


def by_hf_layers(folder: Path, out: Path) -> None:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    save_hf(PipelineModule(hf_layers(model), grid=Grid(), loss_fn=CausalLMLoss()), out)


def by_parallelize(folder: Path, out: Path) -> None:
    import transformers

    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder)
    save_hf(parallelize(model, Grid()), out, grid=Grid())


def by_export(folder: Path, out: Path, *words: str) -> None:
    grid = Grid()
    model = PipelineModule(load_hf(folder), grid=grid, loss_fn=NextTokenLoss(grid, VOCABULARY))
    settings = {"train_batch_size": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.0}}}
    engine, *_ = triax.initialize(model=model, config=settings)
    engine.save_checkpoint(str(out.with_name("checkpoints")))
    output_of("checkpoint", "export", out.with_name("checkpoints"), out, "--format", "hf", *words)


WAYS = [by_load_hf, by_filling, by_hf_layers, by_parallelize]


@pytest.mark.parametrize(
    "way",
    [by_export, *(pytest.param(way, marks=pytest.mark.exhaustive) for way in WAYS)],
    ids=lambda way: way.__name__,
)
def test_a_saved_model_stops_at_the_same_token(way: Any, tmp_path: Path) -> None:
    import transformers

    new, out = make(tmp_path / "model"), tmp_path / "saved"
    way(tmp_path / "model", out)
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        values = [json.loads((folder / "config.json").read_text())[key] for folder in (tmp_path / "model", out)]
        assert values[0] == values[1] is not None, key
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert type(model).__name__ == "MistralForCausalLM"
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(out)
    assert tokenizer.chat_template == TEMPLATE and tokenizer.eos_token_id == new[-1]
    ids = tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    assert model.generate(ids, do_sample=False)[0, ids.shape[1] :].tolist() == new
    told = CliRunner().invoke(app, ["generate", str(out), "--prompt", PROMPT, "--temperature", "0"])
    assert told.exit_code == 0, told.output
    assert told.stdout.split() == [*PROMPT.split(), *(f"w{token}" for token in new[:-1])]
    assert f"{STOPS_AFTER} tokens in" in told.stderr


def test_save_hf_writes_the_tokenizer_that_is_given(tmp_path: Path) -> None:
    """A tokenizer or its folder is given where the model's own folder is gone."""
    import transformers

    make(tmp_path / "model")
    shutil.copytree(tmp_path / "model", tmp_path / "kept")
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(tmp_path / "kept")
    model = PipelineModule(load_hf(tmp_path / "model"), grid=Grid())
    shutil.rmtree(tmp_path / "model")
    with pytest.warns(UserWarning, match="gets no tokenizer, because .*model, from which the model was loaded"):
        save_hf(model, tmp_path / "none")
    assert not (tmp_path / "none" / "tokenizer.json").exists()
    for number, given in enumerate((tokenizer, tmp_path / "kept")):
        save_hf(model, tmp_path / str(number), tokenizer=given)
        again: Any = transformers.AutoTokenizer.from_pretrained(tmp_path / str(number))
        assert again.chat_template == TEMPLATE and again.eos_token_id == tokenizer.eos_token_id
    with pytest.raises(FileNotFoundError, match="has no tokenizer's files"):
        save_hf(model, tmp_path / "wrong", tokenizer=tmp_path / "none")
    by_export(tmp_path / "kept", tmp_path / "exported", "--tokenizer", str(tmp_path / "kept"))
    assert (tmp_path / "exported" / "chat_template.jinja").read_text() == TEMPLATE
