#include <algorithm>
#include <cmath>
#include <vector>

#include "cuda/cuda_testing.h"
#include "kernels/steps/step_rows.h"

using namespace openspec;
using testing::DeviceBuffer;

namespace {

testing::NeedsDevice needs_device;

using Ids = std::vector<int32_t>;
using Floats = std::vector<float>;

constexpr int kSpans = 33, kUsed = 29, kCopied = 15;

/// What a step offers, and what the host takes of it.
struct Case {
  Case(uint64_t seed, int max_drafter, bool of_trees, bool of_scores)
      : rng(seed),
        max_drafter_drafts(max_drafter),
        has_trees(of_trees),
        has_scores(of_scores),
        max_drafts(std::max(max_drafter, kCopied)) {
    price = 0.25f * static_cast<float>(rng.integer(0, 2));
    row_share = rng.integer(1, 20);
    for (int s = 0; s < kSpans; ++s) {
      num_drafter.push_back(rng.integer(0, max_drafter));
      num_copied.push_back(rng.integer(0, 3) == 0 ? 0 : kCopied);
      match_len.push_back(num_copied.back() == 0 ? 0 : rng.integer(kMinMatchLen, kMaxMatchLen));
      spans.push_back({.slot = s, .acceptance = 0.03f * static_cast<float>(rng.integer(0, 32))});
      for (float& ratio : spans.back().copied_acceptance) {
        ratio = 0.03f * static_cast<float>(rng.integer(1, 32));
      }
      float score = 0.0f;
      for (int i = 0; i < max_drafter; ++i) {
        drafter.push_back(rng.integer(0, 999));
        parents.push_back(rng.integer(-1, i - 1));
        scores.push_back(score -= 0.11f * static_cast<float>(rng.integer(0, 9)));
      }
      for (int i = 0; i < kCopied; ++i) copied.push_back(rng.integer(1000, 1999));
      if (rng.integer(0, 1) == 0)
        copied[copied.size() - kCopied] =
            drafter[drafter.size() - static_cast<size_t>(max_drafter)];
    }
  }

  /// -1: there is none.
  int copy_class_of(size_t s, bool has_drafter) const {
    if (match_len[s] == 0) return -1;
    const int count = has_drafter ? num_drafter[s] : 0;
    return copy_class(
        match_len[s],
        opinion_of(count, drafter.data() + s * static_cast<size_t>(max_drafter_drafts),
                   copied[s * kCopied]));
  }

  float copied_acceptance(size_t s, bool has_drafter) const {
    const int number = copy_class_of(s, has_drafter);
    return number < 0 ? 0.0f : spans[s].copied_acceptance[number];
  }

  float worth(int s, bool of_copy, bool has_drafter) const {
    const auto at = static_cast<size_t>(s);
    const float acceptance = of_copy ? copied_acceptance(at, has_drafter) : spans[at].acceptance;
    const bool by_scores = has_scores && !of_copy;
    float sum = 0.0f;
    const int count = std::min((of_copy ? num_copied : num_drafter)[at], row_share);
    for (int i = 0; i < count; ++i) {
      sum += worth_of_draft(i, acceptance,
                            by_scores ? scores.data() + s * max_drafter_drafts : nullptr, price);
    }
    return sum;
  }

