#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "kernels/attention/decode_cluster.cuh"
#include "kernels/attention/decode_cluster_plan.cuh"
#include "kernels/attention/decode_cta.cuh"
#include "kernels/attention/decode_warp.cuh"
#include "kernels/attention/plan.cuh"
#include "kernels/attention/prefill_mma.cuh"
#include "kernels/attention/span_attention.h"
#include "kernels/common/launch.cuh"
#include "kernels/common/packs.cuh"
#include "kernels/common/per_device.h"

namespace openspec {
namespace {

using namespace span_attention;

Workspace workspace_of(const SpanAttentionParams& params) {
  Workspace workspace;
  lay_out({params.rows.num_rows, params.rows.num_spans, params.num_q_heads, params.kv.head_dim,
           params.max_tokens, cuda::num_sms()},
          params.workspace, workspace);
  return workspace;
}

int group_of(const SpanAttentionParams& params) {
  return params.num_q_heads / params.kv.num_kv_heads;
}

bool is_supported(const SpanAttentionParams& params) {
  const int num_kv_heads = params.kv.num_kv_heads;
  return params.dtype == DType::kBF16 &&
         (params.kv.head_dim == kMaxHeadDim || params.kv.head_dim == kMidHeadDim ||
          params.kv.head_dim == kMinHeadDim) &&
         (takes_trees(params.kv.head_dim) || !params.rows.may_have_trees) && num_kv_heads > 0 &&
         params.num_q_heads % num_kv_heads == 0 && group_of(params) <= kMaxGroup &&
         params.kv.page_size > 0 && params.kv.page_size % kLineRows == 0 &&
         params.rows.num_spans <= kMaxSpans && params.window >= 0 &&
         (params.is_causal || !params.window_follows_rows) &&
         cuda::are_aligned(params.q, params.out, params.kv.data, params.workspace);
}

bool has_mid_heads(const SpanAttentionParams& params) { return params.kv.head_dim == kMidHeadDim; }

/// What computes decode tiles.
struct DecodeKernel {
  void (*kernel)(AttentionArgs);
  int tile_pairs, num_threads, ctas_per_sm;
  int shared_bytes, tree_shared_bytes;  // for chains, and for any spans
  float item_ns, block_ns;              // as PlanArgs
  bool is_available;                    // false: the device lacks shared memory

