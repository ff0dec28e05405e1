"""Jobs on forked workers, so that one that hangs, crashes or loses its GPU costs itself and nothing else.

Workers are forked from a process that has imported everything and holds no CUDA context: twelve of them cost one import
and share its memory. All take from one queue. Whatever the jobs do, `run_jobs` is back by its deadline.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import re
import signal
import sys
import tempfile
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import IO

LONG = 3.0
"""Seconds from which a job counts as long: those start first, so that none of them is the tail."""
FATAL = ("CUDA error", "CUDA driver error", "illegal", "launch failure", "CUDA_ERROR")
"""In a problem: the context is gone, and whatever this worker ran next would fail with it."""
_FRAME = re.compile(r'File "([^"]+)", line (\d+) in (\S+)')
"""Of a dump by faulthandler, innermost first."""
STARTS = 3
"""Failed starts in a row after which a worker is given up."""


@dataclass(frozen=True)
class Job:
    """run returns "" or what is wrong. Jobs of a kind share what they load. expected: seconds."""

    name: str
    kind: str
    run: Callable[[], str]
    expected: float = 1.0


@dataclass(frozen=True)
class Outcome:
    """problem: "" where the job was right. Without a verdict, and `ran` False, where the deadline came before its end."""

    name: str
    problem: str
    seconds: float
    ran: bool = True


class Queue:
    """What is left: long jobs first, then a worker stays with the kind that it had, then the kind with most to do."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        ordered = sorted(range(len(jobs)), key=lambda i: -jobs[i].expected)
        self._jobs = jobs
        self._long = deque(i for i in ordered if jobs[i].expected >= LONG)
        self._kinds: dict[str, deque[int]] = {}
        for i in ordered[len(self._long) :]:
            self._kinds.setdefault(jobs[i].kind, deque()).append(i)

    def take(self, kind: str | None) -> int | None:
        """The number of the next job for a worker whose last one was of this kind; None when nothing is left."""
        if self._long:
            return self._long.popleft()
        left = {k: sum(self._jobs[i].expected for i in numbers) for k, numbers in self._kinds.items() if numbers}
        if not left:
            return None
        return self._kinds[kind if kind in left else max(left, key=left.__getitem__)].popleft()

    def __bool__(self) -> bool:
        return bool(self._long) or any(self._kinds.values())


@dataclass
class Worker:
    """A forked process and group of its own. What it prints goes to a file, whose end tells why it died."""

    environment: Mapping[str, str]
    pid: int = 0
    about: str = ""  # what `begin` returned in it
    job: int | None = None
    kind: str | None = None
    since: float = 0.0
    limit: float = 0.0  # seconds from `since`, for the job or the start
    failed_starts: int = 0
    pipe: Connection = field(init=False)
    log: IO[bytes] = field(init=False)

    def start(self, jobs: Sequence[Job], begin: Callable[[], str], limit: float) -> None:
        self.log = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as the process
        self.pipe, theirs = Pipe()
        self.about, self.job, self.since, self.limit = "", None, time.monotonic(), limit
        sys.stdout.flush()
        self.pid = os.fork()
        with suppress(OSError):  # both sides say it, whoever comes first: it is killed with all that it started
            os.setpgid(self.pid, self.pid)
        if self.pid == 0:
            try:
                self.pipe.close()
                _serve(theirs, self.environment, self.log.fileno(), jobs, begin)
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(1)  # nothing that the parent registered for its end is to run here
        theirs.close()

    def give(self, number: int, job: Job, limit: float) -> None:
        self.job, self.kind, self.since, self.limit = number, job.kind, time.monotonic(), limit
        with suppress(OSError):  # it died since its last answer: the next look at the pipe finds the end
            self.pipe.send(number)

    def kill(self, ask: bool = False) -> str:
        """Ends the process and what it started, and waits for nothing; the last that it printed. ask: where it is, first."""
        with suppress(ProcessLookupError):
            if ask:
                os.kill(self.pid, signal.SIGUSR1)
                time.sleep(0.1)
            os.killpg(self.pid, signal.SIGKILL)
        self.pipe.close()
        self.log.seek(0)
        said = self.log.read().decode(errors="replace")
        self.log.close()
        if ask and (frames := _FRAME.findall(said)):
            return ", in " + " < ".join(f"{Path(file).name}:{line} {function}" for file, line, function in frames[:6])
        return f", after it said: {' '.join(said.split())[-300:]}" if said.strip() else ""

    def status(self) -> str:
        """How a process that closed its pipe ended; a driver may hold it a little longer."""
        for _ in range(200):
            found, status = os.waitpid(self.pid, os.WNOHANG)
            if found:
                return f"exit status {os.waitstatus_to_exitcode(status)}"
            time.sleep(0.005)
        return "it does not end"


