#pragma once

#include "kernels/norm/rms_norm.h"

namespace openspec {

inline constexpr int kMostSums = 8;

/// Whether a cluster of blocks to a row is faster than a block: of at most 256 wide rows of partial
/// sums, as many as are added at once.
bool suits_cluster_norm(const RmsNormParams& params);

/// rms_norm_cuda of sums that come through an inbox, and of those that suit a cluster. The params
/// are legal, with strides. Returns a cudaError_t.
int cluster_norm_cuda(const RmsNormParams& params, void* stream);

}  // namespace openspec
