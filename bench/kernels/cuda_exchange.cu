// Times ordered sums on devices of one process: a product whose splits are shared out, sent to all
// inboxes and taken by the norm. Graphs of them that all devices replay, a thread for each.
// Printed is what they take beyond the same product and norm without the other devices, and the
// floor: the bytes that the busiest device receives, at the rate of plain stores of all at once.
//
//   bench_cuda_exchange [--ranks N] [--json FILE]
//   bench_cuda_exchange [--ranks N] --soak N
//
// By default of two devices. The soak replays N graphs of every shape and few rows, and fewer of
// many, with random pauses before products, on the devices and between launches, and compares
// residuals and outputs with one device's, bit for bit.

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "cuda_bench.h"
#include "kernels/common/device.h"
#include "kernels/common/launch.cuh"
#include "kernels/exchange/exchange.h"
#include "kernels/linear/linear.h"
#include "kernels/linear/splits.h"
#include "kernels/norm/rms_norm.h"

namespace {

using namespace openspec;
using namespace openspec::bench;

constexpr int kRounds = 72;   // of a graph of few rows, and of the soak's
constexpr int kMatrices = 8;  // by turns, so that no weights come from L2
constexpr int kRows[] = {1, 4, 16, 64, 128, 256, 512, 2048};
constexpr int kMaxRows = 2048;
constexpr int kRepeats = 25;
constexpr int num_rounds(int num_rows) { return num_rows <= 16 ? kRounds : kRounds / 3; }
int num_ranks = 2;

struct Shape {
  const char* name;
  int hidden, num_inputs;
  int num_splits() const { return linear_num_splits(hidden, num_inputs); }
};
constexpr Shape kShapes[] = {{"4B o", 2560, 4096},  {"4B down", 2560, 9728},
                             {"8B o", 4096, 4096},  {"8B down", 4096, 12288},
                             {"32B o", 5120, 8192}, {"32B down", 5120, 25600},
                             {"70B o", 8192, 8192}, {"70B down", 8192, 28672}};
constexpr Shape kSoakShapes[] = {kShapes[0], kShapes[4], kShapes[6]};

/// Bytes that the busiest device receives in a round.
double received_bytes(const Shape& shape, int num_rows) {
  const int n = shape.num_splits();
  const RoundForm form = round_form(num_ranks, n, num_rows, shape.hidden);
  double most = 0;
  for (int rank = 0; rank < num_ranks; ++rank) {
    const int num_own = rank == 0 ? n / num_ranks - form.first_sum : n / num_ranks;
    const int num_sums = form.num_sums(n) - num_own;
    const int own = form.owners.exist() ? form.owners.rows_of(rank, num_rows) : num_rows;
    most = std::max(most, shape.hidden * (4.0 * num_sums * own + 2.0 * (num_rows - own)));
  }
  return most;
}

/// Lets threads go on when all have come.
class Meeting {
 public:
  void wait() {
    std::unique_lock lock(mutex_);
    const int turn = turn_;
    if (++num_here_ == num_ranks) {
      num_here_ = 0;
      ++turn_;
      all_here_.notify_all();
    } else {
      all_here_.wait(lock, [&] { return turn_ != turn; });
    }
  }

