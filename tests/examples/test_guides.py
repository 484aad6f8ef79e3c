"""The guides: each program of a page is run by a command of the page, and prints the output that the page shows.

- A command `python x.py ...` or `torchrun --nproc-per-node N x.py ...` runs a program of the page.
- A ```text block right after commands is what each of them prints.
- Messages that a page quotes are those that triax prints; keys and functions that it names are there.

test_site.py follows the links of all pages; tests/laws/test_references.py looks up the options of each `triax ...`.
"""

from __future__ import annotations

import ast
import json
import math
import os
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from contextlib import ExitStack
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.pipelining.schedules as torch_schedules
import yaml
from torch import nn

import triax
from triax.options import table as tables
from triax.pipe.schedules.registry import RECIPES
from triax.train.model_choice import model_config
from triax.train.sections import ModelSection, TrainingFile

from support.command_line import output_of, run_triax
from support.file_runs import losses_of
from support.paths import DOCS, ROOT
from support.processes import TRIAX, free_port, program, started
from support.readme_blocks import Block, blocks, commands, programs

FOLDERS = ("guides", "moving-from", "extending", "inside")
PAGES = [DOCS / "launch.md", *(page for folder in FOLDERS for page in sorted((DOCS / folder).glob("*.md")))]
# Commands that run in the sweep: further grids of a program that runs on one of several ranks by default.
SLOW = {
    *("stages.py 2 1f1b", "stages.py 4 zb-h1", "4 titan.py 1", "bilinear.py 1 4", "bilinear.py 1 2", "signed.py 1"),
    *("2 ddp.py", "4 gan.py"),
    "compare.py 2 1 1",
    "compiled.py aot_eager",
    *("2 translate.py 2 zb-h1", "2 unet.py 2 interleaved", "2 exits.py 1", "2 tasks.py 1"),
    *("translate.py 2 1f1b", "unet.py 4 1f1b", "heads.py 2"),  # tests/pipe/test_model_shapes.py has these models
    *("2 sequences.py 2", "exits.py 1", "tasks.py 1"),
    *("dpo.py 2 2", "kto.py 2 2", "reward.py 2 2", "distill.py 2 2", "captions.py 2 2"),
    "pictures.py 2 2",
    *("grpo.py 1 1 240", "grpo.py 2 2 240", "grpo.py 2 2 8"),
    *("evaluate.py 2 2", "transfer.py 1 1 0", "transfer.py 1 1 3"),
    *("digits.py 1 600", "digits.py 2 600", "digits.py 2 8", "texts.py 2 2"),  # on axes: tests/models/test_dit.py
}
# A package: the last tests of this file; a project: tests/testing/test_kit.py; tests/train/test_distill_run.py.
INSTALLED = {"npz_export.py", "test_my_model.py", "store_teacher.py"}
# tests/grid/launcher/test_run.py runs the first one; the others need Ray, or submitit and Slurm.
LAUNCHED = {"train.py", "on_ray.py", "submit.py"}
# Two jobs at once: tests/train/methods/test_remote_teacher.py; a user's checkpoint: tests/checkpoint/test_convert.py.
TOGETHER = ("teach.py", "learn.py", "to_dcp.py")
TESTING = (DOCS / "guides" / "testing.md").read_text()
FOREIGN = {"sbatch", "srun", "kubectl", "ssh", "mpirun", "export", "nvidia-smi"}  # they need a cluster


def shown(text: str) -> list[tuple[str, str | None]]:
    """(command, what it prints as the page shows it) for every command of a page."""
    found: list[tuple[str, str | None]] = []
    listed = blocks(text)
    for at, block in enumerate(listed):
        if block.language not in ("sh", "console"):
            continue
        after: Block | None = listed[at + 1] if at + 1 < len(listed) else None
        output = after.text if after is not None and after.language == "text" else None
        fenced = f"```{block.language}\n{block.text}```\n"
        found += [(command, output) for _, command in commands(fenced)]
    return found


def to_run(page: Path) -> list[str]:
    """The programs of a page that no other one imports."""
    found = programs(page.read_text())
    imported = {name for name in found if any(f"from {name[:-3]} import" in source for source in found.values())}
    return sorted(set(found) - INSTALLED - LAUNCHED - imported)


