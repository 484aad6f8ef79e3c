"""Training files: reading from YAML, TOML and JSON, and the text of errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from triax.base.errors import ConfigError
from triax.train.file import read_training_file
from triax.train.sections import TrainingFile

LONG = "é" * 300  # a name that no file system can have
RUN = """\
name: small
model: {preset: bytes-tiny}
data: tokens
training:
  tokens: 1.5M
  learning_rate: 1e-3
  time_limit: 1h30m
batch: 8
optimizer: SGD
zero: 2
recompute: full
sample: {prompt: "def "}
export: false
"""


def _write(folder: Path, text: str, name: str = "run.yaml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_short_forms_and_changes_are_read_into_sections(tmp_path: Path) -> None:
    changes = ["batch.size=16", "optimizer.momentum=0.9", "lora.rank=4"]
    run, _ = read_training_file(_write(tmp_path, RUN), changes)
    training = run.training
    assert (training.tokens, run.batch.size, training.time_limit) == (1_500_000, 16, 5400)
    assert (training.learning_rate.peak, run.optimizer.type, run.zero.stage) == (1e-3, "SGD", 2)
    assert run.optimizer.arguments == {"momentum": 0.9}
    assert run.data.training == "tokens" and run.recompute.granularity == "full"
    assert run.export is None and run.lora is not None and run.lora.rank == 4


def test_yaml_toml_and_json_give_equal_training_files(tmp_path: Path) -> None:
    yaml = _write(tmp_path, "model: {preset: gpt2}\ndata: tokens\nbatch: 2\ntraining: {steps: 5}\n")
    toml = _write(tmp_path, 'data = "tokens"\n[model]\npreset = "gpt2"\n[training]\nsteps = 5\nbatch = 2\n', "run.toml")
    values = {"model": {"preset": "gpt2"}, "data": "tokens", "training": {"steps": 5}, "batch": {"size": 2}}
    jsn = _write(tmp_path, json.dumps(values), "run.json")
    read = [read_training_file(path)[0] for path in (yaml, toml, jsn)]
    assert read[0] == read[1] == read[2] == TrainingFile.of(values)


TOML = (
    'batch = 8\nzero = {stage = 1}\ndata.training = [\n  "a]",\n  "b",\n]\n[model]\npreset = """\n\\\nbytes-tiny"""\n'
    '[optimizer]\ntype = "SGD"\n[training]\nsteps = 2\n'
)
JSON = """\
{
  // a comment
  "model": {"preset": "bytes-tiny"}, "data": "tokens",
\t"training": {"steps": 2},
    "batch": 8, /* and
    another */
    "zero": {"stage": 1},
}
"""


TEXTS = {"run.yaml": RUN, "run.toml": TOML, "run.json": JSON}


@pytest.mark.parametrize(
    ("name", "before", "after", "expected"),
    [
        ("run.yaml", "batch: 8", "bacth: 8", "line 8: the training file: there is no 'bacth'; did you mean 'batch'?"),
        ("run.yaml", "batch: 8", "batch: x", "line 8: batch.size = 'x': give a whole number"),
        ("run.yaml", "1.5M", "1.5M\n  steps: 3", "line 4: training: steps and tokens all say how long the run is"),
        ("run.yaml", "1h30m", "90", "line 7: training.time_limit = 90: give a time with its unit"),
        ("run.yaml", "1.5M", "many", "line 5: training.tokens = 'many': give a whole number of tokens"),
        ("run.yaml", "name: small", "nme: small", "line 1: the training file: there is no 'nme'; did you mean 'name'?"),
        ("run.yaml", "name: small", "name: a/b", "line 1: name = 'a/b'"),
        ("run.yaml", "data: tokens", "", "run.yaml: data is missing: write it"),
        (
            "run.yaml",
            "data: tokens",
            "data: {training: null}",
            "data.training = null: give a folder, a list of folders",
        ),
        ("run.yaml", "data: tokens", f"data: {LONG}", "has 600 bytes: a name of at most 255 bytes is possible"),
        ("run.yaml", "name: small", f"runs: a/{LONG}", "runs = "),
        (
            "run.yaml",
            "name: small",
            f"checkpoint: {{every: 5, folder: {LONG}}}",
            "a name of at most 255 bytes is possible",
        ),
        ("run.yaml", "export: false", f"export: {{folder: {LONG}}}", "a name of at most 255 bytes is possible"),
        ("run.yaml", "name: small", "name: small\nname: big", "line 2 is not YAML: 'name' stands here twice"),
        ("run.yaml", "name: small", "name: [", "is not YAML"),
        ("run.yaml", "name: small", "on: small", "the key true is no text: write it in quotes"),
        ("run.yaml", "name: small", "name: !!python/object:os.system x", "line 1 is not YAML"),
        ("run.yaml", "preset: bytes-tiny", "preset: a, folder: b", "line 2: model: both preset and folder are given"),
        ("run.yaml", "preset: bytes-tiny", "folder: b, overrides: {dropout: 0.1}", "overrides change the shape"),
        ("run.toml", "batch", "bacth", "line 1: the training file: there is no 'bacth'; did you mean 'batch'?"),
        ("run.toml", "batch = 8", "batch = -8", "line 1: batch.size = -8"),
        ("run.toml", "stage = 1", "stage = 9", "line 2: zero.stage = 9"),
        ("run.toml", '"b"', "3", "line 3: data.training"),
        ("run.toml", '"SGD"', "3", "line 12: optimizer.type: give a name, not 3"),
        ("run.toml", "preset", "prest", "line 8: model: there is no 'prest'; did you mean 'preset'?"),
        ("run.toml", "batch = 8", "zero = 8", "is not TOML: "),
        ("run.json", '"batch"', '"bacth"', "line 5: the training file: there is no 'bacth'; did you mean 'batch'?"),
        ("run.json", '"batch": 8', '"batch": -8', "line 5: batch.size = -8"),
        ("run.json", '"stage": 1', '"stage": 9', "line 7: zero.stage = 9"),
        ("run.json", '"batch": 8', '"data": 8', "line 5: 'data' stands here twice"),
        ("run.json", '"batch": 8', '"batch": ', "is not JSON: Expecting value: line 5, column 14"),
    ],
)
def test_training_file_errors_name_line_and_key(
    tmp_path: Path, name: str, before: str, after: str, expected: str
) -> None:
    assert before in TEXTS[name] and read_training_file(_write(tmp_path, TEXTS[name], name))
    with pytest.raises(ConfigError) as caught:
        read_training_file(_write(tmp_path, TEXTS[name].replace(before, after), name))
    text = str(caught.value).removeprefix("the configuration ")
    assert expected in text and text.startswith(f"{tmp_path}/{name}")


def test_wrong_changes_on_the_command_line_are_refused(tmp_path: Path) -> None:
    path = _write(tmp_path, RUN)
    for change, expected in (
        ("batch.size", "is not key=value"),
        ("batch.size=-1", "with batch.size=...: batch.size = -1"),
        ("name.first=1", "which is 'small' in"),
        ("traning.batch=1", "there is no 'traning'; did you mean 'training'?"),
    ):
        with pytest.raises(ConfigError, match=change.split("=")[0].split(".")[0]) as caught:
            read_training_file(path, [change])
        assert expected in str(caught.value)


@pytest.mark.parametrize(
    "text", ["a: " + "[" * 3000 + "]" * 3000, "a: " + "[a, " * 1500, "{" * 1000 + "a: 1", "a:\n  " + "- " * 3000 + "1"]
)
def test_deep_files_are_refused_at_the_limit(tmp_path: Path, text: str) -> None:
    """PyYAML's time is quadratic in the depth: 6 kB cost seconds, and then Python's limit of recursion was hit."""
    (tmp_path / "deep.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"deep.yaml, line \d is not YAML: it is nested in more than 50 levels"):
        read_training_file(tmp_path / "deep.yaml")


def test_recursive_and_exploding_yaml_is_refused(tmp_path: Path) -> None:
    bomb = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
        f"{chr(98 + i)}: &{chr(98 + i)} [{', '.join([f'*{chr(97 + i)}'] * 10)}]\n" for i in range(6)
    )
    for text, message in ((bomb, "is nested"), ("a: &a [*a]\n", "is nested"), ("[" * 1000, "not YAML")):
        with pytest.raises(ConfigError, match=message):
            read_training_file(_write(tmp_path, text))
