"""Everything slow that a sampler with the torch engine imports before it loads a model: its ``imports`` phase.

A warm start imports it once and forks samplers (B6): it starts no thread, opens no device, draws no random number.
"""

from __future__ import annotations

import transformers.masking_utils
import transformers.modeling_utils
import transformers.models.auto.modeling_auto  # noqa: F401

import openrl_sampler.service
import openrl_sampler.torch_engine  # noqa: F401
