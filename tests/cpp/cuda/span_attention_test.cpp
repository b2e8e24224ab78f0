#include "kernels/attention/span_attention.h"

#include <algorithm>
#include <functional>

#include "cuda/attention_testing.h"

using namespace openspec;
using namespace openspec::testing;

namespace {

NeedsDevice needs_device;

}  // namespace

TEST(matches_reference_on_ragged_batches) {
  Rng rng(1);
  for (const int group : {1, 2, 3, 4, 5, 8}) {
    const Shape shape = {2 * group, 2};
    std::vector<Sequence> sequences;
    for (const int kv_len : {0, 1, 63, 64, 130, 511, 512, 600}) {
      sequences.push_back(random_sequence(rng, shape, kv_len, rng.integer(1, 9)));
      sequences.push_back(random_sequence(rng, shape, kv_len, rng.integer(2, 20), Form::kBushy));
    }
    check_rows(shape, sequences, run(rng, shape, sequences));
  }
}

TEST(matches_reference_for_page_sizes_and_gaps) {
  Rng rng(2);
  const Shape shape = {8, 2};
  for (const int page_size : {8, 16, 24, 32, 64, 128}) {
    const std::vector<Sequence> sequences = {
        random_sequence(rng, shape, 250, 5), random_sequence(rng, shape, 125, 12, Form::kBushy),
        random_sequence(rng, shape, 0, 1), random_sequence(rng, shape, 700, 16)};
    Layout layout;
    layout.page_size = page_size;
    layout.has_gaps = true;
    check_rows(shape, sequences, run(rng, shape, sequences, layout));
  }
}

TEST(matches_reference_on_prefill_chunks) {
  Rng rng(3);
  for (const int group : {1, 4, 5, 8}) {
    const Shape shape = {group, 1};
    const std::vector<Sequence> sequences = {random_sequence(rng, shape, 0, 550),
                                             random_sequence(rng, shape, 530, 300),
                                             random_sequence(rng, shape, 40, 3, Form::kBushy)};
    check_rows(shape, sequences, run(rng, shape, sequences), 13);
  }
}

// One row, few rows, many rows, in whatever batch and layout: every row has the same bits.
TEST(chunks_and_batches_are_invariant_bit_for_bit) {
  Rng rng(4);
  for (const int group : {4, 5}) {
    const Shape shape = {2 * group, 2};
    constexpr int kTokens = 1100;
    const Sequence whole = random_sequence(rng, shape, 0, kTokens);
    const Bits expected = run(rng, shape, {whole});  // wide tiles
    check_rows(shape, {whole}, expected, 97);
    for (const int chunk : {7, 16, 64, 100, 300}) {
      for (int first = 0; first < kTokens;) {
        const int count = std::min(chunk, kTokens - first);
        Layout layout;
        layout.page_size = std::vector<int>{8, 16, 32, 64}[static_cast<size_t>(rng.integer(0, 3))];
        layout.spare_context = rng.integer(0, 5000);
        layout.spare_rows = rng.integer(0, 300);
        std::vector<Sequence> batch;
        size_t at = 0;
        for (int i = rng.integer(0, 2); i > 0; --i) {
          batch.push_back(random_sequence(rng, shape, rng.integer(0, 300), rng.integer(1, 6),
                                          i == 2 ? Form::kBushy : Form::kChain));
          at += static_cast<size_t>(batch.back().num_rows());
        }
        batch.push_back(chunk_of(shape, whole, first, count));
        if (rng.integer(0, 1) == 1) batch.push_back(random_sequence(rng, shape, 10, 3));
        const Bits out = run(rng, shape, batch, layout);
        check_same_rows(shape, out, at, expected, static_cast<size_t>(first),
                        static_cast<size_t>(count));
        // Small chunks are sampled.
        first += chunk < 20 ? std::max(count, rng.integer(1, 60)) : count;
      }
    }
    for (int trial = 0; trial < 60; ++trial) {
      const int num_rows = trial % 3 == 0 ? 1 : rng.integer(1, 17);
      const int first = rng.integer(0, kTokens - num_rows);
      const Bits out = run(rng, shape, {chunk_of(shape, whole, first, num_rows)});
      check_same_rows(shape, out, 0, expected, static_cast<size_t>(first),
                      static_cast<size_t>(num_rows));
    }
  }
}

