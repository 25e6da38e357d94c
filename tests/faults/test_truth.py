"""Each divergence of moto in truth.py: plain moto has it, and the proxy does not."""

import base64
import hashlib
import zlib
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlsplit

import pytest
from botocore.exceptions import ClientError

from tests.faults.conftest import S3
from tests.faults.proxy import Proxy

HELLO, HELL0 = b"hello", b"hell0"
pytestmark = pytest.mark.slow  # tests of the harness: `make test-localaws`

PART = bytes(5 * 1024 * 1024)  # the least that S3 takes, except as the last
NOWHERE = '"00000000000000000000000000000000"'


def sha256(data: bytes) -> str:
    return base64.b64encode(hashlib.sha256(data).digest()).decode()


def md5(data: bytes) -> str:
    return base64.b64encode(hashlib.md5(data).digest()).decode()


def crc32(data: bytes) -> str:
    return base64.b64encode(zlib.crc32(data).to_bytes(4, "big")).decode()


@pytest.fixture
def moto(behind: Any) -> Any:
    return behind


def code_of(call: Callable[[], object]) -> str:
    with pytest.raises(ClientError) as caught:
        call()
    return f"{caught.value.response['ResponseMetadata']['HTTPStatusCode']} {caught.value.response['Error']['Code']}"


WRONG = {
    "SHA-256": {"ChecksumSHA256": sha256(HELLO)},
    "SHA-1": {"ChecksumSHA1": base64.b64encode(hashlib.sha1(HELLO).digest()).decode()},
    "CRC32": {"ChecksumCRC32": crc32(HELLO)},
    "MD5": {"ContentMD5": md5(HELLO)},
}


@pytest.mark.parametrize("claim", WRONG)
def test_bytes_that_are_not_what_was_claimed_are_refused(moto: Any, client: Any, bucket: str, claim: str) -> None:
    wrong = {"Bucket": bucket, "Key": "k", "Body": HELL0, **WRONG[claim]}
    assert code_of(lambda: client.put_object(**wrong)) == "400 BadDigest"
    assert code_of(lambda: client.head_object(Bucket=bucket, Key="k")) == "404 404"
    moto.put_object(**wrong)


@pytest.mark.parametrize("claim", WRONG)
def test_bytes_that_are_what_was_claimed_are_taken(client: Any, bucket: str, claim: str) -> None:
    client.put_object(Bucket=bucket, Key="k", Body=HELLO, **WRONG[claim])
    assert client.get_object(Bucket=bucket, Key="k")["Body"].read() == HELLO


def test_a_claim_that_is_no_digest_at_all_is_refused(client: Any, bucket: str) -> None:
    short = {"Bucket": bucket, "Key": "k", "Body": HELLO, "ChecksumSHA256": crc32(HELLO)}
    assert code_of(lambda: client.put_object(**short)) == "400 InvalidDigest"


def test_a_payload_that_is_not_the_signed_one_is_refused(proxy: Proxy, s3: S3, bucket: str) -> None:
    def status(url: str) -> int:
        connection = HTTPConnection(urlsplit(url).netloc)
        digest = hashlib.sha256(HELLO).hexdigest()
        connection.request("PUT", f"/{bucket}/k", HELL0, {"x-amz-content-sha256": digest})
        return connection.getresponse().status

    assert (status(proxy.url), status(s3.moto.url)) == (400, 200)


@pytest.mark.parametrize("claimed", [HELLO, HELL0])
def test_a_checksum_behind_the_body_is_checked_and_kept(proxy: Proxy, client: Any, bucket: str, claimed: bytes) -> None:
    """So do SDKs send a stream of which they do not know the end."""
    body = b"3\r\nhel\r\n2\r\nlo\r\n0\r\nx-amz-checksum-sha256:" + sha256(claimed).encode() + b"\r\n\r\n"
    fields = {
        "content-encoding": "aws-chunked",
        "x-amz-content-sha256": "STREAMING-UNSIGNED-PAYLOAD-TRAILER",
        "x-amz-decoded-content-length": "5",
        "x-amz-trailer": "x-amz-checksum-sha256",
    }
    connection = HTTPConnection(urlsplit(proxy.url).netloc)
    connection.request("PUT", f"/{bucket}/k", iter([body[:7], body[7:]]), fields, encode_chunked=True)
    assert connection.getresponse().status == (200 if claimed == HELLO else 400)
    if claimed == HELLO:
        found = client.get_object(Bucket=bucket, Key="k", ChecksumMode="ENABLED")
        assert (found["Body"].read(), found["ChecksumSHA256"]) == (HELLO, sha256(HELLO))


