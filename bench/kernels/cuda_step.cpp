// What a step of the whole engine core costs at the shape of a model, without Python, server or
// checkpoint: random weights, so the text means nothing and drafts are rarely right.
//
//   bench_cuda_step [--shape NAME] [--json FILE] [--method NAME ...] [--requests N ...]
//                   [--tensor-parallel-size T] [--tokens N] [--format bf16|channel|block]
//                   [--batched-tokens N] [--routing uniform|skewed]
//
// By default all methods at the shape of Qwen3-4B, none and mtp at those of Qwen3.5, at others none
// and eagle3; 1, 4, 16 and 64 requests; bf16, or FP8 by the form of its scales. The digest of a
// method's tokens is that of all methods and numbers of ranks. With `--tokens` there is no more
// than the digest of so many, of requests of which half sample.
//
// A step's floor is what reading takes at the bandwidth of plain reading: the weights, of experts
// those that had rows, and K/V.

#include <algorithm>
#include <bit>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <deque>
#include <iterator>
#include <random>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <variant>

#include "model/targets/target.h"
#include "model/weights/weights.h"
#include "read_bandwidth.h"
#include "runtime/runner.h"

using namespace openspec;

namespace {

using Clock = std::chrono::steady_clock;

double milliseconds_since(Clock::time_point start) {
  return 1e3 * std::chrono::duration<double>(Clock::now() - start).count();
}

// Pages of 16 tokens: of a request with its answer and drafts, and of the longest prompt's.
constexpr int kPagesOfRequest = 45, kPagesOfLongest = 530;
constexpr int kNumStates = 3;  // of a request with a running state, at most

/// What is decoded, all at once.
struct Work {
  int num_seqs, prompt_len = 550, output_len = 128;
  bool samples = false;  // every other request
  unsigned seed = 0;
};

/// What a dense model of equal layers has not: experts, each of the model's intermediate size, or
/// Gated DeltaNet in all layers but every fourth.
struct Kind {
  int num_experts = 0, top_k = 0, head_intermediate_size = 0;
  int num_key_heads = 0, num_value_heads = 0;
};
constexpr Kind kA3 = {128, 8, 6144};
constexpr Kind k32 = {.num_key_heads = 16, .num_value_heads = 32};
constexpr Kind k48 = {.num_key_heads = 16, .num_value_heads = 48};

/// A published model.
struct Shape {
  const char* name;
  int hidden_size, num_layers, num_q_heads, num_kv_heads, head_dim, intermediate_size, vocab_size;
  bool is_tied, has_qk_norm, has_qkv_bias;
  double rope_theta;
  int capture_layers[3];  // of its EAGLE-3 head
  Kind kind = {};

