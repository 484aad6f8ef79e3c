"""Modules and names under DeepSpeed's names, ``install``, and the ledger that lists them."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest

import triax
import triax.compat.deepspeed as adapter
from triax.compat.deepspeed.ledger import VERSION


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """``install()`` has been called, in this test alone."""
    before = dict(sys.modules)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    adapter.install()
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "deepspeed" and name not in before]:
        del sys.modules[name]


def test_sub_modules_answer_under_both_names(installed: None) -> None:
    here = importlib.import_module("triax.compat.deepspeed.runtime.lr_schedules")
    assert importlib.import_module("deepspeed.runtime.lr_schedules") is here
    assert here.__spec__ is not None and here.__spec__.name == here.__name__
    assert here.WarmupLR is importlib.import_module("triax.optim.lr_schedules").WarmupLR
    # A file, and a second path to it.
    assert importlib.import_module("deepspeed.runtime.zero.partition_parameters") is adapter.zero
    assert importlib.import_module("deepspeed") is adapter
    assert adapter.PipelineModule is triax.PipelineModule


def test_libraries_find_deepspeed_and_its_version(installed: None) -> None:
    assert importlib.util.find_spec("deepspeed") is not None
    assert importlib.util.find_spec("deepspeed.pipe") is not None
    assert importlib.metadata.version("deepspeed") == adapter.__version__ == VERSION
    assert importlib.metadata.metadata("deepspeed")["Name"] == "deepspeed"
    assert importlib.metadata.packages_distributions()["deepspeed"] == ["deepspeed"]
    found = importlib.metadata.version("pytest")
    assert found == pytest.__version__
    adapter.install()  # a second call does nothing


def test_install_refuses_to_replace_deepspeed_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", ModuleType("deepspeed"))
    with pytest.raises(ImportError, match=r"after DeepSpeed itself was imported.*at the top of the script"):
        adapter.install()


def test_a_missing_name_raises_its_sentence(installed: None) -> None:
    with pytest.raises(AttributeError, match=r"deepspeed\.DeepSpeedHybridEngine: triax has no hybrid engine: train"):
        adapter.DeepSpeedHybridEngine  # type: ignore[attr-defined]  # noqa: B018
    for statement, told in (
        ("from deepspeed import DeepSpeedHybridEngine", "triax has no hybrid engine: train"),
        ("from deepspeed.inference.v2 import InferenceEngineV2", "triax has no FastGen: init_inference"),
        ("import deepspeed.autotuning.tuner", "triax plan compares layouts"),
        ("from deepspeed.zero import nonsense", "cannot import name 'nonsense'"),
        ("import deepspeed.nonsense", r"No module named 'deepspeed\.nonsense'"),
    ):
        with pytest.raises(ImportError, match=told):
            exec(statement)
    with pytest.raises(AttributeError, match=r"triax has no deepspeed\.zero\.nonsense, which is not among"):
        adapter.zero.nonsense  # noqa: B018