 private:
  std::mutex mutex_;
  std::condition_variable all_here_;
  int num_here_ = 0, turn_ = 0;
};
Meeting meeting;

/// Keeps the device busy for up to `most_ns`, by the round.
__global__ void pause_kernel(uint32_t seed, const uint64_t* round, uint32_t most_ns) {
  cuda::allow_next_kernel();
  cuda::wait_for_previous_kernel();
  uint64_t state = (*round * kMaxRanks + seed) * 0x9e3779b97f4a7c15u;
  state ^= state >> 29;
  state *= 0xbf58476d1ce4e5b9u;
  uint64_t begin, now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
  do {
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  } while (now - begin < (state >> 32) % most_ns);
}

/// Adds up how many bf16 differ.
__global__ void count_differences_kernel(const uint16_t* found, const uint16_t* expected,
                                         size_t count, uint32_t* num_differences) {
  cuda::allow_next_kernel();
  cuda::wait_for_previous_kernel();
  for (size_t i = blockIdx.x * size_t{blockDim.x} + threadIdx.x; i < count;
       i += size_t{gridDim.x} * blockDim.x) {
    if (found[i] != expected[i]) atomicAdd(num_differences, 1u);
  }
}

/// Columns of a matrix of numbers of magnitudes from 2^-7 to 2^-5, the same for a seed on every
/// device.
__global__ void fill_kernel(uint16_t* to, int num_rows, InputRange columns, int whole_columns,
                            uint64_t seed) {
  const int64_t count = static_cast<int64_t>(num_rows) * columns.size();
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * blockDim.x) {
    const int64_t at = i / columns.size() * whole_columns + columns.begin + i % columns.size();
    uint64_t state = (seed << 40 ^ static_cast<uint64_t>(at)) * 0x9e3779b97f4a7c15u + 1;
    state ^= state >> 29;
    state *= 0xbf58476d1ce4e5b9u;
    to[i] = static_cast<uint16_t>((state >> 48 & 0x80ff) | 0x3c00);
  }
}

__global__ void store_kernel(uint4* to, size_t count) {
  for (size_t i = blockIdx.x * size_t{blockDim.x} + threadIdx.x; i < count;
       i += size_t{gridDim.x} * blockDim.x) {
    to[i] = make_uint4(0, 0, 0, 0);
  }
}

OwnedRows everywhere;  // of the parts that all devices have

/// What one device holds: its splits of each matrix, the activations of each round.
class Part {
 public:
  Part(const Shape& shape, int rank, int num_parts) : shape_(shape) {
    const int n = shape.num_splits(), first = n * rank / num_parts;
    const int last = n * (rank + 1) / num_parts - 1;
    inputs_ = {split_inputs(shape.num_inputs, n, first).begin,
               split_inputs(shape.num_inputs, n, last).end};
    for (int i = 0; i < kMatrices; ++i) matrices_.push_back(pack(i));
    for (int i = 0; i < kRounds; ++i) {
      x_.push_back(filled(kMaxRows, inputs_, shape.num_inputs, kMatrices + i));
    }
    start_ = filled(kMaxRows, {0, shape.hidden}, shape.hidden, 7777);
    residual_ = device_array<uint16_t>(size(kMaxRows));
    out_ = device_array<uint16_t>(size(kMaxRows));
    norm_ = device_array<float>(static_cast<size_t>(shape.hidden));
    partials_ = device_array<float>(size(kMaxRows) * static_cast<size_t>(n));
    CHECK_CUDA(cudaDeviceSynchronize());
    if (num_parts < num_ranks) return;
    everywhere.out[rank] = out_;
    everywhere.residual[rank] = residual_;
    meeting.wait();
  }
  ~Part() {
    for (void* data : matrices_) cudaFree(data);
    for (uint16_t* data : x_) cudaFree(data);
    for (uint16_t* data : {start_, residual_, out_}) cudaFree(data);
    cudaFree(norm_);
    cudaFree(partials_);
  }
  Part(const Part&) = delete;
  Part& operator=(const Part&) = delete;

  size_t size(int num_rows) const { return static_cast<size_t>(num_rows) * shape_.hidden; }
  const uint16_t* residual() const { return residual_; }
  const uint16_t* out() const { return out_; }

  void enqueue_start(int num_rows, cudaStream_t stream) const {
    CHECK_CUDA(cudaMemcpyAsync(residual_, start_, size(num_rows) * sizeof(uint16_t),
                               cudaMemcpyDeviceToDevice, stream));
  }
  /// Round `round` of a graph; without an exchange all sums but the part's are what they were.
  void enqueue(int round, int num_rows, const Exchange* exchange, bool sends_residuals,
               cudaStream_t stream) const {
    LinearParams linear;
    linear.weight = weight(matrices_[static_cast<size_t>(round % kMatrices)]);
    linear.x = x_[static_cast<size_t>(round)];
    linear.num_rows = num_rows;
    linear.dtype = DType::kBF16;
    RmsNormParams norm;
    norm.residual = residual_;
    norm.num_partials = shape_.num_splits();
    norm.weight = norm_;
    norm.out = out_;
    norm.num_rows = num_rows;
    norm.width = shape_.hidden;
    norm.dtype = DType::kBF16;
    linear.exchange = norm.exchange = exchange;
    OwnedRows owned = everywhere;
    for (void*& residual : owned.residual) residual = sends_residuals ? residual : nullptr;
    norm.owned = &owned;
    if (exchange == nullptr) norm.delta_partials = linear.partials = partials_;
    CHECK_CUDA(linear_cuda(linear, stream));
    CHECK_CUDA(rms_norm_cuda(norm, stream));
  }

