"""The section ``elasticity``: values that DeepSpeed's function returned for the same settings."""

from __future__ import annotations

from typing import Any

import pytest

from triax.base.errors import ConfigError
from triax.compat.deepspeed.config.document import resolved
from triax.compat.deepspeed.config.elasticity import chosen, described, sizes
from triax.compat.deepspeed.config.read import section
from triax.compat.deepspeed.config.to_options import batch_sizes, parse_config

# version, max batch, micro sizes, min, max, prefer larger, model parallel, per node, replicas
# -> samples per step, how many numbers of replicas are valid, samples per microbatch (None: not valid)
DEEPSPEED = [
    ((0.2, 22451, (16, 6), 1, 10000, True, 2, 8, 32), (20160, 36, 6)),
    ((0.1, 4294, (1,), 1, 10000, True, 1, 1, 8), (2520, 48, 1)),
    ((0.1, 4780, (24, 10, 16), 12, 86, True, 1, 1, 3), (4320, 14, None)),
    ((0.2, 1417, (24, 32, 5), 64, 10000, True, 1, 8, 1), (1416, None, 24)),
    ((0.1, 19384, (2, 16, 6), 24, 10000, True, 1, 1, 48), (15120, 48, None)),
    ((0.1, 44019, (24, 6, 16, 7), 1, 10000, True, 1, 1, 3), (40320, 84, 24)),
    ((0.2, 4339, (12, 5, 8), 1, 430, True, 4, 32, 24), (3840, 9, 8)),
    ((0.2, 21070, (16, 5, 7, 24), 1, 10000, True, 2, 16, 96), (20160, 38, 7)),
    ((0.2, 1764, (1, 1, 4), 1, 10000, False, 1, 8, 64), (1536, None, 1)),
    ((0.2, 994, (3,), 39, 10000, False, 2, 2, 32), (960, None, 3)),
    ((0.1, 1716, (16, 6, 1, 6), 1, 327, True, 1, 1, 2), (1680, 35, 6)),
    ((0.1, 71, (7, 4, 8, 16), 1, 353, True, 1, 1, 16), (48, 6, None)),
]
SECTION = {"enabled": True, "max_train_batch_size": 2000, "micro_batch_sizes": [2, 4, 6], "version": 0.1}


@pytest.mark.parametrize(("settings", "wanted"), DEEPSPEED)
def test_elastic_batch_sizes_equal_those_of_deepspeed(settings: Any, wanted: Any) -> None:
    version, largest, micros, least, most, larger, parallel, per_node, replicas = settings
    found = section(
        "elasticity",
        enabled=True,
        version=version,
        max_train_batch_size=largest,
        micro_batch_sizes=micros,
        min_gpus=least,
        max_gpus=most,
        prefer_larger_batch=larger,
        model_parallel_size=parallel,
        num_gpus_per_node=per_node,
    )
    batch, count, micro = wanted
    if count is not None:
        largest_fit, valid = chosen(found)
        assert (largest_fit, len(valid)) == (batch, count)
        assert (replicas in valid) == (micro is not None)
    if micro is not None:
        assert sizes(found, replicas) == (batch, micro)


def test_elastic_batch_sizes_fit_each_number_of_replicas() -> None:
    config = parse_config({"elasticity": SECTION})
    for replicas in (1, 8, 60):
        chosen_sizes = batch_sizes(config, replicas)
        assert chosen_sizes.train == chosen_sizes.micro * chosen_sizes.accumulation * replicas == 1680
        written = resolved(config, chosen_sizes)  # a configuration with the sizes that elasticity chose
        assert batch_sizes(parse_config(written), replicas) == chosen_sizes


def test_an_error_for_a_wrong_replica_count_names_those_that_fit() -> None:
    with pytest.raises(ConfigError, match=r"but 17 is not one of them: start 14, 15, 20, 21"):
        batch_sizes(parse_config({"elasticity": SECTION}), 17)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 0.3}, "version 0.3 is not one of 0.1 and 0.2"),
        ({"micro_batch_sizes": []}, "must have sizes of at least 1"),
        ({"max_gpus": 1, "min_gpus": 2}, "max_gpus 1 is less than min_gpus 2"),
        ({"model_parallel_size": 2, "num_gpus_per_node": 2}, "needs version 0.2"),
        ({"version": 0.2, "model_parallel_size": 2, "num_gpus_per_node": 3}, "does not divide num_gpus_per_node 3"),
        ({"max_train_batch_size": 5}, "has 6, but a step has at most 5"),
    ],
)
def test_invalid_elasticity_settings_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config({"elasticity": SECTION | changes})


def test_batch_sizes_outside_the_section_are_refused_or_ignored() -> None:
    with pytest.raises(ConfigError, match="train_batch_size and elasticity both give batch sizes"):
        parse_config({"train_batch_size": 8, "elasticity": SECTION})
    ignored = parse_config({"train_batch_size": 8, "elasticity": SECTION | {"ignore_non_elastic_batch_info": True}})
    assert batch_sizes(ignored, 8).train > 8
    assert batch_sizes(parse_config({"train_batch_size": 8, "elasticity": False}), 8).train == 8


def test_elasticity_prints_the_command_for_1_to_8_hosts() -> None:
    found = section("elasticity", enabled=True, micro_batch_sizes=(2, 4, 6), num_gpus_per_node=8, max_gpus=64)
    assert "triax run --nnodes 1:8 --nproc 8" in described(found)
