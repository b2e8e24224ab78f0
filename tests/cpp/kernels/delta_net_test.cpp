#include "kernels/delta_net_testing.h"

using namespace openspec;
using namespace openspec::testing;

namespace {

/// Memory of the host that begins as NaN.
class HostArray {
 public:
  explicit HostArray(size_t bytes) : bytes_(bytes, 0xff) {}
  template <typename T>
  explicit HostArray(const std::vector<T>& values) : HostArray(values.size() * sizeof(T)) {
    upload(values);
  }
  void* data() const { return const_cast<uint8_t*>(bytes_.data()); }
  template <typename T>
  void upload(const std::vector<T>& values) {
    std::memcpy(bytes_.data(), values.data(), values.size() * sizeof(T));
  }
  template <typename T>
  std::vector<T> download() const {
    std::vector<T> values(bytes_.size() / sizeof(T));
    std::memcpy(values.data(), bytes_.data(), bytes_.size());
    return values;
  }

 private:
  std::vector<uint8_t> bytes_;
};

template <int kThreads>
void run(const DeltaNetParams& params) {
  static ThreadPool pool(kThreads);
  std::vector<float> workspace =
      poisoned_floats(delta_net_workspace_bytes_cpu(params.shape, params.rows.num_rows, kThreads));
  DeltaNetParams own = params;
  own.workspace = workspace.data();
  delta_net_cpu({.pool = &pool}, own);
}

using Checks = DeltaChecks<HostArray>;

}  // namespace

TEST(outputs_are_those_of_the_sequential_recurrence) {
  for_each_isa([] {
    for (const DType dtype : both_dtypes()) {
      for (const DeltaShape& shape : {DeltaShape{1, 1}, DeltaShape{1, 3}, DeltaShape{2, 4}}) {
        const double error = Checks(shape, dtype, run<2>, 150).error();
        CHECK(error < (dtype == DType::kF32 ? 1e-5 : 5e-3));
      }
    }
  });
}

TEST(errors_do_not_grow_over_2048_positions) {
  for (const DType dtype : both_dtypes()) {
    CHECK(Checks({1, 2}, dtype, run<2>, 2048).error() < (dtype == DType::kF32 ? 5e-7 : 4e-3));
  }
}

TEST(chunks_of_any_size_give_the_same_bits) {
  for_each_isa([] {
    for (const DType dtype : both_dtypes()) {
      Checks({1, 2}, dtype, run<1>, 99).check_chunks({1, 5, 16, 17, 37, 64});
    }
  });
}

TEST(rejected_drafts_leave_nothing) {
  for (const int num_rows : {4, 8, 16}) {
    Checks checks({1, 1}, DType::kBF16, run<1>, 90);
    checks.check_acceptance(num_rows, 0);
    if (num_rows <= 8) checks.check_acceptance(num_rows, num_rows);
  }
}

TEST(sequences_in_a_step_are_as_they_are_alone) {
  for_each_isa([] {
    for (const DType dtype : both_dtypes()) Checks({1, 2}, dtype, run<2>, 61).check_batch();
  });
}

TEST(states_that_others_read_stay_as_they_are) {
  Checks({1, 2}, DType::kBF16, run<2>, 96).check_pages();
}

TEST(shapes_and_rings_that_do_not_fit_are_refused) {
  DeltaNetParams params;
  params.shape = {2, 3};
  CHECK_THROWS(delta_net_cpu({}, params), EngineError, "cannot share");
  params.shape = {1, 3};
  params.records.ring_size = 40;
  CHECK_THROWS(delta_net_cpu({}, params), EngineError, "too short");
}
