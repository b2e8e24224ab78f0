// Every kernel and cut that may compute a step of chains gives a row the same bits, whatever the
// step gets by itself.

#include "cuda/attention_testing.h"
#include "kernels/attention/span_attention.h"

using namespace openspec;
using namespace openspec::testing;

namespace {

NeedsDevice needs_device;

using Kernel = AttentionChoice::Kernel;

// Tiles and CTAs to an SM of every kernel for heads of that size.
std::vector<AttentionChoice> choices_of(int head_dim) {
  std::vector<AttentionChoice> choices;
  for (const int pairs : {8, 16, 24}) choices.push_back({Kernel::kWarp, pairs});
  for (const int ctas : {1, 2}) choices.push_back({Kernel::kCta, 32, ctas});
  choices.push_back({Kernel::kCta, 64, 1});
  if (head_dim == 64) {
    choices.push_back({Kernel::kCta, 64, 2});
  } else {
    for (const int ctas : {1, 2}) choices.push_back({Kernel::kCta, 16, ctas});
  }
  return choices;
}

// Those of Hopper.
std::vector<AttentionChoice> newer_choices_of(int head_dim) {
  std::vector<AttentionChoice> choices = {{Kernel::kPrefill}};
  if (head_dim == 128) choices.push_back({Kernel::kCluster});
  return choices;
}

std::vector<int> ranges_of(Kernel kernel) {
  if (kernel == Kernel::kCluster) return {0};
  if (kernel == Kernel::kPrefill) return {0, 8, 1 << 28};
  return {0, 1, 3, 8, 12, 1 << 28};
}

}  // namespace

TEST(every_kernel_and_cut_gives_the_same_bits) {
  Rng rng(1);
  for (const int head_dim : {64, 128}) {
    for (const int group : {1, 3, 4, 5, 7, 8}) {
      const Shape shape = {2 * group, 2, head_dim};
      // Up to 16 rows in all, which clusters need, and more.
      for (const int most_rows : {5, 21}) {
        std::vector<Sequence> sequences;
        for (const int kv_len : {1400, 70, 2900}) {
          sequences.push_back(random_sequence(rng, shape, kv_len,
                                              rng.integer(std::max(1, most_rows - 4), most_rows)));
        }
        Layout layout;
        layout.page_size = std::vector<int>{8, 16, 24, 64}[static_cast<size_t>(rng.integer(0, 3))];
        layout.spare_rows = 1;
        Step step(rng, shape, sequences, layout);
        const Bits expected = step.run();
        check_rows(shape, sequences, expected);
        const auto check = [&](AttentionChoice choice) {
          bool is_taken = false;
          for (const int range : ranges_of(choice.kernel)) {
            choice.range_blocks = range;
            const Bits bits = step.run(choice);
            if (bits.empty()) continue;
            is_taken = true;
            check_same_rows(shape, bits, 0, expected, 0, bits.size() / shape.q_width());
          }
          return is_taken;
        };
        for (const AttentionChoice& choice : choices_of(head_dim)) CHECK(check(choice));
        for (const AttentionChoice& choice : newer_choices_of(head_dim)) check(choice);
      }
    }
  }
}

TEST(clusters_of_several_rounds_give_the_same_bits) {
  Rng rng(3);
  const Shape shape = {32, 4, 128};
  std::vector<Sequence> sequences;
  for (int i = 0; i < 16; ++i) {
    sequences.push_back(random_sequence(rng, shape, rng.integer(1, 900), 1));
  }
  Step step(rng, shape, sequences, {});
  const Bits expected = step.run({Kernel::kWarp, 8});
  check_rows(shape, sequences, expected);
  const Bits bits = step.run({Kernel::kCluster});
  if (!bits.empty()) check_same_rows(shape, bits, 0, expected, 0, sequences.size());
}

TEST(a_choice_that_is_not_there_is_refused) {
  Rng rng(2);
  const Shape shape = {8, 2, 64};
  Step step(rng, shape, {random_sequence(rng, shape, 100, 4)}, {});
  CHECK(step.run({Kernel::kCluster}).empty());
  CHECK(step.run({Kernel::kWarp, 12}).empty());
  CHECK(step.run({Kernel::kCta, 16, 1}).empty());
}
