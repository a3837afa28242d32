"""A process that has imported what workers need and forks them on request (B6): imports are paid once a host.

    start     modules preloaded ─▶ one thread, no accelerator open? ─▶ "ready" to the parent, or why not, and the end
    request   Order + log file + gate ─▶ two forks, so that the worker becomes a child of the zygote's own parent
    worker    session, output and environment of its own ─▶ tells its pid through the gate ─▶ waits for the word there
              ─▶ runs as ``python -m <module>``
    end       with its parent, whatever ends that; its workers are not its children and live on

Invariants:
- Nothing is forked unless this process has one thread and no accelerator's device file open: no lock is copied in a
  state that nobody will release, no driver's context is shared.
- A worker runs only after its gate said so. A gate that closes instead (the parent gave up, or died) ends it before
  its first line, so that whoever gives up may start the worker another way.
- A worker's environment is what ``/proc`` shows of it, as after an exec: workers are found and ended by it. It is the
  zygote's with additions, which are written over the zygote's own ``OPEN_RL_SERVICE`` entry; nothing else moves.
- Random numbers of a worker are those of a fresh process: none has been drawn before the fork, what libraries
  seeded while they were imported is seeded anew.

It knows no bus, no job and no service: the parent names the modules.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import importlib
import os
import runpy
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence

import msgspec

MESSAGE_BYTES_MAX = 64 * 1024
GO = b"go"
MARK = "OPEN_RL_SERVICE"
MARK_VALUE = "zygote"
_ROOM_BYTES = 4096
_REPARENTED_WITHIN_S = 5.0
_PR_SET_PDEATHSIG = 1
_DEVICE_FILES = ("/dev/nvidia", "/dev/kfd", "/dev/dri/")


class Ready(msgspec.Struct, frozen=True, kw_only=True):
    """The zygote's only message. ``error``: why it must not fork, in one line; it has ended then."""

    seconds: float = 0.0
    num_modules: int = 0
    error: str = ""


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """A worker to fork: run ``module``, with these variables besides the zygote's own."""

    module: str
    environment: dict[str, str]


