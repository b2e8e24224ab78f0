#include "kernels/choose.h"

#include <memory>

#include "cuda/cuda_testing.h"
#include "kernels/choose_testing.h"

using namespace openspec;
using namespace openspec::testing;

namespace {

NeedsDevice needs_device;

using Ids = std::vector<int32_t>;
constexpr size_t kWidth = 1 + kMaxLogprobs;
constexpr int kQwenVocab = 151936;

/// All inputs of a call but the logits, as they lie in memory. Samples are the requests' rows in
/// order, with padding wherever `is_padding` says.
struct Batch {
  std::vector<SamplingParams> sampling;  // pointers hold offsets into `ids` and `values`
  Ids ids;
  std::vector<float> values;
  Ids tokens, num_tokens, prompt_len;
  size_t stride = 1;
  Ids row_token, row_position, row_span, row_parent, span_seq;
  Ids sample_row, score_token;
  std::vector<float> logits;
  int vocab_size = 0;
  bool is_draft = false;
  Ids token_of;  // or empty

  size_t num_samples() const { return sample_row.size(); }
};

template <typename T>
const T* as_offset(size_t offset) {
  return reinterpret_cast<const T*>(offset * sizeof(T));
}
template <typename T>
const T* moved(const T* offset, const T* base) {
  return base + reinterpret_cast<size_t>(offset) / sizeof(T);
}

Batch flatten(const std::vector<Request>& requests, int num_samples = 0,
              const std::vector<bool>& is_padding = {}) {
  Batch batch;
  batch.vocab_size = static_cast<int>(requests[0].logits[0].size());
  const auto pad = [&] {
    batch.sample_row.push_back(-1);
    batch.score_token.push_back(0);
    batch.logits.insert(batch.logits.end(), static_cast<size_t>(batch.vocab_size), kInfinity);
  };
  for (const Request& request : requests) {
    batch.stride = std::max(batch.stride, request.history.size());
  }
  const size_t num_seqs = requests.size();
  batch.sampling.resize(num_seqs);
  batch.tokens.assign(num_seqs * batch.stride, 1 << 28);
  batch.num_tokens.resize(num_seqs);
  batch.prompt_len.resize(num_seqs);
  const auto put = [&](const Ids& from) {
    const size_t at = batch.ids.size();
    batch.ids.insert(batch.ids.end(), from.begin(), from.end());
    return as_offset<int32_t>(at);
  };
  for (size_t index = 0; index < num_seqs; ++index) {
    const Request& request = requests[index];
    const size_t slot = num_seqs - 1 - index;
    SamplingParams& p = batch.sampling[slot];
    p = request.sampling;
    p.num_stop_ids = static_cast<int32_t>(request.stop_ids.size());
    p.num_bias = static_cast<int32_t>(request.bias_ids.size());
    p.num_allowed = static_cast<int32_t>(request.allowed_ids.size());
    p.stop_ids = put(request.stop_ids);
    p.bias_ids = put(request.bias_ids);
    p.allowed_ids = put(request.allowed_ids);
    p.bias_values = as_offset<float>(batch.values.size());
    batch.values.insert(batch.values.end(), request.bias_values.begin(), request.bias_values.end());
    std::copy(request.history.begin(), request.history.end(),
              batch.tokens.begin() + static_cast<std::ptrdiff_t>(slot * batch.stride));
    batch.num_tokens[slot] = static_cast<int32_t>(request.history.size());
    batch.prompt_len[slot] = request.prompt_len;
    batch.span_seq.push_back(static_cast<int32_t>(slot));
    const int32_t first = static_cast<int32_t>(batch.row_token.size());
    for (int row = 0; row < request.num_rows(); ++row) {
      const size_t r = static_cast<size_t>(row);
      batch.row_token.push_back(row == 0 ? request.history.back() : request.drafts[r - 1]);
      batch.row_position.push_back(request.position(row));
      batch.row_span.push_back(static_cast<int32_t>(index));
      batch.row_parent.push_back(row == 0 ? -1 : first + 1 + request.parents[r - 1]);
      while (batch.num_samples() < is_padding.size() && is_padding[batch.num_samples()]) pad();
      batch.sample_row.push_back(first + row);
      batch.score_token.push_back(request.score_tokens.empty() ? -1 : request.score_tokens[r]);
      batch.logits.insert(batch.logits.end(), request.logits[r].begin(), request.logits[r].end());
    }
  }
  while (batch.num_samples() < static_cast<size_t>(num_samples)) pad();
  return batch;
}

struct Outputs {
  Ids chosen, ids, values, ranks;  // bits
  bool operator==(const Outputs&) const = default;

