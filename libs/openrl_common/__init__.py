"""What every OpenRL service shares: events, bus, store, settings, health, telemetry, weights manifests.

Never imports torch or vllm, so that a client and the control services stay small.
"""

__version__ = "0.1.0"
