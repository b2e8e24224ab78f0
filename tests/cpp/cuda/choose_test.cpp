#include "kernels/choose/choose.h"

#include <memory>

#include "cuda/choose_calls.h"
#include "cuda/exchange_testing.h"

using namespace openspec;
using namespace openspec::testing;

namespace {

NeedsDevice needs_device;

constexpr int kQwenVocab = 151936;

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
  const int num_said = std::min(9, vocab_size);  // ids of repetitive texts
  for (int i = one_in(3) ? rng.integer(1, one_in(4) ? 600 : 20) : 0; i > 0; --i) {
    request.bad_words.emplace_back();
    for (int length = rng.integer(1, 3); length > 0; --length) {
      request.bad_words.back().push_back(one_in(4) ? id() : rng.integer(0, num_said - 1));
    }
  }
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
  if (one_in(4)) add_random_masks(rng, request);
  if (one_in(4)) {
    request.mask_ids.resize(static_cast<size_t>(request.num_rows()));
    for (Ids& ids : request.mask_ids) {
      if (one_in(3)) ids = {kHeldMask};
    }
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

/// Ranks that have some columns of the logits each, and are dealt the rows: what every rank then
/// has of all of them.
std::vector<Outputs> choose_on_ranks(const Batch& batch, int num_ranks) {
  const auto n = static_cast<int>(batch.num_samples());
  const size_t width = static_cast<size_t>(batch.vocab_size);
  const Ranks ranks(num_ranks, {.slot = 4});
  const std::vector<device::Stream> streams(static_cast<size_t>(num_ranks));
  std::vector<std::unique_ptr<DeviceCall>> calls;
  std::vector<ChooseParams> chosen;
  ShareColumnsParams columns = {.num_rows = n, .deals_rows = true};
  ShareRowsParams rows = {.num_rows = n};
  columns.row_bytes = static_cast<int64_t>(width * sizeof(float));
  std::vector<InputRange> own;
  for (int rank = 0; rank < num_ranks; ++rank) {
    calls.push_back(std::make_unique<DeviceCall>(batch));
    chosen.push_back(calls.back()->upload(batch));
    const ChooseParams& params = chosen.back();
    own.push_back({batch.vocab_size / 32 * rank / num_ranks * 32,
                   batch.vocab_size / 32 * (rank + 1) / num_ranks * 32});
    std::vector<float> logits(batch.logits.size(), kInfinity);  // which nobody may choose
    for (size_t at = 0; at < logits.size(); ++at) {
      const auto column = static_cast<int>(at % width);
      if (own.back().begin <= column && column < own.back().end) logits[at] = batch.logits[at];
    }
    columns.rows[rank] = const_cast<float*>(params.logits);
    CHECK_CUDA(cudaMemcpy(columns.rows[rank], logits.data(), logits.size() * sizeof(float),
                          cudaMemcpyHostToDevice));
    rows.buffers[0].words[rank] = params.chosen;
    rows.buffers[1].words[rank] = params.ranks;
    rows.buffers[2].words[rank] = params.logprob_ids;
    rows.buffers[3].words[rank] = params.logprobs;
  }
  rows.buffers[0].row_words = rows.buffers[1].row_words = 1;
  rows.buffers[2].row_words = rows.buffers[3].row_words = static_cast<int>(kWidth);
  // Op by op: on one device a rank's next op could take the room of another's, which it awaits.
  const auto each = [&](const auto& body) {
    for (int rank = 0; rank < num_ranks; ++rank) body(rank, static_cast<size_t>(rank));
    CHECK_CUDA(cudaDeviceSynchronize());
  };
  each([&](int rank, size_t at) {
    columns.exchange = &ranks[rank];
    columns.first_byte = own[at].begin * static_cast<int64_t>(sizeof(float));
    columns.num_bytes = own[at].size() * static_cast<int64_t>(sizeof(float));
    CHECK_CUDA(share_columns_cuda(columns, streams[at].handle()));
  });
  each([&](int rank, size_t at) {
    const RowRange dealt = dealt_rows(num_ranks, rank, n);
    const ChooseParams params = part_of(chosen[at], dealt.first, dealt.count);
    CHECK_CUDA(choose_cuda(params, streams[at].handle()));
  });
  each([&](int rank, size_t at) {
    rows.exchange = &ranks[rank];
    CHECK_CUDA(share_rows_cuda(rows, streams[at].handle()));
  });
  std::vector<Outputs> outputs;
  for (int rank = 0; rank < num_ranks; ++rank) {
    CHECK_EQ(ranks.fault(rank), 0u);
    outputs.push_back(calls[static_cast<size_t>(rank)]->download(/*keeps_logits=*/false));
  }
  return outputs;
}

/// The requests' rows as a drafter's. The lists are to be ignored; who reads them leaves memory.
Batch as_drafts(Batch batch, Ids token_of) {
  batch.is_draft = true;
  batch.token_of = std::move(token_of);
  for (SamplingParams& p : batch.sampling)
    p.num_stop_ids = p.num_bias = p.num_allowed = p.num_bad_words = 1 << 20;
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
  request.bad_words = {};
  request.mask_ids = {};
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

TEST(ranks_choose_the_rows_that_they_are_dealt) {
  Rng rng(21);
  for (const int num_ranks : {1, 2, 4, 8}) {
    const std::vector<Request> requests = random_requests(rng, 4192, 24, 3);
    const Batch batch = flatten(requests, /*num_samples=*/0, random_padding(rng, 60));
    CHECK(are_dealt(static_cast<int>(batch.num_samples())));
    const Outputs expected = choose_on_cpu(batch);
    for (const Outputs& found : choose_on_ranks(batch, num_ranks)) {
      check_same(found, expected, "dealt");
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

TEST(some_samples_of_many) {
  Rng rng(14);
  constexpr int kSamples = 60;
  const Batch batch = as_drafts(
      flatten(random_requests(rng, 3072, kSamples, 0), 0, random_padding(rng, kSamples)), {});
  const Outputs all = choose_on_cuda(batch);
  const Ids list = {31, -1, 5, static_cast<int32_t>(batch.num_samples()) - 1, -1, 0};
  Outputs expected(batch.num_samples());
  for (const int32_t sample : list) {
    if (sample < 0) continue;
    expected.chosen[static_cast<size_t>(sample)] = all.chosen[static_cast<size_t>(sample)];
  }
  DeviceCall call(batch);
  const DeviceBuffer samples(list);
  ChooseParams params = call.upload(batch);
  params.samples = samples.as<int32_t>();
  params.num_samples = static_cast<int>(list.size());
  CHECK_CUDA(choose_cuda(params, nullptr));
  check_same(call.download(), expected, "some samples");
}

TEST(a_table_of_tokens_is_for_drafts_alone) {
  Rng rng(13);
  Batch batch = flatten(random_requests(rng, 40, 2, 0));
  batch.token_of = random_tokens(rng, 40);
  DeviceCall call(batch);
  const ChooseParams params = call.upload(batch);
  CHECK_EQ(choose_cuda(params, nullptr), static_cast<int>(cudaErrorInvalidValue));
  check_same(call.download(), Outputs(batch.num_samples()), "refused");
}