  explicit Outputs(size_t num_samples)
      : chosen(num_samples, -1), ids(num_samples * kWidth, -1), values(ids), ranks(chosen) {}
};

/// What a call may be given or not.
struct Asked {
  bool scores = true;
  bool logprobs = true;
  bool ranks = true;
};

ChooseParams params_of(const Batch& batch, const Asked& asked) {
  ChooseParams params;
  params.rows.num_rows = static_cast<int>(batch.row_token.size());
  params.rows.num_spans = static_cast<int>(batch.span_seq.size());
  params.rows.row_token = batch.row_token.data();
  params.rows.row_position = batch.row_position.data();
  params.rows.row_span = batch.row_span.data();
  params.rows.row_parent = batch.row_parent.data();
  params.rows.span_seq = batch.span_seq.data();
  params.sample_row = batch.sample_row.data();
  params.score_token = asked.scores ? batch.score_token.data() : nullptr;
  params.num_samples = static_cast<int>(batch.num_samples());
  params.logits = batch.logits.data();
  params.vocab_size = batch.vocab_size;
  params.sampling = batch.sampling.data();
  params.is_draft = batch.is_draft;
  if (!batch.token_of.empty()) params.token_of = batch.token_of.data();
  if (batch.is_draft) {
    params.rows.row_token = params.rows.row_parent = nullptr;
    return params;
  }
  params.tokens = batch.tokens.data();
  params.tokens_stride = static_cast<int64_t>(batch.stride);
  params.num_tokens = batch.num_tokens.data();
  params.prompt_len = batch.prompt_len.data();
  return params;
}

void move_pointers(std::vector<SamplingParams>& sampling, const int32_t* ids, const float* values) {
  for (SamplingParams& p : sampling) {
    p.stop_ids = moved(p.stop_ids, ids);
    p.bias_ids = moved(p.bias_ids, ids);
    p.allowed_ids = moved(p.allowed_ids, ids);
    p.bias_values = moved(p.bias_values, values);
  }
}

/// The CPU op on each sample that is not padding.
Outputs choose_on_cpu(Batch batch, const Asked& asked = {}) {
  static ThreadPool pool(static_cast<int>(std::min(16u, std::thread::hardware_concurrency())));
  Outputs all(batch.num_samples());
  std::vector<size_t> real;
  Batch compact = batch;
  const size_t vocab_size = static_cast<size_t>(batch.vocab_size);
  for (size_t i = 0; i < batch.num_samples(); ++i) {
    if (batch.sample_row[i] < 0) continue;
    const size_t at = real.size();
    compact.sample_row[at] = batch.sample_row[i];
    compact.score_token[at] = batch.score_token[i];
    std::copy_n(&batch.logits[i * vocab_size], vocab_size, &compact.logits[at * vocab_size]);
    real.push_back(i);
  }
  compact.sample_row.resize(real.size());
  move_pointers(compact.sampling, compact.ids.data(), compact.values.data());
  Outputs some(real.size());
  std::vector<float> workspace =
      poisoned_floats(choose_workspace_bytes_cpu(pool.num_threads(), batch.vocab_size));
  ChooseParams params = params_of(compact, asked);
  params.chosen = some.chosen.data();
  params.logprob_ids = asked.logprobs ? some.ids.data() : nullptr;
  params.logprobs = asked.logprobs ? reinterpret_cast<float*>(some.values.data()) : nullptr;
  params.ranks = asked.ranks ? some.ranks.data() : nullptr;
  params.workspace = workspace.data();
  choose_cpu({.pool = &pool}, params);
  for (size_t at = 0; at < real.size(); ++at) {
    all.chosen[real[at]] = some.chosen[at];
    all.ranks[real[at]] = some.ranks[at];
    std::copy_n(&some.ids[at * kWidth], kWidth, &all.ids[real[at] * kWidth]);
    std::copy_n(&some.values[at * kWidth], kWidth, &all.values[real[at] * kWidth]);
  }
  return all;
}

/// Device memory for a call with room for `capacity` elements of every input, so that a captured
/// graph can be given other inputs.
class DeviceCall {
 public:
  DeviceCall(size_t num_samples, int vocab_size, size_t capacity)
      : num_samples_(num_samples),
        logits_(num_samples * static_cast<size_t>(vocab_size) * 4),
        sampling_(capacity * sizeof(SamplingParams)),
        ids_(capacity * 4),
        values_(capacity * 4),
        tokens_(capacity * 64 * 4),
        token_of_(static_cast<size_t>(vocab_size) * 4),
        numbers_(capacity * 9 * 4),
        chosen_(num_samples * 4),
        logprob_ids_(num_samples * kWidth * 4),
        ranks_(num_samples * 4),
        workspace_(choose_workspace_bytes_cuda(static_cast<int>(num_samples), vocab_size)),
        capacity_(capacity) {
    // Pinned host memory, as the engine does.
    CHECK_CUDA(cudaMallocHost(reinterpret_cast<void**>(&logprobs_), num_samples * kWidth * 4));
  }
  ~DeviceCall() { cudaFreeHost(logprobs_); }
  DeviceCall(const DeviceCall&) = delete;
  DeviceCall& operator=(const DeviceCall&) = delete;

