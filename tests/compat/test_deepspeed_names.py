"""Modules and names under DeepSpeed's names, ``install``, and the ledger that lists them."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from torch import nn

import triax
import triax.compat.deepspeed as adapter
from triax.compat.deepspeed import ledger
from triax.compat.deepspeed.ledger import VERSION

# Every public name of DeepSpeed 0.19.8: those that an ``__init__`` file of it binds, and those that its documentation,
# its tutorials and its examples import. One line for each module and kind: "module kind: names".
LISTED = Path(__file__).with_name("deepspeed_names.txt")


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """``install()`` has been called, in this test alone."""
    before = dict(sys.modules)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    adapter.install()
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "deepspeed" and name not in before]:
        del sys.modules[name]


def test_submodules_are_imported_under_both_names(installed: None) -> None:
    here = importlib.import_module("triax.compat.deepspeed.runtime.lr_schedules")
    assert importlib.import_module("deepspeed.runtime.lr_schedules") is here
    assert here.__spec__ is not None and here.__spec__.name == here.__name__
    assert here.WarmupLR is importlib.import_module("triax.compat.deepspeed.lr_schedules").WarmupLR
    # A file, and a second path to it.
    assert importlib.import_module("deepspeed.runtime.zero.partition_parameters") is adapter.zero
    assert importlib.import_module("deepspeed") is adapter
    assert issubclass(adapter.PipelineModule, triax.PipelineModule)


@pytest.mark.parametrize(
    ("module", "name"),
    [("runtime.constants", ""), ("nebula.config", ""), ("runtime.pipe", "p2p"), ("runtime.config", "BFLOAT16")],
)
def test_an_import_of_an_inner_name_says_where_to_look(installed: None, module: str, name: str) -> None:
    """Scripts import parts of DeepSpeed's inside, as diffusion-pipe does."""
    line = f"from deepspeed.{module} import {name or 'x'}"
    with pytest.raises(
        ImportError, match=r"triax has no deepspeed\.[\w.]+, .* docs/reference/deepspeed-names\.md says"
    ):
        exec(line, {})


def test_libraries_find_deepspeed_and_its_version(installed: None) -> None:
    assert importlib.util.find_spec("deepspeed") is not None
    assert importlib.util.find_spec("deepspeed.pipe") is not None
    assert importlib.metadata.version("deepspeed") == adapter.__version__ == VERSION
    assert importlib.metadata.metadata("deepspeed")["Name"] == "deepspeed"
    assert importlib.metadata.packages_distributions()["deepspeed"] == ["deepspeed"]
    found = importlib.metadata.version("pytest")
    assert found == pytest.__version__
    adapter.install()  # a second call does nothing


def test_a_deepspeed_script_runs_unchanged(
    installed: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "beside.py").write_text("value = 3\n")
    script = tmp_path / "script.py"
    script.write_text(
        "import argparse, beside, deepspeed\nfrom deepspeed.ops.adam import FusedAdam\n"
        "parser = argparse.ArgumentParser()\nparser.add_argument('--local_rank', type=int, default=-1)\n"
        "parser = deepspeed.add_config_arguments(parser)\nargs = parser.parse_args()\n"
        "print(deepspeed.__name__, FusedAdam.__name__, beside.value)\n"
        "print(args.local_rank, args.deepspeed_config, __name__)\n"
    )
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name, value in {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["-m", str(script), "--deepspeed_config", "file.json"])
    run = importlib.import_module("triax.compat.deepspeed.__main__").main
    run()
    assert capsys.readouterr().out.split() == [adapter.__name__, "FusedAdam", "3", "1", "file.json", "__main__"]
    del sys.modules["beside"]
    monkeypatch.setattr(sys, "argv", ["-m"])
    with pytest.raises(SystemExit, match=r"no script was given: write python -m triax\.compat\.deepspeed script\.py"):
        run()


def test_install_refuses_to_replace_deepspeed_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", ModuleType("deepspeed"))
    with pytest.raises(ImportError, match=r"after DeepSpeed itself was imported.*at the top of the script"):
        adapter.install()


def test_importing_a_missing_name_raises_its_sentence(installed: None) -> None:
    with pytest.raises(AttributeError, match=r"deepspeed\.DeepSpeedHybridEngine: triax has no hybrid engine: train"):
        adapter.DeepSpeedHybridEngine  # type: ignore[attr-defined]  # noqa: B018
    for statement, told in (
        ("from deepspeed import DeepSpeedHybridEngine", "triax has no hybrid engine: train"),
        ("from deepspeed.inference.v2 import InferenceEngineV2", "triax has no FastGen: init_inference"),
        ("import deepspeed.autotuning.tuner", "triax plan searches for the whole layout"),
        ("from deepspeed.zero import nonsense", r"triax has no deepspeed\.zero\.nonsense"),
        ("import deepspeed.nonsense", r"triax has no deepspeed\.nonsense"),
    ):
        with pytest.raises(ImportError, match=told):
            exec(statement)
    with pytest.raises(AttributeError, match=r"triax has no deepspeed\.zero\.nonsense, which is not among"):
        adapter.zero.nonsense  # noqa: B018


