"""One spelling of a document, so that a digest names what it says."""

import hashlib
import json


def spelled(document: object) -> str:
    return json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def digest_of(document: object) -> str:
    return hashlib.sha256(spelled(document).encode()).hexdigest()
