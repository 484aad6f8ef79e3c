"""Train a byte-level GPT in three dimensions: pipe (stages) x data (ZeRO replicas) x tensor (shards).

Two more axes are there: ``--context 2`` spreads each sequence over two ranks, and ``--experts 8 --expert-parallel 2``
trains a mixture of experts, which are spread over two ranks.

    python examples/train_gpt.py --pipe 2 --data 2 --tensor 2                                      # starts its own 8
    torchrun --nproc-per-node 8 examples/train_gpt.py --pipe 2 --data 2 --tensor 2                 # the same
    python examples/train_gpt.py --text ~/texts poem.txt                                           # your own text

It learns the source of Python's standard library, or the text that ``--text`` names, and is measured on files it
never saw, against a model that counts pairs of bytes. ``runs/NAME/`` gets metrics.jsonl, a trace of one step, a page
about it all, report.html, pictures, and the model, which ``triax generate runs/NAME --prompt "class "`` reads. Whatever
the grid, the same options give the same losses.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from corpus import Bigram, Bytes, batch, check_length, find, load, replica_rows, windows

from triax.config.config import batch_sizes
from triax.engine import read_config
from triax.grid.environment import read_environment
from triax.grid.topology import Topology
from triax.launcher.launch import launch, user_error
from triax.models.config import GPTConfig, MixtralConfig
from triax.pipe.partition import uniform
from triax.pipe.schedules.choose import make_schedule
from triax.pipe.schedules.registry import RECIPES
from triax.train.progress import Reporter, minutes

if TYPE_CHECKING:
    # What needs torch is imported where it is used: a wrong option is answered at once, and ranks have torch already.
    import torch

    from triax import Grid, PipelineEngine


class Options(argparse.Namespace):
    """The command line: see ``parse``."""

    pipe: int
    data: int  # filled in by ``check`` where it is not given
    context: int
    tensor: int
    expert_parallel: int
    processes: int | None
    schedule: str
    zero: int
    layers: int
    width: int
    heads: int
    sequence: int
    dropout: float
    experts: int
    sequence_parallel: bool
    attention: str
    dtype: str
    steps: int
    batch: int
    microbatch: int
    lr: float
    warmup: int
    weight_decay: float
    clip: float
    seed: int
    time_limit: float
    text: list[str]
    validation: int
    validate_every: int
    save: Path | None
    resume: bool
    prompt: str
    sample: int
    temperature: float
    name: str
    runs: Path
    log_every: int
    print_losses: bool
    trace: int


def main() -> None:
    """Check what was asked for; then be one rank of it, or start them all."""
    options = parse()
    try:
        topology = check(options)
        # Here once, before there are ranks; under torchrun the first one that comes reads the files.
        corpus = load(find(options.text), options.runs / "corpus")
        check_length(corpus, options.sequence)
    except ValueError as error:
        user_error(error)
    if read_environment() is not None or topology.world_size == 1:
        train(options)
        return
    loads = ("numpy", "rich.live", "triax.inference.engine", "triax.models.huggingface.load")
    folder = options.runs / options.name
    ranks = topology.world_size
    sys.exit(launch(train, options, ranks=ranks, topology=topology, logs=folder, preload=loads))


def train(options: Options) -> None:
    """Train on this rank, from the empty grid to the pictures."""
    import triax
    from triax.models.huggingface.save import save_hf

    corpus = load(find(options.text), options.runs / "corpus")
    config = model_config(options)
    schedule = make_schedule(options.schedule, options.pipe, accumulation(options))
    grid = triax.Grid(
        pipe=options.pipe,
        data=options.data,
        tensor=options.tensor,
        context=options.context,
        expert=options.expert_parallel,
    )
    engine = build(options, grid, engine_config(options))

    if options.resume and options.save is not None:
        engine.load_checkpoint(options.save)

    # Whole batches of windows, so that every grid is measured on the same ones.
    batches = math.ceil(options.validation / options.batch)
    unseen = windows(corpus.held_out, batches * options.batch, options.sequence)

    def validate() -> float:
        losses = [float(engine.eval_batch(microbatches(options, grid, rows))) for rows in np.split(unseen, batches)]
        return sum(losses) / batches

    report = Reporter(options.runs / options.name, grid.rank == 0, options.steps, options.log_every, "byte")
    report.say(f"text    {corpus}")
    report.say(
        f"model   {config.parameter_count / 1e6:.2f} M parameters: {options.layers} blocks, width {options.width}"
    )
    report.say(
        f"grid    {sizes(options)}; ZeRO {options.zero}; {options.schedule} with {schedule.microbatches} microbatches "
        f"of {options.microbatch}"
    )
    report.start()
    if engine.global_steps >= options.steps:
        report.say(f"{options.save} is of step {engine.global_steps}: give more --steps than that")
        grid.close()
        return
    clock = Clock(grid, options)
    for step in range(engine.global_steps + 1, options.steps + 1):
        last = step == options.steps or clock.is_up()
        engine.record_timeline = last or step % 10 == 0
        if last and step < options.trace:
            engine.record_trace(report.folder / "timeline.json")
        rows = batch(corpus.training, step, size=options.batch, length=options.sequence, seed=options.seed)
        loss = float(engine.train_batch(microbatches(options, grid, rows)))
        clock.tick(step)
        if engine.record_timeline:
            report.pipeline(step, engine.timeline)
        if options.print_losses:
            report.say(f"step {step} loss {loss!r}")
        report.step(step, loss, clock.speed, clock.left)
        if last or step % options.validate_every == 0:
            validation = validate()
            report.validated(step, validation)
            engine.monitor.write_events([("Validation/loss", validation, engine.global_samples)])
            if options.save is not None:
                engine.save_checkpoint(options.save)
            clock.skip()
        if last:
            break
    report.stop()

    bigram = Bigram(corpus.training).loss(unseen) if grid.rank == 0 else 0.0
    # Generation needs the experts of a layer on one rank. ``triax generate`` has them.
    text = continue_text(engine, options) if options.sample and options.expert_parallel == 1 else b""
    save_hf(engine, report.folder / "model")
    engine.monitor.write_events([("Validation/bigram_loss", bigram, engine.global_samples)])
    ended = "" if step == options.steps else f" of {options.steps}: --time-limit {options.time_limit:g} ended it"
    report.say(f"trained {step} steps in {minutes(clock.elapsed)} min{ended}")
    report.say(f"loss    {validation:.4f} nats per byte on held-out files; byte bigrams: {bigram:.4f}")
    if text:
        report.say(f"\n{text.decode(errors='replace')}\n")
    report.say(f"the model is in {report.folder / 'model'}: triax generate {report.folder} --prompt 'def '")
    report.draw(schedule, {"byte bigrams, held-out files": bigram})
    grid.close()


# ----------------------------------------------------------------------------------------- its parts


def build(options: Options, grid: Grid, config: dict[str, Any]) -> PipelineEngine:
    """The model on the grid, cut as the schedule cuts it, and its optimizer: matrices decay, vectors do not."""
    import torch

    import triax
    from triax.models.gpt import GPTLoss, gpt_layers
    from triax.models.mixtral import mixtral_layers

    shape = model_config(options)
    list_layers: Any = mixtral_layers if options.experts else gpt_layers
    schedule = make_schedule(options.schedule, options.pipe, accumulation(options))
    module = triax.PipelineModule(
        list_layers(shape, sequence_parallel=options.sequence_parallel, attention=options.attention),
        grid=grid,
        loss_fn=GPTLoss(grid, vocab_size=shape.vocab_size),
        chunks=schedule.chunks,
        placement=schedule.placement,
        seed=options.seed,
        dtype=getattr(torch, options.dtype),
    )
    matrices = [parameter for parameter in module.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in module.parameters() if parameter.dim() == 1]
    engine, _, _, _ = triax.initialize(
        model=module,
        model_parameters=[{"params": matrices}, {"params": vectors, "weight_decay": 0.0}],
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, partial(warm_cosine, options)),
        config=config,
    )
    return engine


def microbatches(options: Options, grid: Grid, rows: Bytes) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """A global batch of windows -> this replica's microbatches: inputs (micro, T), labels (micro, T)."""
    import torch

    for part in replica_rows(rows, grid.data.rank, grid.data.size, options.microbatch):
        tokens = torch.from_numpy(part.astype("int64"))
        yield tokens[:, :-1], tokens[:, 1:]


