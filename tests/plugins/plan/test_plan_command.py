"""``triax plan``: the JSON object, given layouts, messages, files and pictures; and every command of docs/plan.md."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from triax.base.errors import ConfigError
from triax.cli.main import app
from triax.cli.plan_inputs import model_of
from triax.models.config import LlamaConfig
from triax.options.batch import Batch
from triax.options.engine import EngineOptions
from triax.options.tuning import Tuning
from triax.plugins.plan.machine import MACHINES, machine
from triax.plugins.plan.page import figure
from triax.plugins.plan.parallel_layout import CHANGES
from triax.plugins.plan.trust import trust
from triax.train.file import read_training_file

from support.measured_machine import HERE
from support.paths import DOCS
from support.readme_blocks import blocks, commands

TEXT = (DOCS / "plan.md").read_text()
GPT = {"hidden_size": 12288, "num_hidden_layers": 80, "num_attention_heads": 96, "vocab_size": 51200}


def run(*arguments: str, command: str = "plan") -> str:
    done = CliRunner().invoke(app, [command, *arguments], env={"COLUMNS": "120"})
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done.stdout


def ask(*arguments: str) -> Any:
    return json.loads(run(*arguments, "--json"))


COMMANDS = [command for _, command in commands(TEXT)]


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(each, marks=pytest.mark.exhaustive) if "512" in each or "machine measure" in each else each
        for each in COMMANDS
    ],
)
def test_the_commands_of_the_plan_page_run(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = shlex.split(command)
    assert words[0] == "triax" and words[1] in ("plan", "machine")
    if "measure" not in words:
        Path("here.json").write_text(json.dumps(HERE.to_dict()))
        (rows,) = [block.text for block in blocks(TEXT) if block.text.startswith("model,fields")]
        Path("rows.csv").write_text(rows)
        Path("mine.json").write_text(json.dumps({"base": "b200"}))
    assert run(*words[2:], command=words[1])
    assert machine("here.json").measured is not None


def test_the_plan_page_shows_the_table_of_its_first_command() -> None:
    (shown,) = [block.text for block in blocks(TEXT) if block.text.startswith("90 % of published runs")]
    first, *table = shown.splitlines()
    printed = run(*shlex.split(COMMANDS[0])[2:])
    assert printed.startswith(first.removesuffix("...)")) and "\n".join(table) in printed


def test_the_machine_file_and_programs_of_the_plan_page_load(tmp_path: Path) -> None:
    (text,) = [block.text for block in blocks(TEXT) if block.language == "json"]
    (tmp_path / "mine.json").write_text(text)
    assert machine(str(tmp_path / "mine.json")).overlap_pipelined_gradients
    auto, tuned = [asked(block.text) for block in blocks(TEXT) if block.language == "python"]
    assert auto.tunes_microbatch and auto.zero.stage == 0 and tuned.tunes_microbatch and tuned.zero.stage == "auto"
    assert not auto.notes() and not tuned.notes()


def asked(source: str) -> EngineOptions:
    """The options that a program gives to ``triax.tune``."""
    given = SimpleNamespace(
        tune=lambda model, options, **given: options.changed(**given),
        Engine=lambda model, options: options,
        Batch=Batch,
        Tuning=Tuning,
    )
    space: dict[str, Any] = {"triax": given, "model": None, "options": EngineOptions()}
    exec(compile(source, "docs/plan.md", "exec"), space)
    return space["options"]


def test_a_published_145b_layout_is_predicted_within_6_percent(tmp_path: Path) -> None:
    """Narayanan et al. 2021, table 1, 145B: 24.8 seconds."""
    (tmp_path / "model.json").write_text(json.dumps(GPT))
    layout = "pipe=8,data=24,tensor=8,microbatch=2,chunks=2,schedule=interleaved,recompute=full,zero=1"
    sizes = ("--machine", "a100-80g", "--sequence", "2048", "--batch", "2304", "--gpus", "1536")
    found = ask("--model", str(tmp_path / "model.json"), *sizes, "--layout", layout)
    assert (
        list(found) == ["trust", "layouts", "considered", "excluded", "seconds", "chosen"] and found["considered"] == 1
    )
    each = found["layouts"][0]
    keys = "pipe data context tensor expert microbatch chunks schedule zero recompute offload step_s tflops_per_gpu mfu"
    assert set(each) == {*keys.split(), *CHANGES, "memory_gib", "time_s", "interval_s"}
    assert set(found["chosen"]) == {"context", "expert", "sequence_parallel", *CHANGES}
    assert abs(each["step_s"] / 24.8 - 1) < 0.06
    assert sum(each["time_s"].values()) == pytest.approx(each["step_s"])


LLAMA = {"hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8}
LLAMA |= {"intermediate_size": 28672, "vocab_size": 128256}


@pytest.mark.parametrize(
    ("values", "kind", "billions"),
    [
        (GPT, "GPTConfig", 145.7),
        ({**GPT, "intermediate_size": 49152, "num_key_value_heads": 96}, "GPTConfig", 145.7),
        ({**GPT, "model_type": "gpt2", "tie_word_embeddings": False}, "GPTConfig", 146.3),
        ({**GPT, "intermediate_size": 40000, "hidden_act": "gelu"}, "DecoderConfig", 128.2),
        (LLAMA, "LlamaConfig", 70.6),
        ({**LLAMA, "model_type": "llama"}, "LlamaConfig", 70.6),
    ],
)
def test_a_file_of_fields_is_read_as_a_gpt_or_a_llama(
    tmp_path: Path, values: dict[str, Any], kind: str, billions: float
) -> None:
    path = tmp_path / "model.json"
    path.write_text(json.dumps(values))
    config, file, _ = model_of(str(path))
    assert (type(config).__name__, file) == (kind, None)
    assert config.parameter_count / 1e9 == pytest.approx(billions, abs=0.1)


def test_compare_lists_the_difference_of_each_term() -> None:
    pair = ("compare", "tensor=8,zero=1,context=1", "tensor=2,zero=1,context=1")
    base = ("--model", "llama3-8b", "--gpus", "8", "--batch", "16", "--sequence", "4096")
    found = ask(*pair, *base)
    a, b = found["layouts"]
    assert a["tensor"] == 8 and found["difference"]["time_s"]["tensor"] == a["time_s"]["tensor"] - b["time_s"]["tensor"]
    text = run(*pair, *base)
    assert "A - B" in text and figure(a["step_s"]) in text


def test_page_picture_and_training_file_have_the_same_numbers(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("plan.html", "plan.png", "run.yaml")]
    written = ("--html", str(files[0]), "--plot", str(files[1]), "--output", str(files[2]))
    given = ("--layout", "tensor=2,context=1,offload=true,recompute=full")
    found = ask("--model", "llama3-8b", "--gpus", "8", "--batch", "16", "--sequence", "4096", *given, *written)
    best = found["layouts"][0]
    html = files[0].read_text()
    body = re.sub(r"(?s:<style>.*?</style>)|<p><b>.*?</b></p>|<[^>]*>", " ", html)
    known = {figure(value) for each in found["layouts"] for value in (each["step_s"], each["tflops_per_gpu"])}
    known |= {figure(100 * each["mfu"]) for each in found["layouts"]}
    known |= {figure(sum(each["memory_gib"].values())) for each in found["layouts"]} | {figure(best["step_s"])}
    known |= {figure(value) for key in ("memory_gib", "time_s") for value in best[key].values()}
    known |= {f"{number:,}" for number in (found["considered"], *found["excluded"].values(), 8, 16, 4096)}
    names = r"(?:pipe|data|context|tensor|expert|microbatch|zero)=\d+|interleaved\(\d+\)|1f1b|zb-h1|llama3-8b|h100-80g"
    numbers = re.findall(r"\d[\d,.]*(?:e[+-]?\d+)?", re.sub(names, " ", body))
    assert numbers and {number.rstrip(".,") for number in numbers} <= known
    assert files[1].read_bytes()[:4] == b"\x89PNG"
    training, _ = read_training_file(files[2])
    assert (training.grid.tensor, training.batch.microbatch) == (2, best["microbatch"])
    assert yaml.safe_load(files[2].read_text())["zero"]["offload_optimizer"] == {"device": "cpu"}
    again = ask("--model", str(files[2]), "--gpus", "8", "--layout", "tensor=2,context=1,offload=true,recompute=full")
    assert again["layouts"] == found["layouts"]


def test_a_planned_training_file_loads_the_weights_of_a_folder(tmp_path: Path) -> None:
    folder, written = tmp_path / "model", tmp_path / "run.yaml"
    folder.mkdir()
    fields: dict[str, object] = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2, "vocab_size": 256}
    fields |= {"model_type": "llama", "num_attention_heads": 4, "max_position_embeddings": 64}
    (folder / "config.json").write_text(json.dumps(fields))
    asked = ("--model", str(folder), "--gpus", "1", "--batch", "4", "--sequence", "64", "--output", str(written))
    ask(*asked)
    assert read_training_file(written)[0].model.has_weights is False
    (folder / "model.safetensors").touch()
    ask(*asked)
    assert read_training_file(written)[0].model.has_weights is True


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpus", "8"], "--batch is missing"),
        (["--batch", "8"], "--gpus is missing"),
        (["--gpus", "8", "--batch", "8", "--layout", "tensr=2"], "tensor"),
        (["--gpus", "8", "--batch", "8", "--layout", "zero=4"], "Give 0, 1, 2 or 3"),
        (["--gpus", "8", "--batch", "8", "--layout", "schedule=1f1"], "1f1b"),
        (["--gpus", "8", "--batch", "8", "--layout", "tensor=3"], "does not divide 8 GPUs"),
        (["--gpus", "8", "--batch", "8", "--machine", "h100"], "Give one of a100-80g"),
        (["--gpus", "1", "--batch", "8", "--memory", "4"], "GiB short"),
        (["--gpus", "8", "--batch", "8", "--memory", "80,x"], "--memory = '80,x': give a number or a list of numbers"),
        (["--gpus", "8", "--batch", "8", "--speeds", "1,0"], "--speeds = .*: give a number above 0"),
        (["--gpus", "8", "--batch", "8", "--precision", "bf8"], "--precision = 'bf8': give 'bf16' or 'fp16'"),
        (["--why", "tensor=2", "tensor=4"], "--why is a verb now: type triax plan compare LAYOUT LAYOUT"),
        (["--measure", "here.json"], r"--measure is a verb now: type triax machine measure FILE\.json"),
    ],
)
def test_triax_plan_refuses_wrong_arguments_with_what_to_type(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run("--model", "llama3-8b", "--sequence", "2048", *arguments)


def test_triax_plan_warns_if_the_first_layout_has_little_free_memory() -> None:
    sizes = ("--model", "llama3-70b", "--gpus", "16", "--batch", "16", "--layout", "context=1,schedule=1f1b")
    limit = ask(*sizes, "--top", "1")["layouts"][0]["memory_gib"]
    text = " ".join(run(*sizes, "--top", "1").split())
    found = re.search(
        r"the first leaves (\S+) GiB free, less than 5%: (\S+) takes \S+ s and (\S+) GiB; --memory (\S+)", text
    )
    assert found is not None, text
    of = float(found[1]) + sum(limit.values())
    assert float(found[1]) < 0.05 * of and float(found[3]) < 0.95 * of
    roomy = " ".join(run(*sizes, "--top", "1", "--memory", found[4]).split())
    assert f"memory of the first, GiB: {found[3]} of" in roomy


def test_a_given_layout_that_does_not_fit_gets_a_proposal() -> None:
    layout = "pipe=1,data=8,tensor=1,context=1,microbatch=1,zero=0,recompute=none,offload=false"
    arguments = ["plan", "--model", "llama3-8b", "--batch", "8", "--sequence", "2048", "--layout", layout, "--json"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0 and len(json.loads(done.stdout)["layouts"]) == 1
    assert "GiB short" in done.stderr and "fits" in done.stderr


def test_each_prediction_says_how_far_it_can_be_trusted(tmp_path: Path) -> None:
    """In the first line, in --json, on the page and in the written file; for machine files and other precisions too."""
    sizes = ("--model", "llama3-8b", "--gpus", "8", "--batch", "16", "--sequence", "4096")
    given = ("--layout", "pipe=1,tensor=2,zero=1,microbatch=1,recompute=full")
    outputs = ("--html", str(tmp_path / "page.html"), "--output", str(tmp_path / "run.yaml"))
    found = ask(*sizes, *given, "--machine", "h200")
    trusted, best = found["trust"], found["layouts"][0]
    line = trusted["line"]
    assert trusted["class"] == "unseen machine" and "product_efficiency 0.653 (of the h100-80g" in line
    assert best["interval_s"] == [best["step_s"] * trusted["low"], best["step_s"] * trusted["high"]]
    text = run(*sizes, *given, *outputs, "--machine", "h200")
    assert " ".join(text.split()).startswith(line)
    assert "chosen by the search: data=4, context=1" in " ".join(text.split())
    assert f"wrote {tmp_path / 'run.yaml'}: data=4,tensor=2" in text.replace("\n", "")
    assert line in (tmp_path / "page.html").read_text().replace("&#39;", "'")
    assert (tmp_path / "run.yaml").read_text().startswith(f"# written by triax plan\n# {line}")
    assert read_training_file(tmp_path / "run.yaml")[0].grid.tensor == 2
    pair = ("compare", "tensor=8,zero=1", "tensor=2,zero=3")
    why = ask(*pair, *sizes, "--machine", "b200")
    assert next(iter(why)) == "trust" and run(*pair, *sizes, "--machine", "b200").startswith("90 % of published runs")

    def known(machine: str, *others: str) -> str:
        return str(ask(*sizes, *given, "--machine", machine, *others)["trust"]["class"])

    def file(**fields: Any) -> str:
        path = tmp_path / "own.json"
        path.write_text(json.dumps(fields))
        return str(path)

    seen, unseen, other = "seen machine and size", "unseen machine", "seen machine, other size"
    every = MACHINES["h100-80g"].to_dict()
    fitted = {"product_efficiency": "fitted to our runs", "bandwidth_efficiency": "fitted to our runs"}
    assert known("h100-80g") == known(file(base="h100-80g", memory=70e9, overlap_weights=False)) == other
    assert known(file(base="h100-80g", fitted_models=[7e9])) == seen
    assert known("cpu", "--precision", "fp32", "--memory", "90") == unseen
    assert known("h100-80g", "--precision", "fp32", "--memory", "200") == unseen
    assert known("h100-80g", "--products", "fp8") == unseen
    assert (
        known(file(**{**every, "name": "own", "sources": {}})) == known(file(base="h100-80g", bandwidth=5e12)) == unseen
    )
    assert known(file(base="h100-80g", bandwidth=5e12, sources=fitted)) == other
    own = trust(HERE, LlamaConfig.preset("llama3-8b"), "fp32")
    assert own.known == "measured machine"
    assert own.line("here").startswith("90 % of triax's runs took 18 % less to 22 % more than predicted (measured")


def test_triax_plan_prints_the_bubble_in_percent() -> None:
    """An interleaved schedule waits for (p - 1) / (v m) of its passes: Narayanan et al. 2021."""
    sizes = ("--model", "llama2-7b", "--gpus", "64", "--batch", "512", "--sequence", "4096")
    layout = "pipe=4,tensor=2,zero=1,microbatch=1,data=8,chunks=2,schedule=interleaved"
    (shown,) = re.findall(r"bubble \S+ \((\S+)%\)", run(*sizes, "--layout", layout))
    idle = 3 / (2 * 64)
    assert float(shown) == pytest.approx(100 * idle / (1 + idle), rel=0.15)  # messages and the update are no passes


def test_a_written_plan_dry_runs_and_has_a_slurm_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    sizes = ("--model", "llama-tiny", "--gpus", "16", "--batch", "16", "--sequence", "64", "--precision", "fp32")
    layout = "pipe=2,tensor=2,microbatch=1,slices=2"
    said = run(*sizes, "--layout", layout, "--output", "run.yaml", "--sbatch", "job.sbatch")
    assert "wrote job.sbatch: 16 GPUs on 2 nodes; sbatch job.sbatch" in said
    script = Path("job.sbatch").read_text()
    assert (
        "--nodes=2" in script
        and "--ntasks-per-node=8" in script
        and "srun --cpu-bind=cores triax train run.yaml" in script
    )
    done = CliRunner().invoke(app, ["train", "run.yaml", "--dry-run", "--processes", "16"])
    assert done.exit_code == 0, done.output
    with pytest.raises(ConfigError, match="--sbatch does nothing without --output: give it"):
        run(*sizes, "--sbatch", "job.sbatch")
    with pytest.raises(ConfigError, match="which triax train cannot run"):
        run("--model", "llama3-8b", "--gpus", "8", "--batch", "8", "--products", "fp8", "--output", "run.yaml")
    (tmp_path / "mine.yaml").write_text("model: {preset: gpt2}\n")
    with pytest.raises(ConfigError, match=r"mine\.yaml, which exists and is not a file of triax plan"):
        run(*sizes, "--layout", layout, "--output", "mine.yaml")
    assert (tmp_path / "mine.yaml").read_text() == "model: {preset: gpt2}\n"