def run_beside(words: list[str], folder: str) -> str:
    """Run a program, which may import another one of its page."""
    sys.path.insert(0, folder)
    try:
        return program(words, folder)
    finally:
        sys.path.remove(folder)


RUN = [
    pytest.param(page, command, output, id=f"{page.stem}: {command}")
    if not any(slow in command for slow in SLOW)
    else pytest.param(page, command, output, id=f"{page.stem}: {command}", marks=pytest.mark.exhaustive)
    for page in PAGES
    for command, output in shown(page.read_text())
    if command.split()[0] in ("python", "torchrun") and not command.endswith(TOGETHER)
]


@pytest.mark.parametrize(("page", "command", "output"), RUN)
def test_a_program_prints_what_its_page_shows(
    ranks: Any, page: Path, command: str, output: str | None, tmp_path: Path
) -> None:
    for name, source in programs(page.read_text()).items():
        (tmp_path / name).write_text(source)
    launcher, *words = shlex.split(command)
    size = 1
    if launcher == "torchrun":
        assert words[0] == "--nproc-per-node"
        size, words = int(words[1]), words[2:]
    first, *others = ranks(size, run_beside, words, str(tmp_path))
    assert not any(others)  # rank 0 speaks for all
    if output is not None:
        assert first == output


CHECKED = {"testing": ("test_my_model.py", 2), "model-shapes": ("heads.py", 1), "losses": ("clip.py", 1)}
# A process of its own: its ranks find the functions of these programs on its path.
IN_ONE_PROCESS = """
import json, sys
from support.command_line import run_triax
print(json.dumps([run_triax(*words) for words in json.loads(sys.argv[1])]))
"""


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[tuple[int, str]]]:
    """Exit codes and outputs of the guides' commands ``triax check``, in a new project; and of the guide's mistake."""
    folder = tmp_path_factory.mktemp("projects") / "my_model"
    assert run_triax("new", folder)[0] == 0
    typed = {}
    for guide, (file, count) in CHECKED.items():
        text = (DOCS / "guides" / f"{guide}.md").read_text()
        for name, source in programs(text).items():
            (folder / name).write_text(source)
        typed[guide] = [shlex.split(command)[1:] for command, _ in shown(text) if command.startswith("triax check ")]
        typed[guide] = [
            words
            for words in typed[guide]
            if any(word.startswith(f"{file}:") for word in words) and "--types" not in words
        ]
        assert len(typed[guide]) == count
    script, right = (folder / "my_model.py").read_text(), "        return x + self.down(F.gelu(self.up(self.norm2(x))))"
    (mistake,) = (block.text for block in blocks(TESTING) if "inner.mean" in block.text and block.language == "text")
    at = next(line for line in script.splitlines(keepends=True) if line.startswith(right))
    (folder / "mistaken.py").write_text(script.replace(at, mistake))
    test = (folder / "test_my_model.py").read_text()
    (folder / "test_mistaken.py").write_text(test.replace("from my_model import", "from mistaken import"))
    typed["mistake"] = [["check", "test_mistaken.py:build", "--axes", "tensor", "--json"]]
    typed["types"] = [["check", "test_mistaken.py:build", "--types", "tensor=4,data=16"]]
    path = os.pathsep.join([str(ROOT / "tests"), str(folder), *sys.path])
    command = [sys.executable, "-c", IN_ONE_PROCESS, json.dumps([*chain(*typed.values())])]
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    results = iter(json.loads(done.stdout))
    return {guide: [next(results) for _ in commands] for guide, commands in typed.items()}


@pytest.mark.parametrize("guide", CHECKED)
def test_triax_check_passes_for_the_models_of_the_guides(guide: str, checked: Any) -> None:
    """The commands of a guide that name a function of its program."""
    assert [code for code, _ in checked[guide]] == [0] * CHECKED[guide][1], checked[guide]


