#include "runner_testing.h"

using namespace openspec;
using namespace openspec::testing;

namespace {

TargetSpec small_mixture() {
  TargetSpec target = small_target(3, 200);
  const ExpertsSpec experts{.num_experts = 12, .top_k = 3, .intermediate_size = 40};
  target.layers[0].mlp = target.layers[2].mlp = experts;
  target.kind = "mixture";
  return target;
}

TargetSetup setup_of(const TargetSpec& spec, Device device = Device::kCpu) {
  return {.spec = spec, .dtype = DType::kF32, .device = device, .limits = {.max_rows = 8}};
}

std::string prefix(int layer) { return "model.layers." + std::to_string(layer) + ".mlp.experts."; }

}  // namespace

TEST(what_a_mixture_does_not_do_is_refused) {
  const TargetKind& kind = target_kind("mixture");
  TargetSpec spec = small_mixture();
  CHECK(kind.inbox_floats == nullptr);
  std::get<ExpertsSpec>(spec.layers[2].mlp).num_experts = 16;
  CHECK_THROWS(kind.weight_bytes(setup_of(spec)), ArgumentError, "must be alike");
  spec = small_mixture();
  for (const int layer : {0, 2}) {
    std::get<ExpertsSpec>(spec.layers[static_cast<size_t>(layer)].mlp).top_k = 13;
  }
  CHECK_THROWS(kind.scratch_bytes(setup_of(spec)), ArgumentError, "rows go to 13 of 12 experts");
}

TEST(experts_are_loaded_in_any_order_and_each_is_wanted) {
  const TargetSpec spec = small_mixture();
  const auto model = target_kind("mixture").make(setup_of(spec));
  Weights& weights = *model->weights().front();
  int num_experts = 0;
  for (const TensorSpec& tensor : weights.expected_tensors()) {
    num_experts += tensor.name.find(".experts.") != std::string::npos;
  }
  CHECK_EQ(num_experts, 2 * 12 * 3);
  load_random_weights(weights, 3);
  weights.finish_loading();

  const auto other = target_kind("mixture").make(setup_of(spec));
  Weights& partly = *other->weights().front();
  const std::vector<uint16_t> data(48 * 40);
  const auto load = [&](const std::string& name) {
    partly.load(name, data.data(), data.size() * 2, DType::kBF16);
  };
  for (const char* wrong : {"12.up_proj.weight", "-1.up_proj.weight", "07.up_proj.weight",
                            "up_proj.weight", "*.up_proj.weight", "7.up_proj.bias"}) {
    CHECK_THROWS(load(prefix(0) + wrong), ArgumentError, "is not part of the model");
  }
  CHECK_THROWS(load(prefix(1) + "7.up_proj.weight"), ArgumentError, "is not part of the model");
  CHECK_THROWS(partly.load(prefix(2) + "7.up_proj.weight", data.data(), 2, DType::kBF16),
               ArgumentError, "has 2 bytes, expected");
  load_random_weights(partly, 3);
  for (int i = 11; i >= 0; --i) load(prefix(0) + std::to_string(i) + ".up_proj.weight");
  partly.finish_loading();
}

TEST(a_missing_expert_is_named) {
  const TargetSpec spec = small_mixture();
  const auto model = target_kind("mixture").make(setup_of(spec));
  Weights& weights = *model->weights().front();
  const std::string missing = prefix(2) + "10.down_proj.weight";
  for (const TensorSpec& tensor : weights.expected_tensors()) {
    size_t count = 1;
    for (const int64_t size : tensor.shape) count *= static_cast<size_t>(size);
    const std::vector<uint16_t> data(count);
    if (tensor.name == missing) continue;
    weights.load(tensor.name, data.data(), data.size() * 2, DType::kBF16);
  }
  CHECK_THROWS(weights.finish_loading(), ArgumentError, "tensor " + missing + " is missing");
}
