#pragma once

/// The instructions of sm_90a that linear_wgmma uses: barriers in shared memory, tensor copies,
/// matrix products of a warpgroup. Everything here is device code and only compiled there.

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/common/cluster.cuh"

/// Defined while compiling for the only architecture that has wgmma (sm_90a, not sm_90).
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define OPENSPEC_HAS_WGMMA 1
#endif

#ifdef OPENSPEC_HAS_WGMMA
namespace openspec::cuda::wgmma {

/// Hidden from the compiler, which would work the address out anew wherever it is used.
__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
  asm volatile("" : "+r"(address));
  return address;
}

// --- Barriers ----------------------------------------------------------------------------

using cuda::expect_bytes;
using cuda::init_barrier;
using cuda::publish_barriers;

__device__ __forceinline__ void arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

/// Arrives at the barrier of the same address in block `rank` of the cluster. What it announces are
/// finished reads of wgmma, which need no fence of the cluster (and a releasing arrival of cluster
/// scope would cost one).
__device__ __forceinline__ void arrive_at(uint32_t barrier, uint32_t rank) {
  asm volatile(
      "{\n"
      ".reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n"
      "}" ::"r"(barrier),
      "r"(rank)
      : "memory");
}

/// Waits until the phase of this parity is complete.
__device__ __forceinline__ void wait(uint32_t barrier, uint32_t parity) {
  uint32_t is_complete;
  do {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.b32 %0, 1, 0, p;\n"
        "}"
        : "=r"(is_complete)
        : "r"(barrier), "r"(parity)
        : "memory");
  } while (is_complete == 0);
}

/// Of all threads of warpgroup `group` of the block, one of the first three. Barriers by number: a
/// number in a register would claim all sixteen of the block.
__device__ __forceinline__ void sync_group(int group) {
  if (group == 0) {
    asm volatile("bar.sync 1, 128;" ::: "memory");
  } else if (group == 1) {
    asm volatile("bar.sync 2, 128;" ::: "memory");
  } else {
    asm volatile("bar.sync 3, 128;" ::: "memory");
  }
}

/// Of all threads of the cluster, which publish_barriers comes before. Orders nothing else.
__device__ __forceinline__ void sync_cluster() {
  arrive_in_cluster();
  wait_for_cluster();
}

__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// --- Tensor copies -----------------------------------------------------------------------

__device__ __forceinline__ void prefetch_map(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

__device__ __forceinline__ void copy_box(uint32_t to, const CUtensorMap& map, int x, int y,
                                         uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3}], [%4];" ::"r"(to),
      "l"(&map), "r"(x), "r"(y), "r"(barrier)
      : "memory");
}

/// What no other copy reads (`is_read_once`) leaves the second-level cache first. Other copies name
/// no policy: `evict_normal` is slower than none.
__device__ __forceinline__ uint64_t first_to_leave() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

__device__ __forceinline__ void copy_box(uint32_t to, const CUtensorMap& map, int x, int y, int z,
                                         uint32_t barrier, bool is_read_once) {
  if (is_read_once) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        ".L2::cache_hint [%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(to),
        "l"(&map), "r"(x), "r"(y), "r"(z), "r"(barrier), "l"(first_to_leave())
        : "memory");
  } else {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%2, %3, %4}], [%5];" ::"r"(to),
        "l"(&map), "r"(x), "r"(y), "r"(z), "r"(barrier)
        : "memory");
  }
}

/// To the same place in every block of `ranks`, each of whose barriers hears of it.
__device__ __forceinline__ void copy_box_to_all(uint32_t to, const CUtensorMap& map, int x, int y,
                                                int z, uint32_t barrier, uint32_t ranks,
                                                bool is_read_once) {
  const auto mask = static_cast<uint16_t>(ranks);
  if (is_read_once) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        ".multicast::cluster.L2::cache_hint [%0], [%1, {%2, %3, %4}], [%5], %6, %7;" ::"r"(to),
        "l"(&map), "r"(x), "r"(y), "r"(z), "r"(barrier), "h"(mask), "l"(first_to_leave())
        : "memory");
  } else {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        ".multicast::cluster [%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(to),
        "l"(&map), "r"(x), "r"(y), "r"(z), "r"(barrier), "h"(mask)
        : "memory");
  }
}

