#include "kernels/drafts/draft_tree.h"

#include <algorithm>
#include <map>
#include <numeric>

#include "kernels/choose/choose.h"
#include "kernels/choose/sample_math.h"
#include "kernels/draft_rows_testing.h"

using namespace openspec;
using namespace openspec::testing;

namespace {

using Ids = std::vector<int32_t>;
constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

// --- The best drafts of a row ------------------------------------------------------------------

struct TopDrafts {
  Ids tokens;
  std::vector<float> scores;
};

/// One row per sequence; `token_of` may be empty.
struct Rows {
  int vocab_size = 0;
  std::vector<SamplingParams> sampling;
  std::vector<float> logits;
  Ids token_of;

  RowBatch batch() {
    const int count = static_cast<int>(sampling.size());
    position.resize(sampling.size());
    for (int i = 0; i < count; ++i) position[static_cast<size_t>(i)] = 10 + i;
    row.resize(sampling.size());
    std::iota(row.begin(), row.end(), 0);
    return {.num_rows = count,
            .num_spans = count,
            .row_position = position.data(),
            .row_span = row.data(),
            .span_seq = row.data()};
  }
  Ids position, row;
};

TopDrafts top_drafts_of(Rows& rows, int top_k, int num_threads, bool ignores_filters = false) {
  const auto count = rows.sampling.size() * static_cast<size_t>(top_k);
  TopDrafts result{Ids(count, -7), std::vector<float>(count, 7.0f)};
  std::vector<float> workspace(top_drafts_workspace_bytes_cpu(num_threads, rows.vocab_size) / 4);
  ThreadPool pool(num_threads);
  const RowBatch batch = rows.batch();
  top_drafts_cpu({.pool = &pool},
                 {.rows = batch,
                  .sample_row = rows.row.data(),
                  .num_samples = batch.num_rows,
                  .logits = rows.logits.data(),
                  .vocab_size = rows.vocab_size,
                  .token_of = rows.token_of.empty() ? nullptr : rows.token_of.data(),
                  .sampling = rows.sampling.data(),
                  .ignores_filters = ignores_filters,
                  .top_k = top_k,
                  .tokens = result.tokens.data(),
                  .scores = result.scores.data(),
                  .workspace = workspace.data()});
  return result;
}

Ids chosen_drafts(Rows& rows) {
  Ids chosen(rows.sampling.size(), -7);
  std::vector<float> workspace(choose_workspace_bytes_cpu(1, rows.vocab_size) / 4 + 16);
  ThreadPool pool(1);
  const RowBatch batch = rows.batch();
  choose_cpu({.pool = &pool}, {.rows = batch,
                               .sample_row = rows.row.data(),
                               .num_samples = batch.num_rows,
                               .logits = rows.logits.data(),
                               .vocab_size = rows.vocab_size,
                               .is_draft = true,
                               .token_of = rows.token_of.empty() ? nullptr : rows.token_of.data(),
                               .sampling = rows.sampling.data(),
                               .chosen = chosen.data(),
                               .workspace = workspace.data()});
  return chosen;
}

/// The definition, in doubles.
std::vector<double> values_of(const Rows& rows, size_t row) {
  const SamplingParams& sampling = rows.sampling[row];
  const float* logits = &rows.logits[row * static_cast<size_t>(rows.vocab_size)];
  std::vector<double> values(logits, logits + rows.vocab_size);
  if (sampling.temperature == 0.0f) return values;
  for (size_t i = 0; i < values.size(); ++i) {
    const int32_t token = rows.token_of.empty() ? static_cast<int32_t>(i) : rows.token_of[i];
    values[i] =
        values[i] / static_cast<double>(sampling.temperature) +
        static_cast<double>(sample_math::gumbel(sampling.seed, rows.position[row] + 1, token));
  }
  return values;
}

Rows random_rows(int vocab_size, bool has_table) {
  Rng rng(static_cast<uint64_t>(vocab_size));
  Rows rows{.vocab_size = vocab_size,
            .sampling = {},
            .logits = {},
            .token_of = {},
            .position = {},
            .row = {}};
  for (int i = 0; i < 12; ++i) {
    SamplingParams sampling;
    sampling.temperature = i % 3 == 0 ? 0.0f : 0.4f * static_cast<float>(i % 3);
    sampling.seed = static_cast<uint64_t>(i);
    rows.sampling.push_back(sampling);
    for (float logit : rng.normals(static_cast<size_t>(vocab_size), 3.0f)) {
      rows.logits.push_back(logit);
    }
  }
  for (int32_t i = 0; has_table && i < vocab_size; ++i) rows.token_of.push_back(3 * i + 1);
  return rows;
}

// --- Trees -------------------------------------------------------------------------------------

/// A made-up head: the children of a path of tokens, best first.
struct Child {
  int32_t token;
  float score;
};
std::vector<Child> children_of(const Ids& path, int top_k) {
  uint64_t hash = 1469598103934665603u;
  for (int32_t token : path) hash = (hash ^ static_cast<uint64_t>(token + 1)) * 1099511628211u;
  Rng rng(hash);
  std::vector<Child> children;
  float score = 0.0f;
  for (int i = 0; i < top_k; ++i) {
    // Few values, so that there are equal scores.
    score -= 0.25f * static_cast<float>(rng.integer(i == 0 ? 0 : 1, 4));
    children.push_back(
        {rng.integer(0, 8) * 16 + i, i > 2 && hash % 7 == 0 ? kMinusInfinity : score});
  }
  return children;
}

struct Node {
  Ids path;
  float score = 0.0f;
  int parent = -1, made = 0;
};

/// The definition: nodes in the order in which they are made.
std::vector<Node> all_nodes(const TreeShape& shape) {
  std::vector<Node> nodes;
  const auto better = [&](int a, int b) {
    const float x = nodes[static_cast<size_t>(a)].score, y = nodes[static_cast<size_t>(b)].score;
    return x > y || (x == y && a < b);
  };
  std::vector<int> frontier = {-1};
  for (int level = 1; level <= shape.depth; ++level) {
    std::vector<int> made;
    for (int at : frontier) {
      const Node above = at < 0 ? Node{} : nodes[static_cast<size_t>(at)];
      for (const Child& child : children_of(above.path, shape.top_k)) {
        Node node{above.path, above.score + child.score, at, static_cast<int>(nodes.size())};
        node.path.push_back(child.token);
        made.push_back(node.made);
        nodes.push_back(node);
      }
    }
    std::sort(made.begin(), made.end(), better);
    made.resize(static_cast<size_t>(shape.top_k));
    frontier = made;
  }
  return nodes;
}

/// Runs the ops with the made-up head over two sequences, with one between that wants nothing.
struct Grown {
  explicit Grown(TreeShape shape, Ids wanted, int max_drafts)
      : shape(shape), num_wanted(std::move(wanted)), max_drafts(max_drafts), table(4, 128, 4) {
    table.set(3, {5, 6, 7, 8, 9});
    table.set(0, {1, 2});
    const auto nodes = static_cast<size_t>(2 * shape.num_nodes());
    for (Ids* array : {&node_token, &node_parent}) array->assign(nodes, -9);
    node_score.assign(nodes, 9.0f);
    row_node.assign(static_cast<size_t>(2 * shape.num_rows()), -9);
    const auto drafts = num_wanted.size() * static_cast<size_t>(max_drafts);
    for (Ids* array : {&tokens, &parents}) array->assign(drafts, -9);
    scores.assign(drafts, 9.0f);
    num_drafts.assign(num_wanted.size(), -9);
  }

