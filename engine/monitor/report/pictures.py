"""Pictures of a run's folder: losses over the steps, and the traced step of the pipeline beside its simulation."""

from __future__ import annotations

from pathlib import Path

from ....pipe.program.measured_costs import simulated
from ....pipe.program.schedule import Schedule
from ....pipe.program.timeline import Timeline
from .run_folder import Run, read_run, read_trace
from .write import write_report


def draw_run(folder: str | Path) -> Path:
    """Write the page of a run, ``report.html``, and its pictures ``loss.png`` and ``schedule.png`` into its folder.

    The engine of the run writes its metrics there, by ``triax.Monitoring(json=folder, trace=step)``. One rank alone
    calls this, at the end. Pictures need matplotlib; without it the page is written alone.

    Returns:
        The path of the page.

    Raises:
        ConfigError: the folder holds no run, or cannot be written.
    """
    folder = Path(folder)
    page, run = write_report(folder), read_run(folder)
    try:
        draw_losses(folder / "loss.png", run)
        traced = None if run.trace is None else read_trace(run.trace)
        if traced is not None and traced.schedule is not None:
            draw_schedule(folder / "schedule.png", traced.schedule, traced.timeline(), f"step {traced.step}")
    except ImportError as error:
        if error.name is None or not error.name.startswith("matplotlib"):
            raise
    return page


def draw_losses(path: Path, run: Run, unit: str | None = None) -> None:
    """Draw training and validation loss over the steps, those before a resume too."""
    from matplotlib.figure import Figure

    trained, checked = run.series("Train/Samples/train_loss"), run.series("Validation/loss")
    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    axes = figure.subplots()
    axes.plot(*zip(*trained, strict=True), color="#9db4d0", linewidth=0.8, label="training, each batch")
    if checked:
        label = "validation, held-out documents"
        axes.plot(*zip(*checked, strict=True), color="#1f4e8c", marker="o", markersize=4, label=label)
        step, last = checked[-1]
        axes.annotate(
            f"{last:.3f}", (step, last), xytext=(0, -14), textcoords="offset points", ha="center", color="#1f4e8c"
        )
    axes.set(xlabel="step", ylabel="loss" if unit is None else f"loss, {unit}", xlim=(0, None))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path)


def draw_schedule(path: Path, schedule: Schedule, measured: Timeline, name: str) -> None:
    """Draw the pipeline as it ran, and simulated with its costs."""
    from ....pipe.program.draw import picture

    measured = from_zero(measured)
    costs = "each op takes the median of its stage, each message that of its boundary"
    titles = [f"{name} as measured", f"simulated with its costs: {costs}"]
    picture([measured, simulated(schedule, measured)], path, titles, " s")


def from_zero(times: Timeline, scale: float = 1.0) -> Timeline:
    """Shift a timeline so that its first op begins at time 0, and multiply its times by ``scale``."""
    first = min(span.start for row in times.rows for span in row)
    return Timeline(
        tuple(
            tuple(s._replace(start=scale * (s.start - first), end=scale * (s.end - first)) for s in row)
            for row in times.rows
        )
    )