// --- Products ----------------------------------------------------------------------------

/// Keeps the compiler from moving uses of accumulators across the place; no instruction.
template <int kCount>
__device__ __forceinline__ void pin(float (&values)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(values[i])::"memory");
}

template <int kCount>
__device__ __forceinline__ void pin(uint32_t (&values)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(values[i])::"memory");
}

/// Orders the warpgroup's own accesses to accumulators before the products that follow.
__device__ __forceinline__ void begin_products() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

/// Closes a group of products.
__device__ __forceinline__ void end_products() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

/// Shows the thread's writes to shared memory to products and tensor copies that come after it, or
/// after a barrier that follows it.
__device__ __forceinline__ void publish_writes() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/// Waits for all groups but the last kPending.
template <int kPending>
__device__ __forceinline__ void wait_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

/// An operand in shared memory, 16 k wide and contiguous along k, its rows in groups of 8. Without
/// swizzle, 8 k of a group are 8 x 16 contiguous bytes; `k_stride` leads to the other 8 k and
/// `group_stride` to the next 8 rows (bytes, multiples of 16). With the swizzle of 128 bytes a row
/// is 128 bytes of which the operand takes 32, groups are 1024 bytes and k_stride is not used.
/// Descriptors are these two halves; adding n to the lower one moves the operand by 16 n bytes.
/// Fields: PTX ISA, "Matrix descriptor format".
__device__ __forceinline__ uint32_t describe_place(uint32_t address, uint32_t k_stride) {
  // In a cluster, shared addresses have bits above the 18 that count here.
  return (address & 0x3ffff) >> 4 | k_stride >> 4 << 16;
}
__device__ __forceinline__ constexpr uint64_t describe_form(uint32_t group_stride,
                                                            bool has_swizzle) {
  return static_cast<uint64_t>(group_stride >> 4) << 32 | static_cast<uint64_t>(has_swizzle ? 1 : 0)
                                                              << 62;
}

// Operand lists of the instruction below: its accumulators come first.
#define OPENSPEC_WGMMA_PLACES_16 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define OPENSPEC_WGMMA_PLACES_32 \
  OPENSPEC_WGMMA_PLACES_16       \
  ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define OPENSPEC_WGMMA_PLACES_48 \
  OPENSPEC_WGMMA_PLACES_32       \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define OPENSPEC_WGMMA_PLACES_64 \
  OPENSPEC_WGMMA_PLACES_48       \
  ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define OPENSPEC_WGMMA_PLACES_80 \
  OPENSPEC_WGMMA_PLACES_64       \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define OPENSPEC_WGMMA_SUMS_4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define OPENSPEC_WGMMA_SUMS_16(i)                                                       \
  OPENSPEC_WGMMA_SUMS_4(i), OPENSPEC_WGMMA_SUMS_4(i + 4), OPENSPEC_WGMMA_SUMS_4(i + 8), \
      OPENSPEC_WGMMA_SUMS_4(i + 12)
#define OPENSPEC_WGMMA_REGISTERS "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3])
#define OPENSPEC_WGMMA(columns, places, a_place, b_place, keep_place, majors, inputs, ...)   \
  asm volatile(                                                                              \
      "{\n"                                                                                  \
      ".reg .pred keep;\n"                                                                   \
      "setp.ne.b32 keep, " keep_place                                                        \
      ", 0;\n"                                                                               \
      "wgmma.mma_async.sync.aligned.m64n" columns "k16.f32.bf16.bf16 {" places "}, " a_place \
      ", " b_place ", keep, 1, 1, " majors                                                   \
      ";\n"                                                                                  \
      "}"                                                                                    \
      : __VA_ARGS__                                                                          \
      : inputs, "l"(b), "r"(keep))

