"""The borders of the tensor axis: exact transposes of each other, to any depth of differentiation."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import triax
from triax.grid import Grid
from triax.grid.comm import regions
from triax.grid.ranges import split

# name -> (the input is replicated, the output is replicated)
KINDS = {
    "copy_all_reduce": (True, False),
    "all_reduce_copy": (False, True),
    "split_gather": (True, False),
    "gather_split": (False, True),
    "gather_reduce_scatter": (False, False),
    "reduce_scatter_gather": (False, False),
}
SHAPES = [((4, 8, 12), 0), ((4, 8, 12), 1), ((4, 8, 12), -1), ((5, 7), 0), ((5, 7), -1), ((2, 3), 1), ((9,), 0)]


# name, shape, dim, unit. Units, as heads have them, are for the two that meet a replicated tensor.
CASES = [(name, shape, dim, 1) for name in KINDS for shape, dim in SHAPES] + [
    (name, shape, dim, unit)
    for name in ("split_gather", "gather_split")
    for shape, dim, unit in (((2, 15), -1, 3), ((12, 2), 0, 2))
]


def border(
    name: str, grid: Grid, shape: tuple[int, ...], dim: int, unit: int
) -> tuple[Callable[[Tensor], Tensor], tuple[int, ...]]:
    """The function over this grid, and its input's shape on this rank, for a whole tensor of ``shape``."""
    function, axis = getattr(regions, name), grid.tensor
    if name in ("copy_all_reduce", "all_reduce_copy"):
        return lambda x: function(x, axis), shape
    units = {"unit": unit} if unit > 1 else {}
    if not name.startswith("gather"):
        return lambda x: function(x, axis, dim, **units), shape
    start, stop = split(shape[dim], axis.size, axis.rank, unit)
    local = list(shape)
    local[dim] = stop - start
    return lambda x: function(x, axis, dim, shape[dim], **units), tuple(local)


def numbers(shape: tuple[int, ...], seed: int, contiguous: bool = True) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if contiguous:
        return torch.randn(shape, generator=generator, dtype=torch.float64)
    # Every other element of a transposed tensor: no dim is packed.
    spread = torch.randn([2 * n for n in reversed(shape)], generator=generator, dtype=torch.float64)
    return spread.permute(*reversed(range(len(shape))))[tuple(slice(None, None, 2) for _ in shape)]


def adjoint_on_rank() -> dict[Any, Any]:
    """This rank's <Ax, y>, <x, A^T y> and the transpose's value, for each border and shape."""
    grid = Grid(tensor=torch.distributed.get_world_size())
    rank, found = grid.tensor.rank, {}
    for case, contiguous in itertools.product(CASES, (True, False)):
        input_alike, output_alike = KINDS[case[0]]
        apply, local = border(case[0], grid, *case[1:])
        x = numbers(local, 1 if input_alike else 10 + rank, contiguous).requires_grad_()
        before = x.detach().clone()
        out = apply(x)
        y = numbers(tuple(out.shape), 2 if output_alike else 20 + rank, contiguous)
        (grad,) = torch.autograd.grad(out, x, y)
        assert torch.equal(x, before) and grad.shape == x.shape
        found[*case, contiguous] = (float((out * y).sum()), float((x * grad).sum()), out.detach(), grad)
    return found


@pytest.mark.parametrize("size", [2, 3, 4])
def test_each_backward_is_the_transpose_of_its_forward(ranks: Any, size: int) -> None:
    found = ranks(size, adjoint_on_rank)
    for key in found[0]:
        input_alike, output_alike = KINDS[key[0]]
        here = [result[key] for result in found]
        # What every rank holds alike is one tensor, and counts once.
        forward = here[0][0] if output_alike else sum(r[0] for r in here)
        backward = here[0][1] if input_alike else sum(r[1] for r in here)
        assert forward == pytest.approx(backward, rel=1e-12, abs=1e-12), key
        if output_alike:
            assert all(torch.equal(r[2], here[0][2]) for r in here), key
        if input_alike:
            assert all(torch.equal(r[3], here[0][3]) for r in here), key