def test_gpt_neox_and_diffusion_pipe_import_their_names(installed: None) -> None:
    for statement in (
        "from deepspeed.launcher.runner import DLTS_HOSTFILE, fetch_hostfile, parse_inclusion_exclusion",
        "from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology",
        "from deepspeed.runtime.pipe.engine import PipelineEngine, DeepSpeedEngine",
        "import deepspeed.runtime.activation_checkpointing.checkpointing as checkpointing",
        "from deepspeed.runtime.pipe import module as ds_pipe_module, LayerSpec",
        "from deepspeed.utils import groups; groups._get_data_parallel_group, groups._get_broadcast_src_rank",
        "from deepspeed.utils.logging import logger, log_dist",
        "import deepspeed.comm.comm as dist",
    ):
        exec(statement, {})
    assert adapter.checkpointing._CUDA_RNG_STATE_TRACKER is adapter.checkpointing.get_cuda_rng_tracker()
    assert adapter.checkpointing._MODEL_PARALLEL_RNG_TRACKER_NAME == "model-parallel-rng"
    marked = importlib.import_module("deepspeed.runtime.utils").is_model_parallel_parameter
    linear = triax.tensor_parallel.ColumnParallelLinear(2, 2, grid=triax.Grid())
    assert marked(linear.weight) and not marked(nn.Linear(2, 2).weight)


@pytest.mark.parametrize(
    ("module", "name", "instead"),
    [
        ("runtime.pipe.schedule", "SendGrad", "set pipeline.schedule to a schedule's name"),
        ("runtime.bf16_optimizer", "BF16_Optimizer", "the engine holds the master weights"),
        ("runtime.data_pipeline.curriculum_scheduler", "CurriculumScheduler", "pass a dataset"),
        ("comm", "mpi_discovery", "grid reads the launcher"),
        ("launcher.runner", "main", "use triax run"),
        ("launcher.runner", "EXPORT_ENVS", "by --export NAME"),
        ("utils.groups", "initialize", r"groups\.initialize: process groups belong to the engine's grid"),
    ],
)
def test_a_name_that_triax_lacks_says_what_to_use(installed: None, module: str, name: str, instead: str) -> None:
    """GPT-NeoX and diffusion-pipe import these names of DeepSpeed."""
    with pytest.raises(ImportError):
        exec(f"from deepspeed.{module} import {name}", {})
    with pytest.raises((ImportError, AttributeError), match=instead):
        getattr(importlib.import_module(f"deepspeed.{module}"), name)


def test_deepspeeds_host_files_are_read_and_filtered(
    installed: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    runner = importlib.import_module("deepspeed.launcher.runner")
    (tmp_path / "hosts").write_text("one slots=2\ntwo slots=3\n")
    pool = runner.fetch_hostfile(tmp_path / "hosts")
    assert pool == {"one": 2, "two": 3} and runner.fetch_hostfile(tmp_path / "none") is None
    assert "there is no hostfile" in caplog.text
    assert runner.parse_inclusion_exclusion(pool, "", "two:1") == {"one": [0, 1], "two": [0, 2]}
    assert runner.parse_inclusion_exclusion(pool, "two:0,2", "") == {"two": [0, 2]}


def kind_of(value: object) -> str:
    if isinstance(value, ModuleType):
        return "module"
    return "class" if inspect.isclass(value) else "function" if callable(value) else "value"


def listed_names() -> Iterator[tuple[str, str, str]]:
    """Yield module (of a member: its class), kind and name for each name in the list."""
    for line in LISTED.read_text().splitlines():
        head, _, names = line.partition(": ")
        module, kind = head.split()
        for name in names.split():
            yield module, kind, name


def value_of(module: str, kind: str, name: str) -> object:
    """Return what a listed name stands for; ImportError or AttributeError if it is not there."""
    if kind == "member":
        return getattr(getattr(adapter, module.removeprefix("deepspeed.")), name)
    return getattr(importlib.import_module(module), name)


def reasons_of(module: str, name: str) -> set[object]:
    """Return the sentences in the table of absent names for this name, or for its module as a whole."""
    paths = (f"{module}.{name}".removeprefix("deepspeed."), module.removeprefix("deepspeed."))
    return {ledger.answer(ledger.canonical(path)) for path in paths}


def test_every_deepspeed_name_exists_or_its_error_says_why(installed: None) -> None:
    """A listed name is a module, class, function or value as in DeepSpeed, or raises the sentence of its entry."""
    present, refused, wrong = 0, 0, []
    for module, kind, name in listed_names():
        try:
            found = kind_of(value_of(module, kind, name))
        except (ImportError, AttributeError) as error:
            refused += 1
            _, _, reason = str(error).partition(": ")
            if reason not in reasons_of(module, name):
                wrong.append(f"{module}.{name}: {error}")
        else:
            present += 1
            if kind not in ("member", found):
                wrong.append(f"{module}.{name} is a {found}, and a {kind} in DeepSpeed")
    print(f"{present} names are present, {refused} are refused with a sentence")
    assert not wrong, "\n" + "\n".join(wrong)
    assert present + refused > 800


def test_the_ledger_holds_places_and_sentences() -> None:
    """Each place is there, each sentence tells something, and no name has two answers."""
    for module, places in ledger.PRESENT.items():
        absent = {name for names in ledger.ABSENT.get(module, {}).values() for name in names.split()}
        for place, names in places.items():
            for name in names.split():
                theirs, _, ours = name.partition("=")
                assert theirs not in absent, f"{module}.{theirs} has two answers"
                if place == "=":
                    continue
                found = importlib.import_module(ledger.home(place))
                assert hasattr(found, ours or theirs), f"{place} has no {ours or theirs}"
    sentences = {sentence for each in ledger.ABSENT.values() for sentence in each} | {*ledger.ABSENT_MODULES.values()}
    assert all(len(sentence.split()) >= 4 and not sentence.endswith(".") for sentence in sentences)
