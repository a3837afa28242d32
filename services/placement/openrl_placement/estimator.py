"""The estimator (M1-M4): what a trainer and a sampler of one model need, from the model's own files.

A model's sizes are read from ``config.json`` and, where the weights are there, from the headers of its safetensors
files; never from a table of names (M1). The figures follow M2, every one can be overridden by the job, and all of
them are kept for ``explain``.

Invariants: pure but for :func:`read_model`, which reads two kinds of small file and no tensor data; the same model
and job give the same shape; bytes are rounded up, so that nothing is promised that does not fit.

Not here: activation memory of long sequences (the trainer's token budget keeps it inside the constant), quantised
weights.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from openrl_common.errors import Rejected
from openrl_common.quantities import GIB
from openrl_common.records import (
    DEVICES_MAX,
    ENGINES,
    ENGINES_THAT_CANNOT_PARK,
    JobKind,
    JobSpec,
    Overrides,
    Role,
    Shape,
)
from openrl_common.tensors import INDEX_NAME, SINGLE_NAME, read_checkpoint

_CONFIG_BYTES_MAX = 4 * 1024 * 1024
_KEYS_AND_VALUES = 2


@dataclasses.dataclass(frozen=True)
class Constants:
    """The constants of M2. The host rows are settings (P6): 20 and 24 GiB are more than a small host has.

    Attributes:
        update_method: M3: ``streamed`` needs its chunk and ``update_room_gib`` beside the weights, ``reload`` needs
            ``staging_factor`` times the largest tensor, because it stages that whole before it copies it.
        kv_tokens: tokens that the sampler's cache holds.
    """

    trainer_device_gib: float = 4.0
    sampler_device_gib: float = 0.5
    lora_slots_gib: float = 1.0
    update_room_gib: float = 1.0
    update_method: str = "streamed"
    update_chunk_gib: float = 0.25
    staging_factor: float = 2.5
    kv_tokens: int = 65_536
    trainer_host_gib: float = 20.0
    sampler_host_gib: float = 24.0


@dataclasses.dataclass(frozen=True)
class Model:
    """What the estimator knows of a model. Sizes per element are not in it: the job's dtype decides them.

    Attributes:
        kv_values_per_token: keys and values that one token adds to the cache, over all full-attention layers.
        kv_values_bounded: the most that sliding-window layers ever hold for one sequence (their window is full).
        positions_max: longest sequence that the config allows; 0 = it does not say.
        layers, outside_layers: the parameters outside (embeddings, head) are gathered as one piece when a model is
            sharded, and so is each layer.
        kv_heads: no more devices than these divide the cache of a tensor-parallel sampler; 0 = not known.
    """

    parameters: int
    largest_tensor_elements: int
    kv_values_per_token: int
    vocabulary: int
    kv_values_bounded: int = 0
    positions_max: int = 0
    layers: int = 1
    outside_layers: int = 0
    kv_heads: int = 0


# --- reading a model --------------------------------------------------------------------------------------------


def read_model(directory: str) -> Model:
    """Read a Hugging Face model directory.

    Raises:
        Rejected: code ``model-unreadable``: names the path and what was missing.
    """
    try:
        return _read(directory, Path(directory))
    except OSError as error:  # a directory on the way that is closed to placement, a name longer than there can be
        raise _unreadable(
            f"base model {directory!r} cannot be read ({error.strerror})", "give the path of a model"
        ) from error


def _read(directory: str, path: Path) -> Model:
    if not path.is_dir():
        raise _unreadable(
            f"base model {directory!r} is not a directory that placement can read", "give the path of a model"
        )
    config_path = path / "config.json"
    try:
        if config_path.stat().st_size > _CONFIG_BYTES_MAX:
            raise _unreadable(
                f"{config_path} has more than {_CONFIG_BYTES_MAX} bytes", "give a model's own config.json"
            )
        config = msgspec.json.decode(config_path.read_bytes())
    except OSError as error:
        raise _unreadable(
            f"{config_path} cannot be read ({error.strerror})", "give a Hugging Face model directory"
        ) from error
    except msgspec.DecodeError as error:
        raise _unreadable(f"{config_path} is not JSON ({error})", "fetch or save the model again") from error
    if not isinstance(config, dict):
        raise _unreadable(f"{config_path} is not a JSON object", "fetch or save the model again")
    model = from_config(config, str(config_path))
    if (path / INDEX_NAME).is_file() or (path / SINGLE_NAME).is_file():
        try:
            checkpoint = read_checkpoint(path)
        except Rejected as error:
            raise Rejected(str(error), code="model-unreadable") from error
        model = dataclasses.replace(
            model,
            parameters=checkpoint.num_elements,
            largest_tensor_elements=max(tensor.num_elements for tensor in checkpoint.tensors.values()),
        )
    return model


def from_config(config: Mapping[str, Any], source: str) -> Model:
    """Count a decoder-only transformer from its configuration (Llama, Qwen, Gemma and Mistral families and their like).

    Args:
        source: the path, for messages.

    Raises:
        Rejected: code ``model-unreadable``: a figure that the count needs is missing or not usable.
    """
    text = config.get("text_config")
    fields = _Fields(text if isinstance(text, dict) else config, source)
    hidden = fields.number("hidden_size", "n_embd", "d_model")
    layers = fields.number("num_hidden_layers", "n_layer", "num_layers")
    heads = fields.number("num_attention_heads", "n_head", "num_heads")
    vocabulary = fields.number("vocab_size")
    kv_heads = fields.number("num_key_value_heads", default=heads)
    head_dim = fields.number("head_dim", default=max(1, hidden // heads))
    intermediate = fields.number("intermediate_size", "n_inner", "ffn_dim", default=4 * hidden)
    tied = fields.values.get("tie_word_embeddings", config.get("tie_word_embeddings", True))

    attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
    feed_forward, expert_largest = _feed_forward(fields, hidden, intermediate)
    norms = 2 * hidden + 2 * head_dim
    per_layer_input = fields.number("hidden_size_per_layer_input", default=0)
    per_layer_table = fields.number("vocab_size_per_layer_input", default=vocabulary) * layers * per_layer_input
    parameters = (
        layers * (attention + feed_forward + norms)
        + hidden
        + vocabulary * hidden * (1 if tied else 2)
        + per_layer_table
        + 3 * layers * hidden * per_layer_input
    )
    largest = max(
        vocabulary * hidden, hidden * intermediate, expert_largest, hidden * heads * head_dim, per_layer_table
    )
    full, sliding, window = _attention_layers(fields, layers)
    values = kv_heads * head_dim * _KEYS_AND_VALUES
    return Model(
        parameters=parameters,
        largest_tensor_elements=largest,
        kv_values_per_token=full * values,
        kv_values_bounded=sliding * values * window,
        vocabulary=vocabulary,
        positions_max=fields.number("max_position_embeddings", "n_positions", default=0),
        layers=layers,
        outside_layers=vocabulary * hidden * (1 if tied else 2) + hidden,
        kv_heads=kv_heads,
    )


class _Fields:
    """Whole numbers of a configuration, by any of the names that model families use for them."""

    def __init__(self, values: Mapping[str, Any], source: str) -> None:
        self.values = values
        self._source = source

    def number(self, *names: str, default: int | None = None) -> int:
        for name in names:
            value = self.values.get(name)
            if isinstance(value, list) and value and all(isinstance(each, int) for each in value):
                value = max(value)  # one figure per layer: the largest keeps the estimate safe
            if isinstance(value, int) and not isinstance(value, bool) and (value > 0 or value == default):
                return value
            if value is not None:
                raise _unreadable(f"{self._source} has {name} = {value!r}", "it must be a whole number above 0")
        if default is None:
            raise _unreadable(f"{self._source} lacks {' or '.join(names)}", "give a decoder-only Hugging Face model")
        return default


def _feed_forward(fields: _Fields, hidden: int, intermediate: int) -> tuple[int, int]:
    """Parameters of one layer's feed-forward part, and its largest tensor when experts are fused (else 0)."""
    experts = fields.number("num_experts", "num_local_experts", "n_routed_experts", default=0)
    if not experts:
        return 3 * hidden * intermediate, 0
    width = fields.number("moe_intermediate_size", default=intermediate)
    shared = fields.number("shared_expert_intermediate_size", default=0)
    return 3 * hidden * (experts * width + shared) + hidden * experts, 2 * experts * hidden * width