/// d = a b^T + (keep ? d : 0): a is 64 x 16, b kColumns x 16, both bf16 and described above. Lane l
/// of warp w gets in d[4 j + i] row 16 w + l / 4 + 8 (i / 2), column 8 j + 2 (l % 4) + i % 2.
/// Asynchronous: d is taken until wait_products.
template <int kColumns>
__device__ __forceinline__ void multiply(float (&d)[kColumns / 2], uint64_t a, uint64_t b,
                                         int keep) {
  static_assert(kColumns == 32 || kColumns == 64 || kColumns == 96 || kColumns == 128 ||
                kColumns == 160);
  if constexpr (kColumns == 32) {
    OPENSPEC_WGMMA("32", OPENSPEC_WGMMA_PLACES_16, "%16", "%17", "%18", "0, 0", "l"(a),
                   OPENSPEC_WGMMA_SUMS_16(0));
  } else if constexpr (kColumns == 64) {
    OPENSPEC_WGMMA("64", OPENSPEC_WGMMA_PLACES_32, "%32", "%33", "%34", "0, 0", "l"(a),
                   OPENSPEC_WGMMA_SUMS_16(0), OPENSPEC_WGMMA_SUMS_16(16));
  } else if constexpr (kColumns == 96) {
    OPENSPEC_WGMMA("96", OPENSPEC_WGMMA_PLACES_48, "%48", "%49", "%50", "0, 0", "l"(a),
                   OPENSPEC_WGMMA_SUMS_16(0), OPENSPEC_WGMMA_SUMS_16(16),
                   OPENSPEC_WGMMA_SUMS_16(32));
  } else if constexpr (kColumns == 128) {
    OPENSPEC_WGMMA("128", OPENSPEC_WGMMA_PLACES_64, "%64", "%65", "%66", "0, 0", "l"(a),
                   OPENSPEC_WGMMA_SUMS_16(0), OPENSPEC_WGMMA_SUMS_16(16),
                   OPENSPEC_WGMMA_SUMS_16(32), OPENSPEC_WGMMA_SUMS_16(48));
  } else {
    OPENSPEC_WGMMA("160", OPENSPEC_WGMMA_PLACES_80, "%80", "%81", "%82", "0, 0", "l"(a),
                   OPENSPEC_WGMMA_SUMS_16(0), OPENSPEC_WGMMA_SUMS_16(16),
                   OPENSPEC_WGMMA_SUMS_16(32), OPENSPEC_WGMMA_SUMS_16(48),
                   OPENSPEC_WGMMA_SUMS_16(64));
  }
}

/// As above with a in registers, which are taken until wait_products too: lane l of warp w holds
/// columns 2 (l % 4) and the next of rows 16 w + l / 4 and that + 8, then columns 8 further of
/// both.
template <int kColumns>
__device__ __forceinline__ void multiply(float (&d)[kColumns / 2], const uint32_t (&a)[4],
                                         uint64_t b, int keep) {
  if constexpr (kColumns == 32) {
    OPENSPEC_WGMMA("32", OPENSPEC_WGMMA_PLACES_16, "{%16, %17, %18, %19}", "%20", "%21", "0",
                   OPENSPEC_WGMMA_REGISTERS, OPENSPEC_WGMMA_SUMS_16(0));
  } else if constexpr (kColumns == 64) {
    OPENSPEC_WGMMA("64", OPENSPEC_WGMMA_PLACES_32, "{%32, %33, %34, %35}", "%36", "%37", "0",
                   OPENSPEC_WGMMA_REGISTERS, OPENSPEC_WGMMA_SUMS_16(0), OPENSPEC_WGMMA_SUMS_16(16));
  } else if constexpr (kColumns == 96) {
    OPENSPEC_WGMMA("96", OPENSPEC_WGMMA_PLACES_48, "{%48, %49, %50, %51}", "%52", "%53", "0",
                   OPENSPEC_WGMMA_REGISTERS, OPENSPEC_WGMMA_SUMS_16(0), OPENSPEC_WGMMA_SUMS_16(16),
                   OPENSPEC_WGMMA_SUMS_16(32));
  } else if constexpr (kColumns == 128) {
    OPENSPEC_WGMMA("128", OPENSPEC_WGMMA_PLACES_64, "{%64, %65, %66, %67}", "%68", "%69", "0",
                   OPENSPEC_WGMMA_REGISTERS, OPENSPEC_WGMMA_SUMS_16(0), OPENSPEC_WGMMA_SUMS_16(16),
                   OPENSPEC_WGMMA_SUMS_16(32), OPENSPEC_WGMMA_SUMS_16(48));
  } else {
    static_assert(kColumns == 160);
    OPENSPEC_WGMMA("160", OPENSPEC_WGMMA_PLACES_80, "{%80, %81, %82, %83}", "%84", "%85", "0",
                   OPENSPEC_WGMMA_REGISTERS, OPENSPEC_WGMMA_SUMS_16(0), OPENSPEC_WGMMA_SUMS_16(16),
                   OPENSPEC_WGMMA_SUMS_16(32), OPENSPEC_WGMMA_SUMS_16(48),
                   OPENSPEC_WGMMA_SUMS_16(64));
  }
}

