// share_words: one block, a warp per rank. It writes this rank's words and, behind them, the number
// of the call to the rank's mailbox, then waits until that number has come from there.
//
// The rows that kernels before this one stored at the peers are theirs when they see the number: a
// kernel has ended before the next one of its stream begins, and the number is released behind a
// fence of the whole system. What a call's places mean: exchange_cpu.cpp.
#include "common/backends.h"
#include "common/check.h"
#include "device/reduce.cuh"
#include "device/runtime.h"

namespace fp8moe::cuda {
namespace {

constexpr int kMaxWarps = 32;

struct Params {
  const int32_t* words;    // [own]
  const int32_t* more;     // [n - own]
  const int64_t* peers;    // [ranks]
  const int32_t* mailbox;  // [2, ranks, stride]
  int32_t* calls;          // [1]
  int32_t* ended;          // [1]
  int32_t* late;           // [ranks], maybe the host's
  int32_t* told;           // [ranks, n], likewise
  int own;
  int words_count;  // n
  int stride;
  int ranks;
  int rank;
  int64_t timeout_ns;
};

__device__ __forceinline__ void store_release(int32_t* p, int32_t v) {
  asm volatile("st.release.sys.global.b32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
__device__ __forceinline__ int32_t load_acquire(const int32_t* p) {
  int32_t v;
  asm volatile("ld.acquire.sys.global.b32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ int64_t now_ns() {
  int64_t t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
  return t;
}

__global__ void __launch_bounds__(32 * kMaxWarps) share(const __grid_constant__ Params p) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int warps = static_cast<int>(blockDim.x) / 32;
  const auto call = static_cast<int32_t>(static_cast<uint32_t>(*p.calls) + 1u);
  const bool ended = *p.ended != 0;
  __syncthreads();  // all have read them
  if (ended) {
    for (int i = threadIdx.x; i < p.ranks * p.words_count; i += blockDim.x) p.told[i] = 0;
    return;
  }
  const int64_t place = int64_t{call & 1} * p.ranks;
  for (int r = warp; r < p.ranks; r += warps) {
    int32_t* box = reinterpret_cast<int32_t*>(__ldg(p.peers + r)) + (place + p.rank) * p.stride;
    for (int i = lane; i < p.words_count; i += 32)
      box[1 + i] = i < p.own ? p.words[i] : p.more[i - p.own];
    __threadfence_system();
    __syncwarp();
    if (lane == 0) store_release(box, call);
  }
  const int64_t start = now_ns();
  for (int r = warp; r < p.ranks; r += warps) {
    const int32_t* box = p.mailbox + (place + r) * p.stride;
    int here = 0;
    if (lane == 0) {
      const auto came = [&] {
        const auto seen = static_cast<uint32_t>(load_acquire(box));
        return static_cast<int32_t>(seen - static_cast<uint32_t>(call)) >= 0;
      };
      here = came();
      while (!here && now_ns() - start < p.timeout_ns) here = came();
      __threadfence_system();
    }
    here = __shfl_sync(kFullWarp, here, 0);
    __syncwarp();  // what lane 0 acquired is the others', too: a shuffle orders no memory
    for (int i = lane; i < p.words_count; i += 32)
      p.told[r * p.words_count + i] = here ? *const_cast<const volatile int32_t*>(box + 1 + i) : 0;
    if (!here && lane == 0) {
      auto* late = const_cast<volatile int32_t*>(p.late + r);
      *late = *late + 1;
      __threadfence_system();
      *p.ended = 1;
    }
  }
  if (threadIdx.x == 0) *p.calls = call;
}

// As the device addresses it.
int32_t* address_of(const Tensor& t, const char* name) {
  if (t.device.type == DeviceType::cuda || t.numel() == 0) return t.as<int32_t>();
  cudaPointerAttributes found{};
  FP8MOE_CUDA_CHECK(cudaPointerGetAttributes(&found, t.data));
  FP8MOE_CHECK(found.type == cudaMemoryTypeHost && found.devicePointer != nullptr, "[share_words] ",
               name, " must be on the device or in pinned memory; got pageable memory");
  return static_cast<int32_t*>(found.devicePointer);
}

}  // namespace

template <>
void run(const ShareWords& p, Stream stream) {
  const DeviceGuard guard(p.words.device);
  const auto ranks = static_cast<int>(p.peers.numel());
  const auto own = static_cast<int>(p.words.numel());
  const Params params{.words = p.words.as<const int32_t>(),
                      .more = p.more.as<const int32_t>(),
                      .peers = p.peers.as<const int64_t>(),
                      .mailbox = p.mailbox.as<const int32_t>(),
                      .calls = p.calls.as<int32_t>(),
                      .ended = p.ended.as<int32_t>(),
                      .late = address_of(p.late, "late"),
                      .told = address_of(p.told, "told"),
                      .own = own,
                      .words_count = static_cast<int>(p.count()),
                      .stride = static_cast<int>(p.mailbox.shape[2]),
                      .ranks = ranks,
                      .rank = static_cast<int>(p.rank),
                      .timeout_ns = p.timeout_ms * 1'000'000};
  launch("share_words", share, 1, static_cast<unsigned>(32 * std::min(ranks, kMaxWarps)), 0,
         stream_of(stream), params);
}

}  // namespace fp8moe::cuda
