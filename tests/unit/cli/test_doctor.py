"""What the doctor makes of certificates, clocks, versions and room."""

from __future__ import annotations

import ast
import importlib.util
import re
import ssl
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tests.doubles.certificates import Authority
from weft_rl import __version__
from weft_rl.cli import doctor
from weft_rl.cli.doctor import expiry, first_of
from weft_rl.rpc.bounds import PROTOCOL_REVISION
from weft_rl.v1 import inspect_pb2 as pb


@pytest.fixture
def short_path() -> Iterator[Path]:
    """Not pytest's own: a socket's path is short."""
    with tempfile.TemporaryDirectory(prefix="weft-") as path:
        yield Path(path)


NOW = datetime(2026, 11, 22, 12, 0, tzinfo=UTC)


@pytest.mark.parametrize(
    ("left", "level"),
    [(-1, "fail"), (0, "fail"), (60, "warn"), (13 * 86_400, "warn"), (15 * 86_400, "ok")],
)
def test_how_long_a_certificate_lasts(tmp_path: Path, left: float, level: str) -> None:
    made = Authority(tmp_path).credentials("a.test", not_after=NOW + timedelta(seconds=left))
    der = first_of(made.tls_cert)
    assert expiry("x", "it", der, now=NOW).level == level
    assert expiry("x", "it", der, now=NOW - timedelta(days=30_000)).level == "fail"


@pytest.mark.parametrize("cut", [0, 1, 3, 40, 90])
def test_what_is_no_certificate_is_said_so(tmp_path: Path, cut: int) -> None:
    der = first_of(Authority(tmp_path).credentials("a.test").tls_cert)[:cut]
    found = expiry("x", "it", der)
    assert (found.level, bool(found.advice)) == ("warn", True)
    with pytest.raises(ValueError, match="no certificate"):
        first_of(__file__)


def test_a_certificate_that_only_openssl_reads_is_warned_of(tmp_path: Path) -> None:
    made = Authority(tmp_path).credentials("a.test")
    chain = tmp_path / "chain.pem"
    chain.write_text("a bag's attributes\n" + ssl.DER_cert_to_PEM_cert(b"0\x03\x02\x01\x05"))
    with chain.open("ab") as more:
        more.write(Path(made.tls_cert).read_bytes())
    assert expiry("x", "it", first_of(str(chain))).level == "warn"


@pytest.mark.parametrize(
    ("theirs", "says", "level"),
    [
        (100.5, "differs by less than", "ok"),
        (90.0, "10.0 s behind ours", "warn"),
        (111.0, "10.0 s ahead of ours", "warn"),
    ],
)
def test_clocks(theirs: float, says: str, level: str) -> None:
    found = doctor.compare_clocks(theirs, 100.0, 101.0)
    assert says in found.says
    assert found.level == level


@pytest.mark.parametrize(
    ("version", "revision", "level"),
    [
        (__version__, PROTOCOL_REVISION, "ok"),
        ("0.0.9", PROTOCOL_REVISION, "warn"),
        (__version__, PROTOCOL_REVISION + 1, "fail"),
    ],
)
def test_versions_of_both_ends(version: str, revision: int, level: str) -> None:
    pool = pb.GetPoolResponse(weft_version=version, protocol_revision=revision)
    assert doctor.compare_versions(pool).level == level


def test_interfaces_that_nccl_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    def found() -> str:
        (one,) = [f for f in doctor.check_addresses("127.0.0.1:1", "") if f.check == "interfaces"]
        return one.level

    for wanted, level in (("lo", "ok"), ("=lo", "ok"), ("^docker0", "ok"), ("ib7", "fail")):
        monkeypatch.setenv("NCCL_SOCKET_IFNAME", wanted)
        assert found() == level


def test_a_vllm_that_is_not_supported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.metadata, "version", lambda _: "0.19.1")
    found = doctor.check_vllm()
    assert found.level == "fail"
    assert ">=0.26" in found.advice


def test_the_directory_of_one_sided_sockets(
    short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = short_path
    (folder / "file").touch()
    (folder / "own").mkdir(mode=0o700)
    (folder / "open").mkdir(mode=0o755)
    monkeypatch.chdir(folder)
    for path, level, says in (
        (folder / "own", "ok", "this user's alone"),
        (folder / "new", "ok", "is made when it is needed"),
        (folder / "open", "warn", "with mode 0755"),
        (folder / "file", "warn", "is no directory"),
        (folder / "none" / "new", "warn", "cannot be made"),
        ("own", "warn", "no absolute path"),
        (folder / ("x" * 99), "warn", "too long"),
    ):
        monkeypatch.setenv("WEFT_ONE_SIDED_DIR", str(path))
        found = doctor.check_sockets()
        assert (found.level, says in found.says) == (level, True), found
        assert ("gloo" in found.advice) == (level == "warn")
    assert not (folder / "new").exists()
    monkeypatch.setenv("WEFT_ONE_SIDED_DIR", str(folder / "own"))
    monkeypatch.setattr("os.geteuid", lambda: 4711)
    assert "(uid 4711)" in doctor.check_sockets().says


def test_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Disk:
        free = 2**20

    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: Disk)
    monkeypatch.setattr(doctor, "_is_installed", lambda name: name == "vllm")
    levels = {f.check: f.level for f in doctor.check_space(tmp_path / "weft.db", tmp_path)}
    assert {name: levels[name] for name in ("catalog_disk", "spill_disk", "shm")} == dict.fromkeys(
        ("catalog_disk", "spill_disk", "shm"), "fail"
    )
    monkeypatch.setattr(doctor, "_is_installed", lambda _: False)
    assert "shm" not in {f.check for f in doctor.check_space(None, None)}  # nobody needs it


def test_the_doctor_asks_for_the_shared_memory_that_vllm_checks() -> None:
    """Read from vLLM's source: its queues' messages, and how many of them each holds."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        pytest.skip("vLLM is not installed")
    source = Path(spec.origin).parent
    tree = ast.parse((source / "distributed/device_communicators/shm_broadcast.py").read_text())
    (queue,) = (n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "MessageQueue")
    (init,) = (n for n in queue.body if isinstance(n, ast.FunctionDef) and n.name == "__init__")
    named = init.args.args[len(init.args.args) - len(init.args.defaults) :]
    defaults = {
        argument.arg: eval(ast.unparse(value))
        for argument, value in zip(named, init.args.defaults, strict=True)
    }
    (own,) = re.findall(
        r"VLLM_MQ_MAX_CHUNK_BYTES_MB: int = (\d+)", (source / "envs.py").read_text()
    )
    message = max(defaults["max_chunk_bytes"], int(own) * 2**20)
    ranks = 8
    needed = defaults["max_chunks"] * (message + 1 + ranks)
    assert needed == 10 * (24 * 2**20 + 9)
    assert doctor.SHM_BYTES[0] - 16 * 2**20 <= needed <= doctor.SHM_BYTES[0]


def test_what_carries_weights_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host without a GPU was told that gloo does, below the line that names all backends."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    found = {finding.check: finding.says for finding in doctor.check_torch(is_one_sided=True)}
    assert found["backends"].endswith("between hosts, one-sided between processes of this host")
    assert "gloo" not in found["gpus"]
