// The expert block as handlers of JAX's foreign function interface, each for the CPU and for CUDA.
// Every buffer is JAX's, scratch among them, and so is the stream. Nothing here waits.
//
// sizes: [T, S, E, H, I, capacity, came_in_fp8] of experts::Sizes, and whether scratch is to
// suffice on CUDA. Where came_in_fp8, rows are packed, u8, as quantize_pack writes them.
#include "../cpp/experts.h"
#include "xla/ffi/api/ffi.h"

using namespace fp8moe;
namespace ffi = xla::ffi;
using ffi::AnyBuffer;
using Out = ffi::Result<AnyBuffer>;
using Numbers = ffi::Span<const int64_t>;

namespace {

struct Place {
  Device device;
  Stream stream;

  Tensor operator()(const AnyBuffer& buffer) const {
    Tensor t(buffer.untyped_data(), dtype_of(buffer.element_type()), {}, device);
    const auto shape = buffer.dimensions();
    if (shape.size() > Tensor::kMaxDims)
      throw InvalidArgument("[jax] an array must have at most 4 dimensions; got " +
                            std::to_string(shape.size()));
    t.ndim = static_cast<int32_t>(shape.size());
    std::copy(shape.begin(), shape.end(), t.shape.begin());
    return t;
  }
  Tensor operator()(Out& buffer) const { return (*this)(*buffer); }

  static DType dtype_of(ffi::DataType type) {
    switch (type) {
      case ffi::F32: return DType::f32;
      case ffi::F16: return DType::f16;
      case ffi::BF16: return DType::bf16;
      case ffi::S32: return DType::i32;
      case ffi::S64: return DType::i64;
      case ffi::U8: return DType::u8;
      default:
        throw InvalidArgument(
            "[jax] an array must be float32, float16, bfloat16, int32, int64 or uint8; got XLA's "
            "type " +
            std::to_string(static_cast<int>(type)));
    }
  }
};

experts::Sizes sizes_of(const Numbers& n, Device device) {
  return {n[0], n[1], n[2], n[3], n[4], n[5], n[6] != 0, device};
}

Device device_of(int64_t cuda) { return {cuda ? DeviceType::cuda : DeviceType::cpu}; }

// Tokens as they are; or codes and scales where packed rows have them.
Fp8Tensor tokens(const Tensor& t, const experts::Sizes& s) {
  if (!s.came_in_fp8) return {t};
  const int64_t rows = t.shape[0], bytes = t.shape[1], blocks = cdiv(s.hidden, kTile);
  Fp8Tensor x{{t.data, DType::e4m3, {rows, s.hidden}, t.device},
              {t.as<char>() + s.hidden, DType::f32, {rows, blocks}, t.device},
              ScaleLayout::row};
  x.data.row_stride = bytes;
  x.scale_inv.row_stride = bytes / 4;
  return x;
}

// ---- the block ---------------------------------------------------------------------------------

void forward(const Place& at, AnyBuffer x, AnyBuffer topk_idx, AnyBuffer probs, AnyBuffer gate_up,
             AnyBuffer down, Out out, Out saved, Out scratch, Numbers sizes) {
  const experts::Sizes s = sizes_of(sizes, at.device);
  const Tensor kept = at(saved);
  experts::forward(s,
                   {.x = tokens(at(x), s),
                    .topk_idx = at(topk_idx),
                    .probs = at(probs),
                    .gate_up = at(gate_up),
                    .down = at(down),
                    .out = at(out),
                    .saved = kept.numel() == 0 ? Tensor{} : kept,
                    .scratch = at(scratch)},
                   at.stream);
}

void backward(const Place& at, AnyBuffer dout, AnyBuffer saved, AnyBuffer, Out dx, Out dprobs,
              Out kept, Out workspace, Out scratch, Numbers sizes) {
  const experts::Sizes s = sizes_of(sizes, at.device);
  experts::backward(s,
                    {.dout = tokens(at(dout), s),
                     .saved = at(saved),
                     .dx = at(dx),
                     .dprobs = at(dprobs),
                     .kept = at(kept),
                     .workspace = at(workspace),
                     .scratch = at(scratch)},
                    at.stream);
}

void weight_gradient(const Place& at, AnyBuffer rows, AnyBuffer saved, AnyBuffer kept, AnyBuffer,
                     Out dw, Out workspace, Out scratch, Numbers sizes, bool of_down) {
  const experts::Sizes s = sizes_of(sizes, at.device);
  experts::weight_gradient(s,
                           {.of_down = of_down,
                            .rows = s.came_in_fp8 ? tokens(at(rows), s) : Fp8Tensor{},
                            .saved = at(saved),
                            .kept = at(kept),
                            .dw = at(dw),
                            .workspace = at(workspace),
                            .scratch = at(scratch)},
                           at.stream);
}

// ---- between devices: of each, `segment` rows for each other
// ---------------------------------------

RoutingPlan travel(const Tensor& buffer, int64_t tokens, int64_t devices) {
  return {buffer, tokens, devices, devices, /*align=*/1, /*capacity=*/devices * tokens};
}

// Tokens, their experts and probs, packed by device.
void pack(const Place& at, AnyBuffer x, AnyBuffer topk_idx, AnyBuffer probs, Out packed, Out plan,
          Out counts, Out scratch, int64_t devices, int64_t num_experts) {
  const Tensor t = at(x);
  const RoutingPlan way = travel(at(plan), t.shape[0], devices);
  dispatch_plan({.topk_idx = at(topk_idx),
                 .num_experts = num_experts,
                 .segment = t.shape[0],
                 .plan = way,
                 .counts = at(counts),
                 .workspace = at(scratch)},
                at.stream);
  quantize_pack({.x = t,
                 .topk_idx = at(topk_idx),
                 .probs = at(probs),
                 .num_experts = num_experts,
                 .plan = way,
                 .packed = at(packed)},
                at.stream);
}

// Gradients, which go where their tokens went.
void pack_gradient(const Place& at, AnyBuffer dout, AnyBuffer plan, Out packed, int64_t devices) {
  const Tensor t = at(dout);
  quantize_pack({.x = t, .plan = travel(at(plan), t.shape[0], devices), .packed = at(packed)},
                at.stream);
}

// What arrived: local experts, and their probs.
void unpack(const Place& at, AnyBuffer packed, Out topk_idx, Out probs, int64_t hidden) {
  const Tensor ids = at(topk_idx);
  fp8moe::unpack({.packed = at(packed),
                  .hidden = hidden,
                  .slots = ids.shape[1],
                  .topk_idx = ids,
                  .probs = at(probs)},
                 at.stream);
}

// The sum of what each device sends back for a token.
void sum(const Place& at, AnyBuffer y, AnyBuffer plan, Out out, int64_t devices) {
  const Tensor t = at(out);
  unpermute_unpad({.y = at(y), .plan = travel(at(plan), t.shape[0], devices), .out = t}, at.stream);
}

template <class F>
ffi::Error guarded(F f) {
  try {
    f();
    return ffi::Error::Success();
  } catch (const std::invalid_argument& error) {
    return ffi::Error::InvalidArgument(error.what());
  } catch (const std::exception& error) {
    return ffi::Error::Internal(error.what());
  }
}

// Null, or what went wrong, until the thread's next call.
template <class F>
const char* message(F f) {
  static thread_local std::string text;
  try {
    f();
    return nullptr;
  } catch (const std::exception& error) {
    text = error.what();
    return text.c_str();
  }
}

}  // namespace

