"""Where objects live, as one line of configuration.

    file:///PATH                                      a local or shared folder
    s3://BUCKET/PREFIX?region=REGION&endpoint=URL     S3 and everything that speaks it
    gs://BUCKET/PREFIX?endpoint=URL                   Google Cloud Storage
    az://CONTAINER/PREFIX?account=NAME&endpoint=URL   Azure Blob Storage

PREFIX and the queries are optional. URLs stand in logs and process lists, so they never hold credentials; obstore takes
those from the environment (`AWS_ACCESS_KEY_ID`, …). For the same reason no message here repeats a query's value.
"""

from __future__ import annotations

import random
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

import msgspec

from braid.model.errors import InvalidArgument, InvalidName, NotAvailable

try:
    from obstore.exceptions import BaseError
    from obstore.store import AzureStore, GCSStore, S3Store
except ImportError as missing:
    raise NotAvailable(
        f"reading and writing history needs obstore, which cannot be imported ({missing}): run "
        "`pip install 'braidmq[history]'` for braid.history, `pip install 'braidmq[spark]'` for Spark, `pip install "
        "'braidmq[server]'` for a broker"
    ) from missing

from braid.ports.disk import Disk
from braid.storage.objects.disk import DiskObjects
from braid.storage.objects.remote import RemoteObjects
from braid.storage.objects.store import Objects

if TYPE_CHECKING:
    from obstore.store import ClientConfig, RetryConfig


class RemoteLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How long a request may take. At worst `retry_window_s` + `request_timeout_s` + `longest_pause_s`."""

    connect_timeout_s: float = 5.0
    request_timeout_s: float = 60.0
    """One attempt with its whole body: 64 MiB pass at 1.1 MiB/s."""
    retries: int = 4
    first_pause_s: float = 0.1
    longest_pause_s: float = 5.0
    retry_window_s: float = 60.0
    """No retry begins later than this after the first attempt did."""

    def __post_init__(self) -> None:
        times = (self.connect_timeout_s, self.request_timeout_s, self.first_pause_s, self.longest_pause_s)
        if not all(0 < seconds <= 3_600 for seconds in (*times, self.retry_window_s)) or not 0 <= self.retries <= 100:
            raise InvalidArgument(
                f"{self} cannot bound requests: each time must be above 0 and at most 3600 s, the retries 0 to 100"
            )


class _Cloud(NamedTuple):
    store: Any
    holder: str
    """What it calls a bucket."""
    queries: dict[str, str]
    """A query of the URL → the library's name for it."""
    credentials: str


_CLOUDS = {
    "s3": _Cloud(S3Store, "BUCKET", {"region": "region", "endpoint": "endpoint"}, "AWS_ACCESS_KEY_ID and its like"),
    "gs": _Cloud(GCSStore, "BUCKET", {"endpoint": "base_url"}, "GOOGLE_APPLICATION_CREDENTIALS and its like"),
    "az": _Cloud(
        AzureStore,
        "CONTAINER",
        {"account": "account_name", "endpoint": "endpoint"},
        "AZURE_STORAGE_ACCOUNT_KEY and its like",
    ),
}
_SCHEMES = ", ".join(f"{scheme}://" for scheme in ("file", *_CLOUDS))


def open_objects(
    url: str,
    *,
    disk: Disk,
    limits: RemoteLimits = RemoteLimits(),  # noqa: B008 (frozen)
    random: random.Random | None = None,
) -> Objects:
    """Open a store without reaching it: a wrong URL raises `InvalidArgument` here, an absent store on first use."""
    try:
        parts = urlsplit(url)
    except ValueError:
        raise InvalidArgument(f"cannot open objects: their URL is malformed; use one of {_SCHEMES}") from None
    if parts.scheme == "file":
        return DiskObjects(disk, _path(parts), random=random)
    if cloud := _CLOUDS.get(parts.scheme):
        return _remote(parts, cloud, limits)
    asked = f"scheme {parts.scheme!r}" if parts.scheme else "no scheme"
    raise InvalidArgument(f"cannot open objects: their URL has {asked}; use one of {_SCHEMES}")


