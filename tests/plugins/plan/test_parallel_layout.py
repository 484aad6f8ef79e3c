"""``ParallelLayout``: sizes, defaults, and what it refuses."""

from __future__ import annotations

import pytest

from triax.plugins.plan.parallel_layout import ParallelLayout


def test_a_parallel_layout_has_its_sizes_and_defaults() -> None:
    layout = ParallelLayout(pipe=2, data=4, context=2, tensor=8, expert=8, microbatch=2)
    assert layout.gpus == 128 == layout.topology.world_size
    assert layout.topology.sizes == {"pipe": 2, "data": 4, "context": 2, "tensor": 8, "expert": 8}
    assert layout.sequence_parallel and not ParallelLayout().sequence_parallel
    assert not ParallelLayout(sequence_parallel=True).sequence_parallel  # there is no tensor axis
    assert ParallelLayout(tensor=2, sequence_parallel=False).sequence_parallel is False
    assert layout.microbatches(64) == 8
    assert "context" not in ParallelLayout(pipe=2).topology.axes
    assert str(ParallelLayout(pipe=2, chunks=2, schedule="interleaved", tensor=2, sequence_parallel=False)) == (
        "pipe=2,tensor=2,microbatch=1,chunks=2,schedule=interleaved,zero=0,recompute=none,sequence_parallel=false"
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"data": 0}, "data is 0. Give a whole number of at least 1."),
        ({"data": 4, "expert": 3}, "expert=3 does not divide data x context = 4 x 1. Give a divisor of 4."),
        ({"schedule": "1g1b"}, "there is no schedule '1g1b' for training; did you mean '1f1b'?"),
        ({"schedule": "forward"}, "known are gpipe, 1f1b"),
        ({"chunks": 2}, "1f1b does not run 2 chunks per rank. Give chunks=1"),
        ({"schedule": "interleaved"}, "Give chunks=2"),
        ({"zero": 4}, "zero is 4"),
        ({"recompute": "some"}, "Give one of none, selective, full"),
    ],
)
def test_impossible_parallel_layouts_are_refused(fields: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError) as error:
        ParallelLayout(**fields)  # type: ignore[arg-type]
    assert message in str(error.value)


def test_batches_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="data x microbatch = 4 x 2 does not divide batch=12"):
        ParallelLayout(data=4, microbatch=2).microbatches(12)
    with pytest.raises(ValueError, match="needs at least 8 microbatches for pipe=4, but batch=14 is 7 for each of 2"):
        ParallelLayout(pipe=4, data=2, chunks=2, schedule="dualpipe-v").microbatches(14)
