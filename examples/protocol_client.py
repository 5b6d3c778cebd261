"""A stranger at the coordinator's door: what docs/protocol.md says, without Weft and without torch.

    python examples/protocol_client.py COORDINATOR ADAPTER_DIR POLICY

takes the policy's lease, puts the manifest of a PEFT directory (adapter_config.json and
adapter_model.safetensors), begins a transfer, reads its plan, attends its group as rank 0, and
gives it up. Calls go through grpcurl, or `buf curl`, whichever is installed.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import secrets
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

PROTOCOL_REVISION = 1
_ALIGN = 256
_BUCKET_BYTES = 64 * 2**20
_CHUNK_ENTRIES = 4096
_WSUM64 = 2
#: ``DataType`` by the names that safetensors has, with the size of an element.
_DTYPES = {"F32": (1, 4), "F16": (2, 2), "BF16": (3, 2)}


class Call(subprocess.Popen[str]):
    """One call, of which requests are written and responses read, both as JSON."""

    def __init__(self, target: str, method: str) -> None:
        if grpcurl := shutil.which("grpcurl"):
            words = [grpcurl, "-plaintext", "-format-error", "-d", "@", target]
            words.append(f"weft.v1.{method}")
        else:
            words = [shutil.which("buf") or "buf", "curl", "--protocol", "grpc"]
            words += ["--http2-prior-knowledge", "-d", "@-", f"http://{target}/weft.v1.{method}"]
        pipe = subprocess.PIPE
        super().__init__(words, stdin=pipe, stdout=pipe, stderr=pipe, text=True, bufsize=1)

    def say(self, **request: Any) -> None:
        """Send one request."""
        assert self.stdin
        self.stdin.write(json.dumps(request) + "\n")

    def hear(self) -> Any:
        """Wait for one response; None at the end."""
        assert self.stdout
        text = ""
        while line := self.stdout.readline():
            text += line
            try:
                return json.loads(text)
            except ValueError:
                continue
        return None


def call(target: str, method: str, *requests: dict[str, Any]) -> Any:
    """Send all requests; the response, or ``(None, error)``."""
    with Call(target, method) as running:
        out, err = running.communicate("".join(json.dumps(request) for request in requests))
    return (json.loads(out or "{}"), "") if running.returncode == 0 else (None, out + err)


def must(answer: Any) -> Any:
    """The response; ends the program where the call has failed."""
    response, error = answer
    if response is None:
        _end(error)
    return response


def _end(error: str) -> NoReturn:
    sys.exit(f"refused: {status_of(error)}")


def status_of(error: str) -> str:
    """``STATUS/REASON: message`` of what the tools print of a failed call."""
    found = json.loads(error[error.index("{") :])
    reasons = [
        detail.get("reason") or _reason(base64.b64decode(detail["value"] + "=="))
        for detail in found.get("details", [])
        if "ErrorInfo" in (detail.get("type") or detail.get("@type") or "")
    ]
    code = found["code"]
    name = code.upper() if isinstance(code, str) else _CODES[code]
    return "/".join([name, *reasons]) + f": {found['message']}"


#: By number, as grpcurl gives them.
_CODES = (
    "OK",
    "CANCELLED",
    "UNKNOWN",
    "INVALID_ARGUMENT",
    "DEADLINE_EXCEEDED",
    "NOT_FOUND",
    "ALREADY_EXISTS",
    "PERMISSION_DENIED",
    "RESOURCE_EXHAUSTED",
    "FAILED_PRECONDITION",
    "ABORTED",
    "OUT_OF_RANGE",
    "UNIMPLEMENTED",
    "INTERNAL",
    "UNAVAILABLE",
    "DATA_LOSS",
    "UNAUTHENTICATED",
)


def _reason(error_info: bytes) -> str:
    """Field 1, a text shorter than 128 bytes, comes first."""
    return error_info[2 : 2 + error_info[1]].decode()


def manifest_of(adapter: Path) -> tuple[list[dict[str, Any]], dict[str, Any], bytes]:
    """A manifest as chunks, its header, and the digest of its layout."""
    with adapter.open("rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(size))
    tensors: list[dict[str, Any]] = []
    buckets: list[dict[str, int]] = []
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        dtype, item_bytes = _DTYPES[entry["dtype"]]
        num_bytes = -(-math.prod(entry["shape"]) * item_bytes // _ALIGN) * _ALIGN
        if not buckets or buckets[-1]["payload_bytes"] + num_bytes > _BUCKET_BYTES:
            buckets.append({"payload_bytes": 0, "num_tensors": 0})
        place = {"bucket": len(buckets) - 1, "offset_bytes": buckets[-1]["payload_bytes"]}
        tensors.append({"name": name, "dtype": dtype, "dims": entry["shape"], **place})
        buckets[-1]["payload_bytes"] += num_bytes
        buckets[-1]["num_tensors"] += 1
    text = f"{_WSUM64}\n"
    text += "".join(f"{b['payload_bytes']} {b['num_tensors']}\n" for b in buckets)
    for t in tensors:
        dims = ",".join(map(str, t["dims"]))
        text += f"{t['name']} {t['dtype']} {dims} {t['bucket']} {t['offset_bytes']}\n"
    digest = hashlib.sha256(text.encode()).digest()
    header = {
        "num_tensors": len(tensors),
        "num_buckets": len(buckets),
        "total_bytes": sum(b["payload_bytes"] for b in buckets),
        "digest_algorithm": _WSUM64,
        "layout_digest": base64.b64encode(digest).decode(),
    }
    parts = range(0, len(tensors), _CHUNK_ENTRIES)
    chunks: list[dict[str, Any]] = [{"header": header, "buckets": buckets}]
    chunks += [{"tensors": tensors[i : i + _CHUNK_ENTRIES]} for i in parts]
    return chunks, header, digest


def main(target: str, directory: str, policy: str) -> None:
    """See the top of this file."""
    session = secrets.token_hex(8)
    lease = must(
        call(
            target,
            "PublishService/AcquirePolicy",
            {
                "trainer_id": "stranger",
                "session_id": session,
                "policy": policy,
                "kind": "POLICY_KIND_ADAPTER",
            },
        )
    )["lease"]
    token = lease["fencingToken"]
    print(f"lease of {policy}: token {token}, {lease['timeToLive']}")
    held = {"policy": policy, "fencing_token": token}

    chunks, header, digest = manifest_of(Path(directory, "adapter_model.safetensors"))
    layout = header["layout_digest"]
    put = must(call(target, "PublishService/PutManifest", *({"chunk": c} for c in chunks)))
    assert put["layoutDigest"] == layout
    print(
        f"manifest {digest.hex()[:12]}: {header['num_tensors']} tensors in "
        f"{header['num_buckets']} buckets, {header['total_bytes']} payload bytes"
    )

    begun = must(
        call(
            target,
            "PublishService/BeginTransfer",
            {
                **held,
                "request_id": secrets.token_hex(8),
                "session_id": session,
                "layout_digest": layout,
                "adapter": {"config_json": Path(directory, "adapter_config.json").read_text()},
                "backend": "gloo",
                "timeout": "30s",
                "protocol_revision": PROTOCOL_REVISION,
            },
        )
    )
    plan, version = begun["group"], begun["version"]
    print(
        f"begun {version['policy']}@{version['version']}: group of {plan['size']}, rank "
        f"{plan.get('rank', 0)}, epoch {plan['epoch']}, over {plan['backend']}, to "
        f"{', '.join(begun['replicaIds'])}"
    )

    credential = {"group_id": plan["groupId"], "token": plan["token"]}
    stream = Call(target, "RendezvousService/Attend")
    hello = {"credential": credential, "rank": 0, "protocol_revision": PROTOCOL_REVISION}
    stream.say(hello={**hello, "num_buckets_in_flight": 2})
    welcome = stream.hear()
    if welcome is None:
        _end(stream.communicate()[1])
    print(f"attends: {welcome['welcome']['numAttending']} of {plan['size']}")
    store = {"credential": credential, "count": {}}
    keys = must(call(target, "RendezvousService/CallStore", store)).get("number", 0)
    print(f"store: {keys} keys")

    # From here on a trainer needs torch: the group is a c10d process group over that store.
    give_up = {**held, "transfer_id": begun["transferId"], "message": "a stranger's first try"}
    must(call(target, "PublishService/AbortTransfer", give_up))
    _, error = call(target, "PublishService/AwaitTransfer", {"transfer_id": begun["transferId"]})
    print(f"given up: {status_of(error).partition(':')[0]}")
    stream.communicate()
    must(call(target, "PublishService/ReleasePolicy", held))


if __name__ == "__main__":
    main(*sys.argv[1:])
