// What CUDA is asked for, in order: a callback for CUPTI, which any thread may call at any time.
//
// Compiled by call_log.py. It declares the part of CUPTI's interface that it reads, so that it
// takes no headers; and no Python, because a thread that a step waits for must not wait for Python.

#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <vector>

namespace {

constexpr int kResources = 3;  // CUPTI_CB_DOMAIN_RESOURCE; of the others calls are logged
constexpr int kEnter = 0;      // CUPTI_API_ENTER
constexpr int32_t kNone = -1;

// CUpti_CallbackData
struct Call {
  int32_t site;
  const char* name;
  void* const* arguments;
  void* returned;
  const char* symbol;  // of launches: the kernel
  void* context;
  uint32_t context_id;
  uint64_t* data;
  uint32_t correlation;
};

struct Entry {
  int32_t name, kernel;  // kNone: launches none
  uint64_t context;
  uint64_t event;  // that the call is about; 0: about none
};

struct Log {
  std::mutex mutex;
  std::map<std::string, int32_t> places;
  std::vector<const char*> names;
  std::vector<Entry> entries;

  int32_t place(const char* name) {
    const auto [found, is_new] = places.try_emplace(name, static_cast<int32_t>(names.size()));
    if (is_new) names.push_back(found->first.c_str());
    return found->second;
  }
};

// Never destroyed: CUDA is called until the process ends.
Log& log() {
  static auto* log = new Log;
  return *log;
}

}  // namespace

extern "C" {

void note(void*, int domain, uint32_t, const void* data) {
  const std::lock_guard lock(log().mutex);
  if (domain == kResources) {
    log().entries.push_back({log().place("module loaded"), kNone, 0, 0});
    return;
  }
  const auto& call = *static_cast<const Call*>(data);
  if (call.site != kEnter) return;
  const bool launches = std::strstr(call.name, "Launch") && std::strstr(call.name, "Kernel");
  const bool is_of_event = std::strncmp(call.name, "cudaEvent", 9) == 0;
  log().entries.push_back({log().place(call.name),
                           launches && call.symbol != nullptr ? log().place(call.symbol) : kNone,
                           call.context_id,
                           is_of_event ? reinterpret_cast<uint64_t>(*call.arguments) : 0});
}

size_t num_entries() {
  const std::lock_guard lock(log().mutex);
  return log().entries.size();
}

// The next two: while nothing is logged.
const Entry* entries() { return log().entries.data(); }
const char* name(size_t place) { return place < log().names.size() ? log().names[place] : nullptr; }

}  // extern "C"
