#include "model/weights/weights.h"

#include <algorithm>
#include <bit>
#include <charconv>
#include <cstring>
#include <memory>

#include "core/check.h"
#include "kernels/common/device.h"
#include "kernels/linear/linear.h"
#include "kernels/linear/splits.h"

namespace openspec {

namespace {

constexpr DType kMatrixType = DType::kBF16;
constexpr MatrixFormat kTableFormat = MatrixFormat::kBF16;
constexpr size_t kStagingBytes = size_t{64} << 20;
constexpr int kRowsAtOnce = 256;  // whose inputs are cut

int64_t num_elements(const std::vector<int64_t>& shape) {
  int64_t count = 1;
  for (int64_t size : shape) count *= size;
  return count;
}

std::string joined(const std::string& prefix, const std::vector<std::string>& names) {
  std::string all;
  for (const std::string& name : names) all += (all.empty() ? "" : ", ") + prefix + name;
  return all;
}

/// `name` with `index` in place of its "*".
std::string numbered(const std::string& name, int index) {
  const size_t star = name.find('*');
  return name.substr(0, star) + std::to_string(index) + name.substr(star + 1);
}

/// `name` with "*" in place of its last part between dots that is a number, and that number; -1:
/// there is none.
std::pair<std::string, int> starred(const std::string& name) {
  size_t end = name.size();
  while (end != std::string::npos && end > 0) {
    const size_t dot = name.rfind('.', end - 1);
    const size_t begin = dot == std::string::npos ? 0 : dot + 1;
    int index = -1;
    const auto [rest, error] = std::from_chars(&name[begin], name.data() + end, index);
    if (error == std::errc() && rest == name.data() + end && index >= 0 &&
        std::to_string(index).size() == end - begin) {
      return {name.substr(0, begin) + "*" + name.substr(end), index};
    }
    end = dot;
  }
  return {name, -1};
}

/// Throws ArgumentError unless a tensor has the bytes and type that its place wants;
/// `matrix_type`: the only one that it may come as.
void check_tensor(const std::string& name, const std::vector<int64_t>& shape,
                  std::optional<DType> matrix_type, const void* data, size_t bytes, DType dtype) {
  const size_t expected = static_cast<size_t>(num_elements(shape)) * dtype_bytes(dtype);
  OPENSPEC_CHECK_ARG(bytes == expected, "tensor ", name, " has ", bytes, " bytes, expected ",
                     expected);
  const DType wanted = matrix_type.value_or(dtype);
  OPENSPEC_CHECK_ARG(wanted != DType::kE4M3 || dtype == wanted, "tensor ", name,
                     " must be e4m3 with a scale, as others of the checkpoint are");
  OPENSPEC_CHECK_ARG(dtype == wanted, "tensor ", name,
                     " must be bf16; convert the checkpoint with torch_dtype=bfloat16");
  OPENSPEC_CHECK_ARG(matrix_type || dtype != DType::kE4M3, "tensor ", name, " must not be e4m3");
  OPENSPEC_CHECK_ARG(dtype != DType::kE4M3 || !has_nan_code(data, bytes), "tensor ", name,
                     " holds NaN, codes 0x7F or 0xFF; get the checkpoint anew");
}

/// The tokens of a map's entries. Throws ArgumentError unless they rise within [0, vocab_size).
std::vector<int32_t> ids_of(const std::string& name, std::span<const int64_t> offsets,
                            int vocab_size) {
  std::vector<int32_t> ids;
  for (size_t i = 0; i < offsets.size(); ++i) {
    const int64_t id = static_cast<int64_t>(i) + offsets[i];
    OPENSPEC_CHECK_ARG(id >= 0 && id < vocab_size, "tensor ", name, ": entry ", i,
                       " stands for token ", id, ", the target has ", vocab_size,
                       "; its values are offsets: id = entry + value");
    OPENSPEC_CHECK_ARG(ids.empty() || id > ids.back(), "tensor ", name, ": entry ", i,
                       " stands for token ", id, ", which does not rise; its values are ",
                       "offsets: id = entry + value");
    ids.push_back(static_cast<int32_t>(id));
  }
  return ids;
}

/// Numbers of the tensor of scales that a tensor of `outputs` of the matrix has.
size_t num_scale_values(const PackedLinear& matrix, const TensorScale& scale, Part outputs) {
  const auto num_values = static_cast<size_t>(num_elements(scale.shape));
  const int blocks = scale.form == TensorScale::Form::kTensor ? 1
                     : scale.form == TensorScale::Form::kChannel
                         ? outputs.whole
                         : (outputs.whole + kScaleOutputs - 1) / kScaleOutputs *
                               ((matrix.whole_inputs() + kScaleInputs - 1) / kScaleInputs);
  OPENSPEC_CHECK_ARG(num_values == static_cast<size_t>(blocks), "tensor ", scale.name, " has ",
                     num_values, " scales, expected ", blocks);
  return num_values;
}

/// To nearest, ties to even; NaN stays NaN.
uint16_t to_bf16(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  if (value != value) return static_cast<uint16_t>(bits >> 16 | 0x40u);
  return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

}  // namespace

Weights::Weights(Device device, size_t bytes, int num_threads)
    : device_(device),
      num_threads_(num_threads),
      ordinal_(device == Device::kCuda && bytes > 0 ? device::current() : 0),
      buffer_(bytes, memory_of(device)) {}

void* Weights::take(size_t bytes) {
  void* data = buffer_.bytes() == 0 ? nullptr : buffer_.at(num_taken_);
  num_taken_ += area_bytes(bytes);
  OPENSPEC_CHECK(data == nullptr || num_taken_ <= buffer_.bytes(), "weights outgrow their plan");
  return data;
}

void* Weights::take_numbers(const std::string& name, size_t bytes, DType dtype) {
  void* data = take(bytes);
  numbers_.push_back({name, {data, bytes, dtype}});
  return data;
}

size_t Weights::slice_bytes() const { return is_spare_ ? kSpareSliceBytes : kStagingBytes; }

void Weights::put(void* to, const void* from, size_t bytes) {
  if (device_ != Device::kCuda) {
    std::memcpy(to, from, bytes);
    return;
  }
  for (size_t done = 0; done < bytes; done += slice_bytes()) {
    device::copy_to_device(static_cast<std::byte*>(to) + done,
                           static_cast<const std::byte*>(from) + done,
                           std::min(slice_bytes(), bytes - done), nullptr);
  }
}

void Weights::clear(void* to, size_t bytes) {
  if (device_ == Device::kCuda) {
    device::fill_zero(to, bytes, nullptr);
  } else {
    std::memset(to, 0, bytes);
  }
}

void Weights::pack(const PackedLinear& shape, const void* rows, int first_output, int num_rows,
                   void* packed) {
  if (shape.has_all_inputs()) {
    pack_rows(shape, rows, first_output, num_rows, packed);
    return;
  }
  const size_t width = format_bytes(shape.format, 1, shape.num_inputs);
  const size_t stride = format_bytes(shape.format, 1, shape.whole_inputs());
  const auto* from =
      static_cast<const std::byte*>(rows) + format_bytes(shape.format, 1, shape.shard.first_input);
  std::vector<std::byte> cut(kRowsAtOnce * width);
  for (int row = 0; row < num_rows; row += kRowsAtOnce) {
    const int count = std::min(kRowsAtOnce, num_rows - row);
    for (int i = 0; i < count; ++i) {
      std::memcpy(&cut[static_cast<size_t>(i) * width],
                  from + static_cast<size_t>(row + i) * stride, width);
    }
    pack_rows(shape, cut.data(), first_output + row, count, packed);
  }
}

void Weights::pack_rows(const PackedLinear& shape, const void* rows, int first_output, int num_rows,
                        void* packed) {
  const size_t row_bytes = format_bytes(shape.format, 1, shape.num_inputs);
  if (device_ != Device::kCuda) {
    if (packers_ == nullptr) packers_ = std::make_unique<ThreadPool>(num_threads_);
    const int num_panels = (num_rows + kLinearPanel - 1) / kLinearPanel;
    packers_->try_parallel_for(static_cast<size_t>(num_panels), [&](size_t panel) {
      const int row = static_cast<int>(panel) * kLinearPanel;
      const auto* from = static_cast<const std::byte*>(rows) + static_cast<size_t>(row) * row_bytes;
      linear_pack_cpu(shape, from, first_output + row, std::min(kLinearPanel, num_rows - row),
                      packed);
    });
    return;
  }
#ifdef OPENSPEC_CUDA
  if (staging_.bytes() == 0) staging_ = Buffer(slice_bytes(), Memory::kDevice);
  const int most_rows = static_cast<int>(slice_bytes() / row_bytes);
  for (int row = 0; row < num_rows; row += most_rows) {
    const int count = std::min(most_rows, num_rows - row);
    const auto* from = static_cast<const std::byte*>(rows) + static_cast<size_t>(row) * row_bytes;
    device::copy_to_device(staging_.data(), from, static_cast<size_t>(count) * row_bytes, nullptr);
    device::check(
        linear_pack_cuda(shape, staging_.data(), first_output + row, count, packed, nullptr),
        "linear_pack");
  }
#endif
}

PackedLinear Weights::matrix_of(const std::string& prefix, const std::vector<std::string>& names,
                                const std::vector<Part>& outputs, Part inputs,
                                LinearEpilogue epilogue, bool may_split) const {
  PackedLinear linear;
  for (const Part& part : outputs) {
    linear.num_outputs += part.count;
    linear.shard.first_output += part.first;
    linear.shard.whole_outputs += part.whole;
  }
  linear.num_inputs = inputs.count;
  linear.shard.first_input = inputs.first;
  linear.shard.whole_inputs = inputs.whole;
  linear.epilogue = epilogue;
  if (may_split) linear.num_splits = linear_num_splits(linear.whole_outputs(), inputs.whole);
  for (const std::string& name : names) {
    const TensorScale* scale = scale_of(prefix + name);
    const ScaleKind kind = scale == nullptr ? ScaleKind::kNone : scale_kind(scale->form);
    OPENSPEC_CHECK_ARG(&name == &names.front() || kind == linear.scale_kind, "tensors ",
                       joined(prefix, names), " make one matrix, so all of them must be bf16, or ",
                       "all of them e4m3 with scales of the same kind");
    linear.scale_kind = kind;
  }
  if (linear.scale_kind != ScaleKind::kNone) linear.format = MatrixFormat::kE4M3;
  if (device_ == Device::kCuda) {
    OPENSPEC_CHECK_ARG(linear.num_outputs % 16 == 0 && inputs.count % 16 == 0, prefix,
                       names.front(), ": a matrix of ", linear.num_outputs, " x ", inputs.count,
                       " cannot run on CUDA, sizes must be multiples of 16; use --device cpu");
    linear.layout = LinearLayout::kTiles;
  } else {
    linear.layout = linear_layout_cpu(inputs.whole);
  }
  return linear;
}

size_t Weights::packed_bytes(const PackedLinear& matrix) const {
  if (device_ != Device::kCuda) return linear_packed_bytes_cpu(matrix);
  return format_bytes(matrix.format, matrix.num_outputs, matrix.num_inputs);
}

PackedLinear Weights::add_linear(const std::string& prefix, const std::vector<std::string>& names,
                                 const std::vector<Part>& outputs, Part inputs,
                                 LinearEpilogue epilogue, bool may_split, bool has_bias) {
  PackedLinear linear = matrix_of(prefix, names, outputs, inputs, epilogue, may_split);
  const bool has_codes = linear.format == MatrixFormat::kE4M3;
  const std::string all_names = joined(prefix, names);
  const size_t bytes = packed_bytes(linear);
  void* packed = has_codes ? take(bytes) : take_numbers(all_names, bytes, kMatrixType);
  linear.data = packed;
  if (outputs.size() > names.size()) {
    OPENSPEC_CHECK_ARG(!has_codes, "tensors ", all_names, " must be bf16");
    if (packed != nullptr) clear(packed, bytes);
  }
  float* bias = nullptr;
  if (has_bias) {
    const size_t bias_bytes = static_cast<size_t>(linear.num_outputs) * sizeof(float);
    bias = static_cast<float*>(take_numbers("biases of " + all_names, bias_bytes, DType::kF32));
    linear.bias = bias;
  }
  std::vector<std::string> tensors;
  int first = 0;
  for (size_t i = 0; i < names.size(); ++i) {
    const Part part = outputs[i];
    const std::string& name = tensors.emplace_back(prefix + names[i]);
    Destination& destination = destinations_[name];
    destination.shape = {part.whole, inputs.whole};
    destination.matrix_type = has_codes ? DType::kE4M3 : kMatrixType;
    destination.stores.push_back([this, linear, packed, first, part](const void* data, DType) {
      const auto* rows = static_cast<const std::byte*>(data) +
                         format_bytes(linear.format, part.first, linear.whole_inputs());
      pack(linear, rows, first, part.count, packed);
    });
    if (has_bias) {
      const std::string stem = names[i].substr(0, names[i].rfind(".weight"));
      store_values(prefix + stem + ".bias", {part.whole}, part,
                   bias == nullptr ? nullptr : bias + first);
    }
    first += part.count;
  }
  if (has_codes) linear.scales = add_scales(linear, tensors, outputs);
  return linear;
}

PackedLinear Weights::add_router(const std::string& name, int num_outputs, int num_inputs) {
  const int whole = device_ == Device::kCuda ? (num_outputs + 15) / 16 * 16 : num_outputs;
  PackedLinear linear = add_linear("", {name}, {whole}, num_inputs, LinearEpilogue::kNone);
  destinations_[name].shape.front() = num_outputs;
  destinations_[name].stores = {[this, linear, num_outputs, whole](const void* data, DType) {
    void* packed = const_cast<void*>(linear.data);
    if (whole > num_outputs) device::fill_zero(packed, packed_bytes(linear), nullptr);
    pack(linear, data, 0, num_outputs, packed);
  }};
  return linear;
}

const TensorScale* Weights::scale_of(const std::string& name) const {
  if (quantized_ == nullptr) return nullptr;
  const auto found = quantized_->find(name);
  return found == quantized_->end() ? nullptr : &found->second;
}

const float* Weights::add_scales(const PackedLinear& matrix, const std::vector<std::string>& names,
                                 const std::vector<Part>& outputs) {
  const auto count = static_cast<size_t>(matrix.num_scales());
  void* scales = take_numbers("scales of " + names.front(), count * sizeof(float), DType::kF32);
  // The tensors' entries may lie between each other's: all are put together here, then there.
  const auto table = std::make_shared<std::vector<float>>(scales == nullptr ? 0 : count);
  int first = 0;
  for (size_t i = 0; i < names.size(); ++i) {
    const Part part = outputs[i];
    const TensorScale& scale = *scale_of(names[i]);
    const size_t num_values = num_scale_values(matrix, scale, part);
    destinations_[scale.name] = {
        scale.shape, {[=, this, form = scale.form](const void* data, DType source) {
          fill_scales(matrix, form, to_floats(data, source, num_values), part, first, *table);
          put(scales, table->data(), table->size() * sizeof(float));
        }}};
    first += part.count;
  }
  return static_cast<const float*>(scales);
}

LinearStack Weights::add_stack(const std::string& prefix, const std::vector<std::string>& names,
                               int count, const std::vector<Part>& outputs, Part inputs,
                               LinearEpilogue epilogue) {
  const auto one = [&](int index) {
    return matrix_of(numbered(prefix, index), names, outputs, inputs, epilogue,
                     /*may_split=*/false);
  };
  LinearStack stack = {.first = one(0), .count = count};
  PackedLinear& first = stack.first;
  for (int i = 1; i < count; ++i) {
    OPENSPEC_CHECK_ARG(one(i).scale_kind == first.scale_kind, "tensors ", joined(prefix, names),
                       " must all be bf16, or all e4m3 with scales of the same kind");
  }
  stack.bytes = packed_bytes(first);
  const bool has_codes = first.format == MatrixFormat::kE4M3;
  const size_t all_bytes = static_cast<size_t>(count) * stack.bytes;
  void* packed =
      has_codes ? take(all_bytes) : take_numbers(joined(prefix, names), all_bytes, kMatrixType);
  first.data = packed;
  int first_output = 0;
  for (size_t i = 0; i < names.size(); ++i) {
    const Part part = outputs[i];
    stacks_[prefix + names[i]] = {
        .shape = {part.whole, inputs.whole},
        .store =
            [this, shape = first, bytes = stack.bytes, packed, first_output, part](
                int index, const void* data, DType) {
              pack(shape,
                   static_cast<const std::byte*>(data) +
                       format_bytes(shape.format, part.first, shape.whole_inputs()),
                   first_output, part.count,
                   static_cast<std::byte*>(packed) + static_cast<size_t>(index) * bytes);
            },
        .matrix_type = has_codes ? DType::kE4M3 : kMatrixType,
        .is_loaded = std::vector<bool>(static_cast<size_t>(count))};
    first_output += part.count;
  }
  if (has_codes) first.scales = add_stack_scales(first, prefix, names, count, outputs);
  return stack;
}

const float* Weights::add_stack_scales(const PackedLinear& matrix, const std::string& prefix,
                                       const std::vector<std::string>& names, int count,
                                       const std::vector<Part>& outputs) {
  const auto num_scales = static_cast<size_t>(matrix.num_scales());
  const size_t all = static_cast<size_t>(count) * num_scales;
  auto* scales = static_cast<float*>(
      take_numbers("scales of " + prefix + names.front(), all * sizeof(float), DType::kF32));
  // As in add_scales: a matrix's entries of several tensors may lie between each other's.
  const auto table = std::make_shared<std::vector<float>>(scales == nullptr ? 0 : all);
  int first = 0;
  for (size_t i = 0; i < names.size(); ++i) {
    const Part part = outputs[i];
    const TensorScale& scale = *scale_of(numbered(prefix, 0) + names[i]);
    const std::string key = starred(scale.name).first;
    for (int index = 1; index < count; ++index) {
      const TensorScale& other = *scale_of(numbered(prefix, index) + names[i]);
      OPENSPEC_CHECK_ARG(other.name == numbered(key, index) && other.shape == scale.shape &&
                             other.form == scale.form,
                         "tensor ", other.name, " must be as ", scale.name, " is");
    }
    const size_t num_values = num_scale_values(matrix, scale, part);
    stacks_[key] = {.shape = scale.shape,
                    .store =
                        [=, this, form = scale.form](int index, const void* data, DType source) {
                          const size_t place = static_cast<size_t>(index) * num_scales;
                          const std::span<float> own(table->data() + place, num_scales);
                          fill_scales(matrix, form, to_floats(data, source, num_values), part,
                                      first, own);
                          put(scales + place, own.data(), own.size_bytes());
                        },
                    .matrix_type = std::nullopt,
                    .is_loaded = std::vector<bool>(static_cast<size_t>(count))};
    first += part.count;
  }
  return scales;
}

void Weights::store_values(const std::string& name, const std::vector<int64_t>& shape, Part part,
                           float* to, Convert convert) {
  destinations_[name] = {
      shape, {[this, to, part, convert = std::move(convert)](const void* data, DType source) {
        std::vector<float> values = to_floats(data, source, static_cast<size_t>(part.whole));
        if (convert) convert(values);
        put(to, values.data() + part.first, static_cast<size_t>(part.count) * sizeof(float));
      }}};
}

const float* Weights::add_norm(const std::string& name, int width, bool from_one) {
  if (!from_one) return add_values(name, {width});
  return add_values(name, {width}, [](std::vector<float>& weights) {
    for (float& weight : weights) weight += 1.0f;
  });
}

const float* Weights::add_taps(const std::string& name, int width, int taps) {
  return add_values(name, {width, 1, taps}, [taps](std::vector<float>& values) {
    const std::vector<float> from = values;
    const size_t count = values.size() / static_cast<size_t>(taps);
    for (size_t i = 0; i < values.size(); ++i) {
      values[i] = from[i % count * static_cast<size_t>(taps) + i / count];
    }
  });
}

const float* Weights::add_values(const std::string& name, const std::vector<int64_t>& shape,
                                 Convert convert) {
  const auto count = static_cast<int>(num_elements(shape));
  auto* values = static_cast<float*>(
      take_numbers(name, static_cast<size_t>(count) * sizeof(float), DType::kF32));
  store_values(name, shape, count, values, std::move(convert));
  return values;
}

const void* Weights::add_table(const std::string& name, int num_rows, int width, MoreRows more) {
  const size_t bytes = format_bytes(kTableFormat, num_rows, width);
  const size_t row_bytes = format_bytes(kTableFormat, 1, width);
  void* table =
      take_numbers(name, bytes + static_cast<size_t>(more.count) * row_bytes, kMatrixType);
  Destination& destination = destinations_[name];
  destination.shape = {num_rows, width};
  destination.matrix_type = kMatrixType;
  destination.stores = {[this, table, bytes, row_bytes, more](const void* data, DType) {
    put(table, data, bytes);
    const auto* row =
        static_cast<const std::byte*>(data) + static_cast<size_t>(more.like) * row_bytes;
    for (int i = 0; i < more.count; ++i) {
      put(static_cast<std::byte*>(table) + bytes + static_cast<size_t>(i) * row_bytes, row,
          row_bytes);
    }
  }};
  return table;
}

const void* Weights::add_table_row(const std::string& name, int width) {
  void* row = take_numbers(name, format_bytes(kTableFormat, 1, width), kMatrixType);
  destinations_[name] = {
      {1, 1, width}, {[this, row, width](const void* data, DType source) {
        if (source == kMatrixType) {
          put(row, data, format_bytes(kTableFormat, 1, width));
          return;
        }
        std::vector<uint16_t> rounded;
        for (const float value : to_floats(data, source, static_cast<size_t>(width))) {
          rounded.push_back(to_bf16(value));
        }
        put(row, rounded.data(), rounded.size() * sizeof(uint16_t));
      }}};
  return row;
}

Weights::TokenMap Weights::add_token_map(const std::string& name, int count, int vocab_size) {
  auto* token_of = static_cast<int32_t*>(take(static_cast<size_t>(count) * sizeof(int32_t)));
  auto* column_of = static_cast<int32_t*>(take(static_cast<size_t>(vocab_size) * sizeof(int32_t)));
  destinations_[name] = {
      {count}, {}, [this, name, token_of, column_of, vocab_size](std::span<const int64_t> offsets) {
        const std::vector<int32_t> ids = ids_of(name, offsets, vocab_size);
        std::vector<int32_t> columns(static_cast<size_t>(vocab_size), -1);
        for (size_t i = 0; i < ids.size(); ++i) {
          columns[static_cast<size_t>(ids[i])] = static_cast<int32_t>(i);
        }
        put(token_of, ids.data(), ids.size() * sizeof(int32_t));
        put(column_of, columns.data(), columns.size() * sizeof(int32_t));
      }};
  destinations_[name].map_vocab_size = vocab_size;
  return {token_of, column_of};
}

void Weights::tie(const std::string& name, const std::string& from) {
  Destination& source = destinations_.at(from);
  const Destination& tied = destinations_.at(name);
  OPENSPEC_CHECK_ARG(tied.matrix_type == source.matrix_type, "tensor ", name, " is e4m3, but ",
                     from, " serves as it; take a checkpoint in which both are bf16");
  source.stores.insert(source.stores.end(), tied.stores.begin(), tied.stores.end());
  destinations_.erase(name);
}

std::vector<TensorSpec> Weights::expected_tensors() const {
  std::vector<TensorSpec> specs;
  for (const auto& [name, destination] : destinations_) {
    specs.push_back({name, destination.shape, destination.store_offsets != nullptr});
  }
  for (const auto& [name, stack] : stacks_) {
    for (int i = 0; i < static_cast<int>(stack.is_loaded.size()); ++i) {
      specs.push_back({numbered(name, i), stack.shape});
    }
  }
  return specs;
}

void Weights::load(const std::string& name, const void* data, size_t bytes, DType dtype) {
  const auto found = destinations_.find(name);
  if (found == destinations_.end()) {
    load_stacked(name, data, bytes, dtype);
    return;
  }
  Destination& destination = found->second;
  OPENSPEC_CHECK_ARG(!destination.store_offsets, "tensor ", name, " must be of integers");
  check_tensor(name, destination.shape, destination.matrix_type, data, bytes, dtype);
  const auto use = use_device();
  for (const Store& store : destination.stores) store(data, dtype);
  destination.loaded = true;
}

void Weights::load_stacked(const std::string& name, const void* data, size_t bytes, DType dtype) {
  const auto [key, index] = starred(name);
  const auto found = stacks_.find(key);
  const auto place = static_cast<size_t>(index);
  OPENSPEC_CHECK_ARG(index >= 0 && found != stacks_.end() && place < found->second.is_loaded.size(),
                     "tensor ", name, " is not part of the model");
  Stack& stack = found->second;
  check_tensor(name, stack.shape, stack.matrix_type, data, bytes, dtype);
  const auto use = use_device();
  stack.store(index, data, dtype);
  stack.is_loaded[place] = true;
}

void Weights::load_offsets(const std::string& name, std::span<const int64_t> offsets) {
  check_offsets(name, offsets);
  Destination& destination = destinations_.at(name);
  const auto use = use_device();
  destination.store_offsets(offsets);
  destination.loaded = true;
}

const Weights::Destination& Weights::destination_of(const std::string& name) const {
  const auto found = destinations_.find(name);
  OPENSPEC_CHECK_ARG(found != destinations_.end(), "tensor ", name, " is not part of the model");
  return found->second;
}

bool Weights::check(const std::string& name, const void* data, size_t bytes, DType dtype) const {
  const Destination& destination = destination_of(name);
  OPENSPEC_CHECK_ARG(!destination.store_offsets, "tensor ", name, " must be of integers");
  check_tensor(name, destination.shape, destination.matrix_type, data, bytes, dtype);
  return dtype == DType::kE4M3 || is_finite_cpu({data, bytes, dtype});
}

void Weights::check_offsets(const std::string& name, std::span<const int64_t> offsets) const {
  const Destination& destination = destination_of(name);
  OPENSPEC_CHECK_ARG(destination.store_offsets, "tensor ", name, " must not be of integers");
  const int64_t expected = num_elements(destination.shape);
  OPENSPEC_CHECK_ARG(static_cast<int64_t>(offsets.size()) == expected, "tensor ", name, " has ",
                     offsets.size(), " entries, expected ", expected);
  ids_of(name, offsets, destination.map_vocab_size);
}

void Weights::finish_loading() {
  for (const auto& [name, destination] : destinations_) {
    OPENSPEC_CHECK_ARG(destination.loaded, "tensor ", name, " is missing");
  }
  for (const auto& [name, stack] : stacks_) {
    const auto missing = std::find(stack.is_loaded.begin(), stack.is_loaded.end(), false);
    OPENSPEC_CHECK_ARG(missing == stack.is_loaded.end(), "tensor ",
                       numbered(name, static_cast<int>(missing - stack.is_loaded.begin())),
                       " is missing");
  }
  const auto use = use_device();
  if (device_ == Device::kCuda) device::synchronize(nullptr);
  if (!is_spare_) staging_ = Buffer();
  packers_.reset();
}

void Weights::become_spare() {
  OPENSPEC_CHECK(stacks_.empty(), "a head has no stacks");
  is_spare_ = true;
  num_threads_ = 1;
  const auto use = use_device();
  if (device_ != Device::kCuda) return;
  staging_ = Buffer(kSpareSliceBytes, Memory::kDevice);
  exchanged_.emplace();
}

void Weights::begin_loading() {
  if (exchanged_) exchanged_->wait();
  for (auto& [name, destination] : destinations_) destination.loaded = false;
}

void Weights::exchange(Weights& spare, const ExecContext& exec) {
  OPENSPEC_CHECK(spare.is_spare_ && spare.num_taken_ == num_taken_, "the spare has another plan");
  constexpr size_t kHostSliceBytes = size_t{1} << 20;
  const size_t most_bytes = device_ == Device::kCpu ? kHostSliceBytes : kSpareSliceBytes;
  const auto slices = static_cast<int64_t>((num_taken_ + most_bytes - 1) / most_bytes);
  const auto exchange_slice = [&](int64_t slice) {
    const size_t first = static_cast<size_t>(slice) * most_bytes;
    const size_t bytes = std::min(most_bytes, num_taken_ - first);
    std::byte *mine = buffer_.at(first), *other = spare.buffer_.at(first);
    if (device_ == Device::kCpu) {
      std::swap_ranges(mine, mine + bytes, other);
      return;
    }
    device::copy_on_device(spare.staging_.data(), mine, bytes, exec.stream);
    device::copy_on_device(mine, other, bytes, exec.stream);
    device::copy_on_device(other, spare.staging_.data(), bytes, exec.stream);
  };
  if (device_ == Device::kCpu) {
    exec.pool->parallel_for(slices, exchange_slice);
  } else {
    for (int64_t slice = 0; slice < slices; ++slice) exchange_slice(slice);
    spare.exchanged_->record(exec.stream);
  }
}

std::vector<std::string> Weights::non_finite() const {
  const auto use = use_device();
  std::vector<int32_t> found(numbers_.size(), 0);
  if (device_ == Device::kCuda) {
#ifdef OPENSPEC_CUDA
    const size_t bytes = found.size() * sizeof(int32_t);
    Buffer on_device(bytes, Memory::kDevice);
    device::fill_zero(on_device.data(), bytes, nullptr);
    for (size_t i = 0; i < numbers_.size(); ++i) {
      device::check(find_non_finite_cuda(numbers_[i].second, on_device.as<int32_t>() + i, nullptr),
                    "find_non_finite");
    }
    device::copy_to_host(found.data(), on_device.data(), bytes, nullptr);
    device::synchronize(nullptr);
#endif
  } else {
    for (size_t i = 0; i < numbers_.size(); ++i) found[i] = !is_finite_cpu(numbers_[i].second);
  }
  std::vector<std::string> names;
  for (size_t i = 0; i < found.size(); ++i) {
    if (found[i] != 0) names.push_back(numbers_[i].first);
  }
  return names;
}

}  // namespace openspec
