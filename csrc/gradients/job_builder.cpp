#include "gradients/job_builder.h"

#include <utility>

#include "gradients/grad_dtype.h"

namespace fusedcomm {
namespace {

SliceList slice_list(const std::vector<SlicePlace>& places, const at::Tensor& tensor) {
  const GradDtype dtype = grad_dtype_of(tensor.scalar_type());
  auto* const origin = static_cast<std::byte*>(tensor.data_ptr());
  SliceList list;
  for (const SlicePlace& place : places) {
    list.append(place.is_hole() ? nullptr : origin + place.offset * grad_nbytes(dtype), place.numel, dtype);
  }
  return list;
}

// This rank's row as the job uses it; undefined without rows. Kernels read kAlignNbytes at a time from a multiple of
// them, and FSDP2's row to be gathered begins anywhere in its rows: it is then copied.
at::Tensor row_of_job(const Bucket& bucket, const BucketRecord& record, const Device& device) {
  if (!bucket.rows()) return {};
  const at::Tensor& own = bucket.rows()->own;
  const bool is_aligned = reinterpret_cast<uintptr_t>(own.data_ptr()) % kAlignNbytes == 0;
  if (!bucket.gathers() || bucket.rows()->is_again || is_aligned || record.kept.empty() || !record.kept.front().tables)
    return own;
  at::Tensor copy = own.clone();
  device.will_use(copy);
  return copy;
}

// Addresses are taken for each job, because gradients may be allocated at every backward pass. own: of row_of_job().
void add_slices(const Bucket& bucket, const BucketRecord& record, const at::Tensor& own, BucketJob* job) {
  const Gradients& gradients = *bucket.gradients;
  std::byte* const origin = gradients.origin();
  for (size_t i = 0; i < record.kept.size(); ++i) {
    const BucketRecord::Kept& kept = record.kept[i];
    Payload& payload = job->payloads[i];
    payload.slices.origin = origin;
    payload.slices.tables = kept.tables;
    if (!bucket.rows()) continue;
    const at::Tensor& rows = gradients.front();
    BucketSlices of_all{slice_list(kept.lossy.places, rows), slice_list(kept.exact.places, rows), origin};
    BucketSlices of_own{slice_list(kept.own_lossy.places, own), slice_list(kept.own_exact.places, own), own.data_ptr()};
    if (record.plan.gathers) std::swap(of_all, of_own);
    payload.slices = std::move(of_all);
    payload.slices.tables = kept.tables;
    payload.unpacked = std::move(of_own);
    payload.unpacked->tables = kept.unpack_tables;
  }
  if (bucket.rows()) return;
  const GradDtype dtype = grad_dtype_of(record.dtype);
  for (size_t i = 0; i < record.members.size(); ++i) {
    const BucketRecord::Member& member = record.members[i];
    BucketSlices& slices = job->payloads[member.payload].slices;
    SliceList& list = member.exact ? slices.exact : slices.lossy;
    list.append(nullptr, member.hole, dtype);
    list.append(origin + gradients.places()[i].offset * grad_nbytes(dtype), member.numel, dtype);
  }
  for (size_t i = 0; i < record.kept.size(); ++i) {
    if (!record.kept[i].unpack_tables) continue;
    job->payloads[i].unpacked = job->payloads[i].slices;
    job->payloads[i].unpacked->tables = record.kept[i].unpack_tables;
  }
}

void add_residuals(const BucketRecord& record, BucketJob* job) {
  for (size_t i = 0; i < record.kept.size(); ++i) {
    const BucketRecord::Kept& kept = record.kept[i];
    if (!kept.residual) continue;
    Payload& payload = job->payloads[i];
    first_residual(record, &payload) = kept.residual->of_first();
    payload.reduce = kept.residual->of_second();
  }
}

}  // namespace

std::shared_ptr<BucketJob> make_job(const Bucket& bucket, const BucketRecordPtr& record, const Engine& engine,
                                    const FuturePtr& future) {
  const GradientsPtr& gradients = bucket.gradients;
  auto job = std::make_shared<BucketJob>();
  job->label = record->label;
  job->is_last = bucket.is_last;
  if (record->passthrough) return job;
  job->grad_nbytes = gradients->nbytes();
  job->plan = BucketPlanPtr(record, &record->plan);
  if (bucket.gathers() && bucket.rows()->kept) {
    job->kept = bucket.rows()->kept;
    job->is_packed = bucket.rows()->is_again;
    if (job->is_packed) job->plan = BucketPlanPtr(record, &*record->again);
  }
  // What an all-gather packs is this rank's row.
  const at::Tensor own_row = row_of_job(bucket, *record, engine.device());
  GradientsPtr packed = gradients;
  if (bucket.gathers()) packed = std::make_shared<const Gradients>(own_row.view({-1}), gradients->places());
  job->on_nonfinite = [record, packed](const BucketJob& job, int64_t chunk) {
    attribute_nonfinite(*record, *packed, job, chunk);
  };
  job->payloads.resize(record->kept.size());
  add_slices(bucket, *record, own_row, job.get());
  add_residuals(*record, job.get());
  std::shared_ptr<Device> device;  // that of rows
  if (bucket.rows()) {
    device = engine.shared_device();
    job->owner = std::make_shared<std::pair<GradientsPtr, at::Tensor>>(gradients, own_row);
  } else {
    const bool by_wire_only = engine.is_on_wire(*job);
    for (const at::Tensor& tensor : bucket.is_kept() ? at::ArrayRef<at::Tensor>() : gradients->tensors()) {
      engine.device().will_use(tensor, by_wire_only);
    }
    job->owner = std::const_pointer_cast<Gradients>(gradients);
  }
  job->on_done = [future, gradients, result = bucket.result(), device, own_row](std::exception_ptr error) {
    // Without an error the caller's stream waits for ours before the rows' memory is used for anything else.
    if (error && device) {
      for (const at::Tensor& tensor : {gradients->front(), own_row}) device->will_use(tensor);
    }
    complete(*future, result, std::move(error));
  };
  return job;
}

}  // namespace fusedcomm
