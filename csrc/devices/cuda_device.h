// The device for gradients on CUDA: launches the kernels of kernels/ on streams of our own.
#pragma once

#include <ATen/ATen.h>

#include <memory>
#include <string>
#include <vector>

#include "devices/cuda_driver.h"
#include "devices/kernel_launch.h"
#include "devices/stream_device.h"

namespace fusedcomm {

class CudaDevice : public StreamDevice {
 public:
  // num_pack_programs: the most programs that pack has; each takes several tiles, because it looks for elements that
  // are not finite at its end. Other kernels have a program for each tile. `device` may be the CPU, with a driver that
  // runs kernels there. two_levels, forced_sync: see StreamDevice. Throws ValueError if num_pack_programs is below 1.
  CudaDevice(std::shared_ptr<const CudaDriver> driver, const CudaKernels& kernels, c10::Device device, std::string isa,
             int64_t num_pack_programs, bool two_levels, bool forced_sync);

  const std::string& isa() const override { return isa_; }
  std::shared_ptr<std::byte> allocate(int64_t nbytes) override;
  using Device::will_use;
  void will_use(const at::Tensor& tensor, bool by_wire_only) const override;
  void check_caller() const override;
  void enter_watching_thread() const override;
  std::shared_ptr<const BucketTables> prepare(const BucketLayout& layout, const std::vector<SlicePlace>& lossy,
                                              const std::vector<SlicePlace>& exact, int64_t grad_nbytes,
                                              const std::vector<int64_t*>& counts) override;
  bool counts_in_memory() const override { return true; }
  std::vector<int64_t> read_counts(const int64_t* counts, int64_t num) const override;

  int64_t pack(const PackArgs& args) override;
  void reduce(const ReduceArgs& args) override;
  void unpack(const UnpackArgs& args) override;
  int64_t scale_in_place(const BucketSlices& slices, float scale) override;
  void add_heads(const std::byte* heads, int64_t stride, int64_t num_heads, std::byte* sums, int64_t stride_of_sums,
                 int64_t num_sums) override;

  void range_push(const std::string& name) override;
  void range_pop() override;

  // Launches every kernel once over no elements. The driver then loads what it loads lazily before a collective runs,
  // and a kernel that cannot be launched here fails now.
  void warm_up();

 private:
  // The current stream's handle for the driver; null on a CPU.
  void* stream_handle() const;
  const Kernel& kernel_of(const KernelKey& key, const BucketLayout& layout) const;
  template <typename Launch>
  void launch_kernel(const Kernel& kernel, int64_t num_programs, const Launch& args);
  int64_t num_tiles(const BucketLayout& layout, int64_t num_parts) const;

  const std::shared_ptr<const CudaDriver> driver_;
  const CudaKernels kernels_;
  const std::string isa_;
  const int64_t num_pack_programs_;
  const bool profiler_ranges_;
};

}  // namespace fusedcomm