  ChooseParams upload(const Batch& batch, const Asked& asked = {}) {
    CHECK_EQ(batch.num_samples(), num_samples_);
    CHECK_LE(batch.tokens.size(), capacity_ * 64);
    std::vector<SamplingParams> sampling = batch.sampling;
    move_pointers(sampling, ids_.as<int32_t>(), values_.as<float>());
    sampling_.upload(sampling);
    ids_.upload(batch.ids);
    values_.upload(batch.values);
    tokens_.upload(batch.tokens);
    logits_.upload(batch.logits);
    logits_before_ = batch.logits;
    ChooseParams params = params_of(batch, asked);
    const int32_t** const arrays[] = {
        &params.rows.row_token,  &params.rows.row_position, &params.rows.row_span,
        &params.rows.row_parent, &params.rows.span_seq,     &params.sample_row,
        &params.num_tokens,      &params.prompt_len,        &params.score_token};
    const Ids* from[] = {&batch.row_token,  &batch.row_position, &batch.row_span,
                         &batch.row_parent, &batch.span_seq,     &batch.sample_row,
                         &batch.num_tokens, &batch.prompt_len,   &batch.score_token};
    Ids numbers(capacity_ * 9, 1 << 29);
    for (size_t i = 0; i < 9; ++i) {
      CHECK_LE(from[i]->size(), capacity_);
      std::copy(from[i]->begin(), from[i]->end(), &numbers[i * capacity_]);
      if (*arrays[i] != nullptr) *arrays[i] = numbers_.as<int32_t>() + i * capacity_;
    }
    numbers_.upload(numbers);
    params.logits = logits_.as<float>();
    params.sampling = sampling_.as<SamplingParams>();
    if (params.tokens != nullptr) params.tokens = tokens_.as<int32_t>();
    if (params.token_of != nullptr) {
      token_of_.upload(batch.token_of);
      params.token_of = token_of_.as<int32_t>();
    }
    params.chosen = chosen_.as<int32_t>();
    params.logprob_ids = asked.logprobs ? logprob_ids_.as<int32_t>() : nullptr;
    params.logprobs = asked.logprobs ? logprobs_ : nullptr;
    params.ranks = asked.ranks ? ranks_.as<int32_t>() : nullptr;
    params.workspace = workspace_.as<float>();
    poison_outputs();
    return params;
  }
  void poison_outputs() {
    for (DeviceBuffer* buffer : {&chosen_, &logprob_ids_, &ranks_}) buffer->poison();
    std::memset(logprobs_, 0xff, num_samples_ * kWidth * 4);
  }
  Outputs download() const {
    Outputs outputs(num_samples_);
    outputs.chosen = chosen_.download<int32_t>();  // waits
    outputs.ids = logprob_ids_.download<int32_t>();
    outputs.ranks = ranks_.download<int32_t>();
    std::memcpy(outputs.values.data(), logprobs_, num_samples_ * kWidth * 4);
    for (const DeviceBuffer* buffer : {&logits_, &chosen_, &logprob_ids_, &ranks_, &workspace_}) {
      CHECK(buffer->guard_is_whole());
    }
    const std::vector<float> logits = logits_.download<float>();
    CHECK(std::memcmp(logits.data(), logits_before_.data(), logits.size() * 4) == 0);
    return outputs;
  }

