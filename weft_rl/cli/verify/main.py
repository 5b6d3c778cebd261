"""``weft verify``: a version, as the replicas hold it, beside the files on this machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import typer
from rich.console import Console

from weft_rl.cli.console.connection import connect
from weft_rl.cli.console.output import print_json
from weft_rl.cli.verify import parity
from weft_rl.cli.verify.local import (
    LocalTensors,
    base_dir_of,
    differing_settings,
    read_adapter,
    read_checkpoint,
)
from weft_rl.cli.verify.pool import PoolView, served_of
from weft_rl.cli.verify.report import Part, Report, Row
from weft_rl.cli.verify.tensors import FINE, Compared, Verdict, compare, counts
from weft_rl.contract.errors import InvalidRequestError, WeftError
from weft_rl.contract.names import BASE_POLICY, STARTED_WITH, PolicyVersion, provenance
from weft_rl.contract.tensors import DataType
from weft_rl.v1 import generate_pb2
from weft_rl.v1 import inspect_pb2 as pb


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
    """Compare what is served with what lies here, and print; return whether it is the same.

    Raises:
        BadParameter: Other files lie at ``path`` or ``base``; nobody was asked.
        WeftError: The coordinator does not answer, or knows no such policy.
    """
    is_adapter = policy.partition("@")[0] != BASE_POLICY
    name = ""
    try:
        local = read_adapter(path) if is_adapter else read_checkpoint(path)
        if is_adapter and base is None:
            base, name = base_dir_of(path)
        local_base = read_checkpoint(base) if is_adapter and base is not None else None
    except InvalidRequestError as error:  # before anybody is asked
        raise typer.BadParameter(error.message, param_hint="PATH") from None
    with connect(coordinator) as channel:
        view = PoolView(channel)
        version = view.version(policy)
        report = Report([_compare_held(view, version, local, lambda _: version)])
        if is_adapter:
            _add_base(report, view, version, local_base, name)
    report.remarks += _remarks(view, report)
    if with_parity:
        model_dir = base if is_adapter else path
        _add_parity(report, view, model_dir, path if is_adapter else None, prompts)
    if json_output:
        print_json(report.as_dict())
    else:
        report.show(Console())
    return not report.wrong


def _compare_held(
    view: PoolView,
    version: PolicyVersion,
    local: LocalTensors,
    version_of: Callable[[pb.Replica], PolicyVersion],
) -> Part:
    """Compare what each replica holds with what lies here; ``version_of`` says which version."""
    part, contents = Part(version, local.path), view.contents(version_of)
    verdicts: dict[bytes, dict[str, int]] = {}
    for digest, served in contents.tensors.items():
        found = compare(served, local.tensors, local.cast_digest, local.tied)
        verdicts[digest] = counts(found)
        part.differences[digest] = [one for one in found if one.verdict not in FINE]
    for held in contents.held:
        row = Row(held.replica.replica_id, held.digest, held.error)
        row.tensors = verdicts.get(held.digest, {})
        part.rows.append(row)
        if held.config_json:
            for says in differing_settings(held.config_json, local):
                setting = Compared("adapter_config.json", Verdict.DIFFERENT, says)
                if setting not in part.differences[held.digest]:
                    part.differences[held.digest].append(setting)
    return part


def _add_base(
    report: Report, view: PoolView, version: PolicyVersion, local: LocalTensors | None, name: str
) -> None:
    """Add the base below an adapter: what it was trained on, and what it is served over."""
    record = view.record(version)
    trained_on = (
        record.trained_on_base_version if record.HasField("trained_on_base_version") else None
    )
    served = served_of(view.pool.version_vector, BASE_POLICY) or STARTED_WITH
    said = f"{version} was {provenance(trained_on, served.version)}"
    # Where the base lies here, it is compared itself: which content a number has, the pool may
    # not know.
    is_wrong = record.over_another_base and local is None
    (report.failures if is_wrong else report.remarks).append(said)
    if local is None:
        where = (
            f"{name}, which it was trained on, is not on this machine"
            if name
            else ("its config does not name what it was trained on")
        )
        report.remarks.append(f"the base below {version} is not compared: {where}; say --base")
        return

    def served_by(replica: pb.Replica) -> PolicyVersion:
        return PolicyVersion(BASE_POLICY, replica.version_vector.base)

    report.parts.append(_compare_held(view, served, local, served_by))


def _remarks(view: PoolView, report: Report) -> Iterator[str]:
    if view.others:
        names = ", ".join(replica.replica_id for replica in view.others)
        yield f"not asked, since not ready: {names}"
    first = view.ready[0].capabilities
    served = DataType(first.base_dtype).torch_name
    versions = {part.version for part in report.parts}
    if STARTED_WITH in versions:
        yield f"base@0 is compared as its files hold it; replicas serve its floats as {served}"
    if any(Verdict.EQUAL_AFTER_CAST.value in r.tensors for p in report.parts for r in p.rows):
        yield "what is equal after a cast was sent in another type of floats than it has here"
    if first.quantization:
        yield (
            f"replicas quantise the base as they load it ({first.quantization}): what they were "
            "given is compared, and what they make of it is not"
        )


def _add_parity(
    report: Report,
    view: PoolView,
    model_dir: Path | None,
    adapter: Path | None,
    prompts: Sequence[str],
) -> None:
    """Have replicas sample, and the local model score what they sampled."""
    part, capabilities = report.parts[0], view.ready[0].capabilities
    not_compared = "log-probabilities are not compared: "
    if model_dir is None or not (model_dir / "config.json").is_file():
        where = f"{model_dir} holds no config.json" if model_dir else "the base is not here"
        report.remarks.append(not_compared + where)
        return
    dtype = DataType(capabilities.base_dtype)
    try:
        model = parity.LocalModel(model_dir, adapter, dtype)
    except ModuleNotFoundError as error:
        report.remarks.append(f"{not_compared}{error.name} is not installed here")
        return
    except InvalidRequestError as error:
        report.failures.append(not_compared + error.message)
        return
    asked: list[str | generate_pb2.TokenIds] = [*prompts]
    asked = asked or [*parity.default_prompts(model.vocab_size)]
    sampled: dict[str, list[parity.Sampled]] = {}
    rows = {row.replica_id: row for row in part.rows}
    for replica in view.ready:
        row = rows[replica.replica_id]
        if row.error:  # it does not serve it
            continue
        try:
            found = parity.sample(replica.address, part.version, asked)
        except WeftError as error:
            row.parity_error = f"{error.message} ({error.reason})"
            continue
        largest = max(max(*one.prompt, *one.tokens) for one in found)
        if largest >= model.vocab_size:
            row.parity_error = (
                f"token {largest} is none of the {model.vocab_size} of the model here"
            )
            continue
        if found[0].mode not in parity.MODES:
            report.remarks.append(
                f"{not_compared}{replica.replica_id} tells {found[0].mode}, not log-probabilities"
            )
            continue
        sampled[replica.replica_id] = found
    if not sampled:
        return
    exact, rounding = model.score([one for of in sampled.values() for one in of])
    bound = 0.0 if capabilities.quantization else parity.bound_of(dtype, rounding)
    for replica_id, of in sampled.items():
        own, exact = exact[: len(of)], exact[len(of) :]
        rows[replica_id].parity = parity.compared(of, own, bound)
