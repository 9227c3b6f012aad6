#include "devices/cuda_device.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/StreamGuard.h>
#include <torch/csrc/profiler/stubs/base.h>

#include <algorithm>
#include <optional>
#include <utility>

namespace fusedcomm {
namespace {

constexpr const char* kRefusedCapture =
    "fusedcomm: the training step is being captured into a CUDA graph, and a replay would bypass fusedcomm's order of "
    "buckets and workspaces: call comm.detach() and capture the step with DDP's default all-reduce, or do not capture "
    "the step";

// The sections of the layout's piece of a message's first part.
PartArgs sections(const BucketLayout& layout, std::byte* message) {
  std::byte* piece = message + layout.part_offset;
  return {piece, piece + layout.part.scale_offset, piece + layout.part.code_offset};
}

PartArgs sections(const BucketLayout& layout, const std::byte* message) {
  return sections(layout, const_cast<std::byte*>(message));
}

PartShape shape(const BucketLayout& layout) {
  return {layout.part_stride, layout.part.lossy_numel, layout.part.exact_numel};
}

// The address of the residual's element `first`; null if there is no residual. The residual must have `numel` elements.
void* residual_from(const Residual& residual, int64_t first, int64_t numel) {
  if (!residual.data) return nullptr;
  TORCH_CHECK(residual.numel == numel, "fusedcomm: a residual of ", residual.numel,
              " elements was given where the layout has ", numel);
  return residual.data + first;
}

// The key of a kernel that encodes or decodes `layout`, with the fields that the layout determines.
KernelKey key_of(const char* kernel, const BucketLayout& layout) {
  KernelKey key{kernel};
  key.wire = layout.wire;
  key.block_numel = layout.block_numel;
  return key;
}

KernelKey encoder_key(const char* kernel, const BucketLayout& layout, const Residual& residual) {
  KernelKey key = key_of(kernel, layout);
  key.feedback = residual.data != nullptr;
  return key;
}

GradDtype dtype_of(const BucketSlices& slices) {
  return (slices.lossy.numel() != 0 ? slices.lossy : slices.exact).dtype();
}

// All tables of a bucket, in one allocation on the device: where both slice lists are counted, then for each list its
// arrays.
class CudaTables : public BucketTables {
 public:
  CudaTables(const SliceTable& lossy_table, const SliceTable& exact_table, c10::Device device,
             const std::vector<c10::Stream>& streams, const std::vector<int64_t*>& counts)
      : in_one_run(exact_table.slice_starts.back() == 0 && lossy_table.deltas.size() == 1 &&
                   lossy_table.deltas.front() == 0) {
    const int64_t num_lossy = num_slices(lossy_table), num_exact = num_slices(exact_table);
    TORCH_CHECK(counts.empty() || static_cast<int64_t>(counts.size()) == num_lossy + num_exact,
                "fusedcomm: ", counts.size(), " counts for ", num_lossy, " lossy and ", num_exact, " exact slices");
    std::vector<int64_t> words;
    for (int64_t* const count : counts) words.push_back(count - counts.front());
    const std::vector<size_t> lossy_at = append(lossy_table, &words), exact_at = append(exact_table, &words);
    // Pinned, so that the host does not wait for the stream.
    const auto on_host = at::TensorOptions().dtype(at::kLong).pinned_memory(!device.is_cpu());
    const at::Tensor pinned = at::empty({static_cast<int64_t>(words.size())}, on_host);
    std::copy(words.begin(), words.end(), pinned.mutable_data_ptr<int64_t>());
    storage_ = pinned.to(device, /*non_blocking=*/true, /*copy=*/true);
    for (const c10::Stream& stream : streams) storage_.record_stream(stream);
    auto* data = static_cast<int64_t*>(storage_.data_ptr());
    lossy = args(lossy_table, lossy_at, data);
    exact = args(exact_table, exact_at, data);
    if (counts.empty()) return;
    lossy.counts = exact.counts = counts.front();
    lossy.slots = data;
    exact.slots = data + num_lossy;
  }

  const bool in_one_run;  // no exact elements, and the lossy ones lie from the origin on in order
  SliceArgs lossy, exact;

