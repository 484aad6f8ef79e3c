"""``triax generate``: from a folder to text on the terminal; and the tokens of transformers' own ``generate``."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import triax
from triax.base.errors import ConfigError
from triax.cli.model_folder import family, find_model
from triax.cli.model_text import open_text
from triax.grid import Grid
from triax.models.gpt import GPTConfig, gpt_layers
from triax.models.huggingface.load import load_hf
from triax.models.huggingface.save import save_hf

from support.command_line import run_main
from support.paths import ROOT
from support.processes import program

BIN = Path(sys.executable).parent
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", {"n_positions": 32, "n_embd": 24, "n_layer": 2, "n_head": 4}),
    "llama": (
        "LlamaForCausalLM",
        {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4}
        | {"num_key_value_heads": 2, "max_position_embeddings": 32},
    ),
}
PROMPTS = [[5, 6, 7], [1], [9, 8, 7, 6, 5, 4, 3], [2, 2]]


# --------------------------------------------------------------------------------------------------- transformers


def transformer(name: str) -> Any:
    """A random model whose tokens vary."""
    import transformers

    cls, options = FAMILIES[name]
    config = getattr(transformers, cls).config_class(vocab_size=53, bos_token_id=0, eos_token_id=1, **options)
    torch.manual_seed(4)
    theirs = getattr(transformers, cls)(config).double().eval()
    for parameter in theirs.parameters():
        parameter.data *= 5
    return theirs


def ours(folder: str, sizes: tuple[int, int, int], eos: int | None) -> list[list[int]]:
    grid = Grid(*sizes)
    engine = triax.init_inference(triax.PipelineModule(load_hf(folder), grid=grid), max_batch=3)
    return engine.generate(PROMPTS, 14, temperature=0, eos=eos)


@pytest.mark.parametrize(("name", "sizes"), [("gpt2", (2, 1, 1)), ("llama", (1, 1, 4))])
def test_greedy_tokens_equal_those_of_transformers(ranks: Any, tmp_path: Path, name: str, sizes: Any) -> None:
    theirs = transformer(name)
    wanted = []
    for prompt in PROMPTS:
        with torch.no_grad():
            ids = torch.tensor([prompt])
            mask = torch.ones_like(ids)
            made = theirs.generate(ids, attention_mask=mask, max_new_tokens=14, do_sample=False, pad_token_id=0)
        wanted.append(made[0].tolist())
    assert len({tuple(sequence[-5:]) for sequence in wanted}) > 1
    theirs.save_pretrained(tmp_path)
    for result in [ours(str(tmp_path), (1, 1, 1), 1), *ranks(sizes[0] * sizes[2], ours, str(tmp_path), sizes, 1)]:
        assert result == wanted


def test_top_k_and_top_p_keep_the_tokens_that_transformers_keeps() -> None:
    from transformers import TopKLogitsWarper, TopPLogitsWarper

    from triax.inference.sampling import Sampling, Vocabulary, keep

    whole = Vocabulary(40, None, 40)
    logits = torch.randn(50, 40, generator=torch.Generator().manual_seed(8), dtype=torch.float64) * 2
    for k in (1, 5, 39, 40):
        kept = keep(logits, Sampling(top_k=k), whole)
        assert torch.equal(kept, TopKLogitsWarper(k)(torch.zeros(1, 1), logits))
    for p in (0.05, 0.3, 0.9, 0.999):
        kept = keep(logits, Sampling(top_p=p), whole)
        assert torch.equal(kept, TopPLogitsWarper(p)(torch.zeros(1, 1), logits))


# ----------------------------------------------------------------------------------------------------- the command


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run as the example leaves it: a model of bytes, in model/."""
    run = tmp_path_factory.mktemp("run")
    module = triax.PipelineModule(
        gpt_layers(
            GPTConfig(
                vocab_size=256, max_position_embeddings=48, hidden_size=16, num_hidden_layers=2, num_attention_heads=2
            )
        )
    )
    for parameter in module.parameters():
        parameter.data *= 4
    save_hf(module, run / "model")
    return run


def command(*words: object, launcher: list[str] | None = None) -> subprocess.CompletedProcess[str]:
    line = [*(launcher or []), str(BIN / "triax"), "generate", *map(str, words)]
    return subprocess.run(line, capture_output=True, text=True, timeout=120, check=False)


def options_of(folder: Path) -> list[object]:
    return [folder, "--prompt", "dé", "--max-new-tokens", 20, "--temperature", 0.8, "--seed", 3, "--top-k", 30]


def the_text(folder: Path) -> str:
    module = triax.PipelineModule(load_hf(folder / "model"))
    prompt = list("dé".encode())
    (wanted,) = triax.init_inference(module).generate([prompt], 20, temperature=0.8, top_k=30, seed=3)
    return bytes(wanted).decode(errors="replace") + "\n"


