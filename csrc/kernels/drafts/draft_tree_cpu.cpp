#include <algorithm>
#include <limits>

#include "kernels/drafts/draft_tree.h"

namespace openspec {

namespace {

/// One tree's part of the arrays.
struct Tree {
  Tree(const DraftTrees& trees, int index)
      : shape(trees.shape),
        token(trees.node_token + int64_t{index} * shape.num_nodes()),
        parent(trees.node_parent + int64_t{index} * shape.num_nodes()),
        score(trees.node_score + int64_t{index} * shape.num_nodes()),
        row_node(trees.row_node + int64_t{index} * shape.num_rows()) {}

  bool is_better(int32_t a, int32_t b) const {
    return score[a] > score[b] || (score[a] == score[b] && a < b);
  }
  /// Nodes of the frontier of a level; level 0: the last known token.
  int32_t frontier_node(int level, int i) const {
    return level == 0 ? -1 : row_node[(level - 1) * shape.top_k + i];
  }
  /// A row's parent among the rows of its tree; -1: the last known token.
  int parent_row(int row) const {
    const int level = row / shape.top_k + 1;
    if (level == 1) return -1;
    const int from_frontier = (row_node[row] - shape.first_node(level)) / shape.top_k;
    return (level - 2) * shape.top_k + from_frontier;
  }

  void add_level(int level, const int32_t* tokens, const float* scores);
  void choose_frontier(int level);

  const TreeShape shape;
  int32_t* const token;
  int32_t* const parent;
  float* const score;
  int32_t* const row_node;
};

void Tree::add_level(int level, const int32_t* tokens, const float* scores) {
  const int num_parents = level == 1 ? 1 : shape.top_k;
  int node = shape.first_node(level);
  for (int i = 0; i < num_parents * shape.top_k; ++i, ++node) {
    const int32_t above = frontier_node(level - 1, i / shape.top_k);
    token[node] = tokens[i];
    parent[node] = above;
    score[node] = (above < 0 ? 0.0f : score[above]) + scores[i];
  }
}

void Tree::choose_frontier(int level) {
  const int first = shape.first_node(level), end = shape.first_node(level + 1);
  int32_t* best = row_node + (level - 1) * shape.top_k;
  int count = 0;
  for (int32_t node = first; node < end; ++node) {
    if (count == shape.top_k && !is_better(node, best[count - 1])) continue;
    int at = count < shape.top_k ? count++ : count - 1;
    for (; at > 0 && is_better(node, best[at - 1]); --at) best[at] = best[at - 1];
    best[at] = node;
  }
}

/// The tree's rows of all levels up to `level`, after those of the trees before it.
void lay_out_rows(const GrowTreesParams& params, const Tree& tree, int index, int slot) {
  const TableView& table = params.table;
  const DraftRows& out = params.out;
  const int top_k = tree.shape.top_k;
  const int num_rows = params.level * top_k;
  const int first = index * num_rows, first_before = index * (params.level - 1) * top_k;
  const int num_tokens = table.num_tokens[slot];
  for (int i = 0; i < num_rows; ++i) {
    const int row = first + i;
    const int above = tree.parent_row(i);
    out.row_token[row] = tree.token[tree.row_node[i]];
    out.row_position[row] = num_tokens + i / top_k;
    out.row_span[row] = index;
    out.row_parent[row] = above < 0 ? -1 : first + above;
    out.row_kv_slot[row] = kv_slot_of(table, slot, num_tokens + i, params.page_size);
    out.source[row] = above < 0 ? index : -1;
    params.parent_row[row] = above < 0 ? -1 : first_before + above;
  }
  out.set_span(index, first, num_tokens, slot);
  for (int i = 0; i < top_k; ++i) {
    params.frontier_row[index * top_k + i] = first + num_rows - top_k + i;
  }
}

}  // namespace

void grow_trees_cpu(const ExecContext&, const GrowTreesParams& params) {
  const TreeShape& shape = params.trees.shape;
  const int num_new = shape.top_k * (params.level == 1 ? 1 : shape.top_k);
  int index = 0;
  for (int i = 0; i < params.num_seqs; ++i) {
    if (params.num_wanted[i] == 0) continue;
    Tree tree(params.trees, index);
    const int64_t begin = int64_t{index} * num_new;
    tree.add_level(params.level, params.tokens + begin, params.scores + begin);
    if (params.level < shape.depth) {
      tree.choose_frontier(params.level);
      lay_out_rows(params, tree, index, params.seq[i]);
    }
    ++index;
  }
  if (params.level == shape.depth) return;
  const int num_rows = index * params.level * shape.top_k;
  pad_spans(params.out, num_rows, index);
  pad_rows(params.out, num_rows);
  std::fill(params.parent_row + num_rows, params.parent_row + params.out.num_rows, -1);
  std::fill(params.frontier_row + index * shape.top_k,
            params.frontier_row + params.num_seqs * shape.top_k, -1);
}

void pick_drafts_cpu(const ExecContext&, const PickDraftsParams& params) {
  const int num_nodes = params.trees.shape.num_nodes();
  int index = 0;
  for (int i = 0; i < params.num_seqs; ++i) {
    params.num_drafts[i] = 0;
    if (params.num_wanted[i] == 0) continue;
    const Tree tree(params.trees, index++);
    int32_t* order = params.order;
    for (int node = 0; node < num_nodes; ++node) order[node] = node;
    const int most = std::min({params.num_wanted[i], params.max_drafts, num_nodes});
    std::partial_sort(order, order + most, order + num_nodes,
                      [&](int32_t a, int32_t b) { return tree.is_better(a, b); });
    const int64_t first = int64_t{i} * params.max_drafts;
    int count = 0;
    for (; count < most; ++count) {
      const int32_t node = order[count];
      if (tree.score[node] == -std::numeric_limits<float>::infinity()) break;
      const int32_t* above = std::find(order, order + count, tree.parent[node]);
      params.drafts[first + count] = tree.token[node];
      params.parents[first + count] =
          above == order + count ? -1 : static_cast<int32_t>(above - order);
      params.scores[first + count] = tree.score[node];
    }
    params.num_drafts[i] = count;
  }
}

}  // namespace openspec
