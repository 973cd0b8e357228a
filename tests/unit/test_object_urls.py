from __future__ import annotations

import pytest

from braid.model.errors import InvalidArgument
from braid.ports.os_disk import OsDisk
from braid.storage.objects.disk import DiskObjects
from braid.storage.objects.remote import RemoteObjects
from braid.storage.objects.store import Objects
from braid.storage.objects.urls import RemoteLimits, open_objects


@pytest.fixture(autouse=True)
def _no_credentials_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a-key-id")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "a-secret-key")


def opened(url: str) -> Objects:
    return open_objects(url, disk=OsDisk())


@pytest.mark.parametrize(
    ("url", "root"),
    [
        ("file:///var/lib/braid/objects", "/var/lib/braid/objects"),
        ("file:///srv/braid/", "/srv/braid"),
        ("file://localhost/srv/braid", "/srv/braid"),
        ("file:///mnt/with%20space", "/mnt/with space"),
    ],
)
def test_a_file_url_opens_a_folder(url: str, root: str) -> None:
    objects = opened(url)
    assert isinstance(objects, DiskObjects)
    assert repr(objects) == f"DiskObjects({root!r})"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("s3://bucket", """RemoteObjects(S3Store(bucket="bucket"), '')"""),
        ("s3://bucket/", """RemoteObjects(S3Store(bucket="bucket"), '')"""),
        ("s3://bucket/a/b/", """RemoteObjects(S3Store(bucket="bucket"), 'a/b/')"""),
        ("s3://bucket/a?region=eu-west-1", """RemoteObjects(S3Store(bucket="bucket"), 'a/')"""),
        ("s3://bucket/a?endpoint=http://127.0.0.1:9000", """RemoteObjects(S3Store(bucket="bucket"), 'a/')"""),
        ("gs://bucket/a", """RemoteObjects(GCSStore(bucket="bucket"), 'a/')"""),
        (
            "az://container/a?account=me",
            """RemoteObjects(AzureStore(container_name="container", account_name="me"), 'a/')""",
        ),
    ],
)
def test_a_cloud_url_opens_a_bucket_and_shows_no_credentials(url: str, shown: str) -> None:
    objects = opened(url)
    assert isinstance(objects, RemoteObjects)
    assert repr(objects) == shown


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("", "has no scheme; use one of file://, s3://, gs://, az://"),
        ("/var/lib/braid", "has no scheme"),
        ("ftp://host/path", "scheme 'ftp'"),
        ("s3://[::1", "malformed"),
        ("file://host/path", "three slashes and no host"),
        ("file:relative/path", "by its absolute path"),
        ("file:///", "name a folder below /"),
        ("file:///a/../b", "without '.' and '..'"),
        ("file:///a/%2e%2e/b", "without '.' and '..'"),
        ("file:///a//b", "by its absolute path"),
        ("file:///a?mode=1", "takes no query"),
        ("s3://", "names no bucket; use s3://BUCKET/PREFIX"),
        ("s3:///prefix", "names no bucket"),
        ("s3://127.0.0.1:9000/bucket", r"address goes into \?endpoint="),
        ("az:///prefix", "names no container"),
        ("s3://bucket/a//b", "its prefix is no folder"),
        ("s3://bucket/../b", "its prefix is no folder"),
        ("s3://bucket/a#b", "fragment"),
        ("s3://bucket/a?zone=b", "query 'zone' is unknown.*known are region, endpoint"),
        ("s3://bucket/a?region=x&region=y", "query 'region'.*twice"),
        ("s3://bucket/a?region=", "query 'region'.*empty"),
        ("s3://bucket/a?endpoint=127.0.0.1:9000", "the endpoint is no address"),
    ],
)
def test_a_wrong_url_is_refused_with_what_to_use(url: str, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        opened(url)


@pytest.mark.parametrize(
    "url",
    [
        "s3://AKIAKEY:hunter2@bucket/prefix",
        "s3://hunter2@bucket/prefix",
        "s3://bucket/prefix?access_key_id=hunter2",
        "s3://bucket/prefix?secret_access_key=hunter2",
        "s3://bucket/prefix?endpoint=http://me:hunter2@127.0.0.1:9000",
        "az://container/prefix?account=me&sas_key=hunter2",
        "gs://bucket/prefix?service_account_key=hunter2",
        "file://me:hunter2@host/path",
    ],
)
def test_a_url_with_credentials_is_refused_without_repeating_them(url: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        opened(url)
    assert "hunter2" not in str(caught.value)
    assert caught.value.__cause__ is None


def test_an_account_is_needed_for_azure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
    with pytest.raises(InvalidArgument, match="Account must be specified"):
        opened("az://container/prefix")


@pytest.mark.parametrize(
    "limits",
    [{"request_timeout_s": 0}, {"connect_timeout_s": -1}, {"retries": -1}, {"retry_window_s": 1e9}, {"retries": 101}],
)
def test_limits_that_bound_nothing_are_refused(limits: dict[str, float]) -> None:
    with pytest.raises(InvalidArgument, match="cannot bound requests"):
        RemoteLimits(**limits)  # type: ignore[arg-type]
