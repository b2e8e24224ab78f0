#pragma once

#include <cstddef>
#include <span>

#include "kernels/common/exec.h"
#include "kernels/exchange/exchange.h"
#include "model/weights/part.h"

namespace openspec {

struct LinearParams;
struct RmsNormParams;

inline constexpr int kHostRoundRows = 512;

/// Rows of a round, at most: a pass of more goes through its exchange in slices.
int most_round_rows(Device device, int num_ranks, int max_splits, int width);

/// Of an exchange, of passes of `max_rows`: on the host a slot of one memory has all of a round's
/// sums, on CUDA each rank has what comes to it.
InboxFloats inbox_floats(Device device, int num_ranks, int max_splits, int max_rows, int width);

/// What a rank has made of rows.
struct MadeRows {
  void* words = nullptr;
  int row_words = 0;
};

/// A rank's way to the sums of all ranks, and to columns of which each has some. In a pass all
/// ranks call the same, in the same order.
class SumExchange {
 public:
  virtual ~SumExchange() = default;
  /// A round of at most most_round_rows() rows: the sums of the rank's splits go to all ...
  virtual void send(const ExecContext& exec, LinearParams product) = 0;
  /// ... and the norm adds those of all ranks, as many as `num_partials`. Where rows have owners,
  /// residuals of other ranks' rows are there afterwards only if `shares_residual`. Throws if
  /// another rank has failed.
  virtual void take(const ExecContext& exec, RmsNormParams norm, bool shares_residual) = 0;

  // On the host ranks write to one memory; where each has its own:
  /// Memory into which others write what they share with the rank. All ranks give areas of the same
  /// sizes in the same order, before the first pass, for as long as there are passes.
  virtual void give_area(void* data, size_t bytes) { (void)data, (void)bytes; }
  /// rows [num_rows, columns.whole] fp32, in an area, of which the rank has `columns`, are whole on
  /// every rank afterwards; if `deals_rows`, on every rank those that it is dealt.
  virtual void share_columns(const ExecContext& exec, float* rows, int num_rows, Part columns,
                             bool deals_rows) {
    (void)exec, (void)rows, (void)num_rows, (void)columns, (void)deals_rows;
  }
  /// [num_rows, row_words] of four bytes each, in areas: what the rank made of the rows that it was
  /// dealt is on every rank afterwards.
  virtual void share_rows(const ExecContext& exec, std::span<const MadeRows> buffers,
                          int num_rows) {
    (void)exec, (void)buffers, (void)num_rows;
  }
  /// Which of so many rows of columns the rank has, where many are dealt (are_dealt).
  virtual RowRange dealt(int num_rows) const { return {0, num_rows}; }
  /// On the rank's device; null on the host.
  virtual ExchangeState* state() const { return nullptr; }
};

}  // namespace openspec
