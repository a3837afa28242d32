"""Write ``deploy/observability/base/dashboards/*.json`` and the operator's copy of the alerts (O4).

Dashboards are code: what is asked of which metric stands here, once; Grafana reads the files. The alerts are a plain
rules file of Prometheus, which clusters with the Prometheus operator need as a ``PrometheusRule``. ``--check`` writes
nothing and fails when a file differs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml
from grafana_foundation_sdk.builders import dashboard, prometheus, table, tempo, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import DataSourceRef

DEPLOY = Path(__file__).resolve().parent.parent / "deploy"
BASE = DEPLOY / "observability" / "base"
DASHBOARDS = BASE / "dashboards"
ALERTS = BASE / "alerts.yaml"
OPERATOR_ALERTS = DEPLOY / "components" / "monitoring" / "alerts.yaml"
METRICS = DataSourceRef(type_val="prometheus", uid="openrl-metrics")
TRACES = DataSourceRef(type_val="tempo", uid="openrl-traces")
RATE = "$__rate_interval"
_WIDTH, _HEIGHT = 12, 8


@dataclass(frozen=True)
class Panel:
    """One graph. ``queries``: legend and PromQL; an empty legend is the labels."""

    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    description: str = ""


@dataclass(frozen=True)
class Traces:
    """A table of traces that a TraceQL query finds."""

    title: str
    query: str


def per_second(metric: str, by: str = "") -> str:
    return f"sum by ({by}) (rate({metric}[{RATE}]))" if by else f"sum(rate({metric}[{RATE}]))"


def quantile(share: float, histogram: str, by: str = "") -> str:
    labels = f"le, {by}" if by else "le"
    return f"histogram_quantile({share}, sum by ({labels}) (rate({histogram}_bucket[{RATE}])))"


SEATS = (
    Panel("Workloads in the waiting line", "short", (("waiting", "sum(openrl_placement_waiting)"),)),
    Panel(
        "Seats",
        "short",
        (
            ("taken", "sum(max by (claim) (openrl_turns_seats))"),
            ("claims", "count(max by (claim) (openrl_turns_seats))"),
            ("limit of a claim", "max(openrl_turns_seat_limit)"),
        ),
        "Seats taken on all claims; the limit of one claim, 0 = none.",
    ),
    Panel(
        "Bookings and refusals a second", "ops", (("{{answer}}", per_second("openrl_ledger_answers_total", "answer")),)
    ),
    Panel(
        "On the device, and waiting for it",
        "short",
        (
            ("resident, {{claim}}", "max by (claim) (openrl_turns_residents)"),
            ("waiting, {{claim}}", "max by (claim) (openrl_turns_waiting)"),
        ),
    ),
    Panel("Nodes by standing", "short", (("{{standing}}", "sum by (standing) (openrl_ledger_nodes)"),)),
    Panel("Worker processes", "short", (("{{instance}}", "openrl_launcher_workers"),)),
    Panel(
        "Seats released because their node is lost",
        "short",
        (("seats", "sum(openrl_ledger_node_loss_releases_total)"),),
    ),
)

JOBS: tuple[Panel | Traces, ...] = (
    Traces("Slowest handlings", '{ resource.service.name =~ "openrl-.*" && duration > 10ms }'),
    Traces(
        "How workloads came to run",
        '{ span.messaging.system = "nats" && span.openrl.workload != "" && name = "process booked" }',
    ),
    Panel("Jobs of trainers", "short", (("{{instance}}", "openrl_trainer_jobs"),)),
    Panel(
        "Training operations a second",
        "ops",
        (("{{operation}} {{outcome}}", per_second("openrl_trainer_entries_total", "operation, outcome")),),
    ),
    Panel(
        "Seconds of a training operation",
        "s",
        (
            ("{{operation}}, median", quantile(0.5, "openrl_trainer_entry_seconds", "operation")),
            ("{{operation}}, 95 %", quantile(0.95, "openrl_trainer_entry_seconds", "operation")),
        ),
    ),
    Panel("Tokens sampled a second", "ops", (("tokens", per_second("openrl_sampler_tokens_total")),)),
    Panel(
        "Sampling requests a second", "ops", (("{{outcome}}", per_second("openrl_sampler_requests_total", "outcome")),)
    ),
    Panel(
        "Seconds of a sampling request",
        "s",
        (
            ("median", quantile(0.5, "openrl_sampler_request_seconds")),
            ("95 %", quantile(0.95, "openrl_sampler_request_seconds")),
        ),
    ),
)

COLD_START = (
    Panel("Phases of a start, slowest worker", "s", (("{{phase}}", "max by (phase) (openrl_worker_phase_seconds)"),)),
    Panel("All phases together", "s", (("{{instance}}", "sum by (instance) (openrl_worker_phase_seconds)"),)),
    Panel("Workers are forked from a warm parent", "short", (("{{instance}}", "openrl_launcher_warm_ready"),)),
    Panel("Memory of the warm parent", "bytes", (("{{instance}}", "openrl_launcher_warm_bytes"),)),
)

WEIGHTS = (
    Panel(
        "Weight updates a second",
        "ops",
        (("{{outcome}}", per_second("openrl_sampler_weight_updates_total", "outcome")),),
    ),
    Panel(
        "Seconds of a weight update, 95 %",
        "s",
        (("all samplers", quantile(0.95, "openrl_sampler_weight_update_seconds")),),
    ),
    Panel(
        "Share of the parameters that the last update wrote",
        "percentunit",
        (("{{instance}}", "openrl_sampler_weight_touched_share"),),
    ),
    Panel(
        "Memory beside the weights in the last update",
        "bytes",
        (("{{instance}}", "openrl_sampler_weight_peak_extra_bytes"),),
    ),
    Panel(
        "Sampler against trainer, nats a token",
        "short",
        (
            ("{{statistic}}, {{instance}}", "openrl_sampler_logprob_difference"),
            ("limit of the mean", "max(openrl_sampler_logprob_difference_limit)"),
        ),
    ),
    Panel(
        "Seconds of a checkpoint, 95 %",
        "s",
        (("{{part}}", quantile(0.95, "openrl_trainer_checkpoint_seconds", "part")),),
    ),
    Panel("Size of the newest checkpoint", "bytes", (("{{instance}}", "openrl_trainer_checkpoint_bytes"),)),
    Panel("Seconds of a switch, 95 %", "s", (("{{part}}", quantile(0.95, "openrl_turn_switch_seconds", "part")),)),
    Panel("Seconds until a worker has the device, 95 %", "s", (("all", quantile(0.95, "openrl_turn_wait_seconds")),)),
    Panel(
        "Work that found its worker hot, warm or cold",
        "ops",
        (("{{found}}", per_second("openrl_turn_hits_total", "found")),),
    ),
    Panel("Off the device now", "bytes", (("{{instance}}", "openrl_turn_parked_bytes"),)),
    Panel(
        "Turns a second",
        "ops",
        (("granted", per_second("openrl_turns_granted_total")), ("fenced", per_second("openrl_turns_fenced_total"))),
    ),
)

BUS = (
    Panel("Connected", "short", (("{{instance}}", "openrl_bus_connected"),)),
    Panel("Connections lost and back", "short", (("{{instance}}", "openrl_bus_reconnects"),)),
    Panel(
        "Deliveries a second",
        "ops",
        (("{{consumer}} {{outcome}}", per_second("openrl_bus_deliveries_total", "consumer, outcome")),),
    ),
    Panel("Waiting behind the last message", "short", (("{{consumer}}", "max by (consumer) (openrl_bus_pending)"),)),
    Panel(
        "From stored to handled",
        "s",
        (
            ("{{consumer}}, median", quantile(0.5, "openrl_bus_age_seconds", "consumer")),
            ("{{consumer}}, 99 %", quantile(0.99, "openrl_bus_age_seconds", "consumer")),
        ),
    ),
    Panel(
        "Handling one event, 99 %",
        "s",
        (
            ("ledger", quantile(0.99, "openrl_ledger_handle_seconds")),
            ("placement", quantile(0.99, "openrl_placement_handle_seconds")),
        ),
    ),
    Panel("Cores", "short", (("{{instance}}", f"rate(process_cpu_seconds_total[{RATE}])"),)),
    Panel("Memory", "bytes", (("{{instance}}", "process_resident_memory_bytes"),)),
)

ALL: dict[str, tuple[str, Sequence[Panel | Traces]]] = {
    "seats-and-waiting": ("Seats and waiting", SEATS),
    "job-timeline": ("Job timeline", JOBS),
    "cold-start": ("Cold start", COLD_START),
    "weights-and-turns": ("Weights and turns", WEIGHTS),
    "bus-health": ("Bus health", BUS),
}


def built(uid: str, title: str, panels: Sequence[Panel | Traces]) -> str:
    """The dashboard's JSON, as Grafana's provisioning reads it."""
    board = dashboard.Dashboard(f"OpenRL: {title}").uid(f"openrl-{uid}").tags(["openrl"]).readonly().refresh("30s")
    board.time("now-1h", "now")
    for panel in panels:
        board.with_panel(_graph(panel) if isinstance(panel, Panel) else _traces(panel))
    return str(JSONEncoder(sort_keys=True, indent=1).encode(board.build())) + "\n"


def _graph(panel: Panel) -> timeseries.Panel:
    graph = timeseries.Panel().title(panel.title).unit(panel.unit).min(0).datasource(METRICS)
    graph.description(panel.description).span(_WIDTH).height(_HEIGHT)
    for number, (legend, expression) in enumerate(panel.queries):
        query = prometheus.Dataquery().expr(expression).legend_format(legend or "__auto").ref_id(chr(ord("A") + number))
        graph.with_target(query.range())
    return graph


def _traces(panel: Traces) -> table.Panel:
    query = tempo.TempoQuery().query_type("traceql").query(panel.query).limit(20).ref_id("A")
    return table.Panel().title(panel.title).datasource(TRACES).with_target(query).span(_WIDTH).height(_HEIGHT)


def files() -> dict[Path, str]:
    """Every file that this script owns, as it should be."""
    found = {DASHBOARDS / f"{uid}.json": built(uid, title, panels) for uid, (title, panels) in ALL.items()}
    rule = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "openrl", "namespace": "openrl"},
        "spec": yaml.safe_load(ALERTS.read_text()),
    }
    source = ALERTS.relative_to(DEPLOY)
    found[OPERATOR_ALERTS] = f"# Written by scripts/dashboards.py from {source}.\n" + yaml.safe_dump(
        rule, sort_keys=False, width=120
    )
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, fail when a file differs")
    arguments = parser.parse_args()
    differing = [path for path, text in files().items() if not path.exists() or path.read_text() != text]
    if arguments.check:
        for path in differing:
            print(f"{path.relative_to(DEPLOY.parent)} is not what scripts/dashboards.py writes: run `make manifests`")
        return 1 if differing else 0
    for path in differing:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(files()[path])
    return 0


if __name__ == "__main__":
    sys.exit(main())
