// Against the sequential recurrence in double, and against itself.

#include "cuda/cuda_testing.h"
#include "kernels/delta_net_testing.h"

using namespace openspec;
using namespace openspec::testing;

namespace {

NeedsDevice needs_device;

void run(const DeltaNetParams& params) {
  const DeviceBuffer workspace(delta_net_workspace_bytes_cuda(params.shape, params.rows.num_rows));
  DeltaNetParams own = params;
  own.workspace = workspace.data();
  CHECK_CUDA(delta_net_cuda(own, nullptr));
  CHECK(workspace.guard_is_whole());
}

DeltaChecks<DeviceBuffer> checks(const DeltaShape& shape, int num_tokens) {
  return {shape, DType::kBF16, run, num_tokens};
}

}  // namespace

TEST(outputs_are_those_of_the_sequential_recurrence) {
  for (const DeltaShape& shape : {DeltaShape{1, 1}, DeltaShape{1, 3}, DeltaShape{4, 8}}) {
    CHECK(checks(shape, 400).error() < 5e-3);
  }
}

TEST(chunks_of_any_size_give_the_same_bits) {
  checks({2, 6}, 200).check_chunks({1, 2, 3, 4, 5, 8, 13, 16, 17, 37, 64, 96});
}

TEST(rejected_drafts_leave_nothing) {
  for (const int num_rows : {1, 4, 5, 8, 16}) {
    auto of = checks({1, 2}, 90);
    of.check_acceptance(num_rows, 0);
    if (num_rows <= 8) of.check_acceptance(num_rows, num_rows);
  }
}

TEST(sequences_in_a_step_are_as_they_are_alone) { checks({2, 4}, 61).check_batch(); }

TEST(states_that_others_read_stay_as_they_are) { checks({2, 4}, 96).check_pages(); }

TEST(what_no_kernel_takes_is_refused) {
  DeltaNetParams params;
  params.shape = {2, 4};
  params.dtype = DType::kBF16;
  params.records.ring_size = params.conv_rows.ring_size = 64;
  const auto result_of = [&](auto change) {
    DeltaNetParams own = params;
    change(own);
    return delta_net_cuda(own, nullptr);
  };
  constexpr int kInvalid = cudaErrorInvalidValue;
  CHECK_EQ(result_of([](DeltaNetParams&) {}), static_cast<int>(cudaSuccess));
  CHECK_EQ(result_of([](DeltaNetParams& p) { p.dtype = DType::kF32; }), kInvalid);
  CHECK_EQ(result_of([](DeltaNetParams& p) { p.shape.num_v_heads = 5; }), kInvalid);
  CHECK_EQ(result_of([](DeltaNetParams& p) { p.max_step_rows = 17; }), kInvalid);
  CHECK_EQ(result_of([](DeltaNetParams& p) { p.records.ring_size = 40; }), kInvalid);
  CHECK_EQ(result_of([](DeltaNetParams& p) { p.qkv_stride = 4; }), kInvalid);
}
