"""Section ``elasticity``: a batch size that fits as many numbers of replicas as possible, as DeepSpeed computes it.

A batch of B samples in microbatches of m fits R replicas if R divides B / m. The candidates for B are each microbatch
size, and their least common multiple, times the largest highly composite number (one with more divisors than any
smaller number) for which B is within the limit. The candidate with the most valid numbers of replicas is chosen.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

from pydantic import Field, model_validator

from ....base.errors import ConfigError
from .base import SwitchSection, idle, setting

_LARGEST = 720_720  # DeepSpeed's largest highly composite number
_PRIMES = (2, 3, 5, 7, 11, 13, 17)  # their product alone is more than half of it


class ElasticityConfig(SwitchSection):
    """``elasticity``: the batch sizes are chosen for the number of replicas that there are: docs/launch.md."""

    enabled: bool = setting(False, "Choose the batch sizes.")
    max_train_batch_size: int = setting(2000, "Samples per step, at most.", ge=1)
    micro_batch_sizes: tuple[int, ...] = setting((2, 4, 6), "Samples per microbatch: the sizes to choose from.")
    min_gpus: int = setting(1, "Number of replicas, at least (version 0.2: of ranks).", ge=1)
    max_gpus: int = setting(10_000, "Number of replicas, at most (version 0.2: of ranks).", ge=1)
    prefer_larger_batch: bool = setting(True, "Choose the larger of two equally good batches.")
    ignore_non_elastic_batch_info: bool = setting(False, "Ignore the batch sizes outside this section.")
    version: float = Field(default=0.2, description="0.1: any number of ranks; 0.2: whole hosts.")
    model_parallel_size: int = setting(1, "version 0.2: ranks of one replica.", ge=1)
    num_gpus_per_node: int = setting(1, "version 0.2: ranks of one host.", ge=1)
    min_time: float | None = idle("a run grows as soon as a host joins")
    auto: bool | None = idle("batch sizes are chosen when the engine is made")

    @model_validator(mode="after")
    def _agrees(self) -> ElasticityConfig:
        if not self.enabled:
            return self
        if self.version not in (0.1, 0.2):
            raise ValueError(f"version {self.version:g} is not one of 0.1 and 0.2: write one of these")
        if not self.micro_batch_sizes or min(self.micro_batch_sizes) < 1:
            raise ValueError(
                f"micro_batch_sizes {list(self.micro_batch_sizes)} must have sizes of at least 1: write some"
            )
        if self.max_gpus < self.min_gpus:
            raise ValueError(f"max_gpus {self.max_gpus} is less than min_gpus {self.min_gpus}: write them in order")
        if self.version == 0.1 and self.model_parallel_size > 1:
            raise ValueError(f"model_parallel_size {self.model_parallel_size} needs version 0.2: write that version")
        if self.num_gpus_per_node % self.model_parallel_size:
            raise ValueError(
                f"model_parallel_size {self.model_parallel_size} does not divide num_gpus_per_node "
                f"{self.num_gpus_per_node}: a replica must lie on one host"
            )
        if max(self.micro_batch_sizes) > self._limit:
            raise ValueError(
                f"micro_batch_sizes has {max(self.micro_batch_sizes)}, but a step has at most {self._limit} samples "
                "for one replica of each host: write smaller sizes, or a larger max_train_batch_size"
            )
        return self

    @property
    def _per_host(self) -> int:
        """Replicas of one host, which come and go together; 1 in version 0.1."""
        return self.num_gpus_per_node // self.model_parallel_size if self.version == 0.2 else 1

    @property
    def _limit(self) -> int:
        return self.max_train_batch_size // self._per_host

    def chosen(self) -> tuple[int, list[int]]:
        """Return the batch size that fits most numbers of replicas, and these numbers, ascending."""
        ranks = self.num_gpus_per_node if self.version == 0.2 else 1
        least, most = self.min_gpus // ranks or 1, self.max_gpus // ranks or self._limit // min(self.micro_batch_sizes)
        bases = {*self.micro_batch_sizes, math.lcm(*self.micro_batch_sizes)}
        candidates = {base * _highly_composite(self._limit // base) for base in bases if base <= self._limit}
        found = {batch: valid_replicas(batch, self.micro_batch_sizes, least, most) for batch in candidates}
        sign = 1 if self.prefer_larger_batch else -1
        batch = max(found, key=lambda each: (len(found[each]), sign * each))
        return batch * self._per_host, [count * self._per_host for count in found[batch]]

    def sizes(self, replicas: int) -> tuple[int, int]:
        """Return the samples per step and per microbatch for a number of replicas.

        Raises:
            ConfigError: no batch size fits this number; the message has the numbers that fit.
        """
        batch, valid = self.chosen()
        micros = sorted(set(self.micro_batch_sizes), reverse=True)
        if self.version == 0.2:
            micros = micros if self.prefer_larger_batch else list(self.micro_batch_sizes)
            if replicas not in valid:  # the largest batch for this number alone
                fits = [self.max_train_batch_size // (micro * replicas) * micro * replicas for micro in micros]
                batch = max(fits) if self.prefer_larger_batch else min(fits)
        micro = next((each for each in micros if batch and batch // replicas % each == 0), None)
        if micro is None or (self.version == 0.1 and replicas not in valid):
            near = ", ".join(map(str, sorted(sorted(valid, key=lambda each: abs(each - replicas))[:4]))) or "none"
            raise ConfigError(
                f"elasticity chose train_batch_size {batch} for {len(valid)} numbers of replicas, but {replicas} is "
                f"not one of them: start {near}, or change the section's batch sizes and limits"
            )
        return batch, micro

    def describe(self) -> str:
        """Return the batch size, the valid numbers of replicas, and the command that lets hosts join and leave."""
        batch, valid = self.chosen()
        ranks = self.num_gpus_per_node if self.version == 0.2 else 1
        hosts = [count // self._per_host for count in valid] or [1]
        listed = ", ".join(map(str, valid[:8])) + (f", ... {valid[-1]}" if len(valid) > 8 else "")
        return (
            f"elasticity: train_batch_size {batch} on {listed} replicas: triax run --nnodes {hosts[0]}:{hosts[-1]} "
            f"--nproc {ranks} --max-restarts {len(hosts)} SCRIPT"
        )


def valid_replicas(batch: int, micros: Sequence[int], least: int, most: int) -> list[int]:
    """Return the numbers of replicas, ascending, over which a batch can be shared in microbatches of these sizes."""
    wholes = [batch // micro for micro in micros if batch % micro == 0]
    return sorted({each for whole in wholes for each in _divisors(whole) if least <= each <= most})


def _divisors(number: int) -> set[int]:
    small = {each for each in range(1, math.isqrt(number) + 1) if number % each == 0}
    return small | {number // each for each in small}


def _highly_composite(limit: int) -> int:
    """Return the largest highly composite number that is at most ``limit``, of those that DeepSpeed uses."""
    return max(each for each in _highly_composites() if each <= limit)


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
    found, most = [], 0
    for number in sorted(divisors):
        if divisors[number] > most:
            most = divisors[number]
            found.append(number)
    return tuple(found)
