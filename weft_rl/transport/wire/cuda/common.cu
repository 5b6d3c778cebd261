// Common to all kernels of changes: it stands before the source of each. The bytes are those of
// docs/protocol.md, A bucket of changes.
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
