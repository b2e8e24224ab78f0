#include "kernels/linear/wgmma_launch.cuh"

namespace openspec::cuda {

template int wgmma_as<WeightForm::kPlain>(const WgmmaPlan&, const LinearParams&, void*);
template bool has_wgmma_kernels<WeightForm::kPlain>();

}  // namespace openspec::cuda
