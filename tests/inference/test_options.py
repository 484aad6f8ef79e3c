"""Options of generation, beside transformers' ``generate`` in float64, and on every grid."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import triax
from triax.grid import Grid
from triax.inference.engine import Completion, InferenceEngine, init_inference
from triax.inference.sampling import Sampling, Vocabulary, keep
from triax.inference.text import BYTES, ends_with
from triax.models.huggingface.load import load_hf
from triax.models.llama import LlamaConfig, llama_layers

from support.varied_llama import varied_llama

PROMPTS = [[5, 6, 7], [1], [9, 8, 7, 6, 5, 4, 3], [2, 2]]
NEW = 9
BEAMS: list[dict[str, Any]] = [
    {"num_beams": 3, "num_return_sequences": 2},
    {"num_beams": 4, "length_penalty": 2.0, "early_stopping": True, "eos": [*range(1, 53, 4)]},
    {"num_beams": 2, "length_penalty": -0.5, "early_stopping": "never", "eos": [5, 40, 17], "repetition_penalty": 1.3},
]


def engine(**options: Any) -> InferenceEngine:
    """triax's engine for the same model."""
    return init_inference(triax.PipelineModule(load_hf(varied_llama())), **{"max_batch": 8, **options})


def generated(model: Any, prompt: list[int], **options: Any) -> Any:
    """What transformers generates for one prompt, with its scores."""
    ids = torch.tensor([prompt])
    with torch.no_grad():
        return model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW,
            do_sample=False,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_scores=True,
            output_logits=True,
            **options,
        )


class Ban:
    """A logits processor: bans the last token, and every token of which the sequence has two."""

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        assert ids.shape[0] == scores.shape[0]
        counts = torch.stack([row.bincount(minlength=scores.shape[1]) for row in ids])
        return scores.masked_fill(counts > 1, -torch.inf).scatter(1, ids[:, -1:], -torch.inf)


# ------------------------------------------------------------------------------------------------ as transformers


def test_penalties_and_processors_act_as_in_transformers() -> None:
    model, ours = varied_llama(), engine(max_batch=3)
    seen = set()
    for options in ({}, {"repetition_penalty": 1.7}, {"repetition_penalty": 0.8, "logits_processor": [Ban()]}):
        wanted = [generated(model, prompt, **options) for prompt in PROMPTS]
        found = ours.generate(PROMPTS, NEW, temperature=0, logprobs=True, **options)
        for prompt, want, got in zip(PROMPTS, wanted, found):
            assert isinstance(got, Completion) and got.prompt == len(prompt)
            assert got.tokens == want.sequences[0].tolist()
            logits = torch.cat(want.logits).log_softmax(-1)
            taken = logits.gather(1, want.sequences[0, len(prompt) :, None])[:, 0]
            assert got.logprobs == pytest.approx(taken.tolist(), abs=1e-5)  # theirs are cast to float32
        seen.add(str([got.tokens for got in found]))
    assert len(seen) == 3


@pytest.mark.parametrize("options", BEAMS, ids=lambda options: f"{options['num_beams']} beams")
def test_beam_search_equals_that_of_transformers(options: dict[str, Any]) -> None:
    model, count = varied_llama(), options.get("num_return_sequences", 1)
    eos = {"eos_token_id": options["eos"]} if "eos" in options else {}
    others = {key: value for key, value in options.items() if key != "eos"}
    found = engine().generate(PROMPTS, NEW, logprobs=True, **options)
    assert len(found) == count * len(PROMPTS)
    lengths = set()
    for index, prompt in enumerate(PROMPTS):
        want = generated(model, prompt, **eos, **others)
        gains = model.compute_transition_scores(want.sequences, want.scores, want.beam_indices, normalize_logits=False)
        for row in range(count):
            got = found[index * count + row]
            assert got.tokens == want.sequences[row, : len(got.tokens)].tolist()
            assert not want.sequences[row, len(got.tokens) :].any()  # padding
            assert got.score == pytest.approx(float(want.sequences_scores[row]), rel=1e-4)
            new = len(got.tokens) - len(prompt)
            assert got.logprobs == pytest.approx(gains[row, :new].tolist(), abs=1e-4)
            assert got.score == pytest.approx(math.fsum(got.logprobs) / new ** options.get("length_penalty", 1.0))
            lengths.add(new)
    assert len(lengths) > 1 or "eos" not in options


