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
