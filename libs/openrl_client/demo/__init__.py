"""The demo: four jobs, two of each kind, on more workers than devices; rewards rise; a report says what happened.

``python -m openrl_client.demo`` (``make demo``). Everything is real: NATS, the services, worker processes with torch.
"""