 private:
  static int64_t num_slices(const SliceTable& table) { return static_cast<int64_t>(table.slice_starts.size()) - 1; }

  template <typename T>
  static size_t append(const std::vector<T>& values, std::vector<int64_t>* words) {
    const size_t at = words->size();
    words->resize(at + (values.size() * sizeof(T) + sizeof(int64_t) - 1) / sizeof(int64_t));
    std::copy(values.begin(), values.end(), reinterpret_cast<T*>(words->data() + at));
    return at;
  }

  // The offset of each array of the table.
  static std::vector<size_t> append(const SliceTable& table, std::vector<int64_t>* words) {
    return {append(table.tile_offset, words), append(table.tile_run, words),    append(table.first, words),
            append(table.vectors, words),     append(table.starts, words),      append(table.ends, words),
            append(table.deltas, words),      append(table.slice_starts, words)};
  }

  static SliceArgs args(const SliceTable& table, const std::vector<size_t>& at, int64_t* data) {
    const auto of_32 = [&](size_t index) { return reinterpret_cast<const int32_t*>(data + at[index]); };
    return {data + at[0],
            of_32(1),
            of_32(2),
            of_32(3),
            data + at[4],
            data + at[5],
            data + at[6],
            data + at[7],
            nullptr,
            nullptr,
            static_cast<int32_t>(num_slices(table))};
  }

