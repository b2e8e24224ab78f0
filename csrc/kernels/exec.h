#pragma once

#include <cstddef>
#include <cstdint>

#include "core/thread_pool.h"

namespace openspec {

/// Element type of a buffer.
enum class DType : uint8_t { kF32, kBF16 };

inline size_t dtype_bytes(DType dtype) { return dtype == DType::kF32 ? 4 : 2; }

/// Where an op runs.
struct ExecContext {
  ThreadPool* pool = nullptr;
};

}  // namespace openspec
