"""K5: what kubectl shows is a mirror of the bus: complete, overwritten when edited, gone with what it shows."""

from __future__ import annotations

import pytest

from kube.kube_helpers import H100, Cluster


async def lines(cluster: Cluster, kind: str) -> list[list[str]]:
    text = await cluster.kubectl("get", kind, "-n", "openrl")
    return [line.split() for line in text.splitlines()]


async def test_K5_workloads_and_claimledgers_have_the_promised_columns_and_values(cluster: Cluster) -> None:
    await cluster.add_nodes(("n1", 2, H100, ()))
    async with cluster.launcher():
        await cluster.submit("shown")
        await cluster.ready("shown")

        async def is_shown() -> bool:
            rows = await lines(cluster, "workloads")
            return len(rows) == 3 and all(row[3] == "Ready" for row in rows[1:])

        await cluster.until(is_shown)
        header, *rows = await lines(cluster, "workloads")
        assert header == ["NAME", "ROLE", "KIND", "PHASE", "CLAIM", "NODE", "REASON", "AGE", "MESSAGE"]
        claim = (await cluster.workload("shown")).claim
        trainer = next(row for row in rows if row[1] == "trainer")
        assert trainer[:6] == ["team--shown--trainer", "trainer", "fft", "Ready", claim, "n1"]

        async def claim_is_shown() -> bool:
            rows = await lines(cluster, "claimledgers")
            return [claim, "allocated", "n1", "1", "0"] in [row[:5] for row in rows]

        await cluster.until(claim_is_shown)
        header, *_ = await lines(cluster, "claimledgers")
        assert header == ["NAME", "STATE", "NODE", "SEATS", "LIMIT", "RESIDENT", "WAITING", "AGE"]


async def test_K5_an_edit_changes_nothing_and_is_overwritten(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("openrl_launcher.kubernetes.mirror.FULL_PASS_S", 1.0)
    await cluster.add_nodes(("n1", 2, H100, ()))
    async with cluster.launcher():
        await cluster.submit("edited")
        await cluster.ready("edited")
        name = "team--edited--trainer"

        async def phase() -> str:
            return await cluster.kubectl(
                "get", "workloads", name, "-n", "openrl", "--ignore-not-found", "-o", "jsonpath={.spec.phase}"
            )

        async def shows(expected: str) -> bool:
            return await phase() == expected

        await cluster.until(lambda: shows("Ready"))
        before = await cluster.workload("edited")
        await cluster.kubectl(
            "patch", "workloads", name, "-n", "openrl", "--type=merge", "-p", '{"spec":{"phase":"Failed"}}'
        )
        await cluster.until(lambda: shows("Ready"))
        await cluster.kubectl("delete", "workloads", name, "-n", "openrl")
        await cluster.until(lambda: shows("Ready"))
        assert await cluster.workload("edited") == before

        await cluster.cancel("edited")

        async def no_claim_is_shown() -> bool:
            return len(await lines(cluster, "claimledgers")) == 0

        await cluster.until(no_claim_is_shown)
