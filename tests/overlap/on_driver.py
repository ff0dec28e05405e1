"""`python -m tests.overlap.on_driver`: calls of a rank, as they reach the driver, and as the protocol says, as JSON."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from maskc.diagnostics import MaskcError
from maskc.runtime import comm, hopper, hopper_bwd, overlap
from maskc.runtime.overlap import STOPPED
from maskc.runtime.protocol import Turn
from maskc.runtime.transport import write_word
from tests.gpu2.ways import leaving
from tests.overlap import stand_in
from tests.overlap.driver_rank import BACK, CASES, FIRST, KEPT, RANKS, Case, Rank
from tests.overlap.stand_in import CAPTURING, install, on_gpu

ROUNDS = ("", "", "", "strides", "", "stream", "stream", "")
"""How each call comes again: the first time kernels are loaded, later ones may find things ready. With other strides, or another
current stream."""
ANOTHER = 9


def trace(case: Case, rank: int) -> list[dict[str, Any]]:
    """Of every call what was enqueued and what was to be; of the first ones what came too late. Between them others' calls are
    counted."""
    running, found = Rank(case, rank), []
    owners = running.plans[rank].sources
    gates, sent = Gates(), dict[str, dict[tuple[str, int], int]]()
    overlap._warm.clear()
    with leaving(case.way), ExitStack() as later:
        for module in (hopper, hopper_bwd):
            later.enter_context(mock.patch.object(module, "GateTables", gates.noted(module.GateTables)))
        for again, other in enumerate(ROUNDS):
            running.renew(heads_first=other == "strides")
            on = stand_in.Stream(handle=ANOTHER) if other == "stream" else stand_in.current[0]
            for kind in case.calls:
                last = dict(running.epochs._last)
                gates.made.clear()
                with comm.count_traffic() as ledger, stand_in.Inside(on):
                    lines = _log(partial(running.call, kind))
                assert sent.setdefault(kind, ledger.sent) == ledger.sent, f"{kind} sent other bytes in round {again}"
                if again == 0:
                    ended = any(line.startswith("torch waits") for line in before_words(lines))
                    late = [*made_late(lines), *gates.wrong(running, kind), *["not in the open"] * (len(gates.made) > 1 > ended)]
                    late = late if running.sizes[0][0] else []
                    found.append({"call": f"{kind}, first", "enqueued": late, "wanted": []})
                    continue
                before = tuple((o, last[o]) for o in owners if o in last) if kind in BACK else ()
                turn = Turn(running.epochs.epoch, before)
                assert running.made.epoch == turn.epoch
                assert running.made.queues.handle("compute") == on.cuda_stream
                both = running.enqueued(lines, kind, on.cuda_stream), running.wanted(kind, turn)
                if running.shared(kind):  # what is summed for the next piece may be enqueued before words of this one
                    both = sorted(both[0], key=itemgetter(0)), sorted(both[1], key=itemgetter(0))
                found.append({"call": f"{kind}, round {again}", "enqueued": both[0], "wanted": both[1]})
            running.epochs.begin(owners[: again % 3])
        if "b" in case.calls:
            found.append({"call": "b, again", "enqueued": made_anew(running, gates), "wanted": []})
        for kind in case.calls:
            gave_up(running, kind)
            reached = [line for line in _log(partial(captured, running, kind)) if not line.startswith(("record", "follow"))]
            found.append({"call": f"{kind}, captured", "enqueued": reached, "wanted": []})
    return found


class Gates:
    """What kernels are told to wait for, as it is made."""

    def __init__(self) -> None:
        self.made: list[Any] = []
        self.known: set[bool] = set()

    def noted(self, kind: type) -> Callable[..., Any]:
        def make(*fields: Any) -> Any:
            self.made.append(kind(*fields))
            return self.made[-1]

        return make

    def wrong(self, running: Rank, kind: str) -> list[str]:
        """Slots below `own` are there: when a kernel is launched in the open all are, for nothing comes then; else own ones, and
        all where keys were kept. Once in the open, where a kernel is new."""
        cut, made = running.cut_of(kind), self.made
        first, own, every = cut.first if kind in BACK else 0, cut.plan.own, len(cut.plan.slots)
        gated = kind not in FIRST
        wanted = [first + every] * (gated and (kind in BACK) not in self.known)
        wanted += [first + (every if kind in KEPT else own)] * gated
        self.known |= {kind in BACK} if gated else set()
        found = [gate.own for gate in made]
        late = [gate.foreign for gate in made if kind in BACK and gate.foreign != first + own]
        return [f"{kind}: {found} slots are there, not {wanted}"] * (found != wanted) + [f"{kind}: {late}"] * bool(late)


def before_words(lines: Sequence[str]) -> Sequence[str]:
    """What comes before anything may wait."""
    return lines[: next(i for i, line in enumerate(lines) if line.startswith(("wait", "write", "operation", "copy", "follow")))]


def made_late(lines: Sequence[str]) -> list[str]:
    """Tables that come to the GPU when something may wait already: their memory on the host might have to be waited for."""
    return [line for line in lines[len(before_words(lines)) :] if line.startswith("torch brings")]


def _log(call: Callable[[], object]) -> list[str]:
    log = Path(os.environ["STUB_DRIVER_LOG"])
    log.write_text("")
    call()
    return log.read_text().splitlines()


def made_anew(running: Rank, gates: Gates) -> list[str]:
    """Calls whose kernels read copies, or more than those of others, are made in full each time; those of others are not."""
    out, lse, dout = running.out, running.lse, running.dout
    if lse.shape[2] < 2:  # else lse by rows is dense
        return []
    others = {
        "the same": {},
        "a gradient of lse": {"dlse": on_gpu(torch.zeros(lse.shape))},
        "one number as gradient": {"dout": dout[:1, :1, :1, :1].expand(dout.shape)},
        "an output in fp32": {"out": on_gpu(torch.zeros(out.shape))},
        "lse by rows": {"lse": on_gpu(torch.zeros(lse.transpose(1, 2).shape).transpose(1, 2))},
    }
    wrong = []
    running.made.forward(running.local, running.q, running.k, running.v, 0.1)
    for new in ({"scale": 0.2}, {"deterministic": True}):
        gates.made.clear()
        running.made.backward(running.local, running.q, running.k, running.v, out, lse, dout, **{"scale": 0.1, **new})
        wrong += [] if len(gates.made) == 1 + ("deterministic" in new) else [str(new)]
    gates.made.clear()
    running.made.forward(running.local, running.q, running.k, running.v, 0.2)
    wrong += [] if gates.made else ["another scale"]
    for name, other in others.items():
        call: dict[str, Any] = {"out": out, "lse": lse, "dout": dout, "scale": 0.1, **other}
        for _ in range(2):
            gates.made.clear()
            running.made.backward(running.local, running.q, running.k, running.v, **call)
        wrong += [name] if bool(gates.made) == (name == "the same") else []
    return wrong


def gave_up(running: Rank, kind: str) -> None:
    """The call after one in which a wait ended raises, and the next one is as always."""
    write_word(running.made.words.failed.data_ptr(), STOPPED)
    with pytest.raises(MaskcError, match="M721"):
        running.call(kind)
    running.call(kind)


def captured(running: Rank, kind: str) -> None:
    """A call inside a CUDA graph is refused."""
    os.environ[CAPTURING] = "1"
    try:
        with pytest.raises(MaskcError, match="M722"):
            running.call(kind)
    finally:
        del os.environ[CAPTURING]


def main() -> None:
    with install():
        json.dump({f"{case.name}, rank {rank}": trace(case, rank) for case in CASES for rank in RANKS}, sys.stdout)


if __name__ == "__main__":
    main()
