"""``weft verify``: versions that replicas hold, compared with files on this machine."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import typer
from rich.text import Text

from weft_rl.cli.console.output import CALL_SECONDS, connect, print_json, print_text
from weft_rl.cli.console.table import ColumnSpec, FittedTable, listing_console
from weft_rl.cli.verify import parity
from weft_rl.cli.verify.tensors import (
    FINE,
    ComparedTensor,
    LocalTensors,
    Verdict,
    base_dir_of,
    compare,
    counts,
    differing_settings,
    read_adapter,
    read_checkpoint,
)
from weft_rl.contract.checkpoint import StoredTensor, checkpoint_digest
from weft_rl.contract.errors import (
    InvalidRequestError,
    NotFoundError,
    PeerUnavailableError,
    WeftError,
)
from weft_rl.contract.names import (
    BASE_POLICY,
    STARTED_WITH,
    PolicyVersion,
    check_name,
    plural,
    provenance,
)
from weft_rl.contract.tensors import DataType
from weft_rl.progress import ShownProgress, shown
from weft_rl.rpc.codec import POLICY_VERSION, TENSOR, vector_from_proto
from weft_rl.rpc.pool_listing import get_pool
from weft_rl.rpc.status import error_from_rpc
from weft_rl.v1 import generate_pb2, types_pb2
from weft_rl.v1 import inspect_pb2 as pb
from weft_rl.v1.inspect_pb2_grpc import InspectServiceStub

#: A little longer than the coordinator waits for a replica.
_DIGEST_SECONDS = 610.0
_MAX_CALLS = 8
_DIGEST_CHARS = 12
_MAX_SHOWN = 20
_NOT_COMPARED = "log-probabilities are not compared: "


def run_verify(
    coordinator: str,
    path: Path,
    policy: str,
    *,
    base: Path | None,
    prompts: Sequence[str],
    with_parity: bool,
    json_output: bool,
) -> bool:
    """Compare what is served with local files, and print the report; return whether it is equal.

    Raises:
        BadParameter: The files at ``path`` or ``base`` are of another kind; no call was made.
        WeftError: The coordinator does not answer, or knows no such policy.
    """
    is_adapter = policy.partition("@")[0] != BASE_POLICY
    name = ""
    with shown("verify") as progress:
        try:
            read = read_adapter if is_adapter else read_checkpoint
            local = read(path, progress)
            if is_adapter and base is None:
                base, name = base_dir_of(path)
            local_base = None
            if is_adapter and base is not None:
                local_base = read_checkpoint(base, progress)
        except InvalidRequestError as error:
            raise typer.BadParameter(error.message, param_hint="PATH") from None
        with connect(coordinator) as channel:
            pool = _Pool(channel, progress)
            version = pool.version(policy)
            report = Report([_compare_part(pool, version, local, lambda _: version)])
            if is_adapter:
                _add_base(report, pool, version, local_base, name)
        report.remarks += _remarks(pool, report)
        if with_parity:
            model_dir = base if is_adapter else path
            _add_parity(report, pool, model_dir, path if is_adapter else None, prompts)
    if json_output:
        print_json(report.as_dict())
    else:
        report.show()
    return not report.wrong


class _Pool:
    """State of a pool, read once; raises ``POOL_EMPTY`` if no replica is ready."""

    def __init__(self, channel: grpc.Channel, progress: ShownProgress) -> None:
        self.progress = progress
        self._stub = InspectServiceStub(channel)
        listed = get_pool(self._stub, CALL_SECONDS)
        self.vector = listed.version_vector
        self.ready = [r for r in listed.replicas if r.state == pb.REPLICA_STATE_READY]
        self.others = [r for r in listed.replicas if r.state != pb.REPLICA_STATE_READY]
        if not self.ready:
            raise PeerUnavailableError(
                "no replica is ready: weft status says why", reason="POOL_EMPTY"
            )

    def version(self, name: str) -> PolicyVersion:
        """Return the version that ``base``, ``math`` or ``math@17`` names in this pool."""
        policy, _, number = name.partition("@")
        check_name(policy, "policy")
        if number:
            return PolicyVersion.parse(name)
        served = _served(self.vector, policy)
        if served is None:
            raise NotFoundError(f"the pool serves no {policy!r}", reason="POLICY_UNKNOWN")
        return served

    def record(self, version: PolicyVersion) -> pb.Version:
        """Return the catalog's record of a version, empty if it has none."""
        request = pb.ListVersionsRequest(
            policy=version.policy, page_size=1, page_token=str(version.version + 1)
        )
        listed = self._stub.ListVersions(request, timeout=CALL_SECONDS).versions
        is_it = listed and listed[0].version.version == version.version
        return listed[0] if is_it else pb.Version()

    def digests(
        self, replica: pb.Replica, version: PolicyVersion
    ) -> tuple[Row, list[StoredTensor], str]:
        """Have a replica digest the tensors of a version; return them with an adapter's config."""
        row = Row(replica.replica_id)
        if not vector_from_proto(replica.version_vector).holds(version):
            serves = _served(replica.version_vector, version.policy)
            row.error = f"serves {serves or f'no {version.policy}'}"
            return row, [], ""
        request = pb.DigestTensorsRequest(
            replica_id=replica.replica_id, version=POLICY_VERSION.encode(version)
        )
        tensors: list[StoredTensor] = []
        config_json = ""
        try:
            for response in self._stub.DigestTensors(request, timeout=_DIGEST_SECONDS):
                tensors += map(TENSOR.decode, response.chunk.tensors)
                config_json = config_json or response.chunk.adapter.config_json
        except grpc.RpcError as failed:
            error = error_from_rpc(failed)
            row.error = f"{error.message} ({error.reason})"
            return row, [], ""
        row.digest = checkpoint_digest(tensors)
        return row, tensors, config_json


