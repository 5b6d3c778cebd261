"""Kernels that code the changed elements of a bucket on a GPU, and apply them.

Written in CUDA C++ and compiled at run time. ``change_coding`` has the same in torch, which is the
specification of the bytes; where no kernel can be compiled a warning says so. Kernels and what
launches them are in one file: the rows of their tables are laid out here, for both.

Source: docs/protocol.md, A bucket of changes.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple

import torch

from weft_rl.contract.errors import DigestMismatchError
from weft_rl.contract.manifest import ALIGN_BYTES, Run, align_up
from weft_rl.transport.digests.host_copy import HostCopy
from weft_rl.transport.wire.change_coding import BLOCK_ELEMENTS, RunPlace, malformed, not_the_base

_log = logging.getLogger(__name__)

#: Threads of a program: they encode one block, or each warp decodes one.
_THREADS: Final = 256
_WARPS: Final = _THREADS // 32
#: Bytes that a thread reads at once.
_READ_BYTES: Final = 16
#: Elements whose bits a thread compares at once.
_UNIT_ELEMENTS: Final = 8
_HEADER_BYTES: Final = 8
_SUM_BYTES: Final = 8
#: Set in the environment for debugging: every launch is waited for, so that its own call fails, and
#: memory that kernels fill holds ones before.
_CHECKS: Final = "WEFT_CHECK_KERNELS" in os.environ

_COMMON: Final = r"""
typedef unsigned char u8; typedef unsigned short u16; typedef unsigned int u32;
typedef unsigned long long u64; typedef long long i64;
#define ALL 0xffffffffu
#define DEVICE __device__ __forceinline__
const u32 BLOCK = 16384, THREADS = 256, WARPS = 8;

// The tables that Python makes, 8 and 4 words a row.
struct Run { i64 at, first_block, num, size, first, count, stride, unused; };
struct Place { i64 at, count, stride, unused; };

DEVICE u32 lower(u32 a, u32 b) { return a < b ? a : b; }
DEVICE u32 higher(u32 a, u32 b) { return a > b ? a : b; }

// Bits of the remainders of gaps between `count` of `length` elements; as in `changes`.
DEVICE u32 gap_bits(u32 count, u32 length) {
  return count ? 32 - __clz((2 * length - count) / (4 * count)) : 0;
}

// Place of the p-th element of rows of `count`, relative to the first.
DEVICE u64 spread(u64 p, u64 num, u64 count, u64 stride) {
  if (count >= num) return p;
  if (!(num >> 32)) {
    const u32 row = (u32)p / (u32)count;
    return row * stride + ((u32)p - row * (u32)count);
  }
  const u64 row = p / count;
  return row * stride + (p - row * count);
}

DEVICE u64 split_mix(u64 n) {
  u64 z = (n + 1) * 0x9E3779B97F4A7C15ull;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}

// Weighed sums of the changed elements that one thread has seen.
struct Sums {
  u64 row, by_row, old_sum, change_sum;
  DEVICE void clear() { row = ~0ull; by_row = old_sum = change_sum = 0; }
  // `element` is the place in the tensor.
  DEVICE void add(u64 element, u32 size, u64 before, u64 after) {
    const u64 byte = element * size, word = byte >> 3;
    const u32 shift = 8 * ((u32)byte & 7);
    if (word >> 12 != row) { row = word >> 12; by_row = split_mix(row) << 1; }
    const u64 weight = by_row + (split_mix((1ull << 32) + (word & 4095)) << 1) + 1;
    old_sum += weight * (before << shift);
    change_sum += weight * ((after - before) << shift);
  }
};

template <int S> DEVICE u64 load(const u8* p);
template <> DEVICE u64 load<1>(const u8* p) { return *p; }
template <> DEVICE u64 load<2>(const u8* p) { return *(const u16*)p; }
template <> DEVICE u64 load<4>(const u8* p) { return *(const u32*)p; }
template <> DEVICE u64 load<8>(const u8* p) { return *(const u64*)p; }
template <int S> DEVICE void store(u8* p, u64 v);
template <> DEVICE void store<1>(u8* p, u64 v) { *p = (u8)v; }
template <> DEVICE void store<2>(u8* p, u64 v) { *(u16*)p = (u16)v; }
template <> DEVICE void store<4>(u8* p, u64 v) { *(u32*)p = (u32)v; }
template <> DEVICE void store<8>(u8* p, u64 v) { *(u64*)p = v; }

DEVICE u64 warp_sum(u64 v) {
  for (int o = 16; o; o >>= 1) v += __shfl_xor_sync(ALL, v, o);
  return v;
}

DEVICE u32 warp_scan(u32 v, u32 lane) {
  for (int o = 1; o < 32; o <<= 1) {
    const u32 below = __shfl_up_sync(ALL, v, o);
    if (lane >= (u32)o) v += below;
  }
  return v;
}
"""

_ENCODE: Final = r"""
// Eight elements, each side of them read at once.
template <int S> struct Unit { u32 w[2 * S]; };
template <int S> DEVICE Unit<S> load_unit(const u8* p, u32 u) {
  Unit<S> unit;
  if (S == 1) {
    const uint2 v = ((const uint2*)p)[u];
    unit.w[0] = v.x; unit.w[1] = v.y;
  } else {
    #pragma unroll
    for (int i = 0; i < S / 2; i++) {
      const uint4 v = ((const uint4*)p)[u * (S / 2) + i];
      unit.w[(4 * i) % (2 * S)] = v.x; unit.w[(4 * i + 1) % (2 * S)] = v.y;
      unit.w[(4 * i + 2) % (2 * S)] = v.z; unit.w[(4 * i + 3) % (2 * S)] = v.w;
    }
  }
  return unit;
}

// The top bit of each half that is not zero.
DEVICE u32 changed_halves(u32 x) {
  return (x | ((x & 0x7fff7fffu) + 0x7fff7fffu)) & 0x80008000u;
}
DEVICE u32 changed_bytes(u32 x) {
  return (x | ((x & 0x7f7f7f7fu) + 0x7f7f7f7fu)) & 0x80808080u;
}
// The top bits of four bytes, of which all others are zero.
DEVICE u32 top_bits(u32 x) { return (x >> 7) * 0x01020408u >> 24; }

// Which of eight elements differ.
template <int S> DEVICE u32 compare(const Unit<S>& a, const Unit<S>& b) {
  u32 x[2 * S];
  #pragma unroll
  for (int i = 0; i < 2 * S; i++) x[i] = a.w[i] ^ b.w[i];
  if (S == 1) return top_bits(changed_bytes(x[0])) | top_bits(changed_bytes(x[1])) << 4;
  if (S == 2) {
    u32 h[4];
    #pragma unroll
    for (int i = 0; i < 4; i++) h[i] = changed_halves(x[i]);
    return top_bits(__byte_perm(h[0], h[1], 0x7531)) |
           top_bits(__byte_perm(h[2], h[3], 0x7531)) << 4;
  }
  u32 changed = 0;
  #pragma unroll
  for (int j = 0; j < 8; j++) {
    const int i = j * S / 4 % (2 * S), k = (i + S / 4 - (S > 4)) % (2 * S);
    changed |= (u32)((S == 4 ? x[i] : x[i] | x[k]) != 0) << j;
  }
  return changed;
}