def _attention_layers(fields: _Fields, layers: int) -> tuple[int, int, int]:
    """Full-attention layers, sliding-window layers, window in tokens. Other layers hold no cache that grows."""
    window = fields.values.get("sliding_window")
    types = fields.values.get("layer_types")
    if isinstance(types, list) and len(types) == layers:
        sliding = types.count("sliding_attention")
        return types.count("full_attention"), sliding, fields.number("sliding_window") if sliding else 0
    if not isinstance(window, int) or window <= 0 or fields.values.get("use_sliding_window") is False:
        return layers, 0, 0
    pattern = fields.number("sliding_window_pattern", default=0)
    full = layers // pattern if pattern else 0
    return full, layers - full, window


def _unreadable(what: str, remedy: str) -> Rejected:
    return Rejected(f"{what}: {remedy}", code="model-unreadable")


# --- figures (M2) -----------------------------------------------------------------------------------------------


def estimate(spec: JobSpec, role: Role, model: Model, constants: Constants) -> tuple[Shape, dict[str, float]]:
    """The shape of one workload and every figure behind it, in GiB (``parameters_billion`` aside).

    Formulas: M2. With dtype float32 every 2-byte figure doubles. Not exclusive unless the kind (P7) or the job
    says so, its engine cannot park, or it has several devices (P10). Of these each needs, with N of them::

        FFT trainer      8 B/param / N                      the model is sharded: weights, gradients and moments
                         + 4 B x (outside + 2 layers)       but whole at a time: what is outside the layers, the layer
                                                            in hand and the next one, and their gradients
                         + 4
        LoRA trainer     as on one device: data parallel, each holds the whole model
        sampler          weights, update room and cache / N (tensor parallel; the cache at most by its heads)

    On the host there is a process a device, each with its constant, and each reads the whole model as it starts.
    """
    if role is Role.TRAINER:
        figures = _trainer_figures(spec, model, constants)
        overrides = (spec.overrides.trainer_device_gib, spec.overrides.trainer_host_gib)
    else:
        figures = _sampler_figures(spec, model, constants)
        overrides = (spec.overrides.sampler_device_gib, spec.overrides.sampler_host_gib)
    host = figures.pop("host_weights") + figures.pop("host_constant")
    device = sum(figures.values())
    figures = {f"device_{name}": value for name, value in figures.items()}
    figures["parameters_billion"] = model.parameters / 1e9
    for name, value, override in (("device", device, overrides[0]), ("host", host, overrides[1])):
        if override is not None:
            figures[f"{name}_formula"] = value
        figures[name] = value if override is None else override
    exclusive = spec.exclusive if spec.exclusive is not None else spec.kind is JobKind.LORA
    exclusive |= role is Role.SAMPLER and spec.engine in ENGINES_THAT_CANNOT_PARK
    device_count = spec.trainer_devices if role is Role.TRAINER else spec.sampler_devices
    shape = Shape(
        role=role,
        device_count=device_count,
        device_bytes=math.ceil(figures["device"] * GIB),
        host_bytes=math.ceil(figures["host"] * GIB),
        exclusive=exclusive or device_count > 1,
    )
    return shape, {name: round(value, 4) for name, value in figures.items()}