def outer_objects(url: str, *, disk: Disk) -> list[Objects]:
    """Open the stores of all prefixes around that of a URL that `open_objects` takes."""
    parts = urlsplit(url)
    path = unquote(parts.path).strip("/")
    folders = [path[:end] for end, character in enumerate(path) if character == "/"]
    if parts.scheme == "file":
        return [DiskObjects(disk, f"/{folder}") for folder in folders]
    outer = ["", *folders] if path else []
    return [_remote(parts._replace(path=folder), _CLOUDS[parts.scheme], RemoteLimits()) for folder in outer]


def folder_of(url: str) -> str | None:
    """Return the folder that a file URL names; None for every other store."""
    parts = urlsplit(url)
    return _path(parts) if parts.scheme == "file" else None


def _path(parts: SplitResult) -> str:
    path = unquote(parts.path)
    if parts.netloc not in ("", "localhost"):
        raise InvalidArgument("cannot open objects: a file URL has three slashes and no host; use file:///PATH")
    if parts.query or parts.fragment:
        raise InvalidArgument(f"cannot open objects in {path!r}: a file URL takes no query and no fragment")
    names = path.strip("/").split("/")
    if not path.startswith("/") or "\0" in path or any(name in ("", ".", "..") for name in names):
        raise InvalidArgument(
            f"cannot open objects in {path!r}: name a folder below / by its absolute path, without '.' and '..'"
        )
    return "/" + "/".join(names)


def _remote(parts: SplitResult, cloud: _Cloud, limits: RemoteLimits) -> RemoteObjects:
    scheme, form = parts.scheme, f"{parts.scheme}://{cloud.holder}/PREFIX"
    if "@" in parts.netloc:
        raise InvalidArgument(
            f"cannot open objects: a {scheme} URL must not hold credentials; use {form} and set {cloud.credentials}"
        )
    if not parts.netloc or ":" in parts.netloc:
        raise InvalidArgument(
            f"cannot open objects: the {scheme} URL names no {cloud.holder.lower()}; use {form} (a server's address "
            "goes into ?endpoint=)"
        )
    if parts.fragment:
        raise InvalidArgument(f"cannot open objects: the {scheme} URL has a fragment (#); use {form}")
    queries = _queries(parts, cloud)
    options: ClientConfig = {
        "connect_timeout": timedelta(seconds=limits.connect_timeout_s),
        "timeout": timedelta(seconds=limits.request_timeout_s),
    }
    if queries.get("endpoint", "").startswith("http://"):
        options["allow_http"] = True
    retry: RetryConfig = {
        "max_retries": limits.retries,
        "retry_timeout": timedelta(seconds=limits.retry_window_s),
        "backoff": {
            "init_backoff": timedelta(seconds=limits.first_pause_s),
            "max_backoff": timedelta(seconds=limits.longest_pause_s),
            "base": 2,
        },
    }
    config = {cloud.queries[key]: value for key, value in queries.items()}
    try:
        store = cloud.store(parts.netloc, config=config, client_options=options, retry_config=retry)
        return RemoteObjects(store, unquote(parts.path).strip("/"))
    except InvalidName as error:
        raise InvalidArgument(
            f"cannot open objects at {scheme}://{parts.netloc}: its prefix is no folder: {error}"
        ) from None
    except (BaseError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise InvalidArgument(f"cannot open objects at {scheme}://{parts.netloc}: {reason}") from None


def _queries(parts: SplitResult, cloud: _Cloud) -> dict[str, str]:
    found: dict[str, str] = {}
    for key, value in parse_qsl(parts.query, keep_blank_values=True):
        if key not in cloud.queries or key in found or not value:
            raise InvalidArgument(
                f"cannot open objects at {parts.scheme}://{parts.netloc}: query {key!r} is unknown, empty or there "
                f"twice; known are {', '.join(cloud.queries)}; credentials come from {cloud.credentials}"
            )
        if key == "endpoint" and ("@" in value or urlsplit(value).scheme not in ("http", "https")):
            raise InvalidArgument(
                f"cannot open objects at {parts.scheme}://{parts.netloc}: the endpoint is no address; use "
                "http://HOST:PORT or https://HOST:PORT, without credentials"
            )
        found[key] = value
    return found
