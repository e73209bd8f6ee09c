// act_quantize_backward of bf16 [gate | up] of any I, where a tile of dz may hold of both: each
// output takes its own pass, by sources that know the activation.
#include "ops/activation/act_backward_apart.cuh"

namespace fp8moe::cuda {

namespace {

template <class Act>
struct SideSource {
  static constexpr bool kPow2 = true;
  const uint16_t* z;   // [R, 2I]
  const uint16_t* dh;  // [R, I]
  const float* probs;  // [R] or nullptr: 1
  int intermediate;
  Act act;

  static __device__ __forceinline__ void eight(const uint16_t* from, float (&v)[8]) {
    const uint4 words = cuda::load<uint4>(from);
    unpack<Bf16>(&words.x, v);
  }
  __device__ __forceinline__ void pairs(int64_t row, int column, float (&gate)[8],
                                        float (&up)[8]) const {
    const uint16_t* from = z + row * 2 * intermediate + column;
    eight(from, gate), eight(from + intermediate, up);
  }
  __device__ __forceinline__ float prob(int64_t row) const {
    return probs != nullptr ? probs[row] : 1.0f;
  }
};

template <class Act>
struct SideHidden : SideSource<Act> {
  __device__ __forceinline__ void operator()(int64_t row, int column, float (&v)[8]) const {
    float gate[8], up[8];
    this->pairs(row, column, gate, up);
    const float prob = this->prob(row);
#pragma unroll
    for (int i = 0; i < 8; ++i)
      v[i] = this->act.value(gate[i], up[i], this->act.sigmoid(gate[i])) * prob;
  }
};

template <class Act>
struct SideGrad : SideSource<Act> {
  // of(gradient) of each of eight columns of h.
  template <typename Of>
  __device__ __forceinline__ void each(int64_t row, int column, float (&v)[8], Of of) const {
    float gate[8], up[8], dh[8];
    this->pairs(row, column, gate, up);
    this->eight(this->dh + row * this->intermediate + column, dh);
#pragma unroll
    for (int i = 0; i < 8; ++i)
      v[i] = of(this->act.grad(gate[i], up[i], this->act.sigmoid(gate[i]), dh[i]));
  }
  __device__ __forceinline__ void operator()(int64_t row, int column, float (&v)[8]) const {
    const bool second = column >= this->intermediate;
    const float prob = this->prob(row);
    each(row, second ? column - this->intermediate : column, v,
         [=](const ActivationGrad& g) { return (second ? g.dup : g.dgate) * prob; });
  }
  __device__ __forceinline__ void terms(int64_t row, int column, float (&v)[8]) const {
    each(row, column, v, [](const ActivationGrad& g) { return g.dprob; });
  }
};

}  // namespace

void launch_side_by_side(const ActQuantizeBackward& p, cudaStream_t stream) {
  with_activation(p.activation, [&]<class Act>(Act act) {
    if constexpr (Act::kGated) {
      const SideSource<Act> source = {p.z.as<uint16_t>(), p.dh.as<uint16_t>(), p.probs.as<float>(),
                                      static_cast<int>(p.dh.shape[1]), act};
      launch_apart(p, SideGrad<Act>{source}, SideHidden<Act>{source}, stream);
    }
  });
}

}  // namespace fp8moe::cuda
