"""lm-eval, EleutherAI's evaluation harness: its model class over an engine on any grid, and named metrics of its tasks.

lm-eval runs on rank 0 alone, which reads tasks and data sets. Each request of it is a collective call: the other ranks
wait for its tokens (``LanguageModel.run``).
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import yaml

from ..base.errors import AgreedError, ConfigError, nearest, to_install
from ..base.files import read_bytes
from ..base.hub import local_folder
from ..data.chat import apply_template
from ..data.tokenizer import BYTES as BYTES_NAME
from ..data.tokenizer import load_transformers
from ..engine.pipeline_engine import PipelineEngine
from ..inference.engine import InferenceEngine, init_inference
from ..inference.scoring import Scorer
from ..inference.text import BYTES, Tokenizer

try:
    from lm_eval import simple_evaluate, utils
    from lm_eval.api.model import TemplateLM
    from lm_eval.models.utils import has_bos_prefix, normalize_gen_kwargs, postprocess_generated_text
    from lm_eval.tasks import TaskManager
except ImportError as error:
    raise ConfigError(f"tasks of lm-eval need the package lm_eval. Type {to_install('eval')}") from error

T = TypeVar("T")

_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "num_beams", "length_penalty")
_NEW_TOKENS = 256  # of a task that gives no number, as in lm-eval's other models


class LanguageModel(TemplateLM):
    """lm-eval's model class over an engine: log-likelihoods, rolling log-likelihoods, and generation.

    Every rank makes one, and calls ``run`` with a function that calls lm-eval with it. The numbers are those of
    lm-eval's own class for transformers, ``HFLM``, with the same tokenizer.

    Args:
        engine: engine of the model, with or without an optimizer; its weights are those of each moment.
        tokenizer: the model's tokenizer: one of transformers', or ``inference.text.BYTES``.
        batch: sequences that a replica runs at once; None: a microbatch of the engine.

    Raises:
        ValueError: the model cannot be scored; or the tokenizer has no token that ends a text.
    """

    def __init__(self, engine: PipelineEngine, tokenizer: Tokenizer, batch: int | None = None) -> None:
        super().__init__()
        self.tokenizer: Any = None if tokenizer is BYTES else tokenizer
        self._texts, self._engine, self._grid = tokenizer, engine, engine.grid
        self.batch_size = batch or engine.batch.micro
        self._scorer = Scorer(engine, self.batch_size)
        self.max_length = self._scorer.max_length
        self._generator: InferenceEngine | None = None
        self._is_running = self._is_in_call = False
        self._end = 0 if tokenizer is BYTES else getattr(tokenizer, "eos_token_id", None)
        if self._end is None:
            raise ValueError("the tokenizer has no eos_token, which lm-eval puts in front of a text: set one")

    def run(self, function: Callable[[], T]) -> T | None:
        """Call a function on rank 0, which may call lm-eval with this model; the other ranks serve it. Collective.

        Args:
            function: called on rank 0 alone, such as ``lambda: lm_eval.simple_evaluate(model, tasks=["piqa"])``. Each
                of its pauses between two requests must be shorter than the grid's ``timeout``: a download of a large
                data set may not be.

        Returns:
            What the function returned, on rank 0; None on the others.

        Raises:
            Exception: on rank 0 the function's exception, on the others an AgreedError with its text.
        """
        if self._grid.rank:
            while (told := self._told(None))[0] != "end":
                self._answer(*told)
            if told[1]:
                raise AgreedError(f"on rank 0, which runs lm-eval: {told[1]}")
            return None
        self._is_running = True
        try:
            result = function()
        except Exception as error:
            if not self._is_in_call:  # or the error was raised on every rank
                self._told(("end", f"{type(error).__name__}: {error}"))
            raise
        finally:
            self._is_running = self._is_in_call = False
        self._told(("end", ""))
        return result

    # ------------------------------------------------------------------------------------- lm-eval's methods

    @property
    def eot_token_id(self) -> int:
        """Id of the token that ends a text."""
        return int(self._end)  # type: ignore[arg-type]

    @property
    def prefix_token_id(self) -> int:
        """Id of the token in front of a text without a context."""
        first = getattr(self.tokenizer, "bos_token_id", None)
        return self.eot_token_id if first is None else int(first)

    @property
    def max_gen_toks(self) -> int:
        """Number of new tokens, if a task gives none."""
        return _NEW_TOKENS

    @property
    def tokenizer_name(self) -> str:
        """Name of the tokenizer."""
        return BYTES_NAME if self.tokenizer is None else str(self.tokenizer.name_or_path).replace("/", "__")

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Return messages as a text, by the tokenizer's chat template."""
        if getattr(self.tokenizer, "chat_template", None) is None:
            raise ValueError("the tokenizer has no chat template: leave out apply_chat_template")
        text: str = apply_template(
            self.tokenizer,
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )
        return text

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Return the ids of a text, with the special tokens that the tokenizer adds, unless the text has the first."""
        if self.tokenizer is None:
            return self._texts.encode(string)
        if add_special_tokens is None and has_bos_prefix(string, self.tokenizer.decode(self.prefix_token_id)):
            add_special_tokens = False
        special = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        ids: list[int] = self.tokenizer.encode(string, **special)
        return ids

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of each text, in windows of ``max_length`` tokens."""
        windows: list[tuple[None, list[int], list[int]]] = []
        counts = []
        for (string,) in (request.args for request in requests):
            rolling = utils.get_rolling_token_windows(
                token_list=self.tok_encode(string),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            own = [(None, *utils.make_disjoint_window(window)) for window in rolling]
            windows += own
            counts.append(len(own))
        values = iter(self._loglikelihood_tokens(windows))
        totals = [sum(next(values)[0] for _ in range(count)) for count in counts]
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """Return for each (texts, context, continuation) the log-probability, and whether it is the greedy answer."""
        sequences, counts = [], []
        for _, context, answer in requests:
            if len(answer) > self.max_length:
                raise ValueError(
                    f"an answer has {len(answer)} tokens, but the model has {self.max_length} positions: take a task "
                    "with shorter answers"
                )
            sequences.append([*context, *answer][-(self.max_length + 1) :])
            counts.append(len(answer))
        scores: list[tuple[float, bool]] = [tuple(pair) for pair in self._call("score", sequences, counts)]
        for (texts, _, _), score in zip(requests, scores, strict=True):
            if texts is not None:
                self.cache_hook.add_partial("loglikelihood", texts, score)
        return scores

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Return the text that follows each context, up to a stop string.

        Raises:
            ValueError: a task asks for an option that triax's generation does not have.
        """
        answers: dict[int, str] = {}
        groups: dict[str, list[int]] = {}
        for index, request in enumerate(requests):
            groups.setdefault(repr(request.args[1]), []).append(index)
        for indices in groups.values():
            options = normalize_gen_kwargs(requests[indices[0]].args[1], self.max_gen_toks)
            until, new = [*(options.pop("until", None) or [])], int(options.pop("max_gen_toks"))
            sampled = options.pop("do_sample", False)
            unknown = sorted({*options} - {*_SAMPLING})
            if unknown:
                raise ValueError(
                    f"a task generates with {', '.join(unknown)}, which triax does not have: leave it out of its "
                    f"generation_kwargs; there are until, max_gen_toks, do_sample, {', '.join(_SAMPLING)}"
                )
            if not sampled:
                options["temperature"] = 0.0
            if new >= self.max_length:
                raise ValueError(
                    f"a task generates {new} tokens, but the model has {self.max_length} positions: give its "
                    f"generation_kwargs a max_gen_toks below {self.max_length}"
                )
            contexts = [self._context(requests[index].args[0], self.max_length - new) for index in indices]
            made = self._call("generate", contexts, new, until, options)
            for index, ids in zip(indices, made, strict=True):
                answers[index] = self._text(ids, until)
                self.cache_hook.add_partial("generate_until", requests[index].args, answers[index])
        return [answers[index] for index in range(len(requests))]

    def _context(self, string: str, room: int) -> list[int]:
        first = getattr(self.tokenizer, "bos_token", None)
        return self.tok_encode(string, False if has_bos_prefix(string, first) else None)[-room:]

    def _text(self, ids: list[int], until: list[str]) -> str:
        """Return the text of new tokens in front of the first stop string."""
        if self.tokenizer is None:
            text = self._texts.decode(ids[: ids.index(self.eot_token_id)] if self.eot_token_id in ids else ids)
            return str(postprocess_generated_text(text, until, None))
        end = self.tokenizer.decode(self.eot_token_id, skip_special_tokens=False)
        text = self.tokenizer.decode(ids, skip_special_tokens=True)
        return str(postprocess_generated_text(text, [*until, end], None))

    # ------------------------------------------------------------------------------------- calls on all ranks

    def _call(self, what: str, *arguments: Any) -> Any:
        """Run a request of rank 0 on all ranks."""
        if self._grid.size > 1 and not self._is_running:
            raise RuntimeError(
                "lm-eval was called outside of LanguageModel.run, and the other ranks do not know of it. Write "
                "model.run(lambda: lm_eval.simple_evaluate(model, ...)) on every rank."
            )
        self._told((what, *arguments))
        self._is_in_call = True
        answered = self._answer(what, *arguments)
        self._is_in_call = False
        return answered

    def _told(self, message: Any) -> Any:
        """Return rank 0's message, on every rank."""
        return self._grid.world.all_gather_json(message)[0]

    def _answer(self, what: str, *arguments: Any) -> Any:
        return (self._score if what == "score" else self._generate)(*arguments)

    def _score(self, sequences: list[list[int]], counts: list[int]) -> list[tuple[float, bool]]:
        return [(sum(scored.log_probs), all(scored.is_likeliest)) for scored in self._scorer(sequences, counts)]

    def _generate(
        self, contexts: list[list[int]], new: int, until: Sequence[str], options: Mapping[str, Any]
    ) -> list[list[int]]:
        """Return the new ids of each context, up to the end of a text or of the first stop string in them."""
        if self._generator is None:
            self._generator = init_inference(self._engine, max_batch=self.batch_size, tokenizer=self._texts)
        common: dict[str, Any] = {"eos": self._end, "stop_strings": [*until], **options}
        made: list[list[int]] = [[] for _ in contexts]
        open_ = [index for index, ids in enumerate(contexts) if ids]
        if len(open_) < len(contexts):
            raise ValueError("a task generates from an empty context, which has no token: give its doc_to_text a text")
        while open_:
            prompts = [contexts[index] + made[index] for index in open_]
            rooms = [new - len(made[index]) for index in open_]
            generated = self._generator.generate(prompts, rooms, seed=[*open_], **common)
            for index, prompt, ids in zip(open_, prompts, generated, strict=True):
                made[index] += ids[len(prompt) :]
            # A stop string that begins in the context ends a generation, but is none of the answer.
            open_ = [index for index in open_ if len(made[index]) < new and not self._is_over(made[index], until)]
        return made

    def _is_over(self, ids: list[int], until: Sequence[str]) -> bool:
        return ids[-1] == self._end or any(stop in self._texts.decode(ids) for stop in until)


class LmEvalTasks:
    """Evaluation of an engine's model on tasks of lm-eval: named metrics, equal on every rank. Collective.

    Args:
        engine: the engine.
        tokenizer: name of the tokenizer: ``bytes``, a folder of transformers or a tokenizer.json.
        tasks: names of tasks, groups or tags, and paths of task files (.yaml), whose relative paths begin in the
            working folder.
        samples: number of samples of each task, the first ones; None: all.
        batch: sequences that a replica runs at once; None: a microbatch of the engine.

    Attributes:
        names: name of each metric, TASK/METRIC, or TASK/METRIC/FILTER of a task with filters -> True if higher values
            are better.

    Raises:
        ConfigError: on every rank: there is no such task, or its data cannot be read.
    """

    def __init__(
        self,
        engine: PipelineEngine,
        tokenizer: str,
        tasks: Sequence[str],
        samples: int | None = None,
        batch: int | None = None,
        runs_code: bool = False,
    ) -> None:
        self._runs_code = runs_code
        self._model = LanguageModel(engine, tokenizer_named(tokenizer), batch)
        self._grid, self._samples = engine.grid, samples
        self._specs: list[Any] = []
        logging.getLogger("lm_eval").setLevel(logging.ERROR)
        self.names: dict[str, bool] = self._shared(partial(self._load, tasks))

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the model as it is now: name -> value, without standard errors. Collective."""
        return dict(self._shared(self._evaluate))

    def _shared(self, function: Callable[[], T]) -> Any:
        """Return what a function returns on rank 0, on every rank; it may run the model."""
        try:
            result = self._model.run(function)
        except (ValueError, KeyError, OSError, AgreedError) as error:
            raise ConfigError(f"tasks: {error}") from error
        return self._grid.world.all_gather_json(result)[0]

    def _load(self, tasks: Sequence[str]) -> dict[str, bool]:
        files = [path.endswith((".yaml", ".yml")) for path in tasks]
        self._manager = TaskManager(include_defaults=not all(files))  # it reads thousands of files
        for task, is_file in zip(tasks, files, strict=True):
            if is_file:
                if not Path(task).is_file():
                    raise ValueError(f"there is no file {task}: give the path of a task file, or the name of a task")
                if not self._runs_code and (functions := _functions(Path(task))):
                    raise ValueError(
                        f"the task file {task} runs Python code of its folder (!function {functions[0]}): read it, and "
                        "then give confirm_run_unsafe_code"
                    )
                self._specs.append(str(Path(task).absolute()))
            elif task in self._manager.all_tasks:
                self._specs.append(task)
            else:
                raise ValueError(f"there is no task {task!r}; {nearest(task, self._manager.all_tasks)}")
        loaded = self._manager.load(list(self._specs))
        higher_is_better = {}
        for name, task in loaded["tasks"].items():
            for rule in getattr(task, "_filters", None) or [None]:
                kind = getattr(rule, "name", "none")
                for metric, higher in task.higher_is_better().items():
                    higher_is_better[_name(name, f"{metric},{kind}")] = bool(higher)
        for name, group in loaded["groups"].items():
            for rule in group.aggregate_metric_list or []:
                children = {n: h for n, h in higher_is_better.items() if n.split("/")[1] == rule.metric}
                for kind in rule.filter_list if isinstance(rule.filter_list, list) else [rule.filter_list]:
                    higher_is_better[_name(name, f"{rule.metric},{kind}")] = next(iter(children.values()), True)
        return higher_is_better

    def _evaluate(self) -> dict[str, float]:
        with _undisturbed():
            results = simple_evaluate(
                self._model,
                tasks=list(self._specs),
                limit=self._samples,
                task_manager=self._manager,
                bootstrap_iters=0,  # or it forks processes
                log_samples=False,
                confirm_run_unsafe_code=self._runs_code,
            )
        if results is None:  # lm-eval leaves them out where LOCAL_RANK is not 0
            raise RuntimeError("lm-eval returned no results on rank 0, because LOCAL_RANK is not 0 there")
        every = {**results["results"], **results.get("groups", {})}
        return {
            name: float(value)
            for task, values in every.items()
            for key, value in values.items()
            if (name := _name(task, key)) in self.names and isinstance(value, (int, float, np.number))
        }


def _functions(file: Path) -> list[str]:
    """Return the functions that a task file names by ``!function``, and the files that it includes."""
    functions: list[str] = []

    class Loader(yaml.SafeLoader):
        pass

    Loader.add_constructor("!function", lambda loader, node: functions.append(str(node.value)))
    left, seen = [file.absolute()], set[Path]()
    while left:
        if (path := left.pop().resolve()) in seen:
            continue
        seen.add(path)
        values = [yaml.load(read_bytes(path), Loader)]
        while values:
            value = values.pop()
            if isinstance(value, dict):
                included = value.get("include") or []
                left += [path.parent / include for include in ([included] if isinstance(included, str) else included)]
            values += value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return functions


def tokenizer_named(name: str) -> Tokenizer:
    """Return a tokenizer by its name: ``bytes``, a folder of transformers or a tokenizer.json.

    Raises:
        ConfigError: there is no such tokenizer.
    """
    if name == BYTES_NAME:
        return BYTES
    if Path(name).is_file():
        from transformers import PreTrainedTokenizerFast

        tokenizer: Any = PreTrainedTokenizerFast(tokenizer_file=name, eos_token="<|endoftext|>")
    else:
        tokenizer = load_transformers(local_folder(name))
    made: Tokenizer = tokenizer
    return made


def _name(task: str, key: str) -> str:
    """Return the name of a metric: TASK/METRIC, or TASK/METRIC/FILTER. lm-eval's key is METRIC,FILTER."""
    metric, _, kind = key.partition(",")
    return f"{task}/{metric}" if kind == "none" else f"{task}/{metric}/{kind}"


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Context of a call of lm-eval, which seeds the global random states: they are as before behind it."""
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002
    try:
        with torch.random.fork_rng():
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002