// Enough sequences that tiles are cut and merged in other ways than alone, and in the end more
// tiles than two for each CTA.
TEST(large_batches_are_invariant_bit_for_bit) {
  Rng rng(5);
  const Shape shape = {16, 4};
  for (const int num_sequences : {5, 24, 90, 160}) {
    std::vector<Sequence> sequences;
    for (int i = 0; i < num_sequences; ++i) {
      const bool is_long = i % 11 == 3, is_one_row = i % 2 == 0 || num_sequences > 90;
      sequences.push_back(random_sequence(rng, shape, rng.integer(0, is_long ? 3000 : 700),
                                          rng.integer(1, is_one_row ? 1 : 16)));
    }
    const Bits together = run(rng, shape, sequences);
    size_t at = 0;
    Errors errors;
    for (size_t i = 0; i < sequences.size(); ++i) {
      const Sequence& s = sequences[i];
      if (i % 4 == 3) {
        const Bits alone = run(rng, shape, {s});
        check_same_rows(shape, together, at, alone, 0, static_cast<size_t>(s.num_rows()));
        add_row_errors(shape, s, s.num_rows() - 1, alone, static_cast<size_t>(s.num_rows()) - 1,
                       errors);
      }
      at += static_cast<size_t>(s.num_rows());
    }
    errors.check();
  }
}

// Every path of a tree gives the bits of the chain with the same tokens.
TEST(trees_equal_chains_bit_for_bit) {
  Rng rng(6);
  for (const int group : {4, 5}) {
    const Shape shape = {group, 1};
    for (const int kv_len : {0, 5, 63, 64, 100, 505, 512, 900}) {
      const Form form = kv_len % 2 == 0 ? Form::kBushy : Form::kDeep;
      const int num_rows = kv_len == 505 ? 256 : 60;
      const Sequence tree = random_sequence(rng, shape, kv_len, num_rows, form);
      const Bits out = run(rng, shape, {tree, random_sequence(rng, shape, 30, 2)});
      for (int row = 0; row < num_rows; row += num_rows / 20) {
        const Sequence path = path_of(shape, tree, row);
        const Bits alone = run(rng, shape, {path});
        check_same_rows(shape, out, static_cast<size_t>(row), alone,
                        static_cast<size_t>(path.num_rows() - 1), 1);
      }
    }
  }
}

// A tree of so many rows and heads that its partial results exceed the workspace.
TEST(trees_beyond_the_workspace_equal_chains_bit_for_bit) {
  Rng rng(7);
  const Shape shape = {64, 8};
  const Sequence tree = random_sequence(rng, shape, 3000, 256, Form::kDeep);
  const Bits out = run(rng, shape, {tree});
  for (int row = 0; row < 256; row += 51) {
    const Sequence path = path_of(shape, tree, row);
    const Bits alone = run(rng, shape, {path});
    check_same_rows(shape, out, static_cast<size_t>(row), alone,
                    static_cast<size_t>(path.num_rows() - 1), 1);
  }
}

// Large scores: one key takes nearly all the weight, and maxima differ widely between blocks.
TEST(extreme_scores_match_reference) {
  Rng rng(8);
  const Shape shape = {4, 1};
  Sequence s = random_sequence(rng, shape, 900, 6);
  for (uint16_t& x : s.q) x = to_bf16(from_bf16(x) * 20.0f);
  check_rows(shape, {s}, run(rng, shape, {s}));
  // All keys alike: an average of V.
  for (uint16_t& x : s.q) x = 0;
  check_rows(shape, {s}, run(rng, shape, {s}));
}