const u32 LITERAL = 7;
template <int S> DEVICE i64 step_of(u64 before, u64 after) {
  return (i64)((after - before) << (64 - 8 * S)) >> (64 - 8 * S);
}
DEVICE u32 far_code(i64 step) {
  if (step >= 2 && step <= 8) return (u32)step - 2;
  if (step <= -2 && step >= -8) return 8 + (u32)(-step) - 2;
  return LITERAL;
}

// Writes bits that follow one another, though not without gaps; others may write in the same words.
struct Writer {
  u32* words; u32 at, now;
  DEVICE void begin(u32* to) { words = to; at = 0; now = 0; }
  DEVICE void end() { if (now) atomicOr(words + at, now); now = 0; }
  DEVICE void put(u32 bit, u32 value, u32 width) {
    if (bit >> 5 != at) { end(); at = bit >> 5; }
    now |= value << (bit & 31);
    if ((bit & 31) + width > 32) { end(); at++; now = value >> (32 - (bit & 31)); }
  }
};

const u32 MAX_GROUPS = 264, MAX_BIT_WORDS = 4096, MAX_LISTED = 8192;
struct Shared {
  // Bits of the elements that changed; of these by one step, of these downwards; and literals.
  u64 changed[MAX_GROUPS], near[MAX_GROUPS], minus[MAX_GROUPS], literal[MAX_GROUPS];
  u64 counts[WARPS], quotients[WARPS], old_sums[WARPS], change_sums[WARPS], base;
  u32 changes[WARPS], near_ends[WARPS], far_ends[WARPS];
  union { u32 bits[MAX_BIT_WORDS]; u16 list[MAX_LISTED]; };
};

DEVICE void set_bit(u64* bits, u32 at) { atomicOr((u32*)bits + (at >> 5), 1u << (at & 31)); }

struct Output { u64* sums; u64* headers; i64* begins; u32* bodies; u64* counters; u64 capacity; };

