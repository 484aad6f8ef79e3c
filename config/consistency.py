"""Checks between sections of the configuration: keys that are each valid alone, and contradict one another."""

from __future__ import annotations

from ..grid.errors import ConfigError
from .schema import Config


def check_consistency(config: Config) -> None:
    """Check that the sections of a configuration agree.

    Checks that need the names of optimizers and schedules are in ``engine/setup/check.py``.

    Raises:
        ConfigError: two keys contradict each other; the message names them and says which to change.
    """
    _check_batch_sizes(config)
    _check_autotuning(config)
    _check_precision(config)
    _check_local_updates(config)
    _check_compression(config)
    _check_zero(config)
    interval, other = config.activation_checkpointing.interval, config.pipeline.activation_checkpoint_interval
    if other and interval not in (None, other):
        raise ConfigError(
            f"pipeline.activation_checkpoint_interval {other} is another name of activation_checkpointing.interval "
            f"{interval}: give one of them"
        )


def allowed_stages(config: Config) -> list[int]:
    """Return the ZeRO stages that the configuration's other keys allow."""
    found = []
    for stage in range(4):
        zero = config.zero_optimization.model_copy(update={"stage": stage})
        try:
            check_consistency(config.model_copy(update={"zero_optimization": zero}))
        except ConfigError:
            continue
        found.append(stage)
    return found


def _check_batch_sizes(config: Config) -> None:
    if config.elasticity.enabled:
        _check_elasticity(config)
        return
    train, given = config.train_batch_size, config.train_micro_batch_size_per_gpu
    steps, micro = config.gradient_accumulation_steps, None if given == "auto" else given
    parts = [(name, value) for name, value in (("micro batch", micro), ("accumulation steps", steps)) if value]
    product = (micro or 1) * (steps or 1)
    if train and train % product:
        factors = " * ".join(f"{name} {value}" for name, value in parts)
        raise ConfigError(
            f"train_batch_size {train} is no multiple of {factors}{f' = {product}' if len(parts) > 1 else ''}, "
            "for any number of replicas: change one of them (train_batch_size = "
            "train_micro_batch_size_per_gpu * gradient_accumulation_steps * replicas)"
        )


def _check_elasticity(config: Config) -> None:
    keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    given = [key for key in keys if getattr(config, key) not in (None, "auto")]
    if given and not config.elasticity.ignore_non_elastic_batch_info:
        raise ConfigError(
            f"{' and '.join(given)} and elasticity both give batch sizes: leave {'it' if len(given) == 1 else 'them'} "
            "out, or set elasticity.ignore_non_elastic_batch_info, or elasticity.enabled to false"
        )
    if config.local_updates is not None:
        raise ConfigError(
            "elasticity and local_updates cannot act together, because a change of the number of replicas changes the "
            "algorithm of local updates: leave one of them out"
        )


def _check_autotuning(config: Config) -> None:
    if not config.tunes_microbatch and not config.autotuning.enabled:
        return
    what = "autotuning" if config.autotuning.enabled else 'train_micro_batch_size_per_gpu "auto"'
    if config.local_updates is not None:
        raise ConfigError(
            f"{what} measures steps that all replicas take together, and under local_updates they take none: write "
            "train_micro_batch_size_per_gpu as a number, and leave autotuning out"
        )
    if config.recomputation.contiguous_memory_optimization:
        raise ConfigError(
            f"{what} tries several numbers of microbatches, but the buffer of contiguous_memory_optimization is made "
            "for one: write train_micro_batch_size_per_gpu as a number, or set contiguous_memory_optimization to false"
        )
    if config.autotuning.enabled and config.train_batch_size is None:
        raise ConfigError(
            "autotuning is enabled, and the batch it tunes for is not given: write train_batch_size, the samples of a "
            "step over all replicas"
        )


def _check_precision(config: Config) -> None:
    enabled = [key for key in ("bf16", "fp16", "torch_autocast", "amp") if getattr(config, key).enabled]
    if enabled[:2] == ["bf16", "fp16"]:
        raise ConfigError("bf16.enabled and fp16.enabled are both true: a model computes in one of them")
    same = enabled == ["bf16", "torch_autocast"] and config.torch_autocast.dtype in ("bfloat16", "bf16")
    if len(enabled) > 1 and not same:  # bfloat16 weights under autocast: norms and softmaxes are computed in fp32
        raise ConfigError(
            f"{' and '.join(f'{key}.enabled' for key in enabled)} are both true, but only one can act, because "
            "bf16 and fp16 store the weights in that dtype, and torch_autocast and amp keep fp32 weights and cast in "
            "the forward pass: enable one of them"
        )
    if config.communication_data_type and config.torch_autocast.lower_precision_safe_modules:
        raise ConfigError(
            "communication_data_type and torch_autocast.lower_precision_safe_modules both set the dtype in which "
            "gradients are summed over replicas: give one of them"
        )


