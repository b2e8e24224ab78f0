#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>

#include "cuda/linear_testing.h"
#include "kernels/linear/wgmma.h"

namespace {

using namespace openspec;
using namespace openspec::testing;

NeedsDevice needs_device;

/// Ends the process as skipped where the device or the build has no wgmma: see linear_wgmma_takes.
/// Called by every test: before main the kernels are not registered yet.
void need_wgmma() {
  if (!cuda::linear_wgmma_takes(packed({"", 2560, 2560}, nullptr), 128)) {
    std::printf("skipped: no device of compute capability 9.0, or no code for sm_90a\n");
    std::exit(77);
  }
}

/// `count` values made fast: a random sequence of a prime length, over and over.
std::vector<uint16_t> values(size_t count, float scale, uint64_t seed) {
  constexpr size_t kPeriod = 1000003;
  Rng rng(seed);
  std::vector<uint16_t> all(std::min(count, kPeriod));
  for (uint16_t& value : all) value = to_bf16(rng.normal(scale));
  all.resize(count);
  for (size_t at = kPeriod; at < count; at += kPeriod) {
    std::memcpy(&all[at], all.data(), std::min(kPeriod, count - at) * 2);
  }
  return all;
}

class Matrix {
 public:
  explicit Matrix(const Shape& shape, uint64_t seed = 1)
      : shape_(shape),
        data_(linear_packed_bytes_cuda(shape.num_outputs, shape.num_inputs)),
        host_(values(static_cast<size_t>(shape.num_outputs) * shape.num_inputs,
                     1.0f / std::sqrt(static_cast<float>(shape.num_inputs)), seed)) {
    const DeviceBuffer rows(host_);
    CHECK_CUDA(
        linear_pack_cuda(weight(), rows.data(), 0, shape.num_outputs, data_.data(), nullptr));
    CHECK_CUDA(cudaDeviceSynchronize());
  }

  const Shape& shape() const { return shape_; }
  PackedLinear weight() const { return packed(shape_, data_.data()); }
  int num_columns() const { return shape_.num_columns(); }
  float at(int output, int k) const {
    return from_bf16(host_[static_cast<size_t>(output) * shape_.num_inputs + k]);
  }