  testing::Rng rng;
  int max_drafter_drafts;
  bool has_trees, has_scores;
  int max_drafts;
  float price;
  int row_share;
  std::vector<StepSpan> spans;
  Ids drafter, num_drafter, parents, copied, num_copied, match_len;
  Floats scores;
};

/// Returns how many spans have a copy.
int check_case(const Case& at, bool has_drafter, bool takes_copies) {
  const DeviceBuffer spans(at.spans), drafter(at.drafter), num_drafter(at.num_drafter),
      parents(at.parents), scores(at.scores), copied(at.copied), num_copied(at.num_copied),
      match_len(at.match_len),
      header(std::vector<StepHeader>{
          {.num_spans = kUsed, .row_price = at.price, .row_share = at.row_share}});
  const size_t bytes = size_t{kSpans} * static_cast<size_t>(at.max_drafts) * 4;
  const DeviceBuffer out(bytes), out_parents(bytes), out_scores(bytes), counts(kSpans * 4),
      is_copied(kSpans * 4), copy_class(kSpans * 4);
  CHECK_CUDA(choose_source_cuda(
      {.input = {header.as<StepHeader>(), spans.as<StepSpan>()},
       .spans = spans.as<StepSpan>(),
       .max_spans = kSpans,
       .copied = {kCopied, copied.as<int32_t>(), num_copied.as<int32_t>(), match_len.as<int32_t>()},
       .takes_copies = takes_copies,
       .max_drafter_drafts = at.max_drafter_drafts,
       .drafter_drafts = drafter.as<int32_t>(),
       .num_drafter_drafts = has_drafter ? num_drafter.as<int32_t>() : nullptr,
       .drafter_parents = parents.as<int32_t>(),
       .drafter_scores = at.has_scores ? scores.as<float>() : nullptr,
       .max_drafts = at.max_drafts,
       .drafts = out.as<int32_t>(),
       .num_drafts = counts.as<int32_t>(),
       .parents = at.has_trees ? out_parents.as<int32_t>() : nullptr,
       .scores = at.has_scores ? out_scores.as<float>() : nullptr,
       .is_copied = is_copied.as<int32_t>(),
       .copy_class = copy_class.as<int32_t>()},
      nullptr));
  const Ids drafts = out.download<int32_t>(), above = out_parents.download<int32_t>(),
            found_counts = counts.download<int32_t>(), sources = is_copied.download<int32_t>(),
            classes = copy_class.download<int32_t>();
  const Floats values = out_scores.download<float>();
  const auto found_spans = spans.download<StepSpan>();
  int num_taken = 0;
  for (int s = 0; s < kSpans; ++s) {
    const auto i = static_cast<size_t>(s);
    const float of_copy = s < kUsed && takes_copies ? at.worth(s, true, has_drafter) : 0.0f;
    const float of_drafter = s < kUsed && has_drafter ? at.worth(s, false, has_drafter) : 0.0f;
    // Sums in another order: what is nearly equal may go either way.
    const bool is_close = of_copy > 0.0f && is_copy_better(of_copy + 1e-4f, of_drafter) !=
                                                is_copy_better(of_copy - 1e-4f, of_drafter);
    const bool takes = is_close ? sources[i] != 0 : is_copy_better(of_copy, of_drafter);
    CHECK_EQ(sources[i], takes ? 1 : 0);
    CHECK_EQ(classes[i], s < kUsed ? at.copy_class_of(i, has_drafter) : -1);
    num_taken += takes;
    const int expected = takes ? kCopied : s < kUsed && has_drafter ? at.num_drafter[i] : 0;
    CHECK_EQ(found_counts[i], expected);
    const float acceptance = at.copied_acceptance(i, has_drafter);
    CHECK_EQ(found_spans[i].acceptance, takes ? acceptance : at.spans[i].acceptance);
    for (int k = 0; k < expected; ++k) {
      const auto to = i * static_cast<size_t>(at.max_drafts) + static_cast<size_t>(k);
      const auto from =
          i * static_cast<size_t>(takes ? kCopied : at.max_drafter_drafts) + static_cast<size_t>(k);
      CHECK_EQ(drafts[to], takes ? at.copied[from] : at.drafter[from]);
      if (at.has_trees) CHECK_EQ(above[to], takes ? k - 1 : at.parents[from]);
      if (!at.has_scores) continue;
      if (takes) {
        CHECK(std::fabs(values[to] - static_cast<float>(k + 1) * std::log(acceptance)) < 1e-3f);
        CHECK(values[to] <= (k > 0 ? values[to - 1] : 0.0f));
      } else {
        CHECK_EQ(values[to], at.scores[from]);
      }
    }
  }
  for (const DeviceBuffer* buffer :
       {&out, &out_parents, &out_scores, &counts, &is_copied, &copy_class}) {
    CHECK(buffer->guard_is_whole());
  }
  return num_taken;
}

}  // namespace

TEST(the_source_that_is_worth_more_is_taken) {
  int num_taken = 0, num_spans = 0;
  for (uint64_t seed = 0; seed < 20; ++seed) {
    for (const int max_drafter : {1, 3, 15, 60}) {
      for (const bool has_scores : {false, true}) {
        const Case at(seed, max_drafter, has_scores && seed % 2 == 0, has_scores);
        num_taken += check_case(at, /*has_drafter=*/true, /*takes_copies=*/true);
        num_spans += kUsed;
        check_case(at, /*has_drafter=*/false, /*takes_copies=*/true);
        CHECK_EQ(check_case(at, /*has_drafter=*/true, /*takes_copies=*/false), 0);
        CHECK_EQ(check_case(at, /*has_drafter=*/false, /*takes_copies=*/false), 0);
      }
    }
  }
  CHECK_GT(num_taken, num_spans / 10);
  CHECK_LT(num_taken, num_spans * 9 / 10);
}
