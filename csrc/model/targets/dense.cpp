// Decoders of attention over paged KV and one MLP a layer, all layers alike.

#include "core/check.h"
#include "kernels/exchange/exchange.h"
#include "kernels/ops.h"
#include "model/parts/decoder_model.h"
#include "model/parts/decoder_pass.h"
#include "model/parts/sum_exchange.h"
#include "model/targets/dense_layers.h"
#include "model/targets/target.h"

namespace openspec {

namespace {

class DenseTarget final : public TargetModel, DecoderModel<DenseConfig, DenseTensors> {
 public:
  explicit DenseTarget(const TargetSetup& setup)
      : DecoderModel(DenseConfig(setup.spec, setup.rank), setup.dtype, setup.device, setup.limits,
                     setup.num_threads, setup.exchange) {
    tensors_.shared.head.exchange = setup.exchange;
  }

  static size_t weight_bytes_of(const TargetSetup& setup) {
    return weight_bytes(DenseConfig(setup.spec, setup.rank), setup.device);
  }
  static size_t scratch_bytes_of(const TargetSetup& setup) {
    return scratch_bytes(DenseConfig(setup.spec, setup.rank), setup.dtype, setup.device,
                         setup.limits, setup.num_threads);
  }
  static InboxFloats inbox_floats_of(const TargetSetup& setup) {
    const DenseConfig c(setup.spec, setup.rank);
    return inbox_floats(setup.device, setup.rank.size, c.max_splits(), setup.limits.max_rows,
                        c.hidden_size);
  }

  std::vector<Weights*> weights() override { return {&weights_}; }
  SharedTensors shared() const override { return tensors_.shared; }
  void forward(const ExecContext& exec, const RowBatch& rows, const TargetMemory& memory,
               const std::vector<int>& capture_layers, void* captured) override;
  void logits(const ExecContext& exec, const int32_t* row, int count, float* out) override;
};

void DenseTarget::forward(const ExecContext& exec, const RowBatch& rows, const TargetMemory& memory,
                          const std::vector<int>& capture_layers, void* captured) {
  OPENSPEC_CHECK(rows.num_rows >= 1 && rows.num_rows <= limits_.max_rows, "a step of ",
                 rows.num_rows, " rows, at most ", limits_.max_rows);
  void* residual = scratch_.residual();
  DecoderPass pass(exec, scratch_, rows, memory.page_table, memory.kv.front(), inv_freq_.floats(),
                   /*first_token=*/0, /*is_fenced=*/true);
  ops::embedding(exec, {.token = rows.row_token,
                        .table = tensors_.shared.embedding,
                        .out = residual,
                        .num_rows = rows.num_rows,
                        .width = config_.hidden_size,
                        .dtype = dtype_});
  run_dense_layers(pass, tensors_, memory.kv, {capture_layers, captured}, residual,
                   scratch_.normed());
}

void DenseTarget::logits(const ExecContext& exec, const int32_t* row, int count, float* out) {
  OPENSPEC_CHECK(count <= limits_.max_logits_rows, count, " rows of logits, at most ",
                 limits_.max_logits_rows);
  scratch_.logits(exec, tensors_.shared.head, row, count, out, are_dealt(count));
}

const TargetRegistration registration(
    "dense",
    {.make = [](const TargetSetup& setup) -> std::unique_ptr<TargetModel> {
       return std::make_unique<DenseTarget>(setup);
     },
     .weight_bytes = &DenseTarget::weight_bytes_of,
     .scratch_bytes = &DenseTarget::scratch_bytes_of,
     .state_needs =
         [](const TargetSetup& setup) {
           const DenseConfig config(setup.spec, setup.rank);
           return StateNeeds{.kv_layers = {setup.spec.layers.size(),
                                           {config.part().kv_heads.count, config.head_dim}}};
         },
     .inbox_floats = &DenseTarget::inbox_floats_of});

}  // namespace

}  // namespace openspec
