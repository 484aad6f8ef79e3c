"""Reader of the library's imports, and the levels of its rooms (docs/inside/why.md)."""

from __future__ import annotations

import ast
import functools
from dataclasses import dataclass
from pathlib import Path

ASIDE = ("tests", "examples", "benchmarks")
# Rooms by level, the lowest first: a file imports from its own room and from lower levels, for types too.
LEVELS = (
    ("base",),
    ("options",),
    ("grid",),
    ("pipe", "tensor_parallel", "context", "moe", "zero", "checkpoint", "data"),
    ("models",),
    ("engine",),
    ("inference", "testing"),
    ("train",),
    ("plugins", "compat"),
    ("cli",),
)
LEVEL = {room: level for level, rooms in enumerate(LEVELS) for room in rooms}
ROOMS = tuple(LEVEL)
# Rooms of parts that can each be deleted: cli/, the front door and entry points find them.
BESIDE = ("plugins", "compat")
# A part -> the other part that it needs: DeepSpeed's mpu argument is Megatron's, the Trainer takes DeepSpeed's JSON,
# fault-tolerant replicas with local updates take local SGD's outer optimizer, and types need a dry run's values.
NEEDS = {
    "compat/deepspeed": "compat/megatron",
    "compat/huggingface": "compat/deepspeed",
    "plugins/fault_tolerance": "plugins/local_sgd",
    "plugins/sharding_types": "plugins/dry_run",
}
# Files and folders that run where torch is not installed, on the standard library alone.
BARE = (
    "__init__.py",
    *(
        "base/__init__.py",
        "base/checks.py",
        "base/entry_points.py",
        "base/errors.py",
        "base/foreign_tables.py",
        "base/formulas.py",
        "base/files.py",
        "base/json_comments.py",
        "base/lazy.py",
        "base/moved.py",
        "base/safetensors_header.py",
    ),
    *(
        "base/option_error.py",
        "grid/agreement/__init__.py",
        "grid/agreement/hang_watch.py",
        "grid/agreement/store_barrier.py",
    ),
    *("grid/__init__.py", "grid/environment.py", "grid/ranges.py", "grid/topology.py", "grid/comm/__init__.py"),
    *("grid/comm/thread_priority.py", "grid/comm/traffic.py", "options"),
    *("pipe/__init__.py", "pipe/partition.py", "pipe/program", "pipe/schedules"),
    *(
        "zero/__init__.py",
        "zero/flat.py",
        "models/__init__.py",
        "models/config.py",
        "models/config_base.py",
        "models/config_groups.py",
        "models/encoder_config.py",
        "models/encoder_decoder_config.py",
        "models/presets.py",
        "models/recurrent/sizes.py",
        "models/rope_scaling.py",
    ),
    *("engine/__init__.py", "engine/setup/__init__.py", "engine/setup/asked_schedule.py"),
    # The other files of the folder read the layers of a model, or time kernels.
    *(f"plugins/plan/{name}.py" for name in ("__init__", "activations", "collectives", "cores", "machine", "measured")),
    *(f"plugins/plan/{name}.py" for name in ("page", "parallel_layout", "picture")),
)
# Files that run without torch, though not without other packages.
TORCH_FREE = (
    *BARE,
    "pipe/cuts.py",
    *("compat/__init__.py", "compat/deepspeed/__init__.py", "compat/deepspeed/config"),
    *("compat/deepspeed/ledger.py", "compat/deepspeed/modules.py"),
    "train/__init__.py",
    "train/sections.py",
    "train/file.py",
    "train/job.py",
    "train/model_choice.py",
    "train/method_checks.py",
    "train/engine_options.py",
    "train/learning_rate.py",
    "train/older_keys.py",
)


@dataclass(frozen=True)
class Import:
    line: int
    target: str  # "pipe/spec.py" for a file of the library, "torch.nn" for others
    ours: bool
    lazy: bool  # inside a function
    typing: bool  # under `if TYPE_CHECKING`
    by_name: bool = False  # `import triax.x`, where the library writes `from .. import x`


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
        called = getattr(node.func, "attr", getattr(node.func, "id", None))
        name = ast.unparse(node.func) if called in ("import_module", "__import__") else None
        if name in ("importlib.import_module", "import_module", "__import__") and node.args:
            named = node.args[0]
            if isinstance(named, ast.Constant) and isinstance(named.value, str) and named.value[:1] != ".":
                self._add(node.lineno, named.value.split("."))
        self.generic_visit(node)

    def _add(self, line: int, parts: list[str]) -> None:
        if parts[0] == "triax":
            self._add_ours(line, parts[1:], by_name=True)
        else:
            self.imports.append(Import(line, ".".join(parts), False, self.lazy, self.typing))

    def _add_ours(self, line: int, parts: list[str], by_name: bool = False) -> None:
        """The file that `parts` names: the last of them may be a name in the file."""
        for stop in (len(parts), len(parts) - 1):
            path = "/".join(parts[:stop])
            for file in (f"{path}.py", f"{path}/__init__.py".lstrip("/")):
                if stop >= 0 and (self.root / file).is_file():
                    self.imports.append(Import(line, file, True, self.lazy, self.typing, by_name))
                    return
        self.imports.append(Import(line, "/".join(parts) + ".py", True, self.lazy, self.typing, by_name))


def walk(tree: ast.AST) -> list[ast.AST]:
    """Return the nodes of a tree as ``ast.walk`` yields them, in a third of its time."""
    found = [tree]
    for node in found:  # which grows meanwhile
        for value in node.__dict__.values():
            if isinstance(value, ast.AST):
                found.append(value)
            elif type(value) is list:
                found += [each for each in value if isinstance(each, ast.AST)]
    return found


def statements(tree: ast.AST) -> list[ast.AST]:
    """Return the tree and its statements, with those within others."""
    found = [tree]
    for node in found:  # which grows meanwhile
        for name in ("body", "orelse", "finalbody", "handlers", "cases"):
            if type(inner := getattr(node, name, None)) is list:
                found += inner
    return found


def part(file: str) -> str:
    """Return the part of ``plugins/`` or ``compat/`` to which a file belongs; the room, if it is in no part."""
    names = file.split("/")
    return "/".join(names[:2]).removesuffix(".py") if names[0] in BESIDE and names[1:] != ["__init__.py"] else names[0]


def library(root: Path) -> list[str]:
    files = [path for room in ROOMS for path in (root / room).rglob("*.py")]
    front = [root / "__init__.py"] if (root / "__init__.py").is_file() else []
    return [str(path.relative_to(root)) for path in [*front, *sorted(files)]]


def imports(root: Path, file: str) -> list[Import]:
    """Every import of a file, wherever it stands. A package's lazy names, which its stub lists, are imports too."""
    stub = (root / file).with_suffix(".pyi")
    return _imports(root, file, (root / file).read_bytes(), stub.read_bytes() if stub.is_file() else b"")


@functools.cache
def _imports(root: Path, file: str, source: bytes, stub: bytes) -> list[Import]:
    reader = _Reader(root, file)
    reader.visit(ast.parse(source, filename=file))
    reader.lazy = reader.typing = True
    reader.visit(ast.parse(stub, filename=file))
    return reader.imports


def within(file: str, places: tuple[str, ...]) -> bool:
    return any(file == place or file.startswith(f"{place}/") for place in places)


def needs_no_torch(file: str) -> bool:
    return within(file, BARE)
