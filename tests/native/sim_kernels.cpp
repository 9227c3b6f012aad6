#include "sim_kernels.h"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <dlfcn.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "codec/kernel_table.h"
#include "require.h"
#include "sim_accelerator.h"

using namespace fusedcomm;

extern "C" void fake_on_launch(int (*callback)(int64_t function, unsigned num_programs, unsigned num_threads,
                                               unsigned shared_nbytes, void* stream, void** params));

namespace sim {
namespace {

constexpr int64_t kTileNumel = 64;

// ---- elements: the arithmetic is that of the CPU's codec

const KernelTable& table() { return *portable_kernels(); }

Format format_of(Wire wire) {
  return wire == Wire::kBf16 ? Format::kBf16 : wire == Wire::kFp16 ? Format::kFp16 : Format::kFp32;
}

// The residual of one encoder; `at` is null if there is none.
struct Residuals {
  std::byte* at = nullptr;
  Format format = Format::kFp32;
  int64_t unit() const { return format_nbytes(format); }
};

Residuals residuals(const KernelKey& key, void* at) {
  return {static_cast<std::byte*>(at), key.feedback == ResidualFormat::kBf16 ? Format::kBf16 : Format::kFp32};
}

// One section of a message, exact or lossy, and the stream that it holds.
struct Section {
  Wire wire;
  int64_t block_numel;
  std::byte* scales;  // of the message's first part
  std::byte* codes;
  int64_t numel;  // of a part
  SliceArgs slices;

  int64_t num_blocks() const { return has_scales(wire) ? numel / block_numel : 0; }

