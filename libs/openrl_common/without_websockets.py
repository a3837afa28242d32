"""nats-py without aiohttp: imported before anything of nats, by every module that imports it.

nats-py imports aiohttp, where there is one (the Kubernetes client brings it), for connections over websockets. Nobody
here makes one, and it was 0.23 s of the 0.65 s of CPU time that a service or a command takes to start. Whoever wants
aiohttp itself still imports it.
"""

from __future__ import annotations

import sys

_UNWANTED = [name for name in ("aiohttp", "multidict") if name not in sys.modules]

sys.modules.update(dict.fromkeys(_UNWANTED))  # type: ignore[arg-type]  # None: "there is no such module"
try:
    import nats.aio.client  # noqa: F401
finally:
    for _name in _UNWANTED:
        del sys.modules[_name]
