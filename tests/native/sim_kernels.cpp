#include "sim_kernels.h"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <functional>
#include <string>
#include <utility>

#include "codec/stages.h"
#include "require.h"
#include "sim_accelerator.h"

using namespace fusedcomm;

extern "C" void fake_on_launch(int (*callback)(int64_t function, unsigned num_programs, unsigned num_threads,
                                               unsigned shared_nbytes, void* stream, void** params));

namespace sim {
namespace {

constexpr int64_t kTileNumel = 64;

// ---- what a launch tells of a bucket

// The layout of a message whose first part has these sections. `first_part` is that part's number in the bucket. The
// bucket is taken to end with the message: what comes behind is for other launches.
BucketLayout layout_of(Wire wire, int64_t block_numel, const PartArgs& sections, const PartShape& shape,
                       int64_t num_parts, int64_t first_part = 0) {
  BucketLayout layout;
  layout.wire = wire;
  layout.block_numel = block_numel;
  layout.num_parts = num_parts;
  layout.lossy_numel = (first_part + num_parts) * shape.numel;
  layout.exact_numel = (first_part + num_parts) * shape.exact_numel;
  layout.part = part_layout(wire, block_numel, shape.exact_numel, shape.numel);
  layout.part_stride = shape.stride;
  const auto* const part = static_cast<std::byte*>(sections.exact);
  REQUIRE(sections.scales == part + layout.part.scale_offset && sections.codes == part + layout.part.code_offset,
          "a part of %s does not have its sections where the layout has them", wire_name(wire).c_str());
  return layout;
}

int64_t num_runs(const SliceArgs& slices) { return slices.ends - slices.starts; }  // CudaTables has them in a row

// The elements of a slice list as the codec walks them, at least `numel`. Call it when the stream has come to the
// launch: it writes the tables before.
SliceList list_of(const SliceArgs& slices, void* grads, GradDtype dtype, int64_t numel) {
  SliceList list;
  for (int64_t i = 0; i < num_runs(slices); ++i) {
    list.append(nullptr, slices.starts[i] - list.numel(), dtype);
    list.append(static_cast<std::byte*>(grads) + (slices.starts[i] + slices.deltas[i]) * grad_nbytes(dtype),
                slices.ends[i] - slices.starts[i], dtype);
  }
  list.append(nullptr, std::max<int64_t>(0, numel - list.numel()), dtype);
  return list;
}

// launch: PackLaunch or UnpackLaunch.
template <class Launch>
BucketSlices slices_of(const Launch& launch, GradDtype dtype, const BucketLayout& layout) {
  return {list_of(launch.lossy, launch.grads, dtype, layout.lossy_numel),
          list_of(launch.exact, launch.grads, dtype, layout.exact_numel), launch.grads, nullptr};
}

template <class Launch>
int64_t chunk_of(const Launch& launch) {
  return launch.num_parts == 0 ? 0 : launch.first_part / launch.num_parts;
}

// ---- accesses

Access bytes(const void* at, int64_t nbytes, bool writes) { return {at, at ? nbytes : 0, writes}; }

void add_parts(const BucketLayout& layout, const void* message, bool writes, std::vector<Access>* accesses) {
  const PartLayout& part = layout.part;
  const int64_t num_blocks = ceil_div(part.lossy_numel, layout.block_numel);
  for (int64_t i = 0; i < layout.num_parts; ++i) {
    const auto* const at = static_cast<const std::byte*>(message) + i * layout.part_stride;
    accesses->push_back(bytes(at, part.exact_numel * 4, writes));
    accesses->push_back(bytes(at + part.scale_offset, scales_nbytes(layout.wire, num_blocks), writes));
    accesses->push_back(bytes(at + part.code_offset, codes_nbytes(layout.wire, part.lossy_numel), writes));
  }
}

// A table as the host may read it at a launch. The stream may not have written it yet.
const int64_t* on_host(const int64_t* table) {
  const auto device = c10::impl::VirtualGuardImpl(c10::DeviceType::PrivateUse1).getDevice();
  return static_cast<const int64_t*>(enqueued(table, device));
}

// The tables of runs and the gradients of a chunk, which pack reads and unpack writes.
template <class Launch>
void add_gradients(const Launch& launch, GradDtype dtype, bool writes, std::vector<Access>* accesses) {
  for (const auto& [slices, numel] :
       {std::pair(launch.exact, launch.part.exact_numel), std::pair(launch.lossy, launch.part.numel)}) {
    const int64_t begin = launch.first_part * numel, end = begin + launch.num_parts * numel;
    // From `starts` to the end of `deltas`: see num_runs().
    accesses->push_back(bytes(slices.starts, (slices.deltas + num_runs(slices) - slices.starts) * 8, false));
    const int64_t *const starts = on_host(slices.starts), *const ends = on_host(slices.ends),
                         *const deltas = on_host(slices.deltas);
    for (int64_t i = 0; i < num_runs(slices); ++i) {
      const int64_t from = std::max(begin, starts[i]), to = std::min(end, ends[i]);
      if (from >= to) continue;
      accesses->push_back(bytes(static_cast<std::byte*>(launch.grads) + (from + deltas[i]) * grad_nbytes(dtype),
                                (to - from) * grad_nbytes(dtype), writes));
    }
  }
}

// What count_nonfinite() reads beside the elements, and writes. slices: a list of PackLaunch, or ScaleLaunch.
template <class Slices>
void add_counts(const Slices& slices, int64_t begin, int64_t end, std::vector<Access>* accesses) {
  if (slices.num_slices == 0) return;
  accesses->push_back(bytes(slices.slice_starts, (slices.num_slices + 1) * 8, false));
  accesses->push_back(bytes(slices.slots, slices.num_slices * 8, false));
  const int64_t *const starts = on_host(slices.slice_starts), *const slots = on_host(slices.slots);
  for (int32_t i = 0; i < slices.num_slices; ++i) {
    if (std::max(begin, starts[i]) < std::min(end, starts[i + 1]))
      accesses->push_back(bytes(slices.counts + slots[i], 8, true));
  }
}

// ---- kernels: each returns its accesses and its work, which the CPU's codec does

struct Work {
  std::vector<Access> accesses;
  std::function<void()> run;
};

const KernelTable& codec() { return *portable_kernels(); }

void for_each_unit(const BucketLayout& layout, const std::function<void(const Unit&)>& visit) {
  const Units units(layout.part, layout.num_parts);
  for (int64_t i = 0; i < units.count(); ++i) visit(units[i]);
}

// Adds how many elements of each slice are not finite after scaling, of elements [begin, end) of the list.
void count_nonfinite(const SliceArgs& slices, const SliceList& list, int64_t begin, int64_t end, float scale) {
  const ConvertFn convert = codec().convert[index_of(format_of(list.dtype()))][index_of(Format::kFp32)];
  std::vector<float> scaled;
  for (int32_t i = 0; i < slices.num_slices; ++i) {
    const Range range{std::max(begin, slices.slice_starts[i]), std::min(end, slices.slice_starts[i + 1])};
    if (range.begin >= range.end) continue;
    for (Cursor cursor(list, range); cursor.remaining() > 0;) {
      const int64_t numel = cursor.run_numel();
      scaled.resize(static_cast<size_t>(numel));
      if (cursor.data() != nullptr) {
        std::atomic_ref(slices.counts[slices.slots[i]]) += convert(cursor.data(), scaled.data(), numel, scale, false);
      }
      cursor.advance(numel);
    }
  }
}

Work pack(const KernelKey& key, const PackLaunch& args) {
  const BucketLayout layout =
      layout_of(key.wire, key.block_numel, args.out, args.part, args.num_parts, args.first_part);
  auto* const residual = static_cast<float*>(args.residual);
  Work work;
  add_gradients(args, key.grad_dtype, /*writes=*/false, &work.accesses);
  add_parts(layout, args.out.exact, /*writes=*/true, &work.accesses);
  for (const auto& [slices, numel] :
       {std::pair(args.exact, args.part.exact_numel), std::pair(args.lossy, args.part.numel)}) {
    add_counts(slices, args.first_part * numel, (args.first_part + args.num_parts) * numel, &work.accesses);
  }
  if (residual) {
    work.accesses.push_back(
        bytes(residual + args.first_part * args.part.numel, args.num_parts * args.part.numel * 4, true));
  }
  work.run = [=, dtype = key.grad_dtype] {
    const BucketSlices slices = slices_of(args, dtype, layout);
    const PackArgs stage{layout,
                         chunk_of(args),
                         slices,
                         args.scale,
                         static_cast<std::byte*>(args.out.exact),
                         {residual, layout.lossy_numel}};
    const auto count = [&](const SliceArgs& list, const SliceList& elements, int64_t numel) {
      count_nonfinite(list, elements, args.first_part * numel, (args.first_part + args.num_parts) * numel, args.scale);
    };
    count(args.lossy, slices.lossy, args.part.numel);
    count(args.exact, slices.exact, args.part.exact_numel);
    for_each_unit(layout, [&](const Unit& unit) { pack_unit(codec(), stage, unit, /*streamed=*/false); });
  };
  return work;
}

Work reduce(const KernelKey& key, const ReduceLaunch& args) {
  const PartShape of_rank{args.in_stride, args.num_parts * args.part.numel, args.num_parts * args.part.exact_numel};
  const BucketLayout from = layout_of(key.in_wire, key.block_numel, args.in, of_rank, args.world_size);
  const BucketLayout to = layout_of(key.wire, key.block_numel, args.out, args.part, args.num_parts);
  const Residual residual{static_cast<float*>(args.residual), to.lossy_numel};
  Work work;
  add_parts(from, args.in.exact, /*writes=*/false, &work.accesses);
  add_parts(to, args.out.exact, /*writes=*/true, &work.accesses);
  if (residual.data) work.accesses.push_back(bytes(residual.data, residual.numel * 4, true));
  work.run = [=] {
    const ReduceArgs stage{from,
                           static_cast<const std::byte*>(args.in.exact),
                           args.scale,
                           to,
                           static_cast<std::byte*>(args.out.exact),
                           args.num_parts,
                           /*chunk=*/0,
                           residual};
    for_each_unit(to, [&](const Unit& unit) { reduce_unit(codec(), stage, unit); });
  };
  return work;
}

Work unpack(const KernelKey& key, const UnpackLaunch& args) {
  const BucketLayout layout = layout_of(key.wire, key.block_numel, args.in, args.part, args.num_parts, args.first_part);
  BucketLayout messages = layout;  // one after another, as parts
  messages.num_parts *= args.num_messages;
  Work work;
  add_gradients(args, key.grad_dtype, /*writes=*/true, &work.accesses);
  add_parts(messages, args.in.exact, /*writes=*/false, &work.accesses);
  work.run = [=, dtype = key.grad_dtype] {
    const BucketSlices slices = slices_of(args, dtype, layout);
    const UnpackArgs stage{layout,     chunk_of(args), static_cast<const std::byte*>(args.in.exact),
                           args.scale, slices,         args.num_messages};
    for_each_unit(layout, [&](const Unit& unit) { unpack_unit(codec(), stage, unit, /*streamed=*/false); });
  };
  return work;
}

Work scale(const ScaleLaunch& args) {
  Work work;
  work.accesses = {bytes(args.data, args.numel * 4, true)};
  add_counts(args, 0, args.numel, &work.accesses);
  work.run = [args] {
    SliceArgs slices;
    slices.slice_starts = args.slice_starts;
    slices.counts = args.counts;
    slices.slots = args.slots;
    slices.num_slices = args.num_slices;
    SliceList list;
    list.append(args.data, args.numel, GradDtype::kFloat32);
    count_nonfinite(slices, list, 0, args.numel, args.scale);
    codec().scale(static_cast<float*>(args.data), args.numel, args.scale);
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
  const c10::Stream stream = stream_of(handle);
  const c10::Device current = c10::impl::VirtualGuardImpl(stream.device_type()).getDevice();
  REQUIRE(current == stream.device(), "a kernel for device %d is launched while device %d is current",
          stream.device_index(), current.index());
  Work work;
  if (key.kernel == kPackKernel) work = pack(key, launched<PackLaunch>(params));
  if (key.kernel == kReduceKernel) work = reduce(key, launched<ReduceLaunch>(params));
  if (key.kernel == kUnpackKernel) work = unpack(key, launched<UnpackLaunch>(params));
  if (key.kernel == kScaleKernel) work = scale(launched<ScaleLaunch>(params));
  launch(stream, key.kernel, work.accesses, std::move(work.run));
  return 0;
}

// The library with the driver's functions.
std::string driver_path() {
  Dl_info info;
  REQUIRE(dladdr(reinterpret_cast<void*>(&driver_path), &info) != 0, "dladdr failed");
  return info.dli_fname;
}

CudaKernels kernels(const std::vector<KernelKey>& keys) {
  fake_on_launch(&on_launch);
  CudaKernels kernels;
  kernels.tile_numel = kTileNumel;
  for (const KernelKey& key : keys) {
    const auto* const function = new KernelKey(normalised(key));  // never freed, like a driver's kernels
    kernels.kernels[*function] = {const_cast<KernelKey*>(function), 64, 0, 0};
  }
  return kernels;
}

class SimCudaDevice : public CudaDevice {
 public:
  using CudaDevice::CudaDevice;
  int64_t max_nbytes_on_wire() const override { return 4096; }
};

}  // namespace

std::vector<KernelKey> keys_of(const std::vector<Wire>& wires) {
  std::vector<KernelKey> keys = {{kScaleKernel}};
  const auto add = [&keys](const char* kernel, Wire wire, Wire in_wire, bool feedback, bool sums) {
    keys.push_back({kernel, wire, default_block_numel(wire), GradDtype::kFloat32, in_wire, feedback, sums});
  };
  for (const Wire wire : wires) {
    for (const bool which : {false, true}) {
      add(kPackKernel, wire, wire, /*feedback=*/which, false);
      for (const Wire in_wire : wires) add(kReduceKernel, wire, in_wire, /*feedback=*/which, false);
      add(kUnpackKernel, wire, wire, false, /*sums=*/which);
    }
  }
  return keys;
}

std::shared_ptr<CudaDevice> cuda_device(c10::Device device, bool two_levels, bool forced_sync,
                                        const std::vector<KernelKey>& keys) {
  return std::make_shared<SimCudaDevice>(std::make_shared<CudaDriver>(driver_path()), kernels(keys), device,
                                         "simulated", /*num_pack_programs=*/8, two_levels, forced_sync);
}

}  // namespace sim
