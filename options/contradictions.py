"""Checks of options of several sections, which are each valid alone and contradict one another."""

from __future__ import annotations

from ..base.option_error import OptionError, refusal
from .sections import EngineSections


def check_agreement(options: EngineSections) -> None:
    """Check that the sections of an engine's options agree.

    Checks that need a grid, a model, or the classes of optimizers are in ``engine/``.

    Raises:
        OptionError: two options contradict each other; the message names them and says which to change.
    """
    _check_tuning(options)
    _check_narrow_sums(options)
    _check_local_updates(options)
    _check_fault_tolerance(options)
    _check_compression(options)
    _check_zero(options)
    _check_lora(options)


def _refuse(reason: str) -> None:
    raise refusal(reason)


def _check_tuning(options: EngineSections) -> None:
    if not options.tunes_microbatch and options.tuning is None:
        return
    what = "<tuning>" if options.tuning is not None else '<batch.microbatch> "auto"'
    if options.local_updates is not None:
        _refuse(
            f"{what} measures steps that all replicas take together, and under <local_updates> they take none: write "
            "<batch.microbatch> as a number, and leave <tuning> out"
        )
    if options.recompute.contiguous:
        _refuse(
            f"{what} tries several numbers of microbatches, but the buffer of <recompute.contiguous> is made for one: "
            "write <batch.microbatch> as a number, or set <recompute.contiguous> to false"
        )
    if options.tuning is not None and options.batch.size is None:
        _refuse(
            "<tuning> is given without a batch to tune for: write <batch.size>, the samples of a step over all replicas"
        )


def _check_narrow_sums(options: EngineSections) -> None:
    if options.reduction.low_precision_modules and options.precision.autocast is None:
        _refuse(
            "<reduction.low_precision_modules> names modules whose gradients are summed in autocast's dtype, and "
            "<precision.autocast> is not given: give it, or leave the names out"
        )


def _check_fault_tolerance(options: EngineSections) -> None:
    if options.fault_tolerance is None:
        return
    local, both = options.local_updates, "<fault_tolerance> and <local_updates> are both given"
    if local is not None and local.TYPE == "async_diloco":
        _refuse(f"{both}, but replicas of async_diloco never meet, and so cannot agree on who is there: take diloco")
    if local is not None and (local.start_step or local.average_optimizer):
        _refuse(
            f"{both}, but then no step sums gradients, and a newcomer gets the optimizer state of one replica: leave "
            "<local_updates.start_step> and <local_updates.average_optimizer> out"
        )
    if local is not None and options.fault_tolerance.active is not None:
        _refuse(f"{both}, but a spare replica would have weights of its own: leave <fault_tolerance.active> out")
    if local is not None and options.fault_tolerance.zero:
        _refuse(f"{both}, but replicas step alone within a round: leave <fault_tolerance.zero> out")
    if options.tuning is not None or options.tunes_microbatch:
        _refuse("<fault_tolerance> needs <batch.microbatch> as a number: write it, and leave <tuning> out")
    if options.reduction.op != "mean":
        _refuse("<reduction.op> sum does not work with <fault_tolerance>, whose replicas change: leave it out")


def _check_local_updates(options: EngineSections) -> None:
    section, zero, reduction = options.local_updates, options.zero, options.reduction
    if section is None:
        return
    if zero.stage not in (0, "auto") and options.fault_tolerance is None:
        _refuse(
            f"<zero.stage> is {zero.stage}, but <local_updates> needs stage 0, because each replica then has its own "
            "weights, and ZeRO shards one state over all replicas: set the stage to 0"
        )
    if zero.offload_optimizer.device != "none":
        _refuse(
            f"<local_updates> and <zero.offload_optimizer> (to {zero.offload_optimizer.device}) are both given, but "
            "<local_updates> keeps its weights and differences on the device: leave one of them out"
        )
    if reduction.op != "mean":
        _refuse(
            "<reduction.op> sum is for gradients that are summed over replicas, but with <local_updates> the weights "
            "of the replicas are averaged: leave it out"
        )
    scaled = reduction.prescale or reduction.predivide != 1.0
    if scaled or reduction.low_precision_modules:
        names = "<reduction.prescale> and <reduction.predivide> are"
        _refuse(
            f"{names if scaled else '<reduction.low_precision_modules> is'} for gradients that are summed over "
            "replicas, but with <local_updates> no gradients are summed from <local_updates.start_step> on: leave them "
            "out. (<reduction.dtype> sets the dtype in which differences are sent.)"
        )
    if section.TYPE == "async_diloco" and options.checkpoint.every is not None:
        _refuse(
            f"<checkpoint.every> is {options.checkpoint.every}, but with async_diloco in <local_updates> fast replicas "
            "would wait for slow ones, because a checkpoint holds all replicas at one step: leave <checkpoint.every> "
            "out, and call save_checkpoint on all replicas after the same number of steps"
        )


def _check_compression(options: EngineSections) -> None:
    """Check ``compression`` against the dtype of the sum and ZeRO's stage."""
    compressor, reduction = options.compressor, options.reduction
    if compressor is None:
        return
    if reduction.low_precision_modules:
        _refuse("<compression> and <reduction.low_precision_modules> both set how gradients are sent: give one of them")
    if compressor == "sparse_rows":
        if reduction.dtype == "fp16":
            raise fp16_of_means(compressor)
    elif reduction.dtype is not None:
        narrow = " (values sets the dtype in which elements are sent)" if compressor == "topk" else ""
        _refuse(
            f"<reduction.dtype> is the dtype of a plain sum, and <compression> {compressor} sends something else: "
            f"leave it out{narrow}"
        )
    if options.zero.stage in (2, 3):
        _refuse(
            f"<compression> {compressor} needs a replica's whole gradient of a step, and stage {options.zero.stage} of "
            "ZeRO reduces gradients after each backward pass and keeps a shard: set stage 1, or <reduction.dtype> to "
            "bf16"
        )


def fp16_of_means(method: str) -> OptionError:
    """Return the error for fp16 communication with a method that sends gradients without a loss scale."""
    return refusal(
        f"{method} sums gradients that are means already, without a loss scale, and they are too small for "
        "fp16: set <reduction.dtype> to bf16, or leave it out",
    )


def _check_zero(options: EngineSections) -> None:
    zero, reduction = options.zero, options.reduction
    if zero.quantized_gradients and zero.stage and (reduction.dtype or reduction.low_precision_modules):
        _refuse(
            "<zero.quantized_gradients> sends gradients in 4 bits, and <reduction.dtype> (or "
            "<reduction.low_precision_modules>) in another dtype: give one of them"
        )
    if options.checkpoint.background and "nvme" in (zero.offload_optimizer.device, zero.offload_parameters.device):
        _refuse(
            "<checkpoint.background> and offload to nvme are both given, but <checkpoint.background> copies what it "
            "writes into host memory, and offload to nvme keeps it on disk to save that memory: leave one of them out"
        )


def _check_lora(options: EngineSections) -> None:
    base = None if options.lora is None else options.lora.base
    if base is not None and options.compile is not None:
        _refuse(
            f"<lora.base> is {base}, whose weights are computed where an operation reads them, which torch.compile "
            "cannot trace: leave <compile> or <lora.base> out"
        )
