#pragma once

namespace openspec {

/// Enqueues a kernel that does nothing and starts when all before it on the stream is complete,
/// copies too. Whatever overlaps the end of the kernel before it (common/launch.cuh), the first
/// kernel of a graph for one, is ordered behind kernels only: after a copy it may start too early.
/// Returns a cudaError_t.
int fence_cuda(void* stream);

}  // namespace openspec
