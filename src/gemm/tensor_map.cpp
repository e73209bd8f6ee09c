#include "gemm/tensor_map.h"

#include <cudaTypedefs.h>
#include <cuda_runtime.h>

#include <array>

#include <string>

#include "common/check.h"
#include "device/runtime.h"
#include "gemm/stage.h"

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

CUtensorMapDataType output_type(const Tensor& d) {
  return d.dtype == DType::bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                : CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
}

}  // namespace

CUtensorMap operand_map(const char* op, const char* name, const void* data, int64_t rows, int64_t k,
                        int box_rows) {
  const auto row = static_cast<cuuint64_t>(k);
  return encode<2>(op, name, CU_TENSOR_MAP_DATA_TYPE_UINT8, CU_TENSOR_MAP_SWIZZLE_128B, data,
                   {row, static_cast<cuuint64_t>(rows)}, {row},
                   {kTile, static_cast<cuuint32_t>(box_rows)});
}

CUtensorMap output_box_map(const char* op, const char* name, const Tensor& d, int64_t experts,
                           int64_t m, int64_t n, int box_rows) {
  const auto size = static_cast<cuuint64_t>(size_of(d.dtype));
  const auto row = static_cast<cuuint64_t>(n) * size;
  return encode<3>(
      op, name, output_type(d), CU_TENSOR_MAP_SWIZZLE_128B, d.data,
      {static_cast<cuuint64_t>(n), static_cast<cuuint64_t>(m), static_cast<cuuint64_t>(experts)},
      {row, static_cast<cuuint64_t>(m) * row},
      {static_cast<cuuint32_t>(kOutputBoxBytes / size), static_cast<cuuint32_t>(box_rows), 1});
}

CUtensorMap output_strip_map(const char* op, const char* name, const Tensor& d, int64_t experts,
                             int64_t m, int64_t n, int box_rows, int boxes) {
  const auto size = static_cast<cuuint64_t>(size_of(d.dtype));
  const auto row = static_cast<cuuint64_t>(n) * size;
  // Strides need not grow: the driver does not ask for what cuda.h describes.
  return encode<4>(op, name, output_type(d), CU_TENSOR_MAP_SWIZZLE_128B, d.data,
                   {kOutputBoxBytes / size, static_cast<cuuint64_t>(m), row / kOutputBoxBytes,
                    static_cast<cuuint64_t>(experts)},
                   {row, kOutputBoxBytes, static_cast<cuuint64_t>(m) * row},
                   {static_cast<cuuint32_t>(kOutputBoxBytes / size),
                    static_cast<cuuint32_t>(box_rows), static_cast<cuuint32_t>(boxes), 1});
}

CUtensorMap scale_map(const char* op, const char* name, const void* data, int64_t k_blocks,
                      int64_t row_length, int box_rows) {
  return encode<2>(op, name, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, CU_TENSOR_MAP_SWIZZLE_NONE, data,
                   {static_cast<cuuint64_t>(row_length), static_cast<cuuint64_t>(k_blocks)},
                   {static_cast<cuuint64_t>(row_length) * sizeof(float)},
                   {static_cast<cuuint32_t>(box_rows), 1});
}

}  // namespace fp8moe::cuda::gemm
