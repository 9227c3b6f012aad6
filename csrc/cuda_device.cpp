#include "cuda_device.h"

#include <torch/csrc/profiler/stubs/base.h>

#include <algorithm>
#include <numeric>
#include <utility>

namespace fusedcomm {
namespace {

constexpr const char* kRefusedCapture =
    "fusedcomm: the training step is being captured into a CUDA graph, and a replay would not take part in fusedcomm's "
    "order of buckets and workspaces: capture the step without fusedcomm (comm.detach(), then DDP's default "
    "all-reduce), or leave it uncaptured";

PartArgs sections(const PartLayout& part, std::byte* bytes) {
  return {bytes, bytes + part.scale_offset, bytes + part.code_offset};
}

PartArgs sections(const PartLayout& part, const std::byte* bytes) {
  return sections(part, const_cast<std::byte*>(bytes));
}

PartShape shape(const PartLayout& part) { return {part.nbytes, part.lossy_numel, part.exact_numel}; }

GradDtype dtype_of(const BucketStreams& streams) {
  return (streams.lossy.numel() != 0 ? streams.lossy : streams.exact).dtype();
}

bool is_one_run(const std::vector<SlicePlace>& slices) {
  int64_t end = 0;
  for (const SlicePlace& slice : slices) {
    if (slice.numel != 0 && slice.offset != end) return false;
    end += slice.numel;
  }
  return true;
}

// All tables of a bucket, in one allocation on the device: counts of both streams, then starts, offsets and first
// tiles.
class CudaTables : public BucketTables {
 public:
  CudaTables(const SliceTable& lossy_table, const SliceTable& exact_table, bool is_flat, c10::Device device,
             const std::vector<c10::Stream>& streams)
      : flat(is_flat),
        num_counts_(static_cast<int64_t>(lossy_table.offsets.size() + exact_table.offsets.size())),
        streams_(streams) {
    std::vector<int64_t> words(static_cast<size_t>(num_counts_), 0);
    const Places lossy_at = append(lossy_table, &words), exact_at = append(exact_table, &words);
    storage_ = at::from_blob(words.data(), {static_cast<int64_t>(words.size())}, at::kLong).to(device, false, true);
    for (const c10::Stream& stream : streams_) storage_.record_stream(stream);
    auto* data = static_cast<int64_t*>(storage_.data_ptr());
    lossy = args(lossy_table, lossy_at, data, data);
    exact = args(exact_table, exact_at, data, data + lossy_table.offsets.size());
  }

  std::vector<int64_t> nonfinite() const override {
    for (const c10::Stream& stream : streams_) stream.synchronize();
    const at::Tensor counts = storage_.narrow(0, 0, num_counts_).to(at::kCPU, false, true);
    const auto* data = counts.const_data_ptr<int64_t>();
    return {data, data + num_counts_};
  }

  const bool flat;
  SliceArgs lossy, exact;

 private:
  struct Places {
    size_t starts, offsets, first;
  };

  static Places append(const SliceTable& table, std::vector<int64_t>* words) {
    Places at{words->size(), 0, 0};
    words->insert(words->end(), table.starts.begin(), table.starts.end());
    at.offsets = words->size();
    words->insert(words->end(), table.offsets.begin(), table.offsets.end());
    at.first = words->size();
    words->resize(words->size() + (table.first.size() + 1) / 2);
    std::copy(table.first.begin(), table.first.end(), reinterpret_cast<int32_t*>(words->data() + at.first));
    return at;
  }

  static SliceArgs args(const SliceTable& table, const Places& at, int64_t* data, int64_t* counts) {
    return {data + at.starts,
            data + at.offsets,
            reinterpret_cast<const int32_t*>(data + at.first),
            counts,
            static_cast<int32_t>(table.offsets.size()),
            table.starts.back()};
  }

