"""What every OpenRL service shares: events, bus, store, settings, health, telemetry, weights manifests.

Never imports torch or vllm, so that a client and the control services stay small.
"""
