"""A compile process without grammars: a demand says in words what compiling it is like."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from openspec.errors import RequestError
from openspec.grammar.lanes import Work
from openspec.grammar.worker import Start, serve


def burn(seconds: float) -> None:
    """Takes so much processor time."""
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


def work(demand: bytes) -> tuple[bytes, int]:
    """`word` is done at once; burning, sleeping, dying, nesting, taking and refusing are not."""
    name, _, given = demand.decode().partition(" ")
    if name == "burn":
        burn(float(given.split()[0]))
    elif name == "sleep":
        time.sleep(float(given))
    elif name == "die":
        with Path(given).open("a") as file:
            file.write("x")
        os.kill(os.getpid(), signal.SIGKILL)
    elif name == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    elif name == "die_once":
        if not Path(given).exists():
            Path(given).touch()
            os.kill(os.getpid(), signal.SIGSEGV)
    elif name == "kill_process":
        with Path(given).open("a") as file:
            file.write("x")
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(60)
    elif name == "take":
        bytearray(int(given))
    elif name == "nest":
        work(demand)
    elif name == "refuse":
        raise RequestError("it is wrong", "tools" if given else None)
    elif name == "bytes":
        return demand, int(given.split()[0])
    return demand, 100


def begin(_: Start) -> Work:
    """Nothing is loaded."""
    return work


if __name__ == "__main__":
    serve(begin)
