"""The bytes that are really signed: type and length first, so that no document can be taken for another kind."""


def pre_authentication_encoding(payload_type: str, payload: bytes) -> bytes:
    """DSSE's PAE, version 1."""
    kind = payload_type.encode()
    return b"DSSEv1 %d %s %d %s" % (len(kind), kind, len(payload), payload)
