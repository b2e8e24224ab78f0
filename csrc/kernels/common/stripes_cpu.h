#pragma once

#include "kernels/common/exec.h"
#include "kernels/common/simd_cpu.h"

namespace openspec::OPENSPEC_ISA {

/// Calls body(stripe, claim) on up to `max_stripes` threads, each with its own stripe number, i.e.
/// its own scratch. `claim()` returns the next item nobody has yet, in rising order; the body stops
/// when that is not below the number of items it knows.
template <typename Body>
OPENSPEC_INLINE void for_each_stripe(const ExecContext& exec, int64_t max_stripes,
                                     const Body& body) {
  int64_t next = 0;
  const auto claim = [&next] { return __atomic_fetch_add(&next, int64_t{1}, __ATOMIC_RELAXED); };
  const int64_t num_stripes = min_of<int64_t>(max_stripes, exec.pool->num_threads());
  exec.pool->parallel_for(num_stripes, [&](int64_t stripe) { body(stripe, claim); });
}

/// First multiple of 64 bytes in a workspace.
OPENSPEC_INLINE char* align_workspace(void* workspace) {
  const uintptr_t address = reinterpret_cast<uintptr_t>(workspace);
  return static_cast<char*>(workspace) + ((64 - address % 64) % 64);
}

}  // namespace openspec::OPENSPEC_ISA
