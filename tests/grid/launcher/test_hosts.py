"""grid/launcher/hosts.py: DeepSpeed's hostfile, --include and --exclude, as its documentation has them."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triax.base.errors import ConfigError
from triax.grid.launcher.hosts import check_host, limit_slots, parse_hostfile, parse_nodes, parse_ranks, select
from triax.grid.launcher.launch import own_address
from triax.grid.launcher.remote import SSH, exported_variables, host_command, is_local_host

HOSTS = {"worker-1": 4, "worker-2": 4, "10.0.0.3": 2}


def test_a_hostfile_gives_hosts_and_slots_in_its_order() -> None:
    text = "# the cluster\nworker-1 slots=4\n\n  worker-2   slots=4   # the slow one\n10.0.0.3 slots=2\n"
    assert parse_hostfile(text) == HOSTS
    assert list(parse_hostfile("b slots=1\na slots=1")) == ["b", "a"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "hosts.txt names no host: write one line for each host, such as `worker-1 slots=4`"),
        ("# none\n", "names no host"),
        ("a slots=2\nb slot=2", "line 2: 'b slot=2' is not a host with its slots"),
        *(
            (line, f"line 1: '{line}' is not a host with its slots: write one line for each host")
            for line in ("worker-1", "a slots=two", "a slots=2 b slots=2", "a slots=-1", f"a slots={'9' * 5000}")
        ),
        ("a slots=2\n\na slots=3", "line 3: a is listed twice"),
        ("a slots=0", "line 1: a has 0 slots"),
        # ssh would read them as options, and run a command on this host.
        ("-oProxyCommand=x slots=1", "line 1: '-oProxyCommand=x slots=1' is not a host with its slots"),
        ("-F/tmp/config slots=1", "line 1: '-F/tmp/config' is not the name or address of a host"),
        ("-x@b slots=1", "line 1: '-x@b' is not the name or address of a host"),
        ("a;b slots=1", "line 1: 'a;b' is not the name or address of a host"),
        ("a..b slots=1", "line 1: 'a..b' is not the name or address of a host"),
        ("a" * 64 + ".b slots=1", "is not the name or address of a host"),
    ],
)
def test_hostfiles_with_mistakes_are_refused_by_line(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_hostfile(text, "hosts.txt")
    assert words in str(error.value) and str(error.value).startswith("hosts.txt")


@pytest.mark.parametrize(
    ("include", "exclude", "wanted"),
    [
        ("", "", {"worker-1": (0, 1, 2, 3), "worker-2": (0, 1, 2, 3), "10.0.0.3": (0, 1)}),
        # The two examples of DeepSpeed's getting-started page.
        ("worker-2:0,1", "", {"worker-2": (0, 1)}),
        ("", "worker-2:0@worker-1:0,1", {"worker-1": (2, 3), "worker-2": (1, 2, 3), "10.0.0.3": (0, 1)}),
        ("worker-2@worker-1:3,0", "", {"worker-1": (0, 3), "worker-2": (0, 1, 2, 3)}),
        ("", "worker-1@10.0.0.3:0,1", {"worker-2": (0, 1, 2, 3)}),
        ("10.0.0.3:1", "", {"10.0.0.3": (1,)}),
    ],
)
def test_include_and_exclude_choose_slots(include: str, exclude: str, wanted: dict[str, tuple[int, ...]]) -> None:
    found = select(HOSTS, include, exclude)
    assert found == wanted and list(found) == list(wanted)  # in the hostfile's order: that of the ranks


@pytest.mark.parametrize(
    ("include", "exclude", "words"),
    [
        ("worker-1", "worker-2", "both given"),
        ("worker-3", "", "there is no host 'worker-3'; known are worker-1, worker-2"),
        ("worker-1:4", "", "--include names slot 4, but worker-1 has slots 0 to 3"),
        ("worker-1:a", "", "'a' is not a slot of worker-1"),
        ("worker-1:", "", "'' is not a slot of worker-1"),
        ("worker-1:0,0", "", "slot 0 of worker-1 is listed twice"),
        ("worker-1:0@worker-1:1", "", "worker-1 is listed twice"),
        ("worker-1@@worker-2", "", "an empty part"),
        ("", "worker-1@worker-2@10.0.0.3", "leaves no slot"),
        ("", "worker-2:9", "--exclude names slot 9, but worker-2 has slots 0 to 3"),
    ],
)
def test_slots_that_do_not_exist_are_refused(include: str, exclude: str, words: str) -> None:
    with pytest.raises(ConfigError) as error:
        select(HOSTS, include, exclude)
    assert words in str(error.value)


@given(st.dictionaries(st.sampled_from("abcdef"), st.integers(1, 5), min_size=1), st.data())
def test_excluding_slots_equals_including_the_rest(hosts: dict[str, int], data: Any) -> None:
    every = [(host, slot) for host, count in hosts.items() for slot in range(count)]
    chosen = data.draw(st.lists(st.sampled_from(every), min_size=1, unique=True))

    def spelled(slots: list[tuple[str, int]]) -> str:
        hosts = dict.fromkeys(host for host, _ in slots)
        return "@".join(f"{h}:{','.join(str(s) for host, s in slots if host == h)}" for h in hosts)

    rest = [each for each in every if each not in chosen]
    found = select(hosts, include=spelled(chosen))
    assert sorted((host, slot) for host, slots in found.items() for slot in slots) == sorted(chosen)
    if rest:
        assert select(hosts, exclude=spelled(rest)) == found


def test_limit_slots_keeps_the_first_hosts_and_slots() -> None:
    slots = select(HOSTS)
    assert limit_slots(slots, 2, 3) == {"worker-1": (0, 1, 2), "worker-2": (0, 1, 2)}
    assert limit_slots(slots) == slots
    with pytest.raises(ConfigError, match=r"--num_nodes is 4, but there are 3 hosts .*from 1 to 3"):
        limit_slots(slots, 4)
    with pytest.raises(ConfigError, match=r"--num_gpus is 3, but 10\.0\.0\.3 has 2 slots"):
        limit_slots(slots, None, 3)


def test_numbers_of_nodes_and_ranks_are_parsed_or_refused() -> None:
    assert (parse_nodes("4"), parse_nodes("2:4")) == ((4, 4), (2, 4))
    for wrong in ("", "0", "4:2", "two", "1:2:3"):
        with pytest.raises(ConfigError, match="--nnodes"):
            parse_nodes(wrong)
    assert [parse_ranks(text, "--tee") for text in ("0,3", "all", "none")] == [{0, 3}, {-1}, None]
    with pytest.raises(ConfigError, match="write ranks, such as 0,3, or all, or none"):
        parse_ranks("0;1", "--tee")


def test_a_command_reaches_a_host_word_for_word() -> None:
    """Through a shell on the way: quotes, blanks and variables arrive as they were."""
    words = [
        sys.executable,
        "-c",
        "import os, sys; print(sys.argv[1:], os.getcwd(), os.environ['X'])",
        "a 'b' \"c\"",
        "$X",
    ]
    command = host_command("env HOST={host} sh -c {command}", "far", words, {"X": "1 $HOME '2'"}, "/")
    said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout
    assert said == "[\"a 'b' \\\"c\\\"\", '$X'] / 1 $HOME '2'\n" or said == f"{words[3:]} / 1 $HOME '2'\n"
    ssh = host_command(SSH, "worker-1", ["python", "train.py"], {}, "/data")
    assert ssh[0] == "ssh" and ssh[-2:] == ["worker-1", "cd /data && exec env python train.py"]
    assert host_command(SSH, "localhost", ["python"], {}, "/")[:2] == ["sh", "-c"]
    for wrong in ("ssh {host}", "ssh {command}", "ssh {host} x{command}"):
        with pytest.raises(ConfigError, match="--launcher"):
            host_command(wrong, "far", ["python"], {}, "/")
    assert shlex.split(ssh[-1])[-2:] == ["python", "train.py"]


def test_names_in_host_commands_are_never_run_as_shell_text(tmp_path: Path) -> None:
    """A variable called ``NCCL_X$(touch ran)`` ran the command on every host; ssh ran that of ``-oProxyCommand=``."""
    victim, name = tmp_path / "ran", "NCCL_X$(touch ran)"
    variables = {name: "1", "NCCL_Y": "a b"}
    command = host_command("env HOST={host} sh -c {command}", "far", ["env"], variables, str(tmp_path))
    said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout
    assert f"{name}=1\n" in said and "NCCL_Y=a b\n" in said and not victim.exists()
    assert host_command(SSH, "worker-1", ["python"], {}, "/")[-3:-1] == ["--", "worker-1"]
    for host in ("-oProxyCommand=touch ran", "-x", "a b", "a..b", "", "a$(b)"):
        for template in (SSH, "ssh -p 2222 {host} {command}"):
            with pytest.raises(ConfigError, match="is not the name or address of a host"):
                host_command(template, host, ["python"], {}, "/")
    for host in ("worker-1", "10.0.0.1", "fe80::1%eth0", "::1", "user@worker-1.cluster.", "node_3"):
        check_host(host, "the hostfile")
    assert not is_local_host("a..b") and own_address("a" * 70) == "a" * 70
    for asked in ("A-B=1", "=1", "X$(touch ran)=1", "-S=1"):
        with pytest.raises(ConfigError, match="write letters, digits and _"):
            exported_variables({}, [asked])


def test_exported_variables_are_passed_to_the_hosts() -> None:
    environ = {"NCCL_DEBUG": "INFO", "HOME": "/root", "MINE": "3", "PYTHONPATH": "/x"}
    assert exported_variables(environ) == {"NCCL_DEBUG": "INFO", "PYTHONPATH": "/x"}
    assert exported_variables(environ, ["MINE", "OTHER=a=b"], ()) == {"MINE": "3", "OTHER": "a=b"}
    with pytest.raises(ConfigError, match=r"--export NONE: this process has no such variable"):
        exported_variables(environ, ["NONE"])