def test_the_guide_shows_the_output_of_triax_check(checked: Any) -> None:
    """Line breaks and the last digits may differ: these depend on the CPU and on torch."""
    (said,) = (block.text for block in blocks(TESTING) if block.text.startswith("step 0"))
    ((code, output),) = checked["mistake"]
    (row,) = (each for each in json.loads(output)["runs"] if not each["holds"])
    lines = f"{row['difference']} first: {row['where']} usually: {row['cause']}"
    digits = re.compile(r"(-?\d\.\d{6}|linear\.py:)\d+")
    whole = f"{row['what']}, {row['difference']}"  # what assert_equals_one_process says of it
    texts = (lines.replace("mistaken", "my_model"), said, whole, TESTING)
    lines, said, whole, text = (digits.sub(r"\1", " ".join(each.split())) for each in texts)
    assert code == 1 and lines == said and whole in text


def test_the_guide_shows_the_output_of_types(checked: Any) -> None:
    command = "$ triax check test_my_model.py:build --types tensor=4,data=16\n"
    (said,) = (block.text for block in blocks(TESTING) if command in block.text)
    ((code, output),) = checked["types"]
    lines, said = (" ".join(each.split()) for each in (output, said.removeprefix(command)))
    assert code == 1 and said in lines.replace("mistaken", "my_model")


@pytest.mark.parametrize("page", PAGES, ids=[page.stem for page in PAGES])
def test_pages_have_known_commands_and_valid_files(page: Path) -> None:
    text = page.read_text()
    typed = [shlex.split(command, comments=True) for command, _ in shown(text)]
    run = {word for words in typed for word in words if words[0] in ("python", "torchrun")}
    assert [name for name in to_run(page) if name not in run] == [], "no command of the page runs it"
    for words in typed:
        assert words[0] in {"triax", "python", "torchrun"} | FOREIGN, f"teach this test to check {words[0]}"
    for block in blocks(text):
        if block.language == "yaml":
            values = yaml.safe_load(block.text)
            if "training" in values:
                TrainingFile.of(values)
        else:
            assert block.language in ("python", "sh", "console", "text", "toml", "json"), block.language


# ------------------------------------------------------------------------------------------ the messages of pipeline.md


