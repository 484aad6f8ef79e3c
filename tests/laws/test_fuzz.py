"""The fuzzers: a few fixed cases of each, cases that once failed, and proof that each fuzzer finds mistakes."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from triax.testing import pool
from triax.train import file

from laws import faults, fuzz, fuzz_config, fuzz_train_files

UNUSED = [["linear"], ["split_tuple"], ["same"], ["linear"]]  # the second layer's second output is used by nothing
TIED = {"family": "llama", "num_key_value_heads": 2, "tie_word_embeddings": True}
FOUND: list[dict[str, Any]] = [
    # A parameter without a gradient decayed: in stage 3 where a whole layer had none, ...
    {"grid": [1, 2, 1], "optimizer": "momentum", "layers": UNUSED[:2], "config": {"zero_optimization": {"stage": 3}}},
    # ... and before a stage boundary over which an unused tensor went.
    {"grid": [2, 1, 1], "optimizer": "momentum", "layers": UNUSED},
    {"grid": [2, 1, 1], "optimizer": "momentum", "schedule": "zb-h1", "layers": UNUSED},
    {"grid": [2, 1, 2], "optimizer": "momentum", "layers": [["sharded"], ["split_tuple"], ["same"], ["sharded"]]},
    # The deferred weight gradient of a convolution read the weight, which stage 3 had released.
    {
        "grid": [1, 2, 1],
        "schedule": "v-min",
        "chunks": 2,
        "accumulation": 3,
        "layers": [["linear"], ["conv"]],
        "config": {"zero_optimization": {"stage": 3}, "activation_checkpointing": {"interval": 1}},
    },
    # Weights before a stage with a detach decayed, because zeros came back over the stage boundary.
    {"optimizer": "Adam", "schedule": "wave", "chunks": 4, "layers": [["linear"], ["linear"], ["cut"], ["linear"]]},
    # Buffers of layers built on the meta device were looked for where they have no values.
    {"meta": True, "layers": [["partly"]], "config": {"activation_checkpointing": {"number_checkpoints": 1}}},
    # Tied weights drifted apart in their last bits, because each stage cut them into other sub-groups.
    {"grid": [2, 1, 1], "steps": 2, "model": TIED, "config": {"zero_optimization": {"sub_group_size": 30}}},
]


@pytest.fixture(autouse=True)
def own_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """The programs raise the pool's grace period, which the tests after these must not have."""
    monkeypatch.setattr(pool, "GRACE", pool.GRACE)


@pytest.mark.parametrize("case", FOUND)
def test_compositions_that_once_failed_equal_one_process(ranks: Any, case: dict[str, Any]) -> None:
    assert fuzz.judge(case) == fuzz.Verdict("equal")


def test_some_random_compositions_equal_one_process(ranks: Any) -> None:
    counts, findings = fuzz.run(seconds=60, seed=5, cases=4)
    assert not findings and counts["equal"] >= 2


def test_some_random_configurations_train_or_are_refused() -> None:
    counts, findings = fuzz_config.run(seconds=60, seed=7, cases=60)
    assert not findings and counts["refused"] > 10 and counts["accepted"] + counts["trained"] > 10


def test_some_random_training_files_train_or_are_refused() -> None:
    try:
        assert not [*fuzz_train_files.known(every=9)]
        counts, findings = fuzz_train_files.run(seconds=60, seed=7, cases=12, step=12)
    finally:
        fuzz_train_files.close()
    assert not findings and counts["refused"] > 5


@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
def test_hostile_training_files_train_or_are_refused() -> None:
    try:
        assert not [*fuzz_train_files.known()]
        counts, findings = fuzz_train_files.run(seconds=600, seed=8, cases=200, step=1)
    finally:
        fuzz_train_files.close()
    assert not findings and sum(counts.values()) == 200 and counts["trained"] > 10


def test_a_run_survives_a_kill_a_damage_and_an_error(ranks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "GRACE", 20.0)
    lives: list[dict[str, Any]] = [
        {"kind": "kill_in_save", "at": 7, "step": 2},
        {"kind": "damage", "way": "flip", "at": 5},
        {"kind": "raise", "grid": [2, 1, 1], "step": 3},
    ]
    assert faults.judge({"steps": 5, "lives": lives}) == faults.Verdict("survived")