// Steps with few rows: chains of every length, in every number, as parts of one long chain.
TEST(few_rows_are_invariant_bit_for_bit) {
  Rng rng(12);
  for (const int group : {1, 3, 4, 5, 8}) {
    const Shape shape = {2 * group, 2};
    constexpr int kTokens = 2600;  // three ranges of 16 blocks
    const Sequence whole = random_sequence(rng, shape, 0, kTokens);
    const Bits expected = run(rng, shape, {whole});
    for (int trial = 0; trial < 16; ++trial) {
      std::vector<Sequence> batch;
      std::vector<int> begins;
      int room = trial % 4 == 3 ? 64 : 32;  // 32: graphs for few spans
      while (room > 0 && static_cast<int>(batch.size()) < 1 + trial * 4) {
        const int num_rows = rng.integer(1, std::min(room, trial % 2 == 0 ? 2 : 16));
        const int edge = rng.integer(0, 3) == 0 ? rng.integer(0, 2) * 1024 : 0;
        begins.push_back(edge > 0 ? edge - rng.integer(0, std::min(num_rows, 3))
                                  : rng.integer(0, kTokens - num_rows));
        batch.push_back(chunk_of(shape, whole, begins.back(), num_rows));
        room -= num_rows;
      }
      Layout layout;
      layout.page_size = std::vector<int>{8, 16, 24, 64}[static_cast<size_t>(rng.integer(0, 3))];
      layout.spare_rows = rng.integer(0, room);
      layout.has_gaps = trial % 3 == 1;
      const Bits out = run(rng, shape, batch, layout);
      size_t at = 0;
      for (size_t i = 0; i < batch.size(); ++i) {
        const size_t num_rows = static_cast<size_t>(batch[i].num_rows());
        check_same_rows(shape, out, at, expected, static_cast<size_t>(begins[i]), num_rows);
        at += num_rows;
      }
    }
  }
}

// A chain to verify, with as many KV heads as a model has.
TEST(rows_of_one_sequence_are_invariant_bit_for_bit) {
  Rng rng(15);
  for (const int group : {1, 3, 4, 5, 8}) {
    const Shape shape = {8 * group, 8};
    constexpr int kTokens = 2100;  // three ranges of 16 blocks
    const Sequence whole = random_sequence(rng, shape, 0, kTokens);
    const Bits expected = run(rng, shape, {whole});
    for (const int num_rows : {3, 5, 8, 9, 11, 12, 16, 17, 24}) {
      for (const int begin :
           {0, 60, 505, 1024 - num_rows / 2, rng.integer(0, kTokens - num_rows)}) {
        Layout layout;
        layout.spare_rows = num_rows % 3 == 0 ? rng.integer(0, 24 - num_rows) : 0;
        const Bits out = run(rng, shape, {chunk_of(shape, whole, begin, num_rows)}, layout);
        check_same_rows(shape, out, 0, expected, static_cast<size_t>(begin),
                        static_cast<size_t>(num_rows));
      }
    }
  }
}

// A layer without entries for the first tokens: rows of prompts, of few rows and of trees.
TEST(tokens_before_the_first_are_not_seen) {
  Rng rng(13);
  constexpr int kTokens = 600;
  for (const int group : {4, 5}) {
    const Shape shape = {2 * group, 2};
    for (const int first_token : {1, 32}) {
      Sequence whole = random_sequence(rng, shape, first_token, kTokens - first_token);
      hide_first_tokens(rng, shape, whole, first_token);
      const Bits expected = run(rng, shape, {whole});
      check_rows(shape, {whole}, expected, 41);
      for (int trial = 0; trial < 12; ++trial) {
        std::vector<Sequence> batch;
        std::vector<int> begins;
        for (int i = 0; i <= trial % 3; ++i) {
          const int num_rows = trial < 6 ? rng.integer(1, 2) : rng.integer(1, 40);
          begins.push_back(i == 0 ? first_token + trial / 3
                                  : rng.integer(first_token, kTokens - num_rows));
          batch.push_back(chunk_of(shape, whole, begins.back(), num_rows));
          hide_first_tokens(rng, shape, batch.back(), first_token);
        }
        Layout layout;
        layout.spare_rows = trial % 3;
        const Bits out = run(rng, shape, batch, layout);
        size_t at = 0;
        for (size_t i = 0; i < batch.size(); ++i) {
          const size_t num_rows = static_cast<size_t>(batch[i].num_rows());
          check_same_rows(shape, out, at, expected, static_cast<size_t>(begins[i] - first_token),
                          num_rows);
          at += num_rows;
        }
      }
      std::vector<Sequence> trees;
      for (const int kv_len : {first_token, 64, 300}) {
        trees.push_back(random_sequence(rng, shape, kv_len, 20, Form::kBushy));
        hide_first_tokens(rng, shape, trees.back(), first_token);
      }
      check_rows(shape, trees, run(rng, shape, trees));
    }
  }
}