  std::variant<DenseMlpSpec, ExpertsSpec> mlp() const {
    if (kind.num_experts == 0) return DenseMlpSpec{intermediate_size};
    return ExpertsSpec{kind.num_experts, kind.top_k, intermediate_size, /*norm_top_k=*/true};
  }
  DenseMlpSpec head_mlp() const {
    return {kind.num_experts == 0 ? intermediate_size : kind.head_intermediate_size};
  }
  /// Of the experts, if a layer's so many are read.
  double expert_share(double num_experts) const {
    return kind.num_experts == 0 ? 1.0 : num_experts / kind.num_experts;
  }
};
constexpr Shape kShapes[] = {
    {"qwen3-4b", 2560, 36, 32, 8, 128, 9728, 151936, true, true, false, 1e6, {1, 17, 32}},
    {"qwen3-0.6b", 1024, 28, 16, 8, 128, 3072, 151936, true, true, false, 1e6, {1, 13, 24}},
    {"qwen3-8b", 4096, 36, 32, 8, 128, 12288, 151936, false, true, false, 1e6, {1, 17, 32}},
    {"qwen3-32b", 5120, 64, 64, 8, 128, 25600, 151936, false, true, false, 1e6, {1, 31, 60}},
    {"llama-3.3-70b", 8192, 80, 64, 8, 128, 28672, 128256, false, false, false, 5e5, {1, 39, 76}},
    {"llama-3.1-8b", 4096, 32, 32, 8, 128, 14336, 128256, false, false, false, 5e5, {1, 15, 28}},
    {"llama-3.2-1b", 2048, 16, 32, 8, 64, 8192, 128256, true, false, false, 5e5, {1, 7, 12}},
    {"qwen3-30b-a3b", 2048, 48, 32, 4, 128, 768, 151936, false, true, false, 1e6, {1, 23, 44}, kA3},
    {"qwen3.5-4b", 2560, 32, 16, 4, 256, 9216, 248320, true, true, false, 1e7, {1, 15, 28}, k32},
    {"qwen3.5-9b", 4096, 32, 16, 4, 256, 12288, 248320, false, true, false, 1e7, {1, 15, 28}, k32},
    {"qwen3.5-27b", 5120, 64, 24, 4, 256, 17408, 248320, false, true, false, 1e7, {1, 31, 60}, k48},
    {"qwen2.5-7b", 3584, 28, 28, 4, 128, 18944, 152064, false, false, true, 1e6, {1, 13, 24}},
};

/// A small language model that drafts one after another, or all in one pass.
constexpr const char *kChain = "draft_model", *kMasks = "draft_model masks";

/// A drafter's trees of `max_drafts` drafts, the best of `top_k` children to a node.
struct Trees {
  const char *name, *method;
  int max_drafts, depth;
  int64_t top_k;
};
// A block's as many as the rows of its chain; pairs twice as many as the chain has.
constexpr Trees kTrees[] = {{"eagle3 trees", "eagle3", 15, 5, 4},
                            {"dflash trees", "dflash", 15, 15, 8},
                            {"dspark trees", "dspark", 15, 7, 64}};

/// Layers of codes: the tensors that come as such, by the form of their scales.
QuantizedTensors quantized_of(const Shape& shape, TensorScale::Form form) {
  struct Matrix {
    std::string name;
    int64_t num_outputs, num_inputs;
  };
  const int64_t hidden = shape.hidden_size, inner = shape.intermediate_size;
  const int64_t q = int64_t{shape.num_q_heads} * shape.head_dim;
  const int64_t kv = int64_t{shape.num_kv_heads} * shape.head_dim;
  std::vector<Matrix> matrices = {{"self_attn.q", q, hidden},
                                  {"self_attn.k", kv, hidden},
                                  {"self_attn.v", kv, hidden},
                                  {"self_attn.o", hidden, q}};
  for (int i = 0; i < std::max(1, shape.kind.num_experts); ++i) {
    const std::string mlp =
        shape.kind.num_experts == 0 ? "mlp." : "mlp.experts." + std::to_string(i) + ".";
    matrices.insert(matrices.end(), {{mlp + "gate", inner, hidden},
                                     {mlp + "up", inner, hidden},
                                     {mlp + "down", hidden, inner}});
  }
  QuantizedTensors tensors;
  for (int i = 0; i < shape.num_layers; ++i) {
    for (const Matrix& matrix : matrices) {
      const std::string name =
          "model.layers." + std::to_string(i) + "." + matrix.name + "_proj.weight";
      TensorScale& scale = tensors[name] = {name + "_scale", {matrix.num_outputs, 1}, form};
      if (form != TensorScale::Form::kBlock) continue;
      scale.shape = {(matrix.num_outputs + kScaleOutputs - 1) / kScaleOutputs,
                     (matrix.num_inputs + kScaleInputs - 1) / kScaleInputs};
    }
  }
  return tensors;
}

AttentionSpec attention_of(const Shape& shape) {
  AttentionSpec attention;
  attention.num_q_heads = shape.num_q_heads;
  attention.num_kv_heads = shape.num_kv_heads;
  attention.head_dim = shape.head_dim;
  attention.has_qk_norm = shape.has_qk_norm;
  attention.has_qkv_bias = shape.has_qkv_bias;
  attention.has_gate = shape.kind.num_key_heads > 0;
  const int rotary_dim = attention.has_gate ? shape.head_dim / 4 : shape.head_dim;
  for (int i = 0; i < rotary_dim / 2; ++i) {
    attention.inv_freq.push_back(
        static_cast<float>(std::pow(shape.rope_theta, -2.0 * i / rotary_dim)));
  }
  return attention;
}

TargetSpec model_of(const Shape& shape) {
  TargetSpec model;
  model.hidden_size = shape.hidden_size;
  model.vocab_size = shape.vocab_size;
  model.tie_word_embeddings = shape.is_tied;
  model.layers.assign(static_cast<size_t>(shape.num_layers), {attention_of(shape), shape.mlp()});
  if (shape.kind.num_experts > 0) model.kind = "mixture";
  if (shape.kind.num_key_heads > 0) {
    model.kind = "hybrid";
    for (size_t i = 0; i < model.layers.size(); ++i) {
      if (i % 4 == 3) continue;
      model.layers[i].mixer = DeltaNetSpec{shape.kind.num_key_heads, shape.kind.num_value_heads};
    }
  }
  return model;
}

/// The smallest of a family, which share their vocabulary; Qwen3's for others.
const Shape& drafter_of(const Shape& shape) {
  const bool is_llama = shape.vocab_size == 128256;
  return *std::find_if(std::begin(kShapes), std::end(kShapes), [&](const Shape& s) {
    return std::string_view(s.name) == (is_llama ? "llama-3.2-1b" : "qwen3-0.6b");
  });
}

RunnerConfig config_of(const Shape& shape, const std::string& method, int num_ranks) {
  for (const Trees& trees : kTrees) {
    if (method != trees.name) continue;
    RunnerConfig config = config_of(shape, trees.method, num_ranks);
    config.max_draft_tokens = trees.max_drafts;
    config.draft_depth = trees.depth;
    config.method_options["draft_top_k"] = trees.top_k;
    return config;
  }
  RunnerConfig config;
  config.target = model_of(shape);
  config.device = Device::kCuda;
  config.dtype = DType::kBF16;
  config.max_num_seqs = 64;
  config.max_model_len = 16384;
  config.max_num_batched_tokens = 2048;
  config.max_num_logits_rows = 256;
  config.tensor_parallel_size = num_ranks;
  config.method = method;
  config.max_draft_tokens = method == "none" ? 0 : 4;
  config.enable_prefix_caching = false;
  if (method == "eagle3") {  // of the published size: a layer as the target's
    config.max_draft_tokens = 3;
    AttentionSpec attention = attention_of(shape);
    attention.has_qk_norm = attention.has_qkv_bias = false;
    HeadSpec& head = config.head.emplace();
    head.layers = {{attention, shape.head_mlp()}};
    head.capture_layers.assign(shape.capture_layers, shape.capture_layers + 3);
    head.draft_vocab_size = 32000;
    head.has_token_map = true;
  }
  if (method == "mtp") {
    config.max_draft_tokens = 3;
    HeadSpec& head = config.head.emplace();
    head.layers = {{attention_of(shape), shape.head_mlp()}};
    head.capture_layers = {shape.num_layers - 1};
    head.captures_normed = true;
    head.draft_vocab_size = 32768;
    head.has_head = false;
  }
  if (method == kChain || method == kMasks) {
    config.method = kChain;
    HeadSpec& head = config.head.emplace();
    head.model = model_of(drafter_of(shape));
    head.layers = head.model->layers;
    head.draft_vocab_size = std::min(head.model->vocab_size, shape.vocab_size);
    if (method == kMasks) {
      config.max_draft_tokens = 15;
      head.mask_token = head.draft_vocab_size - 1;
    }
  }
  if (method == "dflash" || method == "dspark") {  // published heads for Qwen3-4B
    const bool has_markov = method == "dspark";
    config.max_draft_tokens = has_markov ? 7 : 15;
    HeadSpec& head = config.head.emplace();
    head.layers.assign(5, config.target.layers[0]);
    head.capture_layers = {1, 9, 17, 25, 33};
    head.draft_vocab_size = shape.vocab_size;
    head.has_head = false;
    head.block_size = has_markov ? 7 : 16;
    head.mask_token = 151669;
    head.anchor_drafts = has_markov;
    head.markov_rank = has_markov ? 256 : 0;
  }
  return config;
}

/// An embedding of a mixture. Tokens' own numbers outweigh what layers add; else rows of a
/// sequence, to which attention adds the same, would go to the same experts. Skewed: rows have most
/// in common, so that they meet at fewer experts, as in cuda_experts.cu.
std::vector<uint16_t> mixture_embedding(const uint16_t* random, int64_t count, int64_t width,
                                        bool is_skewed) {
  constexpr float kScale = 64.0f;
  const float shared = is_skewed ? 0.8f : 0.0f, own = std::sqrt(1 - shared * shared);
  const auto value = [&](int64_t i) {
    return std::bit_cast<float>(static_cast<uint32_t>(random[i]) << 16);
  };
  std::vector<uint16_t> rows(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) {
    const float sum = kScale * (shared * value(i % width) + own * value(i));
    rows[static_cast<size_t>(i)] = static_cast<uint16_t>(std::bit_cast<uint32_t>(sum) >> 16);
  }
  return rows;
}

void load_random_weights(Weights& weights, const TargetSpec& target, bool is_skewed) {
  const QuantizedTensors& quantized = target.quantized;
  std::mt19937_64 random(1);
  std::normal_distribution<float> normal(0.0f, 0.02f);
  std::vector<uint16_t> block(1 << 20);
  for (uint16_t& value : block) {
    value = static_cast<uint16_t>(std::bit_cast<uint32_t>(normal(random)) >> 16);
  }
  std::vector<uint16_t> data;
  size_t shift = 0;
  std::vector<uint8_t> codes;  // all that are finite
  std::vector<float> ones(16384, 1.0f), scales(1 << 16, 2e-4f);
  for (const TensorSpec& spec : weights.expected_tensors()) {
    size_t count = 1;
    for (int64_t size : spec.shape) count *= static_cast<size_t>(size);
    if (spec.is_token_map) {
      weights.load_offsets(spec.name, std::vector<int64_t>(count, 0));
      continue;
    }
    if (spec.shape.size() == 1) {
      weights.load(spec.name, ones.data(), count * 4, DType::kF32);
      continue;
    }
    if (spec.name.ends_with("_scale")) {
      weights.load(spec.name, scales.data(), count * 4, DType::kF32);
      continue;
    }
    // Those of a mixture differ, or rows of all layers would go to the same experts.
    const bool is_of_mixture = spec.name.find(".mlp.gate.") != std::string::npos ||
                               spec.name.find(".experts.") != std::string::npos;
    if (is_of_mixture) shift = (shift + 4099) % block.size();
    const size_t first = is_of_mixture ? shift : 0;
    if (quantized.contains(spec.name)) {
      while (codes.size() < first + count) {
        const auto code = static_cast<uint8_t>(random() % 254);
        codes.push_back(static_cast<uint8_t>(code + (code >= 0x7f)));
      }
      weights.load(spec.name, &codes[first], count, DType::kE4M3);
      continue;
    }
    while (data.size() < first + count) {
      data.insert(data.end(), block.begin(), block.end());
      std::rotate(block.begin(), block.begin() + 977, block.end());
    }
    if (target.kind == "mixture" && spec.name == "model.embed_tokens.weight") {
      const std::vector<uint16_t> rows =
          mixture_embedding(data.data(), static_cast<int64_t>(count), spec.shape[1], is_skewed);
      weights.load(spec.name, rows.data(), count * 2, DType::kBF16);
      continue;
    }
    weights.load(spec.name, &data[first], count * 2, DType::kBF16);
  }
}

void load_random_weights(Runner& runner, bool is_skewed) {
  const auto begin = Clock::now();
  for (const std::vector<Weights*>& ranks : {runner.target_weights(), runner.draft_weights()}) {
    std::vector<std::jthread> threads;
    for (Weights* weights : ranks) {
      threads.emplace_back(
          [=, &runner] { load_random_weights(*weights, runner.config().target, is_skewed); });
    }
  }
  const double seconds = milliseconds_since(begin) / 1e3;
  const auto prepare_begin = Clock::now();
  runner.finish_loading();
  std::printf("weights loaded in %.2f s, steps recorded in %.2f s\n", seconds,
              milliseconds_since(prepare_begin) / 1e3);
}

/// Of the tokens of requests, in their order (FNV-1a).
struct Digest {
  uint64_t value = 0xcbf29ce484222325u;
  void add(int32_t token) { value = (value ^ static_cast<uint32_t>(token)) * 0x100000001b3u; }
};

struct Timing {
  double first_token_ms = 0, step_ms = 0, tokens_per_second = 0, tokens_per_step = 0;
  double idle_share = 0;  // of the GPU, between steps, while decoding
  // Of a step, on average: the experts of a layer that had rows, and tokens whose K/V were read.
  double num_experts = 0, num_tokens_read = 0;
  Digest digest;
};

/// The host is one step ahead.
Timing decode(Runner& runner, const Work& work) {
  const auto [num_seqs, prompt_len, output_len, samples, seed] = work;
  const int max_drafts = runner.config().max_draft_tokens;
  std::mt19937 random(static_cast<uint32_t>(num_seqs) + seed);
  const auto vocab_size = static_cast<unsigned>(runner.config().target.vocab_size);
  std::vector<int> slots, num_planned, num_out;
  for (int i = 0; i < num_seqs; ++i) {
    std::vector<int32_t> prompt;
    for (int j = 0; j < prompt_len; ++j) {
      prompt.push_back(static_cast<int32_t>(random() % vocab_size));
    }
    SequenceParams params;
    params.max_tokens = output_len;
    params.temperature = samples && i % 2 == 1 ? 1.0f : 0.0f;
    params.seed = static_cast<uint64_t>(i);
    slots.push_back(runner.add_sequence(prompt, prompt_len, params, {}));
    num_planned.push_back(0);
    num_out.push_back(0);
  }
  Timing timing;
  std::deque<std::pair<std::unique_ptr<StepLease>, std::vector<size_t>>> open;
  std::vector<bool> done(static_cast<size_t>(num_seqs), false);
  std::vector<std::vector<int32_t>> texts(slots.size());
  const auto finish_first = [&] {
    const auto [lease, those] = std::move(open.front());
    open.pop_front();
    std::vector<SpanResult> results = runner.collect(*lease);
    runner.commit(*lease);
    return std::pair(std::move(results), those);
  };
  const auto take = [&](size_t i, const SpanResult& result) {
    num_out[i] += static_cast<int>(result.token_ids.size());
    texts[i].insert(texts[i].end(), result.token_ids.begin(), result.token_ids.end());
  };
  size_t num_done = 0;
  int num_steps = 0, num_tokens = 0;
  const auto begin = Clock::now();
  auto decode_begin = begin;
  bool all_decode = false;
  double busy_seconds = 0.0, num_tokens_read = 0.0;
  ExpertCounts experts_before;
  while (num_done < slots.size()) {
    std::vector<SpanRequest> requests;
    std::vector<size_t> of;
    int rows_left = runner.config().max_num_batched_tokens - num_seqs * (1 + max_drafts);
    bool has_prompts = false;
    for (size_t i = 0; i < slots.size(); ++i) {
      if (done[i]) continue;
      int count = 1;
      if (num_planned[i] < prompt_len) {
        count = std::min(rows_left, prompt_len - num_planned[i]);
        if (count < prompt_len - num_planned[i]) count -= count % 16;
        if (count <= 0) continue;
        rows_left -= count;
        has_prompts = true;
      }
      num_planned[i] += count;
      requests.push_back({slots[i], count, std::min(max_drafts, output_len - num_out[i] - 1)});
      of.push_back(i);
    }
    if (!has_prompts && !all_decode) {
      while (!open.empty()) {  // prompts are done: from here on only decoding is timed
        const auto [results, those] = finish_first();
        for (size_t k = 0; k < results.size(); ++k) take(those[k], results[k]);
        if (timing.first_token_ms == 0) timing.first_token_ms = milliseconds_since(begin);
      }
      all_decode = true;
      decode_begin = Clock::now();
      busy_seconds = runner.stats().device_seconds();
      experts_before = runner.stats().experts;
    }
    for (const size_t i : of) num_tokens_read += all_decode ? prompt_len + num_out[i] : 0;
    auto lease = runner.reserve(requests);
    runner.launch(*lease);
    open.emplace_back(std::move(lease), std::move(of));
    if (open.size() <= 1) continue;
    const auto [results, those] = finish_first();
    if (all_decode) ++num_steps;
    for (size_t k = 0; k < results.size(); ++k) {
      const size_t i = those[k];
      if (done[i]) continue;
      take(i, results[k]);
      if (all_decode) num_tokens += static_cast<int>(results[k].token_ids.size());
      if (results[k].finish != FinishReason::kRunning) {
        done[i] = true;
        ++num_done;
        runner.remove_sequence(slots[i]);
      }
    }
  }
  const double total = milliseconds_since(decode_begin);
  while (!open.empty()) finish_first();
  timing.step_ms = total / std::max(1, num_steps);
  timing.idle_share = 1.0 - 1e3 * (runner.stats().device_seconds() - busy_seconds) / total;
  timing.num_experts = (runner.stats().experts - experts_before).experts_per_layer();
  timing.num_tokens_read = num_tokens_read / std::max(1, num_steps);
  timing.tokens_per_second = 1e3 * num_tokens / total;
  timing.tokens_per_step = static_cast<double>(num_tokens) / std::max(1, num_steps);
  for (const std::vector<int32_t>& text : texts) {
    for (const int32_t token : text) timing.digest.add(token);
  }
  return timing;
}

/// Of at least `num_tokens` tokens, of as many requests at a time as all pages hold.
void print_digest(Runner& runner, const std::string& method, int num_tokens) {
  Work work = {.num_seqs = 64, .prompt_len = 48, .output_len = 640, .samples = true};
  Digest digest;
  double seconds = 0;
  int count = 0;
  for (; count < num_tokens; count += work.num_seqs * work.output_len, ++work.seed) {
    const auto begin = Clock::now();
    const uint64_t value = decode(runner, work).digest.value;
    seconds += milliseconds_since(begin) / 1e3;
    for (int shift : {0, 32}) digest.add(static_cast<int32_t>(value >> shift));
  }
  std::printf("%s: %d tokens in %.2f s, digest %016llx\n", method.c_str(), count, seconds,
              static_cast<unsigned long long>(digest.value));
}

/// Bytes of the target that a step reads, all ranks together: its matrices without scales, of the
/// embedding only as LM head, of experts a share.
double step_bytes(Runner& runner, double expert_share) {
  double bytes = 0;
  for (const TensorSpec& spec : runner.target_weights().front()->expected_tensors()) {
    const bool is_lookup =
        spec.name == "model.embed_tokens.weight" && !runner.config().target.tie_word_embeddings;
    if (spec.shape.size() == 2 && !is_lookup && !spec.name.ends_with("_scale")) {
      const bool is_codes = runner.config().target.quantized.contains(spec.name);
      const bool is_expert = spec.name.find(".experts.") != std::string::npos;
      bytes += (is_codes ? 1.0 : 2.0) * (is_expert ? expert_share : 1.0) *
               static_cast<double>(spec.shape[0] * spec.shape[1]);
    }
  }
  return bytes;
}

/// Bytes that drafting reads at least, as bf16: all of a head's matrices in the first of
/// `num_passes`, all but `fc` in the others, and the LM head, rows of the target's if it has none.
double draft_bytes(Runner& runner, int num_passes) {
  double first = 0, others = 0;
  bool has_head = false;
  for (const TensorSpec& spec : runner.draft_weights().front()->expected_tensors()) {
    if (spec.is_token_map || spec.shape.size() != 2 || spec.name == "embed_tokens.weight") continue;
    const double bytes = 2.0 * static_cast<double>(spec.shape[0] * spec.shape[1]);
    // A whole model's embedding is its LM head, too.
    has_head = has_head || spec.name == "lm_head.weight" || spec.name.starts_with("model.");
    first += bytes;
    if (spec.name != "fc.weight") others += bytes;
  }
  const double head = has_head ? 0.0
                               : 2.0 * runner.config().the_head().draft_vocab_size *
                                     runner.config().target.hidden_size;
  return first + (num_passes - 1) * others + num_passes * head;
}

/// Of a token's K/V in all layers of attention, in bytes.
double token_bytes(const Runner& runner) {
  double bytes = 0;
  for (const LayerSpec& layer : runner.config().target.layers) {
    const auto* attention = std::get_if<AttentionSpec>(&layer.mixer);
    if (attention != nullptr) bytes += 2.0 * 2 * attention->num_kv_heads * attention->head_dim;
  }
  return bytes;
}

/// Steps over prompts of a usual length: rows of one request without drafting, and drafting for as
/// many requests as have all their drafts in a step of so many rows.
/// `floor_of`: milliseconds of a step that reads so many experts of a layer and K/V of so many
/// tokens.
template <typename FloorOf>
void time_graphs(Runner& runner, const std::string& method, const FloorOf& floor_of,
                 double bandwidth, std::string& json) {
  const int rows_per_seq = 1 + runner.config().max_draft_tokens;
  const bool is_costly = runner.drafter().needs().is_costly;
  std::vector<StepKind> kinds;
  for (const bool proposes : {false, true}) {
    for (int rows : {1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256}) {
      if (!proposes) kinds.push_back({1, rows, false});
      const int num_seqs = std::max(1, rows / rows_per_seq);
      if (proposes && is_costly && rows > 1 && num_seqs <= runner.config().max_num_seqs) {
        kinds.push_back({num_seqs, rows, true});
      }
    }
  }
  const std::vector<TimedStep> timed = runner.time_steps(kinds, Work{}.prompt_len, 5, 5.0);
  std::string floors;
  for (const bool proposes : {false, true}) {
    if (proposes) json += "}, \"graph_floor_ms\": {" + std::exchange(floors, "");
    json += proposes ? "}, \"proposing_graph_ms\": {" : "\"graph_ms\": {";
    for (size_t i = 0; i < kinds.size(); ++i) {
      const StepKind& kind = kinds[i];
      if (kind.proposes != proposes) continue;
      const double floor = floor_of(timed[i].num_experts, kind.num_seqs * Work{}.prompt_len);
      std::printf("%s step of %3d rows%s: %.3f ms, %.3f x floor, %.3f x one row", method.c_str(),
                  kind.num_rows, proposes ? " that proposes" : "", 1e3 * timed[i].seconds,
                  1e3 * timed[i].seconds / floor, timed[i].seconds / timed[0].seconds);
      if (timed[i].num_experts > 0) std::printf(", %.1f experts", timed[i].num_experts);
      std::printf("\n");
      floors += (floors.empty() ? "\"" : ", \"") + std::to_string(kind.num_rows) +
                "\": " + std::to_string(floor);
      json += (json.back() == '{' ? "\"" : ", \"") + std::to_string(kind.num_rows) +
              "\": " + std::to_string(1e3 * timed[i].seconds);
    }
  }
  json += "}";
  const char* drafting[] = {"eagle3", "dflash", "mtp", kChain, kMasks};
  if (std::find(std::begin(drafting), std::end(drafting), method) == std::end(drafting)) return;
  const std::vector<TimedStep> both =
      runner.time_steps(std::vector<StepKind>{{1, rows_per_seq, false}, {1, rows_per_seq, true}},
                        Work{}.prompt_len, 9, 5.0);
  // With masks: over what the step committed, then over a block.
  const int num_passes = method == "dflash" ? 1 : method == kMasks ? 2 : rows_per_seq - 1;
  const double ms = 1e3 * (both[1].seconds - both[0].seconds);
  const double bytes_ms = 1e3 * draft_bytes(runner, num_passes) / bandwidth;
  std::printf("%s drafts for one request in %.3f ms, %.2f x reading its weights and LM head\n",
              method.c_str(), ms, ms / bytes_ms);
  json +=
      ", \"draft_ms\": " + std::to_string(ms) + ", \"draft_bytes_ms\": " + std::to_string(bytes_ms);
}

}  // namespace

