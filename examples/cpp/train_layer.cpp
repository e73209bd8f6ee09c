// Trains one expert block by SGD, without Python: forward, backward and weight gradients of
// experts.h, on the CPU or, with the argument "cuda", on a GPU. Prints the loss of each step, with
// the bits that the Python layer gives. Loss and SGD run on the host, for want of kernels.
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "experts.h"

#ifdef TRAIN_LAYER_CUDA
#include <cuda_runtime_api.h>
#endif

using namespace fp8moe;

namespace {

constexpr int64_t kTokens = 96, kSlots = 2, kExperts = 4, kHidden = 144, kIntermediate = 80;
constexpr int kSteps = 8;
constexpr float kRate = 64.0f;  // of a mean over T H elements

#ifdef TRAIN_LAYER_CUDA
void check(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(cudaGetErrorString(error));
}
#endif

// Memory on the device, and copies to and from the host.
class Buffer {
 public:
  Buffer(Device device, DType dtype, std::initializer_list<int64_t> shape)
      : tensor_(nullptr, dtype, shape, device) {
#ifdef TRAIN_LAYER_CUDA
    if (device.type == DeviceType::cuda) {
      check(cudaMalloc(&tensor_.data, bytes()));
      check(cudaMemset(tensor_.data, 0, bytes()));
      return;
    }
#endif
    if (device.type == DeviceType::cuda) throw std::runtime_error("built without the CUDA runtime");
    host_.resize(bytes());
    tensor_.data = host_.data();
  }
  Buffer(const Buffer&) = delete;
  ~Buffer() {
#ifdef TRAIN_LAYER_CUDA
    if (host_.empty()) cudaFree(tensor_.data);
#endif
  }

  operator const Tensor&() const { return tensor_; }

  template <class T>
  void write(const std::vector<T>& from) {
#ifdef TRAIN_LAYER_CUDA
    if (host_.empty())
      return check(cudaMemcpy(tensor_.data, from.data(), bytes(), cudaMemcpyHostToDevice));
#endif
    std::memcpy(tensor_.data, from.data(), bytes());
  }
  template <class T>
  std::vector<T> read() const {
    std::vector<T> to(static_cast<size_t>(tensor_.numel()));
#ifdef TRAIN_LAYER_CUDA
    if (host_.empty()) {
      check(cudaMemcpy(to.data(), tensor_.data, bytes(), cudaMemcpyDeviceToHost));  // waits
      return to;
    }
#endif
    std::memcpy(to.data(), tensor_.data, bytes());
    return to;
  }

 private:
  size_t bytes() const { return static_cast<size_t>(tensor_.numel() * size_of(tensor_.dtype)); }

  Tensor tensor_;
  std::vector<char> host_;
};

// Numbers in [-scale / 2, scale / 2), the same in any language.
std::vector<float> numbers(int64_t count, uint32_t seed, float scale) {
  std::vector<float> made(static_cast<size_t>(count));
  for (size_t i = 0; i < made.size(); ++i) {
    uint32_t hash = static_cast<uint32_t>(i) + (seed << 24);  // mixed as murmur3 ends
    hash = (hash ^ (hash >> 16)) * 0x85ebca6bu;
    hash = (hash ^ (hash >> 13)) * 0xc2b2ae35u;
    hash ^= hash >> 16;
    made[i] = (static_cast<float>(hash >> 8) * 0x1p-24f - 0.5f) * scale;
  }
  return made;
}

float from_bf16(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &wide, sizeof value);
  return value;
}

void train(Device device) {
  constexpr int64_t t = kTokens, h = kHidden, i = kIntermediate, e = kExperts;
  const experts::Sizes s{t, kSlots, e, h, i, /*capacity=*/t * kSlots, false, device};

  std::vector<float> weights[2] = {numbers(e * 2 * i * h, 1, 0.25f), numbers(e * h * i, 2, 0.25f)};
  const std::vector<float> tokens = numbers(t * h, 3, 2.0f);
  std::vector<float> shares = numbers(t * kSlots, 4, 0.5f);
  std::vector<int32_t> ids(t * kSlots);
  for (int64_t n = 0; n < t; ++n) {
    ids[n * 2] = static_cast<int32_t>(n % e);
    ids[n * 2 + 1] = static_cast<int32_t>((n + 1 + n / e % (e - 1)) % e);
  }
  for (float& share : shares) share += 0.5f;

  Buffer x(device, DType::f32, {t, h}), out(device, DType::bf16, {t, h});
  Buffer dout(device, DType::f32, {t, h}), dx(device, DType::bf16, {t, h});
  Buffer topk_idx(device, DType::i32, {t, kSlots}), probs(device, DType::f32, {t, kSlots});
  Buffer dprobs(device, DType::f32, {t, kSlots});
  Buffer gate_up(device, DType::f32, {e, 2 * i, h}), down(device, DType::f32, {e, h, i});
  Buffer dgate_up(device, DType::f32, {e, 2 * i, h}), ddown(device, DType::f32, {e, h, i});
  const auto bytes = [&](int64_t count) { return Buffer(device, DType::u8, {count}); };
  const Buffer saved = bytes(experts::saved_bytes(s)), kept = bytes(experts::kept_bytes(s));
  const Buffer zeros = bytes(kZeroWorkspaceBytes);
  const Buffer scratch =
      bytes(std::max({experts::forward_scratch_bytes(s), experts::backward_scratch_bytes(s),
                      experts::gradient_scratch_bytes(s)}));
  x.write(tokens);
  topk_idx.write(ids);
  probs.write(shares);

  for (int step = 0; step < kSteps; ++step) {
    gate_up.write(weights[0]);
    down.write(weights[1]);
    experts::forward(s, {.x = {x},
                         .topk_idx = topk_idx,
                         .probs = probs,
                         .gate_up = gate_up,
                         .down = down,
                         .out = out,
                         .saved = saved,
                         .scratch = scratch});

    // The mean square of out - x, and its gradient.
    const std::vector<uint16_t> got = out.read<uint16_t>();
    std::vector<float> gradient(got.size());
    double sum = 0.0;
    for (size_t n = 0; n < got.size(); ++n) {
      const float error = from_bf16(got[n]) - tokens[n];
      sum += static_cast<double>(error) * error;
      gradient[n] = error * (2.0f / static_cast<float>(t * h));
    }
    std::printf("step %d loss %.17g\n", step, sum / static_cast<double>(t * h));

    dout.write(gradient);
    experts::backward(s, {.dout = {dout},
                          .saved = saved,
                          .dx = dx,
                          .dprobs = dprobs,
                          .kept = kept,
                          .workspace = zeros,
                          .scratch = scratch});
    for (const bool of_down : {false, true}) {
      const Buffer& dw = of_down ? ddown : dgate_up;
      experts::weight_gradient(s, {.of_down = of_down,
                                   .saved = saved,
                                   .kept = kept,
                                   .dw = dw,
                                   .workspace = zeros,
                                   .scratch = scratch});
      const std::vector<float> gradients = dw.read<float>();
      for (size_t n = 0; n < gradients.size(); ++n) weights[of_down][n] -= kRate * gradients[n];
    }
  }
}

}  // namespace

int main(int count, char** arguments) {
  try {
    const bool cuda = count > 1 && std::string(arguments[1]) == "cuda";
    train({cuda ? DeviceType::cuda : DeviceType::cpu});
  } catch (const std::exception& error) {
    std::fprintf(stderr, "train_layer: %s\n", error.what());
    return 1;
  }
}
