"""Writer of a run's numbers for Hugging Face's trackio: ``monitor: {writers: {trackio: {project: digits}}}``."""

from __future__ import annotations

from collections.abc import Sequence

from ..engine.monitor.writers import Event, Write, numbers_of


def trackio_writer(project: str = "triax", name: str = "", space_id: str = "") -> Write:
    """Start a run of trackio, and return a writer that logs to it.

    Args:
        project: name of the project.
        name: name of the run; by default trackio chooses one.
        space_id: the Hugging Face Space to write to; by default a local database, which ``trackio show`` shows.
    """
    import trackio

    run = trackio.init(project=project, name=name or None, space_id=space_id or None, embed=False)

    def write(events: Sequence[Event], step: int) -> None:
        run.log({name: value for name, value, _ in numbers_of(events)}, step=step)

    return write
