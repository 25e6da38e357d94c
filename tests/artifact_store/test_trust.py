"""Signatures: the holder of a key signed this manifest, and every change of a bit is detected."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import boto3
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.utils import Prehashed
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)
from hypothesis import given
from hypothesis import strategies as st

from nxpipe.artifact_store import Published, Store
from nxpipe.artifact_store.canonical import canonical_json, pre_authentication_encoding
from nxpipe.artifact_store.channel.change import Author, Requirements, promote, rollback
from nxpipe.artifact_store.channel.generation import Generation, Served
from nxpipe.artifact_store.channel.log import ChannelLog
from nxpipe.artifact_store.documents import as_time
from nxpipe.artifact_store.errors import Corrupt, InvalidDocument, Refused, StoreUnavailable
from nxpipe.artifact_store.layout import signature_folder
from nxpipe.artifact_store.trust.channel_trust import ChannelVerifier
from nxpipe.artifact_store.trust.envelope import PAYLOAD_TYPE, Envelope, Statement, sign, statement_of
from nxpipe.artifact_store.trust.keys import (
    BadKey,
    KeyFile,
    PublicKey,
    Signer,
    as_base64,
    from_base64,
    make_key_file,
    public_path,
)
from nxpipe.artifact_store.trust.kms import KmsKey
from nxpipe.artifact_store.trust.policy import Policy, TrustedKey, signing_with
from nxpipe.artifact_store.trust.signatures import Signatures
from nxpipe.artifact_store.trust.signers import open_signer
from tests.artifact_store.afar import first_generation
from tests.artifact_store.samples import MODEL, Place, folder, publish_verified, put
from tests.conftest import ROOT

BUILDER = "https://github.com/acme/models/.github/workflows/release.yml@refs/heads/main"


@dataclass(frozen=True)
class P256:
    """A substitute for KMS."""

    private: ec.EllipticCurvePrivateKey
    public: PublicKey

    def sign(self, message: bytes) -> bytes:
        return self.private.sign(message, ec.ECDSA(SHA256()))


def p256() -> P256:
    private = ec.generate_private_key(ec.SECP256R1())
    return P256(private, PublicKey.of(private.public_key(), "a test"))


def ed25519() -> KeyFile:
    private = Ed25519PrivateKey.generate()
    return KeyFile(private, PublicKey.of(private.public_key(), "a test"))


KINDS = {"Ed25519": ed25519, "P-256": p256}


def publish(store: Store, number: int = 1, *, model: str = MODEL) -> Published:
    manifest = put(store, f"artifact {number}", request=[model, number], model=model)
    return publish_verified(store, manifest)


@pytest.fixture
def local(tmp_path: Path) -> Place:
    return folder(tmp_path / "store")


def signed(local: Place, signer: Signer) -> tuple[Envelope, str]:
    published = publish(local.store)
    statement = statement_of(published.manifest, local.store.key_inputs(published.manifest), BUILDER)
    return sign(statement, signer), published.manifest_digest


def flips(data: bytes) -> Iterator[bytes]:
    """The bytes with one bit flipped, for every bit."""
    for bit in range(8 * len(data)):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        yield bytes(changed)


def with_signature(envelope: Envelope, **changed: str) -> Envelope:
    one = envelope.signatures[0].model_copy(update=changed)
    return envelope.model_copy(update={"signatures": (one,)})


# Envelopes


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_a_flipped_bit_anywhere_in_a_signature_file_is_refused(local: Place, make: Callable[[], Signer]) -> None:
    signer = make()
    envelope, digest = signed(local, signer)
    data = envelope.to_bytes()
    assert Envelope.from_bytes(data).statement(signer.public, digest).manifest_digest == digest
    for wrong in flips(data):
        with pytest.raises(InvalidDocument):
            Envelope.from_bytes(wrong).statement(signer.public, digest)


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_a_flipped_bit_of_a_signature_below_its_base64_is_refused(local: Place, make: Callable[[], Signer]) -> None:
    signer = make()
    envelope, digest = signed(local, signer)
    signature = from_base64(envelope.signatures[0].sig)
    assert signature
    for wrong in flips(signature):
        with pytest.raises(InvalidDocument, match="has not signed this payload"):
            with_signature(envelope, sig=as_base64(wrong)).statement(signer.public, digest)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda text: text.rstrip("="),
        lambda text: f"{text}\n",
        lambda text: f" {text}",
        lambda text: text.replace("+", "-").replace("/", "_") + "-",
        lambda text: (
            text[:-3] + chr(ord(text[-3]) + 1) + "=="
        ),  # bits behind the last byte, which a lenient reader drops
    ],
)
def test_base64_has_one_spelling(local: Place, spoil: Callable[[str], str]) -> None:
    signer = ed25519()
    envelope, digest = signed(local, signer)
    text = envelope.signatures[0].sig
    assert text.endswith("==")
    with pytest.raises(InvalidDocument, match="not in base64"):
        with_signature(envelope, sig=spoil(text)).statement(signer.public, digest)


def test_a_signature_is_of_one_manifest_by_one_key_for_one_payload_type(local: Place) -> None:
    signer, other = ed25519(), ed25519()
    envelope, digest = signed(local, signer)
    with pytest.raises(InvalidDocument, match="signature of manifest"):
        envelope.statement(signer.public, "0" * 64)
    with pytest.raises(InvalidDocument, match="signed by key"):
        envelope.statement(other.public, digest)
    with pytest.raises(InvalidDocument, match="has not signed"):
        with_signature(envelope, keyid=other.public.key_id).statement(other.public, digest)
    with pytest.raises(InvalidDocument, match="payload has the type"):
        envelope.model_copy(update={"payload_type": "application/json"}).statement(signer.public, digest)


def test_what_was_signed_as_another_type_is_no_signature_of_a_manifest(local: Place) -> None:
    signer = ed25519()
    envelope, digest = signed(local, signer)
    payload = from_base64(envelope.payload)
    assert payload
    elsewhere = signer.sign(pre_authentication_encoding("application/vnd.nxpipe.generation+json", payload))
    for wrong in (elsewhere, signer.sign(payload)):
        with pytest.raises(InvalidDocument, match="has not signed"):
            with_signature(envelope, sig=as_base64(wrong)).statement(signer.public, digest)


def test_a_second_signature_in_one_envelope_and_unknown_fields_are_refused(local: Place) -> None:
    envelope, _ = signed(local, ed25519())
    named = json.loads(envelope.to_bytes())
    for wrong in (
        named | {"signatures": named["signatures"] * 2},
        named | {"signatures": []},
        named | {"more": 1},
        {key: value for key, value in named.items() if key != "payloadType"},
    ):
        with pytest.raises(InvalidDocument):
            Envelope.from_bytes(canonical_json(wrong))


def test_a_signed_payload_that_is_no_statement_is_refused(local: Place) -> None:
    signer = ed25519()
    envelope, digest = signed(local, signer)
    for payload in (b"", b"{}", b"[1]", b"\xff", b'{"_type": "spaced"}'):
        signature = signer.sign(pre_authentication_encoding(PAYLOAD_TYPE, payload))
        wrong = with_signature(envelope, sig=as_base64(signature)).model_copy(update={"payload": as_base64(payload)})
        with pytest.raises(InvalidDocument):
            wrong.statement(signer.public, digest)


LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
ANYTHING = st.recursive(LEAVES, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=20)
NEARLY = st.fixed_dictionaries(
    {
        "payload": ANYTHING,
        "payloadType": ANYTHING,
        "signatures": st.lists(st.fixed_dictionaries({"keyid": ANYTHING, "sig": ANYTHING}), max_size=2) | ANYTHING,
    }
)


@given(st.binary() | (ANYTHING | NEARLY).map(lambda value: json.dumps(value, separators=(",", ":")).encode()))
def test_a_file_that_is_no_envelope_is_refused_and_nothing_worse(data: bytes) -> None:
    key = ed25519().public
    with pytest.raises(InvalidDocument):
        Envelope.from_bytes(data).statement(key, "0" * 64)


# Statements


def test_a_statement_is_in_totos_with_slsa_provenance_of_the_key_inputs(local: Place) -> None:
    inputs: dict[str, object] = {
        "task": "fill-mask",
        "compiler": {"backend": "emulator", "source": "c" * 64},
        "libraries": {"torch": "2.13.0"},
        "weights": {"kind": "safetensors", "files": {"model.safetensors": "d" * 64}},
    }
    published = publish(local.store)
    result = statement_of(published.manifest, inputs, BUILDER).to_json()
    assert result["_type"] == "https://in-toto.io/Statement/v1"
    assert result["predicateType"] == "https://slsa.dev/provenance/v1"
    assert result["subject"] == ({"name": published.model_id, "digest": {"sha256": published.manifest_digest}},)
    predicate: Any = result["predicate"]
    definition = predicate["buildDefinition"]
    assert definition["externalParameters"] == {"task": "fill-mask", "weights": inputs["weights"]}
    assert definition["internalParameters"] == {name: inputs[name] for name in ("compiler", "libraries")}
    assert {
        resolved_dependency["name"]: resolved_dependency["digest"]["sha256"]
        for resolved_dependency in definition["resolvedDependencies"]
    } == {
        "key inputs": published.request_key,
        "compiler": "c" * 64,
        "weights/model.safetensors": "d" * 64,
    }
    assert predicate["runDetails"] == {"builder": {"id": BUILDER}}


def test_a_statement_reads_back_and_is_the_same_whenever_it_is_made(local: Place) -> None:
    published = publish(local.store)
    first, second = (statement_of(published.manifest, {"request": 1}, BUILDER).to_bytes() for _ in range(2))
    assert first == second
    assert Statement.from_bytes(first).to_bytes() == first


# In a store


def test_each_key_signs_for_itself_and_is_proved_by_its_public_half(place: Place) -> None:
    store, one, two = place.store, ed25519(), p256()
    published = publish(store)
    assert Signatures(store).by(one.public, published.manifest_digest) is None
    for signer in (one, two):
        Signatures(store).add(published, signer, BUILDER)
        found = Signatures(store).by(signer.public, published.manifest_digest)
        assert found is not None
        assert (found.manifest_digest, found.builder) == (published.manifest_digest, BUILDER)
    assert Signatures(store).key_ids(published.manifest_digest) == sorted([one.public.key_id, two.public.key_id])


def test_a_signature_moved_to_another_manifest_or_key_or_damaged_is_corrupt(place: Place) -> None:
    store, signer, other = place.store, ed25519(), ed25519()
    first, second = publish(store, 1), publish(store, 2)
    Signatures(store).add(first, signer, BUILDER)
    right = f"{signature_folder(first.manifest_digest)}{signer.public.key_id}"
    data = place.objects()[right]
    for key, digest, content in (
        (signer, second.manifest_digest, data),
        (other, first.manifest_digest, data),
        (signer, first.manifest_digest, data[:-1]),
        (signer, first.manifest_digest, b"x" * (9 * 1024**2)),
    ):
        path = f"{signature_folder(digest)}{key.public.key_id}"
        place.write(path, content) if path in place.objects() else place.backend.create(path, _payload(content))
        with pytest.raises(Corrupt, match=path):
            Signatures(store).by(key.public, digest)


def _payload(data: bytes) -> Any:
    from nxpipe.artifact_store.backends.protocol import Payload

    return Payload.of(data)


def test_a_key_that_signs_with_another_than_it_shows_leaves_nothing_behind(local: Place) -> None:
    @dataclass(frozen=True)
    class Liar:
        public: PublicKey

        def sign(self, message: bytes) -> bytes:
            return ed25519().sign(message)

    published = publish(local.store)
    with pytest.raises(InvalidDocument, match="has not signed"):
        Signatures(local.store).add(published, Liar(ed25519().public), BUILDER)
    assert Signatures(local.store).key_ids(published.manifest_digest) == []


OFFLINE = """
import sys
from pathlib import Path

