"""One rank of a training run: build, train, evaluate, save, write the model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from ..base.errors import AgreedError, CheckpointError, ConfigError
from ..base.verbosity import show_log
from ..checkpoint.format import folder as folders
from ..data.answers import Answers
from ..data.byte_tokenizer import ByteTokenizer
from ..data.prompts import Prompts
from ..data.token_data import TokenData
from ..data.tokenizer import BYTES, open_tokenizer
from ..engine.monitor.files import TERMS
from ..engine.monitor.format import numbers_in_words
from ..engine.pipeline_engine import PipelineEngine
from ..engine.step_observer import StepObserver
from ..grid import Grid
from ..grid.launcher.launch import user_error
from ..inference.engine import init_inference
from ..models.huggingface.folder_settings import settings_of, settings_with_end
from ..models.huggingface.save import save_hf
from .clock import RunClock
from .data import check_data, described
from .distilling import Distilling, numbered
from .drawing import Drawing, RewardEvaluation
from .evaluation import Evaluation
from .file_schedule import FileSchedule
from .job import Job
from .lowest import LowestLoss
from .method import AnswerEvaluation, Method
from .model import build_module, parameter_groups, with_cut
from .progress import Reporter, step_figures
from .requeue import requeued
from .run_text import Criterion, introduction, last_evaluation, nothing_left, trained
from .spikes import SpikeGuard
from .tasks import task_evaluation

Data = TokenData | Answers | Prompts
_OF_A_DRAW = ("reward", "completions/mean_length")


class Watch(Protocol):
    """Protocol: a watcher of a run's steps. Every rank calls its watches at the same steps: they may communicate."""

    def start(self, run: TrainingRun) -> None:
        """Begin, when the engine is made and a checkpoint is loaded, before the first step."""

    def after_step(self, run: TrainingRun, loss: float) -> None:
        """Look at the step that was taken."""


class _Joined(StepObserver):
    """Gives a run that joins others (``fault_tolerance``) their window of spikes and their lowest loss."""

    def __init__(self, spikes: SpikeGuard, lowest: LowestLoss) -> None:
        self._spikes, self._lowest = spikes, lowest

    def joined(self, client_state: Mapping[str, Any]) -> None:
        self._spikes.load(client_state)
        self._lowest.load(client_state.get("lowest"))


class _Losses(StepObserver):
    """Prints the loss of each step in full, before a signal can end the run after the step."""

    def __init__(self, engine: PipelineEngine, report: Reporter) -> None:
        self._engine, self._report = engine, report

    def after_step(self, grid: Grid, loss: Tensor) -> None:
        self._report.say(f"step {self._engine.global_steps} loss {float(loss)!r}")