 private:
  const size_t num_samples_;
  DeviceBuffer logits_, sampling_, ids_, values_, tokens_, token_of_, numbers_, chosen_,
      logprob_ids_, ranks_, workspace_;
  const size_t capacity_;
  float* logprobs_ = nullptr;
  std::vector<float> logits_before_;
};

/// Names the first difference rather than that there is one.
void check_same(const Outputs& found, const Outputs& expected, const char* what) {
  const auto compare = [&](const char* name, const Ids& a, const Ids& b, size_t width) {
    for (size_t i = 0; i < b.size(); ++i) {
      if (a[i] == b[i]) continue;
      std::ostringstream text;
      text << what << ": " << name << " of sample " << i / width << ", entry " << i % width
           << " is " << a[i] << " and not " << b[i];
      FAIL(text.str());
    }
  };
  compare("choice", found.chosen, expected.chosen, 1);
  compare("logprob id", found.ids, expected.ids, kWidth);
  compare("bits of the logprob", found.values, expected.values, kWidth);
  compare("rank", found.ranks, expected.ranks, 1);
}

/// Calls the op twice with one workspace: it may leave anything there but must expect nothing.
Outputs choose_on_cuda(const Batch& batch, const Asked& asked = {}) {
  DeviceCall call(batch.num_samples(), batch.vocab_size,
                  std::max(batch.tokens.size() / 64,
                           batch.ids.size() + batch.row_token.size() + batch.num_samples()) +
                      1);
  const ChooseParams params = call.upload(batch, asked);
  CHECK_CUDA(choose_cuda(params, nullptr));
  const Outputs outputs = call.download();
  call.poison_outputs();
  CHECK_CUDA(choose_cuda(params, nullptr));
  check_same(call.download(), outputs, "second call");
  return outputs;
}

void check_equals_cpu(const std::vector<Request>& requests, const char* what,
                      const Asked& asked = {}) {
  const Batch batch = flatten(requests);
  check_same(choose_on_cuda(batch, asked), choose_on_cpu(batch, asked), what);
}

/// Any mixture of parameters; ids may lie outside the vocabulary.
Request random_request(Rng& rng, int vocab_size, int max_drafts) {
  Request request;
  SamplingParams& p = request.sampling;
  const auto one_in = [&](int n) { return rng.integer(1, n) == 1; };
  const auto id = [&] {
    return one_in(30) ? rng.integer(-3, 2) * vocab_size - 1 : rng.integer(0, vocab_size - 1);
  };
  p.temperature = one_in(3) ? 0.0f : 0.1f + 0.15f * static_cast<float>(rng.integer(0, 12));
  if (one_in(15)) p.temperature = 1.5e-5f;
  if (one_in(15)) p.temperature = 1e4f;
  p.seed = static_cast<uint64_t>(rng.integer(0, 1 << 30)) << rng.integer(0, 34);
  if (one_in(3)) p.top_k = rng.integer(1, 60);
  if (one_in(10)) p.top_k = rng.integer(1, vocab_size + 3);
  if (one_in(3)) p.top_p = 0.05f * static_cast<float>(rng.integer(0, 20));
  if (one_in(10)) p.top_p = 0.999f;
  if (one_in(4)) p.min_p = 0.04f * static_cast<float>(rng.integer(0, 25));
  if (one_in(10)) p.min_p = 1e-6f;
  if (one_in(3)) p.presence_penalty = rng.normal();
  if (one_in(3)) p.frequency_penalty = rng.normal();
  if (one_in(3)) p.repetition_penalty = 0.5f + 0.25f * static_cast<float>(rng.integer(0, 6));
  if (one_in(3)) p.min_tokens = rng.integer(0, 12);
  if (one_in(2)) p.num_logprobs = rng.integer(0, kMaxLogprobs);
  p.raw_logprobs = one_in(2);
  p.num_prompt_logprobs = rng.integer(-1, 6);
  for (int i = rng.integer(0, 3); i > 0; --i) request.stop_ids.push_back(id());
  for (int i = one_in(3) ? rng.integer(1, 40) : 0; i > 0; --i) {
    const bool is_again = !request.bias_ids.empty() && one_in(3);
    request.bias_ids.push_back(is_again ? request.bias_ids[0] : id());
    request.bias_values.push_back(one_in(4) ? -kInfinity : rng.normal(3));
  }
  for (int i = one_in(5) ? rng.integer(1, 30) : 0; i > 0; --i) request.allowed_ids.push_back(id());
  request.history.clear();
  const bool is_repetitive = one_in(2);
  for (int i = rng.integer(1, one_in(4) ? 2000 : 30); i > 0; --i) {
    request.history.push_back(is_repetitive ? rng.integer(0, std::min(9, vocab_size - 1)) : id());
  }
  request.prompt_len = rng.integer(1, static_cast<int>(request.history.size()));
  const bool is_chain = one_in(2);
  for (int i = 0, count = rng.integer(0, max_drafts); i < count; ++i) {
    request.drafts.push_back(is_repetitive ? rng.integer(0, std::min(9, vocab_size - 1)) : id());
    request.parents.push_back(is_chain ? i - 1 : rng.integer(-1, i - 1));
  }
  const bool is_scored = one_in(8);
  request.sampling.num_prompt_logprobs = rng.integer(-1, kMaxLogprobs);
  const float scale = 0.5f + static_cast<float>(rng.integer(0, 5));
  for (int row = 0; row < request.num_rows(); ++row) {
    request.logits.push_back(rng.normals(static_cast<size_t>(vocab_size), scale));
    if (is_scored) {
      request.score_tokens.push_back(one_in(3) ? -1 : rng.integer(0, vocab_size - 1));
    }
    std::vector<float>& logits = request.logits.back();
    if (one_in(4)) {  // ties
      const float step = one_in(2) ? 1.0f : 0.125f;
      for (float& logit : logits) logit = std::round(logit / step) * step;
    }
    if (one_in(8)) {  // either of these, for the CPU op lists -inf and NaN apart
      const float broken = one_in(2) ? std::numeric_limits<float>::quiet_NaN() : -kInfinity;
      const int one_of = rng.integer(1, 4);
      for (float& logit : logits) logit = one_in(one_of) ? broken : logit;
    }
    if (one_in(15)) logits[static_cast<size_t>(rng.integer(0, vocab_size - 1))] = kInfinity;
  }
  return request;
}

std::vector<Request> random_requests(Rng& rng, int vocab_size, int num_requests, int max_drafts) {
  std::vector<Request> requests;
  for (int i = 0; i < num_requests; ++i) {
    requests.push_back(random_request(rng, vocab_size, max_drafts));
  }
  return requests;
}

std::vector<bool> random_padding(Rng& rng, int size) {
  std::vector<bool> is_padding;
  for (int i = 0; i < size; ++i) is_padding.push_back(rng.integer(0, 3) == 0);
  return is_padding;
}

/// `count` rising token ids, some neighbours, some far from each other.
Ids random_tokens(Rng& rng, int count) {
  Ids tokens;
  for (int id = rng.integer(0, 3); static_cast<int>(tokens.size()) < count;) {
    tokens.push_back(id);
    id += rng.integer(0, 1) == 0 ? 1 : rng.integer(1, 90);
  }
  return tokens;
}

/// The requests' rows as a drafter's. The lists are to be ignored; who reads them leaves memory.
Batch as_drafts(Batch batch, Ids token_of) {
  batch.is_draft = true;
  batch.token_of = std::move(token_of);
  for (SamplingParams& p : batch.sampling) p.num_stop_ids = p.num_bias = p.num_allowed = 1 << 20;
  return batch;
}

/// What nobody but a drafter asks for is left out.
Request plain(Request request) {
  const SamplingParams& p = request.sampling;
  SamplingParams kept;
  kept.temperature = p.temperature;
  kept.top_p = p.top_p;
  kept.min_p = p.min_p;
  kept.top_k = p.top_k;
  kept.seed = p.seed;
  request.sampling = kept;
  request.stop_ids = request.bias_ids = request.allowed_ids = request.score_tokens = {};
  request.bias_values = {};
  return request;
}

Request drawn(std::vector<float> logits, float temperature = 1.0f) {
  Request request;
  request.sampling.temperature = temperature;
  request.sampling.seed = 77;
  request.sampling.num_logprobs = 7;
  request.sampling.raw_logprobs = false;
  request.logits = {std::move(logits)};
  return request;
}

}  // namespace