class Started(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's message through its gate: it stands, and waits there for GO."""

    pid: int
    parent: int
    error: str = ""


def mark() -> str:
    """The value of OPEN_RL_SERVICE that a zygote must be started with: it keeps room for its workers' variables."""
    return MARK_VALUE + " " * _ROOM_BYTES


def main() -> str | None:
    """Preload the modules named and fork workers until the parent ends: None. In a worker: the module to run."""
    parser = argparse.ArgumentParser(description="Import modules, then fork workers (started by the launcher).")
    parser.add_argument("--control", type=int, required=True, help="descriptor of the socket to the parent")
    parser.add_argument("--parent", type=int, required=True, help="process id of the parent; the zygote ends with it")
    parser.add_argument("modules", nargs="*", help="modules to import before the first fork")
    arguments = parser.parse_args()
    _end_with(arguments.parent)
    channel = socket.socket(fileno=arguments.control)
    channel.set_inheritable(False)
    ready = _preload(arguments.modules)
    channel.send(msgspec.json.encode(ready))
    if ready.error:
        sys.exit(f"zygote: {ready.error}")
    return _serve(channel)


def _preload(modules: Sequence[str]) -> Ready:
    began = time.monotonic()
    environment = dict(os.environ)
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # numpy's starts its threads when it is imported
    os.environ["JE_ARROW_MALLOC_CONF"] = "background_thread:false"  # pyarrow's allocator too, where pandas brings it
    for name in modules:
        try:
            importlib.import_module(name)
        except Exception as error:  # whatever a package raises when it cannot be imported here
            return Ready(error=f"{name} cannot be imported: {type(error).__name__}: {error}")
    os.environ.clear()  # what a module set for itself is not for the workers of another
    os.environ.update(environment)
    # what was imported stays for ever: the collector need not touch (and so copy) its pages in every worker
    gc.collect()
    gc.freeze()
    return Ready(seconds=time.monotonic() - began, num_modules=len(sys.modules), error=unsafe() or "")


def unsafe() -> str | None:
    """Why this process must not fork; None when it may."""
    threads = os.listdir("/proc/self/task")
    if len(threads) > 1:
        return f"{len(threads)} threads run ({', '.join(sorted(_thread_names(threads)))})"
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            file = os.readlink(f"/proc/self/fd/{descriptor}")
            if file.startswith(_DEVICE_FILES):
                return f"{file} is open: an accelerator's driver does not survive a fork"
    return None


def _thread_names(threads: Sequence[str]) -> Iterator[str]:
    """Python's own name of a thread, or the kernel's of one that a library started."""
    known = {str(thread.native_id): thread.name for thread in threading.enumerate()}
    for thread in threads:
        with contextlib.suppress(OSError), open(f"/proc/self/task/{thread}/comm") as file:  # or it has ended meanwhile
            yield known.get(thread, file.read().strip())


def _serve(channel: socket.socket) -> str | None:
    """Fork workers until the parent closes the channel: None. In a worker: the module to run."""
    while True:
        body, descriptors, _, _ = socket.recv_fds(channel, MESSAGE_BYTES_MAX, 2)
        if not body:
            return None
        log, gate_descriptor = descriptors
        with socket.socket(fileno=gate_descriptor) as gate:
            order = msgspec.json.decode(body, type=Order)
            try:
                error = unsafe()
                if error is None and _fork_twice():
                    channel.close()
                    _become_worker(order, log, gate)
                    return order.module
            except OSError as failure:  # no memory, no process left: the closed gate says it
                error = str(failure)
            if error is not None:
                print(f"zygote: no worker forked: {error}", file=sys.stderr, flush=True)
                with contextlib.suppress(OSError):
                    gate.send(msgspec.json.encode(Started(pid=0, parent=0, error=error)))
        os.close(log)


def _fork_twice() -> bool:
    """True in the grandchild, whose parent is about to be the next subreaper above this process: the launcher."""
    between = os.fork()
    if between:
        os.waitpid(between, 0)
        return False
    between = os.getpid()
    try:
        if os.fork():
            os._exit(0)
    except OSError:
        os._exit(1)
    deadline = time.monotonic() + _REPARENTED_WITHIN_S
    while os.getppid() == between and time.monotonic() < deadline:
        time.sleep(0.0005)
    return True


def _become_worker(order: Order, log: int, gate: socket.socket) -> None:
    """All that an exec would have made anew; returns after GO and never without it."""
    error = ""
    try:
        os.setsid()
        for descriptor in (1, 2):
            os.dup2(log, descriptor)
        os.close(log)
        replace_environment(order.environment, arguments=(sys.executable, "-m", order.module))
        sys.argv = [order.module]
        _seed_anew()
    except Exception as failure:  # whatever it is, the parent starts the worker another way
        error = f"{type(failure).__name__}: {failure}"
    try:
        gate.send(msgspec.json.encode(Started(pid=os.getpid(), parent=os.getppid(), error=error)))
        if gate.recv(len(GO)) == GO and not error:
            return
    except OSError:
        pass
    os._exit(0)


def _seed_anew() -> None:
    """Generators that a library made while it was imported must not be the same in every worker."""
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is not None:
        numpy.random.seed()
    if torch is not None:
        torch.default_generator.seed()


def replace_environment(additions: Mapping[str, str], *, arguments: tuple[str, ...] = ()) -> None:
    """Take OPEN_RL_SERVICE away and add variables, for this process and for whoever reads ``/proc/<pid>/environ``.

    ``arguments`` are shown as the command line, as far as they fit into the real one.

    Raises:
        ValueError: a variable is there already with another value, or the room in OPEN_RL_SERVICE is too small.
    """
    changed = [name for name, value in additions.items() if os.environ.get(name, value) != value]
    if changed:
        raise ValueError(f"{', '.join(changed)}: set before the zygote was started, cannot be changed in a worker")
    new = {name: value for name, value in additions.items() if name not in os.environ}
    block = b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in new.items())
    with open("/proc/self/environ", "rb") as file:
        entries = file.read()
    prefix = os.fsencode(MARK) + b"="
    begin = 0 if entries.startswith(prefix) else entries.find(b"\0" + prefix) + 1
    room = entries.find(b"\0", begin) + 1 - begin
    if (begin == 0 and not entries.startswith(prefix)) or len(block) > room:
        raise ValueError(f"{len(block)} bytes of variables do not fit where {MARK} was")
    argument_start, argument_end, environment_start, _ = _memory_layout()
    # the C library forgets its pointer to the old entry before that is written over
    os.environ.pop(MARK)
    os.environ.update(new)
    ctypes.memmove(environment_start + begin, block.ljust(room, b"\0"), room)
    line = b"\0".join(os.fsencode(argument) for argument in arguments) + b"\0"
    size = argument_end - argument_start
    if arguments and len(line) <= size:
        ctypes.memmove(argument_start, line.ljust(size, b"\0"), size)


def _memory_layout() -> tuple[int, int, int, int]:
    """Addresses of this process' arguments and environment: start and end of each (proc(5), fields 48 to 51)."""
    with open("/proc/self/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    argument_start, argument_end, environment_start, environment_end = (int(field) for field in fields[45:49])
    return argument_start, argument_end, environment_start, environment_end


def _end_with(parent: int) -> None:
    """Be killed by the kernel when the parent ends, at once also in the middle of an import."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(0)


if __name__ == "__main__":
    worker = main()
    if worker is not None:
        runpy.run_module(worker, run_name="__main__", alter_sys=True)
