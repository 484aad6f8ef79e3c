"""Installation: the wheel, the package, the pins, the Makefile."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
import zipfile
from datetime import date
from email import message_from_string
from importlib.metadata import packages_distributions
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from packaging.requirements import Requirement
from typer.testing import CliRunner

import triax
from triax.base.errors import to_install
from triax.cli.main import app, main

from support.import_reader import ROOMS, library, needs_no_torch
from support.paths import ROOT
from support.versions import versions

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
STUBS = [ROOT / "__init__.pyi", *(file for folder in ROOMS for file in sorted((ROOT / folder).rglob("*.pyi")))]
TORCH_FREE = [file for file in library(ROOT) if needs_no_torch(file)]


def run(*command: object, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    # Without MAKEFLAGS and the like: these tests may themselves run under `make -j`.
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    return subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env=inherited | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, with stray files such as a working checkout has, and with nothing downloaded."""
    folder = tmp_path_factory.mktemp("wheel")
    stray = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "*.egg-info", "runs")
    shutil.copytree(ROOT, folder / "copy", ignore=stray)
    for file in ("runs/a/metrics.json", "runs/a/loss.png", "examples/stray.py", "benchmarks/stray.py"):
        (folder / "copy" / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / "copy" / file).touch()
    options = ("--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--wheel-dir", folder)
    done = run(sys.executable, "-m", "pip", "wheel", *options, folder / "copy", cwd=folder)
    assert done.returncode == 0, done.stderr
    (made,) = folder.glob("*.whl")
    return made


@pytest.fixture(scope="module")
def unpacked(wheel: Path) -> Path:
    folder = wheel.parent / "unpacked"
    zipfile.ZipFile(wheel).extractall(folder)
    return folder


# ------------------------------------------------------------------------------------------- the wheel


def test_wheel_has_only_the_files_of_the_library(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    info = f"triax-{triax.__version__}.dist-info"
    ours = {name for name in names if not name.startswith(f"{info}/")}
    stubs = {str(file.relative_to(ROOT)) for file in STUBS}
    data = {"py.typed", "engine/monitor/report/page.html", "plugins/plan/page.html"}
    tables = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "*/*.toml"], cwd=ROOT, capture_output=True, text=True
    )
    data |= {file for file in tables.stdout.split() if not file.startswith(("examples/", "tests/", "docs/"))}
    data |= {f"docs/{file.relative_to(ROOT / 'docs')}" for file in (ROOT / "docs").rglob("*.md")}
    for files in ("gpt_*.py", "new_project/*.*", "recipes/*.*"):
        data |= {str(file.relative_to(ROOT)) for file in (ROOT / "examples").glob(files)}
    assert ours == {f"triax/{file}" for file in {*library(ROOT), *stubs, *data, "docs/conf.py"}}
    assert f"{info}/licenses/LICENSE" in names


def test_the_wheel_writes_recipes_and_projects(unpacked: Path, tmp_path: Path) -> None:
    """It runs from the unpacked wheel, without a checkout; the help names pages of docs that the wheel has."""
    for words in (("recipe", "llama3-8b-8gpus"), ("new", "first")):
        done = run(sys.executable, "-m", "triax.cli.main", *words, cwd=tmp_path, PYTHONPATH=str(unpacked))
        assert done.returncode == 0, done.stderr
    files = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.*")}
    project = {"first/first.py", "first/gpt_plain.py", "first/test_first.py"}
    assert {"llama3-8b-8gpus.yaml", "llama3-8b-8gpus.sbatch"} | project <= files
    said = run(sys.executable, "-m", "triax.cli.main", "--help", cwd=tmp_path, PYTHONPATH=str(unpacked)).stdout
    assert (
        str(unpacked / "triax") in "".join(re.findall(r"[^\s│]+", said))
        and (unpacked / "triax/docs/launch.md").is_file()
    )


def test_wheel_metadata_lists_its_requirements(unpacked: Path) -> None:
    (info,) = unpacked.glob("*.dist-info")
    metadata = message_from_string((info / "METADATA").read_text())
    needs = [Requirement(line) for line in metadata.get_all("Requires-Dist", [])]
    core = {need.name for need in needs if need.marker is None}
    assert core == {"torch", "numpy", "einops", "pydantic", "safetensors", "typer", "rich", "jinja2", "PyYAML"}
    assert metadata["License-Expression"] == "Apache-2.0"
    assert "triax = triax.cli.main:main" in (info / "entry_points.txt").read_text()


