#include "kernels/common/device.h"

#ifdef OPENSPEC_CUDA
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <atomic>
#endif

namespace openspec::device {

#ifdef OPENSPEC_CUDA

namespace {
cudaStream_t stream_of(void* handle) { return static_cast<cudaStream_t>(handle); }
cudaEvent_t event_of(void* handle) { return static_cast<cudaEvent_t>(handle); }
}  // namespace

namespace {
std::atomic<int64_t> num_checks{0}, failing_check{-1};
}  // namespace

int64_t fail_check(int64_t count) {
  failing_check = count == 0 ? -1 : count;
  return num_checks.exchange(0);
}

void check(int error, const char* what) {
  if (++num_checks == failing_check) {
    openspec::detail::fail<DeviceError>("CUDA: ", what, ": a failure that a test asked for");
  }
  if (error == cudaSuccess) return;
  const auto code = static_cast<cudaError_t>(error);
  cudaGetLastError();  // an error that does not last must not be reported twice
  openspec::detail::fail<DeviceError>("CUDA: ", what, ": ", cudaGetErrorName(code), ": ",
                                      cudaGetErrorString(code));
}

std::string why_unusable() {
  int found = 0;
  const cudaError_t error = cudaGetDeviceCount(&found);
  if (error != cudaSuccess) {
    cudaGetLastError();
    return std::string("the CUDA driver reports: ") + cudaGetErrorString(error);
  }
  if (found == 0) return "no GPU is visible";
  int major = 0;
  check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, current()),
        "cudaDeviceGetAttribute");
  if (major < 8) return "the GPU is older than compute capability 8.0";
  return "";
}

namespace {
std::string name_of(int device) {
  cudaDeviceProp properties;
  check(cudaGetDeviceProperties(&properties, device), "cudaGetDeviceProperties");
  return properties.name;
}
}  // namespace

std::string name() { return name_of(current()); }

std::vector<std::string> names() {
  std::vector<std::string> found;
  for (int device = 0; device < count(); ++device) found.push_back(name_of(device));
  return found;
}

Peer peer(int device, int other) {
  int has_access = 0, rank = 0;
  check(cudaDeviceCanAccessPeer(&has_access, device, other), "cudaDeviceCanAccessPeer");
  check(cudaDeviceGetP2PAttribute(&rank, cudaDevP2PAttrPerformanceRank, device, other),
        "cudaDeviceGetP2PAttribute");
  return {has_access != 0, rank};
}

int count() {
  int found = 0;
  check(cudaGetDeviceCount(&found), "cudaGetDeviceCount");
  return found;
}

int current() {
  int device = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  return device;
}

Use::Use(int device) : device_(device), previous_(current()) {
  if (device_ != previous_) check(cudaSetDevice(device_), "cudaSetDevice");
}
Use::~Use() {
  if (device_ != previous_) cudaSetDevice(previous_);
}

bool loads_eagerly() {
  void* entry = nullptr;
  cudaDriverEntryPointQueryResult result;
  check(cudaGetDriverEntryPointByVersion("cuModuleGetLoadingMode", &entry, 12000, cudaEnableDefault,
                                         &result),
        "cudaGetDriverEntryPointByVersion");
  if (result != cudaDriverEntryPointSuccess) return false;
  auto mode = CU_MODULE_LAZY_LOADING;
  const auto get_mode = reinterpret_cast<CUresult (*)(CUmoduleLoadingMode*)>(entry);
  return get_mode(&mode) == CUDA_SUCCESS && mode == CU_MODULE_EAGER_LOADING;
}

void enable_peers(const std::vector<int>& devices) {
  for (const int device : devices) {
    const Use use(device);
    for (const int other : devices) {
      if (other == device) continue;
      OPENSPEC_CHECK_ARG(peer(device, other).has_access, "GPU ", device,
                         " cannot reach the memory of GPU ", other,
                         ", as GPUs that share a model must; use --replicas for more devices");
      const cudaError_t error = cudaDeviceEnablePeerAccess(other, 0);
      if (error == cudaErrorPeerAccessAlreadyEnabled) {
        cudaGetLastError();
      } else {
        check(error, "cudaDeviceEnablePeerAccess");
      }
    }
  }
}

MemoryInfo memory() {
  MemoryInfo info;
  check(cudaMemGetInfo(&info.free_bytes, &info.total_bytes), "cudaMemGetInfo");
  return info;
}

void* allocate(size_t bytes) {
  void* data = nullptr;
  check(cudaMalloc(&data, bytes), "cudaMalloc");
  return data;
}
void release(void* data) { cudaFree(data); }

void* allocate_pinned(size_t bytes) {
  void* data = nullptr;
  check(cudaHostAlloc(&data, bytes, cudaHostAllocPortable), "cudaHostAlloc");
  return data;
}
void release_pinned(void* data) { cudaFreeHost(data); }

