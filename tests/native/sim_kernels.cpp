#include "sim_kernels.h"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <dlfcn.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "codec/codec.h"
#include "require.h"
#include "sim_accelerator.h"

using namespace fusedcomm;

extern "C" void fake_on_launch(int (*callback)(int64_t function, unsigned num_programs, unsigned num_threads,
                                               unsigned shared_nbytes, void* stream, void** params));

namespace sim {
namespace {

constexpr int64_t kTileNumel = 64;

// ---- what a launch was made from

// The layout of a message, as if it were all of its bucket.
BucketLayout layout_of(Wire wire, int64_t block_numel, const PartShape& part, int64_t num_parts) {
  BucketLayout layout;
  layout.wire = wire;
  layout.block_numel = block_numel;
  layout.num_parts = num_parts;
  layout.num_chunks = 1;
  layout.part = part_layout(wire, block_numel, part.exact_numel, part.numel);
  layout.part_stride = part.stride;
  return layout;
}

SliceList list_of(void* grads, const SliceArgs& slices) {
  SliceList list;
  const int64_t num_runs = slices.ends - slices.starts;  // CudaTables has the arrays one after another
  for (int64_t i = 0; i < num_runs; ++i) {
    const int64_t begin = slices.starts[i];
    list.append(nullptr, begin - list.numel(), GradDtype::kFloat32);
    list.append(static_cast<float*>(grads) + slices.deltas[i] + begin, slices.ends[i] - begin, GradDtype::kFloat32);
  }
  return list;
}

struct Bucket {
  BucketLayout layout;
  int64_t chunk = 0;
  BucketSlices slices;
};

template <typename Launch>
Bucket bucket_of(const KernelKey& key, const Launch& args) {
  Bucket bucket{layout_of(key.wire, key.block_numel, args.part, args.num_parts),
                args.first_part / std::max(args.num_parts, 1),
                {}};
  bucket.slices.lossy = list_of(args.grads, args.lossy);
  bucket.slices.exact = list_of(args.grads, args.exact);
  bucket.layout.num_chunks = bucket.chunk + 1;
  bucket.layout.lossy_numel = bucket.slices.lossy.numel();
  bucket.layout.exact_numel = bucket.slices.exact.numel();
  return bucket;
}

Residual residual_of(const KernelKey& key, void* data, int64_t numel) {
  return {key.feedback.value_or(ResidualFormat::kFp32), static_cast<std::byte*>(data), data ? numel : 0};
}

// ---- accesses

Access bytes(const void* at, int64_t nbytes, bool writes) { return {at, at ? nbytes : 0, writes}; }

// `num_parts` parts of a message, of which `first` is the first.
void add_parts(const void* first, const BucketLayout& layout, int64_t num_parts, bool writes,
               std::vector<Access>* accesses) {
  for (int64_t part = 0; part < num_parts; ++part) {
    const auto* const at = static_cast<const std::byte*>(first) + part * layout.part_stride;
    accesses->push_back(bytes(at, layout.part.nbytes, writes));
  }
}

// The gradients of a chunk that are in the list.
void add_gradients(const SliceList& list, const Bucket& bucket, int64_t part_numel, bool writes,
                   std::vector<Access>* accesses) {
  const int64_t numel = bucket.layout.num_parts * part_numel, begin = bucket.chunk * numel, end = begin + numel;
  for (size_t i = 0; i < list.slices().size(); ++i) {
    const int64_t from = std::max(begin, list.starts()[i]), to = std::min(end, list.starts()[i + 1]);
    auto* const data = static_cast<float*>(list.slices()[i].data);
    if (data && from < to) accesses->push_back(bytes(data + from - list.starts()[i], (to - from) * 4, writes));
  }
}

void add_gradients(const Bucket& bucket, bool writes, std::vector<Access>* accesses) {
  add_gradients(bucket.slices.lossy, bucket, bucket.layout.part.lossy_numel, writes, accesses);
  add_gradients(bucket.slices.exact, bucket, bucket.layout.part.exact_numel, writes, accesses);
}

// ---- kernels: each returns its accesses and its work, which the CPU's codec does

const Codec& codec() {
  static thread_local const Codec codec("auto", 1);
  return codec;
}

struct Work {
  std::vector<Access> accesses;
  std::function<void()> run;
};

Work pack(const KernelKey& key, const PackLaunch& args) {
  const Bucket bucket = bucket_of(key, args);
  const Residual residual = residual_of(key, args.residual, bucket.layout.padded_numel());
  Work work;
  add_gradients(bucket, false, &work.accesses);
  add_parts(args.out.exact, bucket.layout, args.num_parts, true, &work.accesses);
  for (const SliceArgs& slices : {args.lossy, args.exact}) {
    if (slices.num_slices == 0) continue;
    work.accesses.push_back(bytes(slices.slice_starts, (slices.num_slices + 1) * 8, false));
    work.accesses.push_back(bytes(slices.counts, 8, true));  // of the first parameter: others may be anywhere
  }
  if (residual.data) {
    const int64_t begin = residual_nbytes(residual.format, args.first_part * args.part.numel);
    const int64_t nbytes = residual_nbytes(residual.format, args.num_parts * args.part.numel);
    work.accesses.push_back(bytes(residual.data + begin, nbytes, true));
  }
  work.run = [=] {
    auto* const out = static_cast<std::byte*>(args.out.exact);
    codec().pack({bucket.layout, bucket.chunk, bucket.slices, args.scale, out, residual});
  };
  return work;
}

Work reduce(const KernelKey& key, const ReduceLaunch& args) {
  const PartShape read{args.in_stride, args.num_parts * args.part.numel, args.num_parts * args.part.exact_numel};
  const BucketLayout from = layout_of(key.in_wire, key.block_numel, read, args.world_size);
  const BucketLayout to = layout_of(key.wire, key.block_numel, args.part, args.num_parts);
  const Residual residual = residual_of(key, args.residual, to.padded_numel());
  Work work;
  add_parts(args.in.exact, from, args.world_size, false, &work.accesses);
  add_parts(args.out.exact, to, args.num_parts, true, &work.accesses);
  work.accesses.push_back(bytes(residual.data, residual_nbytes(residual.format, residual.numel), true));
  work.run = [=] {
    const auto* const parts = static_cast<const std::byte*>(args.in.exact);
    auto* const out = static_cast<std::byte*>(args.out.exact);
    codec().reduce({from, parts, args.scale, to, out, args.num_parts, 0, residual});
  };
  return work;
}

Work unpack(const KernelKey& key, const UnpackLaunch& args) {
  const Bucket bucket = bucket_of(key, args);
  Work work;
  add_gradients(bucket, true, &work.accesses);
  add_parts(args.in.exact, bucket.layout, args.num_messages * args.num_parts, false, &work.accesses);
  work.run = [=] {
    const auto* const parts = static_cast<const std::byte*>(args.in.exact);
    codec().unpack({bucket.layout, bucket.chunk, parts, args.scale, bucket.slices, args.num_messages});
  };
  return work;
}

Work scale(const ScaleLaunch& args) {
  Work work;
  work.accesses = {bytes(args.data, args.numel * 4, true), bytes(args.counts, 8, true)};
  work.run = [args] {
    SliceList list;
    list.append(args.data, args.numel, GradDtype::kFloat32);
    codec().scale_in_place(list, args.scale);
  };
  return work;
}

// Reads the values that `params` points to, as cuLaunchKernel does.
template <typename Launch>
Launch launched(void** params) {
  Launch launch;
  std::apply([&params](auto&... param) { (std::memcpy(&param, *params++, sizeof(param)), ...); }, launch.params());
  return launch;
}

int on_launch(int64_t function, unsigned, unsigned, unsigned, void* handle, void** params) {
  const KernelKey& key = *reinterpret_cast<const KernelKey*>(function);
  Work work;
  if (key.kernel == kPackKernel) work = pack(key, launched<PackLaunch>(params));
  if (key.kernel == kReduceKernel) work = reduce(key, launched<ReduceLaunch>(params));
  if (key.kernel == kUnpackKernel) work = unpack(key, launched<UnpackLaunch>(params));
  if (key.kernel == kScaleKernel) work = scale(launched<ScaleLaunch>(params));
  const c10::Stream stream = stream_of(handle);
  const c10::Device current = c10::impl::VirtualGuardImpl(stream.device_type()).getDevice();
  REQUIRE(current == stream.device(), "a kernel for device %d is launched while device %d is current",
          stream.device_index(), current.index());
  launch(stream, key.kernel, work.accesses, std::move(work.run));
  return 0;
}

// The library with the driver's functions.
std::string driver_path() {
  Dl_info info;
  REQUIRE(dladdr(reinterpret_cast<void*>(&driver_path), &info) != 0, "dladdr failed");
  return info.dli_fname;
}

// All kernels that a configuration with these wires needs, for fp32 gradients.
CudaKernels kernels(const std::vector<Wire>& wires) {
  fake_on_launch(&on_launch);
  CudaKernels kernels;
  kernels.tile_numel = kTileNumel;
  const auto add = [&kernels](KernelKey key) {
    const auto* const function = new KernelKey(normalised(key));  // never freed, like a driver's kernels
    kernels.kernels[*function] = {const_cast<KernelKey*>(function), 64, 0, 0};
  };
  add({kScaleKernel});
  for (const Wire wire : wires) {
    for (const std::optional<ResidualFormat> feedback :
         {std::optional<ResidualFormat>(), std::optional(ResidualFormat::kFp32)}) {
      KernelKey key{kPackKernel};
      key.wire = wire;
      key.feedback = feedback;
      add(key);
      key.kernel = kReduceKernel;
      for (const Wire in_wire : wires) {
        key.in_wire = in_wire;
        add(key);
      }
    }
    for (const bool sums : {false, true}) {
      KernelKey key{kUnpackKernel};
      key.wire = wire;
      key.sums = sums;
      add(key);
    }
  }
  return kernels;
}

class SimCudaDevice : public CudaDevice {
 public:
  using CudaDevice::CudaDevice;
  int64_t max_nbytes_on_wire() const override { return 4096; }
};

}  // namespace

std::shared_ptr<CudaDevice> cuda_device(c10::Device device, bool two_levels, bool forced_sync) {
  return std::make_shared<SimCudaDevice>(std::make_shared<CudaDriver>(driver_path()),
                                         kernels({Wire::kFp32, Wire::kBf16}), device, "simulated",
                                         /*num_pack_programs=*/8, two_levels, forced_sync);
}

}  // namespace sim