def test_pip_accepts_the_install_advice_of_errors(unpacked: Path, tmp_path: Path) -> None:
    """pip takes the advice, of a checkout and of a wheel, from any folder, and every extra that is named exists."""
    advice = re.compile(r"to_install\(['\"]([a-z]+)['\"]\)")
    texts = {file: (ROOT / file).read_text() for file in library(ROOT)}
    named = {extra for text in texts.values() for extra in advice.findall(text)} | {"tensorboard", "wandb"}
    assert named == set(PROJECT["project"]["optional-dependencies"]) - {"bench", "test", "lint", "docs", "look", "dev"}
    assert [file for file, text in texts.items() if "triax[" in text] == ["base/errors.py"]
    say = "from triax.base.errors import to_install; print(to_install('tensorboard'))"
    checkout = to_install("tensorboard")
    wheel = bare(unpacked, "-c", say).stdout.strip()
    assert checkout == f"pip install -e '{ROOT}[tensorboard]'" and wheel == "pip install 'triax[tensorboard]'"
    for command, path, more in ((checkout, "", ["--no-build-isolation"]), (wheel, str(unpacked), [])):
        words = [sys.executable, "-m", *shlex.split(command), "--no-index", "--dry-run", *more]
        done = run(*words, cwd=tmp_path, PYTHONPATH=path)
        assert done.returncode == 0 and "does not provide the extra" not in done.stderr, done.stderr
        assert "tensorboard>=2.20" in done.stdout, done.stdout


def test_every_folder_of_the_library_is_packaged() -> None:
    files = [Path(file).parent for file in library(ROOT) if "/" in file]
    folders = {".".join(("triax", *folder.parts)) for folder in files}
    assert {"triax", "triax.docs"} | folders == set(PROJECT["tool"]["setuptools"]["packages"])


def test_the_command_triax_is_a_function() -> None:
    module, _, name = PROJECT["project"]["scripts"]["triax"].partition(":")
    assert getattr(importlib.import_module(module), name) is main


# ------------------------------------------------------- without torch: no package but triax is there at all