void copy_to_device(void* to, const void* from, size_t bytes, void* stream) {
  check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, stream_of(stream)),
        "cudaMemcpyAsync");
}
void copy_to_host(void* to, const void* from, size_t bytes, void* stream) {
  check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, stream_of(stream)),
        "cudaMemcpyAsync");
}
void copy_on_device(void* to, const void* from, size_t bytes, void* stream) {
  check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream_of(stream)),
        "cudaMemcpyAsync");
}
void fill_zero(void* data, size_t bytes, void* stream) {
  check(cudaMemsetAsync(data, 0, bytes, stream_of(stream)), "cudaMemsetAsync");
}
void synchronize(void* stream) {
  check(cudaStreamSynchronize(stream_of(stream)), "cudaStreamSynchronize");
}

Stream::Stream() {
  cudaStream_t stream = nullptr;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
  handle_ = stream;
}
Stream::~Stream() {
  cudaStreamSynchronize(stream_of(handle_));
  cudaStreamDestroy(stream_of(handle_));
}

Event::Event() {
  cudaEvent_t event = nullptr;
  check(cudaEventCreate(&event), "cudaEventCreate");
  handle_ = event;
}
Event::~Event() {
  if (handle_ != nullptr) cudaEventDestroy(event_of(handle_));
}
void Event::record(void* stream) {
  check(cudaEventRecord(event_of(handle_), stream_of(stream)), "cudaEventRecord");
}
void Event::wait() const { check(cudaEventSynchronize(event_of(handle_)), "the step"); }
void Event::hold(void* stream) const {
  check(cudaStreamWaitEvent(stream_of(stream), event_of(handle_), 0), "cudaStreamWaitEvent");
}
double Event::seconds_since(const Event& earlier) const {
  float milliseconds = 0.0f;
  check(cudaEventElapsedTime(&milliseconds, event_of(earlier.handle_), event_of(handle_)),
        "cudaEventElapsedTime");
  return 1e-3 * static_cast<double>(milliseconds);
}

Graph::Graph(void* stream, const std::function<void()>& enqueue) {
  check(cudaStreamBeginCapture(stream_of(stream), cudaStreamCaptureModeThreadLocal),
        "cudaStreamBeginCapture");
  cudaGraph_t graph = nullptr;
  try {
    enqueue();
  } catch (...) {
    cudaStreamEndCapture(stream_of(stream), &graph);
    if (graph != nullptr) cudaGraphDestroy(graph);
    throw;
  }
  check(cudaStreamEndCapture(stream_of(stream), &graph), "cudaStreamEndCapture");
  cudaGraphExec_t executable = nullptr;
  const cudaError_t error = cudaGraphInstantiate(&executable, graph, 0);
  cudaGraphDestroy(graph);
  check(error, "cudaGraphInstantiate");
  handle_ = executable;
  check(cudaGraphUpload(executable, stream_of(stream)), "cudaGraphUpload");
}
Graph::~Graph() {
  if (handle_ != nullptr) cudaGraphExecDestroy(static_cast<cudaGraphExec_t>(handle_));
}
void Graph::launch(void* stream) const {
  check(cudaGraphLaunch(static_cast<cudaGraphExec_t>(handle_), stream_of(stream)),
        "cudaGraphLaunch");
}

#else

namespace {
[[noreturn]] void no_cuda() { throw DeviceError("openspec was built without CUDA"); }
}  // namespace

void check(int, const char*) { no_cuda(); }
int64_t fail_check(int64_t) { no_cuda(); }
std::string why_unusable() { return "openspec was built without CUDA"; }
std::string name() { no_cuda(); }
MemoryInfo memory() { no_cuda(); }
std::vector<std::string> names() { no_cuda(); }
Peer peer(int, int) { no_cuda(); }
int count() { no_cuda(); }
int current() { no_cuda(); }
Use::Use(int) { no_cuda(); }
Use::~Use() = default;
bool loads_eagerly() { no_cuda(); }
void enable_peers(const std::vector<int>&) { no_cuda(); }
void* allocate(size_t) { no_cuda(); }
void release(void*) {}
void* allocate_pinned(size_t) { no_cuda(); }
void release_pinned(void*) {}
void copy_to_device(void*, const void*, size_t, void*) { no_cuda(); }
void copy_to_host(void*, const void*, size_t, void*) { no_cuda(); }
void copy_on_device(void*, const void*, size_t, void*) { no_cuda(); }
void fill_zero(void*, size_t, void*) { no_cuda(); }
void synchronize(void*) { no_cuda(); }
Stream::Stream() { no_cuda(); }
Stream::~Stream() = default;
Event::Event() { no_cuda(); }
Event::~Event() = default;
void Event::record(void*) { no_cuda(); }
void Event::wait() const { no_cuda(); }
void Event::hold(void*) const { no_cuda(); }
double Event::seconds_since(const Event&) const { no_cuda(); }
Graph::Graph(void*, const std::function<void()>&) { no_cuda(); }
Graph::~Graph() = default;
void Graph::launch(void*) const { no_cuda(); }

#endif

}  // namespace openspec::device