  // The values of the part that lies `offset` bytes behind the first.
  std::vector<float> decoded(int64_t offset) const {
    std::vector<float> values(static_cast<size_t>(numel));
    if (has_scales(wire)) {
      const BlockKernels& kernels = table().blocks[scaled_index(wire)];
      kernels.dequantize[static_cast<int>(Format::kFp32)](scales + offset, codes + offset, values.data(), num_blocks(),
                                                          block_numel, 1, false);
    } else {
      table().convert[static_cast<int>(format_of(wire))][static_cast<int>(Format::kFp32)](codes + offset, values.data(),
                                                                                          numel, 1, false);
    }
    return values;
  }
  void encode(const std::vector<float>& values, int64_t offset) const {
    if (has_scales(wire)) {
      const BlockKernels& kernels = table().blocks[scaled_index(wire)];
      kernels.quantize[static_cast<int>(Format::kFp32)](values.data(), scales + offset, codes + offset, num_blocks(),
                                                        block_numel, 1, false);
    } else {
      table().convert[static_cast<int>(Format::kFp32)][static_cast<int>(format_of(wire))](values.data(), codes + offset,
                                                                                          numel, 1, false);
    }
  }
};

Section exact(const PartArgs& args, const PartShape& part, const SliceArgs& slices = {}) {
  return {Wire::kFp32, 0, nullptr, static_cast<std::byte*>(args.exact), part.exact_numel, slices};
}

Section lossy(Wire wire, int64_t block_numel, const PartArgs& args, const PartShape& part,
              const SliceArgs& slices = {}) {
  auto* const scales = static_cast<std::byte*>(args.scales);
  return {wire, block_numel, scales, static_cast<std::byte*>(args.codes), part.numel, slices};
}

// Writes values, and what was left out before, into the part that lies `offset` bytes behind the first. first: the
// part's first element in the residual.
void encode(std::vector<float> values, const Section& section, int64_t offset, const Residuals& residual,
            int64_t first) {
  const auto numel = static_cast<int64_t>(values.size());
  const auto format = static_cast<int>(residual.format);
  std::byte* const kept = residual.at ? residual.at + first * residual.unit() : nullptr;
  if (kept) table().add[format](values.data(), kept, numel);
  section.encode(values, offset);
  if (kept) table().subtract[format](values.data(), section.decoded(offset).data(), kept, numel);
}

// The sums of a part of `count` messages, times a factor. stride: from one message to the next.
std::vector<float> summed(const Section& section, int64_t offset, int64_t count, int64_t stride, float factor) {
  std::vector<float> sums = section.decoded(offset);
  for (int64_t i = 1; i < count; ++i) {
    const std::vector<float> next = section.decoded(offset + i * stride);
    std::transform(sums.begin(), sums.end(), next.begin(), sums.begin(), std::plus<>());
  }
  for (float& sum : sums) sum *= factor;
  return sums;
}

// Calls visit(address of gradients, element of the stream, numel) for the runs of elements [begin, end) that exist.
void visit_runs(void* grads, const SliceArgs& slices, int64_t begin, int64_t end,
                const std::function<void(float*, int64_t, int64_t)>& visit) {
  const int64_t num_runs = slices.ends - slices.starts;  // CudaTables has the arrays one after another
  for (int64_t i = 0; i < num_runs; ++i) {
    const int64_t from = std::max(begin, slices.starts[i]), to = std::min(end, slices.ends[i]);
    if (from >= to) continue;
    visit(static_cast<float*>(grads) + slices.deltas[i] + from, from, to - from);
  }
}

// ---- accesses

Access bytes(const void* at, int64_t nbytes, bool writes) { return {at, at ? nbytes : 0, writes}; }

void add_part(const Section& section, int64_t offset, bool writes, std::vector<Access>* accesses) {
  if (section.scales) {
    accesses->push_back(bytes(section.scales + offset, scales_nbytes(section.wire, section.num_blocks()), writes));
  }
  accesses->push_back(bytes(section.codes + offset, codes_nbytes(section.wire, section.numel), writes));
}

// The accesses of pack (writes_message) or unpack to one section of parts [first, first + num_parts).
void add(const Section& section, void* grads, int64_t first, int64_t num_parts, int64_t stride, bool writes_message,
         std::vector<Access>* accesses) {
  const int64_t begin = first * section.numel, end = (first + num_parts) * section.numel;
  visit_runs(grads, section.slices, begin, end,
             [&](float* at, int64_t, int64_t numel) { accesses->push_back(bytes(at, numel * 4, !writes_message)); });
  for (int64_t part = 0; part < num_parts; ++part) add_part(section, part * stride, writes_message, accesses);
  if (section.slices.num_slices == 0) return;
  accesses->push_back(bytes(section.slices.slice_starts, (section.slices.num_slices + 1) * 8, false));
  // Of the first parameter's count alone: others may be anywhere.
  if (writes_message) accesses->push_back(bytes(section.slices.counts, 8, true));
}

// ---- kernels: each returns its accesses and its work

struct Work {
  std::vector<Access> accesses;
  std::function<void()> run;
};

Work pack(const KernelKey& key, const PackLaunch& args) {
  const Residuals residual = residuals(key, args.residual);
  const std::vector<Section> sections = {exact(args.out, args.part, args.exact),
                                         lossy(key.wire, key.block_numel, args.out, args.part, args.lossy)};
  Work work;
  for (const Section& section : sections) {
    add(section, args.grads, args.first_part, args.num_parts, args.part.stride, true, &work.accesses);
  }
  if (residual.at) {
    work.accesses.push_back(bytes(residual.at + args.first_part * args.part.numel * residual.unit(),
                                  args.num_parts * args.part.numel * residual.unit(), true));
  }
  work.run = [=] {
    for (const Section& section : sections) {
      for (int64_t part = 0; part < args.num_parts; ++part) {
        const int64_t first = (args.first_part + part) * section.numel;
        std::vector<float> values(static_cast<size_t>(section.numel));  // with zeros as padding
        visit_runs(args.grads, section.slices, first, first + section.numel,
                   [&](const float* at, int64_t element, int64_t numel) {
                     for (int64_t i = 0; i < numel; ++i) values[element + i - first] = at[i] * args.scale;
                   });
        encode(std::move(values), section, part * args.part.stride,
               &section == &sections.back() ? residual : Residuals{}, first);
      }
    }
  };
  return work;
}

Work reduce(const KernelKey& key, const ReduceLaunch& args) {
  const Residuals residual = residuals(key, args.residual);
  struct Pair {
    Section in, out;  // in: of all parts, from one rank
  };
  std::vector<Pair> sections = {
      {exact(args.in, args.part), exact(args.out, args.part)},
      {lossy(key.in_wire, key.block_numel, args.in, args.part), lossy(key.wire, key.block_numel, args.out, args.part)}};
  Work work;
  for (auto& [in, out] : sections) {
    in.numel *= args.num_parts;
    for (int64_t rank = 0; rank < args.world_size; ++rank) {
      add_part(in, rank * args.in_stride, false, &work.accesses);
    }
    for (int64_t part = 0; part < args.num_parts; ++part) {
      add_part(out, part * args.part.stride, true, &work.accesses);
    }
  }
  if (residual.at) {
    work.accesses.push_back(bytes(residual.at, args.num_parts * args.part.numel * residual.unit(), true));
  }
  work.run = [=] {
    for (const auto& [in, out] : sections) {
      const std::vector<float> sums = summed(in, 0, args.world_size, args.in_stride, args.scale);
      for (int64_t part = 0; part < args.num_parts; ++part) {
        const auto first = sums.begin() + part * out.numel;
        encode({first, first + out.numel}, out, part * args.part.stride,
               &out == &sections.back().out ? residual : Residuals{}, part * out.numel);
      }
    }
  };
  return work;
}

Work unpack(const KernelKey& key, const UnpackLaunch& args) {
  const int64_t message_nbytes = args.num_parts * args.part.stride;
  const std::vector<Section> sections = {exact(args.in, args.part, args.exact),
                                         lossy(key.wire, key.block_numel, args.in, args.part, args.lossy)};
  Work work;
  for (const Section& section : sections) {
    add(section, args.grads, args.first_part, args.num_parts, args.part.stride, false, &work.accesses);
    for (int64_t part = args.num_parts; part < args.num_messages * args.num_parts; ++part) {
      add_part(section, part * args.part.stride, false, &work.accesses);
    }
  }
  work.run = [=] {
    for (const Section& section : sections) {
      for (int64_t part = 0; part < args.num_parts; ++part) {
        const int64_t first = (args.first_part + part) * section.numel;
        const std::vector<float> sums =
            summed(section, part * args.part.stride, args.num_messages, message_nbytes, args.scale);
        visit_runs(args.grads, section.slices, first, first + section.numel,
                   [&](float* at, int64_t element, int64_t numel) {
                     std::copy_n(sums.begin() + (element - first), numel, at);
                   });
      }
    }
  };
  return work;
}

Work scale(const ScaleLaunch& args) {
  Work work;
  work.accesses = {bytes(args.data, args.numel * 4, true), bytes(args.counts, 8, true)};
  work.run = [args] {
    for (int64_t i = 0; i < args.numel; ++i) static_cast<float*>(args.data)[i] *= args.scale;
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

// For fp32 gradients.
CudaKernels all_kernels() {
  fake_on_launch(&on_launch);
  const auto wires = {Wire::kFp32, Wire::kBf16, Wire::kFp16, Wire::kInt8, Wire::kFp8, Wire::kInt4};
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
  return std::make_shared<SimCudaDevice>(std::make_shared<CudaDriver>(driver_path()), all_kernels(), device,
                                         "simulated",
                                         /*num_pack_programs=*/8, two_levels, forced_sync);
}

}  // namespace sim
