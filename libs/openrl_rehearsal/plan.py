"""What to rehearse: the fleet, the jobs, the settings in force, and the goal they are judged by."""

from __future__ import annotations

import msgspec

from openrl_client.drills import JobsSpec
from openrl_common.records import Device, NodeRecord


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """One drill.

    Attributes:
        devices: bytes of each, cut into nodes of ``devices_per_node`` in this order.
        host_memory_bytes: of each node; 0 = unknown, and not checked (P6).
        warm: models whose LoRA runtimes are ready before kickoff (D3).
        shuffled: clients submit in an order drawn from ``seed``, and ids are drawn too; else both as listed.
        goal_steps, goal_within_s: a job counts when it finished so many steps so long after kickoff.
        client_spacing_s: None = the profile's.
        sampler_asks_after_s: what if a sampler's first request were made so long after its trainer's? 0 = as placement
            does it, both in one decision.
    """

    devices: tuple[int, ...]
    jobs: tuple[JobsSpec, ...]
    devices_per_node: int = 8
    host_memory_bytes: int = 0
    max_seats_per_claim: int = 0
    placement_strategy: str = "binpack"
    owner_affinity: bool = True
    placement_timeout_s: float = 900.0
    lora_jobs_per_runtime: int = 8
    co_residency: bool = True
    device_reserve_bytes: int = 1 << 30
    max_turn_s: float = 120.0
    warm: tuple[str, ...] = ()
    goal_steps: int = 3
    goal_within_s: float = 180.0
    shuffled: bool = False
    seed: int = 0
    horizon_s: float = 86_400.0
    client_spacing_s: float | None = None
    sampler_asks_after_s: float = 0.0

    @property
    def num_jobs(self) -> int:
        return sum(each.count for each in self.jobs)

    def nodes(self) -> list[NodeRecord]:
        size = self.devices_per_node
        return [
            NodeRecord(
                node=f"n{index + 1}",
                devices=tuple(
                    Device(device=f"d{number}", memory_bytes=memory_bytes)
                    for number, memory_bytes in enumerate(self.devices[first : first + size])
                ),
                host_allocatable_bytes=self.host_memory_bytes,
                declared=True,
            )
            for index, first in enumerate(range(0, len(self.devices), size))
        ]
