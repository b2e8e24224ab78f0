#include "kernels/drafts/draft_block.h"

#include <cmath>

#include "kernels/draft_block_testing.h"

using namespace openspec;
using namespace openspec::testing;

namespace {

using Ids = std::vector<int32_t>;

constexpr int kPageSize = 4, kMask = 900;

struct Blocks {
  Blocks(int num_rows, int num_seqs, int num_samples)
      : batch(num_rows, num_seqs),
        head_row(static_cast<size_t>(num_samples), 77),
        sample_row(head_row),
        first_sample(static_cast<size_t>(num_seqs), 77),
        num_drafts(first_sample) {}
  DraftBatch batch;
  Ids head_row, sample_row, first_sample, num_drafts;
};

Blocks blocks_of(const DraftTable& table, const Ids& seq, const Ids& num_wanted, int max_depth,
                 int first_draft_row, int num_rows, int num_samples, int mask_source = -1) {
  const int num_seqs = static_cast<int>(seq.size());
  Blocks blocks(num_rows, num_seqs, num_samples);
  block_rows_cpu({}, {.table = table.view(),
                      .seq = seq.data(),
                      .num_wanted = num_wanted.data(),
                      .num_seqs = num_seqs,
                      .max_depth = max_depth,
                      .first_draft_row = first_draft_row,
                      .mask_token = kMask,
                      .mask_source = mask_source,
                      .page_size = kPageSize,
                      .out = blocks.batch.rows(),
                      .num_samples = num_samples,
                      .head_row = blocks.head_row.data(),
                      .sample_row = blocks.sample_row.data(),
                      .first_sample = blocks.first_sample.data(),
                      .num_drafts = blocks.num_drafts.data()});
  return blocks;
}

DraftTable two_sequences() {
  DraftTable table(3, 32, kPageSize);
  table.set(2, {10, 11, 12});
  table.set(1, {20, 21, 22, 23, 24, 25});
  return table;
}

}  // namespace

TEST(masks_may_have_a_source_of_their_own) {
  const DraftTable table = two_sequences();
  const Blocks made = blocks_of(table, {2, 0, 1}, {3, 0, 2}, 3, /*first_draft_row=*/0, 6, 6, 9);
  CHECK_EQ(made.batch.source, (Ids{2, 9, 9, 1, 9, -1}));
  CHECK_EQ(made.head_row, (Ids{0, 1, 2, 3, 4, -1}));
  CHECK_EQ(made.head_row, made.sample_row);
}

TEST(a_block_is_the_last_token_and_masks) {
  const DraftTable table = two_sequences();
  const Blocks made = blocks_of(table, {2, 0, 1}, {9, 0, 2}, 3, /*first_draft_row=*/1, 8, 6);
  CHECK_EQ(made.num_drafts, (Ids{3, 0, 2}));
  CHECK_EQ(made.batch.row_token, (Ids{12, kMask, kMask, kMask, 25, kMask, kMask, 0}));
  CHECK_EQ(made.batch.row_position, (Ids{2, 3, 4, 5, 5, 6, 7, 0}));
  CHECK_EQ(made.batch.row_span, (Ids{0, 0, 0, 0, 1, 1, 1, -1}));
  CHECK_EQ(made.batch.row_parent, (Ids{-1, 0, 1, 2, -1, 4, 5, -1}));
  CHECK_EQ(made.batch.span_begin, (Ids{0, 4, 7, 7}));
  CHECK_EQ(made.batch.span_kv_len, (Ids{2, 5, 0}));
  CHECK_EQ(made.batch.span_seq, (Ids{2, 1, 0}));
  for (size_t row = 0; row < 7; ++row) {
    const int slot = row < 4 ? 2 : 1;
    CHECK_EQ(made.batch.row_kv_slot[row], table.kv_slot(slot, made.batch.row_position[row]));
  }
  CHECK_EQ(made.batch.row_kv_slot[7], int64_t{-1});
  // The rows of the masks draft; each draft's place is one behind the row before.
  CHECK_EQ(made.head_row, (Ids{1, 2, 3, 5, 6, -1}));
  CHECK_EQ(made.sample_row, (Ids{0, 1, 2, 4, 5, -1}));
  CHECK_EQ(made.first_sample[0], 0);
  CHECK_EQ(made.first_sample[2], 3);
}