// Steps of one to many sequences, with as many KV heads as a model has: contexts are cut into
// ranges of every length, for they follow the number of tiles.
TEST(ranges_of_every_length_are_invariant_bit_for_bit) {
  Rng rng(14);
  const Shape shape = {32, 8};
  constexpr int kTokens = 1700;
  const Sequence whole = random_sequence(rng, shape, 0, kTokens);
  const Bits expected = run(rng, shape, {whole});
  const Sequence tree = random_sequence(rng, shape, 1000, 24, Form::kBushy);
  const Bits expected_tree = run(rng, shape, {tree});
  for (const int num_sequences : {1, 2, 3, 5, 9, 17, 31}) {
    for (const int max_rows : {1, 6, 16}) {
      std::vector<Sequence> batch;
      std::vector<int> begins;
      for (int i = 0; i < num_sequences; ++i) {
        const int num_rows = rng.integer(std::min(max_rows, 4), max_rows);
        begins.push_back(rng.integer(max_rows == 6 ? 1000 : 0, kTokens - num_rows));
        batch.push_back(chunk_of(shape, whole, begins.back(), num_rows));
      }
      const bool has_tree = max_rows == 16 && num_sequences % 3 != 0;
      if (has_tree) batch.push_back(tree);
      Layout layout;
      layout.spare_rows = rng.integer(0, 40);
      layout.spare_spans = rng.integer(0, 3);
      const Bits out = run(rng, shape, batch, layout);
      size_t at = 0;
      for (size_t i = 0; i < begins.size(); ++i) {
        const size_t num_rows = static_cast<size_t>(batch[i].num_rows());
        check_same_rows(shape, out, at, expected, static_cast<size_t>(begins[i]), num_rows);
        at += num_rows;
      }
      if (has_tree) check_same_rows(shape, out, at, expected_tree, 0, 24);
    }
  }
}

// Blocks of rows that see each other: against the reference, and each row against the last one of a
// chain with its q, by whichever kernel either takes.
TEST(rows_of_a_block_see_each_other) {
  Rng rng(15);
  for (const int group : {1, 4, 5}) {
    const Shape shape = {4 * group, 4};
    for (const int num_sequences : {1, 2, 7, 40}) {
      for (const int most_rows : {4, 16, num_sequences == 1 ? 300 : 40}) {
        std::vector<Sequence> blocks;
        for (int i = 0; i < num_sequences; ++i) {
          const int num_rows = i == 0 ? most_rows : rng.integer(1, most_rows);
          blocks.push_back(random_sequence(rng, shape, rng.integer(0, 1300), num_rows));
          blocks.back().is_causal = false;
        }
        Layout layout;
        layout.page_size = std::vector<int>{8, 16, 24, 64}[static_cast<size_t>(rng.integer(0, 3))];
        layout.spare_rows = rng.integer(0, 3);
        const Bits out = run(rng, shape, blocks, layout);
        check_rows(shape, blocks, out, most_rows / 2);
        const int last_row = blocks.front().num_rows() - 1;
        for (const int row : {0, last_row / 2, last_row}) {
          Sequence chain = blocks.front();
          chain.is_causal = true;
          const auto at = [&](int index) { return static_cast<size_t>(index) * shape.q_width(); };
          std::copy_n(&blocks.front().q[at(row)], shape.q_width(), &chain.q[at(last_row)]);
          check_same_rows(shape, out, static_cast<size_t>(row), run(rng, shape, {chain}),
                          static_cast<size_t>(last_row), 1);
        }
      }
    }
  }
}

