"""One declaration gives flag and variable (E19); bad values stop the service at start, with exit code 2 (C5)."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from openrl_common import settings as shared
from openrl_common.quantities import GIB


@dataclasses.dataclass(frozen=True)
class Config:
    nats_url: str
    home: Path
    max_seats_per_claim: int
    placement_timeout_s: float
    owner_affinity: bool
    devices: tuple[int, ...]
    host_memory_bytes: int


def invoke(*arguments: str, **environment: str) -> tuple[Result, Config | None]:
    built: list[Config] = []

    @click.command()
    @shared.settings(
        shared.NATS_URL,
        shared.HOME,
        shared.MAX_SEATS_PER_CLAIM,
        shared.PLACEMENT_TIMEOUT_S,
        shared.OWNER_AFFINITY,
        shared.DEVICES,
        shared.HOST_MEMORY_BYTES,
        shared.LOG_LEVEL,
    )
    def main(**parameters: object) -> None:
        built.append(shared.from_parameters(Config, parameters))

    result = CliRunner().invoke(main, arguments, env=environment)
    return result, built[0] if built else None


def test_defaults_hold_without_flag_or_variable() -> None:
    result, config = invoke()
    assert result.exit_code == 0, result.output
    assert config == Config("nats://127.0.0.1:4222", Path.home() / ".openrl", 0, 900.0, True, (), 0)


def test_S6_flag_wins_over_variable_and_variable_over_default() -> None:
    assert invoke(OPEN_RL_MAX_SEATS_PER_CLAIM="2")[1].max_seats_per_claim == 2
    assert invoke("--max-seats-per-claim", "3", OPEN_RL_MAX_SEATS_PER_CLAIM="2")[1].max_seats_per_claim == 3


@pytest.mark.parametrize("value", ["-1", "1.5", "two", "1e3", "٣", "0x2", "9" * 30])
@pytest.mark.parametrize("way", ["flag", "variable"])
def test_S1_an_unusable_seat_limit_stops_the_service_and_names_the_setting(value: str, way: str) -> None:
    result, config = (
        invoke(f"--max-seats-per-claim={value}") if way == "flag" else invoke(OPEN_RL_MAX_SEATS_PER_CLAIM=value)
    )
    assert config is None
    assert result.exit_code == 2
    assert "--max-seats-per-claim" in result.output
    assert "OPEN_RL_MAX_SEATS_PER_CLAIM" in result.output
    assert value in result.output


def test_S1_help_says_what_zero_and_one_mean() -> None:
    text = " ".join(invoke("--help")[0].output.split())
    assert "0 = no limit" in text
    assert "1 = exclusive placement (every claim holds its founder alone)" in text
    assert "OPEN_RL_MAX_SEATS_PER_CLAIM" in text


def test_W3_help_says_what_the_placement_timeout_covers() -> None:
    text = " ".join(invoke("--help")[0].output.split())
    assert "from submission or the loss of a placement; waiting for a seat counts too" in text


def test_B2_declared_devices_keep_their_order_and_exact_bytes() -> None:
    config = invoke("--devices", "2x79.65GiB, 1x22.5GiB", "--host-memory", "512GiB")[1]
    assert config.devices == (85_523_536_281, 85_523_536_281, 24_159_191_040)
    assert config.host_memory_bytes == 512 * GIB


@pytest.mark.parametrize(
    "value", ["3", "x1GiB", "0x1GiB", "2x0GiB", "2x5G", "2x1GiB,", "-1x1GiB", "9999x1GiB", "2.5x1GiB", "2x6"]
)
def test_unusable_devices_are_refused(value: str) -> None:
    result, config = invoke(f"--devices={value}")
    assert config is None
    assert result.exit_code == 2
    assert "OPEN_RL_DEVICES" in result.output


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("OPEN_RL_NATS_URL", "http://127.0.0.1"),
        ("OPEN_RL_NATS_URL", "nats://"),
        ("OPEN_RL_NATS_URL", "nats://host:99999"),
        ("OPEN_RL_PLACEMENT_TIMEOUT", "soon"),
        ("OPEN_RL_OWNER_AFFINITY", "maybe"),
        ("OPEN_RL_HOST_MEMORY", "5G"),
        ("OPEN_RL_LOG_LEVEL", "loud"),
        ("OPEN_RL_HOME", __file__),
    ],
)
def test_every_unusable_variable_is_named(variable: str, value: str) -> None:
    result, config = invoke(**{variable: value})
    assert config is None
    assert result.exit_code == 2
    assert variable in result.output


def test_switches_and_durations_are_read() -> None:
    config = invoke("--owner-affinity", "off", "--placement-timeout", "1h30m")[1]
    assert config.owner_affinity is False
    assert config.placement_timeout_s == 5400


def test_a_default_can_be_changed_for_one_command() -> None:
    changed = shared.LORA_IDLE_S.with_default("30s")
    assert (changed.flag, changed.variable, changed.default) == ("--lora-idle", "OPEN_RL_LORA_IDLE", "30s")


def test_W4_shapes_of_nodes_are_counts_and_sizes() -> None:
    shapes = shared.NodeShapes()
    assert shapes.convert("8x80GiB, 1x512MiB", None, None) == ((8, 80 << 30), (1, 512 << 20))
    assert shapes.convert("", None, None) == ()
    for wrong in ("80GiB", "0x80GiB", "-1x80GiB", "1.5x80GiB", "2xGiB", "x"):
        with pytest.raises(click.BadParameter, match=r"COUNTxSIZE|declares nothing|GiB"):
            shapes.convert(wrong, None, None)
