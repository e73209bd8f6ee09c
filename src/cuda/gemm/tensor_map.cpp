#include "cuda/gemm/tensor_map.h"

#include <cudaTypedefs.h>
#include <cuda_runtime.h>

#include <array>

#include <string>

#include "core/check.h"
#include "cuda/runtime.h"

namespace fp8moe::cuda::gemm {
namespace {

// The driver's encoder, asked of the runtime so that nothing links libcuda.
PFN_cuTensorMapEncodeTiled_v12000 encoder() {
  static const auto found = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result{};
    FP8MOE_CUDA_CHECK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000,
                                                       cudaEnableDefault, &result));
    if (result != cudaDriverEntryPointSuccess)
      throw DeviceUnavailable("the NVIDIA driver has no cuTensorMapEncodeTiled; update the driver");
    return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(function);
  }();
  return found;
}

template <size_t Rank>
CUtensorMap encode(const char* op, const char* name, CUtensorMapDataType type,
                   CUtensorMapSwizzle swizzle, const void* data,
                   const std::array<cuuint64_t, Rank>& size,
                   const std::array<cuuint64_t, Rank - 1>& stride_bytes,
                   const std::array<cuuint32_t, Rank>& box) {
  FP8MOE_CHECK(reinterpret_cast<uintptr_t>(data) % 16 == 0, "[", op, "] ", name,
               " must start at a multiple of 16 bytes; got address ", data);
  std::array<cuuint32_t, Rank> step;
  step.fill(1);
  CUtensorMap map{};
  const CUresult result =
      encoder()(&map, type, Rank, const_cast<void*>(data), size.data(), stride_bytes.data(),
                box.data(), step.data(), CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
                CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS)
    throw CudaError("[" + std::string(op) + "] cuTensorMapEncodeTiled(" + name +
                    ") failed with CUresult " + std::to_string(result));
  return map;
}

}  // namespace

CUtensorMap operand_map(const char* op, const char* name, const void* data, int64_t rows, int64_t k,
                        int box_rows) {
  const auto row = static_cast<cuuint64_t>(k);
  return encode<2>(op, name, CU_TENSOR_MAP_DATA_TYPE_UINT8, CU_TENSOR_MAP_SWIZZLE_128B, data,
                   {row, static_cast<cuuint64_t>(rows)}, {row},
                   {kTile, static_cast<cuuint32_t>(box_rows)});
}

CUtensorMap column_operand_map(const char* op, const char* name, const void* data, int64_t rows,
                               int64_t k, int box_rows, int group) {
  const auto row = static_cast<cuuint64_t>(k);
  const auto per_lane = static_cast<cuuint64_t>(group / 4), pairs = per_lane / 2;
  return encode<5>(
      op, name, CU_TENSOR_MAP_DATA_TYPE_UINT8, CU_TENSOR_MAP_SWIZZLE_128B, data,
      {row, 2, 4, pairs, static_cast<cuuint64_t>(rows / group)},  // k, i, q, j, group
      {row, per_lane * row, 2 * row, static_cast<cuuint64_t>(group) * row},
      {kTile, 2, 4, static_cast<cuuint32_t>(pairs), static_cast<cuuint32_t>(box_rows / group)});
}

CUtensorMap scale_map(const char* op, const char* name, const void* data, int64_t k_blocks,
                      int64_t row_length, int box_rows) {
  return encode<2>(op, name, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, CU_TENSOR_MAP_SWIZZLE_NONE, data,
                   {static_cast<cuuint64_t>(row_length), static_cast<cuuint64_t>(k_blocks)},
                   {static_cast<cuuint64_t>(row_length) * sizeof(float)},
                   {static_cast<cuuint32_t>(box_rows), 1});
}

}  // namespace fp8moe::cuda::gemm
