// SPDX-License-Identifier: Apache-2.0
// The sm_90a instructions that the kernels need, one function each, under the names of the PTX ISA.
// Shared-memory addresses are 32-bit (cvta of the dynamic buffer), so that they live in uniform
// registers; a barrier is the address of its 8 bytes.
#pragma once

#include <cuda.h>

#include <cstdint>
#ifdef TESSERA_BOUNDED_WAITS
#include <cstdio>
#endif

namespace tessera::cuda::sm90 {

constexpr int kWarp = 32;
constexpr int kWarpgroup = 128;
constexpr uint32_t kAllLanes = 0xffffffffu;

// A build with TESSERA_CHAOS sleeps before one arrival or wait in four, up to 2 us and a whole warp
// at a time: a hand-over that only holds by good timing then breaks.
__device__ __forceinline__ void chaos() {
#ifdef TESSERA_CHAOS
  uint32_t x = clock() * 0x9e3779b9u ^ (blockIdx.x * 64 + threadIdx.x / kWarp) * 0x85ebca6bu;
  x ^= x >> 15;
  if (x % 4 == 0) __nanosleep(x >> 4 & 2047);
#endif
}

// ---- mbarrier: counts arrivals and bytes of bulk copies; a wait names a phase's parity ----

__device__ __forceinline__ void mbarrier_init(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}
__device__ __forceinline__ void mbarrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier) {
  chaos();
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void mbarrier_arrive_expect(uint32_t barrier, int bytes) {
  chaos();
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}
// Sleeps in hardware, up to 10 ms at a time, until the phase of this parity has completed. A build
// with TESSERA_BOUNDED_WAITS says who waits for what and traps after some 10 ms instead of hanging.
__device__ __forceinline__ void mbarrier_wait(uint32_t barrier, uint32_t parity) {
  chaos();
#ifdef TESSERA_BOUNDED_WAITS
  const long long start = clock64();
  for (uint32_t done = 0; !done;) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2, 0x2710;\n"
        "selp.b32 %0, 1, 0, done;\n"
        "}"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
    if (!done && clock64() - start > 20000000) {
      printf("cta %d thread %d: waits for barrier %u, parity %u\n", blockIdx.x, threadIdx.x,
             barrier, parity);
      __trap();
    }
  }
  return;
#endif
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1, 0x989680;\n"
      "@!done bra again;\n"
      "}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}
// The same where `waits`; without a branch around it.
__device__ __forceinline__ void mbarrier_wait_if(bool waits, uint32_t barrier, uint32_t parity) {
#ifdef TESSERA_BOUNDED_WAITS
  if (waits) mbarrier_wait(barrier, parity);
#else
  chaos();
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "setp.eq.b32 done, %2, 0;\n"
      "again:\n"
      "@!done mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1, 0x989680;\n"
      "@!done bra again;\n"
      "}" ::"r"(barrier),
      "r"(parity), "r"(int{waits})
      : "memory");
#endif
}

// ---- TMA ----

// One box of a 5-D tensor map into shared memory; completes on the barrier. Elements outside the
// map's extents arrive as zeros, and count as bytes.
__device__ __forceinline__ void tma_load(uint32_t shared, const CUtensorMap* map, uint32_t barrier,
                                         int c0, int c1, int c2, int c3, int c4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(shared),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
      : "memory");
}
// The same into all CTAs of a cluster, at the same place; completes on the barrier of each.
template <int kCtas>
__device__ __forceinline__ void tma_load_to_all(uint32_t shared, const CUtensorMap* map,
                                                uint32_t barrier, int c0, int c1, int c2, int c3,
                                                int c4) {
  constexpr uint16_t kAll = (1 << kCtas) - 1;
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%3, %4, %5, %6, %7}], [%2], %8;" ::"r"(shared),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4), "h"(kAll)
      : "memory");
}
// `bytes` contiguous bytes, a multiple of 16, from an address that is one too.
__device__ __forceinline__ void bulk_load(uint32_t shared, const void* global, int bytes,
                                          uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared),
      "l"(global), "r"(bytes), "r"(barrier)
      : "memory");
}
// One box from shared memory to a 5-D tensor, or added to it; what is outside its extents is left
// out. Called by one thread, to which the functions below belong too.
__device__ __forceinline__ void tma_store(const CUtensorMap* map, uint32_t shared, int c0, int c1,
                                          int c2, int c3, int c4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5, %6}], [%1];" ::
          "l"(map),
      "r"(shared), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
      : "memory");
}
__device__ __forceinline__ void tma_add(const CUtensorMap* map, uint32_t shared, int c0, int c1,
                                        int c2, int c3, int c4) {
  asm volatile(
      "cp.reduce.async.bulk.tensor.5d.global.shared::cta.add.bulk_group"
      " [%0, {%2, %3, %4, %5, %6}], [%1];" ::"l"(map),
      "r"(shared), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
      : "memory");
}
__device__ __forceinline__ void bulk_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// All that was committed has been read from shared memory.
__device__ __forceinline__ void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
// All that was committed has been written.
__device__ __forceinline__ void bulk_wait() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}
__device__ __forceinline__ void tma_prefetch(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// ---- copies of 16 bytes, each thread its own ----

// The first `bytes` of them; zeros for the others.
__device__ __forceinline__ void copy_async(uint32_t shared, const void* global, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global),
               "r"(bytes)
               : "memory");
}
// All that the thread has started to copy is there; other lanes learn of it by a __syncwarp().
__device__ __forceinline__ void copy_async_wait() {
  asm volatile("cp.async.wait_all;" ::: "memory");
}

