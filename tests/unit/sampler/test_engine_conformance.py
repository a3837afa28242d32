"""The torch engine against the suite that every engine passes (V4, V5, V8-V10, V12). Fixtures: conftest."""

from sampler_conformance import *  # noqa: F403
