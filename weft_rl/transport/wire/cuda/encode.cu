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
// `addresses` are those of each run's old elements and of its new ones.
extern "C" __global__ void __launch_bounds__(256, 4) encode(
    const u64* addresses, const Run* runs, const u32* owners, u64* sums, u64* headers, i64* begins,
    u32* bodies, u64* counters, int capacity) {
  __shared__ Shared s;
  const u64 block = blockIdx.x;
  const u32 which = owners[block];
  const Run& run = runs[which];
  const u8* const olds = (const u8*)(addresses[2 * which] - (u64)run.at);
  const u8* const news = (const u8*)(addresses[2 * which + 1] - (u64)run.at);
  const Output out = {sums, headers, begins, bodies, counters, (u64)capacity};
  if (run.size == 2) encode_block<2>(olds, news, run, which, block, out, s);
  else if (run.size == 1) encode_other<1>(olds, news, run, which, block, out, s);
  else if (run.size == 4) encode_other<4>(olds, news, run, which, block, out, s);
  else encode_other<8>(olds, news, run, which, block, out, s);
}
