#include "kernels/drafts/draft_block.h"

#include "cuda/draft_rows_device.h"
#include "kernels/draft_block_testing.h"

using namespace openspec;
using namespace openspec::testing;

namespace {

NeedsDevice needs_device;

using Ids = std::vector<int32_t>;

size_t ints(int count) { return static_cast<size_t>(count) * sizeof(int32_t); }

void check(const DeviceBuffer& buffer, const Ids& expected) {
  CHECK(buffer.download<int32_t>() == expected);
  CHECK(buffer.guard_is_whole());
}

}  // namespace

TEST(block_rows_match_the_cpu) {
  Rng rng(3);
  const DraftTable table = random_table(rng);
  const DeviceTableCopy device_table(table);
  struct Case {
    int num_seqs, room;
  };
  for (const Case& c : {Case{1, 16}, Case{8, 16}, Case{8, 128}, Case{64, 100}, Case{300, 1024}}) {
    for (const int first_draft_row : {0, 1}) {
      Ids seq, num_wanted;
      for (int i = 0; i < c.num_seqs; ++i) {
        seq.push_back((i * 11) % kSlots);
        num_wanted.push_back(i % 4 == 3 ? 0 : rng.integer(1, 30));
      }
      const auto num_samples = static_cast<size_t>(c.room - first_draft_row);
      DraftBatch batch(c.room, c.num_seqs);
      const DeviceBatch device_batch(batch);
      Ids head_row(num_samples, -1), sample_row(head_row), first_sample(seq.size(), -1),
          num_drafts(first_sample);
      BlockRowsParams params = {.table = table.view(),
                                .seq = seq.data(),
                                .num_wanted = num_wanted.data(),
                                .num_seqs = c.num_seqs,
                                .max_depth = 15,
                                .first_draft_row = first_draft_row,
                                .mask_token = 4000,
                                .mask_source = first_draft_row == 0 ? kSlots : -1,
                                .page_size = kPageSize,
                                .out = batch.rows(),
                                .num_samples = static_cast<int>(num_samples),
                                .head_row = head_row.data(),
                                .sample_row = sample_row.data(),
                                .first_sample = first_sample.data(),
                                .num_drafts = num_drafts.data()};
      block_rows_cpu({}, params);
      const DeviceBuffer device_seq(seq), device_wanted(num_wanted),
          device_head(ints(params.num_samples)), device_sample(ints(params.num_samples)),
          device_first(ints(c.num_seqs)), device_drafts(ints(c.num_seqs));
      params.table = device_table.view();
      params.seq = device_seq.as<int32_t>();
      params.num_wanted = device_wanted.as<int32_t>();
      params.out = device_batch.rows();
      params.head_row = device_head.as<int32_t>();
      params.sample_row = device_sample.as<int32_t>();
      params.first_sample = device_first.as<int32_t>();
      params.num_drafts = device_drafts.as<int32_t>();
      CHECK_CUDA(block_rows_cuda(params, nullptr));
      device_batch.check_equal(batch);
      check(device_head, head_row);
      check(device_sample, sample_row);
      check(device_first, first_sample);
      check(device_drafts, num_drafts);

      Ids chosen;
      for (size_t i = 0; i < num_samples; ++i) chosen.push_back(rng.integer(0, 4000));
      const DeviceBuffer device_chosen(chosen);

      // Drafts and scores, from outputs and states in bf16.
      constexpr int kWidth = 320, kStates = 16;
      const std::vector<uint16_t> outputs = to_bf16(rng.normals(num_samples * kWidth, 0.2f)),
                                  states =
                                      to_bf16(rng.normals(size_t{1 << 17} * kStates + kStates));
      const std::vector<float> weight = rng.normals(kWidth + kStates, 0.3f), bias = {0.5f};
      std::vector<float> confidence(num_samples, 0.0f);
      std::vector<float> scores(seq.size() * 16, -1.0f);
      Ids drafts(seq.size() * 16, -1);
      BlockConfidenceParams judged = {.table = table.view(),
                                      .seq = seq.data(),
                                      .first_sample = first_sample.data(),
                                      .num_drafts = num_drafts.data(),
                                      .num_seqs = c.num_seqs,
                                      .chosen = chosen.data(),
                                      .outputs = outputs.data(),
                                      .states = states.data(),
                                      .weight = weight.data(),
                                      .bias = bias.data(),
                                      .width = kWidth,
                                      .state_width = kStates,
                                      .dtype = DType::kBF16,
                                      .confidence = confidence.data()};
      block_confidence_cpu({}, judged);
      StoreBlocksParams stored = {.chosen = chosen.data(),
                                  .confidence = confidence.data(),
                                  .first_sample = first_sample.data(),
                                  .num_drafts = num_drafts.data(),
                                  .num_seqs = c.num_seqs,
                                  .max_drafts = 16,
                                  .drafts = drafts.data(),
                                  .scores = scores.data()};
      store_blocks_cpu({}, stored);
      const DeviceBuffer device_outputs(outputs), device_states(states), device_weight(weight),
          device_bias(bias), device_confidence(num_samples * sizeof(float)),
          device_stored(ints(c.num_seqs * 16)), device_scores(ints(c.num_seqs * 16));
      judged.table = device_table.view();
      judged.seq = params.seq;
      judged.first_sample = stored.first_sample = params.first_sample;
      judged.num_drafts = stored.num_drafts = params.num_drafts;
      judged.chosen = stored.chosen = device_chosen.as<int32_t>();
      judged.outputs = device_outputs.data();
      judged.states = device_states.data();
      judged.weight = device_weight.as<float>();
      judged.bias = device_bias.as<float>();
      judged.confidence = device_confidence.as<float>();
      stored.confidence = device_confidence.as<float>();
      stored.drafts = device_stored.as<int32_t>();
      stored.scores = device_scores.as<float>();
      CHECK_CUDA(block_confidence_cuda(judged, nullptr));
      CHECK_CUDA(store_blocks_cuda(stored, nullptr));
      check(device_stored, drafts);
      const std::vector<float> found = device_scores.download<float>();
      for (size_t i = 0; i < seq.size(); ++i) {
        for (int d = 0; d < num_drafts[i]; ++d) {
          const size_t at = i * 16 + static_cast<size_t>(d);
          CHECK_NEAR(found[at], scores[at], 1e-3);
        }
      }
    }
  }
}