  /// What a block takes, of what it takes of heads of kMidHeadDim.
  static constexpr float share_of(int head_dim) {
    return head_dim == kMaxHeadDim ? 1.9f : head_dim == kMidHeadDim ? 1.0f : 0.6f;
  }
  /// Of a warp for each block.
  template <int kHeadDim>
  static DecodeKernel by_warps(int tile_pairs) {
    constexpr int kBytes = WarpLayout<kHeadDim>::kUsedBytes;
    return {
        decode_warp_kernel<kHeadDim>, tile_pairs, kDecodeWarpThreads, 2, kBytes, kBytes, 2000.0f,
        550.0f * share_of(kHeadDim),  false};
  }
  /// Of a CTA for each block; trees too.
  template <int kHeadDim, int kTiles>
  static DecodeKernel by_cta(int ctas_per_sm) {
    constexpr int kBytes = CtaLayout<kHeadDim, kTiles>::kUsedBytes;
    int tree_bytes = kBytes;
    if constexpr (takes_trees(kHeadDim)) {
      tree_bytes = std::max(kBytes, TailLayout<kHeadDim, kTiles>::kBytes);
    }
    const float block_ns = (kTiles == 4 ? 1900.0f : 1000.0f + 200.0f * kTiles) * share_of(kHeadDim);
    return {decode_cta_kernel<kHeadDim, kTiles>,
            kTiles * kMinTilePairs,
            kDecodeCtaThreads,
            ctas_per_sm,
            kBytes,
            tree_bytes,
            1200.0f,
            ctas_per_sm == 1 ? block_ns : block_ns + 500.0f,
            false};
  }
  /// With the limit of shared memory raised.
  static DecodeKernel available(DecodeKernel decode) {
    int device = 0, most_bytes = 0, sm_bytes = 0, fit = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&most_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    cudaDeviceGetAttribute(&sm_bytes, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device);
    // Of two CTAs that fit on an SM together some would meet while other SMs have none. So where
    // one is meant to be alone it takes more than half of what an SM has.
    if (decode.ctas_per_sm == 1)
      decode.shared_bytes = std::max(decode.shared_bytes, sm_bytes / 2 + 1024);
    decode.tree_shared_bytes = std::max(decode.tree_shared_bytes, decode.shared_bytes);
    decode.is_available =
        most_bytes >= decode.tree_shared_bytes &&
        cuda::allow_shared_bytes(decode.kernel, decode.tree_shared_bytes) == cudaSuccess &&
        cudaOccupancyMaxActiveBlocksPerMultiprocessor(&fit, decode.kernel, decode.num_threads,
                                                      decode.tree_shared_bytes) == cudaSuccess &&
        fit >= decode.ctas_per_sm;
    return decode;
  }
  int num_ctas() const { return ctas_per_sm * cuda::num_sms(); }
};

/// By the pairs of a tile.
template <int kHeadDim>
const std::vector<DecodeKernel>& warp_kernels() {
  static_assert(kMaxWarpTilePairs == 24);
  return cuda::per_device([] {
    return std::vector<DecodeKernel>{DecodeKernel::available(DecodeKernel::by_warps<kHeadDim>(8)),
                                     DecodeKernel::available(DecodeKernel::by_warps<kHeadDim>(16)),
                                     DecodeKernel::available(DecodeKernel::by_warps<kHeadDim>(24))};
  });
}
/// Large tiles first. Of the same kernel the one with more shared memory last: its limit stays. Of
/// the smaller heads tiles of 16 pairs would give a warp half of what a product has.
template <int kHeadDim>
const std::vector<DecodeKernel>& cta_kernels() {
  return cuda::per_device([] {
    std::vector<DecodeKernel> all;
    const auto add = [&](DecodeKernel kernel) { all.push_back(DecodeKernel::available(kernel)); };
    if constexpr (kHeadDim == kMinHeadDim) add(DecodeKernel::by_cta<kHeadDim, 4>(2));
    add(DecodeKernel::by_cta<kHeadDim, 4>(1));
    if constexpr (kHeadDim < kMaxHeadDim) add(DecodeKernel::by_cta<kHeadDim, 2>(2));
    add(DecodeKernel::by_cta<kHeadDim, 2>(1));
    if constexpr (kHeadDim == kMidHeadDim) add(DecodeKernel::by_cta<kHeadDim, 1>(2));
    if constexpr (kHeadDim >= kMidHeadDim) add(DecodeKernel::by_cta<kHeadDim, 1>(1));
    return all;
  });
}

/// Those for heads of the size; there need be none.
const std::vector<DecodeKernel>& kernels_of(const SpanAttentionParams& params, bool by_warps) {
  static const std::vector<DecodeKernel> none;
  switch (params.kv.head_dim) {
    case kMinHeadDim:
      return by_warps ? warp_kernels<kMinHeadDim>() : cta_kernels<kMinHeadDim>();
    case kMidHeadDim:
      return by_warps ? warp_kernels<kMidHeadDim>() : cta_kernels<kMidHeadDim>();
    default:
      return by_warps ? none : cta_kernels<kMaxHeadDim>();
  }
}
/// Whether the tiles of prompts are for heads of the size.
bool suits_prefill(const SpanAttentionParams& params) { return params.kv.head_dim < kMaxHeadDim; }

bool is_short(const SpanAttentionParams& params) { return params.rows.expected_kv_len > 0; }

/// Of a span that has as many rows as there is room for on average.
int mean_pairs_of(const SpanAttentionParams& params) {
  return ceil_div(params.rows.num_rows, std::max(params.rows.num_spans, 1)) * group_of(params);
}
int num_heads_of(const SpanAttentionParams& params) {
  return std::max(params.rows.num_spans, 1) * params.kv.num_kv_heads;
}

/// Pairs of a span up to which warps are as fast as tiles of 128 pairs on sm_90a, in contexts of
/// any length: these take one CTA to an SM, and heads of half the size as long for a block.
int most_pairs_by_warps(const SpanAttentionParams& params, const DecodeKernel& largest) {
  if (!has_mid_heads(params)) return largest.tile_pairs;
  return num_heads_of(params) <= largest.num_ctas() ? 2 * kWarpTilePairs : kWarpTilePairs;
}

/// For a step of chains. Null: its tiles would be too many, or the device lacks shared memory.
const DecodeKernel* warp_kernel_of(const SpanAttentionParams& params) {
  const std::vector<DecodeKernel>& kernels = kernels_of(params, /*by_warps=*/true);
  if (kernels.empty() || !kernels.back().is_available) return nullptr;
  const DecodeKernel& largest = kernels.back();
  const int num_pairs = mean_pairs_of(params), num_heads = num_heads_of(params);
  const int num_sms = cuda::num_sms();
  // Short contexts: small tiles, which read K and V of a span more than once, as long as they find
  // SMs that would be idle, or half idle.
  const bool are_few = is_short(params) && params.rows.num_spans <= kFewSpans;
  for (int most_tiles = num_sms; are_few && most_tiles <= largest.num_ctas();
       most_tiles += num_sms) {
    for (const DecodeKernel& kernel : kernels) {
      if (num_heads * ceil_div(num_pairs, kernel.tile_pairs) <= most_tiles) return &kernel;
    }
  }
  // Any context: spans of so few rows that reading is all the work.
  int most_pairs = num_heads <= largest.num_ctas() ? largest.tile_pairs : kWarpTilePairs;
  if (has_wgmma()) most_pairs = most_pairs_by_warps(params, largest);
  return num_pairs <= most_pairs ? &largest : nullptr;
}

/// The first that the device has of those that suit the step: tiles by what a span has room for on
/// average, CTAs alone on their SMs unless there are more KV heads of spans than SMs.
const DecodeKernel* cta_kernel_of(const SpanAttentionParams& params) {
  const int group = group_of(params);
  int num_pairs = mean_pairs_of(params);
  const std::vector<DecodeKernel>& kernels = kernels_of(params, /*by_warps=*/false);
  int most_ctas_per_sm = num_heads_of(params) <= cuda::num_sms() ? 1 : 2;
  if (params.rows.may_have_trees && params.rows.num_rows * group <= kMaxTreePairsForSmallTiles) {
    // Rows of small trees are shared out over the SMs: their tails take time.
    num_pairs /= 4;
  } else if (params.rows.may_have_trees) {
    // Blocks and tail of a tile at the same time; tiles by more rows than the mean, for a graph has
    // room for more spans than there are.
    num_pairs = std::min(2 * num_pairs, 2 * kMinTilePairs);
    most_ctas_per_sm = 2;
  }
  const DecodeKernel* smallest = nullptr;
  for (const DecodeKernel& kernel : kernels) {
    if (!kernel.is_available) continue;
    smallest = &kernel;
    const bool is_large = kernel.tile_pairs > kMinTilePairs && num_pairs <= kernel.tile_pairs / 2;
    if (!is_large && kernel.ctas_per_sm <= most_ctas_per_sm) return &kernel;
  }
  return smallest;
}

/// Whether the step may have prefill tiles: launching their kernel for nothing takes time, too.
bool has_prefill(const SpanAttentionParams& params) {
  if (!suits_prefill(params)) return false;
  const int span_rows = params.rows.max_span_rows;
  if (span_rows > 0 && span_rows * group_of(params) <= kMaxTilePairs) return false;
  return params.rows.num_rows >= (has_wgmma() ? kMinRowsForWgmma : kMinRowsForPrefill);
}

/// Clusters on as many SMs as may be.
struct ClusterLaunch {
  int shared_bytes;      // of a CTA
  int num_clusters = 0;  // that fit at once; 0: the device has no clusters, or not as much memory