def _served(vector: types_pb2.VersionVector, policy: str) -> PolicyVersion | None:
    """Return the version that a bare name stands for."""
    known = vector_from_proto(vector)
    if policy == BASE_POLICY:
        return PolicyVersion(BASE_POLICY, known.base) if known.base >= 0 else None
    entry = known.adapters.get(policy)
    return PolicyVersion(policy, entry.alias) if entry and entry.alias else None


def _compare_part(
    pool: _Pool,
    version: PolicyVersion,
    local: LocalTensors,
    version_of: Callable[[pb.Replica], PolicyVersion],
) -> ReportPart:
    """Compare what each replica holds with local files."""
    part = ReportPart(version, local.path)
    verdicts: dict[bytes, dict[str, int]] = {}
    asked = [(replica, version_of(replica)) for replica in pool.ready]
    pool.progress.step(
        lambda: f"replicas digest {version}, {len(part.rows)} of {len(asked)} have answered"
    )
    with ThreadPoolExecutor(min(_MAX_CALLS, len(asked))) as threads:
        for row, served, config_json in threads.map(lambda of: pool.digests(*of), asked):
            part.rows.append(row)
            if row.digest and row.digest not in verdicts:
                found = compare(served, local.tensors, local.cast_digest, local.optional(served))
                verdicts[row.digest] = counts(found)
                part.differences[row.digest] = [c for c in found if c.verdict not in FINE]
            row.tensors = verdicts.get(row.digest, {})
            for says in differing_settings(config_json, local) if config_json else ():
                setting = ComparedTensor("adapter_config.json", Verdict.DIFFERENT, says)
                if setting not in part.differences[row.digest]:
                    part.differences[row.digest].append(setting)
    return part


def _add_base(
    report: Report, pool: _Pool, version: PolicyVersion, local: LocalTensors | None, name: str
) -> None:
    """Add the base below an adapter: the one it was trained on, and the one it is served over."""
    record = pool.record(version)
    trained_on = (
        record.trained_on_base_version if record.HasField("trained_on_base_version") else None
    )
    served = _served(pool.vector, BASE_POLICY) or STARTED_WITH
    said = f"{version} was {provenance(trained_on, served.version)}"
    # A base that is here is compared itself: the pool may not know the content behind a number.
    is_wrong = record.over_another_base and local is None
    (report.failures if is_wrong else report.remarks).append(said)
    if local is None:
        where = "its config does not name the base that it was trained on"
        if name:
            where = f"{name}, which it was trained on, is not on this machine"
        report.remarks.append(
            f"the base below {version} is not compared: {where}; name it with --base"
        )
        return

    def served_by(replica: pb.Replica) -> PolicyVersion:
        return PolicyVersion(BASE_POLICY, replica.version_vector.base)

    report.parts.append(_compare_part(pool, served, local, served_by))


