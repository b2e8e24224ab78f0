#pragma once

#include <memory>

#include "kernels/common/exec.h"
#include "model/parts/decoder_layer.h"
#include "model/weights/buffer.h"
#include "model/weights/weights.h"

namespace openspec {

/// What every model of decoder layers holds: its geometry, the weights, and memory for a pass.
///
/// `Config` is a LayerGeometry and more: what it allows (`validate`) and what passes have to hold
/// (`pass_limits`). The constructor Tensors(weights, config) names the checkpoint's tensors and
/// keeps where they lie.
template <typename Config, typename Tensors>
class DecoderModel {
 public:
  using Geometry = Config;

  /// `num_threads`: of the CPU ops; `exchange`: of a rank among others.
  DecoderModel(const Config& config, DType dtype, Device device, const ForwardLimits& limits,
               int num_threads, SumExchange* exchange = nullptr)
      : config_((config.validate(), check_geometry(config, dtype, device), config)),
        dtype_(dtype),
        limits_(config.pass_limits(limits)),
        weights_(device, weight_bytes(config, device), num_threads),
        tensors_(weights_, config_),
        inv_freq_(copy_for(device, config.inv_freq)),
        scratch_(config_, dtype, device, limits_, num_threads, exchange) {}

  Weights& weights() { return weights_; }
  const Tensors& tensors() const { return tensors_; }
  /// Room for other weights, which `Weights::exchange` puts in the place of these.
  std::unique_ptr<Weights> make_spare() const {
    auto spare =
        std::make_unique<Weights>(weights_.device(), weight_bytes(config_, weights_.device()));
    Tensors(*spare, config_);
    spare->become_spare();
    return spare;
  }

  /// Bytes, known before anything is allocated.
  static size_t weight_bytes(const Config& config, Device device) {
    return Weights::bytes_of<Tensors>(config, device);
  }
  static size_t scratch_bytes(const Config& config, DType dtype, Device device,
                              const ForwardLimits& limits, int num_threads) {
    return DecoderScratch::bytes(config, dtype, device, config.pass_limits(limits), num_threads);
  }

 protected:
  Config config_;
  DType dtype_;
  ForwardLimits limits_;
  Weights weights_;
  Tensors tensors_;
  Buffer inv_freq_;  // [head_dim / 2] fp32
  DecoderScratch scratch_;
};

}  // namespace openspec