TEST(the_last_tokens_row_may_draft_too) {
  const Blocks made = blocks_of(two_sequences(), {2, 1}, {3, 2}, 3, /*first_draft_row=*/0, 6, 6);
  CHECK_EQ(made.batch.row_token, (Ids{12, kMask, kMask, 25, kMask, 0}));
  CHECK_EQ(made.head_row, (Ids{0, 1, 2, 3, 4, -1}));
  CHECK_EQ(made.sample_row, made.head_row);
}

TEST(blocks_that_exceed_the_room_are_cut_alike) {
  const DraftTable table = two_sequences();
  // 4 + 6 rows do not fit into 9, 4 + 5 would: all that have more than three drafts get three.
  CHECK_EQ(blocks_of(table, {2, 1}, {3, 5}, 7, 1, 9, 8).num_drafts, (Ids{3, 4}));
  CHECK_EQ(blocks_of(table, {2, 1}, {3, 5}, 7, 1, 6, 5).num_drafts, (Ids{2, 2}));
  CHECK_EQ(blocks_of(table, {2, 1}, {3, 5}, 7, 1, 3, 2).num_drafts, (Ids{1, 0}));
  CHECK_EQ(blocks_of(table, {2, 1}, {3, 5}, 7, 0, 1, 1).num_drafts, (Ids{1, 0}));
  CHECK_EQ(blocks_of(table, {2, 1}, {0, 5}, 7, 1, 3, 2).num_drafts, (Ids{0, 2}));
}

TEST(drafts_go_to_their_sequences) {
  const Ids chosen = {5, 6, 7, 8, 9}, first_sample = {0, 3, 3}, num_drafts = {3, 0, 2};
  const std::vector<float> confidence = {2.0f, 0.0f, -1.0f, 0.5f, 30.0f};
  Ids drafts(9, -4);
  std::vector<float> scores(9, 4.0f);
  store_blocks_cpu({}, {.chosen = chosen.data(),
                        .confidence = confidence.data(),
                        .first_sample = first_sample.data(),
                        .num_drafts = num_drafts.data(),
                        .num_seqs = 3,
                        .max_drafts = 3,
                        .drafts = drafts.data(),
                        .scores = scores.data()});
  CHECK_EQ(drafts, (Ids{5, 6, 7, -4, -4, -4, 8, 9, -4}));
  const auto probability = [](float x) { return 1.0 / (1.0 + std::exp(-static_cast<double>(x))); };
  double product = 1.0;
  for (size_t i = 0; i < 3; ++i) {
    product *= probability(confidence[i]);
    CHECK_NEAR(std::exp(static_cast<double>(scores[i])), product, 1e-6);
  }
  CHECK_NEAR(std::exp(static_cast<double>(scores[7])), probability(0.5f), 1e-6);
  CHECK_EQ(scores[3], 4.0f);
}

TEST(confidence_reads_output_and_token) {
  const DraftTable table = two_sequences();
  const Ids seq = {2}, num_drafts = {2}, first_sample = {0}, chosen = {1, 0};
  const std::vector<float> outputs = {1.0f, 2.0f, 3.0f, 4.0f}, weight = {0.5f, -1.0f, 8.0f};
  std::vector<uint16_t> states(20);
  for (size_t i = 0; i < states.size(); ++i) states[i] = to_bf16(static_cast<float>(i));
  const float bias = 0.25f;
  BlockConfidenceParams params = {.table = table.view(),
                                  .seq = seq.data(),
                                  .first_sample = first_sample.data(),
                                  .num_drafts = num_drafts.data(),
                                  .num_seqs = 1,
                                  .chosen = chosen.data(),
                                  .outputs = outputs.data(),
                                  .states = states.data(),
                                  .weight = weight.data(),
                                  .bias = &bias,
                                  .width = 2,
                                  .state_width = 1};
  std::vector<float> confidence(2);
  params.confidence = confidence.data();
  block_confidence_cpu({}, params);
  CHECK_EQ(confidence, (std::vector<float>{0.25f - 1.5f + 8.0f * 12.0f, 0.25f - 2.5f + 8.0f}));
  params.states = nullptr;
  block_confidence_cpu({}, params);
  CHECK_EQ(confidence, (std::vector<float>{-1.25f, -2.25f}));
}