class Unsendable(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        class Output:
            pass

        return Output()


class FailsOnce:
    """Iterator of a pair; on one rank its first item fails."""

    def __init__(self, pair: Any, fails: bool) -> None:
        self.pair, self.fails = pair, fails

    def __next__(self) -> Any:
        fails, self.fails = self.fails, False
        if fails:
            raise OSError("the disk is away")
        return self.pair


def messages() -> list[str]:
    """The errors of wrong calls of a pipeline, on two ranks."""
    grid, found = triax.Grid(pipe=2), []
    given = triax.EngineOptions(
        optimizer=partial(torch.optim.SGD, lr=0.1), batch=triax.Batch(microbatch=2, microbatches=2)
    )

    def model(last: type[nn.Module] = nn.Identity, loss: Any = nn.functional.mse_loss, **options: Any) -> Any:
        layers = [triax.LayerSpec(nn.Linear, 4, 4), triax.LayerSpec(last), *[triax.LayerSpec(nn.Linear, 4, 4)] * 2]
        return triax.PipelineModule(layers, grid=grid, loss_fn=loss, partition="uniform", **options)

    def engine(schedule: str, **options: Any) -> Any:
        return triax.Engine(model(**options), given, schedule=schedule)

    x = torch.zeros(2, 4)
    pair, trained = (x, x), engine("1f1b")
    detached = engine("1f1b", loss=lambda outputs, labels: outputs.detach().sum())
    data: Any = FailsOnce(pair, fails=grid.rank == 1)
    wrong = [
        lambda: engine("zb-v", chunks=1),
        lambda: engine("dualpipe-v", chunks=2),
        lambda: model(chunks=3),
        lambda: trained.train_batch(iter([pair])),
        lambda: trained.train_batch([pair, pair]),
        lambda: trained.train_batch(iter([x, x])),
        *[lambda: trained.train_batch(data)] * 2,
        lambda: detached.train_batch(iter([pair, pair])),
    ]
    for call in wrong:
        with pytest.raises(Exception) as error:
            call()
        found.append(str(error.value))
    return found


def unsendable() -> str:
    grid = triax.Grid(pipe=2)
    layers = [triax.LayerSpec(nn.Linear, 4, 4), triax.LayerSpec(Unsendable), triax.LayerSpec(nn.Linear, 4, 4)]
    model = triax.PipelineModule(layers, grid=grid, loss_fn=nn.functional.mse_loss, partition=[0, 2, 3])
    engine = triax.Engine(model, optimizer=partial(torch.optim.SGD, lr=0.1), batch=triax.Batch(microbatch=2))
    with pytest.raises(RuntimeError) as error:
        engine.train_batch(iter([(torch.zeros(2, 4), torch.zeros(2, 4))]))
    return str(error.value)


def test_the_messages_of_the_pipelines_page_are_triaxs(ranks: Any) -> None:
    page = (DOCS / "guides" / "pipeline.md").read_text().partition("## Messages")[2]
    quoted = re.findall(r"^\| `(.+?)` \|", page, re.MULTILINE)
    printed = [*(text for rank in ranks(2, messages) for text in rank), *ranks(2, unsendable)]
    assert len(quoted) == 9
    assert [each for each in quoted if not any(each in text for text in printed)] == []


# --------------------------------------------------------------------------------- the messages of troubleshooting.md


TROUBLE = (DOCS / "guides" / "troubleshooting.md").read_text()


class Broken(nn.Linear):
    """A layer that runs out of memory in its fourth pass."""

    passes = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        if self.passes == 4:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return super().forward(x)


def trouble() -> list[str]:
    grid, found = triax.Grid(pipe=2), []

    def train(layer: type[nn.Module], loss: Any, lr: float = 0.1) -> None:
        layers = [triax.LayerSpec(layer, 4, 4), triax.LayerSpec(nn.Linear, 4, 4)]
        model = triax.PipelineModule(layers, grid=grid, loss_fn=loss)
        engine = triax.Engine(
            model,
            optimizer=partial(torch.optim.SGD, lr=lr),
            batch=triax.Batch(microbatch=2, microbatches=4),
            schedule="gpipe",
        )
        labels = [torch.zeros(2, 4), torch.full((2, 4), torch.nan), *[torch.zeros(2, 4)] * 2]
        engine.train_batch(iter([(torch.zeros(2, 4), each) for each in labels]))

    square = nn.functional.mse_loss
    wrong = [
        lambda: train(nn.Linear, square),
        lambda: train(nn.Linear, lambda outputs, labels: (outputs.sum(), torch.zeros(()))),
        lambda: train(nn.Linear, square, lr=0.2 if grid.rank else 0.1),
        lambda: train(Broken, square),
    ]
    for call in wrong:
        with pytest.raises(Exception) as error:
            call()
        found.append(str(error.value))
    return found


def test_the_messages_of_troubleshooting_are_triaxs(ranks: Any) -> None:
    nan, empty, differs, memory = ranks(2, trouble)[0]
    (quoted,) = re.findall(r"^the loss is nan.*$", TROUBLE, re.MULTILINE)
    assert nan.startswith(quoted)
    (quoted,) = re.findall(r"`(the batch has no loss, .*?)`", TROUBLE)
    assert empty.startswith(quoted)
    (quoted,) = re.findall(r"`(optimizer.lr is .*?)`", TROUBLE)
    assert re.search(re.escape(quoted).replace(r"\.\.\.", ".*"), differs), differs
    (quoted,) = re.findall(r"`(rank 0 .*? failed at .*?)`", TROUBLE)
    assert quoted in memory
    # What hangs or is killed is in tests/laws/test_failures.py; the words are compared with those of the code.
    code = "".join((ROOT / path).read_text() for path in ("grid/agreement/hang_watch.py", "grid/launcher/launch.py"))
    for words in (
        *("hangs: it is ", "between two calls of the engine", "every rank waits for another"),
        *("does not answer: it was stopped, or its host is gone", "left with exit status ", "ended without an error"),
        "killed from outside, or by the kernel if memory ran out",
    ):
        assert words in TROUBLE and words in code, words


# ------------------------------------------------------------------------------------------------- names and tables


def definitions(path: Path) -> set[str]:
    """The functions, classes and methods of a file: `Class.method`."""

    def inside(node: ast.AST, prefix: str) -> set[str]:
        found = set()
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.FunctionDef, ast.ClassDef)):
                found |= {prefix + child.name} | inside(child, f"{prefix}{child.name}.")
        return found

    return inside(ast.parse(path.read_text()), "")


