#pragma once

#include "kernels/common/exec.h"
#include "kernels/common/records.h"
#include "kernels/common/rows.h"

namespace openspec {

/// Makes the KV of a step's committed rows contiguous: the accepted drafts of a tree stand among
/// others. The i-th row of a span that counts goes to token index span_kv_len + i of its sequence,
/// in every layer. These rows rise, so that none is moved beyond where it is, and taken in order
/// none overwrites what a later one reads.
struct MoveKvParams {
  const KvLayerView* layers = nullptr;  // [num_layers] on the device that runs the step
  int num_layers = 0;
  PageTableView page_table;
  RowBatch rows;                          // as they ran
  const int32_t* num_computed = nullptr;  // [rows.num_spans] rows of a span that count
  // [rows.num_rows] at span_begin + i, the i-th row of the span that counts. From the first that is
  // not at its place on, none is.
  const int32_t* committed_row = nullptr;
  DType dtype = DType::kF32;
};

void move_kv_cpu(const ExecContext& exec, const MoveKvParams& params);
/// K and V of a token and head are a multiple of 16 bytes.
int move_kv_cuda(const MoveKvParams& params, void* stream);

/// Makes the records of a step's committed rows contiguous, as move_kv does their KV.
struct MoveRecordsParams {
  RecordView records;
  RowBatch rows;                           // as for MoveKvParams
  const int32_t* num_computed = nullptr;   // as for MoveKvParams
  const int32_t* committed_row = nullptr;  // as for MoveKvParams
};

void move_records_cpu(const ExecContext& exec, const MoveRecordsParams& params);
/// A record is a multiple of 16 bytes.
int move_records_cuda(const MoveRecordsParams& params, void* stream);

}  // namespace openspec