 private:
  static uint16_t* filled(int num_rows, InputRange columns, int whole_columns, int seed) {
    auto* data = device_array<uint16_t>(static_cast<size_t>(num_rows) * columns.size());
    fill_kernel<<<1024, 256>>>(data, num_rows, columns, whole_columns, seed);
    CHECK_CUDA(cudaGetLastError());
    return data;
  }
  PackedLinear weight(const void* data) const {
    PackedLinear weight;
    weight.data = data;
    weight.num_outputs = shape_.hidden;
    weight.num_inputs = inputs_.size();
    weight.layout = LinearLayout::kTiles;
    weight.num_splits = shape_.num_splits();
    weight.shard.first_input = inputs_.begin;
    weight.shard.whole_inputs = shape_.num_inputs;
    return weight;
  }
  void* pack(int seed) const {
    void* data = device_array<uint8_t>(linear_packed_bytes_cuda(shape_.hidden, inputs_.size()));
    uint16_t* from = filled(shape_.hidden, inputs_, shape_.num_inputs, seed);
    CHECK_CUDA(linear_pack_cuda(weight(data), from, 0, shape_.hidden, data, nullptr));
    CHECK_CUDA(cudaDeviceSynchronize());
    CHECK_CUDA(cudaFree(from));
    return data;
  }

  Shape shape_;
  InputRange inputs_;
  std::vector<void*> matrices_;
  std::vector<uint16_t*> x_;  // of each round
  uint16_t *start_, *residual_, *out_;
  float *norm_, *partials_;
};

/// A device's view of the exchange; the threads meet until all memory is there and empty.
Exchange view_of(int rank) {
  static Exchange views[kMaxRanks];
  static std::byte* memory[kMaxRanks];
  const InboxFloats floats = inbox_floats(num_ranks, kMaxSplits, kMaxRows, 8192);
  memory[rank] = device_array<std::byte>(exchange_bytes(floats));
  meeting.wait();
  Exchange& view = views[rank];
  view.num_ranks = num_ranks;
  view.rank = rank;
  for (int other = 0; other < num_ranks; ++other) view.memory[other] = memory[other];
  view.floats = floats;
  view.fault = device_array<uint32_t>(1);
  CHECK_CUDA(cudaMemset(view.fault, 0, sizeof(uint32_t)));
  CHECK_CUDA(clear_exchange_cuda(view, nullptr));
  CHECK_CUDA(cudaDeviceSynchronize());
  meeting.wait();
  return view;
}
void check_fault(const Exchange& view) {
  uint32_t fault = 0;
  CHECK_CUDA(cudaMemcpy(&fault, view.fault, sizeof fault, cudaMemcpyDeviceToHost));
  if (fault == 0) return;
  std::fprintf(stderr, "rank %d: sums did not come in time\n", view.rank);
  std::exit(1);
}

/// A graph that has not run.
template <typename Enqueue>
cudaGraphExec_t capture(cudaStream_t stream, const Enqueue& enqueue) {
  cudaGraph_t graph;
  cudaGraphExec_t executable;
  CHECK_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  enqueue();
  CHECK_CUDA(cudaStreamEndCapture(stream, &graph));
  CHECK_CUDA(cudaGraphInstantiate(&executable, graph, 0));
  CHECK_CUDA(cudaGraphDestroy(graph));
  CHECK_CUDA(cudaGraphUpload(executable, stream));
  CHECK_CUDA(cudaStreamSynchronize(stream));
  return executable;
}