class TrainingRun:
    """One rank of a training run.

    Args:
        job: the run.
        watches: watchers of its steps.

    Attributes:
        grid, engine: the grid and the engine.
        evaluation: evaluation on held-out rows; None without them.
        tasks: evaluation on tasks; None without them.
        method: the method of post-training; None: the next token of texts.
        report: prints and draws, on rank 0.
        clock: times of the steps.
        spikes: watcher of spikes of the loss and of the gradient's norm.
        tokenizer: name of the tokenizer; None: it is unknown.
        unit: unit of the loss, such as nats per token.
    """

    def __init__(self, job: Job, watches: Sequence[Watch] = ()) -> None:
        self._watches = list(watches)
        sizes: dict[str, Any] = job.topology.sizes
        self.grid = Grid(**sizes)
        training, held_out, self.tokenizer = check_data(job.file, job.sequence, job.tokenizer, job.model.vocab_size)
        self.job = job = with_cut(job, self.grid, training)
        # Opened now: its file may be gone when a sample is due.
        sampled = job.file.sample is not None and self.tokenizer is not None
        self._text = open_tokenizer(str(self.tokenizer), "none") if sampled else None
        self.unit = _unit_of_loss(job, self.tokenizer)
        monitor, faults = job.file.monitor, job.options.fault_tolerance
        name = "" if faults is None else f"replica {faults.replica}: "
        self.report = Reporter(
            job.folder, self.grid.rank == 0, job.steps, monitor.print_every or job.steps, self.unit, name
        )
        self.engine = self._make_engine(training)
        self._make_guards(held_out)
        self._before = self.step  # steps of the run before it was resumed
        self._make_method(training, held_out)
        self._criterion = Criterion(job.file.evaluate.metric, isinstance(self.evaluation, RewardEvaluation))
        self._note_state()
        self.facts = described(training, job.file.seed)
        tokens = job.tokens_per_step
        if isinstance(training, Answers):
            tokens = job.batch.train * job.rows * training.length
        self.clock = RunClock(self.grid, tokens, job.file.training.time_limit)

    def _make_engine(self, training: Data) -> PipelineEngine:
        """Return the engine, which has loaded the checkpoint that the run resumes."""
        job, rate, options = self.job, self.job.learning_rate, self.job.options
        module = build_module(job, self.grid)
        if rate is not None:
            options = options.changed(lr_scheduler=lambda optimizer: FileSchedule(optimizer, rate))
        collate = None
        if isinstance(training, Answers):
            collate = partial(numbered, training) if _is_distilled(job) else training.collate
        data = None if isinstance(training, Prompts) else training
        engine = PipelineEngine(
            module, options, parameters=parameter_groups(job, module), training_data=data, collate_fn=collate
        )
        if settings_of(module) is None and (end := _end_of(training)) is not None:
            module.folder_settings = settings_with_end(end)  # type: ignore[assignment]
        return engine

    def _make_guards(self, held_out: Data | None) -> None:
        """Make what judges the run: spikes, tasks and the lowest loss, with their state of a resumed run."""
        section, state = self.job.file.evaluate, self.engine.resumed[1] or {}
        self.spikes = SpikeGuard(self.engine, self.job.file.training.spikes, self.job.checkpoints)
        self.spikes.load(state)
        self.tasks = task_evaluation(section, self.engine, self.tokenizer, held_out is not None)
        self.lowest = LowestLoss(section, self.tasks is not None and self.tasks.names.get(section.metric, False))
        self.lowest.load(state.get("lowest"))
        self.best_problem: str | None = state.get("best_problem")  # why the best model is not in its folder
        self.engine.observers.append(_Joined(self.spikes, self.lowest))
        if self.job.file.monitor.print_losses:
            self.engine.observers.append(_Losses(self.engine, self.report))

    def _make_method(self, training: Data, held_out: Data | None) -> None:
        """Make the method and the evaluation that fit the data."""
        job, engine = self.job, self.engine
        self.evaluation: Evaluation | AnswerEvaluation | RewardEvaluation | None = None
        self.method: Method | Drawing | None = None
        if isinstance(training, Prompts):
            assert self.tokenizer is not None and not isinstance(held_out, (Answers, TokenData))
            self.method = Drawing(job, engine, training, self.tokenizer)
            self.method.load((engine.resumed[1] or {}).get("method"))
            if held_out is not None:
                self.evaluation = RewardEvaluation(job, held_out, self.method)
        elif isinstance(training, Answers):
            assert held_out is None or isinstance(held_out, Answers)
            self.method = (Distilling if _is_distilled(job) else Method)(job, engine, training, held_out)
            if held_out is not None:
                self.evaluation = AnswerEvaluation(job, held_out, engine, self.method)
        elif held_out is not None:
            assert isinstance(held_out, TokenData)
            self.evaluation = Evaluation(job, held_out, engine)

    @property
    def step(self) -> int:
        """Number of steps that were taken."""
        return self.engine.global_steps

    def train(self) -> None:
        """Train to the end. Collective.

        Raises:
            AgreedError: on every rank, if every step was skipped, or 50 in a row.
        """
        for line in introduction(self.job, self.facts):
            self.report.say(line)
        self._compare_missed()
        if self.step >= self.job.steps or self.lowest.is_over:
            self._end_without_steps()
            return
        for watch in self._watches:
            watch.start(self)
        self.engine.save_on_interrupt()
        self.report.start()
        last, taken, loss, validation = False, 0, 0.0, None
        saved, unsaved = False, None
        while not last:
            taken, last = taken + 1, self.step + 1 == self.job.steps or self.clock.is_up()
            loss = self._take_step(taken, last)
            last = last or self.step >= self.job.steps  # a replica that has joined others is as far as they are
            if self.spikes.rewind():
                last = False
                continue
            for watch in self._watches:
                watch.after_step(self, loss)
            if last and self._takes_local_steps:
                # Saved before the last, shorter round, which a run that goes on from here does not have.
                saved, unsaved = True, self.save_and_wait()
                self.engine.leave()
            if last or self.step % self.job.file.evaluate.every == 0:
                with self._common_weights():
                    validation = self.evaluate()
                    last = last or self.lowest.is_over
                    if not last and (text := self.sample()) is not None:
                        self.report.say(f"\n{text}\n")
                self.clock.skip()
        self.report.stop()
        # The last steps of a run that resumed may be spikes, each of them finite.
        none = self.engine.optimizer_step.nonfinite.in_a_row >= taken
        if none and not (self._before and math.isfinite(loss)):
            raise AgreedError(
                f"all {taken} steps of this run were skipped, so that it did not train: look at the warnings "
                "before, and lower the learning rate, or look at the data and the model"
            )
        self._finish(validation, unsaved if saved else self.save_and_wait())
        if self.job.options.fault_tolerance is not None:
            self.engine.leave()

    @property
    def _takes_local_steps(self) -> bool:
        """True if the replicas of this grid take steps of their own; those of ``fault_tolerance`` are other grids."""
        return self.job.options.local_updates is not None and self.job.options.fault_tolerance is None

    def _common_weights(self) -> AbstractContextManager[None]:
        """Context in which all replicas of the grid have one model, to be evaluated and written. Nothing is sent."""
        return self.engine.common_weights() if self._takes_local_steps else nullcontext()

    def _compare_missed(self) -> None:
        """Evaluate the step of the checkpoint, which was written before that evaluation."""
        section = self.job.file.evaluate
        missed = self._before % section.every == 0 and self.lowest.evaluated < self._before
        if missed and self._is_evaluated and (section.best or section.patience):
            with self._common_weights():
                self._compared()

    def _end_without_steps(self) -> None:
        """End a run that has no step left, with its model, which a run that was killed at its very end has not."""
        self.report.say(nothing_left(self.job, self.step))
        if self._takes_local_steps and self.step >= self.job.steps:
            self.engine.leave()
        if self.job.export is not None:
            with self._common_weights():
                problem = self._export(self.job.export)
            if problem is not None:
                user_error(problem)
            self.report.say(f"the model is in {self.job.export}")

    def _take_step(self, taken: int, last: bool) -> float:
        """Train one batch, show and record it, and return its loss. Collective.

        Args:
            taken: number of the step in this process, from 1.
            last: it is the last one.
        """
        job, report, engine, step = self.job, self.report, self.engine, self.step + 1
        engine.record_timeline = last or step % 10 == 0
        if last and taken < (job.options.monitor.trace.step or 0):
            try:
                engine.record_trace(report.folder / "timeline.json")
            except ConfigError as error:  # on every rank
                report.say(f"note    there is no trace of the last step. {error}")
        batch = None if self.method is None else self.method.next_batch()
        self._note_state()
        loss = float(engine.train_batch(batch))
        if self.method is not None and self.method.metrics:
            self._write(TERMS, self.method.metrics)
        self.clock.tick(engine.replicas.contributing)
        if engine.record_timeline:
            report.pipeline(self.step, engine.timeline, job.schedule)
            self.clock.skip()
        if engine.replicas.leads:
            figures = step_figures(engine.monitor.last, self.clock.speed)
            report.step(self.step, loss, figures, self.clock.left(job.steps - self.step), self._shown())
        return loss

    @property
    def _metric(self) -> str:
        """Name of the number by which the best model is found."""
        return self.job.file.evaluate.metric

    @property
    def _is_evaluated(self) -> bool:
        return self.evaluation is not None or self.tasks is not None

    def evaluate(self) -> float | None:
        """Evaluate, note the numbers, and return the loss; None without held-out documents. Collective."""
        if not self._is_evaluated:
            return None
        values, tasks = self._compared()
        self._write("Validation/", values)
        self._write("Tasks/", tasks)
        if tasks:
            self.report.say(f"tasks   step {self.step}: {', '.join(numbers_in_words(tasks))}")
        return values.get("loss")

    def _compared(self) -> tuple[dict[str, float], dict[str, float]]:
        """Evaluate, and compare the metric with the best one, whose model is kept if the file asks for it.

        Returns:
            The numbers of the held-out rows, and those of the tasks.
        """
        values: dict[str, float] = {}
        if self.evaluation is not None:
            values = {"loss": self.evaluation.loss()}
            values |= getattr(self.evaluation, "metrics", {})
        tasks = {} if self.tasks is None else self.tasks.metrics()
        value = values.get("loss") if self._metric == "loss" else tasks.get(self._metric)
        if value is None and self._metric != "loss":
            raise AgreedError(f"the tasks gave no number for {self._metric}: give another evaluate.metric")
        if value is not None and self.lowest.note(value, self.step) and self.job.file.evaluate.best:
            self.best_problem = self._export(self.job.folder / "best")
            if self.best_problem is not None:
                self.report.say(f"note    {self.best_problem}")
        self._note_state()
        return values, tasks

    def _note_state(self) -> None:
        """Give the engine what its next checkpoint is to have of the run."""
        self.engine.client_state = {"spikes": self.spikes.state, "lowest": self.lowest.state}
        self.engine.client_state["best_problem"] = self.best_problem
        if self.method is not None and (state := self.method.state) is not None:
            self.engine.client_state["method"] = state

    def _write(self, prefix: str, numbers: Mapping[str, float]) -> None:
        """Write numbers of the step, if there are any, to the monitors."""
        if not numbers:
            return
        samples = self.engine.global_samples
        self.engine.monitor.write_events([(prefix + name, value, samples) for name, value in numbers.items()])

    def _shown(self) -> Mapping[str, float | list[float]]:
        """Return the numbers of the step's loss, and of a draw its reward and length, for the progress line."""
        drawn = {} if self.method is None else self.method.metrics
        return {name: drawn[name] for name in _OF_A_DRAW if name in drawn} | self.engine.metrics

    def save_and_wait(self) -> str | None:
        """Write a checkpoint now, and wait until it is written. Return why it was not written. Collective."""
        folder, every = self.job.checkpoints, self.job.options.checkpoint.every
        if folder is None:
            return None
        if every is None or self.step % every:
            self.engine.save_checkpoint(folder, client_state=self.engine.client_state)
        self.engine.wait_for_checkpoint()
        reason = self.engine.checkpointer.problem
        if reason is None:
            return None
        again = "Make room, and start the same training file again"
        return f"the last checkpoint, of step {self.step}, was not written to {folder}: {reason}. {again}"

    def sample(self) -> str | None:
        """Return the sample: the prompt and what the model adds, equal on every rank. Collective."""
        section, tokenizer = self.job.file.sample, self._text
        if section is None or tokenizer is None:
            return None
        (prompt,) = tokenizer.encode([section.prompt])
        inference = init_inference(self.engine, max_batch=1)
        room = min(section.tokens, inference.max_length - len(prompt))
        if room < 1:
            return None
        (ids,) = inference.generate([prompt.tolist()], room, temperature=section.temperature, seed=self.job.file.seed)
        return tokenizer.decode(ids)

    def _finish(self, validation: float | None, unsaved: str | None) -> None:
        """Write the model, and say how the run ended.

        Args:
            validation: loss of the last evaluation; None: there was none.
            unsaved: why the last checkpoint was not written; None: it was.
        """
        job, report = self.job, self.report
        with self._common_weights():
            text = self.sample()
            problem = None if job.export is None else self._export(job.export)
        report.say(trained(job, self._before, self.step, self.clock.elapsed, self.lowest, self._criterion))
        if validation is not None:
            rows = "documents" if self.method is None else "samples"
            metrics = self.evaluation.metrics if isinstance(self.evaluation, AnswerEvaluation) else {}
            for line in last_evaluation(validation, self._criterion, self.unit, rows, metrics):
                report.say(line)
        if self._is_evaluated and job.file.evaluate.best:
            place = self.best_problem or f"its model is in {job.folder / 'best'}"
            report.say(f"{self._criterion.best(self.lowest.value)} of step {self.lowest.step}: {place}")
        if text is not None:
            report.say(f"\n{text}\n")
        if job.export is not None and problem is None:
            command = "" if job.file.data.images else f": triax generate {job.export} --prompt ..."
            report.say(f"the model is in {job.export}{command}")
        report.draw(job.schedule)
        if problem := problem or self.best_problem or unsaved:
            user_error(problem)

    def _export(self, folder: Path) -> str | None:
        """Write the model as a Hugging Face folder, with its tokenizer; return why it is not there. Collective."""
        section, named = self.job.file.export, self.tokenizer
        source = ByteTokenizer() if named == BYTES else named
        dtype = None if section is None or section.dtype is None else getattr(torch, section.dtype)
        try:
            save_hf(self.engine, folder, dtype=dtype, merge_lora=True, tokenizer=source)
        except (OSError, RuntimeError) as error:  # on every rank
            kept = self.job.checkpoints
            advice = (
                f"Make room, and start the same training file again: it goes on from the last checkpoint in {kept}."
                if kept is not None and folders.tags(folders.folder_at(kept))
                else "There is no checkpoint either: the weights are lost."
            )
            return f"the model was not written to {folder}: {error}. {advice}"
        return None


