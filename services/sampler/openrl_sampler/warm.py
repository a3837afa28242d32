"""What a warm start imports for samplers (B6): their start, and peft, otherwise imported with the first adapter."""

import peft  # noqa: F401

import openrl_sampler.preload  # noqa: F401