  DraftTrees trees() {
    return {shape, node_token.data(), node_parent.data(), node_score.data(), row_node.data()};
  }

  void run() {
    std::vector<Ids> frontier = {{}, {}};  // paths, tree by tree
    for (int level = 1; level <= shape.depth; ++level) {
      Ids best;
      std::vector<float> best_scores;
      for (const Ids& path : frontier) {
        for (const Child& child : children_of(path, shape.top_k)) {
          best.push_back(child.token);
          best_scores.push_back(child.score);
        }
      }
      const int num_seqs = static_cast<int>(seq.size());
      DraftBatch batch(num_seqs * level * shape.top_k, num_seqs);
      Ids parent_row(batch.row_token.size(), -9);
      Ids frontier_row(static_cast<size_t>(num_seqs * shape.top_k), -9);
      grow_trees_cpu({}, {.table = table.view(),
                          .seq = seq.data(),
                          .num_wanted = num_wanted.data(),
                          .num_seqs = num_seqs,
                          .level = level,
                          .page_size = 4,
                          .tokens = best.data(),
                          .scores = best_scores.data(),
                          .trees = trees(),
                          .out = batch.rows(),
                          .parent_row = parent_row.data(),
                          .frontier_row = frontier_row.data()});
      if (level < shape.depth) frontier = check_rows(batch, parent_row, frontier_row, level);
    }
    Ids order(static_cast<size_t>(shape.num_nodes()));
    pick_drafts_cpu({}, {.trees = trees(),
                         .num_wanted = num_wanted.data(),
                         .num_seqs = static_cast<int>(seq.size()),
                         .max_drafts = max_drafts,
                         .order = order.data(),
                         .drafts = tokens.data(),
                         .parents = parents.data(),
                         .scores = scores.data(),
                         .num_drafts = num_drafts.data()});
  }