template <int S> DEVICE void encode_block(
    const u8* olds, const u8* news, const Run& run, u32 which, u64 block, const Output& out,
    Shared& s) {
  const u32 t = threadIdx.x, lane = t & 31, warp = t >> 5;
  const u64 p0 = (block - run.first_block) * BLOCK;
  const u32 n = run.num - p0 < BLOCK ? (u32)(run.num - p0) : BLOCK;
  // Units are aligned as memory is: the first may begin before the block. A "slot" counts from it.
  const u64 start = run.at / S + p0;
  const u32 head = (u32)start & 7;
  olds += (start - head) * S; news += (start - head) * S;
  const u32 units = (head + n + 7) >> 3, groups = (units + 7) >> 3;

  // 1. Read both sides once.
  const int IN_FLIGHT = S == 1 ? 8 : 8 / S;
  u32 any = 0;
  for (u32 u0 = t; u0 < units; u0 += THREADS * IN_FLIGHT) {
    Unit<S> a[IN_FLIGHT], b[IN_FLIGHT];
    #pragma unroll
    for (int i = 0; i < IN_FLIGHT; i++) {
      const u32 u = lower(u0 + i * THREADS, units - 1);
      a[i] = load_unit<S>(olds, u); b[i] = load_unit<S>(news, u);
    }
    #pragma unroll
    for (int i = 0; i < IN_FLIGHT; i++) {
      const u32 u = u0 + i * THREADS;
      if (u >= units) continue;
      u32 changed = compare<S>(a[i], b[i]);
      if (u == 0) changed &= 0xff << head;
      if (8 * u + 8 > head + n) changed &= 0xff >> (8 * u + 8 - head - n);
      any |= changed;
      ((u8*)s.changed)[u] = (u8)changed;
    }
  }
  if (t < groups * 8 - units) ((u8*)s.changed)[units + t] = 0;
  for (u32 g = t; g < groups; g += THREADS) s.near[g] = s.minus[g] = s.literal[g] = 0;
  if (!__syncthreads_or(any)) {
    if (t == 0) { out.headers[block] = 0; out.begins[block] = 0; }
    return;
  }

  // 2. List the changes, so that each thread looks at as many: what they are, and their sums.
  const u32 each = (groups + THREADS - 1) / THREADS;
  const u32 g0 = lower(t * each, groups), g1 = lower(g0 + each, groups);
  u32 own = 0;
  for (u32 g = g0; g < g1; g++) own += __popcll(s.changed[g]);
  u32 first = warp_scan(own, lane), num_changes = 0;
  if (lane == 31) s.changes[warp] = first;
  first -= own;
  __syncthreads();
  for (u32 w = 0; w < WARPS; w++) {
    if (w < warp) first += s.changes[w];
    num_changes += s.changes[w];
  }
  Sums sums;
  sums.clear();
  for (u32 done = 0; done < num_changes; done += MAX_LISTED) {
    u32 i = first - done;  // wraps around before the first that is listed now
    for (u32 g = g0; g < g1; g++) {
      for (u64 m = s.changed[g]; m; m &= m - 1, i++)
        if (i < MAX_LISTED) s.list[i] = (u16)(g * 64 + __ffsll(m) - 1);
    }
    __syncthreads();
    for (i = t; i < lower(num_changes - done, MAX_LISTED); i += THREADS) {
      const u32 slot = s.list[i];
      const u64 was = load<S>(olds + slot * S), is = load<S>(news + slot * S);
      const i64 step = step_of<S>(was, is);
      if (step == 1 || step == -1) {
        set_bit(s.near, slot);
        if (step < 0) set_bit(s.minus, slot);
      } else if (far_code(step) == LITERAL) {
        set_bit(s.literal, slot);
      }
      const u64 p = p0 + (slot - head);
      sums.add(run.first + spread(p, run.num, run.count, run.stride), S, was, is);
    }
    __syncthreads();
  }
  u64 old_sum = warp_sum(sums.old_sum), change_sum = warp_sum(sums.change_sum);

  // 3. Count, and find the last place of each class before a thread's own ones.
  u32 nears = 0, fars = 0, literals = 0, near_end = 0, far_end = 0;
  for (u32 g = g0; g < g1; g++) {
    const u64 near = s.near[g], far = s.changed[g] ^ near;
    nears += __popcll(near); fars += __popcll(far); literals += __popcll(s.literal[g]);
    if (near) near_end = g * 64 + 64 - __clzll(near) - head;
    if (far) far_end = g * 64 + 64 - __clzll(far) - head;
  }
  const u64 counts = nears | (u64)fars << 16 | (u64)literals << 32;
  u64 before = counts;
  u32 near_before = near_end, far_before = far_end;
  for (int o = 1; o < 32; o <<= 1) {
    const u64 c = __shfl_up_sync(ALL, before, o);
    const u32 x = __shfl_up_sync(ALL, near_before, o), y = __shfl_up_sync(ALL, far_before, o);
    if (lane >= (u32)o) {
      before += c; near_before = higher(near_before, x); far_before = higher(far_before, y);
    }
  }
  if (lane == 31) {
    s.counts[warp] = before; s.near_ends[warp] = near_before; s.far_ends[warp] = far_before;
  }
  before -= counts;
  near_before = __shfl_up_sync(ALL, near_before, 1);
  far_before = __shfl_up_sync(ALL, far_before, 1);
  if (lane == 0) near_before = far_before = 0;
  __syncthreads();
  u64 total = 0;
  for (u32 w = 0; w < WARPS; w++) {
    if (w < warp) {
      before += s.counts[w];
      near_before = higher(near_before, s.near_ends[w]);
      far_before = higher(far_before, s.far_ends[w]);
    }
    total += s.counts[w];
  }
  const u32 num_near = total & 0xffff, num_far = (total >> 16) & 0xffff;
  const u32 num_literal = (u32)(total >> 32);

  // 4. Add up the quotients of the gaps.
  const u32 k_near = gap_bits(num_near, n), k_far = gap_bits(num_far, n);
  u32 near_quotients = 0, far_quotients = 0, near_at = near_before, far_at = far_before;
  for (u32 g = g0; g < g1; g++) {
    const u64 near = s.near[g], far = s.changed[g] ^ near;
    for (u64 m = near; m; m &= m - 1) {
      const u32 p = g * 64 + __ffsll(m) - 1 - head;
      near_quotients += (p - near_at) >> k_near; near_at = p + 1;
    }
    for (u64 m = far; m; m &= m - 1) {
      const u32 p = g * 64 + __ffsll(m) - 1 - head;
      far_quotients += (p - far_at) >> k_far; far_at = p + 1;
    }
  }
  const u64 quotients = near_quotients | (u64)far_quotients << 32;
  u64 quotients_before = quotients, all_quotients = 0;
  for (int o = 1; o < 32; o <<= 1) {
    const u64 q = __shfl_up_sync(ALL, quotients_before, o);
    if (lane >= (u32)o) quotients_before += q;
  }
  if (lane == 31) s.quotients[warp] = quotients_before;
  quotients_before -= quotients;
  __syncthreads();
  for (u32 w = 0; w < WARPS; w++) {
    if (w < warp) quotients_before += s.quotients[w];
    all_quotients += s.quotients[w];
  }

  // 5. Lay out the body, and reserve room for it.
  const u32 at_signs = num_near * k_near, at_far = at_signs + num_near;
  const u32 at_codes = at_far + num_far * k_far, at_near_quotients = at_codes + 4 * num_far;
  const u32 at_far_quotients = at_near_quotients + num_near + (u32)all_quotients;
  const u32 end_bits = at_far_quotients + num_far + (u32)(all_quotients >> 32);
  const u32 at_literals = (end_bits + 7) >> 3, num_bytes = at_literals + num_literal * S;
  const u32 coded_words = (num_bytes + 3) >> 2, raw_words = (n * S + 3) >> 2;
  const bool is_raw = coded_words >= raw_words;
  const u32 num_words = is_raw ? raw_words : coded_words;
  // All that fits is put together in shared memory, and the place asked for meanwhile. A body of
  // many literals is written where it belongs, behind the bits, for which there is always room.
  const bool is_shared = !is_raw && num_words <= MAX_BIT_WORDS;
  const u32 num_zeroed = is_shared ? num_words : (end_bits + 31) >> 5;
  if (!is_raw) for (u32 i = t; i < num_zeroed; i += THREADS) s.bits[i] = 0;
  u64 reserved = 0;
  if (t == 0) {
    reserved = atomicAdd(out.counters, (u64)num_words);
    atomicAdd(out.counters + 1, (u64)(num_near + num_far));
    out.headers[block] = (u64)num_words << 48 | (is_raw ? 0xffffull
        : (u64)num_literal << 32 | (u64)num_far << 16 | num_near);
    if (!is_shared) s.base = reserved;
  }
  __syncthreads();
  u64 base = is_shared ? 0 : s.base;
  bool fits = base + num_words <= out.capacity;

  if (is_raw) {
    u32* const body = out.bodies + base;
    u8* const bytes = (u8*)body;
    sums.clear();  // the old sum is that of all elements, then
    for (u32 p = t; p < n; p += THREADS) {
      const u64 was = load<S>(olds + (head + p) * S), is = load<S>(news + (head + p) * S);
      sums.add(run.first + spread(p0 + p, run.num, run.count, run.stride), S, was, is);
      if (!fits) continue;
      if (S == 8) {
        body[2 * p] = (u32)is; body[2 * p + 1] = (u32)(is >> 32);
      } else {
        store<S>(bytes + p * S, is);
      }
    }
    if (fits && t < num_words * 4 - n * S) bytes[n * S + t] = 0;
    old_sum = warp_sum(sums.old_sum);
    change_sum = warp_sum(sums.change_sum);
  } else {
    // 6. Write the bits.
    Writer rests, flags, unary, values;
    u32 i = before & 0xffff, quotient_bit = at_near_quotients + i + (u32)quotients_before;
    near_at = near_before;
    rests.begin(s.bits); flags.begin(s.bits); unary.begin(s.bits);
    for (u32 g = g0; g < g1; g++) {
      const u64 near = s.near[g], minus = s.minus[g];
      for (u64 m = near; m; m &= m - 1) {
        const u32 j = __ffsll(m) - 1, p = g * 64 + j - head, gap = p - near_at;
        const u32 sign = (u32)(minus >> j) & 1;
        near_at = p + 1;
        rests.put(i * k_near, gap & ((1u << k_near) - 1), k_near);
        flags.put(at_signs + i, sign, 1);
        quotient_bit += gap >> k_near;
        unary.put(quotient_bit++, 1, 1);
        i++;
      }
    }
    rests.end(); flags.end(); unary.end();
    u32 literal = (u32)(before >> 32) & 0xffff;
    i = (u32)(before >> 16) & 0xffff;
    quotient_bit = at_far_quotients + i + (u32)(quotients_before >> 32);
    far_at = far_before;
    rests.begin(s.bits); flags.begin(s.bits); unary.begin(s.bits); values.begin(s.bits);
    for (u32 g = g0; g < g1; g++) {
      for (u64 m = s.changed[g] ^ s.near[g]; m; m &= m - 1) {
        const u32 p = g * 64 + __ffsll(m) - 1 - head, gap = p - far_at;
        const u64 was = load<S>(olds + (head + p) * S), is = load<S>(news + (head + p) * S);
        const u32 code = far_code(step_of<S>(was, is));
        far_at = p + 1;
        rests.put(at_far + i * k_far, gap & ((1u << k_far) - 1), k_far);
        flags.put(at_codes + 4 * i, code, 4);
        quotient_bit += gap >> k_far;
        unary.put(quotient_bit++, 1, 1);
        i++;
        if (code == LITERAL) {
          const u32 byte = at_literals + literal++ * S;
          if (is_shared) {
            values.put(8 * byte, (u32)is, S == 8 ? 32 : 8 * S);
            if (S == 8) values.put(8 * byte + 32, (u32)(is >> 32), 32);
          } else if (fits) {
            for (int b = 0; b < S; b++) ((u8*)(out.bodies + base))[byte + b] = (u8)(is >> (8 * b));
          }
        }
      }
    }
    rests.end(); flags.end(); unary.end(); values.end();
  }
  if (lane == 0) { s.old_sums[warp] = old_sum; s.change_sums[warp] = change_sum; }
  if (t == 0) {
    if (is_shared) s.base = reserved;
    out.begins[block] = (i64)reserved;
  }
  __syncthreads();

  // 7. Copy what was put together to the place that was found for it.
  base = s.base;
  fits = base + num_words <= out.capacity;
  u32* const body = out.bodies + base;
  u8* const bytes = (u8*)body;
  if (is_shared && fits) {
    for (u32 i = t; i < num_words; i += THREADS) body[i] = s.bits[i];
  } else if (!is_raw && fits) {
    const u32 whole = at_literals >> 2;
    for (u32 i = t; i < whole; i += THREADS) body[i] = s.bits[i];
    if (t < (at_literals & 3)) bytes[whole * 4 + t] = (u8)(s.bits[whole] >> (8 * t));
    if (t < num_words * 4 - num_bytes) bytes[num_bytes + t] = 0;
  }
  if (t == 0) {
    u64 olds_total = 0, changes_total = 0;
    for (u32 w = 0; w < WARPS; w++) {
      olds_total += s.old_sums[w]; changes_total += s.change_sums[w];
    }
    atomicAdd(out.sums + 2 * which, olds_total);
    atomicAdd(out.sums + 2 * which + 1, changes_total);
  }
}

