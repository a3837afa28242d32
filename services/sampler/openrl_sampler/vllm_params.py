"""vLLM's own parameters of one sample. Needs vllm."""

from __future__ import annotations

from collections.abc import Set

from vllm.sampling_params import RequestOutputKind
from vllm.sampling_params import SamplingParams as VllmSamplingParams

from openrl_common.wire import SamplingParams


class AnyTemperature(VllmSamplingParams):
    """vLLM refuses temperatures above 2 and raises those below 0.01, each time that one is copied or sent to a rank;
    its kernels compute with any."""

    def __post_init__(self) -> None:
        wanted: float = self.temperature  # type: ignore[has-type]
        self.temperature = 1.0 if wanted else 0.0
        super().__post_init__()
        self.temperature = wanted


def of_sample(
    params: SamplingParams, seed: int | None, *, stop_token_ids: Set[int], scores: bool
) -> VllmSamplingParams:
    """``scores``: of its prompt too. Raises what vLLM's validation raises."""
    return AnyTemperature(
        max_tokens=max(1, params.max_tokens),
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        seed=seed,
        stop_token_ids=sorted(stop_token_ids),
        ignore_eos=True,
        logprobs=0,
        prompt_logprobs=params.prompt_top_logprobs if scores else None,
        detokenize=False,
        flat_logprobs=True,
        output_kind=RequestOutputKind.DELTA,
    )
