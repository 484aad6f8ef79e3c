"""torchrun's agent with three additions.

- It prints why it restarts the ranks.
- All hosts use the same number of the attempt.
- A host whose ranks are done waits for the other hosts, in case they restart.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousHandler

from .rendezvous import HostRendezvous, LocalRendezvous
from .signals import LauncherSignals
from .worker import LaunchJob, attempt_file, mark, run_rank

Exits = dict[int, int]  # rank -> exit code
_INTERRUPT_GRACE = 600.0  # seconds in which ranks may save after Ctrl-C; a second Ctrl-C ends them before


class Agent(LocalElasticAgent):
    """Agent that starts the ranks of this host, and restarts them after a failure.

    Args:
        job: the function or script that each rank runs, with its settings.
        ranks: number of ranks on this host.
        handler: the rendezvous with the other hosts.
        restarts: how often a failed job is restarted.
        again: called before each restart, with the number of the attempt and the exit codes of the ranks that failed
            on this host, or another host's message.
        logs: torch's specification, which redirects nothing: ranks redirect their own output.
        limits: seconds in which ranks must end after another rank failed, and after this process received a signal.
        local_address: this host's address.
        signals: the signals of this process.
    """

    def __init__(
        self,
        job: LaunchJob,
        ranks: int,
        handler: RendezvousHandler,
        restarts: int,
        again: Callable[[Exits | str, int], object],
        logs: LogsSpecs,
        limits: tuple[int, float],
        local_address: str | None,
        signals: LauncherSignals,
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
        super().__init__(spec, logs_specs=logs, start_method="forkserver")
        self._job, self._again, self._handler = job, again, handler
        self._hosts = handler if isinstance(handler, HostRendezvous) else None
        self._restarts, self._stop_limit, self._signals = restarts, stop, signals
        self._ended: RunResult | None = None
        self._cleared: set[int] = set()  # processes of ranks whose groups were killed

    def launch(self) -> None:
        """Run the ranks until they end.

        Raises:
            ChildFailedError: a rank of this host failed, and no attempt is left.
            JobEnded: another host failed, or is lost.
        """
        result = self.run()
        if result is not None and result.is_failed():
            raise ChildFailedError(name="rank", failures=result.failures)

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        """Run the rendezvous, and write the number of the attempt to the file that ``run_rank`` reads."""
        self._ended = None
        for old in Path(self._job.folder).glob("rank-*.json"):  # of ranks that ended because a host joined or left
            old.unlink(missing_ok=True)
        if self._hosts is not None:
            self._hosts.report_done(False)
        super()._rendezvous(worker_group)
        if isinstance(self._handler, LocalRendezvous | HostRendezvous):
            attempt = self._handler.attempt
            self._remaining_restarts = self._restarts - attempt
        else:
            # With torch's own rendezvous, one host counts a restart where another counts a change of members.
            attempt = self._handler._state_holder.state.round  # type: ignore[attr-defined]
        attempt_file(self._job.folder).write_text(str(attempt))

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        with self._signals.held():
            results: dict[int, Any] = super()._start_workers(worker_group)
        return results

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: float = 30) -> None:
        # ``timeout`` is torch's (from 2.12 on). The launcher has two limits of its own, which count here.
        stopped = isinstance(sys.exception(), SignalException)
        if self._pcontext is not None:  # before torch's own call, whose limit is fixed in torch 2.11
            limit = self._grace if stopped else self._stop_limit
            if stopped and death_sig == signal.SIGINT:
                limit = max(limit, _INTERRUPT_GRACE)
            try:
                self._pcontext.close(death_sig, limit)  # type: ignore[arg-type]
            except SignalException:  # the second Ctrl-C, or another signal while the ranks save
                death_sig = signal.SIGKILL
        super()._shutdown(death_sig)
        self._kill_what_ranks_left()

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self._shutdown()

    @property
    def ranks(self) -> list[int]:
        """Ranks of this host."""
        return [worker.global_rank for worker in self._worker_group.workers]

    def _mark_ranks_that_left(self) -> None:
        """Mark ranks whose process ended with exit status 0, but whose script did not end: no rank waits for them.

        Nor does torch: it would wait without end for the return value of such a process.
        """
        context: Any = self._pcontext
        for index, (rank, process) in enumerate(zip(self.ranks, context._pc.processes, strict=True)):
            if process.exitcode == 0:
                context._return_values.setdefault(index, None)
                if not mark(self._job.folder, "done", rank).exists():
                    mark(self._job.folder, "left", rank).touch()

    def _kill_what_ranks_left(self) -> None:
        """Kill the processes that a rank has started, e.g. workers of a data loader, if it did not end in order."""
        context: Any = self._pcontext
        for rank, process in zip(self.ranks, context._pc.processes if context is not None else (), strict=False):
            orderly = process.exitcode == 0 and mark(self._job.folder, "done", rank).exists()
            if process.exitcode is not None and not orderly and process.pid not in self._cleared:
                self._cleared.add(process.pid)
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)  # each rank leads a group of its own

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        if self._ended is None:
            self._mark_ranks_that_left()
            with self._kill_after_limit():
                result = super()._monitor_workers(worker_group)
            self._kill_what_ranks_left()
        else:
            result = self._ended
        if result.is_failed() and self._remaining_restarts > 0:
            exits = {rank: failure.exitcode for rank, failure in result.failures.items()}
            self._again(exits, self._restarts - self._remaining_restarts + 1)
        elif self._hosts is not None and result.state in (WorkerState.SUCCEEDED, WorkerState.HEALTHY):
            if result.state == WorkerState.SUCCEEDED:
                self._ended = result
                if self._hosts.report_done():
                    return result
            if self._hosts.num_nodes_waiting():  # torch's agent calls it next, and restarts
                why = self._hosts.lost_host() or "ranks of another host failed"
                self._again(why, self._hosts.attempt + 1)
            return RunResult(state=WorkerState.HEALTHY)
        return result

    @contextlib.contextmanager
    def _kill_after_limit(self) -> Iterator[None]:
        """Context in which, if a rank of this host has failed, the others are killed after the limit for their end.

        torch itself sends SIGTERM to them, and waits up to 30 s.
        """
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

    def end_reason(self, seconds: float) -> str | None:
        """Return another host's reason for the end of the job, if it arrives within ``seconds``."""
        return self._hosts.end_reason(seconds) if self._hosts is not None else None

    def close(self, why: str | None) -> None:
        """Leave the rendezvous. If ``why`` is given, the job ends on the other hosts too, for this reason."""
        if self._hosts is not None and why is not None:
            self._hosts.close(why)
        self._handler.shutdown()