/// Median microseconds of a graph that all devices replay.
double replay_us(cudaStream_t stream, cudaGraphExec_t graph) {
  std::vector<cudaEvent_t> events(kRepeats + 1);
  for (cudaEvent_t& event : events) CHECK_CUDA(cudaEventCreate(&event));
  meeting.wait();
  for (cudaEvent_t event : events) {
    CHECK_CUDA(cudaEventRecord(event, stream));
    CHECK_CUDA(cudaGraphLaunch(graph, stream));
  }
  CHECK_CUDA(cudaStreamSynchronize(stream));
  std::vector<float> times(kRepeats);
  for (size_t i = 0; i < times.size(); ++i) {
    CHECK_CUDA(cudaEventElapsedTime(&times[i], events[i], events[i + 1]));
  }
  for (cudaEvent_t event : events) CHECK_CUDA(cudaEventDestroy(event));
  CHECK_CUDA(cudaGraphExecDestroy(graph));
  const auto median = times.begin() + kRepeats / 2;
  std::nth_element(times.begin(), median, times.end());
  return *median * 1e3;
}

/// Bytes a microsecond that each device stores in the next one's memory while all do the same.
double link_bytes_per_us(const Exchange& view, cudaStream_t stream) {
  constexpr size_t kBytes = size_t{64} << 20;  // of the slots, which are emptied again
  const cudaGraphExec_t graph = capture(stream, [&] {
    store_kernel<<<264, 1024, 0, stream>>>(
        reinterpret_cast<uint4*>(view.memory[(view.rank + 1) % num_ranks]), kBytes / sizeof(uint4));
  });
  const double us = replay_us(stream, graph);
  meeting.wait();
  CHECK_CUDA(clear_exchange_cuda(view, stream));
  CHECK_CUDA(cudaStreamSynchronize(stream));
  meeting.wait();
  return kBytes / us;
}

cudaStream_t stream_of_device(int rank) {
  cudaStream_t stream;
  CHECK_CUDA(cudaSetDevice(rank));
  CHECK_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  return stream;
}

/// Microseconds of a round of `part`.
double round_us(const Part& part, int num_rows, const Exchange* exchange, cudaStream_t stream) {
  const int rounds = num_rounds(num_rows);
  const cudaGraphExec_t graph = capture(stream, [&] {
    for (int round = 0; round < rounds; ++round) {
      part.enqueue(round, num_rows, exchange, false, stream);
    }
  });
  return replay_us(stream, graph) / rounds;
}

void measure(int rank, std::vector<std::string>& runs) {
  const cudaStream_t stream = stream_of_device(rank);
  const Exchange view = view_of(rank);
  const double rate = link_bytes_per_us(view, stream);
  if (rank == 0) std::printf("%d devices store %.3f TB/s each\n", num_ranks, rate / 1e6);
  for (const Shape& shape : kShapes) {
    if (shape.num_splits() < num_ranks) continue;
    const Part part(shape, rank, num_ranks);
    for (const int num_rows : kRows) {
      const double alone = round_us(part, num_rows, nullptr, stream);
      const double exchanged = round_us(part, num_rows, &view, stream);
      check_fault(view);
      if (rank != 0) continue;
      char line[300];
      std::snprintf(line, sizeof line,
                    "{\"shape\": \"%s\", \"hidden\": %d, \"num_inputs\": %d, \"num_splits\": %d, "
                    "\"num_rows\": %d, \"alone_us\": %.2f, \"exchanged_us\": %.2f, "
                    "\"beyond_us\": %.2f, \"floor_us\": %.2f}",
                    shape.name, shape.hidden, shape.num_inputs, shape.num_splits(), num_rows, alone,
                    exchanged, exchanged - alone, received_bytes(shape, num_rows) / rate);
      runs.emplace_back(line);
      std::printf("%s\n", line);
      std::fflush(stdout);
    }
    meeting.wait();  // until nobody writes to the part
  }
}

