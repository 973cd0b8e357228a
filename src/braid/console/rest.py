"""The REST calls of a cluster, made with one person's token. Any broker takes any call, so one that does not answer is
passed over."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import httpx
import msgspec

from braid.model.names import TopicName, check_name

TIMEOUT_S: Final = 10.0
CHANGE_TIMEOUT_S: Final = 100.0
"""A move or a change of layout answers when it is done, or after a minute."""
PROBE_S: Final = 1.0
API: Final = "/admin/v2"


class RestError(Exception):
    """A call that was refused, or that no broker answered."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status: Final = status
        """0: no broker answered."""
        self.code: Final = code


class Rest:
    def __init__(self, http: httpx.AsyncClient, seeds: Sequence[str], token: str = "") -> None:
        self._http = http
        self._urls = list(dict.fromkeys(each.rstrip("/") for each in seeds))
        self._seeds = tuple(self._urls)
        self._token = token

    @property
    def token(self) -> str:
        return self._token

    @property
    def scheme(self) -> str:
        return self._seeds[0].partition("://")[0]

    def learn(self, addresses: Sequence[str]) -> None:
        """Ask these brokers from now on, in the order that `turn` made. Those given at the start come last."""
        found = [f"{self.scheme}://{each}" for each in addresses if each]
        kept = [each for each in self._urls if each in found]
        self._urls = list(dict.fromkeys([*kept, *found, *self._seeds]))

    def turn(self) -> None:
        """Let the next broker be asked first, so that all carry the load of being watched."""
        self._urls.append(self._urls.pop(0))

    async def get(self, path: str, **query: str) -> Any:
        return await self.call("GET", path, query=query)

    async def call(
        self,
        method: str,
        path: str,
        *,
        query: dict[str, str] | None = None,
        body: Any = None,
        timeout_s: float = TIMEOUT_S,
    ) -> Any:
        """Make a call and return its result; None if it has none. Only a read is tried again elsewhere after a
        connection that broke: nobody knows whether a change was made."""
        failure = "no broker is known"
        for url in list(self._urls):
            try:
                answer = await self._send(method, url + path, query, body, timeout_s)
            except httpx.ConnectError as error:
                failure = f"{url} cannot be reached: {error}"
                continue
            except httpx.HTTPError as error:
                failure = f"{url} did not answer: {str(error) or type(error).__name__}"
                if method == "GET":
                    continue
                raise RestError(0, "unknown-outcome", f"{failure}. It is not known whether it was done.") from error
            return _result(answer)
        raise RestError(0, "unreachable", failure)

    async def _send(
        self, method: str, url: str, query: dict[str, str] | None, body: Any, timeout_s: float
    ) -> httpx.Response:
        content = msgspec.json.encode(body) if body is not None else None
        headers = {"content-type": "application/json"} if body is not None else {}
        return await self._http.request(
            method,
            url,
            params=query or None,
            content=content,
            headers=headers | self._authorization(),
            timeout=timeout_s,
        )

    def _authorization(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self._token}"} if self._token else {}

    async def probe(self, admin: str) -> bool | None:
        """Return whether a broker is ready; None if it does not answer."""
        try:
            url = f"{self.scheme}://{admin}/readyz"
            return (await self._http.get(url, timeout=PROBE_S)).status_code == httpx.codes.OK
        except httpx.HTTPError:
            return None

    async def metrics(self, admin: str) -> str | None:
        try:
            url = f"{self.scheme}://{admin}/metrics"
            answer = await self._http.get(url, headers=self._authorization(), timeout=TIMEOUT_S)
        except httpx.HTTPError:
            return None
        return answer.text if answer.status_code == httpx.codes.OK else None


def _result(answer: httpx.Response) -> Any:
    if answer.is_success:
        return msgspec.json.decode(answer.content) if answer.content else None
    try:
        found = msgspec.json.decode(answer.content)
        raise RestError(answer.status_code, str(found["code"]), str(found["message"]))
    except (msgspec.DecodeError, UnicodeDecodeError, KeyError, TypeError):
        raise RestError(answer.status_code, "error", f"status {answer.status_code}") from None


def subscription_path(path: str, subscription: str) -> str:
    """Return where REST has a subscription of a topic. Raises `InvalidName` for what cannot be its name."""
    return f"{topic_path(path)}/subscriptions/{check_name('subscription', subscription)}"


def topic_path(path: str) -> str:
    """Return where REST has a topic, by its `tenant/namespace/name`."""
    return f"{API}/scalable/{TopicName.parse(path).path}"