def _remarks(pool: _Pool, report: Report) -> Iterator[str]:
    if pool.others:
        names = ", ".join(replica.replica_id for replica in pool.others)
        yield f"not compared, because they are not ready: {names}"
    first = pool.ready[0].capabilities
    served = DataType(first.base_dtype).torch_name
    if STARTED_WITH in {part.version for part in report.parts}:
        yield f"base@0 is compared as its files hold it; replicas serve its floats as {served}"
    if any(Verdict.EQUAL_AFTER_CAST.value in r.tensors for p in report.parts for r in p.rows):
        yield "tensors that are equal after a cast were sent in another type of floats"
    if first.quantization:
        yield (
            f"replicas quantise the base as they load it ({first.quantization}): what they "
            "received is compared, not the quantised weights"
        )


def _add_parity(
    report: Report,
    pool: _Pool,
    model_dir: Path | None,
    adapter: Path | None,
    prompts: Sequence[str],
) -> None:
    """Have replicas sample tokens, and score them with the local model."""
    part, capabilities = report.parts[0], pool.ready[0].capabilities
    if model_dir is None or not (model_dir / "config.json").is_file():
        where = f"{model_dir} holds no config.json" if model_dir else "the base is not here"
        report.remarks.append(_NOT_COMPARED + where)
        return
    dtype = DataType(capabilities.base_dtype)
    pool.progress.step(f"loading {model_dir.name} with transformers")
    try:
        model = parity.LocalModel(model_dir, adapter, dtype)
    except ImportError as error:  # whose name transformers' classes do not set
        missing = f"{error.name} is not installed here" if error.name else str(error).strip()
        report.remarks.append(_NOT_COMPARED + missing[:300])
        return
    except InvalidRequestError as error:
        report.failures.append(_NOT_COMPARED + error.message)
        return
    asked: list[str | generate_pb2.TokenIds] = [*prompts]
    asked = asked or [*parity.default_prompts(model.vocab_size, model.special_tokens)]
    pool.progress.step("replicas sample")
    addresses = {replica.replica_id: replica.address for replica in pool.ready}
    sampled = [
        (row, found)
        for row in part.rows
        if not row.error  # it serves the version
        and (found := _sample(report, row, addresses[row.replica_id], asked, model.vocab_size))
    ]
    if not sampled:
        return
    pool.progress.step("computing log-probabilities")
    try:
        exact, rounding = model.score([one for _, found in sampled for one in found])
    except Exception as error:  # noqa: BLE001 (of the model's own code, which may need more than a text)
        why = f"transformers' model does not score a text: {type(error).__name__}: {error}"
        report.remarks.append(_NOT_COMPARED + why[:300])
        return
    bound = 0.0 if capabilities.quantization else parity.bound_of(dtype, rounding)
    for row, found in sampled:
        own, exact = exact[: len(found)], exact[len(found) :]
        row.parity = parity.compared(found, own, bound)


def _sample(
    report: Report,
    row: Row,
    address: str,
    prompts: Sequence[str | generate_pb2.TokenIds],
    vocab_size: int,
) -> list[parity.SampledTokens]:
    """Have a replica sample tokens; note the reason and return none if they cannot be scored."""
    try:
        found = parity.sample(address, report.parts[0].version, prompts)
    except WeftError as error:
        row.parity_error = f"{error.message} ({error.reason})"
        return []
    largest = max(max(*one.prompt, *one.tokens) for one in found)
    if largest >= vocab_size:
        row.parity_error = f"token {largest} is beyond the {vocab_size} of the local model"
        return []
    if found[0].mode not in parity.MODES:
        report.remarks.append(
            f"{_NOT_COMPARED}{row.replica_id} returns {found[0].mode}, not log-probabilities"
        )
        return []
    return found


# -- findings -----------------------------------------------------------------------------------


@dataclass
class Row:
    """Findings about one replica."""

    replica_id: str
    digest: bytes = b""
    error: str = ""
    """Reason why the digest is missing."""
    tensors: dict[str, int] = field(default_factory=dict)
    """Number of tensors of each verdict."""
    parity: parity.Parity | None = None
    parity_error: str = ""


