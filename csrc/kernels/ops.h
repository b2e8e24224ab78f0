#pragma once

#include "core/check.h"
#include "kernels/attention/head_gate.h"
#include "kernels/attention/span_attention.h"
#include "kernels/choose/choose.h"
#include "kernels/common/device.h"
#include "kernels/delta_net/delta_net.h"
#include "kernels/drafts/block_conv.h"
#include "kernels/drafts/copy_lookup.h"
#include "kernels/drafts/draft_block.h"
#include "kernels/drafts/draft_memory.h"
#include "kernels/drafts/draft_rows.h"
#include "kernels/drafts/draft_tree.h"
#include "kernels/drafts/kept_rows.h"
#include "kernels/drafts/token_pairs.h"
#include "kernels/experts/experts.h"
#include "kernels/linear/linear.h"
#include "kernels/norm/rms_norm.h"
#include "kernels/rope/rope.h"
#include "kernels/steps/embedding.h"
#include "kernels/steps/gather_rows.h"
#include "kernels/steps/move_kv.h"

/// The ops of a forward pass by name, so that a model is written without naming a device; here is
/// the one place that chooses between implementations.
namespace openspec::ops {

/// op(exec, params): `op_cuda` on CUDA, else `op_cpu`.
#define OPENSPEC_DEFINE_OP(op, Params)                            \
  inline void op(const ExecContext& exec, const Params& params) { \
    if (exec.device == Device::kCuda) {                           \
      OPENSPEC_ON_CUDA(op##_cuda, params, exec);                  \
    } else {                                                      \
      op##_cpu(exec, params);                                     \
    }                                                             \
  }

OPENSPEC_DEFINE_OP(embedding, EmbeddingParams)
OPENSPEC_DEFINE_OP(rms_norm, RmsNormParams)
OPENSPEC_DEFINE_OP(linear, LinearParams)
OPENSPEC_DEFINE_OP(linear_select, LinearSelectParams)
OPENSPEC_DEFINE_OP(route_experts, RouteParams)
OPENSPEC_DEFINE_OP(experts, ExpertsParams)
OPENSPEC_DEFINE_OP(rope_angles, RopeAnglesParams)
OPENSPEC_DEFINE_OP(rope_append, RopeAppendParams)
OPENSPEC_DEFINE_OP(append_context, AppendContextParams)
OPENSPEC_DEFINE_OP(span_attention, SpanAttentionParams)
OPENSPEC_DEFINE_OP(head_gate, HeadGateParams)
OPENSPEC_DEFINE_OP(delta_net, DeltaNetParams)
OPENSPEC_DEFINE_OP(gather_rows, GatherRowsParams)
OPENSPEC_DEFINE_OP(choose, ChooseParams)
OPENSPEC_DEFINE_OP(copy_lookup, CopyLookupParams)
OPENSPEC_DEFINE_OP(remember, RememberParams)
OPENSPEC_DEFINE_OP(recall, RecallParams)
OPENSPEC_DEFINE_OP(extend_rows, ExtendRowsParams)
OPENSPEC_DEFINE_OP(chain_rows, ChainRowsParams)
OPENSPEC_DEFINE_OP(keep_rows, KeepRowsParams)
OPENSPEC_DEFINE_OP(take_kept_rows, TakeKeptRowsParams)
OPENSPEC_DEFINE_OP(window_spans, WindowSpansParams)
OPENSPEC_DEFINE_OP(top_drafts, TopDraftsParams)
OPENSPEC_DEFINE_OP(grow_trees, GrowTreesParams)
OPENSPEC_DEFINE_OP(pick_drafts, PickDraftsParams)
OPENSPEC_DEFINE_OP(move_kv, MoveKvParams)
OPENSPEC_DEFINE_OP(move_records, MoveRecordsParams)
OPENSPEC_DEFINE_OP(block_rows, BlockRowsParams)
OPENSPEC_DEFINE_OP(block_conv, BlockConvParams)
OPENSPEC_DEFINE_OP(block_step, BlockStepParams)
OPENSPEC_DEFINE_OP(block_confidence, BlockConfidenceParams)
OPENSPEC_DEFINE_OP(store_blocks, StoreBlocksParams)
OPENSPEC_DEFINE_OP(block_path, BlockPathParams)
OPENSPEC_DEFINE_OP(block_pairs, BlockPairsParams)
OPENSPEC_DEFINE_OP(block_trees, BlockTreesParams)

/// to[i] = from[row[i]], rows of so many bytes; rows of -1 keep what they hold. No `row`: row i.
inline void copy_rows(const ExecContext& exec, const int32_t* row, const void* from, void* to,
                      int num_rows, int64_t width_bytes) {
  gather_rows(exec, {.row = row,
                     .in = from,
                     .out = to,
                     .num_rows = num_rows,
                     .width_bytes = width_bytes,
                     .out_stride = width_bytes});
}

/// Once per step, before the first layer's attention.
inline void span_attention_plan(const ExecContext& exec, const SpanAttentionParams& params) {
  if (exec.device == Device::kCuda) OPENSPEC_ON_CUDA(span_attention_plan_cuda, params, exec);
}

#undef OPENSPEC_DEFINE_OP

}  // namespace openspec::ops
