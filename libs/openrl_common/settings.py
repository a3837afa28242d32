"""Settings (E19): a flag and its ``OPEN_RL_*`` environment variable, declared once, validated at start.

A :class:`Setting` decorates a click command; the flag wins over the variable, the variable over the default. Errors are
usage errors (exit code 2) that name the flag, the variable and the value. Settings that several services share are
declared here, so that one name means one thing everywhere. There is no settings file.

    @click.command()
    @settings(NATS_URL, HOME, MAX_SEATS_PER_CLAIM)
    def main(**parameters: object) -> None:
        config = from_parameters(LedgerSettings, parameters)      # a frozen dataclass with those field names
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import click

from openrl_common.quantities import MIB, parse_bytes, parse_seconds

Command = TypeVar("Command", bound=Callable[..., Any])
Config = TypeVar("Config")

_DEVICES_MAX = 1024


@dataclasses.dataclass(frozen=True)
class Setting:
    """One flag and its environment variable. Calling it decorates a click command.

    Attributes:
        flag: for example ``--nats-url``; the variable is then ``OPEN_RL_NATS_URL``.
        name: the keyword the command receives and the field of its settings dataclass, units last.
        default: as a user would write it; shown in ``--help``.
    """

    flag: str
    name: str
    type: click.ParamType[Any]
    default: str | None
    help: str
    required: bool = False

    @property
    def variable(self) -> str:
        return "OPEN_RL_" + self.flag.removeprefix("--").replace("-", "_").upper()

    def __call__(self, command: Command) -> Command:
        return click.option(
            self.flag,
            self.name,
            type=self.type,
            default=self.default,
            required=self.required,
            envvar=self.variable,
            show_default=self.default is not None,
            show_envvar=True,
            help=self.help,
        )(command)

    def with_default(self, default: str) -> Setting:
        """The same flag and variable with another default (as a user would write it)."""
        return dataclasses.replace(self, default=default)


def setting(
    flag: str,
    *,
    type: click.ParamType[Any] | None = None,
    default: str | None = None,
    help: str,
    name: str = "",
    required: bool = False,
) -> Setting:
    """Declare a setting; ``name`` defaults to the flag's words, ``type`` to text."""
    return Setting(
        flag=flag,
        name=name or flag.removeprefix("--").replace("-", "_"),
        type=type or click.STRING,
        default=default,
        help=help,
        required=required,
    )


def settings(*declared: Setting) -> Callable[[Command], Command]:
    """Decorate a command with several settings, listed in ``--help`` in the order given."""

    def decorate(command: Command) -> Command:
        for one in reversed(declared):
            command = one(command)
        return command

    return decorate


def from_parameters(config_class: type[Config], parameters: Mapping[str, object]) -> Config:
    """Build a settings dataclass from the parameters of its command; other parameters are left out.

    Raises:
        TypeError: the command lacks a setting that the dataclass needs (a fault of the program, not of the user).
    """
    if not dataclasses.is_dataclass(config_class):
        raise TypeError(f"{config_class.__name__} is not a dataclass")
    names = [field.name for field in dataclasses.fields(config_class)]
    return config_class(**{name: parameters[name] for name in names if name in parameters})


# --- types --------------------------------------------------------------------------------------------------------


class Bytes(click.ParamType[int]):
    """A size such as 79.65GiB; bytes."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        try:
            return parse_bytes(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)


class Seconds(click.ParamType[float]):
    """A duration such as 15m; seconds."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        try:
            return parse_seconds(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)


class WholeNumber(click.ParamType[int]):
    """A whole number ≥ ``minimum``; fractions, signs and words are refused (S1)."""

    name = "number"

    def __init__(self, minimum: int = 0) -> None:
        self.minimum = minimum

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        text = str(value).strip()
        if not (text.isascii() and text.isdigit() and len(text) <= 18) or int(text) < self.minimum:
            self.fail(f"{text[:40]!r} must be a whole number of at least {self.minimum}", param, ctx)
        return int(text)


