"""The pool of ranks: results, failures, deaths and hangs as a test sees them, and a clean pool for the next test."""

from __future__ import annotations

import datetime
import functools
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from triax.testing.pool import RankFailure, RankTimeout

from support.paths import ROOT
from support.processes import is_alive


@dataclass(frozen=True)
class Pair:
    """A class of a test file travels in both directions."""

    left: int
    right: torch.Tensor


def whoami() -> tuple[int, int, int]:
    return dist.get_rank(), dist.get_world_size(), os.getpid()


def weighted_sum(x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    x = x * (dist.get_rank() + 1) * scale
    dist.all_reduce(x)
    return x


def swap(pair: Pair) -> Pair:
    return Pair(pair.left + dist.get_rank(), pair.right.t())


def alone() -> tuple[bool, bool, int]:
    return dist.is_initialized(), "RANK" in os.environ, os.getpid()


def environment() -> dict[str, str | None]:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return {name: os.environ.get(name) for name in names}


def group_from_environment() -> float:
    assert not dist.is_initialized()
    dist.init_process_group("gloo")
    return float(weighted_sum(torch.ones(1)))


def fails_on(bad: int) -> None:
    if dist.get_rank() == bad:
        raise ValueError(f"the bad rank is {bad}")
    dist.barrier()


def connects_to_nobody(store: str) -> None:
    if dist.is_initialized() or os.environ["RANK"] != "0":
        return
    limit = datetime.timedelta(seconds=0.2)
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=0, world_size=2, timeout=limit)


def compares(left: list[int], right: list[int]) -> None:
    assert left == right


def dies_on(bad: int, number: int) -> None:
    if dist.get_rank() == bad:
        os.kill(os.getpid(), number)
    dist.barrier()


def leaves() -> None:
    os._exit(3)


def waits_on(stuck: int) -> str:
    if dist.get_rank() == stuck:
        waits_here()
    return "done"


def waits_here() -> None:
    time.sleep(600)


def misses_a_collective() -> None:
    if dist.get_rank() != 1:
        dist.all_reduce(torch.ones(1))


def ignores_its_peers() -> None:
    dist.barrier()  # otherwise rank 1 may not have begun when it is killed
    if dist.get_rank() == 0:
        raise RuntimeError("only me")
    waits_here()


def makes_a_mess(folder: str) -> None:
    os.environ["TRIAX_MESS"] = "1"
    os.environ.pop("PATH")
    os.chdir(folder)
    sys.path.insert(0, folder)
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    torch.set_num_threads(2)
    dist.new_group(list(range(dist.get_world_size())))
    dist.distributed_c10d._get_default_store().set("left", "over")


def sees_the_mess() -> dict[str, Any]:
    return {
        "variable": os.environ.get("TRIAX_MESS"),
        "path": "PATH" in os.environ,
        "folder": os.getcwd(),
        "sys.path": list(sys.path),
        "dtype": torch.get_default_dtype(),
        "grad": torch.is_grad_enabled(),
        "threads": torch.get_num_threads(),
        "store": dist.distributed_c10d._get_default_store().check(["left"]),
        "draw": torch.rand(()).item(),
        "descriptors": len(os.listdir("/dev/fd")),
    }


def returns_a_view() -> torch.Tensor:
    return torch.zeros(1_000_000)[:3]


class Holder:
    @staticmethod
    def method() -> int:
        return dist.get_rank()

    def bound(self) -> None: ...


@pytest.mark.parametrize("n", [2, 3, 8])
def test_results_come_back_in_order_of_rank(ranks: Any, n: int) -> None:
    answers = ranks(n, whoami)
    assert [rank for rank, _, _ in answers] == list(range(n))
    assert {size for _, size, _ in answers} == {n}
    pids = {pid for _, _, pid in answers}
    assert len(pids) == n and os.getpid() not in pids


def test_ranks_receive_arguments_keywords_and_partials(ranks: Any) -> None:
    x = torch.tensor([1.0, 2.0])
    assert all(torch.equal(y, 10 * x) for y in ranks(4, weighted_sum, x))
    assert all(torch.equal(y, 5 * x) for y in ranks(4, weighted_sum, x, scale=0.5))
    assert all(torch.equal(y, 30 * x) for y in ranks(4, functools.partial(weighted_sum, x, scale=3)))
    assert torch.equal(x, torch.tensor([1.0, 2.0]))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
def test_values_sent_to_ranks_keep_their_types(ranks: Any, dtype: torch.dtype) -> None:
    right = torch.arange(6).view(2, 3).to(dtype)
    answers = ranks(2, swap, Pair(40, right))
    assert [type(answer) for answer in answers] == [Pair, Pair]
    assert [answer.left for answer in answers] == [40, 41]
    assert all(answer.right.dtype == dtype and torch.equal(answer.right, right.t()) for answer in answers)


def test_a_view_is_sent_without_its_whole_storage() -> None:
    from triax.testing import rank_process

    view = returns_a_view()
    assert view.untyped_storage().nbytes() == 4_000_000
    assert len(rank_process.dump(view)) < 1000


