// A CUDA device that computes nothing: as much of one as PyTorch's build for CPUs needs to run fake tensors on it.
//
// A fake tensor knows its device, dtype and shape and has no numbers, so there is nothing to compute. What is left to do
// is to answer: how many devices are there, which one is current, which stream? This file answers. Autograd asks too,
// once in each of its threads, of which it has one for every device.
//
// fake_cuda.py builds the library and loads it before torch, which looks for such answers only once.

#include <ATen/ATen.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/transformers/attention.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

constexpr auto kCUDA = c10::DeviceType::CUDA;
constexpr c10::DeviceIndex kDevices = 8;
thread_local c10::DeviceIndex current = 0;  // as in CUDA, each thread has its own

struct FakeGuard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kCUDA; }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
  c10::Device getDevice() const override { return {kCUDA, current}; }
  void setDevice(c10::Device device) const override { current = device.index(); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { current = device.index(); }
  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device before = getDevice();
    setDevice(device);
    return before;
  }

  // One stream for each device. The side streams of a stage file exist in Python only, where race.py watches them.
  c10::Stream getStream(c10::Device device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream getDefaultStream(c10::Device device) const override { return getStream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }

  // Autograd records events where a gradient goes from one stream to another. All is done at once here.
  void record(void** event, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {
    static char any;
    *event = &any;
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
};

C10_REGISTER_GUARD_IMPL(CUDA, FakeGuard)

}  // namespace

namespace at {

// PyTorch looks for a class of this name.
struct CUDAHooks final : CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
};

REGISTER_CUDA_HOOKS(CUDAHooks)

}  // namespace at

namespace at::native {

// Attention has a fused kernel of its own: FlashAttention for 16 bits, another for fp32. Without an answer here PyTorch
// would take it apart into matrix products, and the meter would count scores that a GPU never keeps.
int64_t choose_attention(
    const Tensor& query, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool, std::optional<double>,
    bool) {
  constexpr int64_t flash = 1, efficient = 2;  // of sdp::SDPBackend
  return query.scalar_type() == kFloat ? efficient : flash;
}

static RegisterCUDADispatch<decltype(_fused_sdp_choice_stub)> attention(_fused_sdp_choice_stub, choose_attention);

}  // namespace at::native

extern "C" void set_fake_device(int index) { current = static_cast<c10::DeviceIndex>(index); }
