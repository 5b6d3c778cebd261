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