  at::Tensor storage_;
};

const CudaTables& tables_of(const BucketSlices& slices) {
  TORCH_CHECK(slices.tables, "fusedcomm: a bucket has no tables of this device: prepare() was not called for it");
  TORCH_CHECK(reinterpret_cast<uintptr_t>(slices.origin) % kAlignNbytes == 0, "fusedcomm: a gradient bucket starts at ",
              slices.origin, ", which is not a multiple of ", kAlignNbytes,
              " bytes: leave the allocation of buckets to DDP");
  return static_cast<const CudaTables&>(*slices.tables);
}

}  // namespace

CudaDevice::CudaDevice(std::shared_ptr<const CudaDriver> driver, const CudaKernels& kernels, c10::Device device,
                       std::string isa, int64_t num_pack_programs, bool two_levels, bool forced_sync)
    : StreamDevice(device, two_levels, forced_sync),
      driver_(std::move(driver)),
      kernels_(kernels),
      isa_(std::move(isa)),
      num_pack_programs_(num_pack_programs),
      profiler_ranges_(on_streams() && torch::profiler::impl::cudaStubs()->enabled()) {
  TORCH_CHECK_VALUE(num_pack_programs >= 1, "fusedcomm: num_pack_programs=", num_pack_programs,
                    " is not possible: use 1 or more");
  TORCH_CHECK_VALUE(kernels_.tile_numel >= 1, "fusedcomm: tile_numel of the kernels must be at least 1");
}

std::shared_ptr<std::byte> CudaDevice::allocate(int64_t nbytes) {
  at::Tensor bytes = at::zeros({nbytes}, at::TensorOptions().dtype(at::kByte).device(device_));
  TORCH_CHECK(reinterpret_cast<uintptr_t>(bytes.data_ptr()) % 64 == 0, "fusedcomm: a workspace at ", bytes.data_ptr(),
              " is not aligned to 64 bytes");
  for (const c10::Stream& stream : streams()) bytes.record_stream(stream);
  if (on_streams()) current_stream().synchronize();
  return {static_cast<std::byte*>(bytes.data_ptr()), [bytes](std::byte*) {}};
}

// Memory that was recorded before is recorded again. A storage that is resized to nothing and back may get the same
// address, which the allocator then knows no streams of, so neither address nor storage show that nothing is needed.
void CudaDevice::will_use(const at::Tensor& tensor, bool by_wire_only) const {
  if (by_wire_only && on_streams()) return tensor.record_stream(wire_stream());
  for (const c10::Stream& stream : streams()) tensor.record_stream(stream);
}

void CudaDevice::check_caller() const { TORCH_CHECK(!driver_->is_capturing(stream_handle()), kRefusedCapture); }

void CudaDevice::enter_watching_thread() const {
  if (!on_streams()) return;
  StreamDevice::enter_watching_thread();
  driver_->relax_capture_mode();
}

std::shared_ptr<const BucketTables> CudaDevice::prepare(const BucketLayout& layout,
                                                        const std::vector<SlicePlace>& lossy,
                                                        const std::vector<SlicePlace>& exact, int64_t grad_nbytes,
                                                        const std::vector<int64_t*>& counts) {
  const int64_t tile_numel = kernels_.tile_of(layout);
  return std::make_shared<CudaTables>(slice_table(layout, false, lossy, tile_numel, grad_nbytes),
                                      slice_table(layout, true, exact, tile_numel, grad_nbytes), device_, streams(),
                                      counts);
}

std::vector<int64_t> CudaDevice::read_counts(const int64_t* counts, int64_t num) const {
  // Not on the caller's stream, whose work may take long: callers hold a lock.
  const c10::OptionalStreamGuard guard(on_streams() ? std::optional(stream_of(LaneRole::kPack)) : std::nullopt);
  const at::Tensor here = at::for_blob(const_cast<int64_t*>(counts), {num})
                              .options(at::TensorOptions().dtype(at::kLong).device(device_))
                              .target_device(device_)
                              .make_tensor();
  const at::Tensor read = here.to(at::kCPU, /*non_blocking=*/false, /*copy=*/true);
  return {read.const_data_ptr<int64_t>(), read.const_data_ptr<int64_t>() + num};
}

int64_t CudaDevice::num_tiles(const BucketLayout& layout, int64_t num_parts) const {
  const int64_t tile_numel = kernels_.tile_of(layout);
  return num_parts *
         (tiles_per_part(layout.part.exact_numel, tile_numel) + tiles_per_part(layout.part.lossy_numel, tile_numel));
}

const Kernel& CudaDevice::kernel_of(const KernelKey& key, const BucketLayout& layout) const {
  return layout.lossy_numel == 0 ? kernels_.at_any_feedback(key) : kernels_.at(key);
}

void* CudaDevice::stream_handle() const { return on_streams() ? current_stream().native_handle() : nullptr; }

template <typename Launch>
void CudaDevice::launch_kernel(const Kernel& kernel, int64_t num_programs, const Launch& args) {
  if (num_programs == 0) return;
  launch(*driver_, kernel, num_programs, stream_handle(), args);
}

void CudaDevice::warm_up() {
  void* stream = stream_handle();
  for (const auto& [key, kernel] : kernels_.kernels) {
    const auto warm = [&, &kernel = kernel](auto args) { launch(*driver_, kernel, 1, stream, args); };
    if (key.kernel == PackLaunch::kName) warm(PackLaunch{});
    if (key.kernel == ReduceLaunch::kName) warm(ReduceLaunch{});
    if (key.kernel == UnpackLaunch::kName) warm(UnpackLaunch{});
    if (key.kernel == ScaleLaunch::kName) warm(ScaleLaunch{});
  }
  if (on_streams()) current_stream().synchronize();
}

int64_t CudaDevice::pack(const PackArgs& args) {
  const BucketLayout& layout = args.layout;
  const CudaTables& tables = tables_of(args.slices);
  PackLaunch launch;
  launch.grads = args.slices.origin;
  launch.lossy = tables.lossy;
  launch.exact = tables.exact;
  launch.out = sections(layout, args.out);
  launch.part = shape(layout);
  launch.first_part = args.chunk * layout.num_parts;
  launch.num_parts = static_cast<int32_t>(layout.num_parts);
  launch.scale = args.scale;
  launch.residual = residual_from(args.residual, 0, layout.padded_numel());
  KernelKey key = encoder_key(PackLaunch::kName, layout, args.residual);
  key.grad_dtype = dtype_of(args.slices);
  launch_kernel(kernel_of(key, layout), std::min(num_tiles(layout, layout.num_parts), num_pack_programs_), launch);
  return 0;
}

void CudaDevice::reduce(const ReduceArgs& args) {
  const BucketLayout &from = args.from, &to = args.to;
  TORCH_CHECK(from.part.lossy_numel == args.num_parts * to.part.lossy_numel &&
                  from.part.exact_numel == args.num_parts * to.part.exact_numel,
              "fusedcomm: a reduce reads parts of ", from.part.lossy_numel, " lossy and ", from.part.exact_numel,
              " exact elements, which must be ", args.num_parts, " times the parts it writes, of ", to.part.lossy_numel,
              " and ", to.part.exact_numel);
  const int64_t first = args.chunk * args.num_parts * to.part.lossy_numel;
  const int64_t residual_numel = to.num_chunks * args.num_parts * to.part.lossy_numel;
  ReduceLaunch launch;
  launch.in = sections(from, args.parts);
  launch.out = sections(to, args.out);
  launch.in_stride = from.part_stride;
  launch.part = shape(to);
  launch.num_parts = static_cast<int32_t>(args.num_parts);
  launch.world_size = static_cast<int32_t>(from.num_parts);
  launch.scale = args.scale;
  launch.residual = residual_from(args.residual, first, residual_numel);
  KernelKey key = encoder_key(ReduceLaunch::kName, to, args.residual);
  key.in_wire = from.wire;
  launch_kernel(kernel_of(key, to), num_tiles(to, args.num_parts), launch);
}

void CudaDevice::unpack(const UnpackArgs& args) {
  const BucketLayout& layout = args.layout;
  const CudaTables& tables = tables_of(args.slices);
  UnpackLaunch launch;
  launch.grads = args.slices.origin;
  launch.lossy = tables.lossy;
  launch.exact = tables.exact;
  launch.in = sections(layout, args.parts);
  launch.part = shape(layout);
  launch.first_part = args.chunk * layout.num_parts;
  launch.num_parts = static_cast<int32_t>(layout.num_parts);
  launch.num_messages = static_cast<int32_t>(args.num_messages);
  launch.scale = args.scale;
  KernelKey key = key_of(UnpackLaunch::kName, layout);
  key.sums = args.num_messages > 1;
  key.grad_dtype = dtype_of(args.slices);
  launch_kernel(kernel_of(key, layout), num_tiles(layout, layout.num_parts), launch);
}

int64_t CudaDevice::scale_in_place(const BucketSlices& slices, float scale) {
  const CudaTables& tables = tables_of(slices);
  TORCH_CHECK(tables.in_one_run && slices.lossy.dtype() == GradDtype::kFloat32,
              "fusedcomm: only one run of fp32 gradients can be summed in place");
  ScaleLaunch launch;
  launch.data = slices.origin;
  launch.numel = slices.lossy.numel();
  launch.scale = scale;
  launch.slice_starts = tables.lossy.slice_starts;
  launch.counts = tables.lossy.counts;
  launch.slots = tables.lossy.slots;
  launch.num_slices = tables.lossy.num_slices;
  launch_kernel(kernels_.at({ScaleLaunch::kName}), ceil_div(launch.numel, kernels_.tile_numel), launch);
  return 0;
}

void CudaDevice::add_heads(const std::byte* heads, int64_t stride, int64_t num_heads, std::byte* sums,
                           int64_t stride_of_sums, int64_t num_sums) {
  const at::NoGradGuard no_grad;
  const auto as_floats = [this](const std::byte* data, int64_t num, int64_t stride_nbytes) {
    constexpr int64_t kNbytes = sizeof(float);
    return at::for_blob(const_cast<std::byte*>(data), {num, kHeadNbytes / kNbytes})
        .strides({stride_nbytes / kNbytes, 1})
        .options(at::TensorOptions().dtype(at::kFloat).device(device_))
        .target_device(device_)
        .make_tensor();
  };
  as_floats(sums, num_sums, stride_of_sums).copy_(as_floats(heads, num_heads, stride).sum(0));
}

void CudaDevice::range_push(const std::string& name) {
  if (profiler_ranges_) torch::profiler::impl::cudaStubs()->rangePush(name.c_str());
}

void CudaDevice::range_pop() {
  if (profiler_ranges_) torch::profiler::impl::cudaStubs()->rangePop();
}

}  // namespace fusedcomm
