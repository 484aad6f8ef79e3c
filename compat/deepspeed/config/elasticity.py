"""Section ``elasticity``: a batch size that fits as many numbers of replicas as possible, as DeepSpeed computes it.

A batch of B samples in microbatches of m fits R replicas if R divides B / m. The candidates for B are each microbatch
size, and their least common multiple, times the largest highly composite number (one with more divisors than any
smaller number) for which B is within the limit. The candidate with the most valid numbers of replicas is chosen.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

from ....base.errors import ConfigError

_LARGEST = 720_720  # DeepSpeed's largest highly composite number
_PRIMES = (2, 3, 5, 7, 11, 13, 17)  # their product alone is more than half of it


def check(section: Any) -> None:
    """Check the values of an enabled section against one another."""
    if not section.enabled:
        return
    micros = section.micro_batch_sizes
    if section.version not in (0.1, 0.2):
        raise ValueError(f"version {section.version:g} is not one of 0.1 and 0.2: write one of these")
    if not micros or min(micros) < 1:
        raise ValueError(f"micro_batch_sizes {list(micros)} must have sizes of at least 1: write some")
    if section.max_gpus < section.min_gpus:
        raise ValueError(f"max_gpus {section.max_gpus} is less than min_gpus {section.min_gpus}: write them in order")
    if section.version == 0.1 and section.model_parallel_size > 1:
        raise ValueError(f"model_parallel_size {section.model_parallel_size} needs version 0.2: write that version")
    if section.num_gpus_per_node % section.model_parallel_size:
        raise ValueError(
            f"model_parallel_size {section.model_parallel_size} does not divide num_gpus_per_node "
            f"{section.num_gpus_per_node}: a replica must lie on one host"
        )
    if max(micros) > _limit(section):
        raise ValueError(
            f"micro_batch_sizes has {max(micros)}, but a step has at most {_limit(section)} samples for one replica "
            "of each host: write smaller sizes, or a larger max_train_batch_size"
        )


def chosen(section: Any) -> tuple[int, list[int]]:
    """Return the batch size that fits most numbers of replicas, and these numbers, ascending."""
    limit, micros = _limit(section), section.micro_batch_sizes
    ranks, per_host = _ranks(section), _per_host(section)
    least, most = section.min_gpus // ranks or 1, section.max_gpus // ranks or limit // min(micros)
    bases = {*micros, math.lcm(*micros)}
    candidates = {base * _highly_composite(limit // base) for base in bases if base <= limit}
    replicas_of = {batch: valid_replicas(batch, micros, least, most) for batch in candidates}
    sign = 1 if section.prefer_larger_batch else -1
    batch = max(replicas_of, key=lambda batch: (len(replicas_of[batch]), sign * batch))
    return batch * per_host, [count * per_host for count in replicas_of[batch]]


def sizes(section: Any, replicas: int) -> tuple[int, int]:
    """Return the samples per step and per microbatch for a number of replicas.

    Raises:
        ConfigError: no batch size fits this number; the message has the numbers that fit.
    """
    batch, valid = chosen(section)
    micros = sorted(set(section.micro_batch_sizes), reverse=True)
    if section.version == 0.2:
        micros = micros if section.prefer_larger_batch else list(section.micro_batch_sizes)
        if replicas not in valid:  # the largest batch for this number alone
            fits = [section.max_train_batch_size // (micro * replicas) * micro * replicas for micro in micros]
            batch = max(fits) if section.prefer_larger_batch else min(fits)
    micro = next((candidate for candidate in micros if batch and batch // replicas % candidate == 0), None)
    if micro is None or (section.version == 0.1 and replicas not in valid):
        near = ", ".join(map(str, sorted(sorted(valid, key=lambda count: abs(count - replicas))[:4]))) or "none"
        raise ConfigError(
            f"elasticity chose train_batch_size {batch} for {len(valid)} numbers of replicas, but {replicas} is "
            f"not one of them: start {near}, or change the section's batch sizes and limits"
        )
    return batch, micro


def described(section: Any) -> str:
    """Return the batch size, the valid numbers of replicas, and the command that lets hosts join and leave."""
    batch, valid = chosen(section)
    hosts = [count // _per_host(section) for count in valid] or [1]
    listed = ", ".join(map(str, valid[:8])) + (f", ... {valid[-1]}" if len(valid) > 8 else "")
    return (
        f"elasticity: train_batch_size {batch} on {listed} replicas: triax run --nnodes {hosts[0]}:{hosts[-1]} "
        f"--nproc {_ranks(section)} --max-restarts {len(hosts)} SCRIPT"
    )


def _ranks(section: Any) -> int:
    """Return the ranks that come and go together: those of a host; 1 in version 0.1."""
    return int(section.num_gpus_per_node) if section.version == 0.2 else 1


def _per_host(section: Any) -> int:
    """Return the replicas of one host, which come and go together; 1 in version 0.1."""
    return int(section.num_gpus_per_node // section.model_parallel_size) if section.version == 0.2 else 1


def _limit(section: Any) -> int:
    return int(section.max_train_batch_size) // _per_host(section)


def valid_replicas(batch: int, micros: Sequence[int], least: int, most: int) -> list[int]:
    """Return the numbers of replicas, ascending, over which a batch can be shared in microbatches of these sizes."""
    wholes = [batch // micro for micro in micros if batch % micro == 0]
    return sorted({divisor for number in wholes for divisor in _divisors(number) if least <= divisor <= most})


def _divisors(number: int) -> set[int]:
    small = {divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0}
    return small | {number // divisor for divisor in small}


def _highly_composite(limit: int) -> int:
    """Return the largest highly composite number that is at most ``limit``, of those that DeepSpeed uses."""
    return max(number for number in _highly_composites() if number <= limit)


@cache
def _highly_composites() -> tuple[int, ...]:
    """Return the highly composite numbers: products of the first primes, whose exponents do not increase."""
    divisors = {1: 1}  # number -> its number of divisors

    def multiply(number: int, count: int, prime: int, most: int) -> None:
        for exponent in range(1, most + 1):
            number *= _PRIMES[prime]
            if number > _LARGEST:
                return
            divisors[number] = count * (exponent + 1)
            if prime + 1 < len(_PRIMES):
                multiply(number, divisors[number], prime + 1, exponent)

    multiply(1, 1, 0, 20)
    numbers, most = [], 0
    for number in sorted(divisors):
        if divisors[number] > most:
            most = divisors[number]
            numbers.append(number)
    return tuple(numbers)