  explicit ClusterLaunch(int shared_bytes) : shared_bytes(shared_bytes) {
    if (!cuda::overlaps_kernels() ||
        cuda::allow_shared_bytes(decode_cluster_kernel, ClusterLayout::kApartBytes) !=
            cudaSuccess) {
      return;
    }
    cudaLaunchAttribute cluster = {};
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim = {kClusterCtas, 1, 1};
    cudaLaunchConfig_t config = {};
    config.gridDim = kClusterCtas;
    config.blockDim = kClusterThreads;
    config.dynamicSmemBytes = shared_bytes;
    config.attrs = &cluster;
    config.numAttrs = 1;
    int count = 0;
    if (cudaOccupancyMaxActiveClusters(&count, decode_cluster_kernel, &config) == cudaSuccess) {
      num_clusters = count;
    }
  }
};

// Rounds of clusters, of more than kFewSpans short spans: alone decode_warp_kernel is as fast, but
// its long code is fetched again in every layer.
constexpr int kShortRounds = 2;

/// Clusters that a step of up to `kv_len` tokens wants, its rows spread evenly.
int num_clusters_of(const SpanAttentionParams& params, int kv_len) {
  return num_heads_of(params) * ceil_div(mean_pairs_of(params), kMinTilePairs) *
         ceil_div(kv_len, kClusterBlocks * kBlockTokens);
}

/// Three CTAs to an SM.
const ClusterLaunch& close_clusters() {
  return cuda::per_device([] { return ClusterLaunch(ClusterLayout::kUsedBytes); });
}
/// Two CTAs to an SM.
const ClusterLaunch& distant_clusters() {
  return cuda::per_device([] { return ClusterLaunch(ClusterLayout::kApartBytes); });
}
const ClusterLaunch& cluster_launch_of(const SpanAttentionParams& params) {
  const int num_wanted = std::min(params.rows.num_rows * params.kv.num_kv_heads,
                                  num_clusters_of(params, /*kv_len=*/1));
  return num_wanted <= distant_clusters().num_clusters ? distant_clusters() : close_clusters();
}

/// Whether decode_cluster_kernel can attend to the step.
bool fits_clusters(const SpanAttentionParams& params, const Workspace& workspace) {
  const int64_t num_segments = ceil_div(params.max_tokens, kSegmentBlocks * kBlockTokens);
  return has_mid_heads(params) && !params.rows.may_have_trees &&
         params.rows.num_rows <= kMaxClusterRows &&
         params.rows.num_rows * params.num_q_heads * num_segments <= workspace.num_pair_slots &&
         close_clusters().num_clusters > 0;
}

/// What computes a step: known when a graph is captured.
struct Way {
  bool is_by_clusters = false;           // which do it all
  const DecodeKernel* decode = nullptr;  // null: none
  bool has_prefill = false;
};

/// Of a choice; empty: it is not for this step.
Way chosen_way(const SpanAttentionParams& params, const Workspace& workspace) {
  using Kernel = AttentionChoice::Kernel;
  const AttentionChoice& choice = params.choice;
  Way way;
  if (choice.kernel == Kernel::kCluster) {
    way.is_by_clusters = fits_clusters(params, workspace);
    return way;
  }
  if (choice.kernel == Kernel::kPrefill) {
    way.has_prefill = has_wgmma() && suits_prefill(params) && !params.rows.may_have_trees;
    return way;
  }
  const bool by_warps = choice.kernel == Kernel::kWarp;
  if (by_warps && params.rows.may_have_trees) return way;
  for (const DecodeKernel& kernel : kernels_of(params, by_warps)) {
    if (kernel.is_available && kernel.tile_pairs == choice.tile_pairs &&
        (by_warps || kernel.ctas_per_sm == choice.ctas_per_sm)) {
      way.decode = &kernel;
    }
  }
  return way;
}

/// Few rows, or few in short contexts; on sm_90a, which has a faster way with more, only if the
/// clusters of the short ones take no more than their rounds, and if a span of the others is one
/// tile.
bool suits_clusters(const SpanAttentionParams& params) {
  if (!is_short(params)) {
    return params.rows.num_rows <= kMaxClusterBatchRows &&
           (!has_wgmma() || mean_pairs_of(params) <= kMinTilePairs);
  }
  const int num_wanted = num_clusters_of(params, params.rows.expected_kv_len);
  const int num_rounds = params.rows.num_spans > kFewSpans ? kShortRounds : 1;
  return !has_wgmma() || num_wanted <= num_rounds * close_clusters().num_clusters;
}

/// Empty: the device has no kernel for it.
Way way_of(const SpanAttentionParams& params, const Workspace& workspace) {
  if (params.choice.kernel != AttentionChoice::Kernel::kSuited) {
    return chosen_way(params, workspace);
  }
  // Chains on sm_90a take one kernel: clusters, warps or prefill tiles. Elsewhere prefill tiles are
  // for spans that the plan finds to be long.
  Way way;
  way.is_by_clusters = fits_clusters(params, workspace) && suits_clusters(params);
  if (way.is_by_clusters) return way;
  if (!params.rows.may_have_trees) {
    way.decode = warp_kernel_of(params);
    way.has_prefill = way.decode == nullptr && has_wgmma() && suits_prefill(params);
    if (way.has_prefill) return way;
  }
  if (way.decode == nullptr) way.decode = cta_kernel_of(params);
  way.has_prefill = way.decode != nullptr && has_prefill(params);
  return way;
}

/// What the kernels of both ways are told alike.
template <typename Args>
Args args_of(const SpanAttentionParams& params) {
  Args args = {};
  args.q = static_cast<const __nv_bfloat16*>(params.q);
  args.out = static_cast<__nv_bfloat16*>(params.out);
  args.kv = static_cast<const char*>(params.kv.data);
  args.num_q_heads = params.num_q_heads;
  args.num_kv_heads = params.kv.num_kv_heads;
  args.group = group_of(params);
  args.group_reciprocal = (1u << 16) / args.group + 1;
  args.page_size = params.kv.page_size;
  args.scale = params.scale * static_cast<float>(M_LOG2E);
  args.first_token = params.first_token;
  args.window = params.window > 0 ? params.window : kNoWindow;
  args.window_follows_rows = params.window > 0 && params.window_follows_rows;
  args.is_early = params.is_behind_fence;
  return args;
}

template <int kHeadDim>
int launch_prefill_mma(const AttentionArgs& args, void* stream) {
  constexpr auto kKernel = prefill_mma_kernel<kHeadDim>;
  constexpr int kBytes = PrefillLayout<kHeadDim>::kBytes;
  const int allowed = cuda::per_device([] { return cuda::allow_shared_bytes(kKernel, kBytes); });
  if (allowed != cudaSuccess) return allowed;
  return cuda::launch(kKernel, cuda::num_sms() * kPrefillCtasPerSm, kPrefillThreads, kBytes, stream,
                      args);
}

int launch_clusters(const SpanAttentionParams& params, const Workspace& workspace, void* stream) {
  auto args = args_of<ClusterArgs>(params);
  args.num_kv_heads_reciprocal = (1u << 31) / args.num_kv_heads + 1;
  args.header = workspace.header;
  args.items = workspace.cluster_items;
  args.num_arrived = workspace.cluster_arrived;
  args.partial_stats = workspace.partial_stats;
  args.partial_sums = workspace.partial_sums;
  const ClusterLaunch& launch = cluster_launch_of(params);
  // No more than fit at once: those left over would come last, with their full share of the work.
  const int num_clusters =
      std::min(launch.num_clusters, workspace.max_cluster_items * params.kv.num_kv_heads);
  return cuda::launch_clusters(kClusterCtas, decode_cluster_kernel, kClusterCtas * num_clusters,
                               kClusterThreads, launch.shared_bytes, stream, args);
}

}  // namespace

size_t span_attention_workspace_bytes_cuda(int max_num_rows, int max_num_spans, int num_q_heads,
                                           int head_dim, int max_tokens) {
  Workspace workspace;
  return lay_out({max_num_rows, max_num_spans, num_q_heads, head_dim, max_tokens, cuda::num_sms()},
                 nullptr, workspace);
}

bool has_span_attention_cuda(int head_dim) {
  if (head_dim != kMaxHeadDim) return head_dim == kMinHeadDim || head_dim == kMidHeadDim;
  const std::vector<DecodeKernel>& kernels = cta_kernels<kMaxHeadDim>();
  return std::all_of(kernels.begin(), kernels.end(),
                     [](const DecodeKernel& kernel) { return kernel.is_available; });
}

int most_short_spans_cuda(int num_kv_heads, int head_dim) {
  return head_dim == kMidHeadDim ? kShortRounds * close_clusters().num_clusters / num_kv_heads : 0;
}

int span_attention_plan_cuda(const SpanAttentionParams& params, void* stream) {
  if (!is_supported(params)) return cudaErrorInvalidValue;
  PlanArgs args = {};
  args.rows = params.rows;
  args.pages = params.page_table.pages;
  args.max_pages_per_seq = params.page_table.max_pages_per_seq;
  args.page_size = params.kv.page_size;
  args.num_kv_heads = params.kv.num_kv_heads;
  args.group = group_of(params);
  args.head_dim = params.kv.head_dim;
  args.is_causal = params.is_causal;
  args.workspace = workspace_of(params);
  args.num_sms = cuda::num_sms();
  const Way way = way_of(params, args.workspace);
  const size_t shared_bytes = (params.rows.num_spans + 1) * SpanTable::kArrays * sizeof(int);
  if (way.is_by_clusters) {
    return cuda::launch(decode_cluster_plan_kernel, 1, kPlanThreads, shared_bytes, stream, args);
  }
  if (way.decode == nullptr && !way.has_prefill) return cudaErrorInvalidConfiguration;
  if (way.decode != nullptr) {
    args.num_decode_ctas = way.decode->num_ctas();
    args.tile_pairs = way.decode->tile_pairs;
    args.item_ns = way.decode->item_ns;
    args.block_ns = way.decode->block_ns;
  } else {
    args.tile_pairs = kMaxTilePairs;
  }
  args.has_prefill = way.has_prefill;
  args.has_wgmma = has_wgmma();
  // With warps beside them, chains of more than one tile of these.
  const int most_decode_pairs = params.rows.may_have_trees ? kMaxTilePairs : kMaxWarpTilePairs;
  args.min_prefill_pairs = way.decode == nullptr ? 1 : most_decode_pairs + 1;
  args.range_blocks = params.choice.range_blocks;
  return cuda::launch(plan_kernel, 1, kPlanThreads, shared_bytes, stream, args);
}

int span_attention_cuda(const SpanAttentionParams& params, void* stream) {
  if (!is_supported(params)) return cudaErrorInvalidValue;
  const Workspace workspace = workspace_of(params);
  const Way way = way_of(params, workspace);
  if (way.is_by_clusters) return launch_clusters(params, workspace, stream);
  if (way.decode == nullptr && !way.has_prefill) return cudaErrorInvalidConfiguration;
  auto args = args_of<AttentionArgs>(params);
  args.pages = params.page_table.pages;
  args.max_pages_per_seq = params.page_table.max_pages_per_seq;
  const auto page_size = static_cast<uint32_t>(params.kv.page_size);
  args.page_shift = (page_size & (page_size - 1)) == 0 ? __builtin_ctz(page_size) : -1;
  args.page_reciprocal = static_cast<uint32_t>((uint64_t{1} << 34) / page_size) + 1;
  args.hidden_end = params.window > 0 ? kNoWindow : params.first_token;
  args.workspace = workspace;
  if (way.decode != nullptr) {
    const int bytes =
        params.rows.may_have_trees ? way.decode->tree_shared_bytes : way.decode->shared_bytes;
    const int status = cuda::launch(way.decode->kernel, way.decode->num_ctas(),
                                    way.decode->num_threads, bytes, stream, args);
    if (status != cudaSuccess) return status;
  }
  if (!way.has_prefill) return cudaSuccess;
  const bool is_large = has_mid_heads(params);
  if (has_wgmma()) {
    return is_large ? launch_prefill_wgmma<kMidHeadDim>(args, stream)
                    : launch_prefill_wgmma<kMinHeadDim>(args, stream);
  }
  return is_large ? launch_prefill_mma<kMidHeadDim>(args, stream)
                  : launch_prefill_mma<kMinHeadDim>(args, stream);
}

}  // namespace openspec