def warm_cosine(options: Options, step: int) -> float:
    """The share of the learning rate at a step: up to 1 in a straight line, then down to 0.1 along a cosine."""
    if step < options.warmup:
        return (step + 1) / options.warmup
    done = (step - options.warmup) / max(options.steps - options.warmup, 1)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * min(done, 1.0)))


def continue_text(engine: PipelineEngine, options: Options) -> bytes:
    """The prompt and what the model thinks follows, as far as it can see back; the same on every rank."""
    import triax

    prompt = list(options.prompt.encode())
    room = min(options.sample, options.sequence - len(prompt))
    (text,) = triax.init_inference(engine, max_batch=1).generate(
        [prompt], room, temperature=options.temperature, seed=options.seed
    )
    return bytes(text)


class Clock:
    """The time that training took, and what is left of it."""

    def __init__(self, grid: Grid, options: Options) -> None:
        self._grid, self._options = grid, options
        self._limit = options.time_limit * 60 if options.time_limit else math.inf
        self._tokens = options.batch * options.sequence
        self._step = 0.0  # seconds, lately
        self._start = self._before = time.monotonic()
        self.elapsed, self.speed, self.left = 0.0, 0.0, 0.0

    def tick(self, step: int) -> None:
        """A step is done."""
        now = time.monotonic()
        took = now - self._before
        # The first step also warms up: it would spoil the mean.
        self._step = took if step <= 2 else 0.9 * self._step + 0.1 * took
        self._before, self.elapsed = now, now - self._start
        self.speed = self._tokens / self._step
        self.left = min((self._options.steps - step) * self._step, max(self._limit - self.elapsed, 0.0))

    def skip(self) -> None:
        """Leave the time since the last step out of the next one."""
        self._before = time.monotonic()

    def is_up(self) -> bool:
        """Return True if the next step is the last one in time, with one to spare; rank 0's clock decides for all."""
        import torch

        up = torch.tensor(
            [float(time.monotonic() - self._start + 2 * self._step > self._limit)], device=self._grid.device
        )
        if self._limit < math.inf:
            self._grid.world.broadcast(up)
        return bool(up)


