// What kernels in CUDA C++ need of CUDA, for a CPU: the threads of a program are fibers that take
// turns in a changing order, and wait for one another at barriers and in warps' exchanges. A warp
// that does not meet at one line, and a barrier that a thread has passed by, end the process.
#include <ucontext.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <utility>

struct Dim { unsigned x, y, z; };
static Dim threadIdx, blockIdx, blockDim, gridDim;
struct uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
#define __device__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __global__
#define __shared__ static
#define __launch_bounds__(...)

namespace threads {
const int MAX = 1024, LANES = 32, STACK_BYTES = 256 * 1024, SECOND = 1 << 20;
static int num, now;
static ucontext_t scheduler, contexts[MAX];
static bool has_ended[MAX];
static std::function<void()> body;
static unsigned arrived, arrived_in[LANES];
static unsigned long long turn, turns[LANES], values[MAX];
static int lines[MAX], any, any_before;

static void fail(const char* why) { fprintf(stderr, "kernel: %s\n", why); abort(); }
static void yield() { swapcontext(&contexts[now], &scheduler); }

static void warp_barrier(int line) {
  const int warp = now / LANES;
  lines[now] = line;
  for (int i = warp * LANES; i < (warp + 1) * LANES; i++)
    if (has_ended[i]) fail("a lane has ended before its warp met");
  const unsigned long long own = turns[warp];
  if (++arrived_in[warp] < LANES) {
    while (turns[warp] == own) yield();
    return;
  }
  for (int i = warp * LANES; i < (warp + 1) * LANES; i++)
    if (lines[i] != line) fail("a warp meets at two lines");
  arrived_in[warp] = 0;
  turns[warp]++;
}

static void barrier() {
  for (int i = 0; i < num; i++) if (has_ended[i]) fail("a thread has ended before a barrier");
  const unsigned long long own = turn;
  if (++arrived < (unsigned)num) {
    while (turn == own) yield();
    return;
  }
  arrived = 0;
  any_before = any;
  any = 0;
  turn++;
}

template <class T> T exchange(T value, int lane, int line) {
  const int own = now;
  unsigned long long raw = 0;
  memcpy(&raw, &value, sizeof(T));
  values[own] = raw;
  warp_barrier(line);
  raw = values[own / LANES * LANES + lane % LANES];
  warp_barrier(line + SECOND);
  memcpy(&value, &raw, sizeof(T));
  return value;
}

static unsigned ballot(bool own, int line) {
  const int first = now / LANES * LANES;
  values[now] = own;
  warp_barrier(line);
  unsigned all = 0;
  for (int i = 0; i < LANES; i++) all |= (unsigned)values[first + i] << i;
  warp_barrier(line + SECOND);
  return all;
}

static int any_of(int own) {
  any |= own != 0;
  barrier();
  return any_before;
}

static void run() {
  body();
  has_ended[now] = true;
  yield();
}

static void launch(unsigned programs, unsigned num_threads, std::function<void()> kernel) {
  static char* const stacks = (char*)malloc((size_t)MAX * STACK_BYTES);
  static unsigned random = 1;
  num = num_threads;
  body = kernel;
  blockDim = {num_threads, 1, 1};
  gridDim = {programs, 1, 1};
  for (unsigned program = 0; program < programs; program++) {
    blockIdx = {program, 0, 0};
    for (int i = 0; i < num; i++) {
      has_ended[i] = false;
      getcontext(&contexts[i]);
      contexts[i].uc_stack.ss_sp = stacks + (size_t)i * STACK_BYTES;
      contexts[i].uc_stack.ss_size = STACK_BYTES;
      contexts[i].uc_link = nullptr;
      makecontext(&contexts[i], run, 0);
    }
    for (int left = num; left;) {
      left = 0;
      random = random * 1664525u + 1013904223u;
      for (int j = 0; j < num; j++) {
        now = (random + j * (random >> 16 | 1)) % num;  // the number is a power of two
        if (has_ended[now]) continue;
        threadIdx = {(unsigned)now, 0, 0};
        swapcontext(&scheduler, &contexts[now]);
        left += !has_ended[now];
      }
    }
  }
}

template <class... A, size_t... I>
void call(void (*kernel)(A...), void** args, std::index_sequence<I...>) {
  kernel(*(A*)args[I]...);
}
template <class... A>
void launch_with(void (*kernel)(A...), unsigned programs, unsigned num_threads, void** args) {
  launch(programs, num_threads, [=] { call(kernel, args, std::index_sequence_for<A...>()); });
}
}  // namespace threads

#define __shfl_up_sync(mask, v, by) \
  threads::exchange((v), threads::now % 32 - (threads::now % 32 < (int)(by) ? 0 : (int)(by)), __LINE__)
#define __shfl_xor_sync(mask, v, by) threads::exchange((v), (threads::now % 32) ^ (by), __LINE__)
#define __shfl_sync(mask, v, lane) threads::exchange((v), (lane), __LINE__)
#define __ballot_sync(mask, own) threads::ballot((own), __LINE__)
#define __syncwarp() threads::warp_barrier(__LINE__)
#define __syncthreads() threads::barrier()
#define __syncthreads_or(own) threads::any_of(own)

template <class T> T atomicAdd(T* at, T by) { const T was = *at; *at += by; return was; }
template <class T> T atomicOr(T* at, T by) { const T was = *at; *at |= by; return was; }
static int __popc(unsigned v) { return __builtin_popcount(v); }
static int __popcll(unsigned long long v) { return __builtin_popcountll(v); }
static int __ffs(int v) { return __builtin_ffs(v); }
static int __ffsll(long long v) { return __builtin_ffsll(v); }
static int __clz(int v) { return v ? __builtin_clz(v) : 32; }
static int __clzll(long long v) { return v ? __builtin_clzll(v) : 64; }
static unsigned __funnelshift_r(unsigned low, unsigned high, unsigned by) {
  return (unsigned)((low | (unsigned long long)high << 32) >> (by & 31));
}
static unsigned __byte_perm(unsigned a, unsigned b, unsigned chosen) {
  const unsigned long long both = a | (unsigned long long)b << 32;
  unsigned found = 0;
  for (int i = 0; i < 4; i++)
    found |= (unsigned)((both >> (8 * (chosen >> (4 * i) & 7))) & 0xff) << (8 * i);
  return found;
}
