#pragma once

#include "kernels/norm/rms_norm.h"

namespace openspec {

inline constexpr int kMostSums = 8;

/// rms_norm_cuda of sums that come through an inbox, whose params are legal. A cluster of blocks
/// takes a row. Returns a cudaError_t.
int take_norm_cuda(const RmsNormParams& params, void* stream);

}  // namespace openspec
