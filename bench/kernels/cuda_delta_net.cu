// Times Gated DeltaNet on CUDA at the shapes of Qwen3.5-4B and -9B (32 value heads) and -27B (48):
// microseconds of the recurrence alone and of the whole op, between a layer's projections, in
// replayed graphs of several layers whose states together are far larger than the cache.
//
//   bench_cuda_delta_net [--json FILE]
//
// Steps of decoding stand at all 16 places of a block in turn, so that a fold is written where one
// is due; prompts begin at position 0. What the inputs hold does not matter.

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <numeric>
#include <string>
#include <vector>

#include "cuda_bench.h"
#include "kernels/delta_net/prompt.cuh"
#include "kernels/delta_net/step.cuh"

namespace {

using namespace openspec;
using namespace openspec::bench;
using namespace openspec::gated_delta;

constexpr int kMaxSeqs = 64, kMaxRows = 2048, kRing = 64, kPlaces = 16, kRepeats = 9;
constexpr size_t kStateBytes = size_t{640} << 20;  // of all layers that are timed together

/// Sequences of equally many rows.
struct Work {
  int num_seqs, num_rows;
  bool is_prompt() const { return num_rows > kMaxDeltaStepRows; }
};

/// A layer's inputs, which all layers share, and their states.
class Layers {
 public:
  explicit Layers(int num_v_heads) : shape_{16, num_v_heads} {
    const size_t width = size_t(shape_.conv_width()), v_width = size_t(shape_.v_width());
    params_.shape = shape_;
    params_.dtype = DType::kBF16;
    params_.qkv = device_array<uint16_t>(kMaxRows * width);
    params_.z = device_array<uint16_t>(kMaxRows * v_width);
    params_.b = device_array<uint16_t>(size_t{kMaxRows} * num_v_heads);
    params_.a = device_array<uint16_t>(size_t{kMaxRows} * num_v_heads);
    params_.qkv_stride = shape_.conv_width();
    params_.z_stride = shape_.v_width();
    params_.b_stride = params_.a_stride = num_v_heads;
    params_.out = device_array<uint16_t>(kMaxRows * v_width);
    params_.conv_weight = device_array<float>(kDeltaTaps * width);
    params_.a_log = device_array<float>(size_t(num_v_heads));
    params_.dt_bias = device_array<float>(size_t(num_v_heads));
    params_.norm_weight = device_array<float>(kDeltaHeadDim);
    const size_t record = shape_.record_bytes(params_.dtype);
    const size_t conv_row = shape_.conv_row_bytes(params_.dtype);
    params_.records = {device_array<std::byte>(kMaxSeqs * kRing * record), kRing, record};
    params_.conv_rows = {device_array<std::byte>(kMaxSeqs * kRing * conv_row), kRing, conv_row};
    workspace_ = {device_array<uint16_t>(kMaxRows * width),
                  device_array<float>(size_t{2} * kMaxRows * num_v_heads),
                  device_array<float2>(size_t{kMaxRows} * num_v_heads)};
    params_.workspace = device_array<std::byte>(delta_net_workspace_bytes_cuda(shape_, kMaxRows));
    const size_t bytes = size_t(shape_.num_tiles()) * DeltaStates::kTileBytes;
    states_ = device_array<std::byte>(std::max(kStateBytes, 3 * kMaxSeqs * bytes));
    std::vector<int32_t> pages(kMaxSeqs);
    std::iota(pages.begin(), pages.end(), 0);
    params_.states = {.page_stride = bytes,
                      .tiles_per_slice = shape_.num_tiles(),
                      .pages_per_state = 1,
                      .read_pages = device_copy(pages)};
    params_.states.write_pages = params_.states.read_pages;
  }

  /// Microseconds a layer.
  template <typename Run>
  double us(cudaStream_t stream, const Work& work, const Run& run) {
    const size_t bytes = params_.states.page_stride * size_t(work.num_seqs);
    int num_layers = std::max(3, static_cast<int>(kStateBytes / bytes));
    if (num_layers > kPlaces) num_layers = kPlaces;
    std::vector<DeltaNetParams> layers;
    for (int i = 0; i < num_layers; ++i) {
      layers.push_back(at(work, work.is_prompt() ? 0 : 2 * kDeltaBlock, i));
      layers.back().states.data = states_ + bytes * size_t(i);
    }
    return graph_us(stream, kRepeats,
                    [&] {
                      for (const DeltaNetParams& params : layers) CHECK_CUDA(run(params));
                    }) /
           num_layers;
  }