def _unit_of_loss(job: Job, tokenizer: str | None) -> str:
    form = "sft" if job.file.method is None else job.file.method.form
    units = {"pairs": "nats per pair", "scored": "nats per pair", "unpaired": "mean of answers", "prompts": "objective"}
    return units.get(form, f"nats per {'byte' if tokenizer == BYTES else 'token'}")


def _is_distilled(job: Job) -> bool:
    return job.file.method is not None and job.file.method.name == "distill"


def _end_of(training: Any) -> int | None:
    """Return the token that ends a document of the training data; None if nothing does, or if folders differ."""
    if not isinstance(training, TokenData):
        return None
    ends = {folder.index.tokenizer.end for folder in training.folders}
    return ends.pop() if len(ends) == 1 else None


def train(job: Job, watches: Sequence[Watch] = ()) -> None:
    """Be one rank of a run, from the empty grid to the pictures.

    Args:
        job: the run.
        watches: watchers of its steps, beside those that the training file asks for.
    """
    show_log()
    try:
        run = TrainingRun(job, watches)
    except ConfigError as error:
        user_error(error)
    except CheckpointError as error:
        user_error(f"{error}. In the training file, give what the run had, another name, or checkpoint.resume=never")
    with requeued(job.checkpoints is not None and job.file.checkpoint.requeue, run.grid.rank):
        run.train()
    run.grid.close()
