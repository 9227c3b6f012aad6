// The typed parameters of the device kernels. Each struct with a kName is one kernel of kernels/, and its params()
// lists the parameters in the kernel's order. attach() compares their types with the compiled kernel's.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "devices/cuda_driver.h"
#include "devices/kernel_key.h"

namespace fusedcomm {

// The most pointers that Triton appends to a kernel's parameters for scratch memory. These kernels use none, so the
// pointers are null.
inline constexpr int kMaxScratchPointers = 2;

// A compiled and loaded kernel.
struct Kernel {
  void* function = nullptr;
  uint32_t num_threads = 0;
  uint32_t shared_nbytes = 0;
  int num_scratch_pointers = 0;
};

// The kernels that attach() compiled.
struct CudaKernels {
  std::map<KernelKey, Kernel> kernels;
  int64_t tile_numel = 0;  // elements of a tile, at least; see slice_table.h

  // Elements of a tile of this layout: a block lies in one tile.
  int64_t tile_of(const BucketLayout& layout) const {
    return has_scales(layout.wire) ? std::max(tile_numel, layout.block_numel) : tile_numel;
  }

  // Throws std::logic_error, whose text describes the kernel, if it was not compiled.
  const Kernel& at(const KernelKey& key) const {
    const auto found = kernels.find(normalised(key));
    if (found == kernels.end()) {
      throw std::logic_error("fusedcomm: no kernel was compiled for " + to_string(normalised(key)));
    }
    return found->second;
  }

  // For a bucket with no lossy elements feedback does not matter: returns any kernel that agrees in all other fields.
  // Throws like at().
  const Kernel& at_any_feedback(KernelKey key) const {
    key.feedback = false;
    const auto first = kernels.lower_bound(normalised(key));
    if (first == kernels.end()) return at(key);
    KernelKey found = first->first;
    found.feedback = false;
    return found < normalised(key) || normalised(key) < found ? at(key) : first->second;
  }
};

// A slice list; see SliceTable.
struct SliceArgs {
  const int64_t* tile_offset = nullptr;
  const int32_t* tile_run = nullptr;
  const int32_t* first = nullptr;
  const int32_t* vectors = nullptr;
  const int64_t* starts = nullptr;
  const int64_t* ends = nullptr;
  const int64_t* deltas = nullptr;
  const int64_t* slice_starts = nullptr;
  int64_t* counts = nullptr;       // of non-finite elements
  const int64_t* slots = nullptr;  // the element of `counts` that is each slice's
  int32_t num_slices = 0;

  auto runs() { return std::tie(tile_offset, tile_run, first, vectors, starts, ends, deltas); }
  auto counted_runs() { return std::tuple_cat(runs(), std::tie(slice_starts, counts, slots, num_slices)); }
};

// The sections of a message's first part.
struct PartArgs {
  void* exact = nullptr;
  void* scales = nullptr;
  void* codes = nullptr;
};

// The shape of the parts of a message.
struct PartShape {
  int64_t stride = 0;       // bytes from one part of the message to the next
  int64_t numel = 0;        // lossy elements of a part
  int64_t exact_numel = 0;  // exact elements of a part
};

struct PackLaunch {
  static constexpr const char* kName = kPackKernel;
  void* grads = nullptr;
  SliceArgs lossy, exact;
  PartArgs out;
  PartShape part;
  int64_t first_part = 0;
  int32_t num_parts = 0;
  float scale = 1;
  void* residual = nullptr;  // at the first lossy element; null if there is none

  auto params() {
    return std::tuple_cat(std::tie(grads), lossy.counted_runs(), exact.counted_runs(),
                          std::tie(out.exact, out.scales, out.codes, part.stride, part.numel, part.exact_numel,
                                   first_part, num_parts, scale, residual));
  }
};

struct ReduceLaunch {
  static constexpr const char* kName = kReduceKernel;
  PartArgs in, out;
  int64_t in_stride = 0;  // bytes from one rank's part to the next rank's
  PartShape part;         // of the parts written
  int32_t num_parts = 0;
  int32_t world_size = 0;
  float scale = 1;
  void* residual = nullptr;  // at the first element written; null if there is none

  auto params() {
    return std::tie(in.exact, in.scales, in.codes, out.exact, out.scales, out.codes, in_stride, part.stride, part.numel,
                    part.exact_numel, num_parts, world_size, scale, residual);
  }
};

struct UnpackLaunch {
  static constexpr const char* kName = kUnpackKernel;
  void* grads = nullptr;
  SliceArgs lossy, exact;
  PartArgs in;
  PartShape part;
  int64_t first_part = 0;
  int32_t num_parts = 0;
  int32_t num_messages = 0;
  float scale = 1;

  auto params() {
    return std::tuple_cat(std::tie(grads), lossy.runs(), exact.runs(),
                          std::tie(in.exact, in.scales, in.codes, part.stride, part.numel, part.exact_numel, first_part,
                                   num_parts, num_messages, scale));
  }
};

struct ScaleLaunch {
  static constexpr const char* kName = kScaleKernel;
  void* data = nullptr;
  int64_t numel = 0;
  float scale = 1;
  const int64_t* slice_starts = nullptr;
  int64_t* counts = nullptr;
  const int64_t* slots = nullptr;
  int32_t num_slices = 0;

  auto params() { return std::tie(data, numel, scale, slice_starts, counts, slots, num_slices); }
};

template <typename T>
const char* param_type() {
  if constexpr (std::is_pointer_v<T>) return "ptr";
  if constexpr (std::is_same_v<T, int64_t>) return "i64";
  if constexpr (std::is_same_v<T, int32_t>) return "i32";
  if constexpr (std::is_same_v<T, float>) return "f32";
}

// "ptr", "i64", "i32" or "f32" for each parameter, in the kernel's order.
template <typename Launch>
std::vector<std::string> param_types() {
  Launch launch;
  return std::apply(
      [](auto&... param) {
        return std::vector<std::string>{param_type<std::remove_reference_t<decltype(param)>>()...};
      },
      launch.params());
}

template <typename Launch>
void launch(const CudaDriver& driver, const Kernel& kernel, int64_t num_programs, void* stream, Launch args) {
  void* scratch = nullptr;
  auto params = std::apply(
      [&scratch](auto&... param) {
        return std::array<void*, sizeof...(param) + kMaxScratchPointers>{
            const_cast<void*>(static_cast<const void*>(&param))..., &scratch, &scratch};
      },
      args.params());
  driver.launch(kernel.function, static_cast<uint32_t>(num_programs), kernel.num_threads, kernel.shared_nbytes, stream,
                params.data());
}

}  // namespace fusedcomm
