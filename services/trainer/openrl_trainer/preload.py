"""Everything slow that a trainer imports before it loads a model: importing this module is the ``imports`` phase.

A warm start imports it once and forks trainers (B6): it starts no thread, opens no device, draws no random number.
"""

from __future__ import annotations

import os


def set_variables() -> None:
    """What must stand in the environment before torch and the hub's client read it; what is set there wins."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


set_variables()

import transformers.modeling_utils  # noqa: E402
import transformers.models.auto.modeling_auto  # noqa: E402, F401

import openrl_trainer.engine  # noqa: E402
import openrl_trainer.service  # noqa: E402, F401