TEST(equals_the_cpu_op_on_small_vocabularies) {
  Rng rng(1);
  for (int round = 0; round < 60; ++round) {
    const int vocab_size = round % 3 == 0 ? rng.integer(1, 140) : round % 3 == 1 ? 50 : 601;
    const Batch batch =
        flatten(random_requests(rng, vocab_size, rng.integer(1, 8), 5), 0, random_padding(rng, 12));
    check_same(choose_on_cuda(batch), choose_on_cpu(batch), "small");
  }
}

TEST(equals_the_cpu_op_on_medium_vocabularies) {
  Rng rng(2);
  for (int round = 0; round < 25; ++round) {
    const int vocab_size = round % 2 == 0 ? 4096 : rng.integer(3000, 9000);
    const Batch batch =
        flatten(random_requests(rng, vocab_size, 12, 4), 0, random_padding(rng, 30));
    check_same(choose_on_cuda(batch), choose_on_cpu(batch), "medium");
  }
}

TEST(equals_the_cpu_op_on_large_vocabularies) {
  Rng rng(3);
  for (const int vocab_size : {kQwenVocab, kQwenVocab, 200003}) {
    const Batch batch =
        flatten(random_requests(rng, vocab_size, 14, 2), 0, random_padding(rng, 30));
    check_same(choose_on_cuda(batch), choose_on_cpu(batch), "large");
  }
}

