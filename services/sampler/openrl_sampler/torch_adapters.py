"""The LoRA adapters of the torch engine (V9). Wraps peft, which patches the model in place.

A weights version lives in a *slot* (a peft adapter). A version that serves is never written to: the next one goes into
another slot, and the old slot is free once nobody uses it. A free slot of the same settings is written over, which
saves building the modules again (measured on two layers: 35 ms down to a few). Files and tensor shapes are checked
before; a write that breaks off spoils a slot that serves nobody, and the slot is deleted.

Because the engine names adapters by job, incarnation and version, a new version can never be answered by an old one.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from openrl_common.errors import Rejected
from openrl_common.weights import WeightsManifest

FREE_SLOTS_MAX = 4
_CONFIG_FILE = "adapter_config.json"
_TENSOR_FILE = "adapter_model.safetensors"
_NEVER_TAKEN_OUT = ("modules_to_save", "trainable_token_indices")
"""What peft puts around whole modules for these stays when the adapter goes, and refuses every later one."""
_IRRELEVANT_SETTINGS = {"base_model_name_or_path", "revision", "peft_version", "inference_mode"}


@dataclass(frozen=True, slots=True, eq=False)
class _Slot:
    """``tensors``: the slot's parameters under the names that a checkpoint uses, sharing their memory."""

    peft_name: str
    settings: str
    tensors: dict[str, Tensor]


class Adapters:
    """The adapters of one base model, by name; at most one is active."""

    def __init__(self, model: Any, max_rank: int) -> None:
        self._model = model
        self._max_rank = max_rank
        self._peft: Any = None
        self._layers: list[Any] = []
        self._slots: dict[str, _Slot] = {}
        self._free: list[_Slot] = []
        self._num_made = 0
        self._active: str | None = ""
        """Name of the active adapter, empty for the base, None when not known."""

    def load(self, name: str, manifest: WeightsManifest, directory: Path) -> None:
        """Read an adapter that nobody uses yet. Raises Rejected and leaves the others as they were."""
        config = self._config(manifest, directory)
        settings = _settings(config)
        slot = next((free for free in self._free if free.settings == settings), None)
        if slot is None:
            slot = self._make(config, settings, directory)
        else:
            self._free.remove(slot)
        try:
            _check_tensors(slot, manifest, directory)
            _write(slot, directory / _TENSOR_FILE)
        except Exception as error:
            self._delete(slot)
            if isinstance(error, Rejected):
                raise
            raise Rejected(f"adapter {directory} cannot be read: {error}", code="weights-missing") from error
        self._slots[name] = slot

    def drop(self, name: str) -> None:
        """Nobody uses the adapter any more."""
        slot = self._slots.pop(name, None)
        if slot is None:
            return
        if self._active == name:
            self._active = None
        self._free.append(slot)
        while len(self._free) > FREE_SLOTS_MAX:
            self._delete(self._free.pop(0))

    def activate(self, name: str) -> None:
        """Use this adapter from the next forward on; empty = the base model alone."""
        if name == self._active:
            return
        for layer in self._layers:
            layer.enable_adapters(bool(name))
            if name:
                layer.set_adapter(self._slots[name].peft_name, inference_mode=True)
        self._active = name

    # --- slots ---------------------------------------------------------------------------------------------------

    def _config(self, manifest: WeightsManifest, directory: Path) -> Any:
        from peft import LoraConfig

        for file in (_CONFIG_FILE, _TENSOR_FILE):
            if file not in manifest.files:
                raise Rejected(f"adapter {directory} lists no {file}", code="weights-manifest")
        try:
            config = LoraConfig.from_pretrained(str(directory))
            rank = max([int(config.r), *map(int, config.rank_pattern.values())])
        except Exception as error:  # whatever peft raises on a file that is no LoRA configuration
            raise Rejected(f"{directory / _CONFIG_FILE} is not usable: {error}", code="weights-manifest") from error
        for setting in _NEVER_TAKEN_OUT:
            if getattr(config, setting, None):
                raise Rejected(f"adapter {directory} has {setting}: only LoRA layers are served", code="weights-shape")
        if self._max_rank and rank > self._max_rank:
            raise Rejected(
                f"adapter {directory} has rank {rank}, this runtime holds at most {self._max_rank}",
                code="weights-shape",
            )
        config.inference_mode = True
        return config

    def _make(self, config: Any, settings: str, directory: Path) -> _Slot:
        from peft import PeftModel, get_peft_model_state_dict
        from peft.tuners.tuners_utils import BaseTunerLayer

        self._active = None
        self._num_made += 1
        peft_name = f"slot{self._num_made}"
        try:
            if self._peft is None:
                with warnings.catch_warnings():  # peft asks transformers under a name that is about to go
                    warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*", category=FutureWarning)
                    self._peft = PeftModel(self._model, config, adapter_name=peft_name)
            else:
                self._peft.add_adapter(peft_name, config)
        except Exception as error:  # whatever peft raises on settings that do not fit the model
            if self._peft is not None and peft_name in self._peft.peft_config:
                self._delete(_Slot(peft_name, settings, {}))
            raise Rejected(f"adapter {directory} does not fit the model: {error}", code="weights-shape") from error
        self._layers = [module for module in self._model.modules() if isinstance(module, BaseTunerLayer)]
        for layer in self._layers:
            layer.eval()
        self._model.requires_grad_(False)
        tensors = get_peft_model_state_dict(self._peft, adapter_name=peft_name, save_embedding_layers=False)
        return _Slot(peft_name, settings, dict(tensors))

    def _delete(self, slot: _Slot) -> None:
        self._active = None
        for layer in self._layers:
            layer.set_adapter([], inference_mode=True)  # or peft picks another one, with a warning per layer
        self._peft.delete_adapter(slot.peft_name)


def _settings(config: Any) -> str:
    """Two adapters of equal settings have the same modules, shapes and scaling."""
    values = {key: value for key, value in config.to_dict().items() if key not in _IRRELEVANT_SETTINGS}
    return repr(sorted((key, sorted(value) if isinstance(value, set) else value) for key, value in values.items()))


def _check_tensors(slot: _Slot, manifest: WeightsManifest, directory: Path) -> None:
    wanted = {key: tuple(tensor.shape) for key, tensor in slot.tensors.items()}
    found = {tensor.name: tuple(tensor.shape) for tensor in manifest.tensors}
    for key in sorted(wanted.keys() | found.keys()):
        if wanted.get(key) != found.get(key):
            raise Rejected(
                f"adapter {directory}: tensor {key!r} has shape {found.get(key)}, the model's is {wanted.get(key)}",
                code="weights-shape",
            )


def _write(slot: _Slot, path: Path) -> None:
    from safetensors.torch import load_file

    state = load_file(path)
    with torch.no_grad():
        for key, tensor in slot.tensors.items():
            tensor.copy_(state[key])