  const int64_t num_counts_;
  const std::vector<c10::Stream> streams_;
  at::Tensor storage_;
};

const CudaTables& tables_of(const BucketStreams& streams) {
  TORCH_CHECK(streams.tables, "fusedcomm: a bucket was not prepared for this device");
  TORCH_CHECK(reinterpret_cast<uintptr_t>(streams.origin) % kAlignNbytes == 0,
              "fusedcomm: a gradient bucket starts at ", streams.origin, ", which is not a multiple of ", kAlignNbytes,
              " bytes; leave the allocation of buckets to DDP");
  return static_cast<const CudaTables&>(*streams.tables);
}

}  // namespace

CudaDevice::CudaDevice(std::shared_ptr<const CudaDriver> driver, const KernelTable& kernels, c10::Device device,
                       std::string isa, int64_t max_programs, bool forced_sync, bool registered_memory,
                       Allocate allocate)
    : StreamDevice(device, forced_sync),
      driver_(std::move(driver)),
      kernels_(kernels),
      isa_(std::move(isa)),
      max_programs_(max_programs),
      registered_memory_(registered_memory),
      allocate_(std::move(allocate)),
      profiler_ranges_(on_streams() && torch::profiler::impl::cudaStubs()->enabled()) {
  TORCH_CHECK_VALUE(max_programs_ >= 1, "fusedcomm: max_programs=", max_programs_, " is not possible: use 1 or more");
  TORCH_CHECK_VALUE(kernels_.tile_numel >= 1, "fusedcomm: the kernels have no tile size");
}

std::shared_ptr<std::byte> CudaDevice::allocate(int64_t nbytes) {
  at::Tensor bytes = allocate_(nbytes).zero_();
  TORCH_CHECK(reinterpret_cast<uintptr_t>(bytes.data_ptr()) % 64 == 0, "fusedcomm: a workspace at ", bytes.data_ptr(),
              " is not aligned to 64 bytes");
  for (const c10::Stream& stream : streams()) bytes.record_stream(stream);
  if (on_streams()) current_stream().synchronize();
  return {static_cast<std::byte*>(bytes.data_ptr()), [bytes](std::byte*) {}};
}

void CudaDevice::will_use(const at::Tensor& tensor) const {
  for (const c10::Stream& stream : streams()) tensor.record_stream(stream);
}

void CudaDevice::check_caller() const {
  if (!on_streams()) return;
  TORCH_CHECK(!driver_->is_capturing(current_stream().native_handle()), kRefusedCapture);
}

std::shared_ptr<const BucketTables> CudaDevice::prepare(const BucketLayout& layout,
                                                        const std::vector<SlicePlace>& lossy,
                                                        const std::vector<SlicePlace>& exact) {
  return std::make_shared<CudaTables>(slice_table(layout, false, lossy, kernels_.tile_numel),
                                      slice_table(layout, true, exact, kernels_.tile_numel),
                                      layout.exact_numel == 0 && is_one_run(lossy), device_, streams());
}

int64_t CudaDevice::num_tiles(const BucketLayout& layout, int64_t num_parts) const {
  return num_parts * (tiles_per_part(layout.part.exact_numel, kernels_.tile_numel) +
                      tiles_per_part(layout.part.lossy_numel, kernels_.tile_numel));
}

template <typename Launch>
void CudaDevice::launch_kernel(const Kernel& kernel, int64_t num_tiles, const Launch& args) {
  if (num_tiles == 0) return;
  void* stream = on_streams() ? current_stream().native_handle() : nullptr;
  launch(*driver_, kernel, std::min(num_tiles, max_programs_), stream, args);
  ++num_launches_;
}

void CudaDevice::warm_up() {
  void* stream = on_streams() ? current_stream().native_handle() : nullptr;
  const auto warm = [&](const Kernel& kernel, auto args) {
    if (kernel.function) launch(*driver_, kernel, 1, stream, args);
  };
  for (size_t flat : {0, 1}) {
    for (size_t dtype = 0; dtype < kNumGradDtypes; ++dtype) {
      warm(kernels_.pack[dtype][flat], PackLaunch{});
      warm(kernels_.unpack[dtype][flat], UnpackLaunch{});
    }
    warm(kernels_.reduce[flat], ReduceLaunch{});
  }
  warm(kernels_.scale, ScaleLaunch{});
  if (on_streams()) current_stream().synchronize();
}

int64_t CudaDevice::pack(const PackArgs& args) {
  const CudaTables& tables = tables_of(args.streams);
  PackLaunch launch;
  launch.grads = args.streams.origin;
  launch.lossy = tables.lossy;
  launch.exact = tables.exact;
  launch.out = sections(args.layout.part, args.out);
  launch.part = shape(args.layout.part);
  launch.first_part = args.chunk * args.layout.num_parts;
  launch.num_parts = static_cast<int32_t>(args.layout.num_parts);
  launch.scale = args.scale;
  const auto dtype = static_cast<size_t>(dtype_of(args.streams));
  launch_kernel(kernels_.pack[dtype][tables.flat], num_tiles(args.layout, args.layout.num_parts), launch);
  return 0;
}

void CudaDevice::reduce(const ReduceArgs& args) {
  TORCH_CHECK(args.num_copies == 1, "fusedcomm: the device's reduce writes one copy, not ", args.num_copies);
  ReduceLaunch launch;
  launch.in = sections(args.from.part, args.parts);
  launch.out = sections(args.from.part, args.out);
  launch.part = shape(args.from.part);
  launch.world_size = static_cast<int32_t>(args.from.num_parts);
  launch.scale = args.scale;
  launch_kernel(kernels_.reduce[args.from.part.exact_numel == 0], num_tiles(args.from, 1), launch);
}

void CudaDevice::unpack(const UnpackArgs& args) {
  const CudaTables& tables = tables_of(args.streams);
  UnpackLaunch launch;
  launch.grads = args.streams.origin;
  launch.lossy = tables.lossy;
  launch.exact = tables.exact;
  launch.in = sections(args.layout.part, args.parts);
  launch.part = shape(args.layout.part);
  launch.first_part = args.chunk * args.layout.num_parts;
  launch.num_parts = static_cast<int32_t>(args.layout.num_parts);
  launch.scale = args.scale;
  const auto dtype = static_cast<size_t>(dtype_of(args.streams));
  launch_kernel(kernels_.unpack[dtype][tables.flat], num_tiles(args.layout, args.layout.num_parts), launch);
}

int64_t CudaDevice::scale_in_place(const BucketStreams& streams, float scale) {
  const CudaTables& tables = tables_of(streams);
  TORCH_CHECK(tables.flat && streams.lossy.dtype() == GradDtype::kFloat32,
              "fusedcomm: only one run of fp32 gradients can be summed in place");
  ScaleLaunch launch;
  launch.data = streams.origin;
  launch.numel = streams.lossy.numel();
  launch.scale = scale;
  launch.starts = tables.lossy.starts;
  launch.counts = tables.lossy.counts;
  launch.num_slices = tables.lossy.num_slices;
  launch_kernel(kernels_.scale, ceil_div(launch.numel, kernels_.tile_numel), launch);
  return 0;
}

void CudaDevice::range_push(const std::string& name) {
  if (profiler_ranges_) torch::profiler::impl::cudaStubs()->rangePush(name.c_str());
}

void CudaDevice::range_pop() {
  if (profiler_ranges_) torch::profiler::impl::cudaStubs()->rangePop();
}

}  // namespace fusedcomm
