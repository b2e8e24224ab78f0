#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/thread_pool.h"
#include "kernels/common/exec.h"
#include "kernels/common/finite.h"
#include "kernels/linear/linear_stack.h"
#include "kernels/linear/packed_linear.h"
#include "model/weights/buffer.h"
#include "model/weights/part.h"
#include "model/weights/scales.h"

namespace openspec {

/// A tensor that a checkpoint must hold.
struct TensorSpec {
  std::string name;
  std::vector<int64_t> shape;
  bool is_token_map = false;
};

/// A model's weights in one buffer, in the order of use, in the form that the device's ops read;
/// and the way from a checkpoint's tensors into it. Matrices stay as published, bf16 or codes. On
/// CUDA they lie on the device that was current when they were made, whichever is current later.
class Weights {
 public:
  /// Without `bytes` of memory it only counts what is added. On the host `num_threads` load.
  explicit Weights(Device device, size_t bytes = 0, int num_threads = 1);
  /// Bytes of what the constructor Tensors(weights, config) adds.
  template <typename Tensors, typename Config>
  static size_t bytes_of(const Config& config, Device device) {
    Weights counted(device);
    Tensors(counted, config);
    return counted.num_taken_;
  }

  Device device() const { return device_; }
  /// Which tensors of the matrices that are added come as codes; the caller's.
  void expect_quantized(const QuantizedTensors& tensors) { quantized_ = &tensors; }
  bool is_quantized(const std::string& name) const { return scale_of(name) != nullptr; }
  /// A matrix of several checkpoint tensors, one below the other (gate, then up for SwiGLU), of
  /// each of which the outputs and inputs are here that are given. A tensor may be part of several
  /// matrices.
  /// `may_split`: its sum is of splits, which may be left for the next op to add. `has_bias`: of
  /// each tensor there is a bias too, "x.bias" beside "x.weight". Of tensors of codes there are
  /// scales; throws ArgumentError if only some of them have such. Outputs beyond those of the
  /// tensors are zero.
  PackedLinear add_linear(const std::string& prefix, const std::vector<std::string>& names,
                          const std::vector<Part>& outputs, Part inputs, LinearEpilogue epilogue,
                          bool may_split = false, bool has_bias = false);
  /// A matrix of any number of outputs; on CUDA rows of zeros fill its last unit up.
  PackedLinear add_router(const std::string& name, int num_outputs, int num_inputs);
  /// `count` such matrices, not split, one behind the other: in the checkpoint the number of each
  /// stands for the "*" of `prefix`. They have one place among the tensors, however many they are.
  LinearStack add_stack(const std::string& prefix, const std::vector<std::string>& names, int count,
                        const std::vector<Part>& outputs, Part inputs, LinearEpilogue epilogue);
  /// [width] fp32; `from_one`: the checkpoint holds what is to be added to 1.
  const float* add_norm(const std::string& name, int width, bool from_one = false);
  /// [taps, width] fp32, [width, 1, taps] in the checkpoint: a convolution of each channel.
  const float* add_taps(const std::string& name, int width, int taps);
  using Convert = std::function<void(std::vector<float>& values)>;
  /// `shape` fp32, row-major; `convert` makes of the checkpoint's values what is kept.
  const float* add_values(const std::string& name, const std::vector<int64_t>& shape,
                          Convert convert = nullptr);
  /// Rows of a table that the checkpoint has not: copies of one that it has.
  struct MoreRows {
    int count = 0;
    int like = 0;
  };
  /// [num_rows, width] bf16 in the checkpoint's order, then `more`.
  const void* add_table(const std::string& name, int num_rows, int width, MoreRows more);
  const void* add_table(const std::string& name, int num_rows, int width) {
    return add_table(name, num_rows, width, {});
  }
  /// [width] bf16, [1, 1, width] in the checkpoint, which may come as fp32 and is then rounded.
  const void* add_table_row(const std::string& name, int width);
  struct TokenMap {
    const int32_t* token_of = nullptr;   // [count]
    const int32_t* column_of = nullptr;  // [vocab_size] the other way round; -1: none
  };
  /// `count` token ids, from offsets: id i is i + offset i. They must rise, within [0, vocab_size).
  TokenMap add_token_map(const std::string& name, int count, int vocab_size);
  /// The tensor `from` serves as `name` too, which the checkpoint then need not hold.
  void tie(const std::string& name, const std::string& from);

  /// Every tensor of the checkpoint, whole, each to be given once to `load`.
  std::vector<TensorSpec> expected_tensors() const;
  /// Takes `data` (row-major, `dtype`, `bytes` long); the source may go away afterwards.
  void load(const std::string& name, const void* data, size_t bytes, DType dtype);
  /// Takes the offsets of a token map; the source may go away afterwards.
  void load_offsets(const std::string& name, std::span<const int64_t> offsets);
  /// Throws ArgumentError naming a tensor that was not given.
  void finish_loading();
  /// Tensors with a NaN or an infinite number, in one read of the weights. Tensors that make one
  /// matrix are named together.
  std::vector<std::string> non_finite() const;

