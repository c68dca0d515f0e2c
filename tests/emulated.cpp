// Tells a CPU build of torch that there is one CUDA device with one stream, and nothing to wait for.
// Autograd asks for both. To be preloaded: torch looks for a device when it is imported.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

using namespace c10;

struct OneStream : impl::NoOpDeviceGuardImpl<DeviceType::CUDA> {
  Stream getStream(Device) const noexcept override {
    return Stream(Stream::DEFAULT, Device(DeviceType::CUDA, 0));
  }
};
C10_REGISTER_GUARD_IMPL(CUDA, OneStream)

namespace at {
struct CUDAHooks : CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
};
REGISTER_CUDA_HOOKS(CUDAHooks)
} // namespace at