@pytest.mark.parametrize("read", ["head_object", "get_object"])
def test_a_checksum_sent_is_kept(moto: Any, client: Any, bucket: str, read: str) -> None:
    def kept(at: Any) -> tuple[str | None, str | None]:
        at.put_object(Bucket=bucket, Key="k", Body=HELLO, ChecksumSHA256=sha256(HELLO))
        found = getattr(at, read)(Bucket=bucket, Key="k", ChecksumMode="ENABLED")
        return found.get("ChecksumSHA256"), found.get("ChecksumType")

    assert kept(client) == (sha256(HELLO), "FULL_OBJECT")
    assert kept(moto) == (None, None)


def test_a_checksum_is_kept_with_each_version(client: Any, new_bucket: Callable[..., str]) -> None:
    where = {"Bucket": new_bucket(versioned=True), "Key": "k"}
    versions = [
        client.put_object(**where, Body=data, ChecksumSHA256=sha256(data))["VersionId"] for data in (HELLO, HELL0)
    ]
    kept = [
        client.head_object(**where, VersionId=version, ChecksumMode="ENABLED")["ChecksumSHA256"] for version in versions
    ]
    assert kept == [sha256(HELLO), sha256(HELL0)]


class Multipart:
    """An upload of two parts through one client."""

    def __init__(self, client: Any, bucket: str, **settings: str) -> None:
        self.client = client
        self.where = {"Bucket": bucket, "Key": "big"}
        self.id: str = client.create_multipart_upload(**self.where, **settings)["UploadId"]
        self.parts: list[dict[str, object]] = []

    def send(self, data: bytes, **claims: str) -> None:
        number = len(self.parts) + 1
        sent = self.client.upload_part(**self.where, UploadId=self.id, PartNumber=number, Body=data, **claims)
        self.parts.append({"PartNumber": number, "ETag": sent["ETag"], **claims})

    def complete(self, **conditions: str) -> Any:
        return self.client.complete_multipart_upload(
            **self.where, UploadId=self.id, MultipartUpload={"Parts": self.parts}, **conditions
        )


def two_parts(client: Any, bucket: str) -> Multipart:
    upload = Multipart(client, bucket, ChecksumAlgorithm="SHA256")
    for data in (PART, HELLO):
        upload.send(data, ChecksumSHA256=sha256(data))
    return upload


def test_an_object_of_parts_has_a_composite_checksum(moto: Any, client: Any, bucket: str) -> None:
    parts = b"".join(hashlib.sha256(data).digest() for data in (PART, HELLO))
    expected = f"{sha256(parts)}-2"
    completed = two_parts(client, bucket).complete()
    assert (completed["ChecksumSHA256"], completed["ChecksumType"]) == (expected, "COMPOSITE")
    assert "VersionId" not in completed
    for read in (client.head_object, client.get_object):
        found = read(Bucket=bucket, Key="big", ChecksumMode="ENABLED")
        assert (found["ChecksumSHA256"], found["ChecksumType"]) == (expected, "COMPOSITE")

    completed = two_parts(moto, bucket).complete()
    assert ("ChecksumSHA256" in completed, completed["VersionId"]) == (False, "null")
    assert moto.head_object(Bucket=bucket, Key="big", ChecksumMode="ENABLED")["ChecksumSHA256"] == sha256(parts)


def test_the_parts_that_are_there_are_listed_with_their_checksums(moto: Any, client: Any, bucket: str) -> None:
    """What an interrupted upload needs to continue without trusting ETags."""

    def listed(upload: Multipart) -> list[tuple[object, ...]]:
        found = upload.client.list_parts(**upload.where, UploadId=upload.id)
        return [(part["PartNumber"], part["Size"], part.get("ChecksumSHA256")) for part in found["Parts"]]

    assert listed(two_parts(client, bucket)) == [(1, len(PART), sha256(PART)), (2, 5, sha256(HELLO))]
    assert listed(two_parts(moto, bucket)) == [(1, len(PART), None), (2, 5, None)]


