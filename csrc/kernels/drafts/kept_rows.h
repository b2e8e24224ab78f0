#pragma once

#include <cstdint>

#include "kernels/common/exec.h"
#include "kernels/common/rows.h"

/// What a drafter is to learn from later: while it is left out, steps keep the features of their
/// rows, and it learns from many at once before it works again. Its entries depend on no order.
namespace openspec {

/// Rows of a slot that can wait.
inline constexpr int kMaxKeptRows = 32;

/// By slot, a ring over positions.
struct KeptRows {
  void* features = nullptr;  // [max_num_seqs, kMaxKeptRows, width_bytes]
  int32_t* begin = nullptr;  // [max_num_seqs] position of the first row that waits
  int64_t width_bytes = 0;   // on CUDA a multiple of 16
};

/// Keeps the rows of a step that count: the first of every span, at most.
struct KeepRowsParams {
  RowBatch rows;
  const int32_t* num_computed = nullptr;  // [rows.num_spans] 0 or 1
  const void* features = nullptr;         // [rows.num_rows, width_bytes]
  KeptRows kept;
};

void keep_rows_cpu(const ExecContext& exec, const KeepRowsParams& params);
int keep_rows_cuda(const KeepRowsParams& params, void* stream);

/// Lists what waits for some slots as spans of rows, the newest of it where room is short; nothing
/// waits any more then.
struct TakeKeptRowsParams {
  KeptRows kept;
  const int32_t* slot = nullptr;    // [num_slots] different ones
  const int32_t* kv_len = nullptr;  // [max_num_seqs]
  int num_slots = 0;
  int num_rows = 0;                 // room, the same for every slot
  int32_t* span_begin = nullptr;    // out [num_slots + 1]
  int32_t* span_kv_len = nullptr;   // out [num_slots] position of the span's first row
  int32_t* num_computed = nullptr;  // out [num_slots] its rows
  int32_t* source = nullptr;        // out [num_rows] row of kept.features; -1: padding
};

void take_kept_rows_cpu(const ExecContext& exec, const TakeKeptRowsParams& params);
/// At most kMaxStepSpans slots.
int take_kept_rows_cuda(const TakeKeptRowsParams& params, void* stream);

}  // namespace openspec