  int recur(const DeltaNetParams& params, cudaStream_t stream) const {
    const dim3 spans(unsigned(shape_.num_v_heads), unsigned(params.rows.num_spans));
    constexpr size_t kStepBytes = sizeof(StepShared<1>);
    if (!params.may_have_prompts) {
      cuda::prepare_shared(run_steps<1>, kStepBytes);
      return cuda::launch(run_steps<1>, spans, dim3(kStepThreads), kStepBytes, stream, params,
                          workspace_, params.max_step_rows);
    }
    constexpr size_t kPromptBytes = sizeof(PromptShared<64>);
    const auto kernel = run_prompts<64, 1>;
    cuda::prepare_shared(kernel, kPromptBytes);
    return cuda::launch(kernel, dim3(kDeltaHeadDim / 64, spans.x, spans.y),
                        dim3(PromptPlan<64>::kThreads), kPromptBytes, stream, params, workspace_,
                        params.max_step_rows);
  }

 private:
  /// Rows of which span s stands `first_place` + s places, around, behind `first`.
  DeltaNetParams at(const Work& work, int first, int first_place) {
    std::vector<int32_t> row_span, begins = {0}, kv_len, read, write;
    for (int s = 0; s < work.num_seqs; ++s) {
      row_span.insert(row_span.end(), size_t(work.num_rows), s);
      begins.push_back(begins.back() + work.num_rows);
      const int place = work.is_prompt() ? 0 : (first_place + s) % kPlaces;
      kv_len.push_back(first + place);
      // A fold is due in the first step that begins in a block.
      const bool folds = work.is_prompt() || place < std::max(1, work.num_rows - 1);
      write.push_back(work.is_prompt() ? folded_blocks(work.num_rows) : folded_blocks(first));
      read.push_back(folds ? 0 : write.back());
    }
    std::vector<int32_t> slots(size_t(work.num_seqs));
    std::iota(slots.begin(), slots.end(), 0);
    DeltaNetParams params = params_;
    params.rows.num_rows = begins.back();
    params.rows.num_spans = work.num_seqs;
    params.rows.row_span = device_copy(row_span);
    params.rows.span_begin = device_copy(begins);
    params.rows.span_kv_len = device_copy(kv_len);
    params.rows.span_seq = device_copy(slots);
    params.folded_read = device_copy(read);
    params.folded_write = device_copy(write);
    params.max_step_rows = work.is_prompt() ? kMaxDeltaStepRows : 4;
    params.may_have_prompts = work.is_prompt();
    return params;
  }

  DeltaShape shape_;
  DeltaNetParams params_;
  Workspace workspace_;
  std::byte* states_ = nullptr;
};

}  // namespace

int main(int argc, char** argv) {
  const char* path = json_path(argc, argv);
  cudaStream_t stream;
  CHECK_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  std::vector<std::string> runs;
  for (const int num_heads : {32, 48}) {
    Layers layers(num_heads);
    for (const Work& work : {Work{1, 1}, Work{16, 1}, Work{64, 1}, Work{1, 4}, Work{16, 4},
                             Work{64, 4}, Work{1, 2048}, Work{4, 512}, Work{16, 128}}) {
      const double alone = layers.us(
          stream, work, [&](const DeltaNetParams& params) { return layers.recur(params, stream); });
      const double whole = layers.us(stream, work, [&](const DeltaNetParams& params) {
        return delta_net_cuda(params, stream);
      });
      std::printf("%d heads, %2d x %4d rows: recurrence %8.2f us a layer, whole op %8.2f us\n",
                  num_heads, work.num_seqs, work.num_rows, alone, whole);
      std::fflush(stdout);
      runs.push_back("{\"heads\": " + std::to_string(num_heads) +
                     ", \"requests\": " + std::to_string(work.num_seqs) +
                     ", \"rows\": " + std::to_string(work.num_rows) + ", \"recurrence_us\": " +
                     std::to_string(alone) + ", \"op_us\": " + std::to_string(whole) + "}");
    }
  }
  if (path != nullptr) write_json(path, "bench/kernels/cuda_delta_net.cu", runs);
  return 0;
}
