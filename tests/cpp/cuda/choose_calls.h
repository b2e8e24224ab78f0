#pragma once

/// Calls of `choose` on the GPU and on the CPU with the same inputs.

#include <cstring>
#include <memory>
#include <sstream>

#include "cuda/cuda_testing.h"
#include "kernels/choose_testing.h"

namespace openspec::testing {

using Ids = std::vector<int32_t>;
inline constexpr size_t kWidth = 1 + kMaxLogprobs;

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
  bool has_own_noise = false;
  Ids token_of;  // or empty
  DrawnBatch drawn{{}};
  MaskBatch masks;

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

inline Batch flatten(const std::vector<Request>& requests, int num_samples = 0,
                     const std::vector<bool>& is_padding = {}, const Ids& drawn_token_of = {}) {
  Batch batch;
  batch.drawn = DrawnBatch(requests, drawn_token_of);
  batch.vocab_size = static_cast<int>(requests[0].logits[0].size());
  const auto pad = [&] {
    batch.sample_row.push_back(-1);
    batch.score_token.push_back(0);
    batch.masks.add_none();
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
    p.bad_words = put(request.flat_bad_words());
    p.num_bad_words = static_cast<int32_t>(request.bad_words.size());
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
      batch.masks.add(request, row);
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

inline ChooseParams params_of(const Batch& batch, const Asked& asked) {
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
  params.has_own_noise = batch.has_own_noise;
  if (!batch.token_of.empty()) params.token_of = batch.token_of.data();
  if (batch.is_draft) {
    params.rows.row_token = params.rows.row_parent = nullptr;
    return params;
  }
  params.drafts = batch.drawn.view();
  params.row_masks = batch.masks.words.data();
  params.sample_mask = batch.masks.sample_mask.data();
  params.tokens = batch.tokens.data();
  params.tokens_stride = static_cast<int64_t>(batch.stride);
  params.num_tokens = batch.num_tokens.data();
  params.prompt_len = batch.prompt_len.data();
  return params;
}

inline void move_pointers(std::vector<SamplingParams>& sampling, const int32_t* ids,
                          const float* values) {
  for (SamplingParams& p : sampling) {
    p.stop_ids = moved(p.stop_ids, ids);
    p.bias_ids = moved(p.bias_ids, ids);
    p.allowed_ids = moved(p.allowed_ids, ids);
    p.bad_words = moved(p.bad_words, ids);
    p.bias_values = moved(p.bias_values, values);
  }
}

/// The CPU op on each sample that is not padding.
inline Outputs choose_on_cpu(Batch batch, const Asked& asked = {}) {
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
    compact.masks.sample_mask[at] = batch.masks.sample_mask[i];
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
  explicit DeviceCall(const Batch& batch)
      : DeviceCall(batch.num_samples(), batch.vocab_size,
                   std::max(batch.tokens.size() / 64,
                            batch.ids.size() + batch.row_token.size() + batch.num_samples()) +
                       1) {}
  DeviceCall(size_t num_samples, int vocab_size, size_t capacity)
      : num_samples_(num_samples),
        logits_(num_samples * static_cast<size_t>(vocab_size) * 4),
        sampling_(capacity * sizeof(SamplingParams)),
        ids_(capacity * 4),
        values_(capacity * 4),
        tokens_(capacity * 64 * 4),
        token_of_(static_cast<size_t>(vocab_size) * 4),
        numbers_(capacity * 9 * 4),
        mask_words_(num_samples * ((static_cast<size_t>(vocab_size) + 31) / 32) * 4),
        sample_mask_(num_samples * 4),
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
    CHECK_LE(batch.ids.size() * sizeof(int32_t), ids_.bytes());
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
    if (params.drafts.logits.values != nullptr) upload_drafts(batch.drawn, params.drafts);
    if (params.sample_mask != nullptr) {
      CHECK_LE(batch.masks.words.size() * sizeof(int32_t), mask_words_.bytes());
      mask_words_.upload(batch.masks.words);
      sample_mask_.upload(batch.masks.sample_mask);
      params.row_masks = mask_words_.as<int32_t>();
      params.sample_mask = sample_mask_.as<int32_t>();
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
  /// `keeps_logits`: they are those of the batch.
  Outputs download(bool keeps_logits = true) const {
    Outputs outputs(num_samples_);
    outputs.chosen = chosen_.download<int32_t>();  // waits
    outputs.ids = logprob_ids_.download<int32_t>();
    outputs.ranks = ranks_.download<int32_t>();
    std::memcpy(outputs.values.data(), logprobs_, num_samples_ * kWidth * 4);
    for (const DeviceBuffer* buffer : {&logits_, &chosen_, &logprob_ids_, &ranks_, &workspace_}) {
      CHECK(buffer->guard_is_whole());
    }
    if (!keeps_logits) return outputs;
    const std::vector<float> logits = logits_.download<float>();
    CHECK(std::memcmp(logits.data(), logits_before_.data(), logits.size() * 4) == 0);
    return outputs;
  }

 private:
  void upload_drafts(const DrawnBatch& drawn, DrawnDrafts& drafts) {
    const Ids* const lists[] = {&drawn.tokens, &drawn.counts, &drawn.row, &drawn.column_of};
    const int32_t** const pointers[] = {&drafts.tokens, &drafts.counts, &drafts.logits.row,
                                        &drafts.logits.column_of};
    for (size_t i = 0; i < 4; ++i) {
      if (*pointers[i] == nullptr) continue;
      DeviceBuffer& buffer =
          *(draft_ids_[i] = std::make_unique<DeviceBuffer>(lists[i]->size() * 4));
      buffer.upload(*lists[i]);
      *pointers[i] = buffer.as<int32_t>();
    }
    draft_logits_ = std::make_unique<DeviceBuffer>(drawn.values.size() * 4);
    draft_logits_->upload(drawn.values);
    drafts.logits.values = draft_logits_->as<float>();
  }

  const size_t num_samples_;
  DeviceBuffer logits_, sampling_, ids_, values_, tokens_, token_of_, numbers_, mask_words_,
      sample_mask_, chosen_, logprob_ids_, ranks_, workspace_;
  const size_t capacity_;
  float* logprobs_ = nullptr;
  std::unique_ptr<DeviceBuffer> draft_ids_[4], draft_logits_;
  std::vector<float> logits_before_;
};

/// Names the first difference rather than that there is one.
inline void check_same(const Outputs& found, const Outputs& expected, const char* what) {
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
inline Outputs choose_on_cuda(const Batch& batch, const Asked& asked = {}) {
  DeviceCall call(batch);
  const ChooseParams params = call.upload(batch, asked);
  CHECK_CUDA(choose_cuda(params, nullptr));
  const Outputs outputs = call.download();
  call.poison_outputs();
  CHECK_CUDA(choose_cuda(params, nullptr));
  check_same(call.download(), outputs, "second call");
  return outputs;
}

}  // namespace openspec::testing