 private:
  Shape shape_;
  DeviceBuffer data_;
  std::vector<uint16_t> host_;
};

size_t out_bytes(const Matrix& matrix, int num_rows, Out out) {
  const size_t count = static_cast<size_t>(num_rows) * matrix.num_columns();
  if (out == Out::kPartials) return count * matrix.shape().num_splits * 4;
  return count * (out == Out::kF32 ? 4 : 2);
}

/// Runs `launch(params)` and returns the bytes that it wrote. Device memory is poisoned before, and
/// a guard behind the output checked.
template <typename Launch>
std::vector<uint8_t> run(const Matrix& matrix, const void* x, int num_rows, Out out,
                         const Launch& launch) {
  DeviceBuffer buffer(out_bytes(matrix, num_rows, out));
  LinearParams params;
  params.weight = matrix.weight();
  params.x = x;
  params.num_rows = num_rows;
  params.dtype = DType::kBF16;
  params.out_dtype = out == Out::kF32 ? DType::kF32 : DType::kBF16;
  params.out = buffer.data();
  if (out == Out::kPartials) params.partials = buffer.as<float>();
  CHECK_CUDA(launch(params));
  std::vector<uint8_t> bytes = buffer.download<uint8_t>();
  CHECK(buffer.guard_is_whole());
  return bytes;
}

std::vector<uint8_t> run_stream(const Matrix& matrix, const void* x, int num_rows, Out out) {
  return run(matrix, x, num_rows, out,
             [](const LinearParams& params) { return cuda::linear_stream(params, nullptr); });
}
std::vector<uint8_t> run_wgmma(const Matrix& matrix, const void* x, int num_rows, Out out) {
  return run(matrix, x, num_rows, out,
             [](const LinearParams& params) { return cuda::linear_wgmma(params, nullptr); });
}
std::vector<uint8_t> run_wgmma(const Matrix& matrix, const void* x, int num_rows, Out out,
                               const cuda::WgmmaPlan& plan) {
  return run(matrix, x, num_rows, out, [&](const LinearParams& params) {
    return cuda::linear_wgmma_as(plan, params, nullptr);
  });
}

/// Says where two outputs part, if they do.
void check_same(const std::vector<uint8_t>& got, const std::vector<uint8_t>& want,
                const Matrix& matrix, Out out, const std::string& what) {
  CHECK_EQ(got.size(), want.size());
  if (std::memcmp(got.data(), want.data(), got.size()) == 0) return;
  const size_t first = std::mismatch(got.begin(), got.end(), want.begin()).first - got.begin();
  size_t num_different = 0;
  for (size_t i = 0; i < got.size(); ++i) num_different += got[i] != want[i];
  const size_t element = first / (out == Out::kBF16 ? 2 : 4);
  FAIL(matrix.shape().name + ", " + what + ": row " +
       std::to_string(element / matrix.num_columns()) + " (of all splits), column " +
       std::to_string(element % matrix.num_columns()) + "; " + std::to_string(num_different) +
       " of " + std::to_string(got.size()) + " bytes differ");
}

std::string name(const cuda::WgmmaPlan& plan) {
  return "tiles of " + std::to_string(plan.tile_rows) + " rows x " +
         std::to_string(plan.tile_units) + " units, cluster " + std::to_string(plan.cluster) +
         ", " + std::to_string(plan.num_runs) + " runs of " + std::to_string(plan.run_splits) +
         " splits";
}

double silu(double x) { return x / (1.0 + std::exp(-x)); }

// Small matrices against double precision. A stored bf16 may be off by half a unit in the last
// place, 2^-9 of its value, and twice that is granted. The product itself has some dozens of fp32
// additions (steps of a chain, chains, splits), which the matrix unit truncates rather than rounds:
// far less than 2^-17 of the sum of the magnitudes. SwiGLU rounds four times: gate, up, silu,
// output; silu's slope is at most 1.1.
TEST(small_matrices_are_close_to_double_precision) {
  need_wgmma();
  const Shape shapes[] = {{"plain", 80, 144},
                          {"three splits", 208, 432, kNone, 3},
                          {"one unit", 16, 128},
                          {"swiglu", 160, 208, kSwiGlu},
                          {"thirteen units", 208, 1040}};
  for (const Shape& shape : shapes) {
    const Matrix matrix(shape);
    const int num_inputs = shape.num_inputs;
    for (const int num_rows : {1, 33, 65, 130}) {
      const std::vector<uint16_t> x =
          values(static_cast<size_t>(num_rows) * num_inputs, 1.0f, num_rows);
      const DeviceBuffer device_x(x);
      const auto product = [&](int row, int output, double& magnitude) {
        double sum = 0;
        for (int k = 0; k < num_inputs; ++k) {
          const double term = static_cast<double>(matrix.at(output, k)) *
                              from_bf16(x[static_cast<size_t>(row) * num_inputs + k]);
          sum += term;
          magnitude += std::abs(term);
        }
        return sum;
      };
      for (const Out out : outs(shape)) {
        const std::vector<uint8_t> got = run_wgmma(matrix, device_x.data(), num_rows, out);
        const int num_parts = out == Out::kPartials ? shape.num_splits : 1;
        const size_t part = static_cast<size_t>(num_rows) * matrix.num_columns();
        for (int row = 0; row < num_rows; ++row) {
          for (int column = 0; column < matrix.num_columns(); ++column) {
            const size_t at = static_cast<size_t>(row) * matrix.num_columns() + column;
            double magnitude = 0;
            double want = product(row, column, magnitude);
            double rounding = out == Out::kBF16 ? std::abs(want) / 256 : 0.0;
            if (shape.epilogue == kSwiGlu) {
              const double up = product(row, column + matrix.num_columns(), magnitude);
              // Errors of gate and up reach the output times up and silu; both stay below 8 here.
              magnitude *= 8;
              rounding = std::abs(1.1 * want * up) / 256 + std::abs(silu(want) * up) * 3 / 256;
              want = silu(want) * up;
            }
            double value = 0;
            for (int i = 0; i < num_parts; ++i) value += element(got, out, i * part + at);
            CHECK_NEAR(value, want, rounding + magnitude * 0x1p-17 + 1e-30);
          }
        }
      }
    }
  }
}

// Every form of tile on matrices that leave a remainder everywhere: units per tile, tiles per round
// of blocks, chains that begin and end within a stage, rows.
TEST(every_plan_has_the_bits_of_the_streaming_kernel) {
  need_wgmma();
  const Shape shapes[] = {{"65 units", 1040, 336},
                          {"uneven chains, three splits", 272, 16 * 85, kNone, 3},
                          {"uneven chains, swiglu", 512, 16 * 37, kSwiGlu},
                          {"aligned chains, four splits", 320, 2048, kNone, 4}};
  for (const Shape& shape : shapes) {
    const Matrix matrix(shape);
    const DeviceBuffer x(values(static_cast<size_t>(300) * shape.num_inputs, 1.0f, 3));
    for (const int num_rows : {1, 31, 33, 97, 128, 300}) {
      for (const Out out : outs(shape)) {
        const std::vector<uint8_t> want = run_stream(matrix, x.data(), num_rows, out);
        for (const int tile_rows : {32, 64, 96, 128}) {
          for (const int cluster : {1, 2}) {
            if (cluster == 2 && tile_rows < 96) continue;
            for (int tile_units = 1; tile_units <= 12; ++tile_units) {
              for (const int num_runs : {0, 7}) {
                for (int run_splits = 1; run_splits <= shape.num_splits; ++run_splits) {
                  cuda::WgmmaPlan plan = {tile_rows, tile_units, cluster, num_runs};
                  plan.run_splits = run_splits;
                  const bool is_apart = num_runs > 0 && out == Out::kPartials;
                  if (run_splits > 1 && (!is_apart || shape.num_splits % run_splits > 0)) continue;
                  check_same(run_wgmma(matrix, x.data(), num_rows, out, plan), want, matrix, out,
                             std::to_string(num_rows) + " rows, " + name(plan));
                }
              }
            }
          }
        }
      }
    }
  }
}

void check_model(const std::string& name, int hidden, int heads, int kv_heads, int inner) {
  const int head_dim = 128;
  const int attention = heads * head_dim;
  const Shape shapes[] = {
      {name + " qkv", attention + 2 * kv_heads * head_dim, hidden},
      {name + " o", hidden, attention, kNone, linear_num_splits(hidden, attention)},
      {name + " gate_up", 2 * inner, hidden, kSwiGlu},
      {name + " down", hidden, inner, kNone, linear_num_splits(hidden, inner)}};
  for (const Shape& shape : shapes) {
    const Matrix matrix(shape);
    const DeviceBuffer x(values(static_cast<size_t>(2048) * shape.num_inputs, 1.0f, 5));
    for (const int num_rows : {33, 63, 64, 65, 100, 128, 200, 256, 257, 1000, 2048}) {
      for (const Out out : {Out::kBF16, Out::kPartials}) {
        if (out == Out::kPartials && shape.num_splits == 1) continue;
        if (out == Out::kPartials && num_rows > 257) continue;  // large ones take the same way
        check_same(run_wgmma(matrix, x.data(), num_rows, out),
                   run_stream(matrix, x.data(), num_rows, out), matrix, out,
                   std::to_string(num_rows) + " rows");
      }
    }
  }
}

TEST(qwen3_0_6b_has_the_bits_of_the_streaming_kernel) {
  need_wgmma();
  check_model("0.6B", 1024, 16, 8, 3072);
}
TEST(qwen3_4b_has_the_bits_of_the_streaming_kernel) {
  need_wgmma();
  check_model("4B", 2560, 32, 8, 9728);
}
TEST(qwen3_8b_has_the_bits_of_the_streaming_kernel) {
  need_wgmma();
  check_model("8B", 4096, 32, 8, 12288);
}
TEST(qwen3_14b_has_the_bits_of_the_streaming_kernel) {
  need_wgmma();
  check_model("14B", 5120, 40, 8, 17408);
}

TEST(vocabulary_in_fp32_has_the_bits_of_the_streaming_kernel) {
  need_wgmma();
  for (const int hidden : {1024, 2560}) {
    const Matrix matrix({"lm_head of " + std::to_string(hidden), 151936, hidden});
    const DeviceBuffer x(values(static_cast<size_t>(128) * hidden, 1.0f, 6));
    for (const int num_rows : {33, 64, 128}) {
      check_same(run_wgmma(matrix, x.data(), num_rows, Out::kF32),
                 run_stream(matrix, x.data(), num_rows, Out::kF32), matrix, Out::kF32,
                 std::to_string(num_rows) + " rows");
    }
  }
}

// What a row holds, where it stands and how many there are is nobody else's business; -0,
// infinities and NaN in other rows included.
TEST(a_row_depends_on_itself_alone) {
  need_wgmma();
  const Shape shapes[] = {
      {"plain", 1040, 2560}, {"swiglu", 2080, 1024, kSwiGlu}, {"four splits", 320, 4096, kNone, 4}};
  for (const Shape& shape : shapes) {
    const Matrix matrix(shape);
    const size_t width = shape.num_inputs;
    const std::vector<uint16_t> x = values(200 * width, 1.0f, 8);
    for (const Out out : outs(shape)) {
      const size_t row_bytes =
          static_cast<size_t>(matrix.num_columns()) * (out == Out::kBF16 ? 2 : 4);
      const int num_parts = out == Out::kPartials ? shape.num_splits : 1;
      const DeviceBuffer device_x(x);
      const std::vector<uint8_t> all = run_wgmma(matrix, device_x.data(), 200, out);
      for (const int num_rows : {33, 70, 129, 520}) {
        // Row i of the sample is row 7 i of x; every fifth is spoilt instead.
        std::vector<uint16_t> sample(num_rows * width);
        for (int i = 0; i < num_rows; ++i) {
          std::copy_n(&x[i * 7 % 200 * width], width, &sample[i * width]);
          if (i % 5 == 2) {
            const uint16_t spoilt[] = {0x7fc0, 0x7f80, 0xff80, 0x8000};
            std::fill_n(&sample[i * width], width, spoilt[i / 5 % 4]);
          }
        }
        const DeviceBuffer device_sample(sample);
        const std::vector<uint8_t> got = run_wgmma(matrix, device_sample.data(), num_rows, out);
        for (int part = 0; part < num_parts; ++part) {
          for (int i = 0; i < num_rows; ++i) {
            if (i % 5 == 2) continue;
            const size_t at = (static_cast<size_t>(part) * num_rows + i) * row_bytes;
            const size_t all_at = (static_cast<size_t>(part) * 200 + i * 7 % 200) * row_bytes;
            CHECK(std::memcmp(&got[at], &all[all_at], row_bytes) == 0);
          }
        }
      }
    }
  }
}

// Kernels overlap: each reads what the one before wrote, with weights already on the way.
TEST(a_captured_chain_of_linears_repeats_itself) {
  need_wgmma();
  const int width = 1024, num_rows = 128, num_links = 12;
  const Matrix first({"link", width, width}, 11), second({"link", width, width}, 12);
  const DeviceBuffer x(values(static_cast<size_t>(num_rows) * width, 1.0f, 13));
  const size_t bytes = static_cast<size_t>(num_rows) * width * 2;
  DeviceBuffer even(bytes), odd(bytes);
  cudaStream_t stream;
  CHECK_CUDA(cudaStreamCreate(&stream));
  const auto link = [&](int i, auto&& launch) {
    LinearParams params;
    params.weight = (i % 2 == 0 ? first : second).weight();
    params.x = i == 0 ? x.data() : (i % 2 == 0 ? odd : even).data();
    params.out = (i % 2 == 0 ? even : odd).data();
    params.num_rows = num_rows;
    params.dtype = params.out_dtype = DType::kBF16;
    CHECK_CUDA(launch(params, stream));
  };
  for (int i = 0; i < num_links; ++i) {
    link(i, [](const LinearParams& params, void* on) { return cuda::linear_stream(params, on); });
  }
  const std::vector<uint8_t> want = odd.download<uint8_t>();

  for (int i = 0; i < num_links; ++i) link(i, cuda::linear_wgmma);
  CHECK(odd.download<uint8_t>() == want);

  cudaGraph_t graph;
  CHECK_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  for (int i = 0; i < num_links; ++i) link(i, cuda::linear_wgmma);
  CHECK_CUDA(cudaStreamEndCapture(stream, &graph));
  cudaGraphExec_t exec;
  CHECK_CUDA(cudaGraphInstantiate(&exec, graph, 0));
  for (int repeat = 0; repeat < 20; ++repeat) {
    even.poison();
    odd.poison();
    CHECK_CUDA(cudaDeviceSynchronize());
    CHECK_CUDA(cudaGraphLaunch(exec, stream));
    CHECK_CUDA(cudaGraphLaunch(exec, stream));
    CHECK_CUDA(cudaStreamSynchronize(stream));
    CHECK(odd.download<uint8_t>() == want);
    CHECK(even.guard_is_whole() && odd.guard_is_whole());
  }
  CHECK_CUDA(cudaGraphExecDestroy(exec));
  CHECK_CUDA(cudaGraphDestroy(graph));
  CHECK_CUDA(cudaStreamDestroy(stream));
}

TEST(takes_what_it_can_do) {
  need_wgmma();
  const Shape shape = {"", 2560, 2560};
  CHECK(cuda::linear_wgmma_takes(packed(shape, nullptr), 8192));
  CHECK(!cuda::linear_wgmma_takes(packed(shape, nullptr), 8));
  PackedLinear weight = packed(shape, nullptr);
  weight.layout = LinearLayout::kLines;
  CHECK(!cuda::linear_wgmma_takes(weight, 128));
  // Chains without a step.
  CHECK(!cuda::linear_wgmma_takes(packed({"", 64, 112}, nullptr), 128));
  CHECK(!cuda::linear_wgmma_takes(packed({"", 64, 512, kNone, 5}, nullptr), 128));
  CHECK(cuda::linear_wgmma_takes(packed({"", 64, 512, kNone, 4}, nullptr), 128));
}

}  // namespace
