"""``triax memory``: of a model on a grid, of a training file, of a number; what docs/zero.md prints."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from support.command_line import output_of, run_triax
from support.paths import DOCS, ROOT

RECIPE = ROOT / "examples" / "recipes" / "llama3-70b-64gpus.yaml"
STATES = ("parameters", "gradients", "masters", "optimizer")


def ask(*arguments: str) -> Any:
    return json.loads(output_of("memory", *arguments, "--json"))


def test_memory_of_all_ranks_adds_up_to_the_model() -> None:
    count = 8_030_261_248  # of Llama 3 8B
    found = ask("llama3-8b", "--layout", "pipe=4,tensor=2")
    sums = {kind: sum(rank[kind] for rank in found["ranks"]) * 2 for kind in STATES}
    norms = 65 * 4096  # on each tensor rank
    each = {"parameters": 2, "gradients": 4, "masters": 4, "optimizer": 8}
    assert sums == pytest.approx({kind: size * (count + norms) for kind, size in each.items()}, rel=1e-6)
    held = [rank["activations"] for rank in found["ranks"]]  # 1F1B: 4, 3, 2 and 1 microbatches
    assert held == sorted(held, reverse=True) and held[0] > 3 * held[3]
    whole = ask("llama3-8b", "--layout", "tensor=2,recompute=full", "--sequence", "4096", "--batch", "8")
    assert whole["batch"] == 8 and whole["ranks"][0]["activations"] < held[0] / 5
    [rank] = whole["ranks"]
    assert rank["total"] == pytest.approx(sum(rank[kind] for kind in rank if kind not in ("pipe", "total")))


def test_triax_memory_reads_grid_and_batch_of_a_training_file() -> None:
    found = ask(str(RECIPE), "--machine", "h100-80g")
    explained = json.loads(output_of("train", str(RECIPE), "--explain", "--json"))["memory"]
    assert [round(rank["total"]) for rank in found["ranks"]] == [rank["total"] for rank in explained]
    assert found["batch"] == 512 and found["limit"] == 80e9


def test_replicas_of_a_training_file_follow_from_the_processes(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(RECIPE.read_text().replace("data: 2, ", ""))
    fixed, alone = ask(str(RECIPE)), ask(str(file))
    assert ask(str(file), "--processes", "64") == fixed
    assert alone["ranks"][0]["optimizer"] == 2 * fixed["ranks"][0]["optimizer"]
    assert "on 32 processes" in output_of("memory", str(file))


def test_triax_memory_reads_a_folder_or_a_file_of_fields(tmp_path: Path) -> None:
    fields = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 512, "rope_theta": 1e4}
    more = {"model_type": "llama", "intermediate_size": 128, "max_position_embeddings": 64, "rms_norm_eps": 1e-5}
    (tmp_path / "config.json").write_text(json.dumps(fields | more))
    folder, file = ask(str(tmp_path)), ask("--model", str(tmp_path / "config.json"))  # as triax plan takes it
    assert folder["ranks"] == file["ranks"] and folder["sequence"] == 64


def test_triax_memory_knows_deepspeeds_optimizer_names() -> None:
    for name, same in (("fusedadam", "adamw"), ("DeepSpeedCPUAdagrad", "adagrad"), ("FusedLamb", "lamb")):
        asked = [
            output_of("memory", "--parameters", "1e9", "--optimizer", each).splitlines()[1:] for each in (name, same)
        ]
        assert asked[0] == asked[1]
        ranks = [ask("llama3-8b", "--optimizer", each)["ranks"] for each in (name, same)]
        assert ranks[0] == ranks[1]


def words_of(text: str) -> list[str]:
    """The words of a table, without its lines."""
    return sorted(re.sub(r"[\u2500-\u257f]", " ", text).split())


def test_the_zero_page_shows_what_triax_memory_prints() -> None:
    text = (DOCS / "zero.md").read_text().replace(" \\\n    ", " ")
    found = re.findall(r"^\$ (triax memory .*)\n((?:(?!\$ |```).*\n)*)", text, re.MULTILINE)
    assert len(found) == 4
    for command, shown in found:
        command = command.replace("run.yaml", str(RECIPE))
        printed = output_of(*shlex.split(command)[1:])
        assert not shown or words_of(printed) == words_of(shown), command


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "Give one of a MODEL"),
        (["llama3-8b", "--parameters", "1e9"], "Give one of a MODEL"),
        (["llama3-8b", "--data", "4"], "--data = 4: it is only for --parameters. Write --layout data=4"),
        (
            ["llama3-8b", "--processes", "8"],
            "--processes = 8: it is only for a training file, but llama3-8b is not one. Write the grid as --layout",
        ),
        (["--parameters", "1e9", "--machine", "h200"], "--machine = 'h200': it is only for a MODEL"),
        ([str(RECIPE), "--layout", "pipe=2"], "says grid, batch and training"),
        (["llama3-8b", "--layout", "pipes=2"], "--layout: there is no 'pipes'; did you mean 'pipe'?"),
        (["llama3-8b", "--layout", "pipe=64"], "35 layers cannot fill 64 stages"),
        (["llama3-8b", "--layout", "data=2", "--batch", "3"], "does not divide batch=3"),
        (["llama3-8b", "--optimizer", "adamx"], "whose number of state tensors is unknown"),
        (["llama3-8b", "--optimizer", "MuAdam"], "parameter groups of their own rates"),
    ],
)
def test_triax_memory_refuses_wrong_arguments(arguments: list[str], words: str) -> None:
    code, output = run_triax("memory", *arguments)
    assert code == 2 and words in output