class Switch(click.ParamType[bool]):
    """``on`` or ``off``."""

    name = "on|off"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> bool:
        if isinstance(value, bool):
            return value
        words = {
            "on": True,
            "true": True,
            "1": True,
            "yes": True,
            "off": False,
            "false": False,
            "0": False,
            "no": False,
        }
        if str(value).strip().lower() not in words:
            self.fail(f"{str(value)[:40]!r} must be on or off", param, ctx)
        return words[str(value).strip().lower()]


class Devices(click.ParamType[tuple[int, ...]]):
    """Declared devices (B2), ``6x79.65GiB,2x22.5GiB``: the bytes of each, in the order written. Empty = none."""

    name = "devices"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        devices: list[int] = []
        for count, device_bytes in _counted_sizes(self, str(value), param, ctx):
            if device_bytes < MIB:  # a forgotten unit
                self.fail(
                    f"{str(value)[:40]!r}: a device of {device_bytes} bytes: write for example 2x24GiB", param, ctx
                )
            if len(devices) + count > _DEVICES_MAX:
                self.fail(f"{str(value)[:40]!r} declares more than {_DEVICES_MAX} devices on one node", param, ctx)
            devices.extend([device_bytes] * count)
        return tuple(devices)


class NodeShapes(click.ParamType[tuple[tuple[int, int], ...]]):
    """Shapes of nodes (W4), ``8x79.65GiB,1x22.5GiB``: count and bytes of the devices of each. Empty = none."""

    name = "shapes"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[tuple[int, int], ...]:
        return value if isinstance(value, tuple) else tuple(_counted_sizes(self, str(value), param, ctx))


def _counted_sizes(
    of: click.ParamType[Any], text: str, param: click.Parameter | None, ctx: click.Context | None
) -> Iterator[tuple[int, int]]:
    """``2x80GiB,1x24GiB`` as counts and bytes; ``of`` tells what is wrong."""
    for part in text.split(",") if text.strip() else []:
        count_text, times, size_text = part.strip().partition("x")
        if not times or not (count_text.isascii() and count_text.isdigit() and len(count_text) <= 6):
            of.fail(f"{part.strip()[:40]!r} is not COUNTxSIZE: write for example 6x79.65GiB,2x22.5GiB", param, ctx)
        try:
            device_bytes = parse_bytes(size_text)
        except ValueError as error:
            of.fail(f"{part.strip()[:40]!r}: {error}", param, ctx)
        if int(count_text) == 0 or device_bytes == 0:
            of.fail(f"{part.strip()!r} declares nothing: count and size must be at least 1", param, ctx)
        yield int(count_text), device_bytes


class NatsUrl(click.ParamType[str]):
    """One or more comma-separated ``nats://`` or ``tls://`` addresses."""

    name = "url"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        for url in str(value).split(","):
            try:
                parts = urlsplit(url.strip())
                usable = parts.scheme in ("nats", "tls", "ws", "wss") and bool(parts.hostname) and parts.port != 0
            except ValueError:
                usable = False
            if not usable:
                self.fail(f"{url[:80]!r} is not a NATS address: write for example nats://127.0.0.1:4222", param, ctx)
        return str(value)


class Directory(click.ParamType[Path]):
    """A directory, ``~`` expanded, made absolute; it need not exist yet, but must not be a file."""

    name = "directory"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        try:
            path = Path(value).expanduser().absolute()
        except RuntimeError as error:
            self.fail(f"{str(value)!r}: {error}", param, ctx)
        if path.exists() and not path.is_dir():
            self.fail(f"{str(path)!r} is a file: name a directory", param, ctx)
        return path


BYTES = Bytes()
SECONDS = Seconds()
SWITCH = Switch()

# --- settings that several services share ---------------------------------------------------------------------------