// Not inlined, so that registers are as few as the usual size needs.
template <int S> __device__ __noinline__ void encode_other(
    const u8* olds, const u8* news, const Run& run, u32 which, u64 block, Output out, Shared& s) {
  encode_block<S>(olds, news, run, which, block, out, s);
}

// A program encodes one block. Its body goes to any free place, since its own is not known yet.
// `addresses` are those of each run's new elements.
extern "C" __global__ void __launch_bounds__(256, 4) encode(
    const u8* olds, const u64* addresses, const Run* runs, const u32* owners, u64* sums,
    u64* headers, i64* begins, u32* bodies, u64* counters, int capacity) {
  __shared__ Shared s;
  const u64 block = blockIdx.x;
  const u32 which = owners[block];
  const Run& run = runs[which];
  const u8* const news = (const u8*)(addresses[which] - (u64)run.at);
  const Output out = {sums, headers, begins, bodies, counters, (u64)capacity};
  if (run.size == 2) encode_block<2>(olds, news, run, which, block, out, s);
  else if (run.size == 1) encode_other<1>(olds, news, run, which, block, out, s);
  else if (run.size == 4) encode_other<4>(olds, news, run, which, block, out, s);
  else encode_other<8>(olds, news, run, which, block, out, s);
}
"""

_GATHER: Final = r"""
// A warp copies the body of one block to its place.
extern "C" __global__ void gather(
    const u32* bodies, const i64* begins, const u64* headers, const i64* ends, u32* to,
    int num_blocks, int capacity, int num_before) {
  const u32 block = blockIdx.x * WARPS + (threadIdx.x >> 5);
  if (block >= (u32)num_blocks) return;
  if (block == 0 && ends[num_blocks - 1] <= capacity) {  // fill up the last 256 bytes
    const i64 end = ends[num_blocks - 1], filled = (num_before + end + 63) / 64 * 64 - num_before;
    for (i64 i = end + (threadIdx.x & 31); i < filled; i += 32) to[i] = 0;
  }
  const u32 num_words = (u32)(headers[block] >> 48);
  const i64 end = ends[block], from = begins[block];
  if (end > capacity || from + num_words > capacity) return;
  for (u32 i = threadIdx.x & 31; i < num_words; i += 32) to[end - num_words + i] = bodies[from + i];
}
"""

_MEASURE: Final = r"""
// A thread reads the header of one block: how much room its changes need, and its body has. A
// block that cannot be is counted as an unchanged one, and sets `status`.
extern "C" __global__ void measure(
    const u64* headers, const Run* runs, const u32* owners, i64* rooms, i64* words, u32* status,
    int num_blocks) {
  const u32 block = blockIdx.x * THREADS + threadIdx.x;
  if (block >= (u32)num_blocks) return;
  const Run run = runs[owners[block]];
  const u64 p0 = ((u64)block - run.first_block) * BLOCK, header = headers[block];
  const u32 n = run.num - p0 < BLOCK ? (u32)(run.num - p0) : BLOCK, size = (u32)run.size;
  const u32 near = header & 0xffff, far = (header >> 16) & 0xffff;
  const u32 literals = (header >> 32) & 0xffff, num_words = (u32)(header >> 48);
  u32 room;
  bool can_be;
  if (near == 0xffff) {
    room = n * size;
    can_be = !far && !literals && num_words == (n * size + 3) >> 2;
  } else {
    room = (near + far) * (2 + 2 * size);
    can_be = near + far <= n && literals <= far && (near + far ? num_words > 0 : !header);
  }
  if (!can_be) { atomicOr(status, 1u); room = 0; }
  rooms[block] = (i64)(room + 7 >> 3 << 3);
  words[block] = num_words;
}
"""

_DECODE: Final = r"""
// Bits of a body; zeros behind it.
struct Body {
  const u32* words; u32 num_words;
  DEVICE u32 bits(u32 at) const {
    const u32 i = at >> 5;
    const u32 low = i < num_words ? words[i] : 0, high = i + 1 < num_words ? words[i + 1] : 0;
    return __funnelshift_r(low, high, at & 31);
  }
  DEVICE u32 bits(u32 at, u32 width) const { return bits(at) & ((1u << width) - 1); }
  DEVICE u64 literal(u32 byte, u32 size) const {
    const u64 low = bits(8 * byte);
    if (size == 8) return low | (u64)bits(8 * byte + 32) << 32;
    return size == 4 ? low : low & ((1u << (8 * size)) - 1);
  }
};

const u32 NOWHERE = 0xffff;
const int ROUNDS = 4;

// Writes i + (the quotients up to the i-th, shifted by k) for each of `count` gaps, whose
// quotients begin at `at`; NOWHERE for what reaches `n`. Returns the bit behind the last one.
DEVICE u32 select(const Body& body, u32 at, u32 count, u32 k, u32 n, u16* out, bool& is_bad) {
  const u32 lane = threadIdx.x & 31, begin = at, end_bits = body.num_words * 32;
  u32 found = 0, end = at;
  while (found < count) {
    if (at >= end_bits) { is_bad = true; break; }
    u32 ones = body.bits(at + 32 * lane);
    const u32 own = __popc(ones), up_to = warp_scan(own, lane);
    u32 i = found + up_to - own;
    for (; ones && i < count; i++, ones &= ones - 1) {
      const u32 bit = at + 32 * lane + __ffs(ones) - 1, quotients = bit - begin - i;
      const u32 place = quotients > n >> k ? n : (quotients << k) + i;
      out[i] = (u16)(place < n ? place : NOWHERE);
      end = bit + 1;
    }
    found += __shfl_sync(ALL, up_to, 31);
    at += 1024;
  }
  if (found < count) {  // cut off: nothing may be read that was not written
    for (u32 i = found + lane; i < count; i += 32) out[i] = (u16)NOWHERE;
  }
  for (int o = 16; o; o >>= 1) end = higher(end, __shfl_xor_sync(ALL, end, o));
  __syncwarp();
  return end;
}

