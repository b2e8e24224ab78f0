#if defined(OPENSPEC_X86_ISAS) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <algorithm>

#include "core/check.h"
#include "kernels/attention/layout.h"
#include "kernels/attention/span_attention.h"
#include "kernels/choose/choose.h"
#include "kernels/choose/layout.h"
#include "kernels/drafts/block_conv.h"
#include "kernels/drafts/draft_tree.h"
#include "kernels/drafts/token_pairs.h"
#include "kernels/isa_cpu.h"
#include "kernels/linear/linear.h"
#include "kernels/norm/rms_norm.h"
#include "kernels/rope/rope.h"
#include "kernels/steps/embedding.h"

// The public CPU ops: arguments are checked here, then the copy of the op compiled for the best
// instruction set runs.

namespace openspec {

namespace {

constexpr int kMaxHeadDim = attention::kMaxHeadDim;

Isa best_isa() {
  if (has_isa(Isa::kAvx512)) return Isa::kAvx512;
  if (has_isa(Isa::kAvx2)) return Isa::kAvx2;
  return Isa::kBaseline;
}

Isa& current_isa() {
  static Isa isa = best_isa();
  return isa;
}

const CpuOps& ops() {
#ifdef OPENSPEC_X86_ISAS
  if (current_isa() == Isa::kAvx512) return isa_avx512::kOps;
#endif
#ifdef OPENSPEC_AVX2
  if (current_isa() == Isa::kAvx2) return isa_avx2::kOps;
#endif
  return isa_baseline::kOps;
}

void check_pairs(const TokenPairs& pairs) {
  OPENSPEC_CHECK(pairs.rank % 8 == 0 && pairs.rank > 0 && pairs.rank <= kMaxPairRank,
                 "pairs of rank ", pairs.rank, ", not a multiple of 8 up to ", kMaxPairRank);
}
void check_candidates(const TokenPairs& pairs, int top_k) {
  check_pairs(pairs);
  OPENSPEC_CHECK(top_k >= 1 && top_k <= kMaxTopDrafts, "pairs of the best ", top_k, " tokens");
}

}  // namespace

bool has_isa(Isa isa) {
#ifdef OPENSPEC_X86_ISAS
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                        __builtin_cpu_supports("f16c");
  switch (isa) {
    case Isa::kBaseline:
      return true;
    case Isa::kAvx2:
#ifdef OPENSPEC_AVX2
      return has_avx2;
#else
      return false;
#endif
    case Isa::kAvx512:
      return has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  }
#endif
  return isa == Isa::kBaseline;
}

bool has_matrix_unit() {
#if defined(OPENSPEC_X86_ISAS) && defined(__linux__)
  // Bits of CPUID leaf 7, subleaf 0; the kernel then has to grant the process the tile registers.
  static const bool is_granted = [] {
    unsigned a, b, c, d;
    if (!has_isa(Isa::kAvx512) || __get_cpuid_count(7, 0, &a, &b, &c, &d) == 0) return false;
    constexpr unsigned kAmxBf16 = 1u << 22, kAmxTile = 1u << 24;
    constexpr unsigned kAvx512Vbmi = 1u << 1;  // of c
    if ((d & kAmxBf16) == 0 || (d & kAmxTile) == 0 || (c & kAvx512Vbmi) == 0) return false;
    constexpr long kRequestPermission = 0x1023, kTileData = 18;
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  }();
  return is_granted;
#else
  return false;
#endif
}

Isa cpu_isa() { return current_isa(); }

void force_isa(Isa isa) {
  OPENSPEC_CHECK_ARG(has_isa(isa), "this CPU or build lacks ", isa_name(isa));
  current_isa() = isa;
}

const char* isa_name(Isa isa) {
  return isa == Isa::kAvx512 ? "avx512" : isa == Isa::kAvx2 ? "avx2" : "baseline";
}

LinearLayout linear_layout_cpu(int whole_inputs) {
  return whole_inputs % 32 == 0 && has_matrix_unit() ? LinearLayout::kPairs : LinearLayout::kLines;
}

void linear_cpu(const ExecContext& exec, const LinearParams& params) {
  const PackedLinear& weight = params.weight;
  OPENSPEC_CHECK(params.workspace != nullptr, "linear needs a workspace");
  OPENSPEC_CHECK(has_legal_bias(params), "a linear with an epilogue or splits has no bias");
  OPENSPEC_CHECK(has_legal_shard(weight), "a shard is some of a matrix's ", weight.whole_outputs(),
                 " outputs, or some of its ", weight.num_splits, " splits");
  OPENSPEC_CHECK(has_legal_output(params), "sums of a shard of inputs stay apart, those of an ",
                 "epilogue do not, and rows of outputs do not overlap");
  OPENSPEC_CHECK(has_legal_scales(weight), "codes have scales, and bf16 weights have none");
  if (weight.layout == LinearLayout::kLines) {
    ops().linear(exec, params);
    return;
  }
  OPENSPEC_CHECK(has_matrix_unit(), "weights in pairs need a CPU with AMX");
#ifdef OPENSPEC_X86_ISAS
  isa_amx::linear(exec, params);
#endif
}

void rms_norm_cpu(const ExecContext& exec, const RmsNormParams& params) {
  ops().rms_norm(exec, params);
}

void embedding_cpu(const ExecContext& exec, const EmbeddingParams& params) {
  ops().embedding(exec, params);
}

void rope_angles_cpu(const ExecContext& exec, const RopeAnglesParams& params) {
  ops().rope_angles(exec, params);
}

void rope_append_cpu(const ExecContext& exec, const RopeAppendParams& params) {
  OPENSPEC_CHECK(params.kv.head_dim % 2 == 0 && params.kv.head_dim <= kMaxHeadDim, "head_dim ",
                 params.kv.head_dim, " is not even and at most ", kMaxHeadDim);
  ops().rope_append(exec, params);
}

void append_context_cpu(const ExecContext& exec, const AppendContextParams& params) {
  for (int i = 0; i < params.num_layers; ++i) {
    const AppendContextParams::Layer& layer = params.layers[i];
    const int num_heads = 2 * layer.kv.num_kv_heads;
    const size_t before = static_cast<size_t>(i * num_heads * layer.kv.head_dim);
    rope_append_cpu(
        exec, {.rows = params.rows,
               .qkv = static_cast<const std::byte*>(params.kv) + before * dtype_bytes(params.dtype),
               .row_heads = params.num_layers * num_heads,
               .cos_sin = params.cos_sin,
               .k_norm = layer.k_norm,
               .kv = layer.kv,
               .eps = params.eps,
               .dtype = params.dtype});
  }
}

size_t span_attention_workspace_bytes_cpu(int num_threads, int num_q_heads, int max_tokens) {
  constexpr size_t kAlignment = 64;
  return kAlignment + static_cast<size_t>(num_threads) * sizeof(attention::Scratch) +
         static_cast<size_t>(attention::shared_partial_floats(num_q_heads, max_tokens)) *
             sizeof(float);
}

void span_attention_cpu(const ExecContext& exec, const SpanAttentionParams& params) {
  OPENSPEC_CHECK(params.kv.head_dim <= kMaxHeadDim && params.kv.head_dim % 32 == 0, "head_dim ",
                 params.kv.head_dim, " is not a multiple of 32 up to ", kMaxHeadDim);
  OPENSPEC_CHECK(params.num_q_heads % params.kv.num_kv_heads == 0 &&
                     params.num_q_heads / params.kv.num_kv_heads <= attention::kMaxGroup,
                 params.num_q_heads, " q heads cannot share ", params.kv.num_kv_heads, " KV heads");
  OPENSPEC_CHECK(params.window >= 0 && (params.is_causal || !params.window_follows_rows),
                 "a window of ", params.window, " tokens that follows rows needs causal rows");
  ops().span_attention(exec, params);
}

size_t choose_workspace_bytes_cpu(int num_threads, int vocab_size) {
  return static_cast<size_t>(num_threads) * static_cast<size_t>(choose_stripe_floats(vocab_size)) *
             sizeof(float) +
         64;
}

void choose_cpu(const ExecContext& exec, const ChooseParams& params) {
  OPENSPEC_CHECK((params.token_of == nullptr && params.samples == nullptr) || params.is_draft,
                 "a table of tokens and a list of samples are for drafts alone");
  OPENSPEC_CHECK(params.drafts.logits.vocab_size <= params.vocab_size, "drafts are of ",
                 params.drafts.logits.vocab_size, " tokens, the target knows ", params.vocab_size);
  OPENSPEC_CHECK(params.vocab_size > 0, "the vocabulary is empty");
  ops().choose(exec, params);
}

size_t top_drafts_workspace_bytes_cpu(int num_threads, int vocab_size) {
  return static_cast<size_t>(num_threads) *
             static_cast<size_t>(top_drafts_stripe_floats(vocab_size)) * sizeof(float) +
         64;
}

void top_drafts_cpu(const ExecContext& exec, const TopDraftsParams& params) {
  OPENSPEC_CHECK(params.top_k >= 1 && params.top_k <= std::min(kMaxTopDrafts, params.vocab_size),
                 "the best ", params.top_k, " of ", params.vocab_size, " drafts");
  ops().top_drafts(exec, params);
}

void block_conv_cpu(const ExecContext& exec, const BlockConvParams& params) {
  OPENSPEC_CHECK(params.group > 0 && params.group % 8 == 0 && params.width % params.group == 0,
                 "a convolution of ", params.width, " columns in groups of ", params.group);
  ops().block_conv(exec, params);
}

void block_step_cpu(const ExecContext& exec, const BlockStepParams& params) {
  check_pairs(params.pairs);
  ops().block_step(exec, params);
}

void block_path_cpu(const ExecContext& exec, const BlockPathParams& params) {
  check_candidates(params.pairs, params.top_k);
  OPENSPEC_CHECK(params.successors == nullptr ||
                     (params.terms.factors == nullptr && params.logits != nullptr &&
                      params.pairs.vocab_size >= kNumSuccessors),
                 "successors need logits, and as many tokens");
  ops().block_path(exec, params);
}

void block_pairs_cpu(const ExecContext& exec, const BlockPairsParams& params) {
  check_candidates(params.pairs, params.top_k);
  ops().block_pairs(exec, params);
}

}  // namespace openspec