def refuse(event, args):
    if event.startswith("socket."):
        raise OSError("no network here")

sys.addaudithook(refuse)
from nxpipe.artifact_store import open_store
from nxpipe.artifact_store.trust.keys import PublicKey
from nxpipe.artifact_store.trust.signatures import Signatures
store, key, digest = sys.argv[1:]
statement = Signatures(open_store(store)).by(PublicKey.from_file(Path(key)), digest)
print(statement.manifest_digest, *({"boto3", "botocore", "numpy", "torch"} & set(sys.modules)))
"""


def _without_network() -> list[str]:
    """A network namespace of its own, if the machine permits one."""
    prefix = ["unshare", "--net"]
    try:
        allowed = subprocess.run([*prefix, "true"], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        allowed = False
    return prefix if allowed else []


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_a_signature_is_verified_without_a_network(tmp_path: Path, local: Place, make: Callable[[], Signer]) -> None:
    signer, key = make(), tmp_path / "release.pub"
    published = publish(local.store)
    Signatures(local.store).add(published, signer, BUILDER)
    key.write_bytes(signer.public.pem)
    command = [sys.executable, "-c", OFFLINE, str(tmp_path / "store"), str(key), published.manifest_digest]
    done = subprocess.run([*_without_network(), *command], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [published.manifest_digest]


# Keys


def test_a_new_key_is_for_its_owner_only_and_never_overwrites_one(tmp_path: Path) -> None:
    path = tmp_path / "release.key"
    before = os.umask(0)
    try:
        public = make_key_file(path)
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o600
    assert PublicKey.from_file(public_path(path)) == public == KeyFile.open(path).public
    with pytest.raises(BadKey, match="File exists"):
        make_key_file(path)
    assert KeyFile.open(path).public == public


def test_a_private_key_that_others_may_read_is_not_used(tmp_path: Path) -> None:
    path = tmp_path / "release.key"
    make_key_file(path)
    for mode in (0o640, 0o604, 0o620):
        path.chmod(mode)
        with pytest.raises(BadKey, match="chmod 600"):
            open_signer("file:release.key", tmp_path)


def _pem(key: Any, secret: Any = NoEncryption) -> bytes:
    return bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, secret()))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "no private key in PEM"),
        (b"\x00" * 20_000, "more than 16384 bytes"),
        (ed25519().public.pem, "no private key in PEM"),
        (_pem(ec.generate_private_key(ec.SECP256R1())), "unsupported"),
        (_pem(Ed25519PrivateKey.generate(), lambda: BestAvailableEncryption(b"secret")), "is encrypted"),
    ],
)
def test_what_is_no_key_to_sign_with_is_refused(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "key"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(BadKey, match=said):
        KeyFile.open(path)


def _public_pem(private: Any) -> bytes:
    return bytes(private.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "no public key in PEM"),
        (_pem(Ed25519PrivateKey.generate()), "the public key is in FILE.pub"),
        (_public_pem(rsa.generate_private_key(65537, 2048)), "unsupported"),
        (_public_pem(ec.generate_private_key(ec.SECP384R1())), "unsupported"),
    ],
)
def test_what_is_no_key_to_verify_with_is_refused(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "key.pub"
    path.write_bytes(content)
    with pytest.raises(BadKey, match=said):
        PublicKey.from_file(path)


@pytest.mark.parametrize("key", ["release.key", "file:", "kms:alias/release", "ssh:key"])
def test_a_signing_key_is_a_file_or_in_kms(tmp_path: Path, key: str) -> None:
    with pytest.raises(BadKey, match="allowed are file:PATH and kms:"):
        open_signer(key, tmp_path)


# KMS


@pytest.fixture
def kms(server: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Any:
    for name, value in server.items():
        monkeypatch.setenv(name, value)
    return boto3.client("kms")


def kms_key(kms: Any, spec: str = "ECC_NIST_P256") -> str:
    return f"kms:{kms.create_key(KeySpec=spec, KeyUsage='SIGN_VERIFY')['KeyMetadata']['Arn']}"


def test_a_kms_key_signs_and_its_public_half_alone_verifies(kms: Any, local: Place, tmp_path: Path) -> None:
    signer = open_signer(kms_key(kms), tmp_path)
    published = publish(local.store)
    Signatures(local.store).add(published, signer, BUILDER)
    exported = tmp_path / "kms.pub"
    exported.write_bytes(signer.public.pem)
    public = PublicKey.from_file(exported)
    assert public.key_id == signer.public.key_id
    assert Signatures(local.store).by(public, published.manifest_digest) is not None


@pytest.mark.parametrize("size", [1, 4096, 4097, 100_000])
def test_a_kms_key_signs_statements_of_any_size(size: int) -> None:
    """KMS hashes messages of up to 4096 bytes; moto hashes digests again, so this is by the letter of its manual."""
    local_key = p256()

    class Kms:
        def sign(self, *, Message: bytes, MessageType: str, **_: str) -> dict[str, bytes]:  # noqa: N803
            if MessageType == "RAW":
                assert len(Message) <= 4096
                return {"Signature": local_key.sign(Message)}
            assert len(Message) == 32
            return {"Signature": local_key.private.sign(Message, ec.ECDSA(Prehashed(SHA256())))}

    message = bytes(size)
    signature = KmsKey("arn:aws:kms:us-east-1:123456789012:key/1", Kms()).sign(message)
    assert local_key.public.proves(signature, message)


def test_a_kms_key_of_another_kind_or_none_is_refused(kms: Any, tmp_path: Path) -> None:
    with pytest.raises(BadKey, match="key spec ECC_NIST_P256"):
        _ = open_signer(kms_key(kms, "RSA_2048"), tmp_path).public
    absent = "kms:arn:aws:kms:us-east-1:123456789012:key/00000000-0000-0000-0000-000000000000"
    with pytest.raises(StoreUnavailable, match="kms:Sign"):
        _ = open_signer(absent, tmp_path).public


# Policy


def policy(*signers: Signer, threshold: int = 1, channels: frozenset[str] | None = None) -> Policy:
    trusted = tuple(TrustedKey(f"key-{n}", signer.public, channels) for n, signer in enumerate(signers))
    return Policy(trusted, frozenset({"prod"}), threshold)


def serve(store: Store, one: Published, rules: Policy, signer: Signer | None = None) -> Generation:
    author = Author("ann", "because", signing_with(signer) if signer else None)
    return promote(
        store, "prod", [one], author, Requirements(check_artifact=rules.artifact_check(store, "prod"))
    ).generation


def test_a_channel_takes_what_a_trusted_key_has_signed_and_nothing_else(local: Place) -> None:
    store, trusted, stranger = local.store, ed25519(), ed25519()
    one = publish(store)
    with pytest.raises(Refused, match="no key that it trusts has signed"):
        serve(store, one, policy(trusted))
    Signatures(store).add(one, stranger, BUILDER)
    with pytest.raises(Refused, match="no key that it trusts has signed"):
        serve(store, one, policy(trusted))
    Signatures(store).add(one, trusted, BUILDER)
    assert serve(store, one, policy(trusted), trusted).artifacts[0].manifest == one.record.manifest


def test_a_key_counts_only_for_its_channels_and_until_it_expires(local: Place) -> None:
    store, signer = local.store, ed25519()
    one = publish(store)
    Signatures(store).add(one, signer, BUILDER)
    now = store.backend.now()
    key = TrustedKey("release", signer.public)
    for wrong in (replace(key, channels=frozenset({"staging"})), replace(key, expires=now - 1)):
        with pytest.raises(Refused, match="no key that it trusts"):
            serve(store, one, Policy((wrong,), frozenset({"prod"})))
    right = replace(key, channels=frozenset({"prod"}), expires=now + 3600)
    assert serve(store, one, Policy((right,), frozenset({"prod"}))).generation == 1


def test_a_threshold_counts_keys_not_names(local: Place) -> None:
    store, first, second = local.store, ed25519(), p256()
    one = publish(store)
    Signatures(store).add(one, first, BUILDER)
    twice = Policy(
        (TrustedKey("a", first.public), TrustedKey("b", first.public), TrustedKey("c", second.public)),
        frozenset({"prod"}),
        threshold=2,
    )
    with pytest.raises(Refused, match="requires 2 signatures"):
        serve(store, one, twice)
    Signatures(store).add(one, second, BUILDER)
    assert serve(store, one, twice).generation == 1


def test_a_damaged_signature_of_a_trusted_key_is_reported_not_passed_over(local: Place) -> None:
    store, signer = local.store, ed25519()
    one = publish(store)
    Signatures(store).add(one, signer, BUILDER)
    path = f"{signature_folder(one.manifest_digest)}{signer.public.key_id}"
    local.write(path, local.objects()[path].replace(b"payload", b"paylaod", 1))
    with pytest.raises(Corrupt, match=path):
        serve(store, one, policy(signer))
    assert ChannelLog(local.backend, "prod").tip() is None


def roll_back(store: Store, rules: Policy, despite: str | None = None) -> Generation:
    doubt = rules.artifact_check(store, "prod")
    return rollback(store, "prod", Author("ann", "p99 doubled"), check_artifact=doubt, despite=despite).generation


def test_a_rollback_brings_back_what_a_trusted_key_has_signed_and_nothing_else(local: Place) -> None:
    store, signer, stranger = local.store, ed25519(), ed25519()
    rules = policy(signer)
    first, second, third = (publish(store, number) for number in range(3))
    for value, key in ((first, signer), (second, stranger), (third, signer)):
        Signatures(store).add(value, key, BUILDER)
        promote(store, "prod", [value], Author("ann", "before there was a policy"), Requirements())
    with pytest.raises(Refused, match=r"no key that it trusts has signed .* --despite-policy REASON"):
        roll_back(store, rules)
    assert ChannelLog(local.backend, "prod").read(4) is None
    doubt = rules.artifact_check(store, "prod")
    rolled_back = rollback(store, "prod", Author("ann", "skips the second"), to=1, check_artifact=doubt).generation
    assert rolled_back.artifacts[0].manifest == first.record.manifest


@pytest.mark.parametrize("fault", ["expired", "too few", "damaged"])
def test_a_rollback_despite_the_policy_says_so_in_the_log_when_the_policy_stood_against_it(
    local: Place, fault: str
) -> None:
    store, signer = local.store, ed25519()
    first, second = publish(store, 1), publish(store, 2)
    for entry in (first, second):
        Signatures(store).add(entry, signer, BUILDER)
        serve(store, entry, policy(signer))
    key = TrustedKey("release", signer.public, expires=store.backend.now() - 1 if fault == "expired" else None)
    rules = Policy((key,), frozenset({"prod"}), threshold=2 if fault == "too few" else 1)
    if fault == "damaged":
        local.write(f"{signature_folder(first.manifest_digest)}{signer.public.key_id}", b"{}")
    with pytest.raises(Corrupt if fault == "damaged" else Refused):
        roll_back(store, rules)
    rolled_back = roll_back(store, rules, despite="the key expired at midnight")
    assert rolled_back.artifacts[0].manifest == first.record.manifest
    assert rolled_back.reason.startswith("despite the signing policy, because the key expired at midnight (")
    assert rolled_back.reason.endswith("); p99 doubled")


def test_a_rollback_that_the_policy_allows_is_not_said_to_be_despite_it(local: Place) -> None:
    store, signer = local.store, ed25519()
    for number in range(2):
        one = publish(store, number)
        Signatures(store).add(one, signer, BUILDER)
        serve(store, one, policy(signer))
    assert roll_back(store, policy(signer), despite="to be sure").reason == "p99 doubled"


def test_what_is_served_already_does_not_hold_up_the_rollback_of_something_else(local: Place) -> None:
    store, signer = local.store, ed25519()
    unsigned, first, second = publish(store, 1, model="acme/other"), publish(store, 1), publish(store, 2)
    for entry in (first, second):
        Signatures(store).add(entry, signer, BUILDER)
    for entry in (unsigned, first, second):
        promote(store, "prod", [entry], Author("ann", "before there was a policy"), Requirements())
    served = roll_back(store, policy(signer)).artifacts
    assert {entry.manifest for entry in served} == {unsigned.record.manifest, first.record.manifest}


def test_a_channel_without_a_rule_takes_unsigned_artifacts(local: Place) -> None:
    assert policy(ed25519()).artifact_check(local.store, "staging") is None


def test_generations_are_believed_when_a_trusted_key_signed_them_and_reported_when_not(local: Place) -> None:
    store, signer, stranger = local.store, ed25519(), ed25519()
    rules = Policy((TrustedKey("release", signer.public),), frozenset({"prod"}))
    open_to_all = Requirements()
    for number, sign_with in enumerate((signer, None, stranger)):
        author = Author("ann", "", signing_with(sign_with) if sign_with else None)
        promote(store, "prod", [publish(store, number)], author, open_to_all)
    rollback(store, "prod", Author("ann", "", signing_with(signer)))
    log = ChannelLog(local.backend, "prod")
    faults = {entry.generation: rules.fault(entry) for entry in log.back_from(log.tip())}
    assert faults == {4: None, 3: "is signed by no key of the policy", 2: "is not signed", 1: None}
    assert {entry.generation: rules.authors(entry) for entry in log.back_from(log.tip())}[4] == ["release"]


def test_a_generation_that_was_changed_after_it_was_signed_is_reported(local: Place) -> None:
    signer = ed25519()
    rules = policy(signer)
    generation = serve(local.store, publish(local.store), Policy(), signer)
    assert rules.fault(generation) is None
    changes: list[dict[str, object]] = [
        {"actor": "mallory"},
        {"reason": "other"},
        {"channel": "prod", "artifacts": ()},
        {"at": "2020-01-01T00:00:00.000000Z"},
        {"write_id": "0" * 32},
    ]
    for change in changes:
        assert "no valid signature" in str(rules.fault(generation.model_copy(update=change))), change


def test_a_generation_of_a_key_that_had_expired_by_then_is_reported(local: Place) -> None:
    signer = ed25519()
    generation = serve(local.store, publish(local.store), Policy(), signer)
    for expires, believed in ((4e9, True), (1e9, False)):
        rules = Policy((TrustedKey("release", signer.public, expires=expires),), frozenset({"prod"}))
        assert (rules.fault(generation) is None) is believed


def test_a_stolen_key_that_has_expired_cannot_date_back_before_the_store_took_the_object(place: Place) -> None:
    """The chain would accept the first generation; on S3 the object has Amazon's date."""
    store, signer = place.store, ed25519()
    now = store.backend.now()
    published, day = publish(store), 24 * 3600
    plain = first_generation("prod", [Served.of(published)]).model_copy(update={"at": as_time(now - 60 * day)})
    signature = signing_with(signer)(plain.signed_bytes())
    forged = plain.model_copy(update={"signatures": (signature,)})
    assert store.records.create(forged)
    for expires, believed in ((now - 50 * day, False), (now + 50 * day, True), (None, True)):
        rules = Policy((TrustedKey("release", signer.public, expires=expires),), frozenset({"prod"}))
        assert rules.fault(forged) is None, "by the date that it gives itself"
        fault = ChannelVerifier(rules, None).fault(store.backend, forged)
        assert (fault is None) is believed, fault
