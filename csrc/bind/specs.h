#pragma once

/// The descriptions of python/openspec/specs, field by field: a new fact is a line here, one there
/// and the member.

#include <cstring>
#include <initializer_list>
#include <string>
#include <utility>

#include "bind/fields.h"
#include "core/check.h"
#include "model/heads/head_spec.h"
#include "model/targets/target_spec.h"
#include "runtime/drafting/runner_config.h"

namespace openspec {

/// The value of `name` among `choices`; `what` says of what.
template <typename T>
T parse(const char* what, const std::string& name,
        std::initializer_list<std::pair<const char*, T>> choices) {
  std::string names;
  for (const auto& [choice, value] : choices) {
    if (name == choice) return value;
    names += (names.empty() ? "" : " or ") + std::string(choice);
  }
  detail::fail<ArgumentError>(what, " must be ", names, ", got ", name);
}

inline TensorScale::Form form_of(const std::string& name) {
  return parse<TensorScale::Form>("form", name,
                                  {{"tensor", TensorScale::Form::kTensor},
                                   {"channel", TensorScale::Form::kChannel},
                                   {"block", TensorScale::Form::kBlock}});
}

template <>
struct Description<AttentionSpec> {
  static constexpr const char* kClass = "AttentionSpec";
  static constexpr Field<AttentionSpec> kFields[] = {
      {"num_q_heads", read_as<&AttentionSpec::num_q_heads>},
      {"num_kv_heads", read_as<&AttentionSpec::num_kv_heads>},
      {"head_dim", read_as<&AttentionSpec::head_dim>},
      {"has_qk_norm", read_as<&AttentionSpec::has_qk_norm>},
      {"has_qkv_bias", read_as<&AttentionSpec::has_qkv_bias>},
      {"has_gate", read_as<&AttentionSpec::has_gate>},
      {"inv_freq", read_as<&AttentionSpec::inv_freq>},
      {"rope_scale", read_as<&AttentionSpec::rope_scale>},
      {"window", read_as<&AttentionSpec::window>},
  };
};

template <>
struct Description<DeltaNetSpec> {
  static constexpr const char* kClass = "DeltaNetSpec";
  static constexpr Field<DeltaNetSpec> kFields[] = {
      {"num_key_heads", read_as<&DeltaNetSpec::num_key_heads>},
      {"num_value_heads", read_as<&DeltaNetSpec::num_value_heads>},
  };
};

template <>
struct Description<DenseMlpSpec> {
  static constexpr const char* kClass = "DenseMlpSpec";
  static constexpr Field<DenseMlpSpec> kFields[] = {
      {"intermediate_size", read_as<&DenseMlpSpec::intermediate_size>},
  };
};

template <>
struct Description<ExpertsSpec> {
  static constexpr const char* kClass = "ExpertsSpec";
  static constexpr Field<ExpertsSpec> kFields[] = {
      {"num_experts", read_as<&ExpertsSpec::num_experts>},
      {"top_k", read_as<&ExpertsSpec::top_k>},
      {"intermediate_size", read_as<&ExpertsSpec::intermediate_size>},
      {"norm_top_k", read_as<&ExpertsSpec::norm_top_k>},
  };
};

template <>
struct Description<LayerSpec> {
  static constexpr const char* kClass = "LayerSpec";
  static constexpr Field<LayerSpec> kFields[] = {
      {"mixer", read_as<&LayerSpec::mixer>},
      {"mlp", read_as<&LayerSpec::mlp>},
  };
};

template <>
struct Description<TensorScale> {
  static constexpr const char* kClass = "TensorScale";
  static constexpr Field<TensorScale> kFields[] = {
      {"name", read_as<&TensorScale::name>},
      {"shape", read_as<&TensorScale::shape>},
      {"form",
       [](TensorScale& scale, const pybind11::handle& value) {
         scale.form = form_of(value.cast<std::string>());
       }},
  };
};

template <>
struct Description<TargetSpec> {
  static constexpr const char* kClass = "TargetSpec";
  static constexpr Field<TargetSpec> kFields[] = {
      {"kind", read_as<&TargetSpec::kind>},
      {"hidden_size", read_as<&TargetSpec::hidden_size>},
      {"vocab_size", read_as<&TargetSpec::vocab_size>},
      {"rms_norm_eps", read_as<&TargetSpec::rms_norm_eps>},
      {"tie_word_embeddings", read_as<&TargetSpec::tie_word_embeddings>},
      {"layers", read_as<&TargetSpec::layers>},
      {"quantized", read_as<&TargetSpec::quantized>},
  };
};

template <>
struct Description<HeadSpec> {
  static constexpr const char* kClass = "HeadSpec";
  static constexpr Field<HeadSpec> kFields[] = {
      {"layers", read_as<&HeadSpec::layers>},
      {"rms_norm_eps", read_as<&HeadSpec::rms_norm_eps>},
      {"capture_layers", read_as<&HeadSpec::capture_layers>},
      {"draft_vocab_size", read_as<&HeadSpec::draft_vocab_size>},
      {"has_embedding", read_as<&HeadSpec::has_embedding>},
      {"has_head", read_as<&HeadSpec::has_head>},
      {"has_token_map", read_as<&HeadSpec::has_token_map>},
      {"kept_tokens", read_as<&HeadSpec::kept_tokens>},
      {"quantized", read_as<&HeadSpec::quantized>},
      {"mask_token", read_as<&HeadSpec::mask_token>},
      {"model", read_as<&HeadSpec::model>},
      {"unknown_token", read_as<&HeadSpec::unknown_token>},
      {"captures_normed", read_as<&HeadSpec::captures_normed>},
      {"has_projection_bias", read_as<&HeadSpec::has_projection_bias>},
      {"capture_norm",
       [](HeadSpec& head, const pybind11::handle& value) {
         head.capture_norm = parse<CaptureNorm>("capture_norm", value.cast<std::string>(),
                                                {{"none", CaptureNorm::kNone},
                                                 {"slices", CaptureNorm::kSlices},
                                                 {"whole", CaptureNorm::kWhole}});
       }},
      {"norm_before_residual", read_as<&HeadSpec::norm_before_residual>},
      {"norm_output", read_as<&HeadSpec::norm_output>},
      {"block_size", read_as<&HeadSpec::block_size>},
      {"anchor_drafts", read_as<&HeadSpec::anchor_drafts>},
      {"is_causal", read_as<&HeadSpec::is_causal>},
      {"sliding_is_causal", read_as<&HeadSpec::sliding_is_causal>},
      {"window_follows_rows", read_as<&HeadSpec::window_follows_rows>},
      {"markov_rank", read_as<&HeadSpec::markov_rank>},
      {"conv_group", read_as<&HeadSpec::conv_group>},
      {"selector_rank", read_as<&HeadSpec::selector_rank>},
      {"selector_top_k", read_as<&HeadSpec::selector_top_k>},
      {"has_confidence", read_as<&HeadSpec::has_confidence>},
      {"confidence_sees_token", read_as<&HeadSpec::confidence_sees_token>},
  };
};

template <>
struct Description<RunnerConfig> {
  static constexpr const char* kClass = "RunnerConfig";
  static constexpr Field<RunnerConfig> kFields[] = {
      {"target", read_as<&RunnerConfig::target>},
      {"device",
       [](RunnerConfig& config, const pybind11::handle& value) {
         config.device = parse<Device>("device", value.cast<std::string>(),
                                       {{"cpu", Device::kCpu}, {"cuda", Device::kCuda}});
       }},
      {"dtype",
       [](RunnerConfig& config, const pybind11::handle& value) {
         config.dtype = parse<DType>("dtype", value.cast<std::string>(),
                                     {{"float32", DType::kF32}, {"bfloat16", DType::kBF16}});
       }},
      {"page_size", read_as<&RunnerConfig::page_size>},
      {"max_num_seqs", read_as<&RunnerConfig::max_num_seqs>},
      {"max_model_len", read_as<&RunnerConfig::max_model_len>},
      {"max_num_batched_tokens", read_as<&RunnerConfig::max_num_batched_tokens>},
      {"max_num_logits_rows", read_as<&RunnerConfig::max_num_logits_rows>},
      {"num_threads", read_as<&RunnerConfig::num_threads>},
      {"tensor_parallel_size", read_as<&RunnerConfig::tensor_parallel_size>},
      {"exchange_deadline_s", read_as<&RunnerConfig::exchange_deadline_s>},
      {"max_draft_tokens", read_as<&RunnerConfig::max_draft_tokens>},
      {"max_grammar_drafts", read_as<&RunnerConfig::max_grammar_drafts>},
      {"max_copied_drafts", read_as<&RunnerConfig::max_copied_drafts>},
      {"draft_memory_bytes", read_as<&RunnerConfig::draft_memory_bytes>},
      {"draft_depth", read_as<&RunnerConfig::draft_depth>},
      {"method", read_as<&RunnerConfig::method>},
      {"method_options", read_as<&RunnerConfig::method_options>},
      {"head", read_as<&RunnerConfig::head>},
      {"has_spare_head", read_as<&RunnerConfig::has_spare_head>},
      {"acceptance",
       [](RunnerConfig& config, const pybind11::handle& value) {
         config.acceptance = parse<Acceptance>(
             "acceptance", value.cast<std::string>(),
             {{"match", Acceptance::kMatch}, {"rejection", Acceptance::kRejection}});
       }},
      {"adaptive", read_as<&RunnerConfig::adaptive>},
      {"enable_prefix_caching", read_as<&RunnerConfig::enable_prefix_caching>},
      {"cache_key",
       [](RunnerConfig& config, const pybind11::handle& value) {
         const auto key = value.cast<std::string>();
         OPENSPEC_CHECK_ARG(key.size() == sizeof(config.cache_key), "cache_key must have ",
                            sizeof(config.cache_key), " bytes, has ", key.size());
         std::memcpy(config.cache_key.data(), key.data(), key.size());
       }},
  };
};

}  // namespace openspec