def forward_on_rank() -> dict[Any, Tensor]:
    grid = Grid(tensor=torch.distributed.get_world_size())
    rank, found = grid.tensor.rank, {}
    for name, shape, dim, unit in CASES:
        apply, local = border(name, grid, shape, dim, unit)
        if name.startswith("gather"):
            start, stop = split(shape[dim], grid.tensor.size, rank, unit)
            x = numbers(shape, 1).narrow(dim, start, stop - start)
        else:
            x = numbers(local, 1 if KINDS[name][0] else 10 + rank)
        found[name, shape, dim, unit] = apply(x)
    return found


@pytest.mark.parametrize("size", [2, 4])
def test_each_border_function_computes_what_its_name_says(ranks: Any, size: int) -> None:
    found = ranks(size, forward_on_rank)
    for name, shape, dim, unit in found[0]:
        whole = numbers(shape, 1)
        total = sum(numbers(shape, 10 + rank) for rank in range(size))
        assert isinstance(total, Tensor)
        for rank in range(size):
            start, stop = split(shape[dim], size, rank, unit)
            expected = {
                "copy_all_reduce": whole,
                "all_reduce_copy": total,
                "split_gather": whole.narrow(dim, start, stop - start),
                "gather_split": whole,
                "gather_reduce_scatter": whole,
                "reduce_scatter_gather": total.narrow(dim, start, stop - start),
            }[name]
            torch.testing.assert_close(found[rank][name, shape, dim, unit], expected, rtol=1e-14, atol=1e-14)


def twice_on_rank() -> None:
    """d/dv of the backward is the forward again, and a third time the backward."""
    grid = Grid(tensor=torch.distributed.get_world_size())
    rank = grid.tensor.rank
    for name, shape, dim, unit in CASES:
        input_alike, output_alike = KINDS[name]
        apply, local = border(name, grid, shape, dim, unit)
        x = numbers(local, 1 if input_alike else 10 + rank).requires_grad_()
        out = apply(x)
        v = numbers(tuple(out.shape), 2 if output_alike else 20 + rank).requires_grad_()
        (once,) = torch.autograd.grad(out, x, v, create_graph=True)
        u = numbers(local, 3 if input_alike else 30 + rank).requires_grad_()
        (twice,) = torch.autograd.grad(once, v, u, create_graph=True)
        assert torch.equal(twice, apply(u)), (name, shape, dim)
        (thrice,) = torch.autograd.grad(twice, u, v)
        assert torch.equal(thrice, once), (name, shape, dim)


@pytest.mark.parametrize("size", [2, 4])
def test_border_functions_differentiate_twice_and_more(ranks: Any, size: int) -> None:
    ranks(size, twice_on_rank)


def test_border_functions_on_one_rank_return_their_input() -> None:
    x = torch.randn(2, 3, requires_grad=True)
    for name in KINDS:
        assert getattr(regions, name)(x, Grid().tensor) is x


def loss_over_replicas(name: str) -> list[Tensor] | str:
    """Return the gradients of a loss over the rows of both replicas, by an engine and by one process, or the error."""
    data = torch.randn(2, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    grid, weight = Grid(data=2), torch.eye(4, dtype=torch.float64)
    model = torch.nn.Linear(4, 4, bias=False, dtype=torch.float64)
    model.weight = torch.nn.Parameter(weight.clone())
    engine = triax.Engine(model, optimizer=torch.optim.SGD, grid=grid, batch=triax.Batch(size=6, microbatch=3))
    rows = engine(data[grid.data.rank])
    if name == "sum":
        total = regions.gather_reduce_scatter(rows.sum(0, keepdim=True), grid.data, dim=0).sum(0)
        engine.backward(total.square().sum())
    else:
        try:
            forward, backward = name.split("/")
            engine.backward(regions.border(forward, backward, rows, grid.data, 0).T.tanh().cumsum(1).square().sum())
        except ValueError as error:
            return str(error)
    engine.step()
    plain = weight.clone().requires_grad_()
    whole = data.flatten(0, 1) @ plain.T
    (whole.sum(0).square() if name == "sum" else whole.T.tanh().cumsum(1).square()).sum().backward()
    assert plain.grad is not None
    return [engine.gather("gradients")["weight"], plain.grad]


def test_border_functions_on_the_data_axis_are_exact_or_refused(ranks: Any) -> None:
    for name in ("gather/reduce_scatter", "sum"):
        for found, wanted in ranks(2, loss_over_replicas, name):
            torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)
    for name in ("copy/all_reduce", "all_reduce/copy", "split/gather", "gather/split"):
        for text in ranks(2, loss_over_replicas, name):
            assert "its gradient is wrong" in text and "gather_reduce_scatter(x, grid.data, dim=0)" in text


