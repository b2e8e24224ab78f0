#pragma once

#include <cstddef>

namespace openspec::bench {

/// Bytes per second at which the GPU reads memory: the best of several passes over `bytes` of
/// device memory, far more than the cache. What a step cannot be faster than.
double read_bandwidth(size_t bytes);

}  // namespace openspec::bench
