#include "sim_kernels.h"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <dlfcn.h>

#include <cstring>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "require.h"
#include "sim_accelerator.h"

using namespace fusedcomm;

extern "C" void fake_on_launch(int (*callback)(int64_t function, unsigned num_programs, unsigned num_threads,
                                               unsigned shared_nbytes, void* stream, void** params));

namespace sim {
namespace {

constexpr int64_t kTileNumel = 64;

// ---- elements

int64_t nbytes_of(Wire wire) { return wire == Wire::kBf16 ? 2 : 4; }

float decode(Wire wire, const std::byte* at) {
  uint32_t bits = 0;
  if (wire == Wire::kBf16) {
    uint16_t high;
    std::memcpy(&high, at, 2);
    bits = static_cast<uint32_t>(high) << 16;
  } else {
    std::memcpy(&bits, at, 4);
  }
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

// Returns what a receiver decodes.
float encode(Wire wire, float value, std::byte* at) {
  if (wire != Wire::kBf16) {
    std::memcpy(at, &value, 4);
    return value;
  }
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  const auto high = static_cast<uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
  std::memcpy(at, &high, 2);
  return decode(wire, at);
}

// One section of a message, exact or lossy, and the stream that it holds.
struct Section {
  Wire wire;
  std::byte* at;  // of the message's first part
  int64_t numel;  // of a part
  SliceArgs slices;
};

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

// The accesses of pack (writes_message) or unpack to one section of parts [first, first + num_parts).
void add(const Section& section, void* grads, int64_t first, int64_t num_parts, int64_t stride, bool writes_message,
         std::vector<Access>* accesses) {
  const int64_t begin = first * section.numel, end = (first + num_parts) * section.numel;
  visit_runs(grads, section.slices, begin, end,
             [&](float* at, int64_t, int64_t numel) { accesses->push_back(bytes(at, numel * 4, !writes_message)); });
  for (int64_t part = 0; part < num_parts; ++part) {
    accesses->push_back(bytes(section.at + part * stride, section.numel * nbytes_of(section.wire), writes_message));
  }
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
  const Section exact{Wire::kFp32, static_cast<std::byte*>(args.out.exact), args.part.exact_numel, args.exact};
  const Section lossy{key.wire, static_cast<std::byte*>(args.out.codes), args.part.numel, args.lossy};
  auto* const residual = static_cast<float*>(args.residual);
  Work work;
  for (const Section& section : {exact, lossy}) {
    add(section, args.grads, args.first_part, args.num_parts, args.part.stride, true, &work.accesses);
  }
  if (residual) {
    work.accesses.push_back(bytes(residual + args.first_part * lossy.numel, args.num_parts * lossy.numel * 4, true));
  }
  work.run = [=] {
    for (const Section& section : {exact, lossy}) {
      const bool keeps = section.at == lossy.at && residual;
      for (int64_t part = 0; part < args.num_parts; ++part) {
        const int64_t first = (args.first_part + part) * section.numel;
        const auto store = [&](int64_t element, float gradient) {
          const float value = gradient * args.scale + (keeps ? residual[element] : 0);
          std::byte* const to = section.at + part * args.part.stride + (element - first) * nbytes_of(section.wire);
          const float sent = encode(section.wire, value, to);
          if (keeps) residual[element] = value - sent;
        };
        for (int64_t i = 0; i < section.numel; ++i) store(first + i, 0);  // padding
        visit_runs(args.grads, section.slices, first, first + section.numel,
                   [&](const float* at, int64_t element, int64_t numel) {
                     for (int64_t i = 0; i < numel; ++i) store(element + i, at[i]);
                   });
      }
    }
  };
  return work;
}

Work reduce(const KernelKey& key, const ReduceLaunch& args) {
  struct Pair {
    Wire from, to;
    const std::byte* in;
    std::byte* out;
    int64_t numel;
    bool is_lossy;
  };
  const std::vector<Pair> sections = {{Wire::kFp32, Wire::kFp32, static_cast<std::byte*>(args.in.exact),
                                       static_cast<std::byte*>(args.out.exact), args.part.exact_numel, false},
                                      {key.in_wire, key.wire, static_cast<std::byte*>(args.in.codes),
                                       static_cast<std::byte*>(args.out.codes), args.part.numel, true}};
  auto* const residual = static_cast<float*>(args.residual);
  Work work;
  for (const Pair& section : sections) {
    for (int64_t rank = 0; rank < args.world_size; ++rank) {
      work.accesses.push_back(
          bytes(section.in + rank * args.in_stride, args.num_parts * section.numel * nbytes_of(section.from), false));
    }
    for (int64_t part = 0; part < args.num_parts; ++part) {
      work.accesses.push_back(
          bytes(section.out + part * args.part.stride, section.numel * nbytes_of(section.to), true));
    }
  }
  if (residual) work.accesses.push_back(bytes(residual, args.num_parts * args.part.numel * 4, true));
  work.run = [=] {
    for (const Pair& section : sections) {
      for (int64_t i = 0; i < args.num_parts * section.numel; ++i) {
        float sum = 0;
        for (int64_t rank = 0; rank < args.world_size; ++rank) {
          sum += decode(section.from, section.in + rank * args.in_stride + i * nbytes_of(section.from));
        }
        const bool keeps = section.is_lossy && residual;
        const float value = sum * args.scale + (keeps ? residual[i] : 0);
        std::byte* const to =
            section.out + i / section.numel * args.part.stride + i % section.numel * nbytes_of(section.to);
        const float sent = encode(section.to, value, to);
        if (keeps) residual[i] = value - sent;
      }
    }
  };
  return work;
}

Work unpack(const KernelKey& key, const UnpackLaunch& args) {
  const Section exact{Wire::kFp32, static_cast<std::byte*>(args.in.exact), args.part.exact_numel, args.exact};
  const Section lossy{key.wire, static_cast<std::byte*>(args.in.codes), args.part.numel, args.lossy};
  const int64_t message_nbytes = args.num_parts * args.part.stride;
  Work work;
  for (const Section& section : {exact, lossy}) {
    for (int64_t message = 0; message < args.num_messages; ++message) {
      Section of_message = section;
      of_message.at += message * message_nbytes;
      if (message != 0) of_message.slices = {};
      add(of_message, args.grads, args.first_part, args.num_parts, args.part.stride, false, &work.accesses);
    }
  }
  work.run = [=] {
    for (const Section& section : {exact, lossy}) {
      for (int64_t part = 0; part < args.num_parts; ++part) {
        const int64_t first = (args.first_part + part) * section.numel;
        visit_runs(args.grads, section.slices, first, first + section.numel,
                   [&](float* at, int64_t element, int64_t numel) {
                     for (int64_t i = 0; i < numel; ++i) {
                       const std::byte* from =
                           section.at + part * args.part.stride + (element + i - first) * nbytes_of(section.wire);
                       float sum = 0;
                       for (int64_t message = 0; message < args.num_messages; ++message) {
                         sum += decode(section.wire, from + message * message_nbytes);
                       }
                       at[i] = sum * args.scale;
                     }
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

// All kernels that a configuration with these wires needs, for fp32 gradients. Wires with scales are not supported.
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
    for (const bool feedback : {false, true}) {
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