def markov_llama(table: list[list[float]]) -> Any:
    """Return a Llama whose next token depends on the last one alone, with the given probabilities."""
    from transformers import LlamaConfig, LlamaForCausalLM

    size = len(table)
    sizes: dict[str, Any] = {
        "vocab_size": size,
        "hidden_size": size,
        "intermediate_size": size,
        "num_attention_heads": 1,
    }
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=1, rms_norm_eps=0.0)).double().eval()
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(torch.eye(size))
        model.lm_head.weight.copy_(torch.tensor(table).log().T / math.sqrt(size))  # the norm multiplies by this root
        for branch in (model.model.layers[0].self_attn.o_proj, model.model.layers[0].mlp.down_proj):
            branch.weight.zero_()
    return model


def test_beam_search_goes_on_while_a_longer_row_may_win() -> None:
    """With a negative penalty the best score of a running row is that of its present length, as in transformers.

    After two tokens there are two finished rows. Stopped there, the second result would be [1, 2, 4].
    """
    rare, eos = 0.005, 4
    table = [[1 / 6] * 6, [rare, rare, 0.6, rare, 0.38, rare], [rare, rare, rare, 0.94, 0.04, rare]]
    table += [[rare, rare, rare, rare, 0.975, rare], [1 / 6] * 6, [1 / 6] * 6]
    options: dict[str, Any] = {"num_beams": 2, "num_return_sequences": 2, "length_penalty": -2.0}
    options |= {"early_stopping": "never"}
    model = markov_llama(table)
    want = generated(model, [1], eos_token_id=eos, **options)
    ours = init_inference(triax.PipelineModule(load_hf(model)), max_batch=2)
    completions: Any = ours.generate([[1]], NEW, eos=[eos], logprobs=True, **options)
    assert [got.tokens for got in completions] == [[1, 4], [1, 2, 3, 4]]
    for got, tokens in zip(completions, want.sequences.tolist(), strict=True):
        assert got.tokens == tokens[: len(got.tokens)] and {*tokens[len(got.tokens) :]} <= {0, eos}  # padding


def test_min_p_keeps_the_tokens_that_transformers_keeps() -> None:
    from transformers import MinPLogitsWarper, TopPLogitsWarper

    whole = Vocabulary(40, None, 40)
    logits = torch.randn(50, 40, generator=torch.Generator().manual_seed(8), dtype=torch.float64) * 2
    for p in (0.01, 0.3, 1.0):
        ids: Any = torch.zeros(1, 1)
        assert torch.equal(keep(logits, Sampling(min_p=p), whole), MinPLogitsWarper(p)(ids, logits))
        both = MinPLogitsWarper(p)(ids, TopPLogitsWarper(0.7)(ids, logits))
        assert torch.equal(keep(logits, Sampling(min_p=p, top_p=0.7), whole), both)


def test_stop_strings_end_where_those_of_transformers_do() -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())[:40]
    pairs = [letters[3] + letters[4], letters[5] + letters[6], letters[1] + letters[2]]
    words = {word: i for i, word in enumerate([*letters, *pairs])}
    merges = [(pair[0], pair[1]) for pair in pairs]
    tokens = Tokenizer(models.BPE(words, merges))
    tokens.pre_tokenizer, tokens.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer: Any = PreTrainedTokenizerFast(tokenizer_object=tokens)
    tokenizer.add_tokens([f"<{i}>" for i in range(53 - len(words))])
    model, ours = varied_llama(), engine(tokenizer=tokenizer)
    plain = ours.generate(PROMPTS, NEW, temperature=0)
    cut = 0
    for prompt, whole in zip(PROMPTS, plain):
        text = tokenizer.decode(whole[-4:])
        for stop in (text[:2], text[1:3], tokenizer.decode(prompt[-1:]) + tokenizer.decode(whole[len(prompt) :])[:1]):
            want = generated(model, prompt, stop_strings=[stop, "nowhere"], tokenizer=tokenizer)
            (got,) = ours.generate([prompt], NEW, temperature=0, stop_strings=[stop, "nowhere"])
            assert got == want.sequences[0].tolist(), (prompt, stop)
            cut += len(got) < len(whole)
    assert cut > 4


