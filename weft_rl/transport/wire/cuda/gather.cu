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
