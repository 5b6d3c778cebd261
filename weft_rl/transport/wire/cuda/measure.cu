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
