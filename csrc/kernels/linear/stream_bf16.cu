#include "kernels/linear/stream_launch.cuh"

namespace openspec::cuda {

template bool stream_has_registers<WeightForm::kPlain>(const LinearParams&);
template int stream_as<WeightForm::kPlain>(const LinearParams&, void*, const StreamPlan&);

}  // namespace openspec::cuda
