"""Ranks and coordinates, and the environment variables of launchers. No process is started."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from triax.grid.environment import read_environment
from triax.grid.topology import Topology

sizes = st.integers(1, 5)
topologies = st.builds(
    lambda names, shape: Topology(**dict(zip(names, shape, strict=True))),
    st.permutations(["pipe", "data", "tensor"]),
    st.tuples(sizes, sizes, sizes),
)


@given(topologies)
def test_ranks_are_numbered_as_a_row_major_array(topology: Topology) -> None:
    numbered = np.arange(topology.world_size).reshape(topology.shape)
    for place, rank in np.ndenumerate(numbered):
        assert tuple(topology.coordinate(int(rank))) == place
        assert topology.rank(**dict(zip(topology.names, place, strict=True))) == rank


@given(topologies, st.sets(st.sampled_from(["pipe", "data", "tensor"]), min_size=1))
def test_groups_hold_every_rank_once_and_vary_their_axes_only(topology: Topology, axes: set[str]) -> None:
    groups = topology.groups(*axes)
    assert sorted(rank for group in groups for rank in group) == list(range(topology.world_size))
    for group in groups:
        assert group == sorted(group)
        assert len(group) == np.prod([topology.size(axis) for axis in axes])
        for axis in set(topology.names) - axes:
            assert len({getattr(topology.coordinate(rank), axis) for rank in group}) == 1


def test_the_default_order_numbers_tensor_ranks_consecutively() -> None:
    topology = Topology(pipe=2, data=2, tensor=2)
    assert topology.groups("tensor") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert topology.groups("data") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert topology.groups("pipe") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert topology.groups("pipe", "tensor") == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert topology.ranks(pipe=0, tensor=1) == [1, 3]
    assert topology.ranks() == list(range(8))


def test_a_topology_takes_other_axis_names_and_missing_axes() -> None:
    assert Topology(host=2, gpu=4).names == ("host", "gpu")
    assert Topology(tensor=2).shape == (2, 1, 1)  # what was named comes first, the rest has size 1
    assert Topology().world_size == 1
    assert Topology(pipe=2, data=3).rank(pipe=1, data=2) == 5  # tensor, of size 1, may be left out


def test_a_topology_can_be_sent_to_another_process() -> None:
    topology = Topology(pipe=2, data=4, context=2, tensor=2, expert=4)
    sent = pickle.loads(pickle.dumps(topology))
    assert (sent, sent.coordinate(5)) == (topology, topology.coordinate(5))


def test_topologies_compare_hash_and_print_by_their_sizes() -> None:
    assert Topology(pipe=2, data=2) == Topology(pipe=2, data=2, tensor=1)
    assert Topology(pipe=2, data=2) != Topology(data=2, pipe=2)  # another order numbers the ranks otherwise
    assert len({Topology(pipe=2), Topology(pipe=2, data=1, tensor=1)}) == 1
    assert repr(Topology(pipe=2, data=3)) == "Topology(pipe=2, data=3, tensor=1)"
    assert repr(Topology(pipe=2, tensor=2).coordinate(1)) == "Coordinate(pipe=0, tensor=1, data=0)"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: Topology(pipe=0), "the pipe axis has the size 0"),
        (lambda: Topology(tensor=True), "the tensor axis has the size True"),
        (lambda: Topology(data=2.0), "the data axis has the size 2.0"),  # type: ignore[arg-type]
        (lambda: Topology(pipe=2).coordinate(2), "rank 2 is not one of 2 ranks: give 0 to 1"),
        (lambda: Topology(pipe=2).coordinate(-1), "rank -1"),
        (lambda: Topology(pipe=2).rank(pipe=2), "pipe=2 does not lie on the pipe axis of size 2: give 0 to 1"),
        (lambda: Topology(pipe=2, data=2).rank(pipe=1), "has 2 ranks with .*: name data too"),
        (lambda: Topology(pipe=2).ranks(expert=0), "no axis 'expert': give one of pipe, data, tensor"),
        (lambda: Topology(pipe=2).groups("model"), "no axis 'model'"),
        (lambda: Topology(pipe=2).size("model"), "no axis 'model'"),
    ],
)
def test_topology_errors_state_the_numbers(wrong: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        wrong()  # type: ignore[operator]


@pytest.mark.parametrize("name", ["grid.topology", "grid.environment", "models.config"])
def test_topology_and_configurations_import_without_torch(name: str) -> None:
    import triax.grid

    parent = str(Path(triax.grid.__file__).parents[2])
    code = (
        "import sys, importlib; sys.modules['torch'] = None; "
        f"sys.path.insert(0, {parent!r}); importlib.import_module('triax.{name}')"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# ------------------------------------------------------------------------------------------ the environment


def test_variables_of_no_launcher_mean_one_process() -> None:
    assert read_environment({}) is None
    assert read_environment({"RANK": "0"}) is None  # some shells and containers set one of them
    assert read_environment({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"}) is None  # inside salloc, not srun


def test_the_variables_of_torchrun_are_read() -> None:
    env = read_environment(
        {
            "RANK": "5",
            "WORLD_SIZE": "8",
            "LOCAL_RANK": "1",
            "MASTER_ADDR": "10.0.0.1",
            "MASTER_PORT": "1234",
            "TORCHELASTIC_RESTART_COUNT": "2",
            "SLURM_PROCID": "1",  # torchrun inside a Slurm job: torchrun is the nearer one
            "SLURM_NTASKS": "2",
        }
    )
    assert env is not None
    assert (env.rank, env.world_size, env.local_rank) == (5, 8, 1)
    assert (env.master_addr, env.master_port, env.restarts, env.launcher) == ("10.0.0.1", 1234, 2, "torchrun")


def test_the_variables_of_open_mpi_are_read() -> None:
    mpi = {
        "OMPI_COMM_WORLD_RANK": "3",
        "OMPI_COMM_WORLD_SIZE": "4",
        "OMPI_COMM_WORLD_LOCAL_RANK": "3",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    }
    env = read_environment(mpi)
    assert env is not None
    assert (env.rank, env.world_size, env.local_rank, env.master_addr) == (3, 4, 3, "127.0.0.1")
    over_hosts = mpi | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    with pytest.raises(ValueError, match=r"mpirun started 4 processes, 2 of them on this host.*-x MASTER_ADDR="):
        read_environment(over_hosts)
    env = read_environment(over_hosts | {"MASTER_ADDR": "head", "MASTER_PORT": "99"})
    assert env is not None
    assert (env.master_addr, env.master_port, env.launcher) == ("head", 99, "mpirun")


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node1", "node1"),
        ("node1,node2", "node1"),
        ("node[03-05,9],other", "node03"),
        ("node[7,9-12]", "node7"),
        ("gpu-a[1-2]-ib", "gpu-a1-ib"),
        ("gpu-a,gpu-b[1-2]", "gpu-a"),
        ("host.domain.org", "host.domain.org"),
        ("", "127.0.0.1"),
    ],
)
def test_slurm_variables_and_node_lists_are_read(nodes: str, first: str) -> None:
    slurm = {
        "SLURM_PROCID": "2",
        "SLURM_NTASKS": "16",  # of the job
        "SLURM_STEP_NUM_TASKS": "4",  # of this srun
        "SLURM_LOCALID": "0",
        "SLURM_STEP_NODELIST": nodes,
        "SLURM_JOB_ID": "123456",
    }
    env = read_environment(slurm)
    assert env is not None
    assert (env.rank, env.world_size, env.local_rank, env.launcher) == (2, 4, 0, "srun")
    assert env.master_addr == first
    assert 1024 < env.master_port < 65536
    other = read_environment(slurm | {"SLURM_JOB_ID": "123457"})
    assert other is not None
    assert other.master_port != env.master_port  # two jobs on one host


def test_the_expert_axis_divides_data_and_context() -> None:
    topology = Topology(pipe=2, data=2, context=2, tensor=1, expert=2)
    assert topology.groups("data_context") == topology.groups("data", "context") == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert topology.groups("expert") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert topology.groups("expert_data") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert topology.size("expert") == 2 and topology.coordinate(3) == (0, 1, 1, 0)
    assert str(topology) == "Topology(pipe=2, data=2, context=2, tensor=1, expert=2)"
    assert topology != Topology(pipe=2, data=2, context=2, tensor=1)
    assert Topology(data=2).size("context") == 1 and Topology(data=2).groups("context") == [[0], [1]]
    with pytest.raises(ValueError, match=r"expert=3 does not divide data x context = 2 x 2.*a divisor of 4"):
        Topology(data=2, context=2, expert=3)
