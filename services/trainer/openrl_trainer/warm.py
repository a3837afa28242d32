"""What a warm start imports for trainers (B6): their start, and peft, which an FFT trainer started plainly spares."""

import peft  # noqa: F401

import openrl_trainer.preload  # noqa: F401