// Chains of which the first product writes its sums without reading them, not even as far as the
// compiler knows; and whether b is contiguous along its rows instead of along k.
#define OPENSPEC_WGMMA_NEW_4(i) "=f"(d[i]), "=f"(d[i + 1]), "=f"(d[i + 2]), "=f"(d[i + 3])
#define OPENSPEC_WGMMA_NEW_16(i)                                                     \
  OPENSPEC_WGMMA_NEW_4(i), OPENSPEC_WGMMA_NEW_4(i + 4), OPENSPEC_WGMMA_NEW_4(i + 8), \
      OPENSPEC_WGMMA_NEW_4(i + 12)
#define OPENSPEC_WGMMA_CHAIN(columns, places, a_place, b_place, is_kept, is_along_rows, inputs, \
                             ...)                                                               \
  asm volatile(                                                                                 \
      "{\n"                                                                                     \
      ".reg .pred keep;\n"                                                                      \
      "setp.ne.b32 keep, " is_kept                                                              \
      ", 0;\n"                                                                                  \
      "wgmma.mma_async.sync.aligned.m64n" columns "k16.f32.bf16.bf16 {" places "}, " a_place    \
      ", " b_place ", keep, 1, 1, " is_along_rows                                               \
      ";\n"                                                                                     \
      "}"                                                                                       \
      : __VA_ARGS__                                                                             \
      : inputs, "l"(b))

/// d = a b^T + (kIsFirst ? 0 : d) with 64 columns, as multiply() but for kIsFirst.
template <bool kIsFirst>
__device__ __forceinline__ void multiply_64(float (&d)[32], uint64_t a, uint64_t b) {
  if constexpr (kIsFirst) {
    OPENSPEC_WGMMA_CHAIN("64", OPENSPEC_WGMMA_PLACES_32, "%32", "%33", "0", "0, 0", "l"(a),
                         OPENSPEC_WGMMA_NEW_16(0), OPENSPEC_WGMMA_NEW_16(16));
  } else {
    OPENSPEC_WGMMA_CHAIN("64", OPENSPEC_WGMMA_PLACES_32, "%32", "%33", "1", "0, 0", "l"(a),
                         OPENSPEC_WGMMA_SUMS_16(0), OPENSPEC_WGMMA_SUMS_16(16));
  }
}