NATS_URL = setting("--nats-url", type=NatsUrl(), default="nats://127.0.0.1:4222", help="Where NATS answers.")
HOME = setting(
    "--home", type=Directory(), default="~/.openrl", help="Directory of state, logs and weights; workers must share it."
)
LOG_LEVEL = setting(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"], case_sensitive=False),
    default="info",
    help="Least severe level that is logged.",
)
LOG_FORMAT = setting(
    "--log-format",
    type=click.Choice(["auto", "json", "console"]),
    default="auto",
    help="json lines, console, or auto: console on a terminal, json elsewhere.",
)
HEALTH_HOST = setting("--health-host", default="127.0.0.1", help="Address that /livez, /readyz and /metrics listen on.")
HEALTH_PORT = setting(
    "--health-port",
    type=click.IntRange(0, 65535),
    default="0",
    help="Port of /livez, /readyz, /metrics; 0 = a free one, logged.",
)
MAX_SEATS_PER_CLAIM = setting(
    "--max-seats-per-claim",
    type=WholeNumber(minimum=0),
    default="0",
    help="Seat limit of every claim: 0 = no limit, 1 = exclusive placement (every claim holds its founder alone). "
    "A lowered limit evicts nobody; it is in force once every ledger replica has it.",
)
PLACEMENT_STRATEGY = setting(
    "--placement-strategy",
    type=click.Choice(["binpack", "spread"]),
    default="binpack",
    help="binpack: share a claim first, found an own one when none accepts; spread: the other way round.",
)
OWNER_AFFINITY = setting(
    "--owner-affinity",
    type=SWITCH,
    default="on",
    help="Among the smallest devices that fit, prefer a claim that already seats the same owner's trainer or sampler.",
)
PLACEMENT_TIMEOUT_S = setting(
    "--placement-timeout",
    name="placement_timeout_s",
    type=SECONDS,
    default="15m",
    help="A workload fails when it is not placed for this long, counted from submission or the loss of a placement; "
    "waiting for a seat counts too, time spent placed does not. 0 = never.",
)
WEDGE_GRACE_S = setting(
    "--wedge-grace",
    name="wedge_grace_s",
    type=SECONDS,
    default="5m",
    help="A placed worker that has not said a word for this long gives its seat up and avoids that node and claim for "
    "10 minutes; pulling its image and loading its model do not count. 0 = never.",
)
LORA_JOBS_PER_RUNTIME = setting(
    "--lora-jobs-per-runtime", type=WholeNumber(minimum=1), default="8", help="Most jobs that share one LoRA runtime."
)
LORA_IDLE_S = setting(
    "--lora-idle",
    name="lora_idle_s",
    type=SECONDS,
    default="10m",
    help="How long a LoRA runtime is kept after its last job.",
)
TRAINER_HOST_BASE_BYTES = setting(
    "--trainer-host-base",
    name="trainer_host_base_bytes",
    type=BYTES,
    default="20GiB",
    help="Constant of a trainer's host memory in the estimator; lower it on small hosts.",
)
SAMPLER_HOST_BASE_BYTES = setting(
    "--sampler-host-base",
    name="sampler_host_base_bytes",
    type=BYTES,
    default="24GiB",
    help="Constant of a sampler's host memory in the estimator; lower it on small hosts.",
)
DEVICES = setting(
    "--devices",
    type=Devices(),
    default="",
    help="Declare devices on a machine without GPUs, for example 6x79.65GiB,2x22.5GiB. Empty: ask NVML.",
)
UPDATE_METHOD = setting(
    "--update-method",
    type=click.Choice(["streamed", "reload", "patch"]),
    default="streamed",
    help="How samplers replace full weights, fixed when a job is placed (its room is counted). streamed: slice by "
    "slice, the chunk beside them; reload: the engine's own loader, which stages whole tensors; patch: the same, and "
    "deltas by vLLM's patch loader. The torch engine streams whatever is set.",
)
UPDATE_CHUNK_BYTES = setting(
    "--update-chunk-bytes",
    type=BYTES,
    default="256MiB",
    help="Memory that a streamed update takes beside the weights at most.",
)
HOST_MEMORY_BYTES = setting(
    "--host-memory",
    name="host_memory_bytes",
    type=BYTES,
    default="0",
    help="Host memory that workers may be promised, for example 512GiB. 0: what this machine has.",
)
WARM_START = setting(
    "--warm-start",
    type=click.Choice(["auto", "on", "off"]),
    default="auto",
    help="Fork workers from a process that has imported torch and transformers already (some 350 MB of host memory, "
    "shared with the workers). auto: on when the devices are declared, off with GPUs.",
)
