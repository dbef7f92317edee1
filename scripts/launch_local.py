"""Starts a script in several processes of this machine that work as one, as several hosts would.

    python scripts/launch_local.py --processes 2 -- scripts/check_mesh.py --devices 2 --mesh tensor=2,data=2

The script must know `--coordinator`, `--processes` and `--process-id`, which are added to its arguments
(`jax.distributed.initialize` gets them). What the first process prints is printed; what the others print goes to
stderr, marked. If one of them is lost, all are ended with a message, since the others would wait for it forever; a
training run started again goes on from its last checkpoint. Ctrl-C ends all.

On two hosts there is nothing to launch: start the script on each, the same command but for its number, with a
coordinator that both can reach and a folder that both can see where it writes checkpoints:

    host-a$ python scripts/check_mesh.py --mesh data=2,tensor=8 --coordinator host-a:8476 --processes 2 --process-id 0
    host-b$ python scripts/check_mesh.py --mesh data=2,tensor=8 --coordinator host-a:8476 --processes 2 --process-id 1
"""

import argparse
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

PATIENCE_S = 5.0  # between asking a process to end and ending it


class LaunchError(RuntimeError):
    """A process was lost; the message says which and how."""


@dataclass(frozen=True)
class Config:
    """How many processes of which command."""

    command: tuple[str, ...]  # a Python script and its arguments
    processes: int = 2


def main(config: Config) -> None:
    """Runs the processes to their end. Raises `LaunchError` where one of them is lost."""
    coordinator = f"localhost:{free_port()}"
    running: list[subprocess.Popen[str]] = []
    try:
        for i in range(config.processes):
            flags = ["--coordinator", coordinator, "--processes", str(config.processes), "--process-id", str(i)]
            own = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT} if i else {}
            running.append(subprocess.Popen([sys.executable, *config.command, *flags], text=True, **own))
        tellers = [threading.Thread(target=tell, args=(i, process)) for i, process in enumerate(running) if i]
        for teller in tellers:
            teller.start()
        wait(running)
        for teller in tellers:
            teller.join()
    finally:
        end(running)


def wait(running: Sequence[subprocess.Popen[str]]) -> None:
    """Until all have ended well. Raises `LaunchError` as soon as one has not."""
    codes: list[int | None] = [None]
    while None in codes:
        time.sleep(0.05)
        codes = [process.poll() for process in running]
        for i, code in enumerate(codes):
            if code:
                how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit status {code}"
                raise LaunchError(
                    f"process {i} of {len(running)} {how}, so all of them were ended; a training run goes on from its "
                    "last checkpoint when it is started again"
                )


def end(running: Sequence[subprocess.Popen[str]]) -> None:
    """Ask those that still run to end, then end them."""
    for process in running:
        process.terminate()
    for process in running:
        try:
            process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def tell(i: int, process: subprocess.Popen[str]) -> None:
    """Pass on what a process prints."""
    assert process.stdout is not None
    for line in process.stdout:
        print(f"[{i}] {line}", end="", file=sys.stderr, flush=True)


def free_port() -> int:
    """A port that nobody listens at (nobody else should take it before the first process does)."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def parse(args: Sequence[str] | None = None) -> Config:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=Config.processes, help="[%(default)s]")
    parser.add_argument("command", nargs="+", help="a Python script and its arguments, behind --")
    given = parser.parse_args(args)
    if given.processes < 1:
        parser.error(f"--processes is {given.processes}; at least one must run")
    return Config(tuple(given.command), given.processes)


if __name__ == "__main__":
    try:
        main(parse())
    except LaunchError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("interrupted: all processes were ended")
