// The ops of trees of drafts against their CPU forms, exactly.

#include "kernels/drafts/draft_tree.h"

#include <cstring>
#include <limits>
#include <numeric>

#include "cuda/cuda_testing.h"
#include "kernels/draft_rows_testing.h"

using namespace openspec;
using namespace openspec::testing;

namespace {

NeedsDevice needs_device;

using Ids = std::vector<int32_t>;
using Floats = std::vector<float>;

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// --- The best drafts of a row ------------------------------------------------------------------

std::vector<SamplingParams> all_sampling() {
  struct Parameters {
    float temperature, top_p, min_p;
    int32_t top_k;
  };
  std::vector<SamplingParams> all;
  for (const Parameters& p :
       {Parameters{0.0f, 1.0f, 0.0f, 0}, Parameters{1.0f, 1.0f, 0.0f, 0},
        Parameters{0.6f, 0.95f, 0.0f, 20}, Parameters{0.7f, 0.9f, 0.0f, 0},
        Parameters{1.5f, 1.0f, 0.05f, 0}, Parameters{0.9f, 1.0f, 0.0f, 3},
        Parameters{1.0f, 0.99999f, 0.0f, 0}, Parameters{1.0f, 0.8f, 0.01f, 200},
        Parameters{0.3f, 0.0f, 0.0f, 0}, Parameters{5.0f, 1.0f, 0.0f, 5000},
        Parameters{0.0f, 0.5f, 0.1f, 2}, Parameters{1.0f, 1.0f, 0.9f, 0}}) {
    SamplingParams sampling;
    sampling.temperature = p.temperature;
    sampling.top_p = p.top_p;
    sampling.min_p = p.min_p;
    sampling.top_k = p.top_k;
    sampling.seed = 77 * all.size() + (uint64_t{5} << 40);
    // None of these counts for drafts.
    sampling.presence_penalty = 1.0f;
    sampling.num_bias = 9;
    sampling.min_tokens = 100;
    sampling.num_stop_ids = 3;
    sampling.num_logprobs = 4;
    all.push_back(sampling);
  }
  return all;
}

enum class Logits { kNormal, kFewValues, kAbsurd, kEqual, kMostlyOut, kFewColumns };

Floats random_logits(Rng& rng, size_t count, size_t vocab_size, Logits kind) {
  Floats logits = rng.normals(count, 3.0f);
  for (size_t i = 0; i < count; ++i) {
    float& logit = logits[i];
    // As of a vocabulary that is mostly unused: a few groups have all that counts.
    if (kind == Logits::kFewColumns && i % vocab_size >= vocab_size / 37) logit = -25.0f;
    const int dice = rng.integer(0, 15);
    if (kind == Logits::kFewValues) logit = std::round(logit);
    if (kind == Logits::kEqual) logit = 1.25f;
    if (kind == Logits::kMostlyOut && dice > 0) logit = -kInfinity;
    if (kind != Logits::kAbsurd) continue;
    if (dice == 0) logit = std::numeric_limits<float>::quiet_NaN();
    if (dice == 1) logit = -kInfinity;
    if (dice == 2 && rng.integer(0, 40) == 0) logit = kInfinity;
    if (dice == 3) logit *= -0.0f;
  }
  return logits;
}

/// Samples in no order, among them padding; the rows' sequences have all kinds of parameters.
void check_top_drafts(Rng& rng, int vocab_size, int top_k, Logits kind, bool has_table,
                      bool ignores_filters = false) {
  const std::vector<SamplingParams> sampling = all_sampling();
  const int num_seqs = static_cast<int>(sampling.size()), num_rows = num_seqs + 3;
  Ids row_position, row_span, span_seq, sample_row, token_of;
  for (int i = 0; i < num_rows; ++i) {
    row_position.push_back(rng.integer(0, 5000));
    row_span.push_back(i < num_seqs ? i : rng.integer(0, num_seqs - 1));
    sample_row.push_back((i * 11) % num_rows);
  }
  for (int i = 0; i < num_seqs; ++i) span_seq.push_back((i * 5) % num_seqs);
  for (const int at : {3, num_rows - 1}) sample_row[static_cast<size_t>(at)] = -1;
  for (int32_t i = 0; has_table && i < vocab_size; ++i) token_of.push_back(3 * i + 1);
  const auto samples = sample_row.size();
  const Floats logits = random_logits(rng, samples * static_cast<size_t>(vocab_size),
                                      static_cast<size_t>(vocab_size), kind);

  const auto count = samples * static_cast<size_t>(top_k);
  Ids tokens(count);
  Floats scores(count);
  std::memset(tokens.data(), 0xff, count * 4);
  std::memset(scores.data(), 0xff, count * 4);
  std::vector<std::byte> workspace(top_drafts_workspace_bytes_cpu(2, vocab_size));
  TopDraftsParams params = {.rows = {.num_rows = num_rows,
                                     .num_spans = num_seqs,
                                     .row_position = row_position.data(),
                                     .row_span = row_span.data(),
                                     .span_seq = span_seq.data()},
                            .sample_row = sample_row.data(),
                            .num_samples = num_rows,
                            .logits = logits.data(),
                            .vocab_size = vocab_size,
                            .token_of = has_table ? token_of.data() : nullptr,
                            .sampling = sampling.data(),
                            .ignores_filters = ignores_filters,
                            .top_k = top_k,
                            .tokens = tokens.data(),
                            .scores = scores.data(),
                            .workspace = workspace.data()};
  ThreadPool pool(2);
  top_drafts_cpu({.pool = &pool}, params);

  const DeviceBuffer device_position(row_position), device_span(row_span), device_seq(span_seq),
      device_row(sample_row), device_logits(logits), device_table(token_of),
      device_sampling(sampling), device_tokens(count * 4), device_scores(count * 4),
      device_workspace(top_drafts_workspace_bytes_cuda(num_rows, vocab_size));
  params.rows.row_position = device_position.as<int32_t>();
  params.rows.row_span = device_span.as<int32_t>();
  params.rows.span_seq = device_seq.as<int32_t>();
  params.sample_row = device_row.as<int32_t>();
  params.logits = device_logits.as<float>();
  params.token_of = has_table ? device_table.as<int32_t>() : nullptr;
  params.sampling = device_sampling.as<SamplingParams>();
  params.tokens = device_tokens.as<int32_t>();
  params.scores = device_scores.as<float>();
  params.workspace = device_workspace.data();
  CHECK_CUDA(top_drafts_cuda(params, nullptr));
  CHECK(device_tokens.guard_is_whole() && device_scores.guard_is_whole() &&
        device_workspace.guard_is_whole());
  const Ids found = device_tokens.download<int32_t>();
  const Floats found_scores = device_scores.download<float>();
  for (size_t i = 0; i < count; ++i) {
    const int32_t row = sample_row[i / static_cast<size_t>(top_k)];
    CHECK_EQ(found[i], tokens[i]);
    if (row < 0) {
      CHECK_EQ(found[i], -1);
      CHECK(std::isnan(found_scores[i]));
    } else {
      CHECK_EQ(found_scores[i], scores[i]);
    }
  }
}

// --- Trees -------------------------------------------------------------------------------------

/// The arrays of trees in the making, begun as rubbish.
struct TreeArrays {
  TreeArrays(const TreeShape& shape, int num_trees, int max_drafts)
      : shape(shape), num_trees(static_cast<size_t>(num_trees)) {
    const size_t nodes = this->num_trees * static_cast<size_t>(shape.num_nodes());
    for (Ids* array : {&token, &parent}) array->assign(nodes, -9);
    score.assign(nodes, 9.0f);
    row_node.assign(this->num_trees * static_cast<size_t>(shape.num_rows()), -9);
    drafts.assign(this->num_trees * static_cast<size_t>(max_drafts), -9);
    parents = drafts;
    scores.assign(drafts.size(), 9.0f);
    num_drafts.assign(this->num_trees, -9);
    order.assign(static_cast<size_t>(shape.num_nodes()), -9);
  }
  DraftTrees trees() { return {shape, token.data(), parent.data(), score.data(), row_node.data()}; }
  TreeShape shape;
  size_t num_trees;
  Ids token, parent, row_node, drafts, parents, num_drafts, order;
  Floats score, scores;
};

/// The same on the device.
struct DeviceTrees {
  explicit DeviceTrees(TreeArrays& from)
      : shape(from.shape),
        token(from.token),
        parent(from.parent),
        row_node(from.row_node),
        drafts(from.drafts),
        parents(from.parents),
        num_drafts(from.num_drafts),
        score(from.score),
        scores(from.scores) {}
  DraftTrees trees() const {
    return {shape, token.as<int32_t>(), parent.as<int32_t>(), score.as<float>(),
            row_node.as<int32_t>()};
  }
  void check_equal(const TreeArrays& expected) const {
    CHECK(token.download<int32_t>() == expected.token);
    CHECK(parent.download<int32_t>() == expected.parent);
    CHECK(score.download<float>() == expected.score);
    CHECK(row_node.download<int32_t>() == expected.row_node);
    CHECK(drafts.download<int32_t>() == expected.drafts);
    CHECK(parents.download<int32_t>() == expected.parents);
    CHECK(scores.download<float>() == expected.scores);
    CHECK(num_drafts.download<int32_t>() == expected.num_drafts);
    for (const DeviceBuffer* buffer :
         {&token, &parent, &row_node, &drafts, &parents, &num_drafts, &score, &scores}) {
      CHECK(buffer->guard_is_whole());
    }
  }
  TreeShape shape;
  DeviceBuffer token, parent, row_node, drafts, parents, num_drafts, score, scores;
};

/// A DraftBatch's arrays on the device.
struct DeviceRows {
  explicit DeviceRows(const DraftBatch& batch)
      : ints{DeviceBuffer(batch.row_token),   DeviceBuffer(batch.row_position),
             DeviceBuffer(batch.row_span),    DeviceBuffer(batch.row_parent),
             DeviceBuffer(batch.source),      DeviceBuffer(batch.span_begin),
             DeviceBuffer(batch.span_kv_len), DeviceBuffer(batch.span_seq)},
        kv_slot(batch.row_kv_slot),
        num_rows(static_cast<int>(batch.row_token.size())),
        num_spans(static_cast<int>(batch.span_seq.size())) {}
  DraftRows rows() const {
    const auto at = [&](size_t i) { return ints[i].as<int32_t>(); };
    return {.num_rows = num_rows,
            .num_spans = num_spans,
            .row_token = at(0),
            .row_position = at(1),
            .row_span = at(2),
            .row_parent = at(3),
            .source = at(4),
            .row_kv_slot = kv_slot.as<int64_t>(),
            .span_begin = at(5),
            .span_kv_len = at(6),
            .span_seq = at(7)};
  }
  void check_equal(const DraftBatch& batch) const {
    const Ids* expected[] = {&batch.row_token,   &batch.row_position, &batch.row_span,
                             &batch.row_parent,  &batch.source,       &batch.span_begin,
                             &batch.span_kv_len, &batch.span_seq};
    for (size_t i = 0; i < 8; ++i) {
      CHECK(ints[i].download<int32_t>() == *expected[i]);
      CHECK(ints[i].guard_is_whole());
    }
    CHECK(kv_slot.download<int64_t>() == batch.row_kv_slot);
    CHECK(kv_slot.guard_is_whole());
  }
  const DeviceBuffer ints[8];
  const DeviceBuffer kv_slot;
  int num_rows, num_spans;
};

/// Grows trees for about two thirds of the sequences, level by level, from made-up best drafts.
void check_trees(Rng& rng, const TreeShape& shape, int num_seqs) {
  constexpr int kSlots = 120, kPageSize = 16;
  const int max_drafts = std::min(shape.num_nodes(), 20);
  DraftTable table(kSlots, 768, kPageSize);
  for (int slot = 0; slot < kSlots; ++slot) {
    table.set(slot, Ids(static_cast<size_t>(rng.integer(2, 500)), 1));
  }
  Ids seq, num_wanted;
  int num_trees = 0;
  for (int i = 0; i < num_seqs; ++i) {
    seq.push_back((i * 7) % kSlots);
    num_wanted.push_back(rng.integer(0, 2) == 0 ? 0 : rng.integer(1, max_drafts + 3));
    num_trees += num_wanted.back() > 0;
  }
  TreeArrays trees(shape, num_seqs, max_drafts);
  const DeviceTrees device_trees(trees);
  const DeviceBuffer device_tokens(table.num_tokens), device_pages(table.pages), device_seq(seq),
      device_wanted(num_wanted);
  TableView device_table = table.view();
  device_table.num_tokens = device_tokens.as<int32_t>();
  device_table.pages.pages = device_pages.as<int32_t>();

  for (int level = 1; level <= shape.depth; ++level) {
    Ids tokens;
    Floats scores;
    for (int row = 0; row < num_trees * (level == 1 ? 1 : shape.top_k); ++row) {
      float score = 0.0f;
      for (int i = 0; i < shape.top_k; ++i) {
        // Few values, so that there are equal scores; at times none is left.
        score -= 0.25f * static_cast<float>(rng.integer(0, 3));
        if (rng.integer(0, 25) == 0) score = -kInfinity;
        tokens.push_back(rng.integer(0, 100000));
        scores.push_back(score);
      }
    }
    const int num_rows = num_seqs * level * shape.top_k;
    DraftBatch batch(num_rows, num_seqs);
    Ids parent_row(static_cast<size_t>(num_rows), 99),
        frontier_row(static_cast<size_t>(num_seqs * shape.top_k), 99);
    const DeviceRows device_rows(batch);
    const DeviceBuffer device_parent(parent_row), device_frontier(frontier_row),
        device_best(tokens), device_scores(scores);
    GrowTreesParams params = {.table = table.view(),
                              .seq = seq.data(),
                              .num_wanted = num_wanted.data(),
                              .num_seqs = num_seqs,
                              .level = level,
                              .page_size = kPageSize,
                              .tokens = tokens.data(),
                              .scores = scores.data(),
                              .trees = trees.trees(),
                              .out = batch.rows(),
                              .parent_row = parent_row.data(),
                              .frontier_row = frontier_row.data()};
    grow_trees_cpu({}, params);
    params.table = device_table;
    params.seq = device_seq.as<int32_t>();
    params.num_wanted = device_wanted.as<int32_t>();
    params.tokens = device_best.as<int32_t>();
    params.scores = device_scores.as<float>();
    params.trees = device_trees.trees();
    params.out = device_rows.rows();
    params.parent_row = device_parent.as<int32_t>();
    params.frontier_row = device_frontier.as<int32_t>();
    CHECK_CUDA(grow_trees_cuda(params, nullptr));
    device_rows.check_equal(batch);
    CHECK(device_parent.download<int32_t>() == parent_row);
    CHECK(device_frontier.download<int32_t>() == frontier_row);
    CHECK(device_parent.guard_is_whole() && device_frontier.guard_is_whole());
  }
  PickDraftsParams params = {.trees = trees.trees(),
                             .num_wanted = num_wanted.data(),
                             .num_seqs = num_seqs,
                             .max_drafts = max_drafts,
                             .order = trees.order.data(),
                             .drafts = trees.drafts.data(),
                             .parents = trees.parents.data(),
                             .scores = trees.scores.data(),
                             .num_drafts = trees.num_drafts.data()};
  pick_drafts_cpu({}, params);
  params.trees = device_trees.trees();
  params.num_wanted = device_wanted.as<int32_t>();
  params.drafts = device_trees.drafts.as<int32_t>();
  params.parents = device_trees.parents.as<int32_t>();
  params.scores = device_trees.scores.as<float>();
  params.num_drafts = device_trees.num_drafts.as<int32_t>();
  CHECK_CUDA(pick_drafts_cuda(params, nullptr));
  device_trees.check_equal(trees);
}

}  // namespace

