"""``python -m benchmarks.gpu_changes``: how long a GPU takes to code the changes of buckets, to
read and check them beside the old weights, to apply them and to take them back.

Beside them the two floors: reading both copies once, and a plain copy. bf16 bit patterns of normal
weights; 87 of 100 changes are steps of one. What was coded is applied and compared, each time.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from weft_rl.contract.manifest import Run
from weft_rl.transport.wire import change_kernels
from weft_rl.transport.wire.changes import packed_places

_NUM_BUCKETS, _BUCKET_BYTES = 4, 2**30
_MODEL_BYTES = 16.4e9
_SHARES = (0.0, 0.002, 0.01, 0.0147, 0.05, 0.18)
_ROUNDS = 5
_LIMIT_SECONDS = 55
#: Elements of the tensors of a layer, as of Qwen3-8B.
_LAYER = (4096 * 4096, 1024 * 4096, 1024 * 4096, 128, 128, 4096 * 4096, 12288 * 4096, 12288 * 4096,
          12288 * 4096, 4096, 4096)  # fmt: skip
_READ = r"""
extern "C" __global__ void read(const uint4* a, const uint4* b, unsigned* out, int thousands) {
  const long long n = (long long)thousands * 1024;
  unsigned any = 0;
  for (long long i = (long long)blockIdx.x * 1024 + threadIdx.x; i < n; i += gridDim.x * 1024ll) {
    #pragma unroll
    for (int j = 0; j < 4; j++) {
      const uint4 x = a[i + j * 256], y = b[i + j * 256];
      any |= (x.x ^ y.x) | (x.y ^ y.y) | (x.z ^ y.z) | (x.w ^ y.w);
    }
  }
  if (any == 12345) *out = any;
}
"""


class _Kernels:
    """Times of the single kernels, by events around each launch."""

    def __init__(self) -> None:
        self._launch: Any = change_kernels._launch
        self._events: list[tuple[str, Any, Any]] = []

    def __enter__(self) -> _Kernels:
        setattr(change_kernels, "_launch", self._timed)  # noqa: B010 (for the time of a measurement)
        return self

    def __exit__(self, *_: object) -> None:
        setattr(change_kernels, "_launch", self._launch)  # noqa: B010

    def _timed(self, name: str, *args: Any) -> None:
        make: Any = torch.cuda.Event
        begin, end = make(True), make(True)
        begin.record()
        self._launch(name, *args)
        end.record()
        self._events.append((name, begin, end))

    def seconds(self, rounds: int) -> dict[str, float]:
        """Return the seconds of each kernel, in the mean of the rounds."""
        torch.cuda.synchronize()
        found: dict[str, float] = {}
        for name, begin, end in self._events:
            found[name] = found.get(name, 0) + begin.elapsed_time(end) / 1e3 / rounds
        return found


def main() -> None:
    """Print the figures, and what they were measured on."""
    began = time.monotonic()
    device = torch.device("cuda")
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    assert change_kernels.works(device), "no kernels here"
    print(f"compiled and tried in {time.monotonic() - began:.1f} s")
    torch.manual_seed(0)
    runs = _runs()
    olds = [_weights(device) for _ in range(_NUM_BUCKETS)]
    datas = [old.clone() for old in olds]
    news = [old.clone() for old in olds]
    floor, copy = _floor(olds, news), _seconds(lambda: _copy(datas, olds))
    rows = []
    for share in _SHARES:
        if time.monotonic() - began > _LIMIT_SECONDS - 8:
            print("no time for", share)
            break
        for old, new in zip(olds, news, strict=True):
            _change(old, new, share)
        rows.append(_measured(share, runs, olds, news, datas))
    _print_table(rows, floor, copy)
    print(f"in all {time.monotonic() - began:.0f} s")


def _measured(
    share: float,
    runs: tuple[Run, ...],
    olds: list[torch.Tensor],
    news: list[torch.Tensor],
    datas: list[torch.Tensor],
) -> tuple[Any, ...]:
    sizes = (2,) * len(runs)
    places = tuple(packed_places(runs, sizes))
    outs = [torch.empty(_BUCKET_BYTES // 4, dtype=torch.uint8, device="cuda") for _ in olds]
    encoded: list[Any] = []
    decoded: list[Any] = []

    def encode() -> None:
        begun = [
            change_kernels.start_encode(old, new, runs, sizes, out)
            for old, new, out in zip(olds, news, outs, strict=True)
        ]
        encoded[:] = [end() for end in begun]

    def decode() -> None:
        decoded.clear()
        for data, out, coded in zip(datas, outs, encoded, strict=True):
            assert coded.num_bytes <= out.numel()
            payload = out[: coded.num_bytes]
            decoded.append(change_kernels.decode(payload, runs, sizes, data, places))
        for one in decoded:
            one.check()

    times = {}
    with _Kernels() as kernels:
        times["encode"] = _seconds(encode)
        times["check"] = _seconds(decode)
        times["apply"] = _seconds(lambda: [one.apply() for one in decoded])
        for data, new in zip(datas, news, strict=True):
            assert torch.equal(data, new), "what was applied is not what was changed"
        times["undo"] = _seconds(lambda: [one.undo() for one in decoded])
        for data, old in zip(datas, olds, strict=True):
            assert torch.equal(data, old), "what was undone is not what was there"
        single = kernels.seconds(_ROUNDS + 1)
    num = sum(coded.num_changes for coded in encoded)
    num_bytes = sum(coded.num_bytes for coded in encoded)
    kept = sum(one.num_bytes for one in decoded)
    print(
        f"{share:.2%}: {num:,} changes, {num_bytes / 1e6:.2f} MB, lists {kept / 1e6:.1f} MB; "
        + ", ".join(f"{name} {value * 1e3:.2f} ms" for name, value in single.items())
    )
    return share, num_bytes, times, single


def _print_table(rows: list[tuple[Any, ...]], floor: float, copy: float) -> None:
    total = _NUM_BUCKETS * _BUCKET_BYTES
    for num_bytes in (total, _MODEL_BYTES):
        scale = num_bytes / total
        print(f"\nms for {num_bytes / 1e9:.2f} GB in buckets of 1 GiB, calls and waits included:")
        print(f"  reading both {floor * scale * 1e3:.2f}, plain copy {copy * scale * 1e3:.2f}")
        print("  changed   encode  (kernel / reading both)  check  apply   undo  bytes (1/)")
        for share, coded, times, single in rows:
            encode, check, apply, undo = (value * scale * 1e3 for value in times.values())
            print(
                f"  {share:7.2%} {encode:8.2f}  {single['encode'] / floor:10.2f} {check:20.2f} "
                f"{apply:6.2f} {undo:6.2f}  {coded * scale / 1e6:8.1f} MB ({total / coded:.0f})"
            )


def _runs() -> tuple[Run, ...]:
    runs: list[Run] = []
    room = _BUCKET_BYTES // 2
    while room:
        num = min(_LAYER[len(runs) % len(_LAYER)], room)
        runs.append(Run(len(runs), 0, num))
        room -= num
    assert sum(run.payload_bytes(2) for run in runs) == _BUCKET_BYTES
    return tuple(runs)


def _weights(device: torch.device) -> torch.Tensor:
    weights = torch.randn(_BUCKET_BYTES // 2, device=device, dtype=torch.bfloat16) * 0.02
    return weights.view(torch.uint8)


def _change(old: torch.Tensor, new: torch.Tensor, share: float) -> None:
    """Make ``new`` of ``old`` by changing a share of its elements."""
    new.copy_(old)
    if not share:
        return
    for own in torch.split(new.view(torch.int16), 2**26):
        step = torch.where(
            torch.rand(len(own), device=own.device) < 0.87,
            1,
            (2 + torch.rand(len(own), device=own.device).log_().mul_(-3)).to(torch.int16),
        )
        sign = torch.rand(len(own), device=own.device) < 0.5
        step = torch.where(sign, -step, step).to(torch.int16)
        own += torch.where(torch.rand(len(own), device=own.device) < share, step, 0).to(torch.int16)


def _copy(to: list[torch.Tensor], of: list[torch.Tensor]) -> None:
    for a, b in zip(to, of, strict=True):
        a.copy_(b)


def _floor(olds: list[torch.Tensor], news: list[torch.Tensor]) -> float:
    kernel = torch.cuda._compile_kernel(_READ, "read")
    out = torch.zeros(1, dtype=torch.int32, device="cuda")

    def read() -> None:
        for old, new in zip(olds, news, strict=True):
            kernel((132 * 8, 1, 1), (256, 1, 1), [old, new, out, _BUCKET_BYTES // 16 // 1024])

    return _seconds(read)


def _seconds(work: Callable[[], object]) -> float:
    times = []
    for _ in range(_ROUNDS + 1):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        work()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return statistics.median(times[1:])


if __name__ == "__main__":
    main()
