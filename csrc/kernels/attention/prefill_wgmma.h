#pragma once

namespace openspec::span_attention {

struct AttentionArgs;

/// Whether the code of sm_90a is there and the current device runs it.
bool has_wgmma();
/// Computes the plan's prefill items and their merges. Needs has_wgmma().
int launch_prefill_wgmma(const AttentionArgs& args, void* stream);

}  // namespace openspec::span_attention