def _check_local_updates(config: Config) -> None:
    section, zero = config.local_updates, config.zero_optimization
    if section is None:
        return
    if zero.stage:
        raise ConfigError(
            f"zero_optimization.stage is {zero.stage}, but local_updates needs stage 0, because each replica then has "
            "weights of its own, and ZeRO shards one state over all replicas: set the stage to 0"
        )
    if zero.offload_optimizer.device != "none":
        raise ConfigError(
            f"local_updates and offload_optimizer (to {zero.offload_optimizer.device}) are both given, but "
            "local_updates keeps its weights and differences on the device: leave one of them out"
        )
    if config.gradient_allreduce_op != "mean":
        raise ConfigError(
            "gradient_allreduce_op sum is for gradients that are summed over replicas, but with local_updates the "
            "weights of the replicas are averaged: leave it out"
        )
    scaled = config.prescale_gradients or config.gradient_predivide_factor != 1.0
    if scaled or config.torch_autocast.lower_precision_safe_modules:
        keys = "prescale_gradients and gradient_predivide_factor are"
        raise ConfigError(
            f"{keys if scaled else 'torch_autocast.lower_precision_safe_modules is'} for gradients that are summed "
            "over replicas, but with local_updates no gradients are summed from start_step on: leave them out. "
            "(communication_data_type sets the dtype in which differences are sent.)"
        )
    if section.type == "async_diloco" and config.checkpoint.every is not None:
        raise ConfigError(
            f"checkpoint.every is {config.checkpoint.every}, but with local_updates.type async_diloco fast replicas "
            "would wait for slow ones, because a checkpoint holds all replicas at one step: leave checkpoint.every "
            "out, and call save_checkpoint on all replicas after the same number of steps"
        )


def _check_compression(config: Config) -> None:
    """Check ``gradient_compression`` and ``sparse_gradients`` against the dtype of communication and ZeRO's stage."""
    kind, dtype = config.gradient_compression.type, config.communication_data_type
    if kind in ("fp16", "bf16") and dtype not in (None, kind):
        raise ConfigError(
            f"gradient_compression.type {kind} and communication_data_type {dtype} both set the dtype of the sum: give "
            "one of them"
        )
    if kind != "none" and config.torch_autocast.lower_precision_safe_modules:
        raise ConfigError(
            "gradient_compression and torch_autocast.lower_precision_safe_modules both set how gradients are sent: "
            "give one of them"
        )
    compressor = config.compressor
    if compressor is None:
        return
    if kind in ("topk", "powersgd"):
        if config.sparse_gradients:
            raise ConfigError(
                f"gradient_compression.type {kind} and sparse_gradients both set what is sent of an embedding's "
                "gradient: give one of them"
            )
        if dtype is not None:
            raise ConfigError(
                f"communication_data_type is the dtype of a plain sum, and {compressor} sends something else: leave "
                "it out" + (" (values sets the dtype in which elements are sent)" if kind == "topk" else "")
            )
    elif "fp16" in (kind, dtype):
        raise ConfigError(fp16_of_means(config, compressor))
    if config.zero_optimization.stage > 1:
        raise ConfigError(
            f"{compressor} needs a replica's whole gradient of a step, and stage {config.zero_optimization.stage} of "
            "ZeRO reduces gradients after each backward pass and keeps a shard: set stage 1, or "
            'gradient_compression.type to "bf16"'
        )


def fp16_of_means(config: Config, method: str) -> str:
    """Return the error message for fp16 communication with a method that sends gradients without a loss scale.

    Args:
        config: the configuration, which asks for fp16 in one of two keys.
        method: name of the method, such as a compressor or a 1-bit optimizer.
    """
    key = "gradient_compression.type" if config.gradient_compression.type == "fp16" else "communication_data_type"
    return (
        f"{method} sums gradients that are means already, without a loss scale, and they are too small for fp16: set "
        f'{key} to "bf16", or leave it out'
    )


def _check_zero(config: Config) -> None:
    zero = config.zero_optimization
    narrow = config.communication_data_type or config.torch_autocast.lower_precision_safe_modules
    if zero.zero_quantized_gradients and zero.stage and narrow:
        raise ConfigError(
            "zero_optimization.zero_quantized_gradients sends gradients in 4 bits, and communication_data_type (or "
            "torch_autocast.lower_precision_safe_modules) in another dtype: give one of them"
        )
    if config.checkpoint.async_ and "nvme" in (zero.offload_optimizer.device, zero.offload_param.device):
        raise ConfigError(
            "checkpoint.async and offload to nvme are both given, but checkpoint.async copies what it writes into host "
            "memory, and offload to nvme keeps it on disk to save that memory: leave one of them out"
        )
