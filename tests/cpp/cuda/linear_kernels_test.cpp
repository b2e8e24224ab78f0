// The kernels behind linear_cuda, whatever it would choose: the same bits from each, under each
// plan.

#include <algorithm>
#include <map>
#include <string>

#include "cuda/linear_testing.h"

namespace {

using namespace openspec;
using namespace openspec::testing;

NeedsDevice needs_device;

// Also where linear_cuda would not choose linear_wgmma.
TEST(wgmma_gives_the_bits_of_stream) {
  for (const Shape& shape : shapes()) {
    Problem& problem = problem_of(shape);
    if (!cuda::linear_wgmma_takes(problem.weight(), kMaxRows)) continue;
    for (const Out out : outs(shape)) {
      for (const int num_rows :
           {1, 8, 9, 16, 17, 24, 25, 32, 33, 64, 65, 96, 97, 128, 129, 192, 256}) {
        if (problem.run(0, num_rows, out, By::kWgmma) !=
            problem.run(0, num_rows, out, By::kStream)) {
          problem.fail("linear_wgmma and linear_stream differ", num_rows);
        }
      }
    }
  }
}

TEST(the_plan_does_not_matter) {
  for (const char* name : {"4B qkv", "4B o", "4B down", "0.6B gate_up", "tiny down"}) {
    Problem& problem = problem_named(name);
    const Out out = problem.shape().num_splits > 1 ? Out::kPartials : Out::kBF16;
    for (const int num_rows : {1, 8, 16, 24, 32, 64}) {
      const std::vector<uint8_t> expected = problem.run(0, num_rows, out, By::kStream);
      for (const int blocks_per_sm : {1, 2, 3}) {
        for (const int ring_kib : {33, 48, 100}) {
          if (problem.run(0, num_rows, out, By::kStream, {blocks_per_sm, ring_kib}) != expected) {
            problem.fail("depends on the plan", num_rows);
          }
        }
      }
    }
  }
}

// Blocks that draw their work from one workspace, which every launch leaves as it found it. All
// shapes follow one another without waiting, as in a model; then some at a time, so that a launch
// often meets the one that it shares multiprocessors with.
TEST(drawing_work_does_not_matter) {
  const DeviceBuffer workspace(std::vector<uint8_t>(kLinearWorkspaceBytesCuda, 0));
  const auto is_zero = [&] {
    return workspace.download<uint8_t>() == std::vector<uint8_t>(kLinearWorkspaceBytesCuda, 0);
  };
  const auto out_of = [](const Shape& shape) {
    return shape.num_splits > 1 ? Out::kPartials : Out::kBF16;
  };
  for (const int num_rows : {1, 8, 9, 16, 17, 24, 25, 32}) {
    std::map<std::string, std::vector<uint8_t>> expected;
    for (const Shape& shape : shapes()) {
      expected[shape.name] = problem_of(shape).run(0, num_rows, out_of(shape), By::kStream);
    }
    for (const int blocks_per_sm : {1, 2}) {
      for (const size_t at_a_time : {shapes().size(), size_t{3}}) {
        for (size_t first = 0; first < shapes().size(); first += at_a_time) {
          const size_t end = std::min(first + at_a_time, shapes().size());
          for (size_t i = first; i < end; ++i) {
            problem_of(shapes()[i]).poison(num_rows, out_of(shapes()[i]));
          }
          for (int repeat = 0; repeat < 4; ++repeat) {
            for (size_t i = first; i < end; ++i) {
              const Problem& problem = problem_of(shapes()[i]);
              LinearParams params =
                  problem.params(num_rows, out_of(shapes()[i]), problem.device_x());
              params.workspace = workspace.as<float>();
              CHECK_CUDA(cuda::linear_stream(params, nullptr, {.blocks_per_sm = blocks_per_sm}));
            }
          }
          for (size_t i = first; i < end; ++i) {
            const Problem& problem = problem_of(shapes()[i]);
            if (problem.output(num_rows, out_of(shapes()[i])) != expected[shapes()[i].name]) {
              problem.fail("other bits where blocks draw their work", num_rows);
            }
          }
          CHECK(is_zero());
        }
      }
    }
  }
  CHECK(workspace.guard_is_whole());
}

}  // namespace
