#pragma once

/// Of functions that both engines call, inlined for certain (kernels/isa_cpu.h says why).
#if defined(__CUDACC__)
#define OPENSPEC_HD __host__ __device__ __forceinline__
#else
#define OPENSPEC_HD inline __attribute__((always_inline))
#endif