  /// Returns the paths of the frontier, as its rows tell them.
  std::vector<Ids> check_rows(const DraftBatch& batch, const Ids& parent_row,
                              const Ids& frontier_row, int level) {
    const int rows_per_tree = level * shape.top_k;
    CHECK_EQ(batch.span_begin, (Ids{0, rows_per_tree, 2 * rows_per_tree, 2 * rows_per_tree}));
    CHECK_EQ(batch.span_seq, (Ids{3, 0, 0}));
    CHECK_EQ(batch.span_kv_len, (Ids{5, 2, 0}));
    const auto path_of = [&](int row) {
      Ids path;
      for (; row >= 0; row = batch.row_parent[static_cast<size_t>(row)]) {
        path.insert(path.begin(), batch.row_token[static_cast<size_t>(row)]);
      }
      return path;
    };
    for (int row = 0; row < 2 * rows_per_tree; ++row) {
      const auto at = static_cast<size_t>(row);
      const int tree = row / rows_per_tree;
      const int num_tokens = tree == 0 ? 5 : 2;
      const int depth = static_cast<int>(path_of(row).size());
      CHECK_EQ(batch.row_span[at], tree);
      CHECK_EQ(batch.row_position[at], num_tokens - 1 + depth);
      CHECK_EQ(batch.row_kv_slot[at],
               table.kv_slot(tree == 0 ? 3 : 0, num_tokens + row % rows_per_tree));
      CHECK_EQ(batch.source[at], depth > 1 ? -1 : tree);
      const int above = batch.row_parent[at] - tree * rows_per_tree;
      CHECK_EQ(parent_row[at], depth > 1 ? tree * (level - 1) * shape.top_k + above : -1);
    }
    CHECK_EQ(batch.row_span.back(), -1);
    CHECK_EQ(parent_row.back(), -1);
    std::vector<Ids> paths;
    for (size_t i = 0; i < frontier_row.size(); ++i) {
      const bool is_padding = i >= static_cast<size_t>(2 * shape.top_k);
      CHECK_EQ(frontier_row[i] < 0, is_padding);
      if (is_padding) continue;
      paths.push_back(path_of(frontier_row[i]));
      CHECK_EQ(static_cast<int>(paths.back().size()), level);
    }
    return paths;
  }

  TreeShape shape;
  Ids seq = {3, 2, 0}, num_wanted;
  int max_drafts;
  DraftTable table;
  Ids node_token, node_parent, row_node, tokens, parents, num_drafts;
  std::vector<float> node_score, scores;
};

}  // namespace

TEST(the_best_drafts_are_those_of_the_definition) {
  for (const int vocab_size : {5, 61, 1000, 4099}) {
    for (const bool has_table : {false, true}) {
      Rows rows = random_rows(vocab_size, has_table);
      constexpr int kTopK = 5;
      const TopDrafts found = top_drafts_of(rows, kTopK, 1);
      for (size_t row = 0; row < rows.sampling.size(); ++row) {
        const std::vector<double> values = values_of(rows, row);
        Ids order(values.size());
        std::iota(order.begin(), order.end(), 0);
        std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
          return values[static_cast<size_t>(a)] > values[static_cast<size_t>(b)];
        });
        double total = 0.0;
        for (double value : values) total += std::exp(value);
        for (size_t i = 0; i < kTopK; ++i) {
          const int32_t column = order[i];
          CHECK_EQ(found.tokens[row * kTopK + i], has_table ? 3 * column + 1 : column);
          CHECK_NEAR(found.scores[row * kTopK + i],
                     values[static_cast<size_t>(column)] - std::log(total), 1e-4);
        }
      }
    }
  }
}

