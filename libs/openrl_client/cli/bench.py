"""``openrl bench``: measure the system on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import click

from openrl_client.cli.common import machine_readable, run_async
from openrl_common.settings import BYTES, Directory, WholeNumber

STORE = click.option(
    "--store", type=Directory(), default=None, help="Directory on a disk for the store. Default: the temporary one."
)
JSON = click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON, progress on stderr.")


@click.group()
def bench() -> None:
    """Measure the system on this machine. Nothing of a running system is touched."""


@bench.command()
@click.option("--nodes", "num_nodes", type=WholeNumber(1), default="250", show_default=True, help="Nodes of 8 devices.")
@click.option("--claims", "num_claims", type=WholeNumber(1), default="500", show_default=True, help="Claims seated.")
@click.option(
    "--jobs", "num_jobs", type=WholeNumber(2), default="1200", show_default=True, help="Jobs granted, two seats each."
)
@click.option("--rate", "rate_per_s", type=click.FloatRange(min=1), default=300.0, show_default=True, help="Grants/s.")
@click.option(
    "--waiting", "num_waiting", type=WholeNumber(1), default="400", show_default=True, help="Workloads waiting."
)
@click.option(
    "--wakes", "num_wakes", type=WholeNumber(1), default="100", show_default=True, help="Seats freed for them."
)
@click.option("--window", type=WholeNumber(1), default="256", show_default=True, help="Jobs unanswered when saturated.")
@click.option(
    "--curve-rate",
    "curve_rates_per_s",
    type=click.FloatRange(min=1),
    multiple=True,
    metavar="GRANTS/S",
    help="Latency at this rate too; may be given several times.",
)
@click.option(
    "--chart",
    type=click.Path(dir_okay=False, path_type=Path),
    default=None,
    help="Draw latency over rate, and CPU per grant, into this file (PNG, SVG, PDF).",
)
@STORE
@JSON
def seats(as_json: bool, chart: Path | None, **parameters: Any) -> None:  # fmt: skip
    """Seat grants: how many a second, how fast, and what they cost."""
    from openrl_client.bench.seats import Plan, measure

    if chart is not None:
        from openrl_client.bench import chart as charts

        charts.check(chart)
    report = run_async(measure(Plan(**parameters), progress=_progress))
    if chart is not None:
        charts.draw(report, chart)
    _show(report, as_json)


@bench.command()
@STORE
@JSON
@click.option(
    "--messages", "num_messages", type=WholeNumber(1), default="3000", show_default=True, help="Per measurement."
)
def bus(store: Path | None, as_json: bool, num_messages: int) -> None:
    """The bus alone: publish, compare-and-swap, read, consume, ask."""
    from openrl_client.bench.bus import measure

    _show(run_async(measure(store, num_messages=num_messages, progress=_progress)), as_json)


@bench.command("up", short_help="`openrl up`: seconds until ready, memory.")
@STORE
@JSON
@click.option("--times", "num_times", type=WholeNumber(1), default="3", show_default=True, help="Starts.")
def start(store: Path | None, as_json: bool, num_times: int) -> None:
    """How long `openrl up` takes until everything is ready, and what memory it then holds."""
    from openrl_client.bench.start import measure

    _show(run_async(measure(store, num_times=num_times, progress=_progress)), as_json)


@bench.command(short_help="Passing a shared device on: park, resume.")
@click.option("--rounds", "num_rounds", type=WholeNumber(1), default="20", show_default=True, help="Measured rounds.")
@click.option("--model", type=Directory(), default=None, help="A Hugging Face model directory. Default: a tiny one.")
@STORE
@JSON
def turns(store: Path | None, as_json: bool, num_rounds: int, model: Path | None) -> None:
    """What passing a shared device from trainer to sampler costs: park, resume, the whole switch."""
    from openrl_client.bench.turns import measure

    _show(run_async(measure(store, num_rounds=num_rounds, model=model, progress=_progress)), as_json)


@bench.command(short_help="Launch of a worker until it answers.")
@click.option("--warm-start", type=click.Choice(["on", "off"]), default="on", show_default=True, help="As in `up`.")
@STORE
@JSON
def workers(store: Path | None, as_json: bool, warm_start: str) -> None:
    """How long a trainer or sampler takes from its launch until it answers, alone and four at once."""
    from openrl_client.bench.workers import measure

    _show(run_async(measure(store, warm_start=warm_start, progress=_progress)), as_json)


@bench.command(short_help="The Kubernetes backend on a control plane.")
@click.option("--nodes", "num_nodes", type=WholeNumber(1), default="1000", show_default=True, help="Fake nodes.")
@click.option("--workers", "num_workers", type=WholeNumber(4), default="2000", show_default=True, help="Half join.")
@click.option(
    "--plain",
    type=click.Choice(["bare", "full"]),
    default="bare",
    show_default=True,
    help="Plain pods with one container and nothing else, or with all that a worker's pod has.",
)
@click.option(
    "--plain-waiting",
    "plain_waiting_max",
    type=WholeNumber(),
    default="128",
    show_default=True,
    help="Plain pods made that do not run yet, at most; 0 = all are made at once.",
)
@STORE
@JSON
def kube(
    store: Path | None,
    as_json: bool,
    num_nodes: int,
    num_workers: int,
    plain: Literal["bare", "full"],
    plain_waiting_max: int,
) -> None:
    """The Kubernetes backend on a control plane of KUBEBUILDER_ASSETS, beside plain pods with a claim each."""
    try:
        from openrl_client.bench.kube import Plan, measure
    except ModuleNotFoundError as error:
        raise click.ClickException(f"{error}: pip install kubernetes pyyaml") from error
    _show(
        run_async(measure(Plan(num_nodes, num_workers, store, plain, plain_waiting_max), progress=_progress)), as_json
    )


@bench.command(short_help="Reading a cold checkpoint, beside other loaders.")
@click.option(
    "--latencies", default="2,10,50", show_default=True, help="Milliseconds that each read of the mount takes."
)
@click.option(
    "--times", "num_times", type=WholeNumber(1), default="1", show_default=True, help="Each; the best counts."
)
@click.option(
    "--max-background",
    type=WholeNumber(1),
    default="64",
    show_default=True,
    help="Page cache reads that the kernel keeps under way on the mount (its own default is 12).",
)
@click.option(
    "--vllm-python",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    default=None,
    help="Interpreter that has vllm, where this one has not.",
)
@STORE
@JSON
def prefetch(store: Path | None, as_json: bool, latencies: str, **parameters: Any) -> None:
    """Reading a cold checkpoint of 1.1 GiB from a slow FUSE mount and from the disk, beside other loaders."""
    from openrl_client.bench.prefetch import measure

    try:
        latencies_ms = [float(each) for each in latencies.split(",")]
    except ValueError:
        raise click.BadParameter(f"{latencies!r}: write for example 2,10,50", param_hint="--latencies") from None
    _show(measure(store, latencies_ms=latencies_ms, progress=_progress, **parameters), as_json)


@bench.command(short_help="Weight updates of the vLLM engine by method.")
@click.option("--model", type=Directory(), default=None, help="A Hugging Face model directory. Default: a random one.")
@click.option("--vocabulary", type=WholeNumber(64), default="131072", show_default=True, help="Rows of the embedding.")
@click.option("--hidden", type=WholeNumber(64), default="512", show_default=True, help="Columns of the embedding.")
@click.option("--layers", type=WholeNumber(1), default="4", show_default=True, help="Layers of the random model.")
@click.option(
    "--chunk-bytes", type=BYTES, default="16MiB", show_default=True, help="Memory a streamed update may take."
)
@JSON
def update(as_json: bool, **parameters: Any) -> None:
    """A weight update of the vLLM engine by every method: seconds and extra memory. Needs vllm."""
    from openrl_client.bench.update import measure

    _show(run_async(measure(**parameters, progress=_progress)), as_json)


@bench.command(short_help="Construction of the vLLM engine, cold and warm.")
@click.option("--model", type=Directory(), default=None, help="A Hugging Face model directory. Default: a random one.")
@click.option("--warm", "num_warm", type=WholeNumber(1), default="2", show_default=True, help="Warm starts.")
@JSON
def coldstart(as_json: bool, **parameters: Any) -> None:
    """Construction of the vLLM engine with nothing compiled, and with what that left behind. Needs vllm."""
    from openrl_client.bench.coldstart import measure

    _show(run_async(measure(**parameters, progress=_progress)), as_json)


@bench.command(short_help="Requests to a real sampler, by clients.")
@click.option("--engine", type=click.Choice(["torch", "vllm", "vllm-cpu"]), default="torch", show_default=True)
@click.option("--kind", type=click.Choice(["fft", "lora"]), default="fft", show_default=True)
@click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), default="float32", show_default=True)
@click.option("--model", type=Directory(), default=None, help="A Hugging Face model directory. Default: the demo's.")
@click.option("--clients", default="1,8,32", show_default=True, help="Clients at once, one request each in flight.")
@click.option("--seconds", type=click.FloatRange(min=0.1), default=15.0, show_default=True, help="Of each.")
@click.option("--prompt-tokens", type=WholeNumber(1), default="32", show_default=True, help="Random ones.")
@click.option("--max-tokens", type=WholeNumber(1), default="32", show_default=True, help="Of a completion.")
@STORE
@JSON
def sampler(
    store: Path | None, as_json: bool, clients: str, seconds: float, prompt_tokens: int, max_tokens: int, **which: Any
) -> None:
    """Requests through the bus to a real sampler: rates and times by clients; how far it is from the trainer."""
    from openrl_client.bench.sampler import Load, measure

    try:
        levels = [int(each) for each in clients.split(",")]
    except ValueError:
        raise click.BadParameter(f"{clients!r}: write for example 1,8,32", param_hint="--clients") from None
    load = Load(seconds=seconds, clients=levels, prompt_tokens=prompt_tokens, max_tokens=max_tokens)
    _show(run_async(measure(store, load=load, progress=_progress, **which)), as_json)


@bench.command(short_help="A trainer's passes and log-probabilities.")
@click.option("--model", type=Directory(), default=None, help="A Hugging Face model directory. Default: the demo's.")
@click.option("--threads", type=WholeNumber(1), default="2", show_default=True, help="Threads of torch.")
@click.option(
    "--devices",
    type=WholeNumber(1),
    default="1",
    show_default=True,
    help="More: also a process for each, sharing the threads.",
)
@JSON
def train(as_json: bool, **parameters: Any) -> None:
    """A trainer's passes one sequence at a time and by the token budget; ways to take log-probabilities."""
    from openrl_client.bench.train import measure

    _show(measure(**parameters, progress=_progress), as_json)


def _progress(line: str) -> None:
    click.echo(line, err=True)


def _show(report: Any, as_json: bool) -> None:
    click.echo(machine_readable(report, "json") if as_json else "\n".join(_lines(report)))


def _lines(report: Any) -> list[str]:
    import msgspec

    plain = msgspec.to_builtins(report)
    width = max(len(name) for name in plain)
    return [f"{name:<{width}}  {_text(value)}" for name, value in plain.items()]


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_text(each)}" for key, each in value.items())
    return str(value)