# --------------------------------------------------------------------------------------- the options


def parse(arguments: Sequence[str] | None = None) -> Options:
    """The command line. The defaults, with two of everything, train for some minutes on two cores."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument_group("the grid").add_argument
    add("--pipe", type=int, default=1, metavar="P", help="stages of layers (1)")
    add("--data", type=int, metavar="D", help="replicas (what the other axes leave of the processes)")
    add("--context", type=int, default=1, metavar="C", help="parts of each sequence (1)")
    add("--tensor", type=int, default=1, metavar="T", help="shards of each layer (1)")
    add("--expert-parallel", type=int, default=1, metavar="E", help="shards of each layer's experts (1)")
    add("--processes", type=int, metavar="N", help="how many to start (P x D x C x T)")
    add("--schedule", default="1f1b", choices=list(RECIPES), help="how the stages take turns (1f1b)")
    add(
        "--zero",
        type=int,
        default=1,
        metavar="STAGE",
        help="of ZeRO: what the replicas share out (1)",
    )
    add = parser.add_argument_group("the model").add_argument
    add("--layers", type=int, default=4, help="blocks (4)")
    add("--width", type=int, default=128, help="of the residual stream (128)")
    add("--heads", type=int, default=4, help="of attention (4)")
    add("--sequence", type=int, default=128, metavar="BYTES", help="the longest context (128)")
    add("--dropout", type=float, default=0.0, help="probability (0)")
    add("--experts", type=int, default=0, metavar="N", help="a mixture of so many in each block; 0: a plain GPT (0)")
    add("--attention", default="ring", choices=["ring", "ulysses", "gather"], help="over --context (ring)")
    add("--sequence-parallel", action="store_true", help="norms and dropout on the tensor ranks' shares of a sequence")
    add("--dtype", default="float32", choices=["float32", "float64"], help="of weights and arithmetic (float32)")
    add = parser.add_argument_group("the training").add_argument
    add("--steps", type=int, default=600, help="optimizer steps (600)")
    add("--batch", type=int, default=32, help="sequences a step, over all replicas (32)")
    add("--microbatch", type=int, default=4, help="sequences that pass through the pipeline at once (4)")
    add("--lr", type=float, default=4e-3, help="the highest learning rate (4e-3)")
    add("--warmup", type=int, default=50, metavar="STEPS", help="until the learning rate is there (50)")
    add("--weight-decay", type=float, default=0.1, help="of matrices (0.1)")
    add("--clip", type=float, default=1.0, help="the longest gradient; 0: any (1)")
    add("--seed", type=int, default=0, help="of weights, batches and the sample (0)")
    add("--time-limit", type=float, default=5.0, metavar="MINUTES", help="then end in good order; 0: no limit (5)")
    add("--save", type=Path, metavar="FOLDER", help="checkpoints: each time it is measured (none)")
    add("--resume", action="store_true", help="go on from the last one in --save, on whatever grid")
    add = parser.add_argument_group("the text").add_argument
    add("--text", nargs="+", default=[], metavar="PATH", help="files and folders (Python's standard library)")
    add("--validation", type=int, default=256, metavar="N", help="held-out sequences to measure (256)")
    add("--validate-every", type=int, default=100, metavar="STEPS", help="and once more at the end (100)")
    add("--prompt", default="def ", help='what the sample begins with ("def ")')
    add("--sample", type=int, default=200, metavar="BYTES", help="its length, if there is room; 0: none (200)")
    add("--temperature", type=float, default=0.7, help="of the sample: lower is safer (0.7)")
    add = parser.add_argument_group("the report").add_argument
    add("--name", default="gpt", help="of the folder in runs/ (gpt)")
    add("--runs", type=Path, default=Path("runs"), metavar="FOLDER", help="where runs are kept (runs)")
    add("--log-every", type=int, default=20, metavar="STEPS", help="a line, where there is no terminal (20)")
    add("--print-losses", action="store_true", help="print every loss in full")
    add("--trace", type=int, default=20, metavar="STEP", help="of which timeline.json is (20, or the last); 0: none")
    return parser.parse_args(arguments, namespace=Options())


def check(options: Options) -> Topology:
    """The grid that the options ask for, and every reason why they cannot be had: before anything is started.

    Raises:
        ValueError: says what to change.
    """
    environment = read_environment()
    processes = environment.world_size if environment else options.processes
    replica = Topology(pipe=options.pipe, context=options.context, tensor=options.tensor).world_size
    if options.data is None:
        if processes is not None and processes % replica:
            raise ValueError(
                f"{sizes(options)} take {replica} processes a replica, and there are "
                f"{processes}, no multiple of that: give axes whose product divides {processes}"
            )
        options.data = processes // replica if processes is not None else 1
    context = {} if options.context == 1 else {"context": options.context}
    topology = Topology(
        pipe=options.pipe, data=options.data, **context, tensor=options.tensor, expert=options.expert_parallel
    )
    if processes is not None and processes != topology.world_size:
        raise ValueError(
            f"{sizes(options)} is a grid of {topology.world_size} processes, and there are {processes}: change one of "
            "--pipe, --data, --context and --tensor, or the number of processes"
        )
    if options.expert_parallel > 1 and not options.experts:
        raise ValueError(f"--expert-parallel {options.expert_parallel} spreads experts: give --experts too")
    if options.experts % options.expert_parallel:
        raise ValueError(f"--expert-parallel {options.expert_parallel} does not divide --experts {options.experts}")
    config = model_config(options)
    config.check_tensor(options.tensor)
    if options.sequence_parallel and options.sequence % options.tensor:
        near = options.sequence // options.tensor * options.tensor or options.tensor
        raise ValueError(
            f"--sequence {options.sequence} is not shared evenly by --tensor {options.tensor}: give {near}"
        )
    schedule = make_schedule(options.schedule, options.pipe, accumulation(options))
    uniform(
        config.num_hidden_layers + (3 if options.experts else 4), len(schedule.placement)
    )  # embedding, positions (without experts), blocks, norm, head: one a stage or more
    if options.sample and not 0 < len(options.prompt.encode()) < options.sequence:
        raise ValueError(
            f"--prompt has {len(options.prompt.encode())} bytes: the sample needs one to follow, and the --sequence of "
            f"{options.sequence} room for another"
        )
    if options.resume and options.save is None:
        raise ValueError("--resume goes on from the last checkpoint of a folder: give that as --save too")
    for name in ("steps", "validation", "validate_every", "log_every", "temperature"):
        if getattr(options, name) <= 0:
            raise ValueError(f"--{name.replace('_', '-')} is {getattr(options, name)}; it must be above 0")
    return topology


def accumulation(options: Options) -> int:
    """Microbatches a step and replica."""
    return batch_sizes(read_config(engine_config(options)), options.data).accumulation


def model_config(options: Options) -> GPTConfig | MixtralConfig:
    """The model: a GPT, or with experts a Mixtral."""
    shape: dict[str, Any] = {
        "vocab_size": 256,
        "max_position_embeddings": options.sequence,
        "hidden_size": options.width,
        "num_hidden_layers": options.layers,
        "num_attention_heads": options.heads,
        "dropout": options.dropout,
    }
    if not options.experts:
        return GPTConfig(**shape)
    return MixtralConfig(
        **shape,
        intermediate_size=2 * options.width,
        num_key_value_heads=options.heads,
        num_experts=options.experts,
    )


def sizes(options: Options) -> str:
    """The grid in words."""
    data = "" if options.data is None else f" x {options.data} data"
    context = "" if options.context == 1 else f" x {options.context} context"
    expert = "" if options.expert_parallel == 1 else f", experts over {options.expert_parallel}"
    return f"{options.pipe} pipe{data}{context} x {options.tensor} tensor{expert}"


def engine_config(options: Options) -> dict[str, Any]:
    """The training, in DeepSpeed's words."""
    adam = {"lr": options.lr, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": options.weight_decay}
    return {
        "train_batch_size": options.batch,
        "train_micro_batch_size_per_gpu": options.microbatch,
        "optimizer": {"type": "AdamW", "params": adam},
        "gradient_clipping": options.clip,
        "zero_optimization": {"stage": options.zero},
        "pipeline": {"schedule": options.schedule},
        "seed": options.seed,
        "json_monitor": {"enabled": True, "output_path": str(options.runs), "job_name": options.name},
        "timeline": {"step": min(options.trace, options.steps) or None},
    }


if __name__ == "__main__":
    main()
