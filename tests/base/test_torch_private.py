"""Private names of torch that triax uses: each acts as expected, and is used only in base/torch_private.py."""

from __future__ import annotations

import ast
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from triax import Grid
from triax.base import torch_private as private

from support.import_reader import library
from support.paths import ROOT

ROOTS = {"torch", "nn", "F", "dist", "Tensor"}  # as the library's files call torch and its modules
ATTRIBUTES = {"_backward_hooks", "_forward_hooks", "_forward_pre_hooks", "_backward_pre_hooks", "_cdata", "_base"}


def private_names(file: Path) -> Iterator[tuple[int, str]]:
    """Yield the private names of torch in a file, with their lines."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        words: list[str] = []
        if isinstance(node, ast.ImportFrom) and node.level == 0:
            module = (node.module or "").split(".")
            for each in node.names if module[0] == "torch" else ():
                words = [*module, each.name]
                if any(word.startswith("_") for word in words[1:] if word != "__future__"):
                    yield node.lineno, ".".join(words)
        elif isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            words, inner = [node.attr], node.value
            while isinstance(inner, ast.Attribute):
                words, inner = [inner.attr, *words], inner.value
            root = inner.id if isinstance(inner, ast.Name) else ""
            if root in ROOTS or node.attr in ATTRIBUTES:
                yield node.lineno, ".".join([root, *words])


def test_private_names_of_torch_are_used_in_one_file_only() -> None:
    files = [file for file in library(ROOT) if file.endswith(".py") and file != "base/torch_private.py"]
    found = [f"{file}:{line} {name}" for file in files for line, name in private_names(ROOT / file)]
    assert not found, "\nput it into base/torch_private.py, with the reason:\n" + "\n".join(found)


def test_the_reader_finds_private_names(tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    file.write_text("import torch\nfrom torch._x import y\ntorch.a._b.c()\nself._own.torch\np._backward_hooks\n")
    assert [name for _, name in private_names(file)] == ["torch._x.y", "p._backward_hooks", "torch.a._b"]


def leaf(*shape: int) -> Tensor:
    return torch.ones(*shape, requires_grad=True)


def backward_tasks() -> None:
    seen: list[int] = []
    x = leaf(2)
    x.register_hook(lambda _: seen.append(private.backward_task()))
    x.sum().backward()
    x.sum().backward()
    assert private.backward_task() == -1 and -1 not in seen and seen[0] != seen[1]


def calls_after_backward() -> None:
    order: list[str] = []
    x, y = leaf(2), leaf(2)
    x.register_hook(lambda _: private.call_after_backward(lambda: order.append("end")))
    y.register_hook(lambda _: order.append("hook"))
    (x * y).sum().backward()
    assert order == ["hook", "end"]


def nodes() -> None:
    x, before = leaf(2), private.recorded_nodes()
    with torch.no_grad():
        x.sin()
    assert private.recorded_nodes() == before
    x.sin()
    assert private.recorded_nodes() > before


def transforms() -> None:
    seen: list[bool] = []

    def total(x: Tensor) -> Tensor:
        seen.append(private.in_transform())
        return x.sum()

    torch.func.grad(total)(torch.ones(2))
    assert seen == [True] and not private.in_transform()


def hooks() -> None:
    x = leaf(2)
    assert not private.has_hooks(x) and private.sum_hooks(x) == []
    handle = x.register_hook(lambda gradient: gradient)
    assert private.has_hooks(x)
    handle.remove()
    assert not private.has_hooks(x)

    def after(_: Tensor) -> None: ...

    x.register_post_accumulate_grad_hook(after)
    assert private.sum_hooks(x) == [after]


def hooks_of_modules() -> None:
    kinds = {
        "forward": "register_forward_hook",
        "forward_pre": "register_forward_pre_hook",
        "backward": "register_full_backward_hook",
        "backward_pre": "register_full_backward_pre_hook",
    }
    for kind, register in kinds.items():
        layer = nn.Linear(2, 2)
        assert not private.module_hooks(layer, *kinds)
        getattr(layer, register)(lambda *_: None)
        assert [each for each in kinds if private.module_hooks(layer, each)] == [kind]


def storages() -> None:
    for device in ("cpu", "meta"):
        x = torch.empty(4, device=device)
        other = torch.empty(4, device=device)
        same, unlike = x[1:].untyped_storage(), other.untyped_storage()
        assert private.storage_id(x.untyped_storage()) == private.storage_id(same) != private.storage_id(unlike)
    storage = other.untyped_storage()
    assert private.storage_users(storage) == 2  # ``other`` and ``storage``
    view = other[1:]
    assert private.storage_users(storage) == 3
    assert private.base_of(view) is other and private.base_of(other) is None


class _Count(TorchFunctionMode):
    calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


def function_modes() -> None:
    assert private.function_mode() is None and private.function_modes() == []
    with _Count() as outer, _Count() as inner:
        assert private.function_modes() == [outer, inner] and private.function_mode() is inner
        with private.without_function_mode():
            torch.add(1, 1)
            assert private.function_mode() is outer
        assert (outer.calls, inner.calls) == (1, 0)
        with private.without_functions():
            torch.add(1, 1)
        assert (outer.calls, inner.calls) == (1, 0)


class _Seen(Tensor):
    names: ClassVar[list[str]] = []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.names.append(func.__name__)
        with private.without_subclasses():
            return func(*args, **(kwargs or {}))


class _Operators(Tensor):
    names: ClassVar[list[str]] = []
    __torch_function__ = private.no_function  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        cls.names.append(str(func))
        return torch.ones(2, dtype=(kwargs or {}).get("dtype"))


def subclasses() -> None:
    x = torch.ones(2).as_subclass(_Seen)
    x.sin().cos()
    assert _Seen.names == ["sin"]  # what sin returned is a plain tensor
    made = private.make_wrapper(_Operators, (3, 4), dtype=torch.float64, device=torch.device("cpu"))
    assert (tuple(made.shape), made.dtype, type(made)) == ((3, 4), torch.float64, _Operators)
    assert made.to(torch.float32).dtype == torch.float32
    assert _Operators.names == [str(private.cast_operator)]


class _Operations(private.TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


def dispatch_modes() -> None:
    assert private.dispatch_modes() == 0
    with _Operations() as mode:
        torch.ones(2).add(1)
        assert private.dispatch_modes() == 1
        with private.without_dispatch_modes():
            torch.ones(2).sub(1)
    assert mode.names == ["ones.default", "add.Tensor"]


def nests() -> None:
    value = {"a": (1, [2]), "b": 3}
    leaves, spec = private.tree_flatten(value)
    assert leaves == private.tree_leaves(value) == [1, 2, 3] and private.tree_unflatten(leaves, spec) == value
    assert private.tree_map(lambda each: each + 1, value) == {"a": (2, [3]), "b": 4}


def lists_of_tensors() -> None:
    xs = [torch.full((2,), 3.0), torch.full((4,), 2.0)]
    assert [float(norm) for norm in private.norms_of_all(xs, 2)] == [float(x.norm()) for x in xs]
    private.multiply_all(xs, 2.0)
    assert xs[0].tolist() == [6.0, 6.0] and xs[1].tolist() == [4.0] * 4
    factor = torch.tensor(0.5)
    private.multiply_all(xs, factor)
    assert xs[0].tolist() == [3.0, 3.0]


def assertions() -> None:
    private.assert_later(torch.tensor(True), "it holds")
    with pytest.raises(RuntimeError, match="it does not hold"):
        private.assert_later(torch.tensor(False), "it does not hold")


def flash_attention() -> None:
    q, k, v = torch.randn(3, 1, 2, 5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    output, logsumexp = private.flash_cpu(q, k, v, 0.0, True)
    torch.testing.assert_close(output, F.scaled_dot_product_attention(q, k, v, is_causal=True), rtol=1e-10, atol=1e-12)
    scores = (q @ k.mT / 2).masked_fill(torch.ones(5, 5).triu(1).bool(), -torch.inf)
    torch.testing.assert_close(logsumexp, scores.logsumexp(-1), rtol=1e-10, atol=1e-12)
    a, b, c = (each.clone().requires_grad_() for each in (q, k, v))
    wanted = torch.autograd.grad(F.scaled_dot_product_attention(a, b, c, is_causal=True).sum(), (a, b, c))
    found = private.flash_cpu_backward(torch.ones_like(output), q, k, v, output, logsumexp, 0.0, True)
    torch.testing.assert_close([*found], [*wanted], rtol=1e-10, atol=1e-12)
    assert all(str(each).startswith("aten.") for each in (private.flash_gpu, private.flash_gpu_backward))


def reshaped() -> None:
    x = leaf(6) * 2
    y = private.reshaped(x, (2, 3))
    assert y.shape == (2, 3) and private.base_of(y) is None and y.data_ptr() == x.data_ptr()


def classes() -> None:
    assert all(issubclass(each, private.AnyDropout) for each in (nn.Dropout, nn.Dropout2d, nn.AlphaDropout))
    norms = (nn.BatchNorm1d, nn.BatchNorm3d, nn.SyncBatchNorm)
    assert all(issubclass(each, private.AnyBatchNorm) for each in norms)
    assert not issubclass(nn.LayerNorm, private.AnyBatchNorm)
    assert private.extension_device() == "privateuseone"


def compilation() -> None:
    graph = torch.fx.symbolic_trace(nn.Linear(2, 2))
    assert private.compiler_backend("eager")(graph, [torch.ones(1, 2)])(torch.ones(1, 2)).shape == (1, 2)
    assert private.inductor_options(None, None) == {}
    assert private.inductor_options("max-autotune", None)["max_autotune"] is True
    assert all(isinstance(name, str) for name in private.cpp_compilers())


def profiled_threads() -> None:
    with torch.profiler.profile(experimental_config=private.profiler_of_all_threads()) as profile:
        other = threading.Thread(target=lambda: leaf(4).sum().backward())
        other.start()
        other.join()
    assert "SumBackward0" in {event.name for event in profile.events() or ()}


CHECKS = [
    *(backward_tasks, calls_after_backward, nodes, transforms, hooks, hooks_of_modules, storages, function_modes),
    *(subclasses, dispatch_modes, nests, lists_of_tensors, assertions, flash_attention, reshaped, classes, compilation),
    profiled_threads,
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_torch_does_what_triax_relies_on(check: Callable[[], None]) -> None:
    check()


def groups() -> tuple[float, str, bool]:
    grid = Grid(data=2)
    group = dist.new_group()
    name = private.group_names()[group]
    store = private.default_store()
    store.set(f"rank {grid.rank}", "here")
    store.wait(["rank 0", "rank 1"])
    options = private.gloo_options("127.0.0.1", timedelta(seconds=20))
    own: Any = dist.ProcessGroupGloo(dist.PrefixStore("own", store), grid.rank, grid.size, options)
    x = torch.full((1,), float(grid.rank + 1))
    own.allreduce([x]).wait()
    return float(x), str(name), bool(name)


def test_torch_has_the_groups_that_triax_relies_on(ranks: Any) -> None:
    (one, first, named), (two, second, _) = ranks(2, groups)
    assert one == two == 3.0 and first == second and named


def test_every_private_name_has_a_test() -> None:
    source = Path(__file__).read_text()
    tree = ast.parse((ROOT / "base" / "torch_private.py").read_text())
    assigned = [target for node in tree.body if isinstance(node, ast.Assign) for target in node.targets]
    names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    names |= {*private.__all__, *(each.id for each in assigned if isinstance(each, ast.Name))}
    missing = {name for name in names if f"private.{name}" not in source}
    assert missing == {"restart_group_count"}  # tests/testing/test_pool.py: a job after a lost rank


def test_a_full_graph_error_names_the_reason() -> None:
    def add(x: Tensor) -> Tensor:
        return x + 1

    private.note_uncompiled(add, "add runs alone")
    with pytest.raises(Exception, match="add runs alone"):
        torch.compile(lambda x: add(x) * 2, backend="eager", fullgraph=True)(torch.ones(2))
