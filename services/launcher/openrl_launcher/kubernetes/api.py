"""Requests to the Kubernetes API over the official client's connection, without its models.

Credentials, TLS and token refresh are the client library's; bodies are plain objects, answers bytes for msgspec. Every
request has a deadline. Errors are the project's: ``Transient`` may be tried again, the others say what stands there.
``requests`` counts what was sent, by verb and resource.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp
import msgspec
from kubernetes.aio import client, config
from prometheus_client import Gauge

from openrl_common.errors import Conflict, Rejected, Transient, Unreachable

log = logging.getLogger(__name__)

REQUEST_S = 20.0
CONNECTIONS_MAX = 64
MANAGER = "openrl-launcher"
"""The field manager of everything applied: what another one has set is left alone."""
JSON = "application/json"
APPLY = "application/apply-patch+yaml"
MERGE = "application/merge-patch+json"


class Absent(Rejected):
    """There is no such object."""


class Exists(Conflict):
    """409: another object of that name, another version, or a precondition that does not hold."""


class Expired(Transient):
    """410: the resource version is too old, list again (K6)."""


class Silent(Transient):
    """A watch said nothing, not even a bookmark, for longer than it may."""


class Forbidden(Transient):
    """401, 403: a right is missing, a quota is full, or the API server has just started and knows no roles yet."""


class Refused(Rejected):
    """The API server says no: the object is not valid. The message names verb, object and its words."""


class _Status(msgspec.Struct):
    message: str = ""
    reason: str = ""
    code: int = 0


class KubeApi:
    """One connection. Make it with ``connect``, end it with ``close``."""

    def __init__(self, api: client.ApiClient, namespace: str) -> None:
        self._api = api
        self.namespace = namespace
        self.requests: Counter[str] = Counter()
        self.count: Gauge | None = None

    @classmethod
    async def connect(cls, *, kubeconfig: Path | None, namespace: str) -> KubeApi:
        """Inside a pod its service account's token, else ``kubeconfig``. Raises Rejected, saying which is missing."""
        configuration = client.Configuration()
        configuration.connection_pool_maxsize = CONNECTIONS_MAX
        # or aiohttp would look for proxies and for ~/.netrc before every request, the latter in a thread
        configuration.client_session_kwargs = {"trust_env": False}
        try:
            if kubeconfig is not None:
                await config.load_kube_config(config_file=str(kubeconfig), client_configuration=configuration)
            else:
                config.load_incluster_config(client_configuration=configuration)
        except (config.ConfigException, OSError) as error:
            where = f"kubeconfig {kubeconfig}" if kubeconfig is not None else "no --kubeconfig, and not inside a pod"
            raise Rejected(f"no Kubernetes cluster: {where} ({error})", code="no-cluster") from error
        configuration.proxy = configuration.proxy or _environment_proxy(configuration.host)
        return cls(client.ApiClient(configuration), namespace)

    async def close(self) -> None:
        await self._api.close()

    async def call(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Any = None,
        content_type: str = JSON,
        deadline_s: float = REQUEST_S,
    ) -> bytes:
        """One request; the answer's body.

        Raises:
            Absent, Exists, Expired, Forbidden, Refused: by the status. Transient: 429, 5xx. Unreachable: no answer.
        """
        self._count(method, path)
        try:
            async with asyncio.timeout(deadline_s):
                response = await self._send(method, path, query, body, content_type, deadline_s)
                data = await response.read()
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise Unreachable(f"the Kubernetes API does not answer {method} {path}: {error!r}") from error
        if response.status < 300:
            return bytes(data)
        raise _error(response.status, f"{method} {path}", bytes(data))

    async def ensure(self, collection: str, body: dict[str, Any]) -> bytes:
        """The object of ``body``'s name, made; applied when it is there already (K3, K11). Raises as ``call``.

        A plain create costs the API server a third less than server-side apply, which is what makes it repeatable.
        """
        try:
            return await self.call("POST", collection, query={"fieldManager": MANAGER}, body=body)
        except Exists:
            return await self.apply(collection, body)

    async def apply(self, collection: str, body: dict[str, Any]) -> bytes:
        """Server-side apply of the whole object. Raises as ``call``."""
        return await self.call(
            "PATCH",
            f"{collection}/{body['metadata']['name']}",
            query={"fieldManager": MANAGER, "force": "true"},
            body=body,
            content_type=APPLY,
        )

    async def stream(self, path: str, *, query: Mapping[str, str], silence_s: float) -> AsyncGenerator[bytes, None]:
        """Lines of a watch until the server ends it.

        Raises:
            Silent: nothing came for ``silence_s``. Transient: the connection broke. Expired: the answer is 410.
        """
        self._count("WATCH", path)
        response: aiohttp.ClientResponse | None = None
        try:
            async with asyncio.timeout(silence_s):
                sent = await self._send("GET", path, query, None, JSON, 24 * 3600.0)
            response = sent.response
            if sent.status >= 300:
                raise _error(sent.status, f"WATCH {path}", bytes(await sent.read()))
            while True:
                async with asyncio.timeout(silence_s):
                    line = await response.content.readline()
                if not line:
                    return
                yield line
        except TimeoutError as error:
            raise Silent(f"the watch of {path} was silent for {silence_s:g} s") from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise Transient(f"the watch of {path} broke: {error!r}") from error
        finally:
            if response is not None:
                response.close()

    async def _send(
        self, method: str, path: str, query: Mapping[str, str] | None, body: Any, content_type: str, timeout_s: float
    ) -> Any:
        headers = {"Accept": JSON, "Content-Type": content_type, "User-Agent": MANAGER}
        await self._api.update_params_for_auth(headers, [], ["BearerToken"], path, method, body)
        url = self._api.configuration.host + path + (f"?{urlencode(query)}" if query else "")
        return await self._api.rest_client.request(
            method, url, headers=headers, body=body, _request_timeout=aiohttp.ClientTimeout(total=timeout_s)
        )

    def _count(self, method: str, path: str) -> None:
        parts = path.split("/")
        at = (
            parts.index("namespaces") + 2 if "namespaces" in parts and len(parts) > parts.index("namespaces") + 2 else 0
        )
        resource = parts[at] if at else parts[4] if parts[1] == "apis" and len(parts) > 4 else parts[-1]
        self.requests[f"{method} {resource}"] += 1
        if self.count is not None:
            self.count.labels(f"{method} {resource}").set(self.requests[f"{method} {resource}"])


def _environment_proxy(host: str) -> str | None:
    """HTTPS_PROXY and NO_PROXY, as every client of Kubernetes heeds them."""
    parts = urlsplit(host)
    if proxy_bypass(parts.hostname or ""):
        return None
    return getproxies().get(parts.scheme)


def _error(status: int, what: str, data: bytes) -> Exception:
    try:
        said = msgspec.json.decode(data, type=_Status).message
    except msgspec.DecodeError:
        said = data[:300].decode(errors="replace")
    sentence = f"{what}: {said or status}"
    match status:
        case 404:
            return Absent(sentence)
        case 409:
            return Exists(sentence)
        case 410:
            return Expired(sentence)
        case 401 | 403:
            return Forbidden(f"{sentence} (if that stays: deploy/base/rbac.yaml has the launcher's roles)")
        case 429 | 500 | 502 | 503 | 504:
            return Transient(sentence)
        case _:
            return Refused(sentence, code="refused")
