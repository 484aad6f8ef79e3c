"""torchrun's agent, with three additions: it says why it starts ranks again, all hosts count the attempts alike, and a
host whose ranks are done goes on listening until the others' are.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousHandler

from .rendezvous import HostRendezvous, JobEnded
from .worker import Job, attempt_file, run_rank

Exits = dict[int, int]  # rank -> exit code


class Agent(LocalElasticAgent):
    """Starts the ranks of this host, and starts them again as often as it may.

    Args:
        job: what each rank does.
        ranks: of this host.
        handler: the rendezvous with the other hosts.
        restarts: how often a failed job is started again.
        again: called before each time, with the exit codes of the ranks that failed here and the number of the
            attempt; or with what another host said of it.
        logs: torch's, which redirect nothing: ranks do that themselves.
        limits: seconds that ranks get to end: when others have failed, and when this process is told to stop.
    """

    def __init__(
        self,
        job: Job,
        ranks: int,
        handler: RendezvousHandler,
        restarts: int,
        again: Callable[[Exits | str, int], object],
        logs: LogsSpecs,
        limits: tuple[int, float],
        local_address: str | None,
    ) -> None:
        spec = WorkerSpec(
            role="default",
            local_world_size=ranks,
            entrypoint=run_rank,
            args=(job,),
            rdzv_handler=handler,
            max_restarts=restarts,
            monitor_interval=0.1,
            local_addr=local_address,
        )
        stop, self._grace = limits
        super().__init__(spec, logs_specs=logs, start_method="forkserver", shutdown_timeout=stop)
        self._job, self._again, self._handler = job, again, handler
        self._hosts = handler if isinstance(handler, HostRendezvous) else None
        self._restarts, self._stop_limit = restarts, stop
        self._ended: RunResult | None = None

    def launch(self) -> None:
        """Run to the end.

        Raises:
            ChildFailedError: a rank of this host failed, and no attempt is left.
            JobEnded: another host failed, or is lost.
        """
        result = self.run()
        if result is not None and result.is_failed():
            raise ChildFailedError(name="rank", failures=result.failures)

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        """Also writes down the attempt, for the ranks: see ``run_rank``."""
        self._ended = None
        for told in Path(self._job.folder).glob("rank-*.json"):  # by ranks that left because a host came or went
            told.unlink(missing_ok=True)
        if self._hosts is not None:
            self._hosts.arrive(False)
        super()._rendezvous(worker_group)
        if self._hosts is not None:
            attempt = self._hosts.attempt
            self._remaining_restarts = self._restarts - attempt
        else:
            # torch's own: what one host counts as a restart is to another one a change of members.
            attempt = self._handler._state_holder.state.round  # type: ignore[attr-defined]
        attempt_file(self._job.folder).write_text(str(attempt))

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: float = 30) -> None:
        told = isinstance(sys.exception(), SignalException)
        super()._shutdown(death_sig, self._grace if told else timeout)  # type: ignore[arg-type]

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self._shutdown(timeout=self._stop_limit)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        if self._ended is None:
            with self._others_ended():
                result = super()._monitor_workers(worker_group)
        else:
            result = self._ended
        if result.is_failed() and self._remaining_restarts > 0:
            exits = {rank: failure.exitcode for rank, failure in result.failures.items()}
            self._again(exits, self._restarts - self._remaining_restarts + 1)
        elif self._hosts is not None and result.state in (WorkerState.SUCCEEDED, WorkerState.HEALTHY):
            if result.state == WorkerState.SUCCEEDED:
                self._ended = result
                if self._hosts.arrive():
                    return result
            if self._hosts.num_nodes_waiting():  # the agent asks next, and starts again
                why = self._hosts.lost() or "ranks of another host failed"
                self._again(why, self._hosts.attempt + 1)
            return RunResult(state=WorkerState.HEALTHY)
        return result

    @contextmanager
    def _others_ended(self) -> Iterator[None]:
        """torch gives the others half a minute when one has failed; one that is stopped, or deaf, would take it all."""
        context: Any = self._pcontext
        processes = context._pc.processes
        if all(process.exitcode in (None, 0) for process in processes):
            yield
            return

        def kill() -> None:
            for process in processes:
                if process.is_alive():
                    process.kill()

        timer = threading.Timer(self._stop_limit, kill)
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _exit_barrier(self) -> None:
        if self._hosts is None:
            super()._exit_barrier()

    def heard(self, seconds: float) -> str | None:
        """What another host said of the end of the job, if it says so in time."""
        return self._hosts.heard(seconds) if self._hosts is not None else None

    def close(self, why: str | None) -> None:
        """Tell the other hosts, if there are any."""
        if self._hosts is not None and why is not None:
            self._hosts.close(why)
        self._handler.shutdown()


__all__ = ["Agent", "ChildFailedError", "Exits", "JobEnded"]


def c10d(settings: dict[str, Any]) -> RendezvousHandler:
    """torch's own rendezvous: for one host, and where hosts come and go."""
    from torch.distributed.elastic.rendezvous import RendezvousParameters
    from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

    return get_rendezvous_handler(RendezvousParameters(**settings))