def test_an_upload_is_listed_with_its_beginning(moto: Any, client: Any, bucket: str) -> None:
    Multipart(client, bucket)
    (begun,) = client.list_multipart_uploads(Bucket=bucket)["Uploads"]
    assert abs(begun["Initiated"] - datetime.now(UTC)) < timedelta(minutes=5)
    assert moto.list_multipart_uploads(Bucket=bucket)["Uploads"][0]["Initiated"].year == 2010


def test_a_part_without_the_uploads_checksum_is_refused(moto: Any, client: Any, bucket: str) -> None:
    for at, refused in ((client, True), (moto, False)):
        upload = Multipart(at, bucket, ChecksumAlgorithm="SHA256")
        if refused:
            assert code_of(lambda: upload.send(HELLO, ChecksumCRC32=crc32(HELLO))) == "400 InvalidRequest"  # noqa: B023
        else:
            upload.send(HELLO, ChecksumCRC32=crc32(HELLO))


@pytest.mark.parametrize(("claim", "code"), [(sha256(HELL0), "InvalidPart"), (None, "InvalidRequest")])
def test_a_completion_must_know_its_parts(moto: Any, client: Any, bucket: str, claim: str | None, code: str) -> None:
    for at, refused in ((client, True), (moto, False)):
        upload = two_parts(at, bucket)
        upload.parts[1] = {name: value for name, value in upload.parts[1].items() if name != "ChecksumSHA256"}
        if claim is not None:
            upload.parts[1]["ChecksumSHA256"] = claim
        if refused:
            assert code_of(upload.complete) == f"400 {code}"
        else:
            upload.complete()


def test_a_completion_heeds_its_conditions(moto: Any, client: Any, bucket: str) -> None:
    etag = client.put_object(Bucket=bucket, Key="big", Body=HELLO)["ETag"]
    upload = two_parts(client, bucket)
    assert code_of(lambda: upload.complete(IfMatch=NOWHERE)) == "412 PreconditionFailed"
    assert code_of(lambda: upload.complete(IfNoneMatch="*")) == "412 PreconditionFailed"
    upload.complete(IfMatch=etag)
    two_parts(moto, bucket).complete(IfMatch=NOWHERE)


def test_a_sha256_of_parts_is_never_one_of_the_bytes(moto: Any, client: Any, bucket: str) -> None:
    settings = {"ChecksumAlgorithm": "SHA256", "ChecksumType": "FULL_OBJECT"}
    assert code_of(lambda: Multipart(client, bucket, **settings)) == "400 InvalidRequest"
    Multipart(moto, bucket, **settings)


def test_an_upload_that_is_gone_takes_no_part(moto: Any, client: Any, bucket: str) -> None:
    codes = []
    for at in (client, moto):
        upload = Multipart(at, bucket)
        at.abort_multipart_upload(**upload.where, UploadId=upload.id)
        codes.append(code_of(lambda: upload.send(HELLO)))  # noqa: B023
    assert codes == ["404 NoSuchUpload", "500 500"]


def test_deleting_many_heeds_the_etag_of_each(moto: Any, client: Any, bucket: str) -> None:
    def left(at: Any) -> list[str]:
        etags = {key: at.put_object(Bucket=bucket, Key=key, Body=HELLO)["ETag"] for key in ("a b", "c")}
        order = [{"Key": "a b", "ETag": NOWHERE}, {"Key": "c", "ETag": etags["c"]}]
        answer = at.delete_objects(Bucket=bucket, Delete={"Objects": order})
        failed = [(error["Key"], error["Code"]) for error in answer.get("Errors", ())]
        assert failed == ([("a b", "PreconditionFailed")] if at is client else [])
        return [content["Key"] for content in at.list_objects_v2(Bucket=bucket).get("Contents", ())]

    assert (left(client), left(moto)) == (["a b"], [])


def test_deleting_anything_means_any_etag(moto: Any, client: Any, bucket: str) -> None:
    where = {"Bucket": bucket, "Key": "k"}
    client.put_object(**where, Body=HELLO)
    assert code_of(lambda: client.delete_object(**where, IfMatch=NOWHERE)) == "412 PreconditionFailed"
    assert code_of(lambda: moto.delete_object(**where, IfMatch="*")) == "412 PreconditionFailed"
    client.delete_object(**where, IfMatch="*")
    assert code_of(lambda: client.delete_object(**where, IfMatch="*")) == "404 NoSuchKey"
