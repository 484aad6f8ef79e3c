"""Rules of imports (docs/inside/why.md): which folder may import which, and what no file of the library may do.

Each rule is first shown to catch an offender, in a house built for the purpose.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support.import_reader import (
    ASIDE,
    LEVEL,
    NEEDS,
    ROOMS,
    TORCH_FREE,
    imports,
    library,
    needs_no_torch,
    part,
    walk,
)
from support.paths import ROOT

# They use rich, matplotlib, jinja2 where they draw, and numpy where they fit.
DRAWS = ("pipe/program/draw.py", "plugins/plan/picture.py", "plugins/plan/page.py", "plugins/plan/fit.py")

CORE = {"torch", "numpy", "einops", "pydantic", "safetensors", "typer", "rich", "jinja2", "yaml"}
# Imported where they are used, not before.
EXTRAS = {
    "matplotlib",
    "tensorboard",
    "transformers",
    "PIL",
    "accelerate",
    "deepspeed",
    "wandb",
    "mlflow",
    "trackio",
    "lm_eval",
    "pyarrow",
    "tokenizers",
    "huggingface_hub",
    "fsspec",
    "ruamel",
    "pytest",
    "_pytest",
    "hypothesis",
    "torchft",
}
# Subclasses of an extra's import it at their top; the front door alone imports them, when they are asked for.
REACHED_LATE = (
    *("compat/huggingface/training_arguments.py", "compat/huggingface/trainer.py", "compat/lm_eval.py"),
    *("testing/plugin.py", "testing/strategies.py"),  # pytest's plugin, and what needs hypothesis
)
# The one context of an adapter whose API is global.
CONTEXTS = ("compat/horovod/context.py",)
UNPICKLERS = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
# Engine's constructor returns one of its two kinds, which its overloads name for checkers of types.
RETURNED = {"engine/base.py": ("engine/module_engine.py", "engine/pipeline_engine.py")}
_LAUNCHER = (
    "grid/launcher/launch.py",
    "grid/launcher/run.py",
    "grid/launcher/replica_jobs.py",
    "grid/launcher/worker.py",
)
# A dry run stands in for a launcher, and sets its variables.
_DRY_RUN = ("plugins/dry_run/rank.py", "plugins/dry_run/traced_rank.py")
# So does the pool of ranks for tests. It pickles values between processes that it started itself, through their pipes.
_POOL = ("testing/pool.py", "testing/rank_process.py")
# The ranks of a command inherit how much it prints.
READ_ENVIRONMENT = ("base/verbosity.py", "grid/grid.py", "grid/environment.py", *_LAUNCHER, *_DRY_RUN, *_POOL)


# ------------------------------------------------------------------------------------------ the reading


# -------------------------------------------------------------------------------------------- the rules


def bad_arrows(root: Path) -> Iterator[str]:
    """Imports from the same level or a higher one, and between two parts that can each be deleted."""
    for file in library(root):
        room = file.partition("/")[0]
        if file == "__init__.py":
            continue
        for found in imports(root, file):
            where, target = f"{file}:{found.line} imports {found.target}", found.target.partition("/")[0]
            if not found.ours:
                if found.target.split(".")[0] in ROOMS:
                    yield f"{where}: write it relative, as `from ..`"
            elif found.by_name:
                yield f"{where}, triax by name: write it relative, as `from ..`"
            elif target != room and LEVEL.get(target, len(LEVEL)) >= LEVEL[room]:
                yield f"{where}; {room}/ may import {', '.join(each for each in ROOMS if LEVEL[each] < LEVEL[room])}"
            elif target == room and part(found.target) not in (part(file), room, NEEDS.get(part(file))):
                yield f"{where}: {part(file)} and {part(found.target)} can each be deleted"


def bad_circles(root: Path) -> Iterator[str]:
    """Files that import one another, however indirectly, inside a function and for types too."""
    files = library(root)
    arrows = {
        file: {found.target for found in imports(root, file) if found.ours} - {file, *RETURNED.get(file, ())}
        for file in files
    }
    reached = {file: _reached(arrows, file) for file in files}
    circles = {frozenset({other for other in reached[file] if file in reached.get(other, ())}) for file in files}
    for circle in sorted(sorted(circle) for circle in circles if circle):
        for file in circle:
            yield f"{file} imports {', '.join(sorted(arrows[file] & set(circle)))}: a circle of {len(circle)}"


def _reached(arrows: dict[str, set[str]], start: str) -> set[str]:
    found: set[str] = set()
    ahead = [start]
    while ahead:
        new = arrows.get(ahead.pop(), set()) - found
        found |= new
        ahead += new
    return found


def bad_names_aside(root: Path) -> Iterator[str]:
    """Tests, examples and benchmarks see what a user sees: `triax.pipe`, never `pipe`."""
    for folder in ASIDE:
        for path in sorted((root / folder).rglob("*.py")):
            file = str(path.relative_to(root))
            for found in imports(root, file):
                if not found.ours and found.target.split(".")[0] in ROOMS:
                    yield f"{file}:{found.line} imports {found.target}: write triax.{found.target}"


def bad_dependencies(root: Path) -> Iterator[str]:
    """Imports of torch where it is forbidden, of undeclared packages, and of extras at import time."""
    for file in library(root):
        for found in imports(root, file):
            where = f"{file}:{found.line} imports {found.target}"
            if found.ours:
                torch_free = file != "__init__.py" and needs_no_torch(file)
                if torch_free and not needs_no_torch(found.target) and not found.typing:
                    yield f"{where}, which needs torch; {file} must not"
                if found.target in REACHED_LATE and file not in REACHED_LATE and not (found.lazy or found.typing):
                    yield f"{where}, which needs an extra: import it in the function that uses it"
                continue
            package = found.target.split(".")[0]
            if package in sys.stdlib_module_names or found.typing:
                continue
            if package in EXTRAS:
                if not found.lazy and file not in REACHED_LATE:
                    yield f"{where}, an extra, at its top: import it in the function that uses it"
            elif needs_no_torch(file) and not (found.lazy and file in DRAWS):
                yield f"{where}: it runs on the standard library alone"
            elif package not in CORE and package not in ROOMS:
                yield f"{where}, which pyproject.toml does not name"


def bad_habits(root: Path) -> Iterator[str]:
    """Forbidden uses, with their places: environment variables, torch.cuda, unpickling and the like."""
    for file in library(root):
        tree = ast.parse((root / file).read_bytes(), filename=file)
        for found in imports(root, file):
            if found.target.split(".")[0] in UNPICKLERS and file not in _POOL:
                yield f"{file}:{found.line} imports {found.target}: no file is unpickled"
            if found.target.startswith("torch.cuda") and not file.startswith("grid/"):
                yield f"{file}:{found.line} uses torch.cuda: only grid/ knows devices"
            if found.target in ("os.environ", "os.getenv") and file not in READ_ENVIRONMENT:
                yield f"{file}:{found.line} reads the environment: only {', '.join(READ_ENVIRONMENT)} do"
        for node in walk(tree):
            line = getattr(node, "lineno", 0)
            if isinstance(node, ast.Attribute) and node.attr in ("cuda", "environ", "getenv", "putenv"):
                name = ast.unparse(node)
                if name == "torch.cuda" and not file.startswith("grid/"):
                    yield f"{file}:{line} uses torch.cuda: only grid/ knows devices"
                if name in ("os.environ", "os.getenv", "os.putenv") and file not in READ_ENVIRONMENT:
                    yield f"{file}:{line} reads the environment: only {', '.join(READ_ENVIRONMENT)} do"
            if isinstance(node, ast.Call):
                named = [each for each in node.keywords if each.arg in ("weights_only", "allow_pickle")]
                options = {keyword.arg: ast.unparse(keyword.value) for keyword in named}
                is_load = isinstance(node.func, ast.Attribute) and node.func.attr == "load"
                if is_load and ast.unparse(node.func) == "torch.load" and options.get("weights_only") != "True":
                    yield f"{file}:{line} calls torch.load, which unpickles: use safetensors"
                if options.get("allow_pickle", "False") != "False":
                    yield f"{file}:{line} allows pickle"
            if isinstance(node, ast.Global) and file not in CONTEXTS:
                yield f"{file}:{line} writes a global: nothing of the library is global"
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                for argument, default in _defaults(node.args):
                    if argument == "group" and ast.unparse(default) == "None":
                        yield f"{file}:{line} has group=None, a way back to a global group: take a Grid or an Axis"


def _defaults(arguments: ast.arguments) -> Iterator[tuple[str, ast.expr]]:
    positional = [*arguments.posonlyargs, *arguments.args]
    for argument, default in zip(positional[len(positional) - len(arguments.defaults) :], arguments.defaults):
        yield argument.arg, default
    for argument, value in zip(arguments.kwonlyargs, arguments.kw_defaults):
        if value is not None:
            yield argument.arg, value


RULES = [bad_arrows, bad_circles, bad_names_aside, bad_dependencies, bad_habits]


# -------------------------------------------------------------------------------------------- the tests


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_library_imports_obey_each_rule(rule: object) -> None:
    assert callable(rule)
    offences = list(rule(ROOT))
    assert not offences, "\n" + "\n".join(offences)


def test_import_reader_finds_all_files_and_imports() -> None:
    files = library(ROOT)
    assert "__init__.py" in files and "grid/topology.py" in files and "pipe/schedules/registry.py" in files
    everywhere = [found for file in files for found in imports(ROOT, file)]
    # Were resolution broken, every arrow would be to a file that does not exist, or to none.
    ours = [found for found in everywhere if found.ours]
    assert len(ours) > 50
    missing = [found.target for found in ours if not (ROOT / found.target).is_file()]
    assert not missing


def test_no_python_file_is_outside_the_known_folders() -> None:
    """A folder that no rule knows would be bound by none."""
    known = {*ROOMS, *ASIDE, "docs", "build", "dist", "runs"}
    folders = [path.parent for path in ROOT.glob("*/*.py") if not path.parent.name.startswith(".")]
    assert {folder.name for folder in folders} <= known
    # Beside the front door it would be a module of the package, and in the wheel.
    assert [path.name for path in ROOT.glob("*.py")] == ["__init__.py"]


def test_no_test_module_imports_another() -> None:
    """Shared code of tests is in tests/support, and none of it in a test file."""
    for path in sorted((ROOT / "tests").rglob("*.py")):
        modules = [found.target.split(".")[0] for found in imports(ROOT, str(path.relative_to(ROOT)))]
        assert not [name for name in modules if name.startswith("test_")], path


def test_schedule_and_topology_files_need_no_torch() -> None:
    for file in ("program/ops", "program/passes", "program/verify", "program/simulate", "program/draw"):
        assert needs_no_torch(f"pipe/{file}.py")
    assert needs_no_torch("pipe/schedules/registry.py") and needs_no_torch("pipe/schedules/search.py")
    assert needs_no_torch("grid/topology.py") and needs_no_torch("zero/flat.py") and needs_no_torch("__init__.py")
    assert all((ROOT / file).exists() for file in TORCH_FREE)
    assert not needs_no_torch("pipe/executor.py") and not needs_no_torch("engine/pipeline_engine.py")


OFFENDERS = [
    # rule, file, what it says, part of the complaint (None: nothing is wrong)
    (bad_arrows, "pipe/a.py", "from ..zero.flat import x", "pipe/a.py:1 imports zero/flat.py"),
    (bad_arrows, "pipe/a.py", "from ..zero import flat", "imports zero/flat.py"),
    (bad_arrows, "pipe/a.py", "from .. import zero", "imports zero/__init__.py"),
    (bad_arrows, "pipe/a.py", "from .. import Grid", "imports __init__.py"),
    (bad_arrows, "pipe/a.py", "def f():\n    from ..engine import initialize", "a.py:2 imports engine/__init__.py"),
    (bad_arrows, "zero/a.py", "if TYPE_CHECKING:\n    from ..pipe.spec import S", "imports pipe/spec.py"),
    (bad_arrows, "zero/deep/a.py", "from ...pipe.spec import S", "imports pipe/spec.py"),
    (bad_arrows, "zero/a.py", "import importlib\nimportlib.import_module('triax.pipe.spec')", "a.py:2"),
    (bad_arrows, "zero/a.py", "import triax.grid.topology", "triax by name: write it relative"),
    (bad_arrows, "zero/a.py", "from grid.topology import Topology", "write it relative"),
    (bad_arrows, "grid/a.py", "from ..pipe.program.ops import Op", "grid/ may import base"),
    (bad_arrows, "grid/a.py", "from ..pipe.spec import S", "imports pipe/spec.py"),
    (bad_arrows, "models/a.py", "from ..engine import initialize", "imports engine/__init__.py"),
    (bad_arrows, "engine/a.py", "from ..plugins.plan.cost import C", "imports plugins/plan/cost.py"),
    (bad_arrows, "plugins/plan/a.py", "from ...engine import initialize\nfrom .cost import x", None),
    (bad_arrows, "plugins/plan/a.py", "from ...compat.huggingface import trainer", "imports compat/huggingface/"),
    (bad_arrows, "plugins/dry_run/a.py", "from ..plan.cost import x", "can each be deleted"),
    (bad_arrows, "plugins/dry_run/a.py", "from ..shared import x", "can each be deleted"),
    (bad_arrows, "cli/a.py", "from ..plugins.plan.cost import x\nfrom ..compat.huggingface import trainer", None),
    (bad_arrows, "models/a.py", "from ..pipe.spec import S\nfrom ..pipe import spec\nfrom .config import C", None),
    (
        bad_arrows,
        "engine/a.py",
        "from ..pipe.program.ops import Op\nfrom ..zero import flat\nfrom ..grid.launcher import launch",
        None,
    ),
    (bad_arrows, "__init__.py", "def f():\n    from .engine import initialize", None),
    (bad_circles, "zero/a.py", "from . import b", None),
    (bad_circles, "zero/flat.py", "from .uses_flat import x", "zero/flat.py imports zero/uses_flat.py: a circle of 2"),
    (bad_circles, "zero/flat.py", "def f():\n    from .uses_flat import x", "a circle of 2"),
    (bad_circles, "zero/flat.py", "if TYPE_CHECKING:\n    from .uses_flat import x", "a circle of 2"),
    (bad_names_aside, "tests/a.py", "from pipe.program.ops import Op", "write triax.pipe.program.ops.Op"),
    (bad_names_aside, "examples/a.py", "import grid", "write triax.grid"),
    (bad_names_aside, "tests/a.py", "from triax.pipe.program.ops import Op", None),
    (bad_dependencies, "pipe/program/ops.py", "import torch", "pipe/program/ops.py:1 imports torch"),
    (
        bad_dependencies,
        "pipe/program/new.py",
        "def f():\n    import torch.nn",
        "pipe/program/new.py:2 imports torch.nn",
    ),
    (bad_dependencies, "pipe/program/new.py", "import numpy as np", "standard library alone"),
    (bad_dependencies, "pipe/program/new.py", "from ..spec import S", "which needs torch"),
    (bad_dependencies, "pipe/program/new.py", "from ...grid.grid import Grid", "which needs torch"),
    (bad_dependencies, "models/config.py", "from torch import nn", "standard library alone"),
    (bad_dependencies, "__init__.py", "import torch", "standard library alone"),
    (bad_dependencies, "pipe/program/draw.py", "import matplotlib", "an extra, at its top"),
    (bad_dependencies, "pipe/program/draw.py", "def f():\n    import matplotlib.pyplot as plt", None),
    (bad_dependencies, "engine/a.py", "import transformers", "an extra, at its top"),
    (bad_dependencies, "compat/huggingface/trainer.py", "import transformers\nfrom .arguments import A", None),
    (bad_dependencies, "compat/huggingface/a.py", "from .trainer import Trainer", "which needs an extra"),
    (bad_dependencies, "compat/huggingface/a.py", "def f():\n    from .trainer import Trainer", None),
    (bad_dependencies, "engine/a.py", "import attrs", "does not name"),
    (bad_dependencies, "engine/a.py", "import torch, json, pydantic\nfrom rich.table import Table", None),
    (bad_dependencies, "pipe/program/new.py", "import json\nfrom ...grid.topology import Topology", None),
    (bad_dependencies, "grid/topology.py", "if TYPE_CHECKING:\n    from .grid import Grid\n    import torch", None),
    (bad_habits, "zero/a.py", "import torch\ntorch.cuda.synchronize()", "zero/a.py:2 uses torch.cuda"),
    (bad_habits, "zero/a.py", "from torch.cuda import Stream", "uses torch.cuda"),
    (bad_habits, "zero/a.py", "from torch import cuda", "uses torch.cuda"),
    (bad_habits, "grid/a.py", "import torch\ntorch.cuda.synchronize()", None),
    (bad_habits, "grid/a.py", "import os\nrank = os.environ['RANK']", "grid/a.py:2 reads the environment"),
    (bad_habits, "engine/a.py", "from os import environ", "reads the environment"),
    (bad_habits, "engine/a.py", "import os\nos.getenv('X')", "reads the environment"),
    (bad_habits, "grid/launcher/launch.py", "import os\nos.environ['RANK']", None),
    (bad_habits, "engine/a.py", "import pickle", "no file is unpickled"),
    (bad_habits, "engine/a.py", "def f():\n    from dill import loads", "no file is unpickled"),
    (bad_habits, "engine/a.py", "import torch\ntorch.load('x')", "use safetensors"),
    (bad_habits, "engine/a.py", "import numpy\nnumpy.load('x', allow_pickle=True)", "allows pickle"),
    (bad_habits, "zero/a.py", "def f():\n    global x", "writes a global"),
    (bad_habits, "zero/a.py", "def f(x, group=None): ...", "a way back to a global group"),
    (bad_habits, "zero/a.py", "def f(x, *, group: object = None): ...", "a way back to a global group"),
    (bad_habits, "zero/a.py", "def f(group, *, y=None): ...", None),
]


@pytest.mark.parametrize(("law", "file", "text", "complaint"), OFFENDERS)
def test_each_law_of_imports_complains_of_offenders_only(
    tmp_path: Path, law: Callable[[Path], Iterator[str]], file: str, text: str, complaint: str | None
) -> None:
    made_first = ("grid/topology", "grid/grid", "pipe/program/ops", "pipe/schedules/registry", "pipe/spec", "zero/flat")
    more = ("models/config", "grid/launcher/launch", "compat/huggingface/trainer", "compat/huggingface/arguments")
    for made in (*made_first, *more, "engine/base", "zero/uses_flat", "plugins/plan/cost", "plugins/shared"):
        path = tmp_path / f"{made}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        for folder in path.relative_to(tmp_path).parents:
            (tmp_path / folder / "__init__.py").touch()
    (tmp_path / "zero" / "uses_flat.py").write_text("from .flat import x")
    assert list(law(tmp_path)) == []
    path = tmp_path / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    offences = list(law(tmp_path))
    if complaint is None:
        assert offences == []
    else:
        assert any(complaint in offence for offence in offences), offences