@dataclass
class ReportPart:
    """Comparison of one version with local files: the version asked for, or the base below it."""

    version: PolicyVersion
    path: Path
    rows: list[Row] = field(default_factory=list)
    differences: dict[bytes, list[ComparedTensor]] = field(default_factory=dict)
    """Differing tensors and settings, by the digest of what replicas hold."""

    @property
    def wrong(self) -> list[str]:
        """Sentences about what differs; empty if every replica holds the local files' tensors and
        answers like them."""
        is_other = any(self.differences.values()) or any(row.error for row in self.rows)
        answers_otherwise = any(
            row.parity_error or (row.parity and not row.parity.is_fine) for row in self.rows
        )
        return [f"{self.version} is not what {self.path} holds"] * is_other + [
            f"{self.version} does not answer as {self.path} does"
        ] * answers_otherwise


@dataclass
class Report:
    """All findings of one run."""

    parts: list[ReportPart]
    failures: list[str] = field(default_factory=list)
    """Other failures."""
    remarks: list[str] = field(default_factory=list)
    """Notes on what was not compared, or how it was."""

    @property
    def wrong(self) -> list[str]:
        """All that differs or failed; empty if what is served equals the local files."""
        return [*(text for part in self.parts for text in part.wrong), *self.failures]

    def as_dict(self) -> dict[str, Any]:
        """Return the report as an object for programs."""
        return {
            "ok": not self.wrong,
            "wrong": self.wrong,
            "parts": [_part_dict(part) for part in self.parts],
            "remarks": self.remarks,
        }

    def show(self) -> None:
        """Print the report for people."""
        for part in self.parts:
            listing_console().print(_table(part))
            for text in _differences(part):
                print_text(text)
        for remark in self.remarks:
            print_text(Text(remark, "dim"))
        for why in self.wrong:
            print_text(Text(f"differs: {why}", "bold red"))
        if not self.wrong:
            what = f"equal: {self.parts[0].version} is what {self.parts[0].path} holds"
            print_text(Text(what, "bold green"))


def _part_dict(part: ReportPart) -> dict[str, Any]:
    replicas = []
    for row in part.rows:
        known: dict[str, Any] = {"replica_id": row.replica_id, "tensors": row.tensors}
        told = {"digest": row.digest.hex(), "error": row.error, "parity_error": row.parity_error}
        known |= {name: text for name, text in told.items() if text}
        if row.parity is not None:
            known["parity"] = {**dataclasses.asdict(row.parity), "ok": row.parity.is_fine}
        replicas.append(known)
    return {
        "version": str(part.version),
        "path": str(part.path),
        "ok": not part.wrong,
        "replicas": replicas,
        "differences": [
            {"digest": digest.hex(), "name": c.name, "verdict": c.verdict.value, "says": c.says}
            for digest, found in part.differences.items()
            for c in found
        ],
    }


def _table(part: ReportPart) -> FittedTable:
    has_parity = any(row.parity or row.parity_error for row in part.rows)
    columns = [
        ColumnSpec("replica", lambda row: row.replica_id),
        ColumnSpec("digest", lambda row: row.digest.hex()[:_DIGEST_CHARS] or "-"),
        ColumnSpec("tensors", _tensors, is_prose=True),
    ]
    columns += [ColumnSpec("log-probabilities", _parity, is_prose=True)] * has_parity
    table = FittedTable(f"{part.version} and {part.path}", columns)
    for row in part.rows:
        table.add(row)
    return table


def _tensors(row: Row) -> Text:
    if row.error:
        return Text(row.error, "red")
    return Text(", ").join(
        Text(f"{count} {verdict}", "green" if Verdict(verdict) in FINE else "red")
        for verdict, count in row.tensors.items()
    )


def _parity(row: Row) -> Text:
    if row.parity is None:
        return Text(row.parity_error or "-", "red" if row.parity_error else "")
    found = row.parity
    bound = f"bound {found.bound:.2g}" if found.bound else "no bound is known"
    return Text(
        f"of {plural(found.num_tokens, 'token')} at most {found.largest:.2g} apart, mean "
        f"{found.mean:.2g} ({bound})",
        "green" if found.is_fine else "red",
    )


def _differences(part: ReportPart) -> Iterator[Text]:
    several = len([found for found in part.differences.values() if found]) > 1
    for digest, found in part.differences.items():
        for compared in found[:_MAX_SHOWN]:
            where = f" at {digest.hex()[:_DIGEST_CHARS]}" if several else ""
            yield Text(
                f"  {compared.verdict.value}{where}: {compared.name}: {compared.says}", "red"
            )
        if (more := len(found) - _MAX_SHOWN) > 0:
            yield Text(f"  and {more} more: --json lists all", "red")