TEST(every_filter_alone_and_with_others) {
  Rng rng(4);
  for (const int vocab_size : {4096, kQwenVocab}) {
    std::vector<Request> requests;
    // A narrow row, one whose nucleus is far larger than a list of candidates, and ties.
    std::vector<std::vector<float>> rows = {rng.normals(static_cast<size_t>(vocab_size), 3),
                                            rng.normals(static_cast<size_t>(vocab_size), 0.3f),
                                            rng.normals(static_cast<size_t>(vocab_size), 1)};
    for (float& logit : rows[2]) logit = std::round(logit);
    for (const auto& [top_k, top_p, min_p] :
         std::vector<std::tuple<int, float, float>>{{20, 0.95f, 0.0f},
                                                    {0, 0.9f, 0.0f},
                                                    {0, 1.0f, 0.1f},
                                                    {129, 1.0f, 0.0f},
                                                    {3500, 0.8f, 0.01f},
                                                    {0, 0.0f, 0.0f},
                                                    {128, 0.0f, 1.0f},
                                                    {0, 0.99f, 0.2f}}) {
      for (const std::vector<float>& row : rows) {
        Request request = drawn(row, 0.8f);
        request.sampling.top_k = top_k;
        request.sampling.top_p = top_p;
        request.sampling.min_p = min_p;
        request.sampling.raw_logprobs = rng.integer(0, 2) == 0;
        request.sampling.seed = static_cast<uint64_t>(rng.integer(0, 1 << 30));
        requests.push_back(request);
      }
    }
    check_equals_cpu(requests, "filters");
  }
}

TEST(broken_and_flat_rows) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (const int size : {1, 30, 5000}) {
    const auto flat = [&](float value) {
      return std::vector<float>(static_cast<size_t>(size), value);
    };
    std::vector<std::vector<float>> rows = {flat(nan),  flat(-kInfinity), flat(kInfinity),
                                            flat(0.0f), flat(-0.0f),      flat(-90.0f)};
    for (const float value : {-5.0f, kInfinity, -0.0f}) {
      for (const float rest : {nan, -kInfinity, 1.0f, 0.0f}) {
        rows.push_back(flat(rest));
        rows.back()[static_cast<size_t>(size / 2)] = value;
      }
    }
    std::vector<Request> requests;
    for (const std::vector<float>& row : rows) {
      for (int filter = 0; filter < 6; ++filter) {
        Request request = drawn(row, filter == 5 ? 0.0f : 0.7f);
        if (filter == 1) request.sampling.top_k = 7;
        if (filter == 2) request.sampling.top_p = 0.5f;
        if (filter == 3) request.sampling.min_p = 0.3f;
        if (filter == 4) request.allowed_ids = {0, 3, 4000};
        if (filter == 4) request.sampling.top_k = 7;
        request.sampling.num_logprobs = kMaxLogprobs;
        requests.push_back(request);
        request.sampling.raw_logprobs = true;
        requests.push_back(request);
      }
    }
    check_equals_cpu(requests, "broken");
  }
}