// A captured graph stays right as lengths, page tables and KV change on the device.
TEST(captured_graph_follows_the_lengths) {
  Rng rng(9);
  const Shape shape = {8, 2};
  Layout layout;
  layout.spare_rows = 40;
  layout.spare_spans = 10;
  layout.spare_context = 4000;
  // The larger step sizes the buffers; the smaller one's contents are copied over them.
  const std::vector<Sequence> large = {random_sequence(rng, shape, 2000, 9),
                                       random_sequence(rng, shape, 100, 5, Form::kBushy),
                                       random_sequence(rng, shape, 640, 1)};
  const std::vector<Sequence> small = {random_sequence(rng, shape, 70, 3)};
  Step captured(rng, shape, large, layout);
  const Bits expected_large = Step(rng, shape, large, layout).run();
  const Bits expected_small = Step(rng, shape, small, layout).run();

  cudaStream_t stream;
  CHECK_CUDA(cudaStreamCreate(&stream));
  cudaGraph_t graph;
  cudaGraphExec_t executable;
  CHECK_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  CHECK_CUDA(span_attention_plan_cuda(captured.params(), stream));
  for (int layer = 0; layer < 3; ++layer) {
    CHECK_CUDA(span_attention_cuda(captured.params(), stream));
  }
  CHECK_CUDA(cudaStreamEndCapture(stream, &graph));
  CHECK_CUDA(cudaGraphInstantiate(&executable, graph, 0));
  for (int replay = 0; replay < 3; ++replay) CHECK_CUDA(cudaGraphLaunch(executable, stream));
  CHECK_CUDA(cudaStreamSynchronize(stream));
  CHECK(captured.output() == expected_large);

  const Step source(rng, shape, small, layout);
  const SpanAttentionParams& to = captured.params();
  const SpanAttentionParams& from = source.params();
  const auto copy = [](const void* target, const void* origin, size_t bytes) {
    CHECK_CUDA(cudaMemcpy(const_cast<void*>(target), origin, bytes, cudaMemcpyDeviceToDevice));
  };
  const size_t num_rows = static_cast<size_t>(from.rows.num_rows);
  std::vector<int32_t> begin(static_cast<size_t>(to.rows.num_spans) + 1, 3);
  begin[0] = 0;
  std::vector<int32_t> zeros(static_cast<size_t>(to.rows.num_spans), 0);
  const std::vector<int32_t> none(static_cast<size_t>(to.rows.num_rows), -1);
  copy(to.rows.row_span, DeviceBuffer(none).data(), none.size() * 4);
  copy(to.rows.span_begin, DeviceBuffer(begin).data(), begin.size() * 4);
  copy(to.rows.span_kv_len, DeviceBuffer(zeros).data(), zeros.size() * 4);
  copy(to.rows.span_kv_len, from.rows.span_kv_len, 4);
  copy(to.rows.span_seq, DeviceBuffer(zeros).data(), zeros.size() * 4);
  copy(to.rows.row_span, from.rows.row_span, num_rows * 4);
  copy(to.rows.row_parent, from.rows.row_parent, num_rows * 4);
  copy(to.q, from.q, num_rows * shape.q_width() * 2);
  copy(to.page_table.pages, from.page_table.pages,
       static_cast<size_t>(from.page_table.max_pages_per_seq) * 4);
  // 73 tokens on 5 pages, and 3 more that are not used.
  copy(to.kv.data, from.kv.data, 8 * 2 * 16 * shape.kv_width() * 2);
  for (int replay = 0; replay < 2; ++replay) CHECK_CUDA(cudaGraphLaunch(executable, stream));
  CHECK_CUDA(cudaStreamSynchronize(stream));
  check_same_rows(shape, captured.output(), 0, expected_small, 0, 3);
  CHECK_CUDA(cudaGraphExecDestroy(executable));
  CHECK_CUDA(cudaGraphDestroy(graph));
  CHECK_CUDA(cudaStreamDestroy(stream));
}

TEST(a_step_without_rows_does_nothing) {
  Rng rng(10);
  const Shape shape = {8, 2};
  CHECK(run(rng, shape, {}).empty());
}

TEST(unsupported_shapes_are_refused) {
  Rng rng(11);
  const Shape shape = {8, 2};
  SpanAttentionParams params = Step(rng, shape, {random_sequence(rng, shape, 3, 1)}, {}).params();
  const auto check_refused = [&](const std::function<void(SpanAttentionParams&)>& change) {
    SpanAttentionParams changed = params;
    change(changed);
    CHECK_EQ(span_attention_plan_cuda(changed, nullptr), int{cudaErrorInvalidValue});
    CHECK_EQ(span_attention_cuda(changed, nullptr), int{cudaErrorInvalidValue});
  };
  check_refused([](SpanAttentionParams& p) { p.dtype = DType::kF32; });
  check_refused([](SpanAttentionParams& p) { p.kv.head_dim = 96; });
  check_refused([](SpanAttentionParams& p) { p.kv.page_size = 12; });
  check_refused([](SpanAttentionParams& p) { p.num_q_heads = 7; });
  check_refused([](SpanAttentionParams& p) { p.num_q_heads = 18; });
}
