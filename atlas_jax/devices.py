"""Which devices a script runs on, and which of several processes it is: the flags, and what only some processes do."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import sys
import traceback
import zlib
from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from atlas_jax import sharding
from atlas_jax.compile_cache import keep_compiled
from atlas_jax.sharding import Mesh, MeshError

T = TypeVar("T")


class ProcessError(ValueError):
    """Processes that cannot go on together; the message says why."""


@dataclasses.dataclass(frozen=True)
class Devices:
    """A mesh of devices, and this process's place among several. On hosts of one job, only `process_id` differs."""

    mesh: str = ""  # axis=size,... of data, fsdp, expert and tensor, as in tensor=2,data=4; empty: one device
    cpu_devices: int | None = None  # make so many devices of the CPU, to try a mesh; None leaves it alone
    coordinator: str | None = None  # host:port where process 0 listens, if there are several processes
    processes: int | None = None  # how many
    process_id: int | None = None  # which of them this one is, from 0

    def join(self) -> Mesh:
        """Make this process one of those that were asked for, before anything starts JAX's backend; gives the mesh.

        Raises `MeshError` for flags that make no mesh or no group of processes.
        """
        mesh = Mesh.parse(self.mesh)
        sharding.join(self.cpu_devices, self.coordinator, self.processes, self.process_id)
        return mesh


def add_arguments(parser: ArgumentParser) -> None:
    """The flags of `Devices`, for scripts that make do with the standard library."""
    add = parser.add_argument_group("several devices").add_argument
    add("--mesh", default="", help="axis=size,... of data, fsdp, expert, tensor, as in tensor=2,data=4 [one device]")
    add("--cpu-devices", type=int, metavar="N", help="make so many devices of the CPU, to try a mesh")
    add("--coordinator", metavar="HOST:PORT", help="where process 0 listens, if there are several processes")
    add("--processes", type=int, metavar="P", help="how many")
    add("--process-id", type=int, metavar="I", help="which of them this one is, from 0")


def taken_from(given: dict[str, Any]) -> Devices:
    """The flags of `add_arguments`, taken out of what a parser gave."""
    return Devices(**{field.name: given.pop(field.name) for field in dataclasses.fields(Devices)})


def begin(mesh: Mesh, say: Callable[[str], None]) -> None:
    """Keep compiled programs, and let the first process say what it runs on; call it when the backend may start.

    Raises `MeshError` where the devices are too few, or where some process would have none of the mesh.
    """
    mesh.build()
    count, devices = jax.process_count(), jax.devices()
    if count > 1 and mesh.size < len(devices):
        raise MeshError(
            f"{count} processes have {len(devices)} devices and the mesh is {mesh}: a mesh of several processes takes "
            "all of their devices"
        )
    if not first():
        return
    of = f" of {count} processes" if count > 1 else ""
    say(f"mesh: {mesh} ({mesh.size} x {devices[0].device_kind}{of})")
    # A process that finds its programs would wait for those that compile them, and these for what it has to say.
    several = "compiled programs are not kept: several processes compile together"
    say(several if count > 1 else keep_compiled().describe())


def first() -> bool:
    """Whether this process is the one that prints and writes files."""
    return jax.process_index() == 0


def by_first(make: Callable[[], T]) -> T | None:
    """What `make` gives in the first process; None in the others, which wait for it to end and then find its files.

    Raises `ProcessError` in the others where it failed in the first, so that nobody waits for what never comes.
    """
    if jax.process_count() == 1:
        return make()
    result, done = None, np.int32(0)
    try:
        if first():
            result, done = make(), np.int32(1)
    finally:
        done = multihost_utils.broadcast_one_to_all(done)
    if not done:
        raise ProcessError("process 0 has failed and says why; this one ends with it")
    return result


def agree(what: str, value: Any) -> None:
    """Raises `ProcessError` in all processes where they don't have the same `value`, by its `repr`."""
    if jax.process_count() > 1:
        marks = multihost_utils.process_allgather(np.uint32(zlib.crc32(repr(value).encode())))
        if len(set(marks.tolist())) > 1:
            raise ProcessError(f"the processes don't have the same {what}: give all of them the same files and flags")


def share(items: Sequence[T], text: str) -> list[T]:
    """The part of a job that needs no other part: of `text` "i/n" every n-th item from the i-th on (from 0); "" is all.

    Raises `ProcessError` for anything else.
    """
    if not text:
        return list(items)
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if found is None or int(found[1]) >= int(found[2]):
        raise ProcessError(f"share {text!r} is not i/n with i from 0 to n - 1, as in 0/4")
    return list(items[int(found[1]) :: int(found[2])])


@contextlib.contextmanager
def ending(*expected: type[Exception]) -> Iterator[None]:
    """Around a script's `main`: errors that are `expected` end it with their message, without a traceback.

    One of several processes ends at once, whatever is raised: leaving in order, it would wait for all the others to
    leave, and these for what it should have sent them. They notice that it is gone: where their devices wait for its
    own as soon as the connection breaks, elsewhere when JAX's coordinator hears nothing of it for 100 s.
    """
    try:
        yield
    except expected as error:
        if not jax.distributed.is_initialized():
            sys.exit(f"error: {error}")
        _leave(f"error: {error}")
    except (Exception, KeyboardInterrupt):
        if not jax.distributed.is_initialized():
            raise
        traceback.print_exc()
        _leave(
            f"process {jax.process_index()} of {jax.process_count()} cannot go on; where a connection broke, another "
            "one was lost. Start all of them again: a training run goes on from its last checkpoint"
        )


def _leave(message: str) -> None:
    print(message, file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)
