#include "model/parts/sum_exchange.h"

#include <algorithm>

#include "kernels/exchange/exchange.h"

namespace openspec {

int most_round_rows(Device device, int num_ranks, int max_splits, int width) {
  return device == Device::kCpu ? kHostRoundRows : most_round_rows(num_ranks, max_splits, width);
}

InboxFloats inbox_floats(Device device, int num_ranks, int max_splits, int max_rows, int width) {
  const int most = std::min(max_rows, most_round_rows(device, num_ranks, max_splits, width));
  if (device == Device::kCpu) return {.slot = int64_t{max_splits} * most * width};
  return inbox_floats(num_ranks, max_splits, most, width);
}

}  // namespace openspec
