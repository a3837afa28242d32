"""``openrl bench coldstart``: the construction of a vLLM engine with nothing compiled, and again with what that left
(V1).

Each start is a process of its own; imports are done before the clock runs. Same model, same configuration.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from statistics import median

import msgspec

from openrl_client.bench import engine
from openrl_client.bench.machine import Machine, describe
from openrl_client.home import Progress
from openrl_common.errors import Rejected


class Start(msgspec.Struct, frozen=True, kw_only=True):
    seconds: float
    cpu_s: float
    cache: str
    parts: dict[str, float]

    @property
    def construction_s(self) -> float:
        return self.seconds - self.parts["configure"]


class ColdStartReport(msgspec.Struct, frozen=True, kw_only=True):
    """``warm_s``: median of ``warm_starts_s``; ``eager_s``: without compilation; ``compile_s``: of
    ``cold_s``, None where vLLM does not say (on CPUs).

    ``*_cpu_s``: the same starts in processor seconds of the process, which neighbours disturb less.

    Without vLLM's own configuration (``configure_*_s``), whose first run on a machine inspects the model's class in a
    process of its own, compiled or not.
    """

    cold_s: float
    warm_s: float
    ratio: float
    warm_starts_s: list[float]
    eager_s: float
    compile_s: float | None
    cold_cpu_s: float
    warm_cpu_s: float
    ratio_cpu: float
    configure_cold_s: float
    configure_warm_s: float
    machine: Machine


async def measure(model: Path | None, *, num_warm: int, progress: Progress) -> ColdStartReport:
    """Raises Rejected: vllm is not installed here, or a start failed."""
    with tempfile.TemporaryDirectory(prefix="openrl-bench-") as scratch:
        root = Path(scratch)
        if model is None:
            progress("making the model")
            model = root / "model"
            await engine.run("make", str(model), "--vocabulary", "4096", "--hidden", "256", "--layers", "4")
        eager = await engine.measure(Start, "start", str(model), str(root / "eager"), "--eager")
        progress(f"eager: {eager.construction_s:.1f} s")
        cold = await engine.measure(Start, "start", str(model), str(root / "cache"))
        progress(f"cold: {cold.construction_s:.1f} s")
        assert cold.cache == "cold"
        warm: list[Start] = []
        for _ in range(num_warm):
            start = await engine.measure(Start, "start", str(model), str(root / "cache"))
            if start.cache != "warm":
                raise Rejected(
                    f"nothing was kept for this start: the compile cache is {start.cache}", code="bench-failed"
                )
            warm.append(start)
            progress(f"warm: {start.construction_s:.1f} s")
    warm_s = median(start.construction_s for start in warm)
    warm_cpu_s = median(start.cpu_s for start in warm)
    return ColdStartReport(
        cold_s=round(cold.construction_s, 2),
        warm_s=round(warm_s, 2),
        ratio=round(warm_s / cold.construction_s, 3),
        warm_starts_s=[round(start.construction_s, 2) for start in warm],
        eager_s=round(eager.construction_s, 2),
        compile_s=cold.parts.get("compile"),
        cold_cpu_s=round(cold.cpu_s, 2),
        warm_cpu_s=round(warm_cpu_s, 2),
        ratio_cpu=round(warm_cpu_s / cold.cpu_s, 3),
        configure_cold_s=round(cold.parts["configure"], 2),
        configure_warm_s=round(median(start.parts["configure"] for start in warm), 2),
        machine=describe(),
    )