/// Enqueues rounds of `part` with pauses, and the comparison with what one device leaves.
void enqueue_soak(const Part& part, const Part& whole, int num_rows, const Exchange& view,
                  uint32_t* num_differences, cudaStream_t stream) {
  constexpr uint32_t kMostPauseNs = 8'000;
  const auto* rounds = reinterpret_cast<const uint64_t*>(
      view.memory[view.rank] + exchange_bytes(view.floats) - sizeof(ExchangeState));
  part.enqueue_start(num_rows, stream);
  for (int round = 0; round < kRounds; ++round) {
    CHECK_CUDA(cuda::launch(pause_kernel, 1, 1, 0, stream, static_cast<uint32_t>(view.rank), rounds,
                            kMostPauseNs));
    part.enqueue(round, num_rows, &view, true, stream);
  }
  for (const auto read : {&Part::residual, &Part::out}) {
    CHECK_CUDA(cuda::launch(count_differences_kernel, 132, 256, 0, stream, (part.*read)(),
                            (whole.*read)(), part.size(num_rows), num_differences));
  }
}

void soak(int rank, int most_graphs) {
  const cudaStream_t stream = stream_of_device(rank);
  const Exchange view = view_of(rank);
  auto* num_differences = device_array<uint32_t>(1);
  std::mt19937 random(static_cast<uint32_t>(rank));
  for (const Shape& shape : kSoakShapes) {
    if (shape.num_splits() < num_ranks) continue;
    const Part part(shape, rank, num_ranks), whole(shape, 0, 1);
    for (const int num_rows : kRows) {
      const int num_graphs = num_rows <= 16 ? most_graphs : (most_graphs + 7) / 8;
      whole.enqueue_start(num_rows, stream);
      for (int round = 0; round < kRounds; ++round) {
        whole.enqueue(round, num_rows, nullptr, false, stream);
      }
      CHECK_CUDA(cudaMemsetAsync(num_differences, 0, sizeof(uint32_t), stream));
      const cudaGraphExec_t graph = capture(
          stream, [&] { enqueue_soak(part, whole, num_rows, view, num_differences, stream); });
      meeting.wait();
      for (int i = 0; i < num_graphs; ++i) {
        std::this_thread::sleep_for(std::chrono::microseconds(random() % 1000));
        CHECK_CUDA(cudaGraphLaunch(graph, stream));
      }
      CHECK_CUDA(cudaStreamSynchronize(stream));
      check_fault(view);
      uint32_t count = 0;
      CHECK_CUDA(cudaMemcpy(&count, num_differences, sizeof count, cudaMemcpyDeviceToHost));
      CHECK_CUDA(cudaGraphExecDestroy(graph));
      std::printf("%s, %d rows, rank %d: %d rounds, %u other bits than one device's\n", shape.name,
                  num_rows, rank, num_graphs * kRounds, count);
      std::fflush(stdout);
      if (count != 0) std::exit(1);
    }
    meeting.wait();
  }
}

template <typename Run>
void run_ranks(const Run& run) {
  std::vector<std::thread> threads;
  for (int rank = 0; rank < num_ranks; ++rank) threads.emplace_back([&, rank] { run(rank); });
  for (std::thread& thread : threads) thread.join();
}

}  // namespace

int main(int argc, char** argv) {
  // A kernel that is loaded on first use would wait for a device that waits for it.
  setenv("CUDA_MODULE_LOADING", "EAGER", 1);
  const char* json = nullptr;
  int num_graphs = 0;
  for (int i = 1; i + 1 < argc; ++i) {
    if (std::strcmp(argv[i], "--ranks") == 0) num_ranks = std::atoi(argv[i + 1]);
    if (std::strcmp(argv[i], "--soak") == 0) num_graphs = std::atoi(argv[i + 1]);
    if (std::strcmp(argv[i], "--json") == 0) json = argv[i + 1];
  }
  if (device::count() < num_ranks) {
    std::printf("SKIPPED: needs %d devices\n", num_ranks);
    return 0;
  }
  std::vector<int> devices;
  for (int rank = 0; rank < num_ranks; ++rank) devices.push_back(rank);
  device::enable_peers(devices);
  std::vector<std::string> runs;
  run_ranks([&](int rank) { num_graphs > 0 ? soak(rank, num_graphs) : measure(rank, runs); });
  if (json != nullptr) write_json(json, "bench/kernels/cuda_exchange.cu", runs);
  return 0;
}
