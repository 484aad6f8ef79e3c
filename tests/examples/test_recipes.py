"""examples/recipes: the commands of its README, in order, on small text and with small sizes."""

from __future__ import annotations

import bisect
import contextlib
import graphlib
import io
import os
import shlex
import shutil
import textwrap
from pathlib import Path
from typing import Any

import pytest

from triax.train.file import read_training_file
from triax.train.model_choice import model_config

from support.paths import EXAMPLES, ROOT
from support.processes import program
from support.readme_blocks import commands

RECIPES = EXAMPLES / "recipes"
TEXT = (RECIPES / "README.md").read_text()
TYPED = [command for _, command in commands(TEXT)]
# What makes a recipe small enough for a test: keys of the training file, and numbers in a command.
SMALL = {
    "pretrain.yaml": [
        "model.overrides={vocab_size: 300, hidden_size: 16, intermediate_size: 32, max_position_embeddings: 128}",
        *("training.steps=6", "training.learning_rate.warmup_steps=2", "batch.size=4"),
    ],
    "continue.yaml": ["training.epochs=0.1", "batch.size=4", "training.learning_rate.warmup_steps=1"],
    "chat.yaml": ["training.epochs=0.5", "batch.size=4", "training.learning_rate.warmup_steps=1"],
    "lora.yaml": ["training.epochs=0.5", "batch.size=4", "training.learning_rate.warmup_steps=1"],
}


def of_recipes() -> list[str]:
    """Commands of the recipes that train here; the others are for clusters."""
    return TYPED[: next(n for n, each in enumerate(TYPED) if "adapter" in each) + 1]


def triax(words: list[str], folder: str) -> str:
    """Run the command ``triax`` in this process, a rank of the pool, which has torch already."""
    from triax.cli.main import app

    os.chdir(folder)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        app(words, standalone_mode=False)
    return printed.getvalue()


def place(folder: Path) -> None:
    """Make a folder as this repository is, with a small text."""
    for name in ("examples", "docs"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "text").mkdir()
    for module in (bisect, graphlib, textwrap):
        shutil.copy(str(module.__file__), folder / "text")


def test_the_recipe_for_text_works(ranks: Any, tmp_path: Path) -> None:
    place(tmp_path)
    train = TYPED.index("triax train examples/recipes/pretrain.yaml")
    for command in TYPED[: train + 1]:
        said = step(command, ranks, tmp_path)
    assert "nats per token on held-out documents" in said
    assert (tmp_path / "runs" / "pretrain" / "model" / "tokenizer.json").is_file()


@pytest.mark.exhaustive
def test_the_recipes_work_one_after_another(ranks: Any, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    place(tmp_path)
    said = {command: step(command, ranks, tmp_path) for command in of_recipes()}
    for name in ("pretrain", "continue", "chat", "lora"):
        folder = tmp_path / "runs" / name
        assert (folder / "model" / "model.safetensors").is_file() and (folder / "model" / "tokenizer.json").is_file()
        assert "nats per token on held-out documents" in said[f"triax train examples/recipes/{name}.yaml"]
    names = {path.name for path in (tmp_path / "adapter").iterdir()}
    assert names == {"adapter_config.json", "adapter_model.safetensors"}
    model = tmp_path / "runs" / "lora" / "model" / "model.safetensors"
    written = model.read_bytes()
    model.unlink()  # as if the run had been killed at its end: the same command writes the model
    assert "give more steps" in step("triax train examples/recipes/lora.yaml", ranks, tmp_path)
    assert model.read_bytes() == written
    assert "{% generation %}" in (tmp_path / "runs" / "chat" / "model" / "chat_template.jinja").read_text()


def step(command: str, ranks: Any, folder: Path) -> str:
    """Do what a command does, with small sizes; return what it prints."""
    if command.startswith("TEXT="):
        return ""
    words = shlex.split(command.replace("$TEXT", "text").replace("--vocab-size 4096", "--vocab-size 300"))
    kind = words.pop(0)
    if kind == "cp":
        shutil.copy(folder / words[0], folder / words[1])
        return ""
    if kind == "python":
        script, arrow, target = words
        assert arrow == ">"
        lines = ranks(1, program, [script], str(folder))[0].splitlines(keepends=True)
        (folder / target).write_text("".join(lines[:60]))
        return ""
    assert kind == "triax"
    if words[0] == "train":
        words += SMALL[Path(words[1]).name]
    if words[0] == "generate":
        words += ["--max-new-tokens", "5"]
    if "docs" in words:
        words[words.index("docs")] = "docs/lora.md"
    (printed,) = ranks(1, triax, words, str(folder))
    return str(printed)


def test_the_pretrain_recipe_states_its_parameter_count() -> None:
    run, _ = read_training_file(RECIPES / "pretrain.yaml")
    count = model_config(run.model).parameter_count
    assert f"{count / 1e6:.1f} M parameters" in (RECIPES / "pretrain.yaml").read_text()


def test_cluster_commands_of_recipes_name_existing_files(ranks: Any) -> None:
    explain, *submitted = TYPED[len(of_recipes()) :]
    assert "70,553,706,496 parameters" in ranks(1, triax, shlex.split(explain)[1:], str(ROOT))[0]
    for command in submitted:
        assert command.startswith("sbatch ") and (ROOT / command.split()[1]).is_file()


def test_every_tested_recipe_file_exists() -> None:
    assert {path.name for path in RECIPES.glob("*.yaml")} >= SMALL.keys()
