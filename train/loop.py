"""One rank of a training run: build, train, evaluate, save, write the model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from ..base.errors import AgreedError, CheckpointError, ConfigError
from ..checkpoint.format import folder as folders
from ..data.answers import Answers
from ..data.byte_tokenizer import ByteTokenizer
from ..data.prompts import Prompts
from ..data.token_data import TokenData
from ..data.tokenizer import BYTES, open_tokenizer
from ..engine.monitor.files import TERMS
from ..engine.monitor.format import numbers_in_words
from ..engine.optim.closed_form import ClosedFormSchedule
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
from .job import Job
from .learning_rate import LearningRate
from .lowest import LowestLoss
from .method import AnswerEvaluation, Method
from .model import build_module, parameter_groups, with_cut
from .progress import Reporter, minutes, step_figures
from .requeue import requeued
from .spikes import SpikeGuard
from .tasks import task_evaluation

_OF_A_DRAW = ("reward", "completions/mean_length")

# Name of a simple model, and its loss on the evaluation's rows: what a run is compared with.


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


class FileSchedule(ClosedFormSchedule):
    """Learning rates of a training file: the peak, which is the optimizer's own rate, times the share of the step.

    Args:
        optimizer: its parameter groups get the rates.
        rate: the schedule of this run's file. The file of the run that it resumes may have had another one.
    """

    former = ("LambdaLR",)

    def __init__(self, optimizer: torch.optim.Optimizer, rate: LearningRate) -> None:
        self._rate = rate
        super().__init__(optimizer)

    def get_lr(self) -> list[float | Tensor]:
        """Return the rates of the next step, one for each parameter group."""
        return [base * self._rate.share(self.last_epoch) for base in self.base_lrs]


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
        form = "sft" if job.file.method is None else job.file.method.form
        token = "byte" if self.tokenizer == "bytes" else "token"
        units = {"pairs": "nats per pair", "scored": "nats per pair", "unpaired": "mean of answers"}
        self.unit = units.get(form, "objective" if form == "prompts" else f"nats per {token}")
        monitor = job.file.monitor
        faults = job.options.fault_tolerance
        name = "" if faults is None else f"replica {faults.replica}: "
        self.report = Reporter(
            job.folder, self.grid.rank == 0, job.steps, monitor.print_every or job.steps, self.unit, name
        )
        module = build_module(job, self.grid)
        rate = job.learning_rate
        options = job.options
        if rate is not None:
            options = options.changed(lr_scheduler=lambda optimizer: FileSchedule(optimizer, rate))
        collate = None
        if isinstance(training, Answers):
            is_distilled = job.file.method is not None and job.file.method.name == "distill"
            collate = partial(numbered, training) if is_distilled else training.collate
        data = None if isinstance(training, Prompts) else training
        self.engine = PipelineEngine(
            module, options, parameters=parameter_groups(job, module), training_data=data, collate_fn=collate
        )
        if settings_of(module) is None and (end := _end_of(training)) is not None:
            module.folder_settings = settings_with_end(end)  # type: ignore[assignment]
        self.spikes = SpikeGuard(self.engine, job.file.training.spikes, job.checkpoints)
        state = self.engine.resumed[1]
        self.spikes.load(state)
        self.tasks = task_evaluation(job.file.evaluate, self.engine, self.tokenizer, held_out is not None)
        self.lowest = LowestLoss(
            job.file.evaluate, self.tasks is not None and self.tasks.names.get(self._metric, False)
        )
        self.lowest.load((state or {}).get("lowest"))
        self.best_problem: str | None = (state or {}).get("best_problem")  # why the best model is not in its folder
        self.engine.observers.append(_Joined(self.spikes, self.lowest))
        if monitor.print_losses:
            self.engine.observers.append(_Losses(self.engine, self.report))
        self._before = self.step  # steps of the run before it was resumed
        self.evaluation: Evaluation | AnswerEvaluation | RewardEvaluation | None = None
        self.method: Method | Drawing | None = None
        if isinstance(training, Prompts):
            assert self.tokenizer is not None and not isinstance(held_out, (Answers, TokenData))
            self.method = Drawing(job, self.engine, training, self.tokenizer)
            self.method.load((state or {}).get("method"))
            if held_out is not None:
                self.evaluation = RewardEvaluation(job, held_out, self.method)
        elif isinstance(training, Answers):
            assert held_out is None or isinstance(held_out, Answers)
            kind = Distilling if job.file.method is not None and job.file.method.name == "distill" else Method
            self.method = kind(job, self.engine, training, held_out)
            if held_out is not None:
                self.evaluation = AnswerEvaluation(job, held_out, self.engine, self.method)
        elif held_out is not None:
            assert isinstance(held_out, TokenData)
            self.evaluation = Evaluation(job, held_out, self.engine)
        self._note_state()
        self.facts = described(training, job.file.seed)
        tokens = job.tokens_per_step
        if isinstance(training, Answers):
            tokens = job.batch.train * job.rows * training.length
        self.clock = RunClock(self.grid, tokens, job.file.training.time_limit)

    @property
    def step(self) -> int:
        """Number of steps that were taken."""
        return self.engine.global_steps

    def train(self) -> None:
        """Train to the end. Collective.

        Raises:
            AgreedError: on every rank, if every step was skipped, or 50 in a row.
        """
        job, report, engine = self.job, self.report, self.engine
        self._introduce()
        section = job.file.evaluate
        missed = self._before % section.every == 0 and self.lowest.evaluated < self._before
        if missed and self._is_evaluated and (section.best or section.patience):
            self._compared()  # the checkpoint was written before the evaluation of its step
        if self.step >= job.steps or self.lowest.is_over:
            more = "more steps" if self.step >= job.steps else "a larger evaluate.patience"
            report.say(
                f"the checkpoint in {job.checkpoints} is of step {self.step} of {job.steps}: give {more}, another "
                "name, or checkpoint.resume=never"
            )
            if job.export is not None:  # a run that was killed at its very end has no model
                problem = self._export(job.export)
                if problem is not None:
                    user_error(problem)
                report.say(f"the model is in {job.export}")
            return
        for watch in self._watches:
            watch.start(self)
        engine.save_on_interrupt()
        report.start()
        last, taken, loss, validation = False, 0, 0.0, None
        while not last:
            step, taken = self.step + 1, taken + 1
            last = step == job.steps or self.clock.is_up()
            engine.record_timeline = last or step % 10 == 0
            if last and taken < (job.options.monitor.trace.step or 0):
                try:
                    engine.record_trace(report.folder / "timeline.json")
                except ConfigError as error:  # on every rank
                    report.say(f"note    there is no trace of the last step. {error}")
            batch = None if self.method is None else self.method.next_batch()
            self._note_state()
            loss = float(engine.train_batch(batch))
            if self.step > step:  # this replica has joined others, which are further
                step, last = self.step, self.step >= job.steps
            if self.method is not None and self.method.metrics:
                self._write(TERMS, self.method.metrics)
            self.clock.tick(engine.replicas.contributing)
            if engine.record_timeline:
                report.pipeline(step, engine.timeline, job.schedule)
                self.clock.skip()
            if engine.replicas.leads:
                figures = step_figures(engine.monitor.last, self.clock.speed)
                report.step(step, loss, figures, self.clock.left(job.steps - step), self._shown())
            if self.spikes.rewind():
                last = False
                continue
            for watch in self._watches:
                watch.after_step(self, loss)
            if last or self.step % job.file.evaluate.every == 0:
                validation = self.evaluate()
                last = last or self.lowest.is_over
                if not last and (text := self.sample()) is not None:
                    report.say(f"\n{text}\n")
                self.clock.skip()
        report.stop()
        # The last steps of a run that resumed may be spikes, each of them finite.
        none = self.engine.optimizer_step.nonfinite.in_a_row >= taken
        if none and not (self._before and math.isfinite(loss)):
            raise AgreedError(
                f"all {taken} steps of this run were skipped, so that it did not train: look at the warnings "
                "before, and lower the learning rate, or look at the data and the model"
            )
        self._finish(validation)
        if job.options.fault_tolerance is not None:
            engine.leave()

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

    def _introduce(self) -> None:
        job = self.job
        axes = " x ".join(f"{size} {axis}" for axis, size in job.topology.axes.items())
        expert = f", experts over {job.topology.expert}" if job.topology.expert > 1 else ""
        self.report.say(f"data    {self.facts}")
        if (own := job.file.model.layers) is not None:
            self.report.say(f"model   {job.layers} layers of {own}")
        else:
            size = f"{job.parameter_count / 1e6:.2f} M parameters"
            shape = f"{job.model.num_hidden_layers} blocks, width {job.model.hidden_size}"
            self.report.say(f"model   {size}: {shape}")
        self.report.say(
            f"grid    {axes}{expert}; ZeRO {job.options.zero.stage}; {job.schedule.name} with "
            f"{job.batch.accumulation} microbatches of {job.batch.micro}"
        )
        default = " (the default): precision=bf16 is faster on GPUs" if job.precision_is_default else ""
        self.report.say(f"dtype   {job.precision}{default}")
        if job.cut is not None:
            self.report.say(f"cut     {job.cut}")
        rate = job.learning_rate
        if rate is not None and rate.warmup > job.steps:
            self.report.say(f"note    the warmup of {rate.warmup} steps is longer than the run of {job.steps}")

    def _finish(self, validation: float | None) -> None:
        """Save, write the model, and say how the run ended."""
        job, report = self.job, self.report
        unsaved = self.save_and_wait()
        text = self.sample()
        problem = None if job.export is None else self._export(job.export)
        limit = minutes(job.file.training.time_limit or 0)
        early = self.step < job.steps
        of, ended = (f" of {job.steps}", f": training.time_limit = {limit} min ended it") if early else ("", "")
        if early and self.lowest.is_over:
            what = "lower held-out loss"
            if self._metric != "loss":
                what = f"better {self._metric}"
            elif isinstance(self.evaluation, RewardEvaluation):
                what = "higher held-out reward"
            ended = f": no {what} in {self.lowest.since} evaluations (evaluate.patience)"
        taken = f"steps {self._before + 1} to {self.step}{of}" if self._before else f"{self.step}{of} steps"
        report.say(f"trained {taken} in {minutes(self.clock.elapsed)} min{ended}")
        if validation is not None:
            unseen = "documents" if self.method is None else "samples"
            if isinstance(self.evaluation, RewardEvaluation):
                report.say(f"reward  {-validation:.4f} in the mean over held-out prompts")
            else:
                report.say(f"loss    {validation:.4f} {self.unit} on held-out {unseen}")
            if isinstance(self.evaluation, AnswerEvaluation) and self.evaluation.metrics:
                report.say(f"        {'  '.join(numbers_in_words(self.evaluation.metrics))}")
        if self._is_evaluated and job.file.evaluate.best:
            best = f"lowest  {self.lowest.value:.4f}"
            if self._metric != "loss":
                best = f"best    {self._metric} {self.lowest.value:.4f}"
            elif isinstance(self.evaluation, RewardEvaluation):
                best = f"highest {-self.lowest.value:.4f}"
            place = f"its model is in {job.folder / 'best'}" if self.best_problem is None else self.best_problem
            report.say(f"{best} of step {self.lowest.step}: {place}")
        if text is not None:
            report.say(f"\n{text}\n")
        if job.export is not None and problem is None:
            report.say(f"the model is in {job.export}: triax generate {job.export} --prompt ...")
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
    try:
        run = TrainingRun(job, watches)
    except ConfigError as error:
        user_error(error)
    except CheckpointError as error:
        user_error(f"{error}. In the training file, give what the run had, another name, or checkpoint.resume=never")
    with requeued(job.checkpoints is not None and job.file.checkpoint.requeue, run.grid.rank):
        run.train()
    run.grid.close()