def refusals_on(axis: str, sizes: dict[str, Any]) -> list[str]:
    """Return the errors of the borders that are for ranks of one loss, on an axis."""
    grid, texts = Grid(**sizes), []
    for name in ("copy_all_reduce", "all_reduce_copy", "split_gather", "gather_split"):
        with pytest.raises(ValueError, match=f"{name} was given the {axis} axis") as error:
            getattr(regions, name)(torch.ones(2, 4), getattr(grid, axis))
        texts.append(str(error.value))
    return texts


@pytest.mark.parametrize(
    ("axis", "sizes", "instead"),
    [
        ("data_context", {"data": 2, "context": 2}, "data_context"),
        ("expert", {"data": 4, "expert": 2}, "expert"),
        ("expert_data", {"data": 4, "expert": 2}, "expert_data"),
        ("world", {"data": 2, "tensor": 2}, "data"),
    ],
)
def test_border_functions_refuse_axes_over_several_replicas(
    ranks: Any, axis: str, sizes: dict[str, int], instead: str
) -> None:
    for texts in ranks(4, refusals_on, axis, sizes):
        assert all(f"gather_reduce_scatter(x, grid.{instead}, dim=0)" in text for text in texts)


def gather_wrongly(dim: int, length: int | None) -> str:
    try:
        regions.gather_split(torch.zeros(2, 3), Grid(tensor=2).tensor, dim, length)
    except ValueError as error:
        return str(error)
    return "no error"


def test_gathers_of_slices_with_wrong_sizes_are_refused(ranks: Any) -> None:
    said = ranks(2, gather_wrongly, -1, 8)
    assert "dim 1 of the shape (2, 3) has 3 elements, but rank 1 of 2 on tensor holds 4 of 8. Pass length=" in said[1]
    assert all("dim 2 is not a dim of a tensor of shape (2, 3)" in text for text in ranks(2, gather_wrongly, 2, None))


def low_precision_on_rank(dtype: torch.dtype) -> Tensor:
    grid = Grid(tensor=2)
    return regions.all_reduce_copy(torch.full((3,), 1.5, dtype=dtype), grid.tensor)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_border_functions_keep_the_dtype_of_their_input(ranks: Any, dtype: torch.dtype) -> None:
    for out in ranks(2, low_precision_on_rank, dtype):
        assert torch.equal(out, torch.full((3,), 3.0, dtype=dtype))


def reduced_on_rank(elements: int) -> list[tuple[Tensor, float]]:
    """All-reduces of each kind, waited for at once and later; and the bytes counted."""
    axis, found = Grid(tensor=2).tensor, []
    for op in ("sum", "max", "min"):
        for later in (False, True):
            x = torch.arange(elements, dtype=torch.float32) * (1 if axis.rank else -2) + 3
            axis.traffic.clear()
            pending = [axis.all_reduce(x, op, async_op=later), axis.all_reduce(y := x.clone() * 0, op, async_op=later)]
            for each in pending:
                each.wait()
            assert not y.any()
            found.append((x[[0, 1, -1]], axis.traffic.report()["tensor"]["all_reduce"].bytes))
    return found


@pytest.mark.parametrize("elements", [100, 1000, 2**22 + 1], ids=["small", "one exchange", "gloo's ring"])
def test_all_reduces_of_two_ranks_are_exact_at_any_size(ranks: Any, elements: int) -> None:
    last = float(elements - 1)
    wanted = {"sum": [6.0, 5.0, 6 - last], "max": [3.0, 4.0, 3 + last], "min": [3.0, 1.0, 3 - 2 * last]}
    for found in ranks(2, reduced_on_rank, elements):
        for (values, sent), op in zip(found, [op for op in wanted for _ in range(2)], strict=True):
            assert values.tolist() == wanted[op] and sent == 2 * 4 * elements
