"""The house keeps its shape: who may import whom (DESIGN, section 1), and what no file of the library may do.

Each rule is first shown to catch an offender, in a house built for the purpose.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("grid", "pipe", "tensor_parallel", "zero", "models", "engine", "plan")
ASIDE = ("tests", "examples", "benchmarks")

# From a folder, to the folders or files that it may import, beside itself.
ARROWS: dict[str, tuple[str, ...]] = {
    "grid": (),
    "pipe": ("grid",),
    "tensor_parallel": ("grid",),
    "zero": ("grid",),
    "models": ("grid", "tensor_parallel", "pipe/spec.py"),
    "engine": ("grid", "pipe", "tensor_parallel", "zero"),
    "plan": ("pipe", "zero/flat.py", "models/config.py"),  # of pipe, what needs no torch: see below
}

# In these folders, every file but these runs where torch is not installed, on the standard library alone.
MAY_NEED_TORCH: dict[str, tuple[str, ...]] = {
    "grid": (
        *("autocast", "axis", "clock", "grid", "layout", "logged", "mark", "nest", "random", "recorded", "replica"),
        "timeline",
    ),
    "pipe": (
        *("backward", "boundary", "executor", "frame", "meta", "module", "nest", "p2p", "recompute", "replay"),
        *("dialect", "saved", "spec", "ties"),
    ),
    "plan": (),
}
# And so do these, of the other folders.
NO_TORCH = ("__init__.py", "models/__init__.py", "models/config.py", "zero/flat.py")

DRAWS = ("pipe/draw.py",)  # may use rich and matplotlib, in the functions that draw

CORE = {"torch", "numpy", "einops", "pydantic", "safetensors", "typer", "rich"}
# Imported where they are used, not before.
EXTRAS = {"matplotlib", "tensorboard", "transformers", "accelerate", "deepspeed", "wandb"}
# Subclasses of an extra's import it at their top; the front door alone imports them, when they are asked for.
REACHED_LATE = ("engine/hf_arguments.py", "engine/hf_trainer.py")
UNPICKLERS = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
_LAUNCHER = ("engine/launch.py", "engine/run_cli.py", "engine/worker.py")
READ_ENVIRONMENT = ("grid/grid.py", "grid/environment.py", *_LAUNCHER)
MOST_LINES = 400


@dataclass(frozen=True)
class Import:
    line: int
    target: str  # "pipe/spec.py" for a file of the house, "torch.nn" for others
    ours: bool
    lazy: bool  # inside a function
    typing: bool  # under `if TYPE_CHECKING`


# ------------------------------------------------------------------------------------------ the reading


class _Reader(ast.NodeVisitor):
    def __init__(self, root: Path, file: str) -> None:
        self.root = root
        self.folder = Path(file).parent.parts
        self.imports: list[Import] = []
        self.lazy = self.typing = False

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> None:
        before, self.lazy = self.lazy, True
        self.generic_visit(node)
        self.lazy = before

    visit_AsyncFunctionDef = visit_FunctionDef
    visit_Lambda = visit_FunctionDef

    def visit_If(self, node: ast.If) -> None:
        before = self.typing
        self.typing = before or ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
        for child in node.body:
            self.visit(child)
        self.typing = before
        for child in node.orelse:
            self.visit(child)

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self._add(node.lineno, alias.name.split("."))

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        parts = node.module.split(".") if node.module else []
        for alias in node.names:
            if node.level:
                package = self.folder[: len(self.folder) - (node.level - 1)]
                self._add_ours(node.lineno, [*package, *parts, alias.name])
            else:
                self._add(node.lineno, [*parts, alias.name])

    def visit_Call(self, node: ast.Call) -> None:
        """`importlib.import_module("triax.engine")` is an import too."""
        name = ast.unparse(node.func)
        if name in ("importlib.import_module", "import_module", "__import__") and node.args:
            named = node.args[0]
            if isinstance(named, ast.Constant) and isinstance(named.value, str) and named.value[:1] != ".":
                self._add(node.lineno, named.value.split("."))
        self.generic_visit(node)

    def _add(self, line: int, parts: list[str]) -> None:
        if parts[0] == "triax":
            self._add_ours(line, parts[1:])
        else:
            self.imports.append(Import(line, ".".join(parts), False, self.lazy, self.typing))

    def _add_ours(self, line: int, parts: list[str]) -> None:
        """The file that `parts` names: the last of them may be a name in the file."""
        for stop in (len(parts), len(parts) - 1):
            path = "/".join(parts[:stop])
            for file in (f"{path}.py", f"{path}/__init__.py".lstrip("/")):
                if stop >= 0 and (self.root / file).is_file():
                    self.imports.append(Import(line, file, True, self.lazy, self.typing))
                    return
        self.imports.append(Import(line, "/".join(parts) + ".py", True, self.lazy, self.typing))


def library(root: Path) -> list[str]:
    files = [path for folder in FOLDERS for path in (root / folder).rglob("*.py")]
    front = [root / "__init__.py"] if (root / "__init__.py").is_file() else []
    return [str(path.relative_to(root)) for path in [*front, *sorted(files)]]


def imports(root: Path, file: str) -> list[Import]:
    reader = _Reader(root, file)
    reader.visit(ast.parse((root / file).read_bytes(), filename=file))
    return reader.imports


def needs_no_torch(file: str) -> bool:
    folder, _, rest = file.partition("/")
    may = MAY_NEED_TORCH.get(folder)
    return file in NO_TORCH or (may is not None and rest.removesuffix(".py").partition("/")[0] not in may)


# -------------------------------------------------------------------------------------------- the rules


def bad_arrows(root: Path) -> Iterator[str]:
    for file in library(root):
        folder = file.partition("/")[0]
        if file == "__init__.py":
            continue
        source = (root / file).read_text()
        for found in imports(root, file):
            if not found.ours:
                if found.target.split(".")[0] in FOLDERS:
                    yield f"{file}:{found.line} imports {found.target}: write it relative, as `from ..`"
                continue
            allowed = (folder, *ARROWS[folder])
            inside = found.target.partition("/")[0] in allowed or found.target in allowed
            if folder == "plan" and found.target.startswith("pipe/") and not needs_no_torch(found.target):
                inside = False
            if not inside:
                yield f"{file}:{found.line} imports {found.target}; {folder}/ may import {', '.join(allowed)}"
            line = source.splitlines()[found.line - 1]
            if "triax" in line:
                yield f"{file}:{found.line} imports triax by name: write it relative, as `from ..`"


def bad_names_aside(root: Path) -> Iterator[str]:
    """Tests, examples and benchmarks see what a user sees: `triax.pipe`, never `pipe`."""
    for folder in ASIDE:
        for path in sorted((root / folder).rglob("*.py")):
            file = str(path.relative_to(root))
            for found in imports(root, file):
                if not found.ours and found.target.split(".")[0] in FOLDERS:
                    yield f"{file}:{found.line} imports {found.target}: write triax.{found.target}"


def bad_dependencies(root: Path) -> Iterator[str]:
    """Torch where it must not be; packages that nobody declared; extras that are not lazy."""
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
            elif package not in CORE and package not in FOLDERS:
                yield f"{where}, which pyproject.toml does not name"


def bad_habits(root: Path) -> Iterator[str]:
    """What is read or kept behind the caller's back, and what runs a stranger's code."""
    for file in library(root):
        tree = ast.parse((root / file).read_bytes(), filename=file)
        for found in imports(root, file):
            if found.target.split(".")[0] in UNPICKLERS:
                yield f"{file}:{found.line} imports {found.target}: no file is unpickled"
            if found.target.startswith("torch.cuda") and not file.startswith("grid/"):
                yield f"{file}:{found.line} uses torch.cuda: only grid/ knows devices"
            if found.target in ("os.environ", "os.getenv") and file not in READ_ENVIRONMENT:
                yield f"{file}:{found.line} reads the environment: only {', '.join(READ_ENVIRONMENT)} do"
        for node in ast.walk(tree):
            line = getattr(node, "lineno", 0)
            if isinstance(node, ast.Attribute):
                name = ast.unparse(node)
                if name == "torch.cuda" and not file.startswith("grid/"):
                    yield f"{file}:{line} uses torch.cuda: only grid/ knows devices"
                if name in ("os.environ", "os.getenv", "os.putenv") and file not in READ_ENVIRONMENT:
                    yield f"{file}:{line} reads the environment: only {', '.join(READ_ENVIRONMENT)} do"
            if isinstance(node, ast.Call):
                options = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
                if ast.unparse(node.func) == "torch.load" and options.get("weights_only") != "True":
                    yield f"{file}:{line} calls torch.load, which unpickles: use safetensors"
                if options.get("allow_pickle", "False") != "False":
                    yield f"{file}:{line} allows pickle"
            if isinstance(node, ast.Global):
                yield f"{file}:{line} writes a global: nothing of the library is global"
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                for argument, default in _defaults(node.args):
                    if argument == "group" and default == "None":
                        yield f"{file}:{line} has group=None, a way back to a global group: take a Grid or an Axis"


def _defaults(arguments: ast.arguments) -> Iterator[tuple[str, str]]:
    positional = [*arguments.posonlyargs, *arguments.args]
    for argument, default in zip(positional[len(positional) - len(arguments.defaults) :], arguments.defaults):
        yield argument.arg, ast.unparse(default)
    for argument, value in zip(arguments.kwonlyargs, arguments.kw_defaults):
        if value is not None:
            yield argument.arg, ast.unparse(value)


def bad_lengths(root: Path) -> Iterator[str]:
    for file in library(root):
        lines = (root / file).read_text().splitlines()
        if len(lines) > MOST_LINES and not any(
            line.startswith(f"# Over {MOST_LINES} lines because ") for line in lines[:30]
        ):
            yield (
                f"{file} has {len(lines)} lines: split it, or say why not at its head, "
                f"`# Over {MOST_LINES} lines because ...`"
            )


RULES = [bad_arrows, bad_names_aside, bad_dependencies, bad_habits, bad_lengths]


# -------------------------------------------------------------------------------------------- the tests


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_house_keeps_the_rule(rule: object) -> None:
    assert callable(rule)
    offences = list(rule(ROOT))
    assert not offences, "\n" + "\n".join(offences)


def test_the_house_is_all_read() -> None:
    files = library(ROOT)
    assert "__init__.py" in files and "grid/topology.py" in files and "pipe/schedules.py" in files
    everywhere = [found for file in files for found in imports(ROOT, file)]
    # Were resolution broken, every arrow would be to a file that does not exist, or to none.
    ours = [found for found in everywhere if found.ours]
    assert len(ours) > 50
    missing = [found.target for found in ours if not (ROOT / found.target).is_file()]
    assert not missing


def test_no_python_file_is_outside_the_house() -> None:
    """A folder that no rule knows would be bound by none."""
    known = {*FOLDERS, *ASIDE, "docs", "build", "dist", "runs"}
    folders = [path.parent for path in ROOT.glob("*/*.py") if not path.parent.name.startswith(".")]
    assert {folder.name for folder in folders} <= known
    # Beside the front door it would be a module of the package, and in the wheel.
    assert [path.name for path in ROOT.glob("*.py")] == ["__init__.py"]


def test_files_that_need_no_torch_are_the_designs() -> None:
    for file in ("ops", "schedules", "passes", "verify", "simulate", "draw", "search"):
        assert needs_no_torch(f"pipe/{file}.py")
    assert needs_no_torch("grid/topology.py") and needs_no_torch("zero/flat.py") and needs_no_torch("__init__.py")
    assert all((ROOT / file).is_file() for file in NO_TORCH)
    assert not needs_no_torch("pipe/executor.py") and not needs_no_torch("engine/engine.py")


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
    (bad_arrows, "zero/a.py", "import triax.grid.topology", "imports triax by name"),
    (bad_arrows, "zero/a.py", "from grid.topology import Topology", "write it relative"),
    (bad_arrows, "grid/a.py", "from ..pipe.ops import Op", "grid/ may import grid"),
    (bad_arrows, "models/a.py", "from ..pipe.ops import Op", "imports pipe/ops.py"),
    (bad_arrows, "models/a.py", "from ..zero import flat", "imports zero/flat.py"),
    (bad_arrows, "engine/a.py", "from ..models.config import C", "imports models/config.py"),
    (bad_arrows, "plan/a.py", "from ..pipe.spec import S", "imports pipe/spec.py"),
    (bad_arrows, "plan/a.py", "from ..pipe.ops import Op\nfrom ..zero.flat import x", None),
    (bad_arrows, "plan/a.py", "from ..engine import initialize", "imports engine/__init__.py"),
    (bad_arrows, "models/a.py", "from ..pipe.spec import S\nfrom ..pipe import spec\nfrom .config import C", None),
    (bad_arrows, "engine/a.py", "from ..pipe.ops import Op\nfrom ..zero import flat\nfrom . import launch", None),
    (bad_arrows, "__init__.py", "def f():\n    from .engine import initialize", None),
    (bad_names_aside, "tests/a.py", "from pipe.ops import Op", "write triax.pipe.ops.Op"),
    (bad_names_aside, "examples/a.py", "import grid", "write triax.grid"),
    (bad_names_aside, "tests/a.py", "from triax.pipe.ops import Op", None),
    (bad_dependencies, "pipe/ops.py", "import torch", "pipe/ops.py:1 imports torch"),
    (bad_dependencies, "pipe/new.py", "def f():\n    import torch.nn", "pipe/new.py:2 imports torch.nn"),
    (bad_dependencies, "pipe/new.py", "import numpy as np", "standard library alone"),
    (bad_dependencies, "pipe/new.py", "from .spec import S", "which needs torch"),
    (bad_dependencies, "pipe/new.py", "from ..grid.grid import Grid", "which needs torch"),
    (bad_dependencies, "models/config.py", "from torch import nn", "standard library alone"),
    (bad_dependencies, "__init__.py", "import torch", "standard library alone"),
    (bad_dependencies, "pipe/draw.py", "import matplotlib", "an extra, at its top"),
    (bad_dependencies, "pipe/draw.py", "def f():\n    import matplotlib.pyplot as plt", None),
    (bad_dependencies, "engine/a.py", "import transformers", "an extra, at its top"),
    (bad_dependencies, "engine/hf_trainer.py", "import transformers\nfrom .hf_arguments import A", None),
    (bad_dependencies, "engine/a.py", "from .hf_trainer import Trainer", "which needs an extra"),
    (bad_dependencies, "engine/a.py", "def f():\n    from .hf_trainer import Trainer", None),
    (bad_dependencies, "engine/a.py", "import yaml", "does not name"),
    (bad_dependencies, "engine/a.py", "import torch, json, pydantic\nfrom rich.table import Table", None),
    (bad_dependencies, "pipe/new.py", "import json\nfrom ..grid.topology import Topology", None),
    (bad_dependencies, "grid/topology.py", "if TYPE_CHECKING:\n    from .grid import Grid\n    import torch", None),
    (bad_habits, "zero/a.py", "import torch\ntorch.cuda.synchronize()", "zero/a.py:2 uses torch.cuda"),
    (bad_habits, "zero/a.py", "from torch.cuda import Stream", "uses torch.cuda"),
    (bad_habits, "zero/a.py", "from torch import cuda", "uses torch.cuda"),
    (bad_habits, "grid/a.py", "import torch\ntorch.cuda.synchronize()", None),
    (bad_habits, "grid/a.py", "import os\nrank = os.environ['RANK']", "grid/a.py:2 reads the environment"),
    (bad_habits, "engine/a.py", "from os import environ", "reads the environment"),
    (bad_habits, "engine/a.py", "import os\nos.getenv('X')", "reads the environment"),
    (bad_habits, "engine/launch.py", "import os\nos.environ['RANK']", None),
    (bad_habits, "engine/a.py", "import pickle", "no file is unpickled"),
    (bad_habits, "engine/a.py", "def f():\n    from dill import loads", "no file is unpickled"),
    (bad_habits, "engine/a.py", "import torch\ntorch.load('x')", "use safetensors"),
    (bad_habits, "engine/a.py", "import numpy\nnumpy.load('x', allow_pickle=True)", "allows pickle"),
    (bad_habits, "zero/a.py", "def f():\n    global x", "writes a global"),
    (bad_habits, "zero/a.py", "def f(x, group=None): ...", "a way back to a global group"),
    (bad_habits, "zero/a.py", "def f(x, *, group: object = None): ...", "a way back to a global group"),
    (bad_habits, "zero/a.py", "def f(group, *, y=None): ...", None),
    (bad_lengths, "zero/a.py", "x = 1\n" * 401, "zero/a.py has 401 lines"),
    (bad_lengths, "zero/a.py", "x = 1\n" * 400, None),
    (bad_lengths, "zero/a.py", '"""A."""\n\n# Over 400 lines because it is a table.\n' + "x = 1\n" * 401, None),
]


@pytest.mark.parametrize(("rule", "file", "text", "complaint"), OFFENDERS)
def test_the_rule_finds_an_offender(tmp_path: Path, rule: object, file: str, text: str, complaint: str | None) -> None:
    assert callable(rule)
    made_first = ("grid/topology", "grid/grid", "pipe/ops", "pipe/spec", "zero/flat", "models/config", "engine/launch")
    for made in (*made_first, "engine/hf_trainer", "engine/hf_arguments"):
        path = tmp_path / f"{made}.py"
        path.parent.mkdir(exist_ok=True)
        path.touch()
        (path.parent / "__init__.py").touch()
    (tmp_path / "__init__.py").touch()
    assert list(rule(tmp_path)) == []
    path = tmp_path / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    offences = list(rule(tmp_path))
    if complaint is None:
        assert offences == []
    else:
        assert any(complaint in offence for offence in offences), offences