// Whether an ascending list holds a value.
DEVICE bool holds(const u16* list, u32 count, u32 value) {
  u32 low = 0;
  for (u32 high = count; low < high;) {
    const u32 middle = (low + high) >> 1;
    if (list[middle] < value) low = middle + 1; else high = middle;
  }
  return low < count && list[low] == value;
}

// Adds the remainders up to each gap's own, from bit `at` on, to what `select` has written: then
// the list holds places, and NOWHERE for what is none or is among the `num_near` before it, too.
DEVICE void add_remainders(const Body& body, u32 at, u32 count, u32 k, u32 n, u16* list,
                           u32 num_near, bool& is_bad) {
  const u32 lane = threadIdx.x & 31;
  u32 before = 0;
  for (u32 i0 = 0; i0 < count; i0 += 32) {
    const u32 i = i0 + lane;
    const bool is_own = i < count;
    const u32 up_to = before + warp_scan(is_own ? body.bits(at + i * k, k) : 0, lane);
    before = __shfl_sync(ALL, up_to, 31);
    if (!is_own) continue;
    const u32 base = list[i], place = base + up_to;
    const bool is_place = base != NOWHERE && place < n && !holds(list - num_near, num_near, place);
    if (!is_place) is_bad = true;
    list[i] = (u16)(is_place ? place : NOWHERE);
  }
  __syncwarp();
}

struct Input {
  const u8* data; const Run& run; const Place& place; u64 p0; u32 n;
  DEVICE u64 at(u32 p, u32 size) const {
    return place.at + spread(p0 + p, run.num, place.count, place.stride) * size;
  }
  DEVICE u64 element(u32 p) const {
    return run.first + spread(p0 + p, run.num, run.count, run.stride);
  }
};

template <int S> DEVICE void decode_block(
    const Body& body, u64 header, const Input& in, u8* list, Sums& sums, bool& is_bad) {
  const u32 lane = threadIdx.x & 31, n = in.n;
  const u32 num_near = header & 0xffff, num_far = (header >> 16) & 0xffff;
  const u32 num_literal = (header >> 32) & 0xffff;
  const u64 mask = S == 8 ? ~0ull : (1ull << (8 * S % 64)) - 1;
  if (num_near == 0xffff) {
    for (u32 p = lane; p < n; p += 32) {
      const u64 was = load<S>(in.data + in.at(p, S)), is = body.literal(p * S, S);
      store<S>(list + p * S, was);
      sums.add(in.element(p), S, was, is);
    }
    if (body.bits(8 * n * S, body.num_words * 32 - 8 * n * S)) is_bad = true;
    return;
  }
  const u32 num = num_near + num_far;
  u8* const news = list;
  u8* const olds = list + num * S;
  u16* const places = (u16*)(list + 2 * num * S);
  const u32 k_near = gap_bits(num_near, n), k_far = gap_bits(num_far, n);
  const u32 at_signs = num_near * k_near, at_far = at_signs + num_near;
  const u32 at_codes = at_far + num_far * k_far, at_quotients = at_codes + 4 * num_far;
  u32 end = select(body, at_quotients, num_near, k_near, n, places, is_bad);
  end = select(body, end, num_far, k_far, n, places + num_near, is_bad);
  const u32 at_literals = (end + 7) >> 3, num_bytes = at_literals + num_literal * S;
  if ((num_bytes + 3) >> 2 != body.num_words) is_bad = true;
  else if (body.bits(end, 8 * at_literals - end) ||
           body.bits(8 * num_bytes, 32 * body.num_words - 8 * num_bytes)) is_bad = true;
  add_remainders(body, 0, num_near, k_near, n, places, 0, is_bad);
  add_remainders(body, at_far, num_far, k_far, n, places + num_near, num_near, is_bad);

  // Several rounds at a time, so that their old elements are fetched together.
  u32 literals = 0;
  for (u32 i0 = lane; i0 - lane < num; i0 += 32 * ROUNDS) {
    u32 p[ROUNDS];
    u64 was[ROUNDS];
    #pragma unroll
    for (int r = 0; r < ROUNDS; r++) p[r] = i0 + 32 * r < num ? places[i0 + 32 * r] : NOWHERE;
    #pragma unroll
    for (int r = 0; r < ROUNDS; r++)
      was[r] = p[r] == NOWHERE ? 0 : load<S>(in.data + in.at(p[r], S));
    #pragma unroll
    for (int r = 0; r < ROUNDS; r++) {
      const u32 i = i0 + 32 * r;
      const bool is_own = i < num, is_far = is_own && i >= num_near;
      u32 code = 0;
      if (is_far) code = body.bits(at_codes + 4 * (i - num_near), 4);
      else if (is_own) code = body.bits(at_signs + i, 1);
      const bool is_literal = is_far && code == 7;
      const u32 chosen = __ballot_sync(ALL, is_literal);
      const u32 literal = literals + __popc(chosen & ((1u << lane) - 1));
      literals += __popc(chosen);
      if (is_far && code == 15) is_bad = true;
      if (!is_own) continue;
      u64 is;
      if (!is_far) is = code ? was[r] - 1 : was[r] + 1;
      else if (is_literal) is = body.literal(at_literals + literal * S, S);
      else is = code < 7 ? was[r] + code + 2 : was[r] - (code - 8) - 2;
      is &= mask;
      store<S>(news + i * S, is); store<S>(olds + i * S, was[r]);
      if (p[r] != NOWHERE) sums.add(in.element(p[r]), S, was[r], is);
    }
  }
  if (literals != num_literal) is_bad = true;
}

// Not inlined, so that registers are as few as the usual size needs.
struct Found { u64 old_sum, change_sum; bool is_bad; };
template <int S> __device__ __noinline__ Found decode_other(
    Body body, u64 header, Input in, u8* list) {
  Sums sums;
  sums.clear();
  bool is_bad = false;
  decode_block<S>(body, header, in, list, sums, is_bad);
  const Found found = {sums.old_sum, sums.change_sum, is_bad};
  return found;
}

