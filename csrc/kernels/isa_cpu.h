#pragma once

/// The CPU ops are compiled once per instruction set, each time into its own namespace, and chosen
/// at run time. Within one instruction set every op is row-invariant; two instruction sets may
/// differ in the last bits (lanes of a sum, fused or separate multiply-add). `choose`,
/// `top_drafts`, `block_conv`, `block_path` and `block_pairs` do not: their arithmetic is the same
/// everywhere.
///
/// The files compiled several times must not instantiate templates or call inline functions of the
/// standard library that are not inlined for certain: the linker keeps one copy for all, perhaps
/// one that an older CPU cannot run. Argument checks are therefore in dispatch_cpu.cpp.

#include "kernels/common/exec.h"

namespace openspec {

enum class Isa { kBaseline, kAvx2, kAvx512 };

// Name and parameters of each op.
#define OPENSPEC_FOR_CPU_OPS(X)          \
  X(linear, LinearParams)                \
  X(rms_norm, RmsNormParams)             \
  X(embedding, EmbeddingParams)          \
  X(rope_angles, RopeAnglesParams)       \
  X(rope_append, RopeAppendParams)       \
  X(span_attention, SpanAttentionParams) \
  X(head_gate, HeadGateParams)           \
  X(delta_net, DeltaNetParams)           \
  X(choose, ChooseParams)                \
  X(top_drafts, TopDraftsParams)         \
  X(block_conv, BlockConvParams)         \
  X(block_step, BlockStepParams)         \
  X(block_path, BlockPathParams)         \
  X(block_pairs, BlockPairsParams)

// By name only: to include the families' contracts here would compile all copies of all ops anew
// for every change of one.
#define OPENSPEC_DECLARE_PARAMS(name, Params) struct Params;
OPENSPEC_FOR_CPU_OPS(OPENSPEC_DECLARE_PARAMS)
#undef OPENSPEC_DECLARE_PARAMS

/// One instruction set's ops.
struct CpuOps {
#define OPENSPEC_CPU_OP(name, Params) void (*name)(const ExecContext&, const Params&);
  OPENSPEC_FOR_CPU_OPS(OPENSPEC_CPU_OP)
#undef OPENSPEC_CPU_OP
};

/// Whether this build and this CPU have the instruction set.
bool has_isa(Isa isa);
/// Whether linears can run on the CPU's bf16 matrix unit (AMX), which Linux grants on request.
bool has_matrix_unit();
/// The one in use: the best there is, or the one forced.
Isa cpu_isa();
/// For tests and benchmarks; not while an op runs.
void force_isa(Isa isa);
const char* isa_name(Isa isa);

// Namespaces of the compiled copies; OPENSPEC_ISA names the one being compiled.
#define OPENSPEC_DECLARE_CPU_OP(name, Params) void name(const ExecContext&, const Params&);
#define OPENSPEC_NAME_CPU_OP(name, Params) name,
#define OPENSPEC_DECLARE_CPU_OPS(isa)                                          \
  namespace isa {                                                              \
  OPENSPEC_FOR_CPU_OPS(OPENSPEC_DECLARE_CPU_OP)                                \
  inline constexpr CpuOps kOps = {OPENSPEC_FOR_CPU_OPS(OPENSPEC_NAME_CPU_OP)}; \
  }

OPENSPEC_DECLARE_CPU_OPS(isa_baseline)
OPENSPEC_DECLARE_CPU_OPS(isa_avx2)
OPENSPEC_DECLARE_CPU_OPS(isa_avx512)
#undef OPENSPEC_DECLARE_CPU_OPS
#undef OPENSPEC_NAME_CPU_OP
#undef OPENSPEC_DECLARE_CPU_OP
#undef OPENSPEC_FOR_CPU_OPS

/// For weights in LinearLayout::kPairs.
namespace isa_amx {
void linear(const ExecContext&, const LinearParams&);
}

}  // namespace openspec