def run_jobs(
    jobs: Sequence[Job],
    environments: Sequence[Mapping[str, str]],
    report: Callable[[Outcome], None],
    *,
    begin: Callable[[], str] = str,
    limit: float,
    start_limit: float,
    deadline: float,
) -> set[str]:
    """Reports every job once, in the order of their ends; what `begin` said in the workers.

    environments: variables of each worker, one worker each. begin: runs first in a worker. limit, start_limit: seconds of
    a job and of `begin`. deadline: of time.monotonic().
    """
    queue, said = Queue(jobs), set[str]()
    workers = [Worker(environment) for environment in environments[: len(jobs)]]
    for worker in workers:
        worker.start(jobs, begin, start_limit)
    try:
        while workers and time.monotonic() < deadline:
            for worker in [w for w in workers if w.job is None]:
                if not queue:
                    worker.kill()
                    workers.remove(worker)
                elif worker.about and (number := queue.take(worker.kind)) is not None:
                    worker.give(number, jobs[number], limit)
            patience = min([deadline, *(w.since + w.limit for w in workers)]) - time.monotonic()
            heard = wait([w.pipe for w in workers], max(0.0, patience)) if workers else []
            for worker in list(workers):
                lost = False
                if worker.pipe in heard:
                    lost = _hear(worker, jobs, report, said)
                elif lost := time.monotonic() > worker.since + worker.limit:
                    _lose(worker, jobs, report, f"no answer within {worker.limit:.0f} s", ask=True)
                if lost and queue and worker.failed_starts < STARTS:
                    worker.start(jobs, begin, start_limit)
                elif lost:
                    workers.remove(worker)
    finally:
        for worker in workers:
            if worker.job is not None:
                after = round(time.monotonic() - worker.since, 3)
                told = f"cut after {after:.1f} s by the deadline" + worker.kill(ask=True)
                report(Outcome(jobs[worker.job].name, told, after, ran=False))
            else:
                worker.kill()
        while (number := queue.take(None)) is not None:
            report(Outcome(jobs[number].name, "no time was left", 0.0, ran=False))
    return said


def _hear(worker: Worker, jobs: Sequence[Job], report: Callable[[Outcome], None], said: set[str]) -> bool:
    """Takes what a worker sent; whether the worker is gone."""
    try:
        text, seconds = worker.pipe.recv()
    except (EOFError, OSError):
        _lose(worker, jobs, report, f"the worker died, {worker.status()}")
        return True
    if worker.job is None:
        worker.about, worker.failed_starts = text, 0
        said.add(text)
        return False
    report(Outcome(jobs[worker.job].name, text, seconds))
    worker.job = None
    if any(word in text for word in FATAL):
        worker.kill()
        return True
    return False


def _lose(worker: Worker, jobs: Sequence[Job], report: Callable[[Outcome], None], why: str, ask: bool = False) -> None:
    """A worker that died or hangs: ended, and what it had in hand is told."""
    seconds = time.monotonic() - worker.since
    told = why + worker.kill(ask)
    if worker.job is not None:
        report(Outcome(jobs[worker.job].name, told, round(seconds, 3)))
    else:
        worker.failed_starts += 1
        print(f"a worker did not start: {told}", flush=True)


# ---------------------------------------------------------------- in the worker


def _serve(pipe: Connection, environment: Mapping[str, str], log: int, jobs: Sequence[Job], begin: Callable[[], str]) -> None:
    """Sends what `begin` said, then runs jobs by their numbers until it is killed."""
    faulthandler.register(signal.SIGUSR1)  # tells where it is, whatever it waits for
    with suppress(OSError, AttributeError):  # Linux: end with the parent, however that ends
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(environment)
    pipe.send((begin() or "ready", 0.0))
    while True:
        job = jobs[pipe.recv()]
        started = time.perf_counter()
        try:
            problem = job.run()
        except Exception as error:
            problem = f"{type(error).__name__}: {str(error)[:300]}"
        pipe.send((problem, round(time.perf_counter() - started, 3)))
