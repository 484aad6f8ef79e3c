"""Writer of a run's numbers for MLflow: ``monitor: {writers: {mlflow: {experiment: digits}}}``."""

from __future__ import annotations

from collections.abc import Sequence

from ..engine.monitor.writers import Event, Write, numbers_of


def mlflow_writer(experiment: str = "triax", run_name: str = "", tracking_uri: str = "") -> Write:
    """Return a writer to the process's active run of MLflow, which is started if there is none.

    Args:
        experiment: name of the experiment of a run that is started.
        run_name: its name; by default MLflow chooses one.
        tracking_uri: a server or a store, such as ``sqlite:///mlflow.db``; by default MLflow's own choice.
    """
    import mlflow

    if tracking_uri:
        mlflow.set_tracking_uri(tracking_uri)
    if mlflow.active_run() is None:
        mlflow.set_experiment(experiment)
        mlflow.start_run(run_name=run_name or None)

    def write(events: Sequence[Event], step: int) -> None:
        mlflow.log_metrics({name: value for name, value, _ in numbers_of(events)}, step=step)

    return write