def test_ranks_get_scalars_empty_and_differentiable_tensors() -> None:
    import pickle

    from triax.testing import rank_process

    for value in (torch.tensor(2.5), torch.zeros(0, 3), torch.nn.Parameter(torch.ones(2)) * 2):
        back = pickle.loads(rank_process.dump(value))
        assert back.shape == value.shape and back.dtype == value.dtype and torch.equal(back, value.detach())
        back.zero_()  # writable, not a view of the pipe's bytes


def test_a_job_of_one_rank_has_no_process_group(ranks: Any) -> None:
    ((initialized, has_rank, pid),) = ranks(1, alone)
    assert not initialized and not has_rank and pid != os.getpid()


def test_ranks_of_the_pool_have_torchruns_environment(ranks: Any) -> None:
    answers = ranks(2, environment, init_group=False)
    assert [answer["RANK"] for answer in answers] == ["0", "1"]
    assert [answer["LOCAL_RANK"] for answer in answers] == ["0", "1"]
    assert {answer["WORLD_SIZE"] for answer in answers} == {"2"}
    assert len({answer["MASTER_PORT"] for answer in answers}) == 1
    assert ranks(2, group_from_environment, init_group=False) == [3.0, 3.0]


def test_processes_and_group_numbers_do_not_leak(ranks: Any) -> None:
    """One set of processes serves all jobs; nothing of a job is left, not even open files."""
    before = [pid for _, _, pid in ranks(4, whoami)]
    first = ranks(4, sees_the_mess)
    for _ in range(3):
        ranks(4, makes_a_mess, "/")
    assert ranks(4, sees_the_mess) == first
    assert [pid for _, _, pid in ranks(4, whoami)] == before
    assert first[0]["variable"] is None and first[0]["path"] and not first[0]["store"]
    assert first[0]["dtype"] == torch.float32 and first[0]["threads"] == 1


def test_new_processes_do_not_replace_those_of_the_pool(ranks: Any) -> None:
    """New processes end with their job, whether it fails or not."""
    own = [pid for _, _, pid in ranks(3, whoami)]
    first, second = ([pid for _, _, pid in ranks(2, whoami, new_processes=True)] for _ in range(2))
    assert len({*own, *first, *second}) == 7
    with pytest.raises(RankFailure, match="the bad rank is 1"):
        ranks(2, fails_on, 1, new_processes=True)
    _wait_until_gone([*first, *second])
    assert [pid for _, _, pid in ranks(3, whoami)] == own


def test_ranks_draw_different_random_numbers(ranks: Any) -> None:
    """Different numbers on each rank make code fail that depends on the global generator."""
    draws = [answer["draw"] for answer in ranks(4, sees_the_mess)]
    assert len(set(draws)) == 4


def test_a_failure_lists_the_raising_rank_first_with_traceback(ranks: Any) -> None:
    with pytest.raises(RankFailure, match=r"rank 2 raised .* ValueError: the bad rank is 2") as caught:
        ranks(4, fails_on, 2)
    failure = caught.value
    assert failure.first.rank == 2
    assert 'raise ValueError(f"the bad rank is {bad}")' in failure.first.text
    assert "rank_process.py" not in failure.first.text
    assert sorted(report.rank for report in failure.reports) == [0, 1, 2, 3]
    # The others met a closed connection: a few lines each, after the cause.
    others = str(failure).split("--- rank")[1:]
    assert len(others) == 3 and all(len(other.splitlines()) <= 9 for other in others)


def test_all_ranks_work_after_a_failure(ranks: Any) -> None:
    for bad in range(3):
        with pytest.raises(RankFailure, match=f"the bad rank is {bad}"):
            ranks(3, fails_on, bad)
        assert [float(x) for x in ranks(3, weighted_sum, torch.ones(1))] == [6.0] * 3


def test_a_group_that_failed_to_start_does_not_break_the_next(ranks: Any, tmp_path: Path) -> None:
    with pytest.raises(RankFailure, match="rank 0 raised"):
        ranks(2, connects_to_nobody, str(tmp_path / "store"), init_group=False)
    assert [float(x) for x in ranks(2, weighted_sum, torch.ones(1))] == [3.0] * 2


def test_an_assertion_on_a_rank_shows_its_values(ranks: Any) -> None:
    with pytest.raises(RankFailure, match=r"\[1, 2\] == \[1, 3\]"):
        ranks(1, compares, [1, 2], [1, 3])


def test_a_rank_that_ignores_the_failure_of_another_is_killed(ranks: Any) -> None:
    with pytest.raises(RankFailure, match="only me") as caught:
        ranks(2, ignores_its_peers)
    assert not isinstance(caught.value, RankTimeout)  # long before the time limit
    assert caught.value[1].kind == "stuck" and "waits_here" in caught.value[1].text
    assert [rank for rank, _, _ in ranks(2, whoami)] == [0, 1]