// ---- clusters: CTAs that read and write each other's shared memory ----

// An address of this CTA's shared memory, in CTA `rank` of the cluster.
__device__ __forceinline__ uint32_t address_in(int rank, uint32_t shared) {
  uint32_t address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared), "r"(rank));
  return address;
}
// to: an address_in() some CTA, which has begun.
__device__ __forceinline__ void store_in_cluster(uint32_t to, int v) {
  asm volatile("st.shared::cluster.b32 [%0], %1;" ::"r"(to), "r"(v) : "memory");
}
// barrier: an address_in() some CTA.
__device__ __forceinline__ void mbarrier_arrive_in_cluster(uint32_t barrier) {
  chaos();
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(barrier)
               : "memory");
}
// The same where the thread has written nothing that the waiting one reads: it need not wait for
// its writes to be seen in the cluster, which takes long.
__device__ __forceinline__ void mbarrier_arrive_in_cluster_relaxed(uint32_t barrier) {
  chaos();
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Waits for a barrier of this CTA on which other CTAs arrive.
__device__ __forceinline__ void mbarrier_wait_for_cluster(uint32_t barrier, uint32_t parity) {
  chaos();
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1, 0x989680;\n"
      "@!done bra again;\n"
      "}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}
// `bytes` of this CTA's shared memory to another's; completes on a barrier there. to and barrier:
// of address_in().
__device__ __forceinline__ void copy_to_cta(uint32_t to, uint32_t from, int bytes,
                                            uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, "
      "[%3];" ::"r"(to),
      "r"(from), "r"(bytes), "r"(barrier)
      : "memory");
}
// Called by all threads of all CTAs that have not exited.
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

// ---- register file, named barriers, programmatic launch ----

template <int kRegisters>
__device__ __forceinline__ void registers_release() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void registers_claim() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
// A named barrier of a CTA, of 16; 0 is __syncthreads. Each stands beside the kernel that uses it,
// and has a number of its own among those of the kernels that it shares code with.
enum class NamedBarrier : int {};
__device__ __forceinline__ void named_barrier_sync(NamedBarrier barrier, int threads) {
  chaos();
  asm volatile("bar.sync %0, %1;" ::"r"(static_cast<int>(barrier)), "r"(threads) : "memory");
}
// The same; whether the predicate holds for any of the threads.
__device__ __forceinline__ bool named_barrier_any(NamedBarrier barrier, int threads,
                                                  bool predicate) {
  chaos();
  int any;
  asm volatile(
      "{\n"
      ".reg .pred mine, any;\n"
      "setp.ne.b32 mine, %3, 0;\n"
      "bar.red.or.pred any, %1, %2, mine;\n"
      "selp.b32 %0, 1, 0, any;\n"
      "}"
      : "=r"(any)
      : "r"(static_cast<int>(barrier)), "r"(threads), "r"(int{predicate})
      : "memory");
  return any;
}
__device__ __forceinline__ void named_barrier_arrive(NamedBarrier barrier, int threads) {
  chaos();
  asm volatile("bar.arrive %0, %1;" ::"r"(static_cast<int>(barrier)), "r"(threads) : "memory");
}
// The line of an address into the L2.
__device__ __forceinline__ void l2_prefetch(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}
// The kernel launched next in the stream may start; this one waits for the memory of those before.
__device__ __forceinline__ void launch_dependents() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
__device__ __forceinline__ void wait_for_predecessors() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

// ---- fragments ----

// Four 8x8 matrices of 16-bit elements; lane l names row l % 8 of matrix l / 8.
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}
// The same, each matrix transposed.
__device__ __forceinline__ void ldmatrix_x4_transposed(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

__device__ __forceinline__ void stmatrix_x4(uint32_t address, const uint32_t* r) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
               "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}
// The same, each matrix transposed.
__device__ __forceinline__ void stmatrix_x4_transposed(uint32_t address, const uint32_t* r) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
      "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
      : "memory");
}
// What this thread has written to shared memory becomes visible to wgmma and TMA, once a barrier
// says so.
__device__ __forceinline__ void async_proxy_fence() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
// What others have written to memory, as this thread knows, is there for its copies by TMA.
__device__ __forceinline__ void global_proxy_fence() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}
__device__ __forceinline__ float load_shared(uint32_t address) {
  float v;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(address));
  return v;
}
__device__ __forceinline__ int load_shared_word(uint32_t address) {
  int v;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
  return v;
}
__device__ __forceinline__ void store_shared_word(uint32_t address, int v) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(v) : "memory");
}
__device__ __forceinline__ float2 load_shared_pair(uint32_t address) {
  float2 v;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(address));
  return v;
}
__device__ __forceinline__ void store_shared(uint32_t address, uint4 v) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v.x), "r"(v.y),
               "r"(v.z), "r"(v.w)
               : "memory");
}
__device__ __forceinline__ uint4 load_shared_words(uint32_t address) {
  uint4 v;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address)
               : "memory");
  return v;
}
__device__ __forceinline__ uint2 load_shared_two_words(uint32_t address) {
  uint2 v;
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(address) : "memory");
  return v;
}
__device__ __forceinline__ float4 load_shared_four(uint32_t address) {
  float4 v;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(address));
  return v;
}
// *to += (a, b, c, d), each an atomic of its own; to is 16-byte aligned.
__device__ __forceinline__ void add_to_global(float* to, float a, float b, float c, float d) {
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(a), "f"(b), "f"(c),
               "f"(d)
               : "memory");
}

