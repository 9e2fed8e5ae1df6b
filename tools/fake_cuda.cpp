// What PyTorch's core asks of CUDA while tensors are fake: no memory, no kernels. See fake_cuda.py.
#include <ATen/SDPBackend.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/transformers/attention.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {
using c10::Device, c10::DeviceIndex, c10::Stream;

constexpr DeviceIndex kGpus = 8;
thread_local DeviceIndex current = 0;  // autograd has one thread per GPU

DeviceIndex exchange(DeviceIndex index) { return std::exchange(current, index); }

// The present device, and streams on which everything is complete at once.
struct Guard final : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  Device getDevice() const override { return {c10::DeviceType::CUDA, current}; }
  Device exchangeDevice(Device d) const override { return {d.type(), exchange(d.index())}; }
  void setDevice(Device d) const override { current = d.index(); }
  void uncheckedSetDevice(Device d) const noexcept override { current = d.index(); }
  DeviceIndex deviceCount() const noexcept override { return kGpus; }
  Stream getStream(Device d) const noexcept override { return Stream(Stream::DEFAULT, d); }
  Stream exchangeStream(Stream stream) const noexcept override { return stream; }
  void record(void**, const Stream&, DeviceIndex, c10::EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
};
c10::impl::DeviceGuardImplRegistrar registered(c10::DeviceType::CUDA, new Guard);

struct Hooks final : at::CUDAHooksInterface {
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  int getNumGPUs() const override { return kGpus; }
  DeviceIndex deviceCount() const override { return kGpus; }
  DeviceIndex current_device() const override { return current; }
  DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(DeviceIndex index) const override { current = index; }
  DeviceIndex exchangeDevice(DeviceIndex index) const override { return exchange(index); }
  DeviceIndex maybeExchangeDevice(DeviceIndex index) const override { return exchange(index); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
};
// in the place of PyTorch's own object, which exists since `import torch` and has no members
auto* hooks = new (const_cast<at::CUDAHooksInterface*>(&at::detail::getCUDAHooks())) Hooks;

// The kernel of scaled_dot_product_attention, as for a causal mask. (cuDNN's, which PyTorch prefers
// for 16 bits on an H100, saves what flash attention saves.)
int64_t choose_attention(const at::Tensor& q, const at::Tensor&, const at::Tensor&,
                         const std::optional<at::Tensor>& mask, double, bool,
                         std::optional<double>, bool) {
  bool half = q.scalar_type() == at::kBFloat16 || q.scalar_type() == at::kHalf;
  bool aligned = (half || q.scalar_type() == at::kFloat) && q.size(-1) % (half ? 8 : 4) == 0;
  if (half && !mask && q.size(-1) <= 256) return int64_t(at::SDPBackend::flash_attention);
  return int64_t(aligned ? at::SDPBackend::efficient_attention : at::SDPBackend::math);
}
at::native::RegisterCUDADispatch<at::native::_fused_sdp_choice_stub_DECLARE_DISPATCH_type>
    chosen(at::native::_fused_sdp_choice_stub, choose_attention);
}  // namespace
