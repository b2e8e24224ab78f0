// The core as Python sees it. Converts and checks; no logic. See python/openspec/_C.pyi.

#include <pybind11/functional.h>
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstring>
#include <future>
#include <optional>

#include "bind/packed.h"
#include "bind/sampling_params.h"
#include "bind/specs.h"
#include "bind/step_results.h"
#include "core/check.h"
#include "model/targets/exchange_timing.h"
#include "model/targets/target.h"
#include "model/weights/quantize.h"
#include "model/weights/weights.h"
#include "runtime/runner.h"

namespace py = pybind11;

namespace openspec {
namespace {

/// What a drafter written in Python derives from; Python calls it through PythonDrafter.
struct PythonDrafterBase {};

/// Lets a Python object propose: one call per sequence, for research and tests.
class PythonDrafter final : public Drafter {
 public:
  explicit PythonDrafter(py::object drafter) : drafter_(std::move(drafter)) {}
  ~PythonDrafter() override {
    py::gil_scoped_acquire gil;
    drafter_ = py::object();
  }

  const DrafterNeeds& needs() const override { return needs_; }

  void propose_on_host(const SequenceTable& table, std::span<const ProposeRequest> requests,
                       std::span<Draft> drafts) override {
    py::gil_scoped_acquire gil;
    try {
      for (size_t i = 0; i < requests.size(); ++i) {
        const int slot = requests[i].slot;
        const py::list guesses =
            drafter_.attr("propose")(slot, table.copy_tokens(slot), requests[i].num_wanted);
        for (const py::handle guess : guesses) add_guess(drafts[i], guess);
      }
    } catch (py::error_already_set& error) {
      // Ctrl-C is no failure of the drafter: it is raised again where the step returns to Python.
      if (!error.matches(PyExc_KeyboardInterrupt)) throw;
      PyErr_SetInterrupt();
    }
  }

 private:
  /// A token, which follows the one before it, or (token, parent).
  static void add_guess(Draft& draft, const py::handle& guess) {
    const bool has_parent = py::isinstance<py::tuple>(guess);
    const auto [token, parent] = has_parent
                                     ? guess.cast<std::pair<int64_t, int64_t>>()
                                     : std::pair(guess.cast<int64_t>(), int64_t{draft.size()} - 1);
    // What does not fit a token id is no token either way, and so with parents.
    const auto fits = [](int64_t value) { return value >= -1 && value <= INT32_MAX; };
    draft.append(fits(token) ? static_cast<int32_t>(token) : -1);
    draft.parents.back() = fits(parent) ? static_cast<int32_t>(parent) : -2;
  }

  DrafterNeeds needs_;
  py::object drafter_;
};

/// An array of numpy, [rows, width].
py::array_t<float> rows_of(const std::vector<float>& values, size_t width) {
  return py::array_t<float>({values.size() / std::max<size_t>(width, 1), width}, values.data());
}

/// One part of each of the last drafts.
template <typename T>
std::vector<T> parts_of(Runner& runner, T Draft::* part) {
  std::vector<T> parts;
  for (const Draft& draft : runner.backend().last_drafts()) parts.push_back(draft.*part);
  return parts;
}

/// Of each FinishReason.
constexpr const char* kFinishNames[] = {"", "stop", "length"};

/// Of each PageEvent::Kind.
constexpr const char* kPageEventNames[] = {"stored", "removed", "cleared"};

/// What the table says of a slot that holds a sequence.
template <auto kGet>
auto of_slot(const Runner& runner, int slot) {
  runner.table().check_slot(slot);
  return (runner.table().*kGet)(slot);
}

template <auto kCall>
auto of_prefixes(Runner& runner) {
  return (runner.prefixes().*kCall)();
}

/// The bytes of an object with a contiguous buffer.
class BufferBytes {
 public:
  explicit BufferBytes(const py::buffer& data) {
    if (PyObject_GetBuffer(data.ptr(), &view_, PyBUF_C_CONTIGUOUS) != 0) {
      throw py::error_already_set();
    }
  }
  ~BufferBytes() { PyBuffer_Release(&view_); }
  BufferBytes(const BufferBytes&) = delete;
  BufferBytes& operator=(const BufferBytes&) = delete;
  const void* data() const { return view_.buf; }
  size_t size() const { return static_cast<size_t>(view_.len); }