// A warp decodes one block, and notes what it changes, from what to what. Writes nothing in `data`.
extern "C" __global__ void __launch_bounds__(256, 4) decode(
    const u64* headers, const u32* bodies, const i64* ends, const Run* runs, const Place* places,
    const u32* owners, const u8* data, const i64* rooms_up_to, u8* lists, u64* sums, u32* status,
    int num_blocks, int num_body_words, int num_filling) {
  const u32 block = blockIdx.x * WARPS + (threadIdx.x >> 5), lane = threadIdx.x & 31;
  if (block >= (u32)num_blocks) return;
  if (block == 0)
    for (int i = lane; i < num_filling; i += 32)
      if (bodies[num_body_words + i]) atomicOr(status, 1u);
  // Fetched together, since what follows waits for them.
  const u64 header = headers[block];
  const i64 room = block ? rooms_up_to[block - 1] : 0, room_end = rooms_up_to[block];
  const i64 end = ends[block];
  const u32 which = owners[block], num_words = (u32)(header >> 48);
  if (!header || room_end == room) return;
  if (end > num_body_words) {
    if (lane == 0) atomicOr(status, 1u);
    return;
  }
  const Run& run = runs[which];
  const Place& place = places[which];
  const u64 p0 = ((u64)block - run.first_block) * BLOCK;
  const Input in = {data, run, place, p0, run.num - p0 < BLOCK ? (u32)(run.num - p0) : BLOCK};
  const Body body = {bodies + (end - num_words), num_words};
  Found found;
  if (run.size == 2) {
    Sums sums;
    sums.clear();
    found.is_bad = false;
    decode_block<2>(body, header, in, lists + room, sums, found.is_bad);
    found.old_sum = sums.old_sum; found.change_sum = sums.change_sum;
  } else if (run.size == 1) found = decode_other<1>(body, header, in, lists + room);
  else if (run.size == 4) found = decode_other<4>(body, header, in, lists + room);
  else found = decode_other<8>(body, header, in, lists + room);
  const u64 old_sum = warp_sum(found.old_sum), change_sum = warp_sum(found.change_sum);
  const u32 bad = __ballot_sync(ALL, found.is_bad);
  if (lane == 0) {
    atomicAdd(sums + 2 * which, old_sum);
    atomicAdd(sums + 2 * which + 1, change_sum);
    if (bad) atomicOr(status, 1u);
  }
}
"""

_SCATTER: Final = r"""
template <int S> DEVICE void scatter_block(
    const u8* list, const u32* body, u64 header, const Run& run, const Place& place, u64 p0, u32 n,
    u8* data, bool is_undo) {
  const u32 lane = threadIdx.x & 31, num_near = header & 0xffff;
  const bool is_raw = num_near == 0xffff;
  const u32 num = is_raw ? n : num_near + ((header >> 16) & 0xffff);
  const u16* const places = (const u16*)(list + 2 * num * S);
  const u8* from = list + (is_undo && !is_raw ? num * S : 0);
  if (is_raw && !is_undo) from = (const u8*)body;
  for (u32 i = lane; i < num; i += 32) {
    const u32 p = is_raw ? i : places[i];
    if (p >= n) continue;
    u64 value;
    if (S == 8) value = ((const u32*)from)[2 * i] | (u64)((const u32*)from)[2 * i + 1] << 32;
    else value = load<S>(from + i * S);
    store<S>(data + place.at + spread(p0 + p, run.num, place.count, place.stride) * S, value);
  }
}

// A warp writes what one block changes, or what was there before.
extern "C" __global__ void __launch_bounds__(256) scatter(
    const u64* headers, const u32* bodies, const i64* ends, const Run* runs, const Place* places,
    const u32* owners, u8* data, const i64* rooms_up_to, const u8* lists, int num_blocks,
    int is_undo) {
  const u32 block = blockIdx.x * WARPS + (threadIdx.x >> 5);
  if (block >= (u32)num_blocks) return;
  const u64 header = headers[block];
  const i64 room = block ? rooms_up_to[block - 1] : 0, room_end = rooms_up_to[block];
  const i64 end = ends[block];
  const u32 which = owners[block];
  if (!header || room_end == room) return;
  const Run& run = runs[which];
  const Place& place = places[which];
  const u64 p0 = ((u64)block - run.first_block) * BLOCK;
  const u32 n = run.num - p0 < BLOCK ? (u32)(run.num - p0) : BLOCK;
  const u8* const list = lists + room;
  const u32* const body = bodies + (end - (i64)(header >> 48));
  if (run.size == 2) scatter_block<2>(list, body, header, run, place, p0, n, data, is_undo);
  else if (run.size == 1) scatter_block<1>(list, body, header, run, place, p0, n, data, is_undo);
  else if (run.size == 4) scatter_block<4>(list, body, header, run, place, p0, n, data, is_undo);
  else scatter_block<8>(list, body, header, run, place, p0, n, data, is_undo);
}
"""

#: Source of each kernel; of its own, so that one that is asked for compiles no other.
SOURCES: Final = {
    "encode": _COMMON + _ENCODE,
    "gather": _COMMON + _GATHER,
    "measure": _COMMON + _MEASURE,
    "decode": _COMMON + _DECODE,
    "scatter": _COMMON + _SCATTER,
}


class CodedChanges(NamedTuple):
    """Result of coding the changes of a bucket."""

    used_bytes: int
    """Bytes before the zeros at the payload's end."""
    num_changes: int
    """Elements that differ."""
    sums: list[int]
    """Difference of each run's digest, from old to new, mod 2**64."""
    head_bytes: int
    """Bytes before the bodies."""

    @property
    def num_bytes(self) -> int:
        """Size of the payload of changes; more than its buffer has if it does not fit, and then
        nothing in the buffer means anything."""
        return align_up(self.used_bytes)


class _Tables(NamedTuple):
    """Runs of a bucket and their blocks, on a device."""

    runs: torch.Tensor
    """int64, 8 words a run: see ``run_rows``."""
    owners: torch.Tensor
    """int32: the run of each block."""
    packed_at: tuple[int, ...]
    """The byte of each run's first element in a dense payload."""
    packed_bytes: int
    """Bytes of the dense payload."""

    @property
    def num_blocks(self) -> int:
        """Number of blocks of all runs."""
        return len(self.owners)

    @property
    def bodies_at(self) -> int:
        """First byte in a payload of changes that belongs to a body."""
        return len(self.runs) * _SUM_BYTES + self.num_blocks * _HEADER_BYTES


@lru_cache(maxsize=16)
def works(device: torch.device) -> bool:
    """Return whether a device runs the kernels; a warning says why not. Blocks for seconds the
    first time, while they are compiled."""
    why_not = _why_not(device)
    if why_not:
        _log.warning(
            "changes of tensors on %s are coded without kernels of our own, which makes pushes of "
            "changes slow: %s",
            device, why_not,
        )  # fmt: skip
    return not why_not


