"""Requests to workers and their answers: the training log (R4) and sampling (V10). Bodies are msgspec JSON.

Every per-token list of a Datum is aligned with ``tokens``: entry ``t`` belongs to predicting ``tokens[t]`` from
``tokens[:t]``. Entry 0 has no prediction and is ignored.
"""

from __future__ import annotations

import msgspec

from openrl_common.records import SavedState

LOSSES = ("cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "custom")


class Wire(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Base of every request and answer."""


class Datum(Wire, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One sequence to train on.

    Attributes:
        tokens: token ids, length T ≥ 2.
        weights: loss weight per token, length T; 0 on the prompt. Empty means 1 for every token but the first. For the
            loss ``custom``: the derivative of the caller's loss by the token's log-probability.
        logprobs: log-probability of each token under the policy that sampled it, length T (all losses but
            cross_entropy and custom).
        advantages: advantage per token, length T (the same losses).
    """

    tokens: list[int]
    weights: list[float] = []
    logprobs: list[float] = []
    advantages: list[float] = []


class AdamParams(Wire, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """AdamW for this one step (R9: every setting is honoured on every step). ``grad_clip`` 0 = no clipping."""

    learning_rate: float
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0
    grad_clip: float = 1.0


class TrainRequest(Wire, frozen=True, kw_only=True, tag_field="op"):
    """One entry of a job's training log. ``seq`` starts at 1 and has no gaps within one incarnation of the job."""

    seq: int
    incarnation: int
    reply_to: str = ""


class Forward(TrainRequest, frozen=True, kw_only=True, tag="forward"):
    """Log-probabilities of the data under the current weights; no gradients."""

    data: list[Datum]


class ForwardBackward(TrainRequest, frozen=True, kw_only=True, tag="forward_backward"):
    """Accumulate gradients of ``loss`` over ``data``; ``normalizer`` divides the summed loss (1 = token sum, R8).

    ``loss_config``: ``clip_low``/``clip_high`` for ppo (default 0.2 each) and cispo (1 and 0.2), ``kl`` (coefficient,
    default 0) for both and importance_sampling, ``beta`` for dro (0.05).
    """

    data: list[Datum]
    loss: str
    loss_config: dict[str, float] = {}
    normalizer: float = 1.0


class OptimStep(TrainRequest, frozen=True, kw_only=True, tag="optim_step"):
    """Apply the accumulated gradients with AdamW, then clear them."""

    adam: AdamParams


class SaveWeights(TrainRequest, frozen=True, kw_only=True, tag="save_weights"):
    """Write a weights version (R11) and publish WeightsReady."""


class SaveState(TrainRequest, frozen=True, kw_only=True, tag="save_state"):
    name: str


class LoadState(TrainRequest, frozen=True, kw_only=True, tag="load_state"):
    name: str


class ListStates(TrainRequest, frozen=True, kw_only=True, tag="list_states"):
    """The job's saved states, of earlier incarnations too."""


class DeleteState(TrainRequest, frozen=True, kw_only=True, tag="delete_state"):
    name: str


class PayloadRef(TrainRequest, frozen=True, kw_only=True, tag="ref"):
    """A request too large for a message (R7): the real one is the object ``object_name`` with this SHA-256."""

    object_name: str
    digest: str
    size_bytes: int


AnyTrainRequest = (
    Forward | ForwardBackward | OptimStep | SaveWeights | SaveState | LoadState | ListStates | DeleteState | PayloadRef
)
TRAIN_DECODER: msgspec.json.Decoder[AnyTrainRequest] = msgspec.json.Decoder(AnyTrainRequest)


class ErrorInfo(Wire, frozen=True, kw_only=True):
    """A typed error: a stable ``code`` and one line for a person."""

    code: str
    message: str


class TrainResult(Wire, frozen=True, kw_only=True):
    """Answer to one TrainRequest; kept in openrl_results under ``<tenant>.<job>.<incarnation>.<seq>``.

    Attributes:
        metrics: ``loss`` (summed over tokens ÷ normalizer), ``tokens``, ``kl`` (k1 estimate against the given
            logprobs), ``clip_fraction``, ``ratio_max``, ``grad_norm``, ``seconds`` … as the operation has them.
        logprobs: per datum, per token, aligned with ``tokens`` (forward only).
        version: the weights version written (save_weights).
        states: the job's saved states by name (list_states).
    """

    seq: int
    error: ErrorInfo | None = None
    metrics: dict[str, float] = {}
    logprobs: list[list[float]] | None = None
    version: int | None = None
    states: list[SavedState] | None = None


RESULT_DECODER: msgspec.json.Decoder[TrainResult] = msgspec.json.Decoder(TrainResult)


class SamplingParams(Wire, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How to sample (V10). ``temperature`` 0 = greedy. ``seed`` None = not reproducible.

    ``top_k`` 0 and ``top_p`` 1.0 and ``min_p`` 0.0 switch the filters off. Returned logprobs are of the model's
    distribution after the temperature and before the filters. ``prompt_logprobs`` and ``prompt_top_logprobs`` (how many
    of the likeliest tokens at each place, 0 = none) are of the prompt and always of temperature 1.
    """

    n: int = 1
    max_tokens: int = 64
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: list[str] = []
    stop_token_ids: list[int] = []
    prompt_logprobs: bool = False
    prompt_top_logprobs: int = 0

    @property
    def scores_prompt(self) -> bool:
        return self.prompt_logprobs or self.prompt_top_logprobs > 0


TokenLogprob = tuple[int, float]


class SampleRequest(Wire, frozen=True, kw_only=True):
    """Ask a runtime for completions. ``deadline`` is Unix seconds; later answers are not sent.

    ``at_least``: do not start before this weights version serves; ``exact``: only with this one. At most one of them.
    Version 0 is the base model (LoRA: the base without an adapter).
    """

    request: str
    tenant: str
    job: str
    incarnation: int
    prompts: list[list[int]]
    params: SamplingParams
    deadline: float
    reply_to: str = ""
    at_least: int | None = None
    exact: int | None = None


class CancelSample(Wire, frozen=True, kw_only=True):
    """Nobody waits for this SampleRequest any more (V10). Said once, to every sampler of the runtime."""

    request: str


class Agreement(Wire, frozen=True, kw_only=True):
    """How far the sampler's log-probabilities are from the trainer's, on one version and the same tokens (V12).

    Attributes:
        num_tokens: sampled at temperature 1 with ``version`` alone.
        mean, max: of the absolute difference of a token's two log-probabilities, in nats.
        kl: k3 estimate of KL(sampler ‖ trainer) a token: mean of ``exp(d) - 1 - d``, d = trainer - sampler
            (Schulman 2020, "Approximating KL Divergence").
    """

    tenant: str
    job: str
    incarnation: int
    version: int
    num_tokens: int
    mean: float
    max: float
    kl: float


class AgreementVerdict(Wire, frozen=True, kw_only=True):
    """A sampler's answer: ``limit`` of the mean difference (``--agreement-limit``, 0: none); is it above?"""

    limit: float
    above: bool


class Sequence(Wire, frozen=True, kw_only=True):
    """One completion: ``tokens``, their ``logprobs`` and the weights ``versions`` that produced each; why it ended.

    ``finish_reason``: ``stop`` (stop id or string, or eos; included in tokens) or ``length``.
    """

    tokens: list[int]
    logprobs: list[float]
    versions: list[int]
    finish_reason: str


class SampleResult(Wire, frozen=True, kw_only=True):
    """``sequences[p][i]``: completion i of prompt p. ``prompt_logprobs[p]`` aligned with the prompt when asked for, so
    are ``prompt_top_logprobs[p]``: the likeliest tokens at each place, likeliest first (none at the first place)."""

    request: str
    sequences: list[list[Sequence]] = []
    prompt_logprobs: list[list[float]] | None = None
    prompt_top_logprobs: list[list[list[TokenLogprob]]] | None = None
    error: ErrorInfo | None = None
    seconds: float = 0.0


SAMPLE_DECODER: msgspec.json.Decoder[SampleRequest] = msgspec.json.Decoder(SampleRequest)
CANCEL_DECODER: msgspec.json.Decoder[CancelSample] = msgspec.json.Decoder(CancelSample)
SAMPLE_RESULT_DECODER: msgspec.json.Decoder[SampleResult] = msgspec.json.Decoder(SampleResult)