@pytest.mark.parametrize("page", PAGES, ids=[page.stem for page in PAGES])
def test_functions_linked_by_a_page_are_in_their_files(page: Path) -> None:
    linked = re.findall(r"\[`([\w.]+)`\]\(([^)\s]+\.py)\)", page.read_text())
    assert linked or page.stem not in ("microbatch", "gradient", "checkpoint")
    assert [name for name, path in linked if name not in definitions(page.parent / path)] == []


def rows(text: str, head: str) -> list[list[str]]:
    """The cells of a table whose first line is given."""
    lines = text.partition(f"{head}\n")[2].splitlines()[1:]
    stop = next((at for at, line in enumerate(lines) if not line.startswith("|")), len(lines))
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[:stop]]


def takes(preset: str, overrides: dict[str, Any]) -> bool:
    """Whether a preset has these fields. Raises an error if it does not accept one of their values."""
    fields = model_config(ModelSection(preset=preset)).settings()
    return overrides.keys() <= {*fields} and bool(model_config(ModelSection(preset=preset, overrides=overrides)))


def test_the_megatron_table_names_existing_keys() -> None:
    text = (DOCS / "moving-from" / "megatron.md").read_text()
    in_file, in_options = ({path for path, *_ in tables.rows(kind)} for kind in (TrainingFile, triax.EngineOptions))
    table = rows(text, "| Megatron-LM | training file | option of `triax.Engine`, or Python |")
    assert len(table) > 25
    for _, file, option in table:
        for given in re.findall(r"`({[^`]*})`", file) if "`model.overrides`" in file else ():
            overrides = yaml.safe_load(given.replace(", ...", ""))
            presets = [name for name in ("bytes-tiny", "llama-tiny") if takes(name, overrides)]
            assert presets and ("Llama" not in file or "GPT" in file or presets == ["llama-tiny"]), given
        for kind, names in re.findall(r"`(GPTConfig|LlamaConfig)\(([^.]*?)\)`", option):
            assert {name.removesuffix("=") for name in names.split(", ")} <= {*getattr(triax, kind)().settings()}
        for known, cell in ((in_file, file), (in_options, option)):
            for name in re.findall(r"`([a-z][a-z0-9_]*(?:\.[a-z0-9_]+)*)`", cell):
                method = name.removeprefix("engine.")
                assert (
                    name in known
                    or any(key.startswith(f"{name}.") for key in known)
                    or (method != name and hasattr(triax.PipelineEngine, method))
                    or name in {"interleaved", "selective", "full", "weight_decay", "betas"}  # values; arguments
                ), name


def test_the_small_runs_of_the_megatron_page_train_and_resume(
    ranks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (DOCS / "moving-from" / "megatron.md").read_text()
    for block in blocks(text):
        if block.language == "yaml":
            (tmp_path / f"{yaml.safe_load(block.text)['name']}.yaml").write_text(block.text)
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "some.txt").write_text("a text of some length\n" * 800)
    monkeypatch.chdir(tmp_path)
    small = text.partition("## A small run")[2].partition("\n## ")[0]
    (_, *tokenize), *runs = [shlex.split(command) for command, _ in shown(small)]
    output_of(*tokenize)
    assert [words[:3] for words in runs] == [["triax", "train", "small.yaml"]] * 4
    assert "training.steps=30" in runs[2]
    rates = [3e-4 * (0.1 + 0.9 * math.cos(math.pi / 2 * step / of) ** 2) for step, of in ((19, 20), (20, 30))]
    said = [f"{rate * 1e5:.2f}e-5" for rate in rates]
    assert f"the rate of step 20 was {said[0]}, that of step 21 is {said[1]}" in " ".join(small.split())
    exact = ("precision=fp64", "monitor.trace=false")
    fewer = ((4, 2), (4, 2), (4, 3), (1, 2))  # ranks, steps; the page's 20, 20, 30 and 20 steps
    four, interleaved, rest, one = (
        ranks(size, losses_of, str(tmp_path), *words[2:], f"training.steps={steps}", *exact)[0]
        for words, (size, steps) in zip(runs, fewer, strict=True)
    )
    assert len(four) == 2 and all(each == pytest.approx(four, rel=1e-10) for each in (interleaved, one))
    assert len(rest) == 1
    assert "pipe 2 x tensor 2" in output_of("train", "gpt.yaml", "--explain", "--processes", 4)