/// 72 or 136 columns, a in registers as above. b is contiguous along its rows: in the swizzle of
/// 128 bytes 64 rows of b by 8 k are 1024 bytes, `group_stride` of describe_form leads to the other
/// 8 k and `k_stride` of describe_place to the next 64 rows.
template <bool kIsFirst>
__device__ __forceinline__ void multiply_along_rows(float (&d)[36], const uint32_t (&a)[4],
                                                    uint64_t b) {
  if constexpr (kIsFirst) {
    OPENSPEC_WGMMA_CHAIN("72", OPENSPEC_WGMMA_PLACES_32 ", %32, %33, %34, %35",
                         "{%36, %37, %38, %39}", "%40", "0", "1", OPENSPEC_WGMMA_REGISTERS,
                         OPENSPEC_WGMMA_NEW_16(0), OPENSPEC_WGMMA_NEW_16(16),
                         OPENSPEC_WGMMA_NEW_4(32));
  } else {
    OPENSPEC_WGMMA_CHAIN("72", OPENSPEC_WGMMA_PLACES_32 ", %32, %33, %34, %35",
                         "{%36, %37, %38, %39}", "%40", "1", "1", OPENSPEC_WGMMA_REGISTERS,
                         OPENSPEC_WGMMA_SUMS_16(0), OPENSPEC_WGMMA_SUMS_16(16),
                         OPENSPEC_WGMMA_SUMS_4(32));
  }
}
template <bool kIsFirst>
__device__ __forceinline__ void multiply_along_rows(float (&d)[68], const uint32_t (&a)[4],
                                                    uint64_t b) {
  if constexpr (kIsFirst) {
    OPENSPEC_WGMMA_CHAIN(
        "136", OPENSPEC_WGMMA_PLACES_64 ", %64, %65, %66, %67", "{%68, %69, %70, %71}", "%72", "0",
        "1", OPENSPEC_WGMMA_REGISTERS, OPENSPEC_WGMMA_NEW_16(0), OPENSPEC_WGMMA_NEW_16(16),
        OPENSPEC_WGMMA_NEW_16(32), OPENSPEC_WGMMA_NEW_16(48), OPENSPEC_WGMMA_NEW_4(64));
  } else {
    OPENSPEC_WGMMA_CHAIN(
        "136", OPENSPEC_WGMMA_PLACES_64 ", %64, %65, %66, %67", "{%68, %69, %70, %71}", "%72", "1",
        "1", OPENSPEC_WGMMA_REGISTERS, OPENSPEC_WGMMA_SUMS_16(0), OPENSPEC_WGMMA_SUMS_16(16),
        OPENSPEC_WGMMA_SUMS_16(32), OPENSPEC_WGMMA_SUMS_16(48), OPENSPEC_WGMMA_SUMS_4(64));
  }
}

#undef OPENSPEC_WGMMA_NEW_4
#undef OPENSPEC_WGMMA_NEW_16
#undef OPENSPEC_WGMMA_CHAIN
#undef OPENSPEC_WGMMA_REGISTERS
#undef OPENSPEC_WGMMA_PLACES_16
#undef OPENSPEC_WGMMA_PLACES_32
#undef OPENSPEC_WGMMA_PLACES_48
#undef OPENSPEC_WGMMA_PLACES_64
#undef OPENSPEC_WGMMA_PLACES_80
#undef OPENSPEC_WGMMA_SUMS_4
#undef OPENSPEC_WGMMA_SUMS_16
#undef OPENSPEC_WGMMA

// --- Registers ---------------------------------------------------------------------------

/// Every warp of a warpgroup calls one of these once.
template <int kCount>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}
template <int kCount>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}

// --- Shared memory -----------------------------------------------------------------------

/// Stores four 8 x 8 matrices of 16-bit values as their transposes: a lane holds two columns of row
/// lane / 4 of each; lane i gives the address where column i % 8 of matrix i / 8 goes, 16 bytes.
__device__ __forceinline__ void store_transposed(uint32_t address, const uint32_t (&values)[4]) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
      "r"(values[0]), "r"(values[1]), "r"(values[2]), "r"(values[3])
      : "memory");
}

__device__ __forceinline__ uint4 load_16_bytes(uint32_t address) {
  uint4 value;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "r"(address)
               : "memory");
  return value;
}

__device__ __forceinline__ void store_4_bytes(uint32_t address, uint32_t value) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

__device__ __forceinline__ void store_floats(uint32_t address, const float* values) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(values[0]),
               "f"(values[1]), "f"(values[2]), "f"(values[3])
               : "memory");
}

}  // namespace openspec::cuda::wgmma
#endif  // OPENSPEC_HAS_WGMMA