@pytest.mark.exhaustive
def test_survivors_name_the_rank_that_was_interrupted(ranks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message was "another rank failed", without the rank's name."""
    monkeypatch.setattr(pool, "GRACE", 20.0)
    lives: list[dict[str, Any]] = [{"kind": "interrupt", "grid": [2, 1, 1], "step": 3, "victim": 0}]
    assert faults.judge({"steps": 5, "lives": lives}) == faults.Verdict("survived")


@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("program", [fuzz, fuzz_config, fuzz_train_files, faults], ids=lambda program: program.__name__)
def test_each_fuzzer_finds_nothing_in_five_minutes(ranks: Any, program: Any) -> None:
    counts, findings = program.run(seconds=300, seed=random.randrange(10**6))
    assert not findings and sum(counts.values()) > 20, findings


# ------------------------------------------------------------------------------------------ they find what is wrong


def test_the_fuzzer_reports_a_wrong_gradient() -> None:
    found = fuzz.plainly({"grid": [1, 1, 1], "layers": [["linear"], ["gru"]]})
    ranks = [{**found, "digests": {}, "tensor": 0, "losses": [step[:2] for step in found["steps"]]}]
    case = fuzz.full({})
    assert fuzz.compare(case, ranks, found, 1e-10).kind == "equal"
    loss, norm, gradients, weights = found["steps"][0]
    for name, tensor in gradients.items():
        near = {**gradients, name: tensor + 1e-8 * torch.ones_like(tensor)}
        wrong = [{**ranks[0], "steps": [(loss, norm, near, weights)]}]
        assert f"gradient of {name} differs" in fuzz.compare(case, wrong, found, 1e-10).text
    drifted = [*ranks, {**ranks[0], "digests": {"a": "1"}}, {**ranks[0], "digests": {"a": "2"}}]
    assert fuzz.compare(case, drifted, found, 1e-10).kind == "wrong"


def test_fuzzers_report_an_error_that_is_no_refusal(monkeypatch: pytest.MonkeyPatch, ranks: Any) -> None:
    def raw(_: Any) -> Any:
        raise KeyError("stage")

    monkeypatch.setattr(fuzz_config, "read_config", raw)
    assert fuzz_config.judge({}).kind == "raw"
    # A rank's own error of torch's is raw, and triax's words are a refusal.
    assert fuzz.judge({"layers": [["linear"]], "chunks": 3}).kind == "refused"
    assert fuzz.judge({"config": {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "no": 1}}).kind == "refused"


def test_the_fuzzer_reports_dropped_keys_and_raw_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    """A key that is left out on the way to the schema is silent, and an error of Python's is raw."""
    base = fuzz_train_files.SMALL
    try:
        text = base.replace("time_limit: 10m", "time_limit: 10m\n  no_such: 3")
        assert fuzz_train_files.judge(text, base).kind == "refused"
        monkeypatch.setattr(file, "renamed", dropped)
        assert fuzz_train_files.judge(text, base).kind == "silent"

        def raw(_: Any) -> Any:
            raise KeyError("steps")

        monkeypatch.setattr(fuzz_train_files, "make_job", raw)
        assert fuzz_train_files.judge(base).kind == "raw"
    finally:
        fuzz_train_files.close()


def dropped(values: dict[str, Any], short_forms: dict[str, str]) -> dict[str, Any]:
    return values | {"training": {key: each for key, each in values["training"].items() if key != "no_such"}}


def test_the_fuzzer_reports_a_lost_checkpoint(monkeypatch: pytest.MonkeyPatch, ranks: Any) -> None:
    monkeypatch.setattr(faults, "tags", lambda folder: [])
    lives = [{"kind": "exit", "step": 2}]
    assert "was committed, and the newest checkpoint is of step 0" in faults.judge({"steps": 4, "lives": lives}).text


def test_shrinking_keeps_only_the_failing_parts() -> None:
    case = {"grid": [2, 2, 1], "layers": [["linear"], ["gru"], ["conv"]], "steps": 4, "config": {"a": 1, "b": 2}}

    def fails(less: dict[str, Any]) -> bool:
        return ["gru"] in less.get("layers", []) and "b" in less.get("config", {})

    assert fuzz.shrink(case, fuzz.DEFAULT, fails) == {"layers": [["gru"]], "config": {"b": 1}}