def test_the_file_beside_megatrons_command_is_a_training_file() -> None:
    page = blocks((DOCS / "moving-from" / "megatron.md").read_text())
    (both,) = (block.text.splitlines() for block in page if block.text.startswith("# Megatron-LM"))
    right = both[0].index("# triax")
    file = TrainingFile.of(yaml.safe_load("\n".join(line[right:] for line in both)))
    assert (file.batch.size, file.grid.tensor, file.training.sequence) == (512, 8, 8192)


def test_the_megatron_page_shows_the_output_of_explain(tmp_path: Path) -> None:
    """`triax train --explain` with the page's last YAML file prints each line of the page's table of memory.

    The page's folder Llama-3-70B is not here: the preset has the same sizes.
    """
    text = (DOCS / "moving-from" / "megatron.md").read_text()
    *_, run = [block.text for block in blocks(text) if block.language == "yaml"]
    (shown,) = [block.text for block in blocks(text) if "bytes of a rank, in GiB" in block.text]
    file = tmp_path / "llama.yaml"
    file.write_text(re.sub(r"folder: Llama-3-70B.*", "preset: llama3-70b", run))
    printed = output_of("train", file, "--explain", "--processes", 64, columns=200).splitlines()
    assert [line for line in shown.splitlines() if line not in printed] == []