# ---------------------------------------------------------------------------------------------------- on every grid


def on_grid(sizes: tuple[int, int, int]) -> list[Any]:
    config = LlamaConfig(
        vocab_size=53,
        max_position_embeddings=32,
        hidden_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=40,
    )
    module = triax.PipelineModule(llama_layers(config), grid=Grid(*sizes), dtype=torch.float64)
    for parameter in module.parameters():
        parameter.data *= 5
    ours = init_inference(module, tokenizer=BYTES)
    drawn: list[dict[str, Any]] = [
        {"temperature": 0, "repetition_penalty": 1.7},
        {"seed": 3, "min_p": 0.05, "repetition_penalty": 1.2, "num_return_sequences": 3},
        {"seed": 3, "top_k": 30, "top_p": 0.9, "min_p": 0.01, "logits_processor": Ban()},
        {"seed": [1, 2, 3, 4], "stop_strings": [chr(7), chr(30) + chr(2)]},
        *BEAMS,
        {"num_beams": 3, "logits_processor": Ban()},
    ]
    results = []
    for options in drawn:
        done = ours.generate(PROMPTS, NEW, logprobs=True, **options)
        results.append([(each.tokens, each.logprobs) for each in done])
    return results


MORE = [(2, 1, 2), (2, 1, 1), (1, 2, 2), (2, 2, 2)]
GRIDS = [(1, 1, 2), *(pytest.param(each, marks=pytest.mark.exhaustive) for each in MORE)]


@pytest.mark.parametrize("sizes", GRIDS, ids=lambda s: "x".join(map(str, s)))
def test_generation_options_give_equal_results_on_every_grid(ranks: Any, sizes: tuple[int, int, int]) -> None:
    wanted = on_grid((1, 1, 1))
    for result in ranks(math.prod(sizes), on_grid, sizes, timeout=120):
        for want, got in zip(wanted, result, strict=True):
            assert [tokens for tokens, _ in got] == [tokens for tokens, _ in want]
            for (_, ours), (_, theirs) in zip(got, want):
                assert ours == pytest.approx(theirs, abs=1e-10)


def test_beam_search_results_do_not_depend_on_max_batch() -> None:
    wanted = [each for prompt in PROMPTS for each in engine().generate([prompt], NEW, **BEAMS[0])]
    for slots in (3, 5, 8):
        assert engine(max_batch=slots).generate(PROMPTS, NEW, **BEAMS[0]) == wanted


def test_num_return_sequences_gives_different_samples() -> None:
    ours = engine()
    found = ours.generate(PROMPTS, NEW, seed=7, num_return_sequences=3)
    assert found[::3] == ours.generate(PROMPTS, NEW, seed=7)
    assert len({tuple(each) for each in found}) == 12
    assert all(
        each[: len(prompt)] == prompt
        for prompt, group in zip(PROMPTS, range(0, 12, 3))
        for each in found[group : group + 3]
    )
    assert {event.request for event in ours.stream(PROMPTS, 2, num_return_sequences=2)} == set(range(8))
    (alone, other) = ours.generate([PROMPTS[2]], NEW, seed=[7], num_return_sequences=2)
    again = ours.generate([PROMPTS[0], PROMPTS[2]], NEW, seed=[1, 7], num_return_sequences=2)
    assert again[2:] == [alone, other]


# --------------------------------------------------------------------------------------------------------- strings


