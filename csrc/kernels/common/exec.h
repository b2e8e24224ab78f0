#pragma once

#include <cstddef>
#include <cstdint>

#include "core/host_device.h"
#include "core/thread_pool.h"

namespace openspec {

/// Element type of a buffer.
enum class DType : uint8_t { kF32, kBF16, kE4M3 };  // kE4M3: a checkpoint's codes alone

inline size_t dtype_bytes(DType dtype) {
  return dtype == DType::kF32 ? 4 : dtype == DType::kBF16 ? 2 : 1;
}

enum class Device : uint8_t { kCpu, kCuda };

inline constexpr int kMaxRanks = 8;
inline constexpr uint64_t kExchangeDeadlineNs = 10'000'000'000;  // that a rank waits at most

/// One of the ranks that share a target between them, each with its part of the matrices.
struct TpRank {
  int rank = 0, size = 1;
};

/// What a step took of a rank's exchange with the others, on CUDA.
struct ExchangeCounts {
  uint64_t num_rounds = 0;
  /// That one thread of each kernel waited, from when it first found nothing.
  uint64_t wait_ns = 0;
};

/// Where an op runs. On CUDA every pointer in an op's parameters is device memory unless its
/// comment says otherwise, ops only enqueue work on `stream`, and `num_rows` and other host values
/// are upper bounds that a captured graph may keep; what changes from step to step is read on the
/// device.
struct ExecContext {
  ThreadPool* pool = nullptr;  // CPU
  Device device = Device::kCpu;
  void* stream = nullptr;  // CUDA: cudaStream_t
};

}  // namespace openspec
