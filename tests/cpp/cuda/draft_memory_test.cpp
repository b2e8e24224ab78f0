#include "kernels/drafts/draft_memory.h"

#include <algorithm>
#include <vector>

#include "cuda/cuda_testing.h"

using namespace openspec;
using testing::DeviceBuffer;

namespace {

testing::NeedsDevice needs_device;

using Ids = std::vector<int32_t>;

}  // namespace

TEST(the_memory_of_answers_equals_the_cpus) {
  constexpr uint32_t kCapacity = 1500;
  constexpr int kSeqs = 37, kLen = 90, kDrafts = 15;
  testing::Rng rng(4);
  Ids tokens(kCapacity), text(kLen);
  std::vector<uint64_t> owners(kCapacity);
  std::vector<uint32_t> places(size_t{DraftMemory::kNumLengths} * kCapacity);
  const DeviceBuffer device_tokens(tokens), device_owners(owners), device_places(places);
  const DraftMemory host{tokens.data(), owners.data(), places.data(), kCapacity};
  const DraftMemory device{device_tokens.as<int32_t>(), device_owners.as<uint64_t>(),
                           device_places.as<uint32_t>(), kCapacity};
  uint32_t num_written = 0;
  int num_found = 0;
  for (int round = 0; round < 120; ++round) {
    // Texts go on as older ones did, for a while.
    Ids answer;
    for (int i = rng.integer(5, 300); i > 0; --i) {
      const bool follows = answer.size() >= 3 && rng.integer(0, 40) > 0;
      answer.push_back(follows ? (answer.back() * 31 + answer[answer.size() - 3]) % 50
                               : rng.integer(0, 49));
    }
    const uint64_t owner = static_cast<uint64_t>(rng.integer(1, 2)) << 40;
    const DeviceBuffer device_answer(answer);
    RememberParams params{.memory = host,
                          .begin = num_written,
                          .owner = owner,
                          .tokens = answer.data(),
                          .num_tokens = static_cast<int>(answer.size())};
    remember_cpu({}, params);
    params.memory = device;
    params.tokens = device_answer.as<int32_t>();
    CHECK_CUDA(remember_cuda(params, nullptr));
    num_written += static_cast<uint32_t>(answer.size()) + 1;
    CHECK_EQ(device_tokens.download<int32_t>(), tokens);
    CHECK(device_owners.download<uint64_t>() == owners);
    CHECK(device_places.download<uint32_t>() == places);

    Ids history, lengths, seq, wanted, drafts, counts, match_len;
    std::vector<uint64_t> of;
    for (int s = 0; s < kSeqs; ++s) {
      const int length = rng.integer(1, std::min<int>(kLen, static_cast<int>(answer.size())));
      const int begin = rng.integer(0, static_cast<int>(answer.size()) - length);
      lengths.push_back(length);
      history.insert(history.end(), answer.begin() + begin, answer.begin() + begin + length);
      history.resize(lengths.size() * kLen, -7);
      seq.push_back(kSeqs - 1 - s);
      of.push_back(static_cast<uint64_t>(rng.integer(1, 2)) << 40);
      wanted.push_back(rng.integer(0, kDrafts));
      match_len.push_back(rng.integer(0, 3) == 0 ? rng.integer(2, kMaxMatchLen) : 0);
      counts.push_back(match_len.back() > 0 ? 1 : 0);
      for (int i = 0; i < kDrafts; ++i) drafts.push_back(1000 + i);
    }
    const DeviceBuffer device_history(history), device_lengths(lengths), device_seq(seq),
        device_of(of), device_wanted(wanted), device_drafts(drafts), device_counts(counts),
        device_match(match_len);
    RecallParams recall{.memory = device,
                        .history = device_history.as<int32_t>(),
                        .history_stride = kLen,
                        .num_tokens = device_lengths.as<int32_t>(),
                        .seq = device_seq.as<int32_t>(),
                        .owners = device_of.as<uint64_t>(),
                        .num_wanted = device_wanted.as<int32_t>(),
                        .num_seqs = kSeqs,
                        .max_drafts = kDrafts,
                        .drafts = device_drafts.as<int32_t>(),
                        .num_drafts = device_counts.as<int32_t>(),
                        .match_len = device_match.as<int32_t>()};
    CHECK_CUDA(recall_cuda(recall, nullptr));
    const Ids before = match_len;
    recall_cpu({}, {.memory = host,
                    .history = history.data(),
                    .history_stride = kLen,
                    .num_tokens = lengths.data(),
                    .seq = seq.data(),
                    .owners = of.data(),
                    .num_wanted = wanted.data(),
                    .num_seqs = kSeqs,
                    .max_drafts = kDrafts,
                    .drafts = drafts.data(),
                    .num_drafts = counts.data(),
                    .match_len = match_len.data()});
    for (size_t s = 0; s < before.size(); ++s) num_found += before[s] != match_len[s];
    CHECK_EQ(device_match.download<int32_t>(), match_len);
    CHECK_EQ(device_counts.download<int32_t>(), counts);
    CHECK_EQ(device_drafts.download<int32_t>(), drafts);
  }
  CHECK_GT(num_found, 500);
  for (const DeviceBuffer* buffer : {&device_tokens, &device_owners, &device_places}) {
    CHECK(buffer->guard_is_whole());
  }
}
