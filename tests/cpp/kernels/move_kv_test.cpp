#include "kernels/move_kv.h"

#include "kernels/kernel_testing.h"

using namespace openspec;
using namespace openspec::testing;

// An accepted path 1, 3, 4 of a tree of six behind 5 tokens comes to lie at 5, 6, 7; all else
// stays.
TEST(moved_tokens_lie_contiguously) {
  constexpr int kHeads = 3, kHeadDim = 4, kPageSize = 4, kNumPages = 6;
  constexpr size_t kSize = size_t{kNumPages} * 2 * kHeads * kPageSize * kHeadDim;
  const std::vector<int32_t> pages = {0, 1, 2, 5, 3, 4};  // of two sequences
  const std::vector<int32_t> seq = {1, 1, 1, 0}, from = {6, 8, 9, 3}, to = {5, 6, 7, 2};
  const auto at = [&](int slot, int token, int part, int head, int i) {
    const int page = pages[static_cast<size_t>(slot * 3 + token / kPageSize)];
    return static_cast<size_t>(
        (((page * 2 + part) * kHeads + head) * kPageSize + token % kPageSize) * kHeadDim + i);
  };
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    std::vector<Buffer> layers, expected;
    for (int layer = 0; layer < 3; ++layer) {
      Buffer buffer(kSize, dtype);
      for (size_t i = 0; i < kSize; ++i) buffer.set(i, static_cast<float>(i % 251) - layer);
      layers.push_back(buffer);
      expected.push_back(buffer);
      for (size_t move = 0; move < seq.size(); ++move) {
        for (int part : {0, 1}) {
          for (int head = 0; head < kHeads; ++head) {
            for (int i = 0; i < kHeadDim; ++i) {
              expected.back().set(at(seq[move], to[move], part, head, i),
                                  buffer[at(seq[move], from[move], part, head, i)]);
            }
          }
        }
      }
    }
    std::vector<KvLayerView> views;
    for (Buffer& layer : layers) views.push_back({layer.data(), kHeads, kHeadDim, kPageSize});
    ThreadPool pool(2);
    move_kv_cpu({.pool = &pool}, {.layers = views.data(),
                                  .num_layers = 2,  // the third stays
                                  .page_table = {pages.data(), 3},
                                  .seq = seq.data(),
                                  .from = from.data(),
                                  .to = to.data(),
                                  .num_moves = 4,
                                  .dtype = dtype});
    for (size_t layer = 0; layer < 2; ++layer) {
      CHECK(layers[layer].same(0, expected[layer], 0, kSize));
    }
    for (size_t i = 0; i < kSize; ++i) CHECK_EQ(layers[2][i], static_cast<float>(i % 251) - 2);
  }
}