 private:
  Py_buffer view_;
};

template <typename T>
std::vector<int64_t> integers_of(const BufferBytes& bytes) {
  std::vector<T> values(bytes.size() / sizeof(T));
  std::memcpy(values.data(), bytes.data(), values.size() * sizeof(T));
  return {values.begin(), values.end()};
}

/// The type of the numbers of a safetensors code.
DType dtype_of(const std::string& name, const std::string& code) {
  if (code == "BF16") return DType::kBF16;
  if (code == "F32") return DType::kF32;
  OPENSPEC_CHECK_ARG(code == "F8_E4M3", "tensor ", name, " must be BF16, F32 or F8_E4M3, is ",
                     code);
  return DType::kE4M3;
}

/// The codes and the fp32 scales of a matrix.
std::pair<py::bytes, py::bytes> quantized(const py::buffer& data, const std::string& dtype,
                                          int64_t num_rows, int64_t width, const std::string& form,
                                          int num_threads) {
  const BufferBytes bytes(data);
  const WideMatrix matrix = {bytes.data(), dtype_of("to quantise", dtype), num_rows, width};
  OPENSPEC_CHECK_ARG(num_threads >= 1, "num_threads must be positive, got ", num_threads);
  OPENSPEC_CHECK_ARG(
      matrix.dtype != DType::kE4M3 && num_rows >= 0 && width >= 0 &&
          bytes.size() == static_cast<size_t>(num_rows * width) * dtype_bytes(matrix.dtype),
      "expected BF16 or F32 numbers of ", num_rows, " x ", width, ", got ", bytes.size(),
      " bytes of ", dtype);
  const TensorScale::Form scale_form = form_of(form);
  const auto made = [](int64_t size) {  // bytes that nobody has set yet
    return py::reinterpret_steal<py::bytes>(PyBytes_FromStringAndSize(nullptr, size));
  };
  const auto num_scales = num_scales_of(matrix, scale_form);
  const py::bytes codes = made(num_rows * width);
  const py::bytes scales = made(num_scales * static_cast<int64_t>(sizeof(float)));
  auto* to_codes = reinterpret_cast<uint8_t*>(PyBytes_AS_STRING(codes.ptr()));
  auto* to_scales = reinterpret_cast<float*>(PyBytes_AS_STRING(scales.ptr()));
  {
    py::gil_scoped_release nogil;
    quantize(matrix, scale_form, num_threads, to_codes, to_scales);
  }
  return {codes, scales};
}

/// Those of all ranks.
template <bool kIsDraft>
std::vector<Weights*> weights_of(Runner& runner) {
  return kIsDraft ? runner.draft_weights() : runner.target_weights();
}

/// Calls load(weights) for all ranks, each on a thread of its own.
template <typename Load>
void for_each_rank(const std::vector<Weights*>& ranks, const Load& load) {
  std::vector<std::future<void>> others;
  for (size_t i = 1; i < ranks.size(); ++i) {
    others.push_back(std::async(std::launch::async, [&, i] { load(*ranks[i]); }));
  }
  load(*ranks.front());
  for (std::future<void>& other : others) other.get();
}

/// Token ids, as offsets; none: the numbers are of another type.
std::optional<std::vector<int64_t>> offsets_of(const BufferBytes& bytes, const std::string& dtype) {
  if (dtype == "I64") return integers_of<int64_t>(bytes);
  if (dtype == "I32") return integers_of<int32_t>(bytes);
  return std::nullopt;
}

/// A tensor of the target or of the draft model, which may have token ids too.
template <bool kIsDraft>
void load_tensor(Runner& runner, const std::string& name, const py::buffer& data,
                 const std::string& dtype) {
  const std::vector<Weights*> all = weights_of<kIsDraft>(runner);
  OPENSPEC_CHECK_ARG(!all.empty(), "this drafter has no weights");
  const BufferBytes bytes(data);
  if (const auto offsets = offsets_of(bytes, dtype); kIsDraft && offsets) {
    for (Weights* weights : all) weights->load_offsets(name, *offsets);
    return;
  }
  const DType type = dtype_of(name, dtype);
  py::gil_scoped_release nogil;
  for_each_rank(all,
                [&](Weights& weights) { weights.load(name, bytes.data(), bytes.size(), type); });
}

/// A tensor of a draft model that is loaded beside steps.
void load_spare_tensor(Runner& runner, const std::string& name, const py::buffer& data,
                       const std::string& dtype) {
  Weights& spare = runner.spare_draft_weights();
  const BufferBytes bytes(data);
  if (const auto offsets = offsets_of(bytes, dtype)) return spare.load_offsets(name, *offsets);
  const DType type = dtype_of(name, dtype);
  py::gil_scoped_release nogil;
  spare.load(name, bytes.data(), bytes.size(), type);
}

/// Whether such a tensor's numbers are finite.
bool check_spare_tensor(Runner& runner, const std::string& name, const py::buffer& data,
                        const std::string& dtype) {
  const Weights& spare = runner.spare_draft_weights();
  const BufferBytes bytes(data);
  if (const auto offsets = offsets_of(bytes, dtype)) {
    spare.check_offsets(name, *offsets);
    return true;
  }
  const DType type = dtype_of(name, dtype);
  py::gil_scoped_release nogil;
  return spare.check(name, bytes.data(), bytes.size(), type);
}

/// The names that any rank knows of such a tensor, each once.
std::vector<std::string> non_finite_of(const std::vector<Weights*>& ranks) {
  std::vector<std::string> names;
  for (const Weights* weights : ranks) {
    for (const std::string& name : weights->non_finite()) {
      if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
    }
  }
  return names;
}

using TensorShapes = std::vector<std::pair<std::string, std::vector<int64_t>>>;

TensorShapes shapes_of(const std::vector<Weights*>& ranks) {
  TensorShapes shapes;
  if (ranks.empty()) return shapes;
  for (const TensorSpec& spec : ranks.front()->expected_tensors()) {
    shapes.emplace_back(spec.name, spec.shape);
  }
  return shapes;
}

/// Hashes as subscribers of events know them: 64 of the 128 bits, as vLLM's are.
std::vector<uint64_t> short_hashes(const std::vector<PageHash>& hashes) {
  std::vector<uint64_t> shorter;
  for (const PageHash& hash : hashes) shorter.push_back(hash.low);
  return shorter;
}

using Nogil = py::call_guard<py::gil_scoped_release>;

/// A lease and whose it is: in Python a step is driven by its lease alone.
struct ReservedStep {
  Runner& runner;
  std::unique_ptr<StepLease> lease;
};

void bind_values(py::module_& m) {
  py::class_<MemoryPlan>(m, "MemoryPlan")
      .def_readonly("weight_bytes", &MemoryPlan::weight_bytes)
      .def_readonly("scratch_bytes", &MemoryPlan::scratch_bytes)
      .def_readonly("exchange_bytes", &MemoryPlan::exchange_bytes)
      .def_readonly("table_bytes", &MemoryPlan::table_bytes)
      .def_readonly("draft_fixed_bytes", &MemoryPlan::draft_fixed_bytes)
      .def_readonly("state_bytes", &MemoryPlan::state_bytes)
      .def_readonly("num_base_pages", &MemoryPlan::num_base_pages)
      .def_readonly("page_bytes", &MemoryPlan::page_bytes)
      .def_readonly("draft_page_bytes", &MemoryPlan::draft_page_bytes);
  bind_vocabulary(m);
  py::class_<PythonGrammar>(m, "Grammar")
      .def(py::init([](const PythonVocabulary& vocabulary, const py::bytes& packed) {
             const std::string data = unpacked(packed);
             py::gil_scoped_release nogil;
             return PythonGrammar{CompiledGrammar::deserialize(vocabulary.vocabulary, data)};
           }),
           py::arg("vocabulary"), py::arg("data"))
      .def_property_readonly("num_bytes",
                             [](const PythonGrammar& self) { return self.grammar->num_bytes(); });
  py::class_<GrammarTally, std::shared_ptr<GrammarTally>>(m, "GrammarTally").def(py::init<>());
  py::class_<SequenceParams>(m, "SequenceParams")
      .def(py::init(&make_sequence_params), py::arg("sampling"), py::kw_only(),
           py::arg("max_tokens"), py::arg("num_prompt_logprobs") = -1,
           py::arg("reports_steps") = false, py::arg("grammar") = py::none(),
           py::arg("grammar_tally") = py::none(), py::arg("owner") = py::bytes());
  py::class_<SpanResult>(m, "SpanResult")
      .def_readonly("slot", &SpanResult::slot)
      .def_readonly("token_ids", &SpanResult::token_ids)
      .def_property_readonly(
          "finish_reason",
          [](const SpanResult& result) { return kFinishNames[static_cast<size_t>(result.finish)]; })
      .def_readonly("num_draft_tokens", &SpanResult::num_draft_tokens)
      .def_readonly("num_accepted_tokens", &SpanResult::num_accepted_tokens)
      .def_property_readonly("drafts_by_source", &drafts_by_source)
      .def_property_readonly("logprobs",
                             [](const SpanResult& result) { return tuples_of(result.logprobs); })
      .def_property_readonly(
          "prompt_logprobs",
          [](const SpanResult& result) { return tuples_of(result.prompt_logprobs); })
      .def_property_readonly("detail", &tuple_of_detail)
      .def_readonly("is_held", &SpanResult::is_held)
      .def_property_readonly("failure", &tuple_of_failure);
  py::class_<RunnerStats>(m, "RunnerStats")
      .def_readonly("num_steps", &RunnerStats::num_steps)
      .def_readonly("num_rows", &RunnerStats::num_rows)
      .def_readonly("num_drafter_failures", &RunnerStats::num_drafter_failures)
      .def_readonly("last_drafter_failure", &RunnerStats::last_drafter_failure)
      .def_readonly("draft_seconds", &RunnerStats::draft_seconds)
      .def_readonly("verify_seconds", &RunnerStats::verify_seconds)
      .def_readonly("unsplit_seconds", &RunnerStats::unsplit_seconds)
      .def_readonly("rest_seconds", &RunnerStats::rest_seconds)
      .def_property_readonly("experts",
                             [](const RunnerStats& stats) {
                               const ExpertCounts& all = stats.experts;
                               return std::tuple(all.num_layers, all.num_experts, all.num_rows);
                             })
      .def_readonly("experts_of_drafts", &RunnerStats::experts_of_drafts)
      .def_readonly("experts_of_sequences", &RunnerStats::experts_of_sequences)
      .def_property_readonly("exchange", [](const RunnerStats& stats) {
        std::vector<std::pair<uint64_t, double>> of_ranks;
        for (const ExchangeCounts& rank : stats.exchange) {
          of_ranks.emplace_back(rank.num_rounds, 1e-9 * static_cast<double>(rank.wait_ns));
        }
        return of_ranks;
      });
  py::class_<PageEvent>(m, "PageEvent")
      .def_property_readonly(
          "kind",
          [](const PageEvent& event) { return kPageEventNames[static_cast<size_t>(event.kind)]; })
      .def_property_readonly("hashes",
                             [](const PageEvent& event) { return short_hashes(event.hashes); })
      .def_property_readonly("parent",
                             [](const PageEvent& event) {
                               return event.parent ? std::optional(event.parent->low)
                                                   : std::nullopt;
                             })
      .def_readonly("token_ids", &PageEvent::tokens)
      .def_property_readonly("cache_salt",
                             [](const PageEvent& event) { return py::bytes(event.salt); });
  py::class_<ReservedStep>(m, "StepLease")
      .def(
          "launch", [](ReservedStep& step) { step.runner.launch(*step.lease); }, Nogil())
      .def(
          "collect", [](ReservedStep& step) { return step.runner.collect(*step.lease); }, Nogil())
      .def("commit", [](ReservedStep& step) { step.runner.commit(*step.lease); })
      .def("close", [](ReservedStep& step) { step.lease->close(); });
  py::class_<PythonDrafterBase>(m, "Drafter")
      .def(py::init<>())
      .def(
          "propose", [](const PythonDrafterBase&, int, const py::list&, int) { return py::list(); },
          py::arg("slot"), py::arg("token_ids"), py::arg("num_wanted"));
}

/// Looks into steps, for tests.
void bind_probes(py::class_<Runner>& runner) {
  runner
      .def(
          "set_stage_hook",
          // std::function from pybind11 takes the GIL for the call and for its own end.
          [](Runner& runner, const std::optional<Runner::StageHook>& hook) {
            runner.set_stage_hook(hook.value_or(nullptr));
          },
          py::arg("hook"))
      .def("set_capture", &Runner::set_capture, py::arg("layer_ids"))
      .def(
          "set_grammar_times",
          [](Runner& runner, double mask, double token, double step, double first_try,
             double request) {
            runner.grammar_times() = {.mask = mask,
                                      .token = token,
                                      .step = step,
                                      .first_try = first_try,
                                      .request = request};
          },
          py::kw_only(), py::arg("mask"), py::arg("token"), py::arg("step"), py::arg("first_try"),
          py::arg("request"))
      .def("captured",
           [](Runner& runner) {
             return rows_of(runner.backend().last_features(),
                            runner.backend().capture_layers().size() *
                                static_cast<size_t>(runner.config().target.hidden_size));
           })
      .def("captured_address",
           [](Runner& runner) {
             return reinterpret_cast<uintptr_t>(runner.backend().features_on_device());
           })
      .def("last_logits",
           [](Runner& runner) {
             return rows_of(runner.backend().last_logits(),
                            static_cast<size_t>(runner.config().target.vocab_size));
           })
      .def("last_drafts", [](Runner& runner) { return parts_of(runner, &Draft::tokens); })
      .def("last_draft_parents", [](Runner& runner) { return parts_of(runner, &Draft::parents); })
      .def("last_draft_scores", [](Runner& runner) { return parts_of(runner, &Draft::scores); })
      .def("last_draft_logits", [](Runner& runner) { return runner.drafter().last_logits(); });
}

void bind_runner(py::module_& m) {
  py::class_<Runner> bound(m, "Runner");
  bound
      .def(py::init([](const RunnerConfig& config, int num_pages, const py::object& drafter) {
             std::unique_ptr<Drafter> own;
             if (!drafter.is_none()) own = std::make_unique<PythonDrafter>(drafter);
             return std::make_unique<Runner>(config, num_pages, std::move(own));
           }),
           py::arg("config"), py::arg("num_pages"), py::arg("drafter") = py::none())
      .def("expected_tensors", [](Runner& runner) { return shapes_of(weights_of<false>(runner)); })
      .def("expected_draft_tensors",
           [](Runner& runner) { return shapes_of(weights_of<true>(runner)); })
      .def("load_tensor", &load_tensor<false>, py::arg("name"), py::arg("data"), py::arg("dtype"))
      .def("load_draft_tensor", &load_tensor<true>, py::arg("name"), py::arg("data"),
           py::arg("dtype"))
      .def("finish_loading", &Runner::finish_loading, Nogil())
      .def(
          "begin_spare_loading",
          [](Runner& runner) { runner.spare_draft_weights().begin_loading(); }, Nogil())
      .def("check_spare_tensor", &check_spare_tensor, py::arg("name"), py::arg("data"),
           py::arg("dtype"))
      .def("load_spare_tensor", &load_spare_tensor, py::arg("name"), py::arg("data"),
           py::arg("dtype"))
      .def(
          "finish_spare_loading",
          [](Runner& runner) { runner.spare_draft_weights().finish_loading(); }, Nogil())
      .def("exchange_drafter", &Runner::exchange_drafter, Nogil())
      .def(
          "non_finite_tensors",
          [](Runner& runner) {
            return std::pair{non_finite_of(weights_of<false>(runner)),
                             non_finite_of(weights_of<true>(runner))};
          },
          Nogil())
      .def_property_readonly("num_steps_ahead", &Runner::num_steps_ahead)
      .def(
          "measure_step_times",
          [](Runner& runner, double budget_s) {
            std::vector<std::tuple<int, int, bool, double, double>> measured;
            for (const TimedStep& step : runner.measure_step_times(budget_s)) {
              const auto& [num_seqs, num_rows, proposes] = step.kind;
              measured.emplace_back(num_seqs, num_rows, proposes, step.seconds, step.num_experts);
            }
            return measured;
          },
          py::arg("budget_s"), Nogil())
      .def(
          "set_step_times",
          [](Runner& runner, const std::vector<std::tuple<int, int, bool, double, double>>& steps) {
            std::vector<TimedStep> measured;
            for (const auto& [num_seqs, num_rows, proposes, seconds, num_experts] : steps) {
              measured.push_back({{num_seqs, num_rows, proposes}, seconds, num_experts});
            }
            runner.set_step_times(measured);
          },
          py::arg("measured"))
      .def(
          "add_sequence",
          [](Runner& runner, const std::vector<int32_t>& tokens, int prompt_len,
             const SequenceParams& params, const std::string& cache_salt) {
            return runner.add_sequence(
                tokens, prompt_len, params,
                {reinterpret_cast<const uint8_t*>(cache_salt.data()), cache_salt.size()});
          },
          py::arg("token_ids"), py::arg("prompt_len"), py::arg("params"),
          py::arg("cache_salt") = py::bytes())
      .def(
          "num_cached_tokens",
          [](Runner& runner, const std::vector<int32_t>& tokens, const std::string& cache_salt) {
            return runner.prefixes().num_cached(
                tokens, {reinterpret_cast<const uint8_t*>(cache_salt.data()), cache_salt.size()});
          },
          py::arg("token_ids"), py::arg("cache_salt") = py::bytes())
      .def("remove_sequence", &Runner::remove_sequence, py::arg("slot"))
      .def("is_held", &Runner::is_held, py::arg("slot"))
      .def("await_masks", &Runner::await_masks, py::arg("seconds"), Nogil())
      .def("kv_len", &of_slot<&SequenceTable::kv_len>, py::arg("slot"))
      .def("token_ids", &of_slot<&SequenceTable::copy_tokens>, py::arg("slot"))
      .def_property_readonly("num_rows_ahead", &Runner::num_rows_ahead)
      .def_property_readonly("num_pages", &Runner::num_pages)
      .def_property_readonly("num_free_pages", &Runner::num_free_pages)
      .def_property_readonly("num_free_slots", &Runner::num_free_slots)
      .def("wanted_end", &Runner::wanted_end, py::arg("slot"))
      .def_property_readonly("num_base_pages", &Runner::num_base_pages)
      .def("num_pages_needed", &Runner::num_pages_needed, py::arg("slot"), py::arg("num_rows"))
      .def("reset_prefix_cache", of_prefixes<&PrefixCache::reset>)
      .def("forget_answers", &Runner::forget_answers)
      .def("record_page_events", of_prefixes<&PrefixCache::record_events>)
      .def("take_page_events", of_prefixes<&PrefixCache::take_events>)
      .def("published_hashes",
           [](Runner& runner) { return short_hashes(runner.prefixes().published_hashes()); })
      .def("check_integrity", &Runner::check_integrity)
      .def(
          "reserve",
          [](Runner& runner, const std::vector<std::tuple<int, int, int>>& spans) {
            std::vector<SpanRequest> requests;
            requests.reserve(spans.size());
            for (const auto& [slot, num_new_tokens, max_drafts] : spans) {
              requests.push_back({slot, num_new_tokens, max_drafts});
            }
            return ReservedStep{runner, runner.reserve(requests)};
          },
          py::arg("spans"), py::keep_alive<0, 1>())
      .def_property_readonly("stats", &Runner::stats);
  bind_probes(bound);
}

}  // namespace
}  // namespace openspec