TEST(block_trees_match_the_cpu) {
  Rng rng(6);
  for (const int num_seqs : {1, 7, 300}) {
    for (const int max_drafts : {3, 15, 128, kMaxBlockTreeNodes}) {
      for (const bool has_pairs : {false, true}) {
        const Marginals made =
            random_marginals(rng, num_seqs, 15, 8, kMaxBlockTreeNodes + 9, has_pairs);
        const size_t seqs = static_cast<size_t>(num_seqs),
                     count = seqs * static_cast<size_t>(max_drafts);
        Ids drafts(count, -1), parents(count, -1), num_drafts(seqs, -1);
        std::vector<float> scores(count);
        BlockTreesParams params = {.tokens = made.tokens.data(),
                                   .scores = made.scores.data(),
                                   .pair_ranks = made.ranks_or_null(),
                                   .pair_scores = made.pairs_or_null(),
                                   .top_k = made.top_k,
                                   .first_sample = made.first_sample.data(),
                                   .num_depths = made.num_depths.data(),
                                   .num_wanted = made.num_wanted.data(),
                                   .num_seqs = num_seqs,
                                   .max_drafts = max_drafts,
                                   .drafts = drafts.data(),
                                   .parents = parents.data(),
                                   .path_scores = scores.data(),
                                   .num_drafts = num_drafts.data()};
        block_trees_cpu({}, params);
        const DeviceBuffer tokens(made.tokens), token_scores(made.scores), first(made.first_sample),
            depths(made.num_depths), wanted(made.num_wanted), ranks(made.pair_ranks),
            pairs(made.pair_scores), device_drafts(count * sizeof(int32_t)),
            device_parents(count * sizeof(int32_t)), device_scores(count * sizeof(float)),
            device_counts(seqs * sizeof(int32_t));
        params.tokens = tokens.as<int32_t>();
        params.scores = token_scores.as<float>();
        if (has_pairs) {
          params.pair_ranks = ranks.as<int32_t>();
          params.pair_scores = pairs.as<float>();
        }
        params.first_sample = first.as<int32_t>();
        params.num_depths = depths.as<int32_t>();
        params.num_wanted = wanted.as<int32_t>();
        params.drafts = device_drafts.as<int32_t>();
        params.parents = device_parents.as<int32_t>();
        params.path_scores = device_scores.as<float>();
        params.num_drafts = device_counts.as<int32_t>();
        CHECK_CUDA(block_trees_cuda(params, nullptr));
        check(device_drafts, drafts);
        check(device_parents, parents);
        check(device_counts, num_drafts);
        const std::vector<float> found = device_scores.download<float>();
        for (size_t i = 0; i < seqs; ++i) {
          for (int k = 0; k < num_drafts[i]; ++k) {
            const size_t at = i * static_cast<size_t>(max_drafts) + static_cast<size_t>(k);
            CHECK_EQ(found[at], scores[at]);
          }
        }
      }
    }
  }
}