// The same, or *to = (a, b, c, d), without a branch.
__device__ __forceinline__ void store_or_add_to_global(bool stores, float* to, float a, float b,
                                                       float c, float d) {
  asm volatile(
      "{\n"
      ".reg .pred stores;\n"
      "setp.ne.b32 stores, %5, 0;\n"
      "@stores st.global.v4.f32 [%0], {%1, %2, %3, %4};\n"
      "@!stores red.global.add.v4.f32 [%0], {%1, %2, %3, %4};\n"
      "}" ::"l"(to),
      "f"(a), "f"(b), "f"(c), "f"(d), "r"(int{stores})
      : "memory");
}

// Hand-over between CTAs: what a thread has done, or knows of others that they have done, before it
// stores a value is done for whoever has loaded that value.
__device__ __forceinline__ int load_acquire(const int* from) {
  int x;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(x) : "l"(from) : "memory");
  return x;
}
__device__ __forceinline__ void store_release(int* to, int x) {
  chaos();
  asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(to), "r"(x) : "memory");
}
__device__ __forceinline__ void add_release(int* to, int x) {
  chaos();
  asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(to), "r"(x) : "memory");
}

// A value that is the same in all lanes, in a way that the compiler can see: it then uses uniform
// registers for what is computed from it. Descriptors in vector registers cost an R2UR per wgmma.
__device__ __forceinline__ int uniform(int x) { return __shfl_sync(kAllLanes, x, 0); }
// The same for a value that was loaded, of which the compiler knows that all lanes have it and yet
// keeps it in a vector register: a reduction of a warp has its result in a uniform one.
__device__ __forceinline__ int uniform_register(int x) {
  int y;
  asm volatile("redux.sync.max.s32 %0, %1, 0xffffffff;" : "=r"(y) : "r"(x));
  return y;
}

}  // namespace tessera::cuda::sm90
