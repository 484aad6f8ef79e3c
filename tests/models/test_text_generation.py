"""Exported models under transformers.pipeline("text-generation", folder), with tokenizer and generation settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import triax
from triax.data.byte_tokenizer import ByteTokenizer
from triax.models.huggingface.config import from_hf
from triax.models.huggingface.folder_settings import settings_with_end

from laws.proved import settings
from support.command_line import output_of
from support.toy_families import DENSE, HYBRIDS, MIXTURES

# Those with a model in transformers: kimi_k2 has none, and deepseek_v32 is read in its dense form.
FAMILIES = sorted({family for family, _ in (DENSE | HYBRIDS).values()} | {case.split("-")[0] for case in MIXTURES})
PROMPT, WORDS = "of the", 12


def export(family: str, folder: Path) -> None:
    """Write a random model of bytes as ``triax train`` exports one.

    Weights of its blocks are large, so that with a tied output layer a token is not followed by itself.
    """
    config = from_hf(settings(family) | {"vocab_size": 256}, Path(f"{family}/config.json"))
    module: Any = triax.PipelineModule(config.layers(), seed=3)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.mul_(1 if name.startswith("layers.0.") or parameter.dim() < 2 else 16)
    module.folder_settings = settings_with_end(0)
    triax.save_hf(module, folder, tokenizer=ByteTokenizer())


@pytest.mark.parametrize(
    "family", [each if each == "qwen3" else pytest.param(each, marks=pytest.mark.exhaustive) for each in FAMILIES]
)
def test_transformers_pipeline_generates_as_triax_generate(family: str, tmp_path: Path) -> None:
    import transformers

    export(family, tmp_path)
    assert json.loads((tmp_path / "generation_config.json").read_text())["eos_token_id"] == 0
    ours = output_of("generate", tmp_path, "--prompt", PROMPT, "--max-new-tokens", WORDS, "--temperature", 0)
    pipeline = transformers.pipeline("text-generation", str(tmp_path), device="cpu")
    # With its cache, nemotron_h of transformers 5.23 raises no time step to time_step_min, as it does without one.
    (theirs,) = pipeline(PROMPT, max_new_tokens=WORDS, do_sample=False, use_cache=family != "nemotron_h")
    assert len(theirs["generated_text"]) > len(PROMPT)
    assert theirs["generated_text"].strip() == ours.strip()