  /// Makes these a spare of others that steps read: they may be loaded again and again, by a thread
  /// beside the steps, and take the others' place. From here on nothing is allocated: what is
  /// copied to a device goes in slices of this size, which is what a spare has on top.
  static constexpr size_t kSpareSliceBytes = size_t{8} << 20;
  void become_spare();
  /// What it takes for weights of so many bytes.
  static size_t spare_bytes(Device device, size_t bytes) {
    return bytes + (device == Device::kCuda ? kSpareSliceBytes : 0);
  }
  /// All tensors are to be given again. Waits for the exchange before.
  void begin_loading();
  /// Throws what `load` would; false: the tensor has a NaN or an infinite number. Stores nothing.
  bool check(const std::string& name, const void* data, size_t bytes, DType dtype) const;
  void check_offsets(const std::string& name, std::span<const int64_t> offsets) const;
  /// These and a spare of the same plan, which nobody loads just then, have each other's content.
  /// Where they lie stays. On CUDA enqueued: whatever runs before reads the old content, whatever
  /// is enqueued later the new, since a copy on the device does not overlap its neighbours.
  void exchange(Weights& spare, const ExecContext& exec);

 private:
  /// Makes the weights' device the current one.
  std::optional<device::Use> use_device() const {
    if (device_ == Device::kCpu) return std::nullopt;
    return std::optional<device::Use>(std::in_place, ordinal_);
  }

  using Store = std::function<void(const void* data, DType dtype)>;
  using StoreOffsets = std::function<void(std::span<const int64_t> offsets)>;
  /// Where the rows of one checkpoint tensor go.
  struct Destination {
    std::vector<int64_t> shape;
    std::vector<Store> stores;
    StoreOffsets store_offsets = nullptr;
    int map_vocab_size = 0;                           // of a token map: what its ids are below
    std::optional<DType> matrix_type = std::nullopt;  // the only one that a matrix may come as
    bool loaded = false;
  };

  /// Tensors of one shape, of which each stands for the number in place of the "*" of their name.
  struct Stack {
    std::vector<int64_t> shape;
    std::function<void(int index, const void* data, DType dtype)> store;
    std::optional<DType> matrix_type;
    std::vector<bool> is_loaded;
  };

  /// A matrix without memory, as add_linear makes it.
  PackedLinear matrix_of(const std::string& prefix, const std::vector<std::string>& names,
                         const std::vector<Part>& outputs, Part inputs, LinearEpilogue epilogue,
                         bool may_split) const;
  size_t packed_bytes(const PackedLinear& matrix) const;
  /// Room for the scales of a stack, and where those of its tensors go.
  const float* add_stack_scales(const PackedLinear& matrix, const std::string& prefix,
                                const std::vector<std::string>& names, int count,
                                const std::vector<Part>& outputs);
  /// `name` is that of a tensor of a stack.
  void load_stacked(const std::string& name, const void* data, size_t bytes, DType dtype);
  /// The checkpoint's tensor `name` goes to `to`, as fp32: of its values those of `part`.
  void store_values(const std::string& name, const std::vector<int64_t>& shape, Part part,
                    float* to, Convert convert = nullptr);
  /// How the tensor comes, if it comes as codes.
  const TensorScale* scale_of(const std::string& name) const;
  /// Room for the scales of a matrix, and where those of its tensors go.
  const float* add_scales(const PackedLinear& matrix, const std::vector<std::string>& names,
                          const std::vector<Part>& outputs);
  void* take(size_t bytes);
  /// Room for numbers that `non_finite` looks at.
  void* take_numbers(const std::string& name, size_t bytes, DType dtype);
  void put(void* to, const void* from, size_t bytes);
  size_t slice_bytes() const;
  /// Throws ArgumentError if there is no such tensor.
  const Destination& destination_of(const std::string& name) const;
  void clear(void* to, size_t bytes);
  /// `rows` [num_rows, whole_inputs] of the shape's format become rows from `first_output` on of
  /// what is here.
  void pack(const PackedLinear& shape, const void* rows, int first_output, int num_rows,
            void* packed);
  /// As `pack`, with rows [num_rows, num_inputs].
  void pack_rows(const PackedLinear& shape, const void* rows, int first_output, int num_rows,
                 void* packed);

  Device device_;
  int num_threads_;
  int ordinal_ = 0;  // on CUDA
  Buffer buffer_;
  size_t num_taken_ = 0;
  const QuantizedTensors* quantized_ = nullptr;
  std::map<std::string, Destination> destinations_;
  std::map<std::string, Stack> stacks_;
  std::vector<std::pair<std::string, NumberArea>> numbers_;
  bool is_spare_ = false;
  std::optional<device::Event> exchanged_;  // a spare's: what was enqueued last has been done
  // While loading, a spare's always: on CUDA rows on their way into a packed matrix; on the host
  // who packs.
  Buffer staging_;
  std::unique_ptr<ThreadPool> packers_;
};

}  // namespace openspec