TEST(the_best_drafts_equal_the_cpus) {
  Rng rng(1);
  for (const int vocab_size : {16, 61, 129, 4099, 32000}) {
    for (const Logits kind : {Logits::kNormal, Logits::kFewValues, Logits::kAbsurd, Logits::kEqual,
                              Logits::kMostlyOut}) {
      for (const int top_k : {1, 4, 10, 16, kMaxTopDrafts}) {
        if (top_k > vocab_size) continue;
        check_top_drafts(rng, vocab_size, top_k, kind, top_k % 4 == 0);
        if (kind == Logits::kNormal) check_top_drafts(rng, vocab_size, top_k, kind, false, true);
      }
    }
  }
}

TEST(the_best_drafts_of_long_rows_equal_the_cpus) {
  Rng rng(2);
  for (const int vocab_size : {151936, 200003}) {
    for (const Logits kind : {Logits::kNormal, Logits::kFewValues, Logits::kFewColumns}) {
      for (const int top_k : {4, kMaxTopDrafts}) {
        check_top_drafts(rng, vocab_size, top_k, kind, false);
      }
    }
  }
}

TEST(what_top_drafts_cannot_do_is_refused) {
  CHECK_EQ(top_drafts_cuda({.rows = {}, .num_samples = 1, .vocab_size = 3, .top_k = 4}, nullptr),
           static_cast<int>(cudaErrorInvalidValue));
  CHECK_EQ(
      top_drafts_cuda({.rows = {}, .num_samples = 1, .vocab_size = 300, .top_k = kMaxTopDrafts + 1},
                      nullptr),
      static_cast<int>(cudaErrorInvalidValue));
}

TEST(trees_equal_the_cpus) {
  Rng rng(3);
  for (const TreeShape shape : {TreeShape{1, 3}, TreeShape{2, 2}, TreeShape{3, 1}, TreeShape{5, 4},
                                TreeShape{8, 10}, TreeShape{4, 16}}) {
    for (const int num_seqs : {1, 2, 7, 64, 300}) {
      if (num_seqs * shape.num_nodes() < 100000) check_trees(rng, shape, num_seqs);
    }
  }
}