TEST(the_very_best_draft_is_the_one_that_a_chain_has) {
  Rows rows = random_rows(1000, true);
  const TopDrafts without_filters = top_drafts_of(rows, 4, 1);
  for (size_t i = 0; i < rows.sampling.size(); ++i) {
    if (i % 4 == 1) rows.sampling[i].top_k = 3;
    if (i % 4 == 2) rows.sampling[i].top_p = 0.7f;
    if (i % 4 == 3) rows.sampling[i].min_p = 0.1f;
  }
  const TopDrafts found = top_drafts_of(rows, 4, 1);
  const Ids chosen = chosen_drafts(rows);
  for (size_t i = 0; i < chosen.size(); ++i) CHECK_EQ(found.tokens[4 * i], chosen[i]);
  // Three columns are left, so the fourth is none.
  CHECK_EQ(found.scores[4 * 1 + 3], kMinusInfinity);
  CHECK_GT(found.scores[4 * 1 + 2], kMinusInfinity);
  const TopDrafts ignoring = top_drafts_of(rows, 4, 1, true);
  CHECK(ignoring.tokens == without_filters.tokens && ignoring.scores == without_filters.scores);
}

TEST(the_best_drafts_do_not_depend_on_threads_and_instruction_sets) {
  Rows rows = random_rows(40000, false);
  const TopDrafts expected = top_drafts_of(rows, 10, 1);
  CHECK(top_drafts_of(rows, 10, 3).scores == expected.scores);
  const Isa best = cpu_isa();
  for (const Isa isa : {Isa::kBaseline, Isa::kAvx2, Isa::kAvx512}) {
    if (!has_isa(isa)) continue;
    force_isa(isa);
    const TopDrafts found = top_drafts_of(rows, 10, 1);
    CHECK(found.tokens == expected.tokens && found.scores == expected.scores);
  }
  force_isa(best);
}

TEST(equal_and_absurd_logits) {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  Rows rows{.vocab_size = 4,
            .sampling = {{}, {}, {}},
            .logits = {},
            .token_of = {},
            .position = {},
            .row = {}};
  rows.logits = {2, 3, 3, 2, kNan, kMinusInfinity, 1, kNan, kNan, kNan, kNan, kNan};
  const TopDrafts found = top_drafts_of(rows, 3, 1);
  CHECK_EQ((Ids(found.tokens.begin(), found.tokens.begin() + 4)), (Ids{1, 2, 0, 2}));
  CHECK_EQ(found.scores[3], 0.0f);
  for (size_t i : {4u, 5u, 6u, 7u, 8u}) CHECK_EQ(found.scores[i], kMinusInfinity);
  for (int32_t token : found.tokens) CHECK(token >= 0 && token < 4);
}

TEST(trees_are_those_of_the_definition) {
  for (const TreeShape shape :
       {TreeShape{1, 3}, TreeShape{2, 2}, TreeShape{4, 4}, TreeShape{8, 10}}) {
    const std::vector<Node> nodes = all_nodes(shape);
    CHECK_EQ(static_cast<int>(nodes.size()), shape.num_nodes());
    std::vector<Node> order = nodes;
    std::stable_sort(order.begin(), order.end(),
                     [](const Node& a, const Node& b) { return a.score > b.score; });
    std::erase_if(order, [](const Node& node) { return node.score == kMinusInfinity; });
    Grown grown(shape, {20, 0, 3}, 20);
    grown.run();
    const int num_all = std::min(20, static_cast<int>(order.size()));
    CHECK_EQ(grown.num_drafts, (Ids{num_all, 0, std::min(3, num_all)}));
    for (const size_t first : {0u, 40u}) {
      for (size_t i = 0; i < static_cast<size_t>(grown.num_drafts[first / 20]); ++i) {
        const int32_t parent = grown.parents[first + i];
        CHECK_LT(parent, static_cast<int32_t>(i));
        CHECK_EQ(grown.tokens[first + i], order[i].path.back());
        CHECK_EQ(grown.scores[first + i], order[i].score);
        const int made = parent < 0 ? -1 : order[static_cast<size_t>(parent)].made;
        CHECK_EQ(made, order[i].parent);
      }
    }
    CHECK_EQ(grown.tokens[20], -9);
  }
}