def run_rows(runs: Sequence[Run], itemsizes: Sequence[int]) -> list[tuple[int, ...]]:
    """Compute the row of each run in the kernels' table.

    Returns:
        The byte in a dense payload of its first element, its first block, its elements, the bytes
        of one, and as they lie in its tensor: the first, those of a row, and from one row to the
        next.
    """
    rows: list[tuple[int, ...]] = []
    at = block = 0
    for run, size in zip(runs, itemsizes, strict=True):
        num = run.num_elements
        first = run.first * size - run.begin_bytes(size)
        rows.append((at + first, block, num, size, run.first, run.count, run.stride, 0))
        at += run.payload_bytes(size)
        block += -(-num // BLOCK_ELEMENTS)
    return rows


def place_rows(
    runs: Sequence[Run], itemsizes: Sequence[int], places: Sequence[RunPlace], num_bytes: int
) -> list[tuple[int, ...]]:
    """Compute the row of each place in the kernels' table.

    Raises:
        ValueError: A place is not within memory of ``num_bytes``. Of all others no position within
            its run lies outside.
    """
    rows: list[tuple[int, ...]] = []
    for run, size, place in zip(runs, itemsizes, places, strict=True):
        num_rows, rest = divmod(run.num_elements - 1, place.row)
        # The last row may be short, and rows may overlap.
        last = num_rows * place.stride + rest
        if num_rows:
            last = max(last, (num_rows - 1) * place.stride + place.row - 1)
        end = place.at + (last + 1) * size
        if place.at < 0 or place.stride < 0 or place.at % size or end > num_bytes:
            raise ValueError(f"{place} of {run} is not within memory of {num_bytes} bytes")
        rows.append((place.at, place.row, place.stride, 0))
    return rows


def are_aligned(
    old: torch.Tensor,
    new: Sequence[torch.Tensor],
    runs: Sequence[Run],
    itemsizes: Sequence[int],
) -> bool:
    """Return whether new elements can be compared where they lie: units of eight begin there as
    they do in a dense payload."""
    begin, tables = old.data_ptr(), _tables(old.device, tuple(runs), tuple(itemsizes))
    return not any(
        (own.data_ptr() - begin - at) % (_UNIT_ELEMENTS * size)
        for own, at, size in zip(new, tables.packed_at, itemsizes, strict=True)
    )


def encode(
    old: torch.Tensor,
    new: torch.Tensor | Sequence[torch.Tensor],
    runs: tuple[Run, ...],
    itemsizes: tuple[int, ...],
    out: torch.Tensor,
) -> CodedChanges:
    """Code the changes of a bucket's dense payload; as ``start_encode``, but blocks until it is
    done."""
    return start_encode(old, new, runs, itemsizes, out)()


def start_encode(
    old: torch.Tensor,
    new: torch.Tensor | Sequence[torch.Tensor],
    runs: tuple[Run, ...],
    itemsizes: tuple[int, ...],
    out: torch.Tensor,
) -> Callable[[], CodedChanges]:
    """Begin to code the changes of a bucket's dense payload; return a function that blocks until
    it is done. Each of both payloads is read once.

    Runs on the calling thread's current stream. Needs as much memory again as ``out`` has, until
    it is done.

    Args:
        old: Dense payload, uint8, 1-D, contiguous, on a GPU where the kernels ``works``, beginning
            at a multiple of ``ALIGN_BYTES`` of it.
        new: The same, or the elements of each run where they lie, if they ``are_aligned``. Not
            written to, nor freed, before it is done.
        runs, itemsizes: Runs that they hold, and the bytes of an element of each; 1, 2, 4 or 8.
        out: Receives the payload of changes: uint8, on that GPU, 1-D, contiguous, begun at a
            multiple of ``ALIGN_BYTES``.
    """
    device = old.device
    tables = _tables(device, runs, itemsizes)
    num_runs, num_blocks = len(runs), tables.num_blocks
    for memory in (old, out):
        _check_memory(memory)
    assert old.numel() >= tables.packed_bytes, (old.shape, tables.packed_bytes)
    addresses = _addresses(device, _new_addresses(new, tables))
    room = out.numel() // ALIGN_BYTES * ALIGN_BYTES
    capacity = max((room - tables.bodies_at) // 4, 0)
    # One tensor, which is fetched at once: words and elements, then two sums a run.
    totals = torch.zeros(2 + 2 * num_runs, dtype=torch.int64, device=device)
    fits_tables = room >= tables.bodies_at
    head = out if fits_tables else torch.empty(tables.bodies_at, dtype=torch.uint8, device=device)
    sums = head[: num_runs * _SUM_BYTES].view(torch.int64)
    headers = head[num_runs * _SUM_BYTES : tables.bodies_at].view(torch.int64)
    if num_blocks:
        begins = torch.empty(num_blocks, dtype=torch.int64, device=device)
        bodies = _memory(4 * capacity, device).view(torch.int32)
        _launch(
            "encode", device, num_blocks, old, addresses, tables.runs, tables.owners, totals[2:],
            headers, begins, bodies, totals, min(capacity, 2**31 - 1),
        )  # fmt: skip
        ends = (headers >> 48).bitwise_and_(0xFFFF).cumsum_(0)
        _launch(
            "gather", device, -(-num_blocks // _WARPS), bodies, begins, headers, ends,
            out[min(tables.bodies_at, room) :], num_blocks, min(capacity, 2**31 - 1),
            tables.bodies_at // 4,
        )  # fmt: skip
    else:
        out[: align_up(tables.bodies_at)].zero_()
    sums.copy_(totals[2::2])
    fetched = HostCopy(totals)

    def end() -> CodedChanges:
        num_words, num_changes, *both = fetched.wait().tolist()
        sums = [value % 2**64 for value in both[1::2]]
        return CodedChanges(tables.bodies_at + 4 * num_words, num_changes, sums, tables.bodies_at)

    return end


class ListedChanges:
    """Changes of a bucket that were read from a payload, beside what they would change.

    ``apply`` and ``undo`` run on the calling thread's current stream, which must be the one that
    decoded, or wait for it; and this must be kept until they are done.

    Args:
        runs: Runs of the bucket.
        launch: Function that scatters: new values for 0, former ones for 1.
        status: int32, on the GPU: not zero if the payload cannot be one.
        listed: Sums that the payload lists for each run, on the GPU, int64.
        found: Sums of what lies in memory, and of the changes, for each run in turn.
    """

    def __init__(
        self,
        runs: Sequence[Run],
        launch: Callable[[int], None],
        status: torch.Tensor,
        listed: torch.Tensor,
        found: torch.Tensor,
        num_bytes: int,
    ) -> None:
        self._launch = launch
        self._results = HostCopy(torch.cat([status, listed, found]))
        self._runs, self._num_runs = runs, len(listed)
        self._values: list[int] | None = None
        self._is_checked = False
        self.num_bytes = num_bytes
        """Memory of the lists and of the payload, kept as long as this is."""

    def _fetched(self) -> list[int]:
        if self._values is None:
            self._values = [value % 2**64 for value in self._results.wait().tolist()]
        return self._values

    def check(self) -> None:
        """Check that the payload is one of these runs, and was made from what lies in memory;
        blocks until that is known.

        Raises:
            DigestMismatchError: It is not.
        """
        values = self._fetched()
        if values[0]:
            raise _malformed()
        listed, found = values[1 : 1 + self._num_runs], values[1 + self._num_runs :: 2]
        for run, one, other in zip(self._runs, listed, found, strict=True):
            if one != other:
                raise not_the_base(run)
        self._is_checked = True

    def sums(self) -> list[int]:
        """Return the difference of each run's digest, from old to new, mod 2**64; blocks until it
        is known."""
        return self._fetched()[2 + self._num_runs :: 2]

    def apply(self) -> None:
        """Write the new values; does not block. The payload must still be there."""
        assert self._is_checked
        self._launch(0)

    def undo(self) -> None:
        """Write the former values where the new ones were written; does not block."""
        assert self._is_checked
        self._launch(1)


def decode(
    payload: torch.Tensor,
    runs: tuple[Run, ...],
    itemsizes: tuple[int, ...],
    data: torch.Tensor,
    places: tuple[RunPlace, ...],
    num_bytes: int | None = None,
) -> ListedChanges:
    """Read a payload of changes, and the elements that it would change; writes nothing there.

    Runs on the calling thread's current stream. Blocks until it is known how much memory the lists
    need: the size of a value twice and two bytes, for each change.

    Args:
        payload: uint8, 1-D, contiguous, on a GPU where the kernels ``works``, begun at a multiple
            of ``ALIGN_BYTES``. Kept, and must not change until it was applied.
        runs, itemsizes: Runs that it changes, and the bytes of an element of each.
        data: Memory of the elements: uint8, 1-D, contiguous, on that GPU, begun at a multiple of
            ``ALIGN_BYTES``.
        places: Place of each run in it.
        num_bytes: Bytes of the memory from ``data`` on, where it is longer than that: a GPU's has
            one address space.

    Raises:
        DigestMismatchError: The payload is not one of these runs. That it was made from other
            weights, and most that is wrong within bodies, is found by ``ListedChanges.check``.
    """
    device = payload.device
    tables = _tables(device, runs, itemsizes)
    num_runs, num_blocks = len(runs), tables.num_blocks
    _check_memory(payload)
    _check_memory(data)
    placed = _places(device, runs, itemsizes, places, num_bytes or data.numel())
    if payload.numel() < tables.bodies_at or payload.numel() % ALIGN_BYTES:
        raise _malformed()
    sums = payload[: num_runs * _SUM_BYTES].view(torch.int64)
    headers = payload[num_runs * _SUM_BYTES : tables.bodies_at].view(torch.int64)
    found = torch.zeros(2 * num_runs, dtype=torch.int64, device=device)
    status = torch.zeros(1, dtype=torch.int64, device=device)
    if not num_blocks:
        return ListedChanges(runs, lambda is_undo: None, status, sums, found, 0)
    rooms_and_words = torch.empty(2, num_blocks, dtype=torch.int64, device=device)
    _launch(
        "measure", device, -(-num_blocks // _THREADS), headers, tables.runs, tables.owners,
        *rooms_and_words, status, num_blocks,
    )  # fmt: skip
    rooms, ends = rooms_and_words.cumsum_(1)
    size, num_words, is_bad = torch.stack([rooms[-1], ends[-1], status[0]]).tolist()
    end = tables.bodies_at + 4 * num_words
    if is_bad or align_up(end) != payload.numel():
        raise _malformed()
    bodies = payload[tables.bodies_at :].view(torch.int32)
    lists = _memory(size, device)
    num_ctas = -(-num_blocks // _WARPS)
    _launch(
        "decode", device, num_ctas, headers, bodies, ends, tables.runs, placed, tables.owners, data,
        rooms, lists, found, status, num_blocks, num_words, (align_up(end) - end) // 4,
    )  # fmt: skip

    def scatter(is_undo: int) -> None:
        _launch(
            "scatter", device, num_ctas, headers, bodies, ends, tables.runs, placed, tables.owners,
            data, rooms, lists, num_blocks, is_undo,
        )  # fmt: skip

    return ListedChanges(runs, scatter, status, sums, found, size + payload.numel())


def _malformed() -> DigestMismatchError:
    return malformed("it is none of these runs")


def _check_memory(memory: torch.Tensor) -> None:
    assert memory.dtype == torch.uint8
    assert memory.dim() == 1
    assert memory.is_contiguous()
    assert memory.data_ptr() % _READ_BYTES == 0, "is not aligned"


def _memory(num_bytes: int, device: torch.device) -> torch.Tensor:
    memory = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    return memory.fill_(0xFF) if _CHECKS else memory


@lru_cache(maxsize=256)
def _tables(device: torch.device, runs: tuple[Run, ...], itemsizes: tuple[int, ...]) -> _Tables:
    assert set(itemsizes) <= {1, 2, 4, 8}, itemsizes
    rows = torch.tensor(run_rows(runs, itemsizes), dtype=torch.int64).view(-1, 8)
    num_blocks = (rows[:, 2] + BLOCK_ELEMENTS - 1) // BLOCK_ELEMENTS
    owners = torch.repeat_interleave(num_blocks).to(torch.int32)
    packed = sum(run.payload_bytes(size) for run, size in zip(runs, itemsizes, strict=True))
    return _Tables(rows.to(device), owners.to(device), tuple(rows[:, 0].tolist()), packed)


def _new_addresses(new: torch.Tensor | Sequence[torch.Tensor], tables: _Tables) -> tuple[int, ...]:
    """Return the address of each run's new elements."""
    if isinstance(new, torch.Tensor):
        _check_memory(new)
        assert new.numel() >= tables.packed_bytes, (new.shape, tables.packed_bytes)
        return tuple(new.data_ptr() + at for at in tables.packed_at)
    return tuple(own.data_ptr() for own in new)


@lru_cache(maxsize=256)
def _addresses(device: torch.device, addresses: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor(addresses, dtype=torch.int64).to(device)


@lru_cache(maxsize=256)
def _places(
    device: torch.device,
    runs: tuple[Run, ...],
    itemsizes: tuple[int, ...],
    places: tuple[RunPlace, ...],
    num_bytes: int,
) -> torch.Tensor:
    rows = place_rows(runs, itemsizes, places, num_bytes)
    return torch.tensor(rows, dtype=torch.int64).view(-1, 4).to(device)


def _launch(name: str, device: torch.device, num_ctas: int, *args: torch.Tensor | int) -> None:
    """Launch a kernel on a device's current stream. Integers are passed in 32 bits."""
    assert all(isinstance(arg, torch.Tensor) or 0 <= arg < 2**31 for arg in args), args
    with torch.cuda.device(device):
        _compiled(name, device)((num_ctas, 1, 1), (_THREADS, 1, 1), list(args))
        if _CHECKS:
            torch.cuda.synchronize()


@lru_cache(maxsize=64)
def _compiled(name: str, device: torch.device) -> Any:
    """Compile a kernel for a device.

    torch has NVRTC and this call, which is private (it was public for one release); ``cuda-core``
    is the public way to the same, one more package that nothing else here needs.
    """
    with torch.cuda.device(device):
        return torch.cuda._compile_kernel(SOURCES[name], name)


def _why_not(device: torch.device) -> str:
    """Return why a device cannot run the kernels; empty if they compile and give back what they
    coded. A first push that had to compile one of them would wait for that."""
    runs, itemsizes = (Run(0, 0, 300),), (2,)
    size = runs[0].payload_bytes(2)
    old = (torch.arange(size, dtype=torch.int32) % 251).to(torch.uint8)
    new = old.clone()
    new[: 2 * 300 : 14] += 1  # by one step; each odd byte by 256 of them
    new[1 : 2 * 300 : 50] += 1
    try:
        old, new, out = (memory.to(device) for memory in (old, new, torch.zeros_like(old)))
        encoded = encode(old, new, runs, itemsizes, out)
        decoded = decode(out[: encoded.num_bytes], runs, itemsizes, old, (RunPlace(0, 300),))
        before = old.clone()
        decoded.check()
        decoded.apply()
        is_new = torch.equal(old, new)
        decoded.undo()
        is_right = is_new and torch.equal(old, before) and decoded.sums() == encoded.sums
    except Exception as error:  # noqa: BLE001 (a compiler's, a driver's)
        return f"torch compiles no kernel; it needs NVRTC and CUDA's headers: {error}"
    return "" if is_right else "the kernels do not give back what they coded"