TEST(long_chains_of_drafts_and_history_count) {
  Rng rng(5);
  std::vector<Request> requests = random_requests(rng, 700, 2, 0);
  Request request = drawn(rng.normals(700), 0.0f);
  request.sampling.frequency_penalty = 0.3f;
  request.sampling.repetition_penalty = 1.3f;
  for (int i = 0; i < 3000; ++i) request.history.push_back(rng.integer(0, 699));
  request.prompt_len = 1200;
  for (int i = 0; i < 80; ++i) {
    request.drafts.push_back(rng.integer(0, 20));
    request.parents.push_back(i < 3 ? -1 : i - rng.integer(1, 2));
    request.logits.push_back(rng.normals(700));
  }
  requests.push_back(request);
  check_equals_cpu(requests, "long");
}

TEST(every_bias_and_allowed_list_counts) {
  Rng rng(6);
  Request request = drawn(rng.normals(2000, 2), 0.0f);
  for (int i = 0; i < 900; ++i) {
    request.bias_ids.push_back(rng.integer(0, 500));
    request.bias_values.push_back(rng.normal(3));
  }
  std::vector<Request> requests = {request};
  for (int i = 0; i < 1500; ++i) request.allowed_ids.push_back(rng.integer(0, 1999));
  requests.push_back(request);
  request.sampling.temperature = 1.0f;
  requests.push_back(request);
  request.sampling.raw_logprobs = true;
  requests.push_back(request);
  check_equals_cpu(requests, "bias");
}

TEST(writes_only_what_is_asked_for) {
  Rng rng(7);
  const std::vector<Request> requests = random_requests(rng, 900, 10, 2);
  check_equals_cpu(requests, "no scores", {.scores = false});
  check_equals_cpu(requests, "ranks", {.logprobs = false});
  check_equals_cpu(requests, "logprobs", {.ranks = false});
  check_equals_cpu(requests, "choices", {.logprobs = false, .ranks = false});
  Batch padding = flatten(requests);
  padding.sample_row.assign(padding.num_samples(), -1);
  check_same(choose_on_cuda(padding), Outputs(padding.num_samples()), "padding");
}

TEST(a_choice_depends_on_neither_batch_nor_place) {
  Rng rng(8);
  for (const int vocab_size : {900, kQwenVocab}) {
    const std::vector<Request> requests = random_requests(rng, vocab_size, 8, 0);
    const Outputs together = choose_on_cuda(flatten(requests));
    for (size_t i = 0; i < requests.size(); ++i) {
      const Outputs alone = choose_on_cuda(flatten({requests[i]}));
      CHECK_EQ(alone.chosen[0], together.chosen[i]);
      CHECK_EQ(alone.ranks[0], together.ranks[i]);
      CHECK(std::equal(alone.ids.begin(), alone.ids.end(), &together.ids[i * kWidth]));
      CHECK(std::equal(alone.values.begin(), alone.values.end(), &together.values[i * kWidth]));
    }
  }
}

