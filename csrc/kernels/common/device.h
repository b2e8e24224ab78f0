#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "core/check.h"

namespace openspec {

/// A call of the CUDA runtime failed. Most such errors last: the process can do no more work on the
/// device. Crosses into Python as `openspec.EngineError`.
class DeviceError : public EngineError {
 public:
  using EngineError::EngineError;
};

}  // namespace openspec

/// Enqueues op(params) on the stream of `exec`; throws DeviceError.
#ifdef OPENSPEC_CUDA
#define OPENSPEC_ON_CUDA(op, params, exec) openspec::device::check(op(params, (exec).stream), #op)
#else
#define OPENSPEC_ON_CUDA(op, params, exec) \
  (void)(params), (void)(exec), openspec::device::check(-1, #op)
#endif

/// The CUDA device as the layers above the kernels see it: memory, streams, events and graphs,
/// without CUDA's headers. In a build without CUDA there is never a device, and everything else
/// throws.
namespace openspec::device {

/// Throws DeviceError naming `what` unless `error` (a cudaError_t) is success.
void check(int error, const char* what);
/// For tests: the `count`-th check from here on fails, as if its call had; 0: none does. Returns
/// how many checks there were since the last call of this function.
int64_t fail_check(int64_t count);

/// Empty if a device can be used, else the reason.
std::string why_unusable();
std::string name();
struct MemoryInfo {
  size_t free_bytes = 0, total_bytes = 0;
};
MemoryInfo memory();

/// Names of all visible devices.
std::vector<std::string> names();
/// What a visible device is to another one.
struct Peer {
  bool has_access = false;   // reads and writes its memory directly
  int performance_rank = 0;  // of the link between them; the lower the faster
};
Peer peer(int device, int other);

/// Of the visible devices.
int count();
/// The device on which this thread's memory, streams, events and graphs are made and its kernels
/// are launched: 0 until it uses another one.
int current();
/// Makes a device the thread's current one, until the end of the guard's life.
class Use {
 public:
  explicit Use(int device);
  ~Use();
  Use(const Use&) = delete;
  Use& operator=(const Use&) = delete;

 private:
  int device_ = 0, previous_ = 0;
};
/// Whether kernels are loaded when a device is first used, not when each is first launched, which
/// waits for those that run (CUDA_MODULE_LOADING).
bool loads_eagerly();
/// Lets each of the devices read and write the memory of all others. Throws ArgumentError naming
/// two that cannot.
void enable_peers(const std::vector<int>& devices);

void* allocate(size_t bytes);
void release(void* data);
/// Host memory that all devices read and write directly.
void* allocate_pinned(size_t bytes);
void release_pinned(void* data);

/// Enqueues a copy. From memory that is not pinned it returns only when the source has been read.
void copy_to_device(void* to, const void* from, size_t bytes, void* stream);
void copy_to_host(void* to, const void* from, size_t bytes, void* stream);
void copy_on_device(void* to, const void* from, size_t bytes, void* stream);
void fill_zero(void* data, size_t bytes, void* stream);
void synchronize(void* stream);

/// As all that is made here, of the device that is current then.
class Stream {
 public:
  Stream();
  ~Stream();
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  void* handle() const { return handle_; }

 private:
  void* handle_ = nullptr;
};

class Event {
 public:
  Event();
  ~Event();
  Event(Event&& other) noexcept : handle_(other.handle_) { other.handle_ = nullptr; }
  Event& operator=(Event&&) = delete;
  void record(void* stream);
  /// Returns when everything before the last `record` is done.
  void wait() const;
  /// What is put on `stream` from here on waits for everything before the last `record`.
  void hold(void* stream) const;
  /// Seconds between two events that are done.
  double seconds_since(const Event& earlier) const;

 private:
  void* handle_ = nullptr;
};

/// A recorded sequence of launches, started by one call.
class Graph {
 public:
  /// Records what `enqueue` puts on `stream`; runs nothing.
  Graph(void* stream, const std::function<void()>& enqueue);
  ~Graph();
  Graph(Graph&& other) noexcept : handle_(other.handle_) { other.handle_ = nullptr; }
  Graph& operator=(Graph&&) = delete;
  void launch(void* stream) const;

 private:
  void* handle_ = nullptr;
};

}  // namespace openspec::device