def test_a_killed_rank_is_named_with_its_signal_at_once(ranks: Any) -> None:
    before = [pid for _, _, pid in ranks(4, whoami)]
    with pytest.raises(RankFailure, match=r"rank 1 died .* killed by SIGKILL") as caught:
        ranks(4, dies_on, 1, int(signal.SIGKILL))
    assert not isinstance(caught.value, RankTimeout)  # long before the time limit
    assert caught.value[1].kind == "died"
    after = [pid for _, _, pid in ranks(4, whoami)]
    assert after[1] != before[1]
    assert [float(x) for x in ranks(4, weighted_sum, torch.ones(1))] == [10.0] * 4


def test_a_crashed_rank_shows_its_stack(ranks: Any) -> None:
    with pytest.raises(RankFailure, match="killed by SIGSEGV") as caught:
        ranks(2, dies_on, 0, int(signal.SIGSEGV))
    assert "dies_on" in caught.value[0].text


def test_a_rank_that_leaves_is_named_with_its_status(ranks: Any) -> None:
    with pytest.raises(RankFailure, match="exit status 3"):
        ranks(1, leaves)
    assert len(ranks(1, alone)) == 1


def test_a_rank_killed_between_jobs_is_replaced(ranks: Any) -> None:
    victim = ranks(3, whoami)[2][2]
    os.kill(victim, signal.SIGKILL)
    _wait_until_gone([victim])
    assert [rank for rank, _, _ in ranks(3, whoami)] == [0, 1, 2]


def test_a_timeout_shows_where_every_rank_was(ranks: Any) -> None:
    with pytest.raises(RankTimeout, match=r"waits_on on 3 ranks did not end .* ranks \[1\]") as caught:
        ranks(3, waits_on, 1, timeout=1)
    assert caught.value[1].kind == "stuck"
    assert "in waits_here" in caught.value[1].text and "in waits_on" in caught.value[1].text
    assert "rank_process" not in caught.value[1].text
    assert "in waits_here" in str(caught.value)
    assert [caught.value[rank].kind for rank in (0, 2)] == ["returned", "returned"]
    assert ranks(3, waits_on, -1) == ["done"] * 3


def test_a_missed_collective_is_a_timeout_that_names_the_collective(ranks: Any) -> None:
    with pytest.raises(RankTimeout, match=r"still running: ranks \[0, 2\]") as caught:
        ranks(3, misses_a_collective, timeout=1)
    assert "all_reduce" in caught.value[0].text and "in misses_a_collective" in caught.value[0].text
    assert caught.value[1].kind == "returned"
    assert [float(x) for x in ranks(3, weighted_sum, torch.ones(1))] == [6.0] * 3


def test_the_pool_works_after_an_interrupt(ranks: Any) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        with pytest.raises(KeyboardInterrupt):
            ranks(2, waits_on, 0)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert ranks(2, waits_on, -1) == ["done"] * 2


def test_functions_without_a_top_level_name_are_refused(ranks: Any) -> None:
    def inner() -> None: ...

    for nameless in (lambda: 1, inner, Holder().bound):
        with pytest.raises(TypeError, match=r"cannot find .* by its name: give a function from the top level"):
            ranks(2, nameless)
    with pytest.raises(TypeError, match=r"test_pool\.py:\d+"):
        ranks(2, inner)
    assert ranks(2, Holder.method) == [0, 1]
    assert ranks(1, os.getcwd) == [os.getcwd()]


@pytest.mark.parametrize("n", [0, 9])
def test_sizes_outside_the_pool_are_refused(ranks: Any, n: int) -> None:
    with pytest.raises(ValueError, match=f"8 ranks, and {n} were asked for"):
        ranks(n, whoami)


SCRIPT = """
import os, signal, sys
sys.path[:0] = [{tests!r}]
from triax.testing import pool
if __name__ == "__main__":
    print(*pool.run_ranks(2, os.getpid), flush=True)
    {end}
"""


def test_no_rank_outlives_the_run(tmp_path: Path) -> None:
    """Two runs at once: one ends by itself, one is killed."""
    runs, environment = [], {**os.environ, "TRIAX_POOL_PRELOAD": "none"}
    for number, end in enumerate(("", "os.kill(os.getpid(), signal.SIGKILL)")):
        script = tmp_path / f"run{number}.py"
        script.write_text(SCRIPT.format(tests=str(ROOT / "tests"), end=end))
        runs.append(subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True, env=environment))
    for run in runs:
        pids = [int(word) for word in run.communicate()[0].split()]
        assert len(pids) == 2
        _wait_until_gone(pids)
    assert [run.returncode for run in runs] == [0, -signal.SIGKILL]


def _wait_until_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + 10
    while any(is_alive(pid) for pid in pids):
        assert time.monotonic() < deadline, f"ranks {pids} are still there"
        time.sleep(0.05)


def test_loopback_is_an_interface_of_this_machine() -> None:
    from triax.testing import rank_process

    interfaces = [interface for _, interface in socket.if_nameindex()]
    wanted = next((name for name in ("lo", "lo0") if name in interfaces), None)  # Linux, macOS
    assert rank_process.loopback() == wanted