// A captured graph goes on being right as everything on the device changes.
TEST(a_captured_graph_reads_its_inputs_anew) {
  Rng rng(9);
  constexpr int kNumSamples = 48, kVocab = 5000;
  DeviceCall call(kNumSamples, kVocab, 4096);
  cudaStream_t stream;
  CHECK_CUDA(cudaStreamCreate(&stream));
  cudaGraphExec_t graph = nullptr;
  for (int round = 0; round < 6; ++round) {
    // The stride is part of the parameters, so the longest history is the same each time.
    std::vector<Request> requests = random_requests(rng, kVocab, 8 - round, 3);
    requests[0].history.resize(2100, 1);
    const Batch batch = flatten(requests, kNumSamples, random_padding(rng, 12));
    const ChooseParams params = call.upload(batch);
    if (graph == nullptr) {
      cudaGraph_t captured;
      CHECK_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
      CHECK_CUDA(choose_cuda(params, stream));
      CHECK_CUDA(cudaStreamEndCapture(stream, &captured));
      CHECK_CUDA(cudaGraphInstantiate(&graph, captured, 0));
      CHECK_CUDA(cudaGraphDestroy(captured));
    }
    CHECK_CUDA(cudaGraphLaunch(graph, stream));
    CHECK_CUDA(cudaStreamSynchronize(stream));
    check_same(call.download(), choose_on_cpu(batch), "graph");
  }
  CHECK_CUDA(cudaGraphExecDestroy(graph));
  CHECK_CUDA(cudaStreamDestroy(stream));
}

TEST(drafts_equal_the_cpu_op) {
  Rng rng(10);
  for (const auto& [vocab_size, num_requests] : std::vector<std::pair<int, int>>{{1, 3},
                                                                                 {131, 40},
                                                                                 {3072, 256},
                                                                                 {3072, 1},
                                                                                 {31999, 17},
                                                                                 {32000, 96},
                                                                                 {kQwenVocab, 9},
                                                                                 {170001, 3}}) {
    const Batch batch = flatten(random_requests(rng, vocab_size, num_requests, 0), 0,
                                random_padding(rng, num_requests));
    for (const Ids& token_of : {Ids(), random_tokens(rng, vocab_size)}) {
      const Batch drafts = as_drafts(batch, token_of);
      const Outputs outputs = choose_on_cuda(drafts);
      check_same(outputs, choose_on_cpu(drafts), "drafts");
      const Ids untouched(outputs.ids.size(), -1);
      CHECK(outputs.ids == untouched && outputs.values == untouched);
      CHECK(outputs.ranks == Ids(outputs.ranks.size(), -1));
    }
  }
}

TEST(drafts_under_every_filter_equal_the_cpu_op) {
  Rng rng(11);
  for (const int vocab_size : {3072, 32000}) {
    std::vector<Request> requests;
    for (const float scale : {3.0f, 0.3f, 0.01f}) {
      for (const int top_k : {0, 1, 20, 129, 3070}) {
        for (const float top_p : {1.0f, 0.95f, 0.0f}) {
          for (const float min_p : {0.0f, 0.1f}) {
            Request request = drawn(rng.normals(static_cast<size_t>(vocab_size), scale), 0.8f);
            request.sampling.top_k = top_k;
            request.sampling.top_p = top_p;
            request.sampling.min_p = min_p;
            request.sampling.seed = static_cast<uint64_t>(rng.integer(0, 1 << 30));
            requests.push_back(request);
          }
        }
      }
    }
    const Batch drafts = as_drafts(flatten(requests), random_tokens(rng, vocab_size));
    check_same(choose_on_cuda(drafts), choose_on_cpu(drafts), "filtered drafts");
  }
}

TEST(drafts_over_the_whole_vocabulary_are_choices) {
  Rng rng(12);
  for (const int vocab_size : {601, 9000}) {
    std::vector<Request> requests = random_requests(rng, vocab_size, 40, 0);
    for (Request& request : requests) request = plain(std::move(request));
    const Batch batch = flatten(requests);
    const Outputs chosen = choose_on_cuda(batch);
    check_same(choose_on_cuda(as_drafts(batch, {})), chosen, "no table");
    Ids same;
    for (int id = 0; id < vocab_size; ++id) same.push_back(id);
    check_same(choose_on_cuda(as_drafts(batch, same)), chosen, "the same ids");
  }
}

TEST(a_table_of_tokens_is_for_drafts_alone) {
  Rng rng(13);
  Batch batch = flatten(random_requests(rng, 40, 2, 0));
  batch.token_of = random_tokens(rng, 40);
  DeviceCall call(batch.num_samples(), batch.vocab_size, 4096);
  const ChooseParams params = call.upload(batch);
  CHECK_EQ(choose_cuda(params, nullptr), static_cast<int>(cudaErrorInvalidValue));
  check_same(call.download(), Outputs(batch.num_samples()), "refused");
}