def test_triax_generate_prints_one_text_on_every_grid(ranks: Any, folder: Path) -> None:
    """Alone, as the command that starts two stages, and under torchrun's environment on two tensor ranks."""
    options, wanted = options_of(folder), the_text(folder)
    code, out, err = run_main("generate", *options)
    assert (code, out) == (0, wanted) and err.startswith("20 tokens in ")
    started = command(*options, "--pipe", 2)
    assert (started.returncode, started.stdout) == (0, wanted), started.stderr
    for rank, (code, out, _) in enumerate(ranks(2, run_main, "generate", *options, init_group=False)):
        assert (code, out) == (0, "" if rank else wanted)


@pytest.mark.exhaustive
def test_triax_generate_prints_that_text_under_torchrun(folder: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--no-python"]
    for launcher in (None, torchrun):
        under = command(*options_of(folder), launcher=launcher)
        assert (under.returncode, under.stdout) == (0, the_text(folder)), under.stderr


def test_triax_generate_errors_are_one_line(folder: Path) -> None:
    """One error is found by this process, the other by the ranks that it starts."""
    code, out, err = run_main("generate", "nowhere", "--prompt", "x")
    assert (code, out) == (2, "") and err.count("\n") == 1
    assert "nowhere does not exist. Give a folder as transformers saves it, or a run of" in err
    done = command(folder, "--prompt", "x", "--tensor", 3)
    assert done.returncode == 2 and done.stdout == ""
    assert "num_attention_heads is 2, but tensor=3 needs at least 3" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--max-new-tokens", 48), "pass max_new_tokens=47 at most"),
        (("--prompt", "x" * 48), "prompt 0 has 48 tokens and gets 1 new ones, which makes 49, but max_length is 48"),
        (("--dtype", "int8"), "--dtype is int8, but it must be float32, float64, bfloat16 or float16"),
        (("--temperature", -1), "temperature is -1.0. Give 0"),
    ],
)
def test_triax_generate_refuses_wrong_options(folder: Path, options: tuple[object, ...], message: str) -> None:
    code, out, err = run_main("generate", folder, *(() if "--prompt" in options else ("--prompt", "x")), *options)
    assert (code, out) == (2, "") and message in err and err.count("\n") == 1
    assert (
        "--prompt is empty, but the model needs a text to continue" in run_main("generate", folder, "--prompt", "")[2]
    )


def test_folders_of_unknown_model_types_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba", "vocab_size": 300}))
    assert find_model(tmp_path) == tmp_path
    with pytest.raises(
        ConfigError, match=r"model_type 'mamba', but the installed ones are .*gpt2, .*llama, .*qwen2, .*qwen3"
    ):
        family(tmp_path)
    with pytest.raises(ValueError, match=r"no tokenizer.json, and its vocabulary has 300 entries"):
        open_text(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config.json is damaged: it is not JSON in line"):
        family(tmp_path)
    with pytest.raises(ConfigError, match=r"has neither config.json nor model/config.json"):
        find_model(tmp_path.parent)


def test_bytes_are_decoded_in_whole_characters(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 256, "eos_token_id": [0, 3]}))
    text = open_text(tmp_path)
    assert text.ends == [0, 3] and text.encode("é") == [195, 169]
    assert [text.follow(byte) for byte in (97, 195, 169, 255, 195)] == ["a", "", "é", "\N{REPLACEMENT CHARACTER}", ""]
    assert text.rest() == "\N{REPLACEMENT CHARACTER}"  # a character that never became whole


def test_triax_generate_uses_the_tokenizer_of_the_folder(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 256, "eos_token_id": None}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 7}))
    text = open_text(tmp_path)
    ids = text.encode("dé ")
    assert len(ids) == 4 and text.ends == [7]
    more = text.encode("né é!")
    text.encode("dé ")
    assert "".join(text.follow(token) for token in more) + text.rest() == "né é!"
    assert text.follow(more[1]) == ""  # half of é


# ------------------------------------------------------------------------------------ docs/generation.md, benchmark


def test_the_programs_of_the_generation_page_run(ranks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every ```python block of docs/generation.md, one behind the other, as a user would go on."""
    text = (ROOT / "docs" / "generation.md").read_text()
    source = "\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL))
    (tmp_path / "program.py").write_text(source)
    ranks(1, program, ["program.py"], str(tmp_path))
    monkeypatch.setenv("COLUMNS", "200")  # narrow tables cut long names
    _, known, _ = run_main("generate", "--help")
    for command_line in re.findall(r"^triax generate (.*)$", text, re.MULTILINE):
        assert all(word in known for word in command_line.split() if word.startswith("--")), command_line


@pytest.mark.exhaustive
def test_the_generation_benchmark_compares_with_transformers() -> None:
    line = [sys.executable, str(ROOT / "benchmarks" / "generation.py"), "--preset", "bytes-tiny", "--json"]
    done = subprocess.run(
        [*line, "--batches", "2", "--rounds", "1", "--only", "triax", "transformers", "without a cache"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr  # the greedy tokens were the same, or it would have failed
    rows = json.loads(done.stdout)["rows"]
    assert {row["name"] for row in rows} == {"triax", "without a cache", "transformers"}
    assert all(row["tokens_per_second"] > 0 for row in rows)
