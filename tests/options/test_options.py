"""Options: every value is checked, and an error names the option as the user wrote it."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from triax.base.errors import ConfigError
from triax.base.option_error import OptionError
from triax.engine.keywords import EngineKeywords
from triax.options.base import Options, declared, hints_of, walk
from triax.options.batch import Batch
from triax.options.engine import EngineOptions
from triax.options.local_updates import AsyncDiLoCo, DiLoCo, LocalSGD
from triax.options.monitoring import Monitoring
from triax.options.named import Optimizer
from triax.options.precision import LossScale, Precision
from triax.options.schedule import ScheduleOptions
from triax.options.zero import Zero

OPTIONS = [*walk(EngineOptions)]


def test_each_option_has_a_meaning_of_one_line() -> None:
    assert len(OPTIONS) > 120
    for path, section, found in OPTIONS:
        assert section.__doc__ and found.metadata["doc"] and "\n" not in found.metadata["doc"], path


def test_each_option_refuses_values_of_other_types_and_out_of_limits() -> None:
    for path, section, found in OPTIONS:
        hint = hints_of(section)[found.name]
        if hint is not Any:
            with pytest.raises(OptionError) as caught:
                section(**required(section) | {found.name: object()})
            assert found.name in str(caught.value), path
        for kind, limit in found.metadata["limits"].items():
            wrong = limit if kind in ("above", "below") else limit - 1 if kind == "least" else 2 * limit + 1
            value = (wrong,) * 3 if str(hint).startswith("tuple") else wrong
            with pytest.raises(OptionError, match=found.name):
                section(**required(section) | {found.name: value})
    with pytest.raises(OptionError, match=r"clip = 1e\+39: give a number of 3.4e\+38 or less"):
        EngineOptions(clip=1e39)


def required(section: type[Options]) -> dict[str, Any]:
    return {"type": "x"} if "arguments" in {each.name for each in declared(section)} else {}


def test_options_take_short_forms_lists_and_switches() -> None:
    given: dict[str, Any] = {
        "batch": 8, "zero": 2, "precision": "bf16", "schedule": "zb-v", "recompute": "full", "compile": True, "lora": 4,
        "monitor": {"histograms": 5}, "checkpoint": {"folder": "x", "every": 3},
    }  # fmt: skip
    made = EngineOptions(**given)
    assert made.batch == Batch(size=8) and made.zero == Zero(stage=2) and made.precision == Precision(weights="bf16")
    assert made.schedule == ScheduleOptions(name="zb-v") and made.recompute.granularity == "full"
    assert made.compile is not None and made.lora is not None and made.lora.rank == 4
    assert made.monitor.histograms.due(10) and not made.monitor.histograms.due(11)
    assert made.changed(compile=False).compile is None
    assert Zero.of({"offload_optimizer": "cpu"}).offload_optimizer.device == "cpu"
    assert ScheduleOptions.of({"costs": [1, 2, 3]}).costs == (1, 2, 3)
    assert pickle.loads(pickle.dumps(made)) == made


def test_options_remember_which_values_were_given() -> None:
    made = EngineOptions.of({"batch": {"size": 8}, "optimizer": {"type": "SGD", "lr": 0.1}, "zero": 0, "clip": 1})
    assert made.given == {"batch", "optimizer", "zero", "clip"} and made.zero.given == set()
    plain = EngineOptions(batch=Batch(size=8), optimizer=Optimizer("SGD", lr=0.1), local_updates=DiLoCo(every=3)).plain(
        given=True
    )
    assert plain["optimizer"] == {"type": "SGD", "lr": 0.1} and plain["batch"] == {"size": 8}
    assert LocalSGD.of({"type": "diloco", "every": 3}) == DiLoCo(every=3)
    assert LocalSGD.of({"type": "async_diloco"}) == AsyncDiLoCo()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"zero": 4}, "zero.stage = 4: give 0 or 1 or 2 or 3"),
        ({"zero": {"stagee": 1}}, "zero: there is no 'stagee'; did you mean 'stage'?"),
        ({"zero": {"stage": 1, "overlap_comm": 1}}, "zero.overlap_comm = 1: give true or false"),
        ({"batch": {"size": 7, "microbatch": 2}}, "batch: size 7 is no multiple of microbatch 2"),
        ({"precision": {"weights": "fp16", "autocast": "bf16"}}, "precision: weights fp16 stores the weights"),
        ({"precision": {"loss_scale": {"fixed": 2.0, "minimum": 4.0}}}, "minimum 4 is above fixed 2"),
        ({"checkpoint": {"keep": 2, "folder": "x"}}, "checkpoint: keep is for automatic checkpoints: give every too"),
        ({"local_updates": {"type": "x"}}, "local_updates: type: there is no 'x'"),
        ({"local_updates": DiLoCo(every=2), "zero": 1}, "zero.stage is 1, but local_updates needs stage 0"),
        ({"local_updates": AsyncDiLoCo(every=2), "fault_tolerance": True}, "replicas of async_diloco never meet"),
        ({"local_updates": DiLoCo(start_step=2), "fault_tolerance": True}, "leave local_updates.start_step and"),
        ({"local_updates": DiLoCo(), "fault_tolerance": {"active": 2}}, "leave fault_tolerance.active out"),
        ({"reduction": {"dtype": "bf16"}, "zero": {"stage": 1, "quantized_gradients": True}}, "sends gradients in 4"),
        ({"monitor": {"communication": {"operations": ["all_gathr"]}}}, "did you mean 'all_gather'"),
        ({"schedule": {"costs": [1]}}, "schedule.costs = [1]: give the times of F (forward), I (input gradients)"),
        ({"lora": {"targets": []}}, "lora.targets = []: give the names of layers to adapt, or all-linear"),
    ],
)
def test_errors_name_the_option_and_what_to_write(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineOptions(**options)
    assert message in str(caught.value)


def test_several_option_errors_are_reported_together() -> None:
    with pytest.raises(OptionError) as caught:
        EngineOptions.of({"clip": -1, "zero": {"stage": 9, "bucket_size": 0}})
    text = str(caught.value)
    assert all(each in text for each in ("clip = -1", "zero.stage = 9", "zero.bucket_size = 0"))


def test_option_errors_use_the_names_of_the_caller() -> None:
    with pytest.raises(OptionError) as caught:
        EngineOptions.of({"zero": {"stage": 1, "quantized_gradients": True}, "reduction": {"dtype": "bf16"}})
    assert caught.value.spelled(str.upper).startswith("ZERO.QUANTIZED_GRADIENTS sends gradients in 4 bits")


@pytest.mark.parametrize(
    ("options", "note"),
    [
        ({"zero": {"stage": 1, "keep_gathered": True}}, "zero.keep_gathered acts in stage 3, not in stage 1"),
        ({"zero": {"stage": 2, "offload_parameters": "cpu"}}, "zero.offload_parameters does nothing in stage"),
        ({"zero": {"offload_optimizer": {"path": "x"}}}, "offload_optimizer.path does nothing without device nvme"),
        ({"monitor": {"trace": {"file": "x"}}}, "monitor.trace.file does nothing without step"),
        ({"monitor": Monitoring.of({"histograms": 2})}, "monitor.histograms does nothing without a monitor"),
        ({"checkpoint": {"folder": "x"}}, "checkpoint.folder does nothing without every or resume"),
        ({"tuning": {}, "batch": {"size": 8, "microbatch": 2}}, "tuning does nothing, because microbatches"),
    ],
)
def test_notes_say_which_options_have_no_effect(options: dict[str, Any], note: str) -> None:
    (found,) = EngineOptions(**options).notes()
    assert found.spelled().startswith(note) or note in found.spelled()


def test_the_first_loss_scale_is_2_to_its_power_or_the_fixed_one() -> None:
    assert LossScale().first == 2.0**16 and LossScale(fixed=128).first == 128.0
    assert Precision(autocast="fp16").scaled and not Precision(autocast="bf16").scaled


def test_the_keywords_of_an_engine_are_its_options() -> None:
    assert list(EngineKeywords.__annotations__) == [each.name for each in declared(EngineOptions)]