def bare(unpacked: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Python with the standard library and the unpacked wheel, and no site-packages."""
    return run(sys.executable, "-S", *command, cwd=unpacked, PYTHONPATH=str(unpacked))


def test_bare_python_cannot_import_torch(unpacked: Path) -> None:
    assert "No module named 'torch'" in bare(unpacked, "-c", "import torch").stderr
    assert "No module named" in bare(unpacked, "-c", "import triax; triax.Grid").stderr


def test_torch_free_files_import_without_torch(unpacked: Path) -> None:
    modules = [".".join(("triax", *Path(file).with_suffix("").parts)).removesuffix(".__init__") for file in TORCH_FREE]
    assert "triax.pipe.schedules.registry" in modules and "triax.grid.topology" in modules
    tell = "import importlib, sys\nfor name in sys.argv[1:]: importlib.import_module(name)"
    done = bare(unpacked, "-c", tell, *modules)
    assert done.returncode == 0, done.stderr


def test_schedules_run_as_a_program_without_torch(unpacked: Path) -> None:
    done = bare(unpacked, "-m", "triax.pipe.schedules.registry")
    assert done.returncode == 0, done.stderr


def test_schedules_are_made_verified_and_simulated_without_torch(unpacked: Path) -> None:
    script = """
import triax
schedule = triax.make_schedule("1f1b", 4, 8)
triax.verify(schedule)
triax.simulate(schedule)
assert triax.Topology(pipe=2, data=2).world_size == 4
"""
    done = bare(unpacked, "-c", script)
    assert done.returncode == 0, done.stderr


# -------------------------------------------------------------------------------------- the package


def test_the_command_prints_the_version_of_the_package() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.output) == (0, f"triax {triax.__version__}\n")


def test_importing_triax_imports_neither_torch_nor_the_library(tmp_path: Path) -> None:
    script = "import sys, triax; print(*sorted(name for name in sys.modules if name.startswith(('triax', 'torch'))))"
    done = run(sys.executable, "-c", script, cwd=tmp_path)
    assert done.stdout.split() == ["triax", "triax.base", "triax.base.lazy", "triax.base.moved"], done.stderr


def test_the_commands_help_imports_no_library_of_a_command(tmp_path: Path) -> None:
    """Pydantic and the planner took half of the time of ``triax --help``."""
    script = "import sys, triax.cli.main as m; m.app(['--help'], standalone_mode=False); print(*sorted(sys.modules))"
    done = run(sys.executable, "-c", script, cwd=tmp_path)
    heavy = {"torch", "numpy", "pydantic", "yaml", "jinja2", "triax.plugins.plan.search", "triax.train.sections"}
    heavy |= {"triax.cli.plan", "triax.cli.train"}  # the help lists commands without importing them
    assert not heavy & set(done.stdout.split()), done.stderr


def test_every_name_in_all_is_an_attribute_of_triax() -> None:
    for name in triax.__all__:
        value = getattr(triax, name)
        assert value is getattr(triax, name)
        home = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", "triax.")
        assert home.startswith("triax.")
    assert set(triax.__all__) <= set(dir(triax))


@pytest.mark.parametrize("stub", STUBS, ids=lambda stub: str(stub.relative_to(ROOT)))
def test_no_public_name_is_the_name_of_a_file(stub: Path) -> None:
    """Importing ``zero/x.py`` sets the attribute ``x`` of the package, in place of a public function of that name."""
    names = {line.split()[-1] for line in stub.read_text().splitlines() if line.startswith("from ")}
    modules = {line.split()[-1] for line in stub.read_text().splitlines() if line.startswith("from . ")}
    files = {path.stem for path in stub.parent.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()}
    assert not (names - modules) & files


def test_a_wrong_attribute_of_triax_gets_a_suggestion() -> None:
    with pytest.raises(AttributeError, match=r"'triax' has no attribute 'Gird'; did you mean 'Grid'\?"):
        triax.Gird  # type: ignore[attr-defined]  # noqa: B018


def test_the_package_may_be_imported_under_another_name() -> None:
    """pytest does so: the checkout's own folder looks like a package to it."""
    before = set(sys.modules)
    spec = importlib.util.spec_from_file_location(
        "another_name", ROOT / "__init__.py", submodule_search_locations=[str(ROOT)]
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["another_name"] = module
    spec.loader.exec_module(module)
    assert set(sys.modules) - before == {
        "another_name",
        "another_name.base",
        "another_name.base.lazy",
        "another_name.base.moved",
    }
    assert module.__version__ == triax.__version__ == PROJECT["project"]["version"]


# ------------------------------------------------------------------------------------ pins and Makefile


def test_constraints_pin_what_pyproject_asks_for() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = {pin.name.lower(): pin.specifier for pin in map(Requirement, (x for x in lines if x and x[0] != "#"))}
    extras = PROJECT["project"]["optional-dependencies"]
    asked = [Requirement(x) for x in [*PROJECT["project"]["dependencies"], *extras["plot"], *extras["test"]]]
    asked += [
        Requirement(x)
        for x in [
            *extras["lint"],
            *extras["hf"],
            *extras["data"],
            *extras["look"],
            *PROJECT["build-system"]["requires"],
        ]
    ]
    assert len(asked) > 10
    for need in asked:
        (pin,) = pins[need.name.lower()]
        assert pin.operator == "==" and pin.version in need.specifier, f"{need} against {pin}"
    assert str(pins["torch"]) == "==2.13.0"
    assert all(len(specifier) == 1 and next(iter(specifier)).operator == "==" for specifier in pins.values())


PIP, PYTEST = "-m pip install", "-m pytest"


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """The Makefile in a folder of its own, with a Python that only notes what it is asked."""
    folder = tmp_path / "clone with a space"
    folder.mkdir()
    for file in ("Makefile", "pyproject.toml", "constraints.txt", ".ci/run"):
        (folder / file).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / file, folder / file)
    fake = folder / "fake-python"
    fake.write_text(
        "#!/bin/sh\n"
        f'echo "$@" >> "{folder}/log"\n'
        f'case "$*" in "-m venv"*) mkdir -p .venv/bin; cp "{fake}" .venv/bin/python ;; esac\n'
        'case "$*" in *"-m pytest"*) echo "3 passed in 0.01s"; exit ${FAKE_STATUS:-0} ;; esac\n'
    )
    fake.chmod(0o755)
    return folder


def asked(clone: Path) -> list[str]:
    log = clone / "log"
    lines = [line for line in log.read_text().splitlines() if line != "-c"] if log.exists() else []
    log.unlink(missing_ok=True)
    return [line for line in lines if line.strip() not in ("-c", "--version")]


def make(clone: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return run("make", "PYTHON=./fake-python", *words, cwd=clone, **environment)


@pytest.mark.parametrize("jobs", ["-j1", "-j8"])
def test_make_installs_when_the_environment_is_missing_or_stale(clone: Path, jobs: str) -> None:
    done = make(clone, "test", "test-all", jobs)
    assert done.returncode == 0, done.stderr
    first = asked(clone)
    assert first[0].startswith("-m venv") and PIP in first[1] and "-c constraints.txt" in first[1]
    assert [PYTEST in line for line in first] == [False, False, True, True]
    assert "exhaustive or not exhaustive" in first[3]
    assert "missing or older" in done.stdout

    make(clone, "test", jobs)
    assert [PYTEST in line for line in asked(clone)] == [True]

    for source in ("pyproject.toml", "constraints.txt", "Makefile"):
        later = (clone / ".venv" / "installed").stat().st_mtime + 10
        os.utime(clone / source, (later, later))
        done = make(clone, "test", jobs)
        assert f"older than {source}" in done.stdout
        assert [PIP in line for line in asked(clone)] == [True, False]
        os.utime(clone / ".venv" / "installed", (later + 1, later + 1))


def test_make_repeats_an_install_that_failed(clone: Path) -> None:
    fake = (clone / "fake-python").read_text()
    (clone / "fake-python").write_text(fake + 'case "$*" in *"pip install"*) exit 1 ;; esac\n')
    assert make(clone, "test").returncode != 0
    assert not any(PYTEST in line for line in asked(clone))
    shutil.rmtree(clone / ".venv")
    (clone / "fake-python").write_text(fake)
    assert make(clone, "test").returncode == 0
    assert [PIP in line for line in asked(clone)] == [False, True, False]


@pytest.mark.parametrize(
    ("there", "taken"),
    [
        ({"python3.13": 127, "python3.12": 0, "python3.11": 0}, "python3.12"),  # pyenv's shims are there and do not run
        ({"python3.11": 0, "python3": 0}, "python3.11"),
        ({"python3": 0}, "python3"),
        ({"python3": 1}, None),  # older
    ],
)
def test_make_takes_the_newest_python_that_runs(clone: Path, there: dict[str, int], taken: str | None) -> None:
    path = clone.parent / "path"
    path.mkdir()
    for tool in ("sh", "awk", "mkdir", "cp", "touch", "test"):
        (path / tool).symlink_to(str(shutil.which(tool)))
    for name, status in there.items():
        (path / name).write_text(
            f'#!/bin/sh\ncase "$*" in -c*version_info*) exit {status} ;; esac\n'
            f'echo {name} >> "{clone}/log"\nexec "{clone}/fake-python" "$@"\n'
        )
        (path / name).chmod(0o755)
    done = run(str(shutil.which("make")), "install", cwd=clone, PATH=str(path))
    assert done.returncode == (0 if taken else 2), done.stderr
    assert asked(clone)[:1] == ([taken] if taken else [])
    assert taken or "make PYTHON=/path/to/python3" in done.stderr


def test_make_passes_args_to_the_command(clone: Path) -> None:
    make(clone, "train", "ARGS=--steps 3")
    assert asked(clone)[-1] == "examples/gpt_3d.py --pipe 2 --data 2 --tensor 2 --steps 3"
    make(clone, "test", "ARGS=-k pool")
    assert asked(clone)[-1].endswith("-m pytest -n 2 --dist worksteal -k pool")


def test_make_lists_every_target(clone: Path) -> None:
    listed = re.findall(r"^make (\S+)", make(clone).stdout, re.MULTILINE)
    tests = ["check", "test", "test-all", "test-versions", "test-device", "fuzz"]
    assert listed == ["help", "install", "train", *tests, "docs", "look", "release-check", "wheel", "lint"]


def checked_release(clone: Path, **environment: str) -> tuple[int, list[str]]:
    """Exit code of `make release-check`, and its commands: the first words of each, in their order."""
    make(clone, "install")
    for tool in ("ruff", "mypy", "sphinx-build"):
        (clone / ".venv" / "bin" / tool).write_text(f'#!/bin/sh\necho "{tool} $@" >> "{clone}/log"\n')
        (clone / ".venv" / "bin" / tool).chmod(0o755)
    asked(clone)
    done = make(clone, "release-check", **environment)
    return done.returncode, [line.partition(" --config-file")[0].partition(" --fail")[0] for line in asked(clone)]


LINTED = ["ruff check", "ruff format --check"]
LINTED += ["ruff format --check --config pyproject.toml docs/conf.py docs/inside/structure.py", "mypy"]
EVERY_TEST = ["-m pytest -m exhaustive or not exhaustive"]
AN_HOUR_OF_FUZZING = [
    f"tests/laws/{program}.py --seconds 900" for program in ("fuzz", "fuzz_config", "fuzz_train_files", "faults")
]


def test_the_release_check_runs_every_step_in_order(clone: Path) -> None:
    steps = [*LINTED, *EVERY_TEST, *AN_HOUR_OF_FUZZING, "sphinx-build", "tests/laws/release.py"]
    assert checked_release(clone) == (0, steps)


def test_the_release_check_ends_with_the_step_that_fails(clone: Path) -> None:
    assert checked_release(clone, FAKE_STATUS="1") == (2, [*LINTED, *EVERY_TEST])  # of pytest


def test_all_files_state_one_version() -> None:
    assert set(versions().values()) == {triax.__version__}


def test_the_changelog_lists_versions_newest_first() -> None:
    heads = re.findall(r"^## (.*)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert heads[0] == "[Unreleased]"
    dated = [re.fullmatch(r"\[(\d+)\.(\d+)\.(\d+)\] - (\d{4}-\d\d-\d\d)", head) for head in heads[1:]]
    assert dated and None not in dated
    found = [tuple(map(int, each.groups()[:3])) for each in dated if each]
    assert found == sorted(found, reverse=True)


def test_the_citation_file_has_what_the_format_requires() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= set(cited) and cited["type"] == "software"
    assert cited["license"] == PROJECT["project"]["license"] and isinstance(cited["date-released"], date)
    assert all({"name"} == set(author) for author in cited["authors"])


@pytest.mark.parametrize(
    "file", sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")), ids=lambda file: file.stem
)
def test_issue_templates_are_forms(file: Path) -> None:
    form = yaml.safe_load(file.read_text())
    if file.stem == "config":
        assert form == {"blank_issues_enabled": True}
        return
    assert {"name", "description", "body"} <= set(form)
    names = [part["id"] for part in form["body"]]
    assert len(names) == len(set(names))
    assert all(part["type"] in ("textarea", "input") and part["attributes"]["label"] for part in form["body"])


@pytest.mark.parametrize("status", [0, 1])
def test_ci_ends_with_the_last_line_and_status_of_pytest(clone: Path, status: int) -> None:
    make(clone, "install")
    done = run(clone / ".ci" / "run", cwd=clone.parent, FAKE_STATUS=str(status))
    assert (done.returncode == 0) == (status == 0)
    assert done.stdout.splitlines()[-1] == "3 passed in 0.01s"


@pytest.mark.parametrize(
    ("words", "outcome"),
    [
        ((), "1 passed, 1 deselected"),
        (("-m", "exhaustive"), "1 passed, 1 deselected"),
        (("-m", "exhaustive or not exhaustive"), "2 passed"),
        (("-k", "sweep"), "2 deselected"),
        (("test_it.py::test_sweep",), "1 passed"),
    ],
)
def test_exhaustive_tests_run_only_when_selected(tmp_path: Path, words: tuple[str, ...], outcome: str) -> None:
    shutil.copy(ROOT / "tests" / "conftest.py", tmp_path)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    exhaustive\n")
    (tmp_path / "test_it.py").write_text(
        "import pytest\ndef test_one(): ...\n@pytest.mark.exhaustive\ndef test_sweep(): ...\n"
    )
    plain = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # other packages' plugins take most of its start
    done = run(sys.executable, "-m", "pytest", "-q", *words, cwd=tmp_path, **plain)
    assert done.stdout.splitlines()[-1].startswith(f"{outcome} in "), done.stdout


# Packages that torch, transformers or accelerate look for by name. From the checkout's root, `find_spec` would find a
# folder of that name in place of the package.
LOOKED_FOR = (
    *("apex", "av", "clearml", "comet_ml", "datasets", "decord", "deepspeed", "diffusers", "evaluate", "horovod"),
    *("keras", "kernels", "megatron", "mlflow", "neptune", "onnx", "openai", "optimum", "optuna", "peft", "ray"),
    *("sagemaker", "scipy", "smdistributed", "tensorboard", "tensorflow", "tokenizers", "torchvision", "trackio"),
    *("transformers", "triton", "trl", "wandb"),
)


def test_no_folder_has_the_name_of_another_package() -> None:
    folders = {path.name for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith(".")}
    # A script's folder comes first where Python looks for modules. Python 3.14 has `compression`.
    scripts = {path.stem for folder in ("examples", "benchmarks") for path in (ROOT / folder).glob("*.py")}
    assert not (folders | scripts) & {*LOOKED_FOR, *sys.stdlib_module_names, "compression"}
    # Every top-level module of the installed packages. The examples and benchmarks folders of other packages' wheels
    # are no modules that a dependency imports.
    no_modules = {"tests", "examples", "benchmarks", "docs", "__pycache__"}
    installed = set(packages_distributions()) - no_modules
    assert not folders & installed
