"""A job whose trainer has two devices, from its submission to its end (P10, R14)."""

from __future__ import annotations

from pathlib import Path

import pytest

from e2e.test_whole_loop import nothing_is_held
from openrl_client import AdamParams, Datum, connect
from openrl_client.cli.explain import explanation
from openrl_client.supervisor import LocalSystem
from openrl_common.queries import ExplainAnswer, ExplainQuery
from openrl_common.records import ClaimRecord, ClaimState, JobKind, JobPhase, JobSpec

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(240)]


@pytest.fixture
def untrained_model(tmp_path: Path) -> Path:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, tie_word_embeddings=True, max_position_embeddings=64, eos_token_id=2,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


async def test_a_job_on_two_devices_trains_publishes_weights_and_leaves_both_P10_R14(
    system: LocalSystem, untrained_model: Path
) -> None:
    spec = JobSpec(name="wide", kind=JobKind.FFT, base_model=str(untrained_model), dtype="float32", trainer_devices=2)
    async with connect(system.nats_url) as client:
        job = await client.submit(spec)
        record = await job.ready(120)
        answer = await client.query("explain", ExplainQuery(workload=record.trainer), ExplainAnswer)
        assert "on each of 2 devices of one node" in explanation(answer, 0.0)
        claims = [entry.value for entry in (await client.bus.store.ledger_claims.list()).values()]
        held = [
            claim for claim in claims if claim.state is ClaimState.ALLOCATED and record.trainer in _workloads(claim)
        ]
        assert [(len(set(claim.devices)), len(claim.entries)) for claim in held] == [(2, 1)]

        data = [Datum(tokens=[1 + index, 5, 9, 5 + index]) for index in range(6)]
        losses = []
        for _ in range(3):
            learned = job.forward_backward(data, loss="cross_entropy")
            stepped = job.optim_step(AdamParams(learning_rate=1e-2))
            losses.append((await learned).metrics["loss"])
            await stepped
        assert losses[2] < losses[1] < losses[0]
        assert await job.publish_weights() == 1
        result = await job.sample([[5, 6, 7]], n=2, max_tokens=4, temperature=1.0, at_least=1)
        assert all(version == 1 for each in result.sequences[0] for version in each.versions)
        assert (await job.finish()).phase is JobPhase.FINISHED
        await nothing_is_held(client.bus)


def _workloads(claim: ClaimRecord) -> set[str]:
    return {entry.workload for entry in claim.entries.values()}
