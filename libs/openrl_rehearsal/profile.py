"""Profile files: how long everything takes that a rehearsal does not run, and where each figure comes from.

JSON or TOML, by the file's suffix. Every time is a ``Figure``: seconds, a basis and a sentence. The bases:

    measured   somebody timed exactly this
    derived    computed from measured figures (scaled by bytes, or the difference of two)
    assumed    nobody timed it; a figure of the right size
    fitted     chosen so that a rehearsal agrees with a result that is named

Unknown fields are refused: a typo must not silently leave a default in force.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path

import msgspec

from openrl_common.errors import Rejected
from openrl_common.records import JobKind, Role
from openrl_placement.estimator import Model

REFERENCE = Path(__file__).parent / "profiles" / "reference.json"
_FILE_BYTES_MAX = 4 * 1024 * 1024
_SECONDS_MAX = 10 * 86_400.0
_BYTES_PER_VALUE = 2


class Basis(StrEnum):
    MEASURED = "measured"
    DERIVED = "derived"
    ASSUMED = "assumed"
    FITTED = "fitted"


class Part(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of everything in a profile."""


class Figure(Part, frozen=True, kw_only=True):
    seconds: float
    basis: Basis
    why: str = ""


class Phase(Part, frozen=True, kw_only=True):
    """One phase of a worker's start.

    Attributes:
        cold: instead of ``time`` for the first worker of a node that reads this model's files; None = no difference.
        on_device: it holds the device: under turns nobody else may use it meanwhile.
        busy: part of the time in which the device really computes; what co-residents overlap is the rest.
    """

    name: str
    time: Figure
    cold: Figure | None = None
    on_device: bool = False
    busy: float = 1.0


class Work(Part, frozen=True, kw_only=True):
    """One part of a training step on a device. ``first``: added the first time that a worker does it."""

    time: Figure
    busy: float = 1.0
    first: Figure | None = None


class Step(Part, frozen=True, kw_only=True):
    """sample (sampler) → reward (client) → train (trainer) → publish (trainer, off the device) → apply (sampler)."""

    sample: Work
    reward: Figure
    train: Work
    publish: Figure
    apply: Work


class Times(Part, frozen=True, kw_only=True):
    """What the two workers of one kind of job on one model take."""

    trainer: tuple[Phase, ...]
    sampler: tuple[Phase, ...]
    step: Step

    def start(self, role: Role) -> tuple[Phase, ...]:
        return self.trainer if role is Role.TRAINER else self.sampler


class ModelTimes(Part, frozen=True, kw_only=True):
    """A model's sizes, for the estimator (M2), and its times. ``kv_bytes_per_token`` is in bfloat16."""

    parameters: float
    kv_bytes_per_token: int
    largest_tensor_elements: int
    vocabulary: int
    fft: Times | None = None
    lora: Times | None = None

    def of(self, kind: JobKind) -> Times | None:
        return self.fft if kind is JobKind.FFT else self.lora

    @property
    def model(self) -> Model:
        return Model(
            parameters=int(self.parameters),
            largest_tensor_elements=self.largest_tensor_elements,
            kv_values_per_token=self.kv_bytes_per_token // _BYTES_PER_VALUE,
            vocabulary=self.vocabulary,
        )


class Rate(Part, frozen=True, kw_only=True):
    gib_per_s: float
    basis: Basis
    why: str = ""


class Control(Part, frozen=True, kw_only=True):
    """Everything that is not a worker.

    Attributes:
        message: from a write or a publish until others act on it.
        client_start: from kickoff until the first client submits; ``client_spacing``: between one and the next.
        cut: a device found for a claim → ClaimAllocated; ``image_pull``: once per node.
        stop: a worker told to end → seen gone; ``free``: a retired claim → its device is free.
        park: how fast a worker leaves the device for host memory, or returns.
    """

    message: Figure
    client_start: Figure
    client_spacing: Figure
    cut: Figure
    image_pull: Figure
    stop: Figure
    free: Figure
    park: Rate


class Profile(Part, frozen=True, kw_only=True):
    """``files_cached``: the models' files are in the nodes' page caches when the drill begins."""

    about: str
    control: Control
    models: dict[str, ModelTimes]
    files_cached: bool = True
    name: str = ""

    def times(self, model: str, kind: JobKind) -> Times:
        """Raises Rejected when the profile has no times for this."""
        known = self.models.get(model)
        if known is None:
            raise Rejected(
                f"model {model!r} is not in profile {self.name}: it has {', '.join(sorted(self.models))}",
                code="unknown-model",
            )
        times = known.of(kind)
        if times is None:
            raise Rejected(
                f"profile {self.name} has no {kind} times for model {model!r}: add them, or choose another model",
                code="unknown-model",
            )
        return times

    def figures(self) -> Iterator[tuple[str, Figure | Rate]]:
        """Every figure with its place in the file."""
        yield from _figures("control", self.control)
        for name, model in self.models.items():
            yield from _figures(f"models.{name}", model)


def _figures(place: str, part: object) -> Iterator[tuple[str, Figure | Rate]]:
    if isinstance(part, Figure | Rate):
        yield place, part
    elif isinstance(part, Part):
        for field in part.__struct_fields__:
            yield from _figures(f"{place}.{field}", getattr(part, field))
    elif isinstance(part, tuple):
        for each in part:
            yield from _figures(f"{place}.{getattr(each, 'name', '')}", each)


def load(path: Path) -> Profile:
    """Read and check a profile.

    Raises:
        Rejected: code ``bad-profile``: names the file, the field and what is wrong with it.
    """
    try:
        if path.stat().st_size > _FILE_BYTES_MAX:
            raise _bad(path, f"it has more than {_FILE_BYTES_MAX} bytes")
        content = path.read_bytes()
        decode = msgspec.toml.decode if path.suffix == ".toml" else msgspec.json.decode
        profile = decode(content, type=Profile)
    except OSError as error:
        raise _bad(path, f"it cannot be read ({error.strerror})") from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise _bad(path, str(error)) from error
    profile = msgspec.structs.replace(profile, name=profile.name or path.stem)
    for place, figure in profile.figures():
        value = figure.seconds if isinstance(figure, Figure) else figure.gib_per_s
        if not (math.isfinite(value) and 0 <= value <= _SECONDS_MAX) or (isinstance(figure, Rate) and value == 0):
            raise _bad(path, f"{place} is {value}: write a number of at least 0 (a rate above 0)")
    for name, model in profile.models.items():
        _check_model(path, name, model)
    return profile


def _check_model(path: Path, name: str, model: ModelTimes) -> None:
    if not (math.isfinite(model.parameters) and model.parameters >= 1):
        raise _bad(path, f"models.{name}.parameters is {model.parameters}: write a number of at least 1")
    for kind in JobKind:
        times = model.of(kind)
        if times is None:
            continue
        parts: list[Phase | Work] = [*times.trainer, *times.sampler]
        parts += [times.step.sample, times.step.train, times.step.apply]
        for part in parts:
            if not 0 < part.busy <= 1:
                raise _bad(path, f"models.{name}.{kind}: busy is {part.busy}: write a part of the time, above 0 to 1")


def _bad(path: Path, why: str) -> Rejected:
    return Rejected(f"profile {path}: {why}", code="bad-profile")
