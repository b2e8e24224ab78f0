// clang-format off
// Micro-benchmark of the CPU ops: time, GB/s and GFLOP/s by op, shape and number of rows, beside
// the memory bandwidth and multiply-add peak of the same run.
//
//   bench_cpu_ops [threads] [filter] [isa]     e.g. bench_cpu_ops 2 "linear tiny" avx2
//
// Every figure is the best of several repetitions: other work on the machine only ever adds time.
// Weights are walked through copies of themselves, so that a matrix comes from where the rest of
// the model would leave it: from the last-level cache or memory, not from the core's own caches.

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <new>
#include <random>
#include <string>
#include <vector>

#include "kernels/isa_cpu.h"
#include "kernels/ops.h"

namespace {

using namespace openspec;

// As the engine allocates weights and pages: a vector load then never spans two cache lines.
template <typename T>
struct LineAllocator {
  using value_type = T;
  LineAllocator() = default;
  template <typename U>
  LineAllocator(const LineAllocator<U>&) {}
  T* allocate(size_t count) {
    return static_cast<T*>(::operator new(count * sizeof(T), std::align_val_t{64}));
  }
  void deallocate(T* p, size_t) { ::operator delete(p, std::align_val_t{64}); }
  bool operator==(const LineAllocator&) const = default;
};
template <typename T>
using Aligned = std::vector<T, LineAllocator<T>>;

int num_threads = 2;
std::string filter;
ThreadPool* pool = nullptr;

ExecContext exec() { return {.pool = pool}; }

bool is_wanted(const std::string& name) { return name.find(filter) != std::string::npos; }

// Best time of one call, in seconds.
template <typename Body>
double best_time(const Body& body, double budget_s = 0.15) {
  using Clock = std::chrono::steady_clock;
  const auto seconds = [](Clock::duration d) { return std::chrono::duration<double>(d).count(); };
  double best = 1e9;
  const auto start = Clock::now();
  for (int i = 0; i < 5 || seconds(Clock::now() - start) < budget_s; ++i) {
    const auto begin = Clock::now();
    body();
    best = std::min(best, seconds(Clock::now() - begin));
  }
  return best;
}

Aligned<float> normals(size_t count, float scale = 1.0f) {
  std::minstd_rand engine(static_cast<unsigned>(count));
  std::normal_distribution<float> normal(0.0f, scale);
  std::vector<float> block(std::min<size_t>(count, 65536));
  for (float& value : block) value = normal(engine);
  Aligned<float> values(count);
  for (size_t i = 0; i < count; ++i) values[i] = block[i % block.size()];
  return values;
}

#if defined(__x86_64__)
// Twelve independent chains keep two units of latency four busy. In assembly, because this file is
// compiled for any CPU.
#define OPENSPEC_CHAIN(width, i) "vfmadd132ps %%" width #i ", %%" width #i ", %%" width #i "\n"
#define OPENSPEC_CHAINS(width)                                               \
  OPENSPEC_CHAIN(width, 0)                                                   \
  OPENSPEC_CHAIN(width, 1)                                                   \
  OPENSPEC_CHAIN(width, 2)                                                   \
  OPENSPEC_CHAIN(width, 3)                                                   \
  OPENSPEC_CHAIN(width, 4)                                                   \
  OPENSPEC_CHAIN(width, 5)                                                   \
  OPENSPEC_CHAIN(width, 6)                                                   \
  OPENSPEC_CHAIN(width, 7) OPENSPEC_CHAIN(width, 8) OPENSPEC_CHAIN(width, 9) \
      OPENSPEC_CHAIN(width, 10) OPENSPEC_CHAIN(width, 11)
#define OPENSPEC_RUN_CHAINS(width)                                                           \
  asm volatile(OPENSPEC_CHAINS(width)::                                                      \
                   : "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", \
                     "xmm9", "xmm10", "xmm11")
#endif

// Multiply-adds on registers, all threads: 0 where this file does not know how.
double peak_flops() {
#if defined(__x86_64__)
  constexpr int64_t kLength = 20000;
  const int lanes = cpu_isa() == Isa::kAvx512 ? 16 : cpu_isa() == Isa::kAvx2 ? 8 : 0;
  if (lanes == 0) return 0.0;
  const double time = best_time([&] {
    pool->parallel_for(num_threads, [&](int64_t) {
      asm volatile("vzeroall" ::: "memory");  // leftovers may be denormal, which is slow
      for (int64_t i = 0; i < kLength; ++i) {
        if (lanes == 16) {
          OPENSPEC_RUN_CHAINS("zmm");
        } else {
          OPENSPEC_RUN_CHAINS("ymm");
        }
      }
    });
  });
  return 2.0 * lanes * 12 * kLength * num_threads / time;
#else
  return 0.0;
#endif
}

// Bytes per second of reading a buffer of this size again and again, all threads.
double read_rate(size_t bytes) {
  constexpr int64_t kChunks = 64;
  Aligned<uint64_t> buffer(bytes / 8, 1);
  std::vector<uint64_t> sums(kChunks);
  const size_t chunk = buffer.size() / kChunks;
  const double time = best_time([&] {
    pool->parallel_for(kChunks, [&](int64_t i) {
      uint64_t sum[16] = {};
      const uint64_t* from = buffer.data() + static_cast<size_t>(i) * chunk;
      for (size_t j = 0; j + 16 <= chunk; j += 16) {
        for (size_t lane = 0; lane < 16; ++lane) sum[lane] += from[j + lane];
      }
      for (const uint64_t s : sum) sums[static_cast<size_t>(i)] += s;
    });
  });
  return static_cast<double>(bytes) / time;
}

struct Shape {
  const char* name;
  int num_outputs;
  int num_inputs;
  LinearEpilogue epilogue;
  bool may_split = false;
};

void bench_linear(const char* model, const std::vector<Shape>& shapes, DType dtype,
                  ScaleKind scale_kind = ScaleKind::kNone) {
  const bool has_codes = scale_kind != ScaleKind::kNone;
  const char* format = !has_codes                           ? "bf16"
                       : scale_kind == ScaleKind::kOutput ? "e4m3, channels"
                                                            : "e4m3, blocks";
  for (const Shape& shape : shapes) {
    const PackedLinear weight = {
        .num_outputs = shape.num_outputs,
        .num_inputs = shape.num_inputs,
        .layout = linear_layout_cpu(shape.num_inputs),
        .epilogue = shape.epilogue,
        .num_splits =
            shape.may_split ? linear_num_splits(shape.num_outputs, shape.num_inputs) : 1,
        .format = has_codes ? MatrixFormat::kE4M3 : MatrixFormat::kBF16,
        .scale_kind = scale_kind};
    const size_t bytes = linear_packed_bytes_cpu(weight);
    const Aligned<float> scales(static_cast<size_t>(weight.num_scales()) + 1, 0.01f);
    // Copies worth 16 MB: more than the cores' own caches, about what the tiny model weighs.
    const size_t num_copies = std::max<size_t>(1, (size_t{16} << 20) / bytes);
    Aligned<uint16_t> weights(num_copies * bytes / 2, 0x3c01);
    for (const int num_rows : {1, 2, 4, 8, 16, 64, 256}) {
      if (num_rows > 16 && bytes > (size_t{100} << 20)) continue;
      const Aligned<float> x = normals(static_cast<size_t>(num_rows * shape.num_inputs));
      Aligned<float> out(static_cast<size_t>(num_rows * shape.num_outputs));
      const size_t workspace_bytes =
          linear_workspace_bytes_cpu(num_rows, shape.num_inputs, weight.layout);
      Aligned<float> workspace(workspace_bytes / 4 + 1);
      LinearParams params;
      params.weight = weight;
      if (has_codes) params.weight.scales = scales.data();
      params.x = x.data();
      params.out = out.data();
      params.num_rows = num_rows;
      params.dtype = dtype;
      params.workspace = workspace.data();
      size_t copy = 0;
      const double time = best_time([&] {
        params.weight.data = weights.data() + copy * bytes / 2;
        copy = (copy + 1) % num_copies;
        linear_cpu(exec(), params);
      });
      const double flops = 2.0 * num_rows * shape.num_outputs * shape.num_inputs;
      std::printf("linear      %-5s %-8s %-14s %4d rows %10.1f us %7.1f GB/s %8.1f GFLOP/s\n",
                  model, shape.name, format, num_rows, time * 1e6, static_cast<double>(bytes) / time * 1e-9,
                  flops / time * 1e-9);
    }
  }
}

void bench_pack() {
  const int n = 4096, k = 2560;
  Aligned<uint16_t> rows(static_cast<size_t>(n) * k, 1), packed(rows.size());
  const PackedLinear shape = {.num_outputs = n, .num_inputs = k};
  const double time =
      best_time([&] { linear_pack_cpu(shape, rows.data(), 0, n, packed.data()); });
  std::printf("linear_pack %dx%d bf16, 1 thread %10.1f us %7.1f GB/s\n", n, k, time * 1e6,
              static_cast<double>(rows.size()) * 2 / time * 1e-9);
}

void bench_attention(const char* model, int q_heads, int kv_heads, int num_spans, int rows,
                     int kv_len) {
  constexpr int kDim = 128, kPage = 16;
  const int tokens = kv_len + rows;
  const int pages_per_seq = (tokens + kPage - 1) / kPage;
  const size_t num_rows = static_cast<size_t>(num_spans * rows);
  std::vector<int32_t> pages, position, span, parent, begin = {0}, len, seq;
  for (int i = 0; i < num_spans * pages_per_seq; ++i) pages.push_back(i);
  for (int s = 0; s < num_spans; ++s) {
    for (int r = 0; r < rows; ++r) {
      position.push_back(kv_len + r);
      span.push_back(s);
      parent.push_back(r == 0 ? -1 : s * rows + r - 1);
    }
    begin.push_back((s + 1) * rows);
    len.push_back(kv_len);
    seq.push_back(s);
  }
  Aligned<float> kv = normals(pages.size() * 2 * static_cast<size_t>(kv_heads) * kPage * kDim);
  const Aligned<float> q = normals(num_rows * static_cast<size_t>(q_heads) * kDim);
  Aligned<float> out(q.size());
  Aligned<float> workspace(span_attention_workspace_bytes_cpu(num_threads, q_heads, tokens) / 4);
  SpanAttentionParams params;
  params.rows.num_rows = static_cast<int>(num_rows);
  params.rows.num_spans = num_spans;
  params.rows.row_position = position.data();
  params.rows.row_span = span.data();
  params.rows.row_parent = parent.data();
  params.rows.span_begin = begin.data();
  params.rows.span_kv_len = len.data();
  params.rows.span_seq = seq.data();
  params.q = q.data();
  params.out = out.data();
  params.kv = {kv.data(), kv_heads, kDim, kPage};
  params.page_table = {pages.data(), pages_per_seq};
  params.num_q_heads = q_heads;
  params.scale = 0.088f;
  params.workspace = workspace.data();
  params.max_tokens = tokens;
  const double time = best_time([&] { span_attention_cpu(exec(), params); });
  const double seen = static_cast<double>(rows) * kv_len + 0.5 * rows * (rows + 1);
  const double flops = 4.0 * kDim * q_heads * num_spans * seen;
  const double bytes = 2.0 * 4 * kDim * kv_heads * num_spans * tokens;
  std::printf(
      "attention   %-5s %2d spans x %3d rows, %5d tokens %10.1f us %7.1f GB/s %8.1f GFLOP/s\n",
      model, num_spans, rows, kv_len, time * 1e6, bytes / time * 1e-9, flops / time * 1e-9);
}

void bench_choose(int vocab_size, int num_rows, const char* name, SamplingParams sampling,
                  int history = 64) {
  Aligned<float> logits =
      normals(static_cast<size_t>(num_rows) * static_cast<size_t>(vocab_size), 3.0f);
  std::vector<int32_t> zero(static_cast<size_t>(num_rows), 0), position(zero), rows(zero),
      chosen(zero);
  std::vector<int32_t> parent(zero.size(), -1), token(zero), tokens, ids(zero.size() * 21),
      ranks(zero);
  std::vector<float> values(zero.size() * 21);
  for (int i = 0; i < history; ++i) tokens.push_back(i * 7 % vocab_size);
  for (int i = 0; i < num_rows; ++i) {
    rows[static_cast<size_t>(i)] = i;
    position[static_cast<size_t>(i)] = history - 1;
  }
  const int32_t num_tokens = history, prompt_len = history / 2;
  Aligned<float> workspace(choose_workspace_bytes_cpu(num_threads, vocab_size) / 4);
  ChooseParams params;
  params.rows.row_token = token.data();
  params.rows.row_position = position.data();
  params.rows.row_span = zero.data();
  params.rows.row_parent = parent.data();
  params.rows.span_seq = zero.data();
  params.sample_row = rows.data();
  params.num_samples = num_rows;
  params.logits = logits.data();
  params.vocab_size = vocab_size;
  params.sampling = &sampling;
  params.tokens = tokens.data();
  params.tokens_stride = history;
  params.num_tokens = &num_tokens;
  params.prompt_len = &prompt_len;
  params.chosen = chosen.data();
  params.logprob_ids = ids.data();
  params.logprobs = values.data();
  params.ranks = ranks.data();
  params.workspace = workspace.data();
  const double time = best_time([&] { choose_cpu(exec(), params); });
  std::printf("choose      V=%-6d %-22s %3d rows %10.2f us, %8.2f us a row\n", vocab_size, name,
              num_rows, time * 1e6, time * 1e6 / num_rows);
}

void bench_choose_all(int vocab_size, int num_rows) {
  SamplingParams p;
  bench_choose(vocab_size, num_rows, "greedy", p);
  p.num_logprobs = 5;
  bench_choose(vocab_size, num_rows, "greedy, 5 logprobs", p);
  p.num_logprobs = -1;
  p.presence_penalty = 0.5f;
  bench_choose(vocab_size, num_rows, "greedy, penalty, 2k", p, 2048);
  p = {};
  p.temperature = 0.8f;
  bench_choose(vocab_size, num_rows, "sampled", p);
  p.temperature = 50.0f;
  bench_choose(vocab_size, num_rows, "sampled, flat", p);
  p.temperature = 0.8f;
  p.top_k = 20;
  p.top_p = 0.95f;
  bench_choose(vocab_size, num_rows, "top_k 20, top_p .95", p);
  p.top_k = 0;
  bench_choose(vocab_size, num_rows, "top_p .95", p);
  p.top_p = 1.0f;
  p.min_p = 0.05f;
  bench_choose(vocab_size, num_rows, "min_p .05", p);
}

void bench_small(const char* model, int width, int q_heads, int kv_heads, int num_rows) {
  constexpr int kDim = 128;
  const size_t rows = static_cast<size_t>(num_rows);
  Aligned<float> residual = normals(rows * static_cast<size_t>(width));
  Aligned<float> delta(residual.size()), out(residual.size());
  const Aligned<float> weight = normals(static_cast<size_t>(width));
  RmsNormParams norm;
  norm.residual = residual.data();
  norm.delta = delta.data();
  norm.weight = weight.data();
  norm.out = out.data();
  norm.num_rows = num_rows;
  norm.width = width;
  const double norm_time = best_time([&] { rms_norm_cpu(exec(), norm); });

  std::vector<int32_t> position, token(rows, 3);
  std::vector<int64_t> slots;
  for (int i = 0; i < num_rows; ++i) {
    position.push_back(1000 + i);
    slots.push_back(i);
  }
  const Aligned<float> inv_freq = normals(kDim / 2);
  std::vector<float> cos_sin(rows * kDim);
  RopeAnglesParams angles = {
      position.data(), inv_freq.data(), cos_sin.data(), num_rows, kDim, 1.0f};
  const double angles_time = best_time([&] { rope_angles_cpu(exec(), angles); });

  const size_t heads = static_cast<size_t>(q_heads + 2 * kv_heads);
  const Aligned<float> qkv = normals(rows * heads * kDim), head_weight = normals(kDim);
  Aligned<float> q(rows * static_cast<size_t>(q_heads) * kDim);
  Aligned<float> kv((rows / 16 + 1) * 16 * 2 * static_cast<size_t>(kv_heads) * kDim);
  RopeAppendParams rope;
  rope.rows.num_rows = num_rows;
  rope.rows.row_kv_slot = slots.data();
  rope.qkv = qkv.data();
  rope.cos_sin = cos_sin.data();
  rope.q_norm = head_weight.data();
  rope.k_norm = head_weight.data();
  rope.q = q.data();
  rope.kv = {kv.data(), kv_heads, kDim, 16};
  rope.num_q_heads = q_heads;
  const double rope_time = best_time([&] { rope_append_cpu(exec(), rope); });

  std::vector<uint16_t> table(static_cast<size_t>(width) * 16);
  EmbeddingParams embedding = {token.data(), table.data(), out.data(), num_rows, width, DType::kF32};
  const double embedding_time = best_time([&] { embedding_cpu(exec(), embedding); });
  std::printf(
      "rows        %-5s %4d rows: rms_norm %.2f us, rope_angles %.2f us, rope_append %.2f us, "
      "embedding %.2f us\n",
      model, num_rows, norm_time * 1e6, angles_time * 1e6, rope_time * 1e6, embedding_time * 1e6);
}

void bench_ngram(int num_seqs, int history) {
  std::minstd_rand engine(1);
  std::vector<int32_t> tokens(static_cast<size_t>(num_seqs * history));
  for (int32_t& token : tokens) token = static_cast<int32_t>(engine() % 50);
  const size_t n = static_cast<size_t>(num_seqs);
  std::vector<int32_t> num_tokens(n, history), seq(n), wanted(n, 8), drafts(n * 8), counts(n),
      len(n);
  for (size_t i = 0; i < n; ++i) seq[i] = static_cast<int32_t>(i);
  std::vector<int32_t> workspace(copy_lookup_workspace_bytes(num_seqs, 4096) / 4);
  CopyLookupParams params;
  params.tokens = tokens.data();
  params.tokens_stride = history;
  params.num_tokens = num_tokens.data();
  params.seq = seq.data();
  params.num_wanted = wanted.data();
  params.num_seqs = num_seqs;
  params.max_drafts = 8;
  params.drafts = drafts.data();
  params.num_drafts = counts.data();
  params.match_len = len.data();
  params.workspace = workspace.data();
  const double time = best_time([&] { copy_lookup_cpu(exec(), params); });
  std::printf("ngram       %3d sequences of %5d tokens %10.2f us\n", num_seqs, history, time * 1e6);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc > 1) num_threads = std::atoi(argv[1]);
  if (argc > 2) filter = argv[2];
  for (const Isa isa : {Isa::kBaseline, Isa::kAvx2, Isa::kAvx512}) {
    if (argc > 3 && std::string(argv[3]) == isa_name(isa)) force_isa(isa);
  }
  ThreadPool threads(num_threads);
  pool = &threads;
  std::printf(
      "%s, %d threads; multiply-add peak %.0f GFLOP/s; reading 16 MB %.1f GB/s, 256 MB %.1f GB/s\n",
      isa_name(cpu_isa()), num_threads, peak_flops() * 1e-9, read_rate(size_t{16} << 20) * 1e-9,
      read_rate(size_t{256} << 20) * 1e-9);
  constexpr LinearEpilogue kNone = LinearEpilogue::kNone, kSwiGlu = LinearEpilogue::kSwiGlu;
  for (const ScaleKind kind : {ScaleKind::kNone, ScaleKind::kOutput, ScaleKind::kBlock}) {
  if (is_wanted("linear tiny")) {
    bench_linear("tiny",
                 {{"qkv", 768, 320, kNone},
                  {"o", 320, 512, kNone, true},
                  {"gate_up", 2432, 320, kSwiGlu},
                  {"down", 320, 1216, kNone, true},
                  {"lm_head", 4096, 320, kNone}},
                 DType::kF32, kind);
  }
  if (is_wanted("linear SmolLM")) {
    bench_linear("135M",
                 {{"qkv", 960, 576, kNone},
                  {"o", 576, 576, kNone, true},
                  {"gate_up", 3072, 576, kSwiGlu},
                  {"down", 576, 1536, kNone, true},
                  {"lm_head", 49152, 576, kNone}},
                 DType::kF32, kind);
  }
  if (is_wanted("linear 0.6B")) {
    bench_linear("0.6B",
                 {{"qkv", 4096, 1024, kNone},
                  {"o", 1024, 2048, kNone, true},
                  {"gate_up", 6144, 1024, kSwiGlu},
                  {"down", 1024, 3072, kNone, true},
                  {"lm_head", 151936, 1024, kNone}},
                 DType::kF32, kind);
  }
  }
  if (is_wanted("pack")) bench_pack();
  if (is_wanted("attention")) {
    for (const int kv_len : {64, 512, 4096}) bench_attention("tiny", 4, 1, 1, 1, kv_len);
    for (const int rows : {4, 9, 16}) bench_attention("tiny", 4, 1, 1, rows, 512);
    for (const int rows : {1, 9}) bench_attention("tiny", 4, 1, 8, rows, 512);
    bench_attention("tiny", 4, 1, 1, 256, 256);
    bench_attention("0.6B", 16, 8, 1, 1, 4096);
    bench_attention("0.6B", 16, 8, 1, 256, 4096);
    bench_attention("4B", 32, 8, 1, 512, 2048);
  }
  if (is_wanted("choose")) {
    bench_choose_all(4096, 1);
    bench_choose_all(4096, 16);
    bench_choose_all(151936, 1);
  }
  if (is_wanted("rows")) {
    for (const int rows : {1, 8, 64}) bench_small("tiny", 320, 4, 1, rows);
    for (const int rows : {1, 8, 64}) bench_small("0.6B", 1024, 16, 8, rows);
  }
  if (is_wanted("ngram")) {
    bench_ngram(1, 1000);
    bench_ngram(16, 4096);
  }
  return 0;
}