def test_text_prompts_give_the_decoded_tokens() -> None:
    """The tokenizer's tokens are bytes. The text is that of transformers' ids, and begins with the prompt."""
    ids, texts = [[5, 6, 7], [1]], ["\x05\x06\x07", "\x01"]
    wanted = [generated(varied_llama(), prompt).sequences[0].tolist() for prompt in ids]
    found = engine(tokenizer=BYTES).generate(texts, NEW, temperature=0)
    assert found == [bytes(each).decode() for each in wanted]


def test_the_text_of_a_prompt_ends_before_an_eos_token() -> None:
    prompt = [5, 6, 7]
    new = generated(varied_llama(), prompt).sequences[0].tolist()[len(prompt) :]
    eos = new[5]
    (found,) = engine(tokenizer=BYTES).generate([bytes(prompt).decode()], NEW, temperature=0, eos=eos)
    assert found == bytes(prompt + new[: new.index(eos)]).decode()


def test_beam_search_of_text_prompts_gives_decoded_tokens() -> None:
    found = engine(tokenizer=BYTES).generate(["\x05\x06\x07", "\x01"], NEW, num_beams=2, logprobs=True)
    wanted = [generated(varied_llama(), prompt, num_beams=2).sequences[0].tolist() for prompt in ([5, 6, 7], [1])]
    assert [each.tokens for each in found] == wanted
    assert [each.text for each in found] == [bytes(each).decode() for each in wanted]


def test_stop_strings_end_at_whole_utf8_characters() -> None:
    ended = ends_with(BYTES, ["é!", "ab"], frozenset([7]))
    ids = list("xé!y".encode())
    assert [ended(ids[: n + 1]) for n in range(len(ids))] == [False, False, False, True, False]
    assert ended([1, 7]) and ended(list(b"aab")) and not ended(list(b"abc"))


# ------------------------------------------------------------------------------------------------------ the errors


@pytest.mark.parametrize(
    ("tokens", "options", "message"),
    [
        ([[1]], {"min_p": 2.0}, r"min_p is 2.0. Give a probability in \[0, 1\]"),
        ([[1]], {"repetition_penalty": 0.0}, "repetition_penalty is 0.0. Give a positive number; 1 means no penalty"),
        ([[1]], {"num_beams": 9}, "num_beams is 9, but max_batch is 8, and each beam needs a slot. Pass max_batch=9"),
        ([[1]], {"num_beams": 0}, "num_beams is 0. Give at least 2, or 1 to generate without beam search"),
        ([[1]], {"num_beams": 2, "num_return_sequences": 3}, "num_return_sequences is 3, but num_beams=2 finds 2"),
        ([[1]], {"num_beams": 2, "top_k": 3}, "num_beams=2 takes the most likely .* so top_k=3 cannot act"),
        ([[1]], {"num_beams": 2, "early_stopping": "soon"}, "early_stopping is 'soon'. Give True, False or 'never'"),
        ([[1]], {"num_return_sequences": 0}, "num_return_sequences is 0. Give at least 1"),
        ([[1]], {"stop_strings": "x"}, r"stop_strings is \['x'\], but the engine has no tokenizer"),
        (["text"], {}, r"a prompt is a string, but the engine has no tokenizer. Pass one, init_inference\(model, tok"),
        ("text", {}, r"tokens must be a list of prompts, but it is a string. Write generate\(\[text\], ...\)"),
        ([[1]], {"logits_processor": ["x"]}, "logits_processor has 'x'. Give functions of"),
    ],
)
def test_impossible_generation_options_are_refused(tokens: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        engine().generate(tokens, 2, **options)


def test_wrong_processors_and_mixed_prompts_are_refused() -> None:
    with pytest.raises(ValueError, match=r"returned \(1, 52\). Return the scores, \(1, 53\)"):
        engine().generate([[1]], 2, logits_processor=lambda ids, scores: scores[:, 1:])
    with pytest.raises(ValueError, match=r"1 of 2 prompts are strings. Give only strings, or only ids"):
        engine(tokenizer=BYTES).generate(["a", [1]], 2)
    with pytest.raises(ValueError, match=r"stop_strings is \[''\]. Give strings of at least one character"):
        engine(tokenizer=BYTES).generate([[1]], 2, stop_strings="")