// A function as two handlers. XLA may record the one of CUDA in a graph: it only launches.
#define HANDLERS(function, ...)                                                                 \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(fp8moe_##function##_cpu, ([](auto... arguments) {               \
                                  return guarded([&] { function(Place{}, arguments...); });     \
                                }),                                                             \
                                ffi::Ffi::Bind() __VA_ARGS__);                                  \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(                                                                \
      fp8moe_##function##_cuda, ([](void* stream, int32_t device, auto... arguments) {          \
        return guarded(                                                                         \
            [&] { function(Place{{DeviceType::cuda, device}, {stream}}, arguments...); });      \
      }),                                                                                       \
      ffi::Ffi::Bind().Ctx<ffi::PlatformStream<void*>>().Ctx<ffi::DeviceOrdinal>() __VA_ARGS__, \
      {ffi::Traits::kCmdBufferCompatible})

#define IN .Arg<AnyBuffer>()
#define OUT .Ret<AnyBuffer>()
#define SIZES .Attr<Numbers>("sizes")

HANDLERS(forward, IN IN IN IN IN OUT OUT OUT SIZES);
HANDLERS(backward, IN IN IN OUT OUT OUT OUT OUT SIZES);
HANDLERS(weight_gradient, IN IN IN IN OUT OUT OUT SIZES.Attr<bool>("of_down"));
HANDLERS(pack, IN IN IN OUT OUT OUT OUT.Attr<int64_t>("devices").Attr<int64_t>("num_experts"));
HANDLERS(pack_gradient, IN IN OUT.Attr<int64_t>("devices"));
HANDLERS(unpack, IN OUT OUT.Attr<int64_t>("hidden"));
HANDLERS(sum, IN IN OUT.Attr<int64_t>("devices"));

// What JAX allocates, in bytes: of a block saved, kept, and scratch of forward with and without a
// backward, of backward and of a weight gradient. Returns what is wrong, or null.
extern "C" const char* fp8moe_block_bytes(const int64_t* sizes, int64_t* bytes) {
  return message([&] {
    const experts::Sizes s = sizes_of(Numbers(sizes, 7), device_of(sizes[7]));
    bytes[0] = experts::saved_bytes(s);
    bytes[1] = experts::kept_bytes(s);
    bytes[2] = experts::forward_scratch_bytes(s);
    bytes[3] = experts::forward_scratch_bytes(s, false);
    bytes[4] = experts::backward_scratch_bytes(s);
    bytes[5] = experts::gradient_scratch_bytes(s);
  });
}

// Of `pack`: words of the plan, bytes of a row with S slots and without, bytes of scratch. given:
// T, S, devices, H, and whether on CUDA.
extern "C" const char* fp8moe_travel_sizes(const int64_t* given, int64_t* sizes) {
  return message([&] {
    RoutingPlan plan = travel({}, given[0], given[2]);
    plan.buffer.device = device_of(given[4]);
    sizes[0] = plan.buffer_size();
    sizes[1] = packed_row_bytes(given[3], given[1]);
    sizes[2] = packed_row_bytes(given[3], 0);
    sizes[3] = workspace_bytes(DispatchPlan{.plan = plan});
  });
}