int main(int argc, char** argv) try {
  std::string json = "{";
  // Before CUDA is first used: what GPUs that share a target need.
  setenv("CUDA_MODULE_LOADING", "EAGER", 1);
  std::setvbuf(stdout, nullptr, _IOLBF, 0);  // what was measured stays, whatever comes after
  const double bandwidth = bench::read_bandwidth(size_t{8} << 30);
  std::vector<std::string> methods;
  std::vector<int> requests;
  int num_ranks = 1, num_tokens = 0, num_batched_tokens = 2048;
  bool is_skewed = false;
  const char* json_path = nullptr;
  std::string format = "bf16";
  const Shape* shape = &kShapes[0];
  for (int i = 1; i + 1 < argc; ++i) {
    if (std::strcmp(argv[i], "--shape") == 0) {
      shape = std::find_if(std::begin(kShapes), std::end(kShapes),
                           [&](const Shape& s) { return std::strcmp(s.name, argv[i + 1]) == 0; });
      if (shape == std::end(kShapes)) {
        std::fprintf(stderr, "no shape %s\n", argv[i + 1]);
        return 2;
      }
    }
    if (std::strcmp(argv[i], "--method") == 0) methods.push_back(argv[i + 1]);
    if (std::strcmp(argv[i], "--requests") == 0) requests.push_back(std::atoi(argv[i + 1]));
    if (std::strcmp(argv[i], "--tensor-parallel-size") == 0) num_ranks = std::atoi(argv[i + 1]);
    if (std::strcmp(argv[i], "--tokens") == 0) num_tokens = std::atoi(argv[i + 1]);
    if (std::strcmp(argv[i], "--json") == 0) json_path = argv[i + 1];
    if (std::strcmp(argv[i], "--format") == 0) format = argv[i + 1];
    if (std::strcmp(argv[i], "--batched-tokens") == 0) num_batched_tokens = std::atoi(argv[i + 1]);
    if (std::strcmp(argv[i], "--routing") == 0) is_skewed = !std::strcmp(argv[i + 1], "skewed");
  }
  QuantizedTensors quantized;
  if (format == "channel") quantized = quantized_of(*shape, TensorScale::Form::kChannel);
  if (format == "block") quantized = quantized_of(*shape, TensorScale::Form::kBlock);
  if (quantized.empty() && format != "bf16") {
    std::fprintf(stderr, "no format %s\n", format.c_str());
    return 2;
  }
  if (requests.empty()) requests = {1, 4, 16, 64};
  if (methods.empty() && shape->kind.num_key_heads > 0) methods = {"none", "mtp"};
  if (methods.empty() && shape != &kShapes[0]) methods = {"none", "eagle3"};
  if (methods.empty()) {
    methods = drafter_names();
    for (const Trees& trees : kTrees) methods.emplace_back(trees.name);
    methods.emplace_back(kMasks);
  }
  for (const std::string& method : methods) {
    RunnerConfig config = config_of(*shape, method, num_ranks);
    config.target.quantized = quantized;
    config.max_num_batched_tokens = num_batched_tokens;
    // More requests than there are would take memory for nothing.
    if (num_tokens == 0) config.max_num_seqs = *std::max_element(requests.begin(), requests.end());
    const int num_pages = std::max(kPagesOfRequest * config.max_num_seqs, kPagesOfLongest);
    const int num_state_pages = plan_memory(config).num_base_pages * config.max_num_seqs;
    Runner runner(config, num_pages + kNumStates * num_state_pages);
    load_random_weights(runner, is_skewed);
    if (num_tokens > 0) {
      print_digest(runner, method, num_tokens);
      continue;
    }
    const auto floor_of = [&](double num_experts, double num_tokens_read) {
      const double bytes = step_bytes(runner, shape->expert_share(num_experts)) +
                           num_tokens_read * token_bytes(runner);
      return 1e3 * bytes / num_ranks / bandwidth;
    };
    const double floor_ms = floor_of(shape->kind.top_k, 0);
    if (method == methods.front()) {
      std::printf("%s in %s on %d GPUs: read bandwidth %.3f TB/s, weights of one row: %.3f ms\n",
                  shape->name, format.c_str(), num_ranks, bandwidth / 1e12, floor_ms);
      json += "\"shape\": \"" + std::string(shape->name) + "\", \"format\": \"" + format +
              "\", \"tensor_parallel_size\": " + std::to_string(num_ranks) +
              ", \"read_bandwidth\": " + std::to_string(bandwidth) +
              ", \"floor_ms\": " + std::to_string(floor_ms);
    }
    runner.measure_step_times(3.0);
    json += ", \"" + method + "\": {";
    time_graphs(runner, method, floor_of, bandwidth, json);
    for (int num_seqs : requests) {
      decode(runner, {num_seqs});
      const Timing timing = decode(runner, {num_seqs});
      const double floor = floor_of(timing.num_experts, timing.num_tokens_read);
      std::printf(
          "%s c%-2d: first token %.2f ms, step %.3f ms (%.3f x floor, %.1f experts), %.0f tok/s, "
          "%.2f tokens a step, GPU idle %.1f %%, digest %016llx\n",
          method.c_str(), num_seqs, timing.first_token_ms, timing.step_ms, timing.step_ms / floor,
          timing.num_experts, timing.tokens_per_second, timing.tokens_per_step,
          100 * timing.idle_share, static_cast<unsigned long long>(timing.digest.value));
      json += ", \"c" + std::to_string(num_seqs) +
              "\": {\"first_token_ms\": " + std::to_string(timing.first_token_ms) +
              ", \"step_ms\": " + std::to_string(timing.step_ms) +
              ", \"floor_ms\": " + std::to_string(floor) +
              ", \"tokens_per_second\": " + std::to_string(timing.tokens_per_second) +
              ", \"gpu_idle_share\": " + std::to_string(timing.idle_share) + ", \"digest\": \"" +
              std::to_string(timing.digest.value) + "\"}";
    }
    for (int prompt_len : {2048, 4096, 8192}) {
      decode(runner, {1, prompt_len});
      const Timing timing = decode(runner, {1, prompt_len});
      std::printf("%s prompt of %d: first token %.2f ms, step %.3f ms, digest %016llx\n",
                  method.c_str(), prompt_len, timing.first_token_ms, timing.step_ms,
                  static_cast<unsigned long long>(timing.digest.value));
      json += ", \"prompt" + std::to_string(prompt_len) +
              "_first_token_ms\": " + std::to_string(timing.first_token_ms);
    }
    json += "}";
  }
  json += "}\n";
  if (std::FILE* file = json_path != nullptr ? std::fopen(json_path, "w") : nullptr) {
    std::fputs(json.c_str(), file);
    std::fclose(file);
  }
  return 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