PYBIND11_MODULE(_C, m) {
  m.doc() = "The openspec core.";
  // As the package's own errors, so that `except openspec.EngineError` catches the core's.
  py::register_exception_translator([](std::exception_ptr error) {
    const auto raise = [](const char* name, const std::exception& caught) {
      PyErr_SetString(py::module_::import("openspec.errors").attr(name).ptr(), caught.what());
    };
    try {
      if (error) std::rethrow_exception(error);
    } catch (const openspec::OutOfPages& caught) {
      raise("OutOfPages", caught);
    } catch (const openspec::EngineError& caught) {
      raise("EngineError", caught);
    }
  });
  openspec::bind_values(m);
  openspec::bind_runner(m);
  m.def("memory_plan", &openspec::plan_memory, py::arg("config"));
  m.def("quantized", &openspec::quantized, py::arg("data"), py::arg("dtype"), py::arg("num_rows"),
        py::arg("width"), py::arg("form"), py::arg("num_threads"));
  m.def("drafter_names", &openspec::drafter_names);
  m.def("has_cuda", [] { return openspec::device::why_unusable().empty(); });
  m.def("why_no_cuda", &openspec::device::why_unusable);
  m.def("fail_check", &openspec::device::fail_check, py::arg("count"));
  m.def("cuda_device_name", &openspec::device::name);
  m.def("cuda_device_names", &openspec::device::names);
  m.def(
      "cuda_peer",
      [](int device, int other) {
        const auto peer = openspec::device::peer(device, other);
        return std::make_pair(peer.has_access, peer.performance_rank);
      },
      py::arg("device"), py::arg("other"));
  m.def(
      "time_exchange",
      [](int num_ranks) {
        const py::gil_scoped_release nogil;
        const openspec::ExchangeTiming timing = openspec::time_exchange(num_ranks);
        return std::make_pair(timing.shared, timing.alone);
      },
      py::arg("num_ranks"));
  m.def(
      "cuda_memory",
      [](int device) {
        const openspec::device::Use use(device);
        const auto memory = openspec::device::memory();
        return std::make_pair(memory.free_bytes, memory.total_bytes);
      },
      py::arg("device"));
}
