#include "kernels/linear/stream_launch.cuh"

namespace openspec::cuda {

template bool stream_has_registers<WeightForm::kOutputScales>(const LinearParams&);
template int stream_as<WeightForm::kOutputScales>(const LinearParams&, void*, const StreamPlan&);

}  // namespace openspec::cuda
