#pragma once

#include <vector>

#include "runtime/device/device_buffers.h"
#include "runtime/device/stages.h"

namespace openspec {

/// Looks at what the last collected step left on the device, for tests; see StepBackend.
class DeviceProbe {
 public:
  DeviceProbe(const StepContext& context, const DeviceBuffers& arrays, const DeviceStages& stages,
              void* stream)
      : context_(context), arrays_(arrays), stages_(stages), stream_(stream) {}

  void note_collected(int num_spans, int num_rows, int num_samples);
  std::vector<float> logits() const;
  std::vector<float> features(int num_captures) const;
  std::vector<Draft> drafts() const;

 private:
  template <typename T>
  std::vector<T> download(const T* from, size_t count) const;

  const StepContext& context_;
  const DeviceBuffers& arrays_;
  const DeviceStages& stages_;
  void* stream_;
  int num_spans_ = 0, num_rows_ = 0, num_logits_ = 0;
};

}  // namespace openspec
