#include "cuda/draft_rows_device.h"
#include "kernels/pair_states_testing.h"

using namespace openspec;
using namespace openspec::testing;

namespace {

NeedsDevice needs_device;

}  // namespace

TEST(states_are_the_cpus) {
  Rng rng(1);
  struct Shape {
    int num_seqs, rank, width;
  };
  for (const bool is_recurrent : {false, true}) {
    for (const Shape& shape : {Shape{1, 256, 2560}, Shape{9, 24, 40}, Shape{70, 136, 264}}) {
      const StatesCase c(rng, shape.num_seqs, shape.rank, shape.width, is_recurrent);
      const PairsCase& blocks = c.blocks;
      std::vector<float> memory(2 * c.num_states(), 9.0f);
      std::vector<uint16_t> states(c.num_states(), to_bf16(7.0f));
      const DeviceTableCopy table(blocks.table);
      const DeviceBuffer seq(blocks.seq), first_sample(blocks.first_sample),
          num_drafts(blocks.num_drafts), chosen(blocks.chosen), first(blocks.first),
          outputs(c.outputs), weight(c.weight), bias(c.bias), device_memory(memory),
          device_states(states);
      for (int depth = 0; depth < PairsCase::kMaxDepth; ++depth) {
        PairStatesParams params = c.params(depth, memory, states);
        pair_states_cpu({}, params);
        params.table = table.view();
        params.seq = seq.as<int32_t>();
        params.first_sample = first_sample.as<int32_t>();
        params.num_drafts = num_drafts.as<int32_t>();
        params.chosen = chosen.as<int32_t>();
        params.pairs.first = first.data();
        params.outputs = outputs.data();
        params.weight = weight.data();
        params.bias = bias.as<float>();
        params.memory = device_memory.as<float>();
        params.states = device_states.data();
        CHECK_CUDA(pair_states_cuda(params, nullptr));
        const auto found = device_states.download<uint16_t>();
        for (size_t i = 0; i < found.size(); ++i) {
          const float expected = from_bf16(states[i]);
          CHECK_NEAR(from_bf16(found[i]), expected, 0.01f * std::abs(expected) + 1e-4f);
        }
      }
      CHECK(device_states.guard_is_whole() && device_memory.guard_is_whole());
    }
  }
}
