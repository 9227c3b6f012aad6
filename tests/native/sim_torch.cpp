// torch's tensors on the simulated accelerator: its memory, its copies, and all other operators, which run on the CPU.
#include <ATen/ATen.h>
#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "require.h"
#include "sim_accelerator.h"

namespace {

constexpr auto kSim = c10::DeviceType::PrivateUse1;

c10::Device current_device() { return c10::impl::VirtualGuardImpl(kSim).getDevice(); }

class Allocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t nbytes) override {
    const c10::Device device = current_device();
    std::byte* const data = sim::allocate(sim::current_stream(device.index()), std::max<int64_t>(1, nbytes));
    return {data, data, &free, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free; }
  void copy_data(void*, const void*, size_t) const override { REQUIRE(false, "not needed"); }

 private:
  static void free(void* data) { sim::give_back(data); }
};
Allocator allocator;
REGISTER_ALLOCATOR(kSim, &allocator);

// Whether this thread runs an operator on the CPU in place of a kernel. It then waits where a GPU would not, so these
// waits must not count as the program's.
thread_local bool t_in_fallback = false;

// The bytes from a tensor's first element to the end of its last one.
int64_t extent(const at::Tensor& tensor) {
  int64_t last = 0;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) last += (tensor.size(dim) - 1) * tensor.stride(dim);
  return tensor.numel() == 0 ? 0 : (last + 1) * static_cast<int64_t>(tensor.element_size());
}

sim::Access access(const at::Tensor& tensor, bool writes) { return {tensor.data_ptr(), extent(tensor), writes}; }

// The same memory as a tensor on the CPU, which does not own it.
at::Tensor on_cpu(const at::Tensor& tensor) {
  if (tensor.is_cpu()) return tensor;
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU));
}

// Pinned memory: the addresses that somebody has.
class PinnedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t nbytes) override {
    auto* const data = new std::byte[std::max<size_t>(1, nbytes)];
    const std::lock_guard<std::mutex> lock(mutex());
    blocks().insert(data);
    return {data, data, &free, c10::DeviceType::CPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free; }
  void copy_data(void*, const void*, size_t) const override { REQUIRE(false, "not needed"); }
  static bool has(const at::Tensor& tensor) {
    const std::lock_guard<std::mutex> lock(mutex());
    return blocks().count(static_cast<std::byte*>(tensor.storage().mutable_data())) != 0;
  }

 private:
  static void free(void* data) {
    const std::lock_guard<std::mutex> lock(mutex());
    blocks().erase(static_cast<std::byte*>(data));
    delete[] static_cast<std::byte*>(data);
  }
  static std::mutex& mutex() {
    static std::mutex mutex;
    return mutex;
  }
  static std::set<std::byte*>& blocks() {
    static std::set<std::byte*> blocks;
    return blocks;
  }
};

PinnedAllocator pinned;

// Makes the simulated accelerator torch's, as streams and backward passes in Python need.
struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned; }
  // FSDP2's all-gathered parameters have memory only while they are used.
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    REQUIRE(nbytes == 0 || storage.nbytes() == 0, "a storage of %zu bytes gets %zu", storage.nbytes(), nbytes);
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(storage.allocator()->allocate(nbytes));
    storage.unsafeGetStorageImpl()->set_nbytes(nbytes);
  }
};

// Like CUDA's copies: on the current stream, and the host waits unless both tensors are on the device, or the CPU's is
// pinned and the copy need not block.
at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  const c10::Device device = from.is_cpu() ? to.device() : from.device();
  const c10::Stream stream = sim::current_stream(device.index());
  std::vector<sim::Access> accesses;
  if (!from.is_cpu()) accesses.push_back(access(from, false));
  if (!to.is_cpu()) accesses.push_back(access(to, true));
  const at::Tensor source = from.is_cpu() ? from.clone() : on_cpu(from);
  // What is read too early is not the result.
  if (to.is_cpu() && non_blocking && PinnedAllocator::has(to)) std::memset(to.mutable_data_ptr(), 0x7F, extent(to));
  if (from.is_cpu() && from.dtype() == to.dtype() && source.is_contiguous() && to.is_contiguous())
    sim::note_copy(to.const_data_ptr(), source.const_data_ptr(), extent(source), device);
  sim::launch(stream, "copy", accesses, [source, destination = on_cpu(to)] {
    const at::NoGradGuard no_grad;
    destination.copy_(source);
  });
  const at::Tensor& on_host = to.is_cpu() ? to : from;
  if (on_host.is_cpu() && !(non_blocking && PinnedAllocator::has(on_host)))
    sim::synchronize(stream, /*counts=*/!t_in_fallback);
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (from.sizes() != to.sizes()) {
    const at::Tensor resized = at::empty(from.sizes(), to.options());
    to.unsafeGetTensorImpl()->set_storage_keep_dtype(resized.storage());
    to.unsafeGetTensorImpl()->set_sizes_and_strides(resized.sizes(), resized.strides());
  }
  return copy_from(from, to, false);
}

at::Scalar local_scalar_dense(const at::Tensor& tensor) {
  const at::Tensor value = at::empty({}, tensor.options().device(at::kCPU));
  return copy_from(tensor.reshape({}), value, false).item();
}

at::Tensor empty(at::IntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(device.value_or(current_device()));
  return at::detail::empty_generic(sizes, &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   dtype.value_or(at::kFloat), format);
}

at::Tensor empty_strided(at::IntArrayRef sizes, at::IntArrayRef strides, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  const c10::DeviceGuard guard(device.value_or(current_device()));
  return at::detail::empty_strided_generic(
      sizes, strides, &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), dtype.value_or(at::kFloat));
}

void on_the_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const bool before = std::exchange(t_in_fallback, true);
  at::native::cpu_fallback(op, stack);
  t_in_fallback = before;
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_the_cpu>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_local_scalar_dense", &local_scalar_dense);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("view", [](const at::Tensor& self, at::IntArrayRef sizes) { return at::native::view(self, sizes); });
  m.impl("record_stream", [](at::Tensor& self, c10::Stream stream) { sim::record_use(self.data_ptr(), stream); });
}

}  // namespace

void sim::become_torchs_accelerator() {
  static Hooks hooks;
  at::RegisterPrivateUse1HooksInterface(&hooks);
  c10::register_privateuse1_backend("sim");
}