def test_the_table_of_torch_schedules_names_existing_ones() -> None:
    text = (DOCS / "moving-from" / "torchtitan-fsdp2.md").read_text()
    table = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| `Schedule")]
    assert len(table) == 7
    for theirs, ours in table:
        assert all(hasattr(torch_schedules, name) for name in re.findall(r"`(\w+)`", theirs))
        assert set(re.findall(r"`([\w-]+)`", ours)) <= set(RECIPES)


def test_the_picture_of_the_folders_is_up_to_date() -> None:
    drawn = runpy.run_path(str(DOCS / "inside" / "structure.py"))
    assert drawn["draw"]() == (DOCS / "inside" / "structure.svg").read_text(), "python docs/inside/structure.py"


def on_two_hosts() -> dict[str, tuple[str, dict[str, object]]]:
    """The commands of docs/launch.md for the hosts of Kubernetes and of SkyPilot, and the variables of these."""
    kubeflow, sky = (
        yaml.safe_load(block.text)
        for block in blocks((DOCS / "launch.md").read_text())
        if block.language == "yaml" and ("kind" in block.text or "num_nodes" in block.text)
    )
    (command,) = {
        container["args"][0]
        for pod in kubeflow["spec"]["pytorchReplicaSpecs"].values()
        for container in pod["template"]["spec"]["containers"]
    }
    pod = {"PET_NNODES": 2, "PET_NPROC_PER_NODE": 2, "PET_MASTER_ADDR": "127.0.0.1", "PET_NODE_RANK": None}
    host = {"SKYPILOT_NUM_NODES": sky["num_nodes"], "SKYPILOT_NUM_GPUS_PER_NODE": 2, "SKYPILOT_NODE_RANK": None}
    return {
        "triax run": (command, pod),
        "torchrun": ("torchrun train.py", pod),
        "sky": (sky["run"], {**host, "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.2"}),
    }


@pytest.mark.exhaustive  # two launchers, as on two hosts
@pytest.mark.parametrize("kind", ["triax run", "torchrun", "sky"])
def test_the_command_of_each_host_starts_all_ranks(kind: str, tmp_path: Path) -> None:
    command, variables = on_two_hosts()[kind]
    assert "triax run " in command or kind == "torchrun"
    (tmp_path / "train.py").write_text(
        "import triax\ngrid = triax.Grid(tensor=2)\ngrid.world.barrier()\nprint(grid, flush=True)\n"
    )
    port = free_port()
    own = f"{shlex.join([*TRIAX, 'run'])} --tee all" + (f" --master-port {port}" if kind == "sky" else "")
    command = command.replace("triax run", own)
    command = command.replace("torchrun", f"{sys.executable} -m torch.distributed.run")
    variables = {**os.environ, "PET_MASTER_PORT": str(port), **{name: str(value) for name, value in variables.items()}}
    (number,) = (name for name in variables if name.endswith("NODE_RANK"))
    with ExitStack() as hosts:
        launched = [
            hosts.enter_context(started("sh", "-c", command, cwd=tmp_path, env={**variables, number: str(host)}))
            for host in range(2)
        ]
        printed = [host.communicate(timeout=120) for host in launched]
    assert [host.returncode for host in launched] == [0, 0], printed
    text = "".join(out + err for out, err in printed)
    assert all(f"data=2, tensor=2; rank {rank} " in text for rank in range(4)), text


# ---------------------------------------------------------------------------------------- packages with entry points


def installed(page: str, folder: str) -> None:
    """Install the page's package into a folder, as pip does: its module, and metadata with its entry points."""
    (made,) = (tomllib.loads(block.text) for block in blocks(page) if block.language == "toml")
    info = Path(folder, f"{made['project']['name'].replace('-', '_')}-1.0.dist-info")
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {made['project']['name']}\nVersion: 1.0\n")
    ((group, points),) = made["project"]["entry-points"].items()
    lines = [f"[{group}]", *(f"{name} = {value}" for name, value in points.items())]
    (info / "entry_points.txt").write_text("\n".join(lines))
    (module,) = made["tool"]["setuptools"]["py-modules"]
    Path(folder, f"{module}.py").write_text(programs(page)[f"{module}.py"])
    sys.path.insert(0, folder)


def exported(page: str, folder: str) -> None:
    installed(page, folder)
    run, out = str(Path(folder, "run")), str(Path(folder, "out"))
    engine = triax.Engine(nn.BatchNorm1d(3), batch=triax.Batch(microbatch=1))
    engine.save_checkpoint(run)
    for options, dtype in (([], "float32"), (["--dtype", "float16"], "float16")):
        output_of("checkpoint", "export", run, out, "--format", "npz", *options)
        arrays, state = np.load(Path(out, "model.npz")), engine.module_state_dict()
        assert set(arrays.files) == set(state)
        for name, tensor in state.items():
            assert arrays[name].dtype == (dtype if tensor.is_floating_point() else "int64")
            np.testing.assert_array_equal(arrays[name], tensor.detach().numpy())
    code, text = run_triax("checkpoint", "export", run, out, "--format", "npz", "--dtype", "bfloat16")
    assert code != 0 and "NumPy has no bfloat16" in text


def scheduled(page: str, folder: str) -> None:
    installed(page, folder)
    assert triax.make_schedule("late-weights", 2, 4).orders[0][-1] == ("W", 0, 3)
    model = triax.PipelineModule([triax.LayerSpec(nn.Linear, 2, 2)] * 2, loss_fn=nn.functional.mse_loss)
    batch = triax.Batch(size=4, microbatches=4)
    engine = triax.Engine(model, optimizer=torch.optim.SGD, batch=batch, schedule="late-weights")
    assert engine.program.schedule.name == "late-weights"
    assert "late-weights" in output_of("schedule", "late-weights", "--pipe", 4, "--microbatches", 8)


def test_the_guides_package_adds_a_checkpoint_format(ranks: Any, tmp_path: Path) -> None:
    ranks(1, exported, (DOCS / "extending" / "checkpoint-format.md").read_text(), str(tmp_path))


def test_the_guides_package_adds_a_schedule(ranks: Any, tmp_path: Path) -> None:
    ranks(1, scheduled, (DOCS / "extending" / "schedule.md").read_text(), str(tmp_path))
