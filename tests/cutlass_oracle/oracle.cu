// D_g [M, N] f32 = A_g [M, K] B_g [N, K]^T for every group g, E4M3 with 1x128 scales on both sides,
// by CUTLASS's own blockwise kernel for pointer arrays. Test only: it copies its arguments and
// waits.
#include <cuda_runtime.h>

#include <cstdint>
#include <vector>

#include <cutlass/gemm/device/gemm_universal_adapter.h>
#include <cute/tensor.hpp>
#include <cutlass/detail/blockwise_scale_layout.hpp>
#include <cutlass/epilogue/collective/collective_builder.hpp>
#include <cutlass/gemm/collective/collective_builder.hpp>
#include <cutlass/gemm/kernel/gemm_universal.hpp>

namespace {

using Element = cutlass::float_e4m3_t;
using RowMajor = cutlass::layout::RowMajor;
using ColumnMajor = cutlass::layout::ColumnMajor;
using Tile = cute::Shape<cute::_128, cute::_128, cute::_128>;
using Cluster = cute::Shape<cute::_1, cute::_1, cute::_1>;
using Problem = cutlass::gemm::GroupProblemShape<cute::Shape<int, int, int>>;

// Scales [rows, K / 128] of both operands, K contiguous: the `row` layout.
using Scales = cutlass::detail::Sm90BlockwiseScaleConfig<1, 1, 128, cute::GMMA::Major::K,
                                                         cute::GMMA::Major::K>;
using ScaleLayoutA = decltype(Scales::deduce_layoutSFA());
using ScaleLayoutB = decltype(Scales::deduce_layoutSFB());

constexpr int kAlignIn = 16;  // elements in 16 bytes
constexpr int kAlignOut = 4;

using Epilogue = cutlass::epilogue::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Tile, Cluster,
    cutlass::epilogue::collective::EpilogueTileAuto, float, float, void, RowMajor*, kAlignOut,
    float, RowMajor*, kAlignOut,
    cutlass::epilogue::PtrArrayTmaWarpSpecializedCooperative>::CollectiveOp;
using Mainloop = cutlass::gemm::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Element,
    cute::tuple<RowMajor*, ScaleLayoutA*>, kAlignIn, Element,
    cute::tuple<ColumnMajor*, ScaleLayoutB*>, kAlignIn, float, Tile, Cluster,
    cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(
        sizeof(typename Epilogue::SharedStorage))>,
    cutlass::gemm::KernelPtrArrayTmaWarpSpecializedCooperativeFP8Blockwise>::CollectiveOp;
using Kernel = cutlass::gemm::kernel::GemmUniversal<Problem, Mainloop, Epilogue>;
using Gemm = cutlass::gemm::device::GemmUniversalAdapter<Kernel>;

// A copy of a host vector on the device, for the duration of the call.
template <typename T>
class OnDevice {
 public:
  explicit OnDevice(const std::vector<T>& host) {
    const size_t bytes = host.size() * sizeof(T);
    if (cudaMalloc(&data_, bytes) != cudaSuccess) data_ = nullptr;
    if (data_) cudaMemcpy(data_, host.data(), bytes, cudaMemcpyHostToDevice);
  }
  ~OnDevice() { cudaFree(data_); }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;
  T* get() const { return static_cast<T*>(data_); }

 private:
  void* data_ = nullptr;
};

}  // namespace

// One group: device pointers, rows of A and B `stride` elements apart, scales [M, cdiv(K, 128)] and
// [N, cdiv(K, 128)] contiguous, D [M, N] contiguous. M, N, K positive; N a multiple of 4, K and the
// strides of 16.
struct Group {
  const void* a;
  const float* scale_a;
  const void* b;
  const float* scale_b;
  float* d;
  int64_t stride_a, stride_b;
  int32_t m, n, k;
};

// nullptr, or what went wrong.
extern "C" __attribute__((visibility("default"))) const char* fp8moe_cutlass_oracle(
    const Group* groups, int count) {
  std::vector<Problem::UnderlyingProblemShape> shapes;
  std::vector<const Element*> a, b;
  std::vector<const float*> scale_a, scale_b;
  std::vector<float*> d;
  std::vector<typename Kernel::InternalStrideA> stride_a;
  std::vector<typename Kernel::InternalStrideB> stride_b;
  std::vector<typename Kernel::InternalStrideD> stride_d;
  std::vector<ScaleLayoutA> layout_a;
  std::vector<ScaleLayoutB> layout_b;
  for (int g = 0; g < count; ++g) {
    const Group& group = groups[g];
    const auto shape = cute::make_shape(group.m, group.n, group.k, 1);
    shapes.push_back(cute::make_shape(group.m, group.n, group.k));
    a.push_back(static_cast<const Element*>(group.a));
    b.push_back(static_cast<const Element*>(group.b));
    scale_a.push_back(group.scale_a);
    scale_b.push_back(group.scale_b);
    d.push_back(group.d);
    stride_a.push_back({group.stride_a, cute::_1{}, cute::_0{}});
    stride_b.push_back({group.stride_b, cute::_1{}, cute::_0{}});
    stride_d.push_back({int64_t{group.n}, cute::_1{}, cute::_0{}});
    layout_a.push_back(Scales::tile_atom_to_shape_SFA(shape));
    layout_b.push_back(Scales::tile_atom_to_shape_SFB(shape));
  }
  const OnDevice shapes_d(shapes);
  const OnDevice a_d(a), b_d(b);
  const OnDevice scale_a_d(scale_a), scale_b_d(scale_b);
  const OnDevice d_d(d);
  const OnDevice stride_a_d(stride_a);
  const OnDevice stride_b_d(stride_b);
  const OnDevice stride_d_d(stride_d);
  const OnDevice layout_a_d(layout_a);
  const OnDevice layout_b_d(layout_b);

  int device = 0;
  cudaGetDevice(&device);
  typename Gemm::Arguments arguments{
      cutlass::gemm::GemmUniversalMode::kGrouped,
      {count, shapes_d.get(), shapes.data()},
      {a_d.get(), stride_a_d.get(), b_d.get(), stride_b_d.get(), scale_a_d.get(), layout_a_d.get(),
       scale_b_d.get(), layout_b_d.get()},
      {{}, nullptr, nullptr, d_d.get(), stride_d_d.get()},
      cutlass::KernelHardwareInfo::make_kernel_hardware_info<Kernel>(device)};
  arguments.epilogue.thread.alpha = 1.0f;
  arguments.epilogue.thread.beta = 0.0f;

  Gemm gemm;
  if (const auto status = gemm.can_implement(arguments); status != cutlass::Status::kSuccess)
    return cutlass::cutlassGetStatusString(status);
  const OnDevice workspace(std::vector<uint8_t>(Gemm::get_workspace_size(arguments)));
  if (const auto status = gemm.initialize(arguments, workspace.get());
      status != cutlass::Status::kSuccess)
    return cutlass::cutlassGetStatusString(status);
  if (const auto status = gemm.run(); status != cutlass::Status::kSuccess)
    return cutlass::cutlassGetStatusString(status);
  const cudaError_t error = cudaDeviceSynchronize();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}
