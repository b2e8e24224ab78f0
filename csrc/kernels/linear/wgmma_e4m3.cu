#include "kernels/linear/wgmma_launch.cuh"

namespace openspec::cuda {

template int wgmma_as<WeightForm::kOutputScales>(const WgmmaPlan&, const LinearParams&, void*);
template bool has_wgmma_kernels<WeightForm::kOutputScales>();
template int wgmma_as<WeightForm::kBlockScales>(const WgmmaPlan&, const LinearParams&, void*);
template bool has_wgmma_kernels<WeightForm::kBlockScales>();

}  // namespace openspec::cuda