def bytes_per_value(spec: JobSpec) -> int:
    """Bytes of one weight. ``auto`` counts as bfloat16: what GPUs use, and small CPU models fit in the constants."""
    return 4 if spec.dtype == "float32" else 2


def _trainer_figures(spec: JobSpec, model: Model, constants: Constants) -> dict[str, float]:
    billionths = model.parameters / GIB
    width = bytes_per_value(spec)
    num = spec.trainer_devices
    if spec.kind is JobKind.FFT:
        masters = 4 if spec.float32_masters and width == 2 else 0
        figures = {
            "weights": width * billionths / num,
            "gradients": width * billionths / num,
            "moments": (2 * width + masters) * billionths / num,
            "masters": masters * billionths / num,
            "constant": constants.trainer_device_gib,
            "host_weights": ((14 if width == 2 else 24) + 2 * masters + (num - 1) * width) * billionths,
            "host_constant": constants.trainer_host_gib * num,
        }
        if num > 1:
            layer = max(0, model.parameters - model.outside_layers) / model.layers
            figures["gathered"] = 2 * width * (model.outside_layers + min(2, model.layers) * layer) / GIB
        return figures
    return {
        "weights": width * billionths,
        "constant": constants.trainer_device_gib,
        "host_weights": width * billionths * num,
        "host_constant": constants.trainer_host_gib * num,
    }


def _sampler_figures(spec: JobSpec, model: Model, constants: Constants) -> dict[str, float]:
    parameters_gib = model.parameters / GIB
    width = bytes_per_value(spec)
    num = spec.sampler_devices
    cached = model.kv_values_per_token * constants.kv_tokens + model.kv_values_bounded
    figures = {
        "weights": width * parameters_gib / num,
        "engine": constants.sampler_device_gib + 0.125 * parameters_gib,
        "kv_cache": width * cached / GIB / min(num, model.kv_heads or num),
        "host_weights": width * parameters_gib,
        "host_constant": constants.sampler_host_gib * num,
    }
    if spec.kind is JobKind.LORA:
        figures["lora_slots"] = constants.lora_slots_gib + 0.25 * parameters_gib
    else:
        largest_gib = width * model.largest_tensor_elements / GIB / num
        streamed = constants.update_method == "streamed"
        chunk_gib = min(constants.update_chunk_gib, largest_gib)
        staged_gib = chunk_gib if streamed else constants.staging_factor * largest_gib
        figures["update_room"] = staged_gib + constants.update_room_gib
    return figures


