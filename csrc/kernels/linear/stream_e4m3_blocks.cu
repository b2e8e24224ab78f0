#include "kernels/linear/stream_launch.cuh"

namespace openspec::cuda {

template bool stream_has_registers<WeightForm::kBlockScales>(const LinearParams&);
template int stream_as<WeightForm::kBlockScales>(const LinearParams&, void*, const StreamPlan&);

}  // namespace openspec::cuda