# --- what a job may ask -----------------------------------------------------------------------------------------

LORA_RANKS = (16, 32, 64, 128, 256, 512)
"""Maximum ranks of LoRA runtimes: a job joins one of the smallest that holds its rank, so that runtimes are shared."""
DTYPES = ("auto", "float32", "bfloat16")
PRIORITY_MAX = 1_000
PATH_CHARACTERS_MAX = 4_096
_TAGS_MAX = 32
_TAG_CHARACTERS_MAX = 256


def check_spec(spec: JobSpec) -> None:
    """Refuse a job that no model could make sense of.

    Raises:
        Rejected: code ``bad-spec``: names the field, its value and what is allowed.
    """
    if not spec.base_model.strip():
        raise _bad("base_model is empty", "give the path of a model directory")
    if len(spec.base_model) > PATH_CHARACTERS_MAX or "\0" in spec.base_model:
        raise _bad(
            f"base_model {spec.base_model[:40]!r}… of {len(spec.base_model)} characters is no path",
            f"use at most {PATH_CHARACTERS_MAX} characters, none of them a null character",
        )
    if spec.dtype not in DTYPES:
        raise _bad(f"dtype {spec.dtype!r} is unknown", f"use {', '.join(DTYPES)}")
    if spec.engine not in ENGINES:
        raise _bad(f"engine {spec.engine!r} is unknown", f"use {', '.join(ENGINES)}")
    if abs(spec.priority) > PRIORITY_MAX:
        raise _bad(f"priority {spec.priority}", f"use -{PRIORITY_MAX} to {PRIORITY_MAX}")
    if spec.max_model_len < 0:
        raise _bad(f"max_model_len {spec.max_model_len}", "use 0 (what the model allows) or a number of tokens")
    for name, num in (("trainer_devices", spec.trainer_devices), ("sampler_devices", spec.sampler_devices)):
        if not 1 <= num <= DEVICES_MAX:
            raise _bad(f"{name} {num}", f"use 1 to {DEVICES_MAX}")
    if spec.sampler_devices > 1 and not spec.engine.startswith("vllm"):
        raise _bad(
            f"sampler_devices {spec.sampler_devices} with engine {spec.engine}", "use engine vllm, or one device"
        )
    if len(spec.tags) > _TAGS_MAX or any(len(k) + len(v) > _TAG_CHARACTERS_MAX for k, v in spec.tags.items()):
        raise _bad("tags are too many or too long", f"use at most {_TAGS_MAX} of {_TAG_CHARACTERS_MAX} characters")
    _check_lora(spec)
    _check_overrides(spec.overrides)


def check_length(spec: JobSpec, model: Model) -> None:
    """Refuse a ``max_model_len`` beyond what the model's config allows (code ``bad-spec``)."""
    if model.positions_max and spec.max_model_len > model.positions_max:
        raise _bad(f"max_model_len {spec.max_model_len}", f"this model allows at most {model.positions_max} tokens")


def max_rank(spec: JobSpec) -> int:
    """The maximum rank of the runtime that serves this job; 0 for FFT."""
    if spec.kind is JobKind.FFT:
        return 0
    rank = spec.lora.rank if spec.lora is not None else 16
    return next(limit for limit in LORA_RANKS if limit >= rank)


def _check_lora(spec: JobSpec) -> None:
    if spec.lora is None:
        return
    if spec.kind is JobKind.FFT:
        raise _bad("kind fft with lora settings", "use kind lora, or leave them out")
    if not 1 <= spec.lora.rank <= LORA_RANKS[-1]:
        raise _bad(f"lora rank {spec.lora.rank}", f"use 1 to {LORA_RANKS[-1]}")
    if not (math.isfinite(spec.lora.alpha) and spec.lora.alpha > 0):
        raise _bad(f"lora alpha {spec.lora.alpha}", "use a number above 0")
    if not 0 <= spec.lora.dropout < 1:
        raise _bad(f"lora dropout {spec.lora.dropout}", "use 0 up to, but not, 1")


def _check_overrides(overrides: Overrides) -> None:
    for name in overrides.__struct_fields__:
        value = getattr(overrides, name)
        if value is not None and not (math.isfinite(value) and 0 < value <= 1_000_000):
            raise _bad(f"override {name} = {value}", "use a number of GiB above 0")


def _bad(what: str, remedy: str) -> Rejected:
    return Rejected(f"{what}: {remedy}", code="bad-spec")
