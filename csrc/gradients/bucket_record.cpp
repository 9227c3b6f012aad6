#include "gradients/bucket_record.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <map>
#include <sstream>
#include <utility>

#include "gradients/grad_dtype.h"

namespace fusedcomm {
namespace {

bool is_carried(const Gradients& gradients) { return !gradients.is_sparse() && has_wire_format(gradients.dtype()); }

// Bytes of an element, for the holes of the record's lists. A reduce-scatter has the same holes whatever its dtypes
// are: its input and its output may have two.
int64_t hole_nbytes(const BucketRecord& record) {
  return grad_nbytes(record.has_rows ? GradDtype::kBFloat16 : grad_dtype_of(record.dtype));
}

void plan(const Engine& engine, const Bucket& bucket, BucketRecord* record) {
  const WireConfig& config = engine.config();
  const GradDtype dtype = grad_dtype_of(record->dtype);
  std::vector<std::pair<int64_t, int>> slices;
  for (const BucketRecord::Member& member : record->members) slices.emplace_back(member.numel, member.state->wire);
  const ListNumels numels = list_numels(slices, hole_nbytes(*record), record->in_one_run);
  const int world_size = engine.world_size();
  const bool keeps = bucket.gathers() && bucket.rows()->kept;
  if (keeps) record->again = plan_all_gather(config, world_size, numels, Keeping::kAgain);
  record->plan =
      bucket.gathers() ? plan_all_gather(config, world_size, numels, keeps ? Keeping::kKeeps : Keeping::kNothing)
      : record->has_rows
          ? plan_reduce_scatter(config, world_size, numels, record->factor.value_or(1), record->has_heads)
          : plan_bucket(config, world_size, dtype, numels, record->in_one_run, record->factor, record->has_heads);
  record->kept.resize(record->plan.layouts.size());
  for (BucketRecord::Member& member : record->members) {
    const std::vector<int>& wires = record->plan.wires;
    member.exact = member.state->wire == kExactWire && record->plan.exact_numel() != 0;
    if (member.exact) continue;
    if (member.numel == 0) continue;  // its wire need not be in the bucket, and any payload will do
    if (!wires.empty()) {
      const auto found = std::find(wires.begin(), wires.end(), member.state->wire);
      member.payload = static_cast<size_t>(found - wires.begin());
    }
  }
  std::map<std::pair<size_t, bool>, Holes> lists;
  int64_t offset = 0;
  for (BucketRecord::Member& member : record->members) {
    const Holes empty(hole_nbytes(*record), record->in_one_run);
    member.hole = lists.try_emplace({member.payload, member.exact}, empty).first->second.append(offset, member.numel);
    offset += member.numel;
  }
}

bool is_in(const BucketRecord::Member& member, size_t payload, bool exact) {
  return member.payload == payload && member.exact == exact;
}

// A payload's slices in one row, lossy or exact.
SlicePlaces slices_of(const BucketRecord& record, const std::vector<SlicePlace>& places, size_t payload, bool exact) {
  SlicePlaces slices;
  for (size_t i = 0; i < record.members.size(); ++i) {
    const BucketRecord::Member& member = record.members[i];
    if (!is_in(member, payload, exact)) continue;
    slices.append_hole(member.hole);
    slices.append({places[i].offset, member.numel}, member.state);
  }
  return slices;
}

// A payload's slices in all rows, lossy or exact: chunk by chunk a segment of every row, filled up with a hole.
SlicePlaces row_segments(const BucketRecord& record, size_t payload, bool exact) {
  const BucketLayout& all = record.layouts_of_rows()[payload];
  const int64_t segment = exact ? all.part.exact_numel : all.part.lossy_numel;
  SlicePlaces slices;
  for (int64_t chunk = 0; chunk < all.num_chunks && segment != 0; ++chunk) {
    const Range range{chunk * segment, (chunk + 1) * segment};
    for (int64_t part = 0; part < all.num_parts; ++part) {
      const int64_t row = record.plan.row_of_part(part, all.num_parts);
      int64_t at = 0, filled_to = range.begin;  // elements of the row's list before the member, and in the segment
      for (const BucketRecord::Member& member : record.members) {
        if (!is_in(member, payload, exact)) continue;
        at += member.hole;
        const int64_t from = std::max(range.begin, at), to = std::min(range.end, at + member.numel);
        const int64_t offset = row * (record.numel / all.num_parts) + member.offset + from - at;
        if (from < to) {
          slices.append_hole(from - filled_to);
          slices.append({offset, to - from}, member.state);
          filled_to = to;
        }
        at += member.numel;
      }
      slices.append_hole(range.end - filled_to);
    }
  }
  return slices;
}

// Makes the slices that the record keeps, and the device's tables.
void prepare(Device* device, Parameters* parameters, const Gradients& gradients, BucketRecord* record) {
  const BucketPlan& plan = record->plan;
  const int64_t nbytes = grad_nbytes(grad_dtype_of(record->dtype));
  for (size_t payload = 0; payload < record->kept.size(); ++payload) {
    BucketRecord::Kept& kept = record->kept[payload];
    SlicePlaces lossy = slices_of(*record, gradients.places(), payload, /*exact=*/false);
    SlicePlaces exact = slices_of(*record, gradients.places(), payload, /*exact=*/true);
    if (plan.on_two_levels() && !record->has_rows) {
      kept.unpack_tables = device->prepare(plan.layouts[payload], lossy.places, exact.places, nbytes, {});
    }
    int64_t packed_nbytes = nbytes;
    if (record->has_rows) {
      const int64_t own_nbytes = grad_nbytes(grad_dtype_of(record->own_dtype));
      kept.own_lossy = lossy;
      kept.own_exact = exact;
      kept.lossy = row_segments(*record, payload, /*exact=*/false);
      kept.exact = row_segments(*record, payload, /*exact=*/true);
      kept.unpack_tables =
          plan.gathers ? device->prepare(plan.layouts[payload], kept.lossy.places, kept.exact.places, nbytes, {})
                       : device->prepare(plan.layouts[payload], lossy.places, exact.places, own_nbytes, {});
      if (plan.gathers) {
        packed_nbytes = own_nbytes;
      } else {
        lossy = kept.lossy;
        exact = kept.exact;
      }
    }
    std::vector<int64_t*> counts;
    for (const SlicePlaces* slices : {&lossy, &exact}) {
      for (const ParameterStatePtr& state : slices->states) {
        if (state && device->counts_in_memory()) counts.push_back(parameters->count_of(state.get()));
      }
    }
    kept.tables = device->prepare(plan.packed_layouts()[payload], lossy.places, exact.places, packed_nbytes, counts);
  }
}

void make_residuals(const Engine& engine, const Place& place, c10::Device device, BucketRecord* record) {
  const WireConfig& config = engine.config();
  const BucketPlan& plan = record->plan;
  if (!config.feedback || !plan.sums_codes()) return;
  for (size_t payload = 0; payload < record->kept.size(); ++payload) {
    const BucketLayout& layout = plan.encoded_layouts()[payload];
    if (layout.wire == Wire::kFp32 || layout.lossy_numel == 0) continue;
    auto& residual = record->kept[payload].residual;
    residual = std::make_shared<ResidualBuffer>(layout, plan.reduce_scale, place, device,
                                                /*of_first_only=*/!plan.encodes_sums());
    for (const at::Tensor& storage : residual->storages()) engine.device().will_use(storage);
  }
}

void add_to(const at::Tensor& gradient, const at::Tensor& values) { gradient.add_(values.view(gradient.sizes())); }

// Makes the record's residuals from those of its parameters; rows have none. A residual that can no longer be kept is
// added to the gradients, in whose unit the residuals' is `unit`.
void move_residuals(const Engine& engine, const Place& place, double unit, BucketRecord* record,
                    const Gradients& gradients) {
  if (record->has_rows) return;
  // Without error feedback there may still be a loaded residual, which another wire has left.
  const auto is_loaded = [](const BucketRecord::Member& member) { return member.state->loaded.defined(); };
  if (!engine.config().feedback && std::none_of(record->members.begin(), record->members.end(), is_loaded)) return;
  at::NoGradGuard no_grad;
  make_residuals(engine, place, gradients.device(), record);
  // No old residual is released before all of them have been copied.
  std::vector<at::Tensor> values(record->kept.size());  // by payload; undefined if there is no residual
  std::vector<std::optional<EncoderResiduals>> of_encoders(record->kept.size());
  std::vector<at::Tensor> left_outs;  // by member
  std::vector<int64_t> begins(record->kept.size(), 0);
  for (size_t i = 0; i < record->members.size(); ++i) {
    const BucketRecord::Member& member = record->members[i];
    if (member.state->of_encoders && !member.exact) of_encoders[member.payload].swap(member.state->of_encoders);
    member.state->of_encoders.reset();
    const at::Tensor& left_out = left_outs.emplace_back(member.state->left_out());
    const auto& residual = record->kept[member.payload].residual;
    if (!member.exact) begins[member.payload] += member.hole;
    member.state->residual_begin = begins[member.payload];
    if (!member.exact && residual && left_out.defined()) {
      at::Tensor& all = values[member.payload];
      const int64_t numel = record->plan.encoded_layouts()[member.payload].lossy_numel;
      if (!all.defined()) all = at::zeros({numel}, left_out.options());
      all.narrow(0, begins[member.payload], left_out.numel()).copy_(left_out);
    } else if (left_out.defined()) {
      add_to(gradients.view(i), left_out.mul(unit));
    }
    if (!member.exact) begins[member.payload] += member.numel;
  }
  for (size_t payload = 0; payload < values.size(); ++payload) {
    if (!values[payload].defined()) continue;
    const at::Tensor all = std::move(values[payload]);
    ResidualBuffer& residual = *record->kept[payload].residual;
    values[payload] = residual.set_values(all);
    if (!of_encoders[payload] || !residual.take(*of_encoders[payload])) continue;
    bool are_same = true;
    for (size_t i = 0; i < left_outs.size() && are_same; ++i) {
      const BucketRecord::Member& member = record->members[i];
      if (member.exact || member.payload != payload || !left_outs[i].defined()) continue;
      are_same = residual.values(member.state->residual_begin, left_outs[i].numel()).equal(left_outs[i]);
    }
    if (are_same) {
      values[payload] = at::Tensor();
    } else {  // of a bucket that was cut otherwise, or with other values
      residual.set_values(all);
    }
  }
  for (size_t i = 0; i < record->members.size(); ++i) {
    const BucketRecord::Member& member = record->members[i];
    const at::Tensor& rest = values[member.payload];
    if (rest.defined() && !member.exact) {
      add_to(gradients.view(i), rest.narrow(0, member.state->residual_begin, member.numel).mul(unit));
    }
    member.state->loaded = at::Tensor();
    member.state->residual = member.exact ? nullptr : record->kept[member.payload].residual;
  }
}

// `begin`: elements from the gradients' origin.
int64_t count_nonfinite(const Gradients& gradients, int64_t begin, int64_t numel, float scale) {
  const at::NoGradGuard no_grad;
  std::byte* const data = gradients.origin() + begin * static_cast<int64_t>(c10::elementSize(gradients.dtype()));
  const at::Tensor values = at::from_blob(data, {numel}, at::TensorOptions(gradients.dtype())).to(at::kFloat);
  return numel - values.mul(scale).isfinite().sum().item<int64_t>();
}

// The range of the exact or lossy elements that are in a chunk.
Range of_chunk(const BucketLayout& layout, int64_t chunk, bool exact) {
  const int64_t last = layout.num_parts - 1;
  if (exact) return {layout.exact_range(chunk, 0).begin, layout.exact_range(chunk, last).end};
  return {layout.lossy_range(chunk, 0).begin, layout.lossy_range(chunk, last).end};
}

// Whether the record is still valid for this bucket, wherever its gradients lie.
bool is_of(const BucketRecord& record, const Bucket& bucket, bool has_heads) {
  const Gradients& gradients = *bucket.gradients;
  if (record.has_heads != has_heads) return false;
  if (record.is_stale || record.factor != bucket.factor() || record.dtype != gradients.dtype()) return false;
  if (record.passthrough == is_carried(gradients) || record.has_rows != (bucket.rows() != nullptr)) return false;
  if (record.plan.gathers != bucket.gathers()) return false;
  if (bucket.gathers() && record.again.has_value() != (bucket.rows()->kept != nullptr)) return false;
  if (record.has_rows && record.own_dtype != bucket.rows()->own.scalar_type()) return false;
  if (record.in_one_run != gradients.in_one_run() || record.numel != gradients.numel()) return false;
  if (record.parameters.size() != bucket.parameters.size()) return false;
  return std::equal(
      record.parameters.begin(), record.parameters.end(), bucket.parameters.begin(), bucket.parameters.end(),
      [](c10::TensorImpl* known, const at::Tensor& parameter) { return known == parameter.unsafeGetTensorImpl(); });
}

// Whether the residuals of its parameters are still in this record, and not in that of another bucket.
bool has_residuals(const BucketRecord& record) {
  return record.passthrough ||
         std::all_of(record.members.begin(), record.members.end(), [&record](const BucketRecord::Member& member) {
           return member.state->residual == (member.exact ? nullptr : record.kept[member.payload].residual);
         });
}

// Whether the gradients lie where the tables say. True if there are no tables.
bool lies_as(const BucketRecord& record, const Gradients& gradients) {
  const auto has_tables = [](const BucketRecord::Kept& kept) { return kept.tables != nullptr; };
  if (record.in_one_run || std::none_of(record.kept.begin(), record.kept.end(), has_tables)) return true;
  return std::equal(
      record.members.begin(), record.members.end(), gradients.places().begin(), gradients.places().end(),
      [](const BucketRecord::Member& member, const SlicePlace& place) { return member.offset == place.offset; });
}

std::shared_ptr<KeptMessages> make_messages(const BucketPlan& plan, Device* device, bool enqueues) {
  auto messages = std::make_shared<KeptMessages>();
  messages->nbytes = plan.num_chunks() * plan.chunk_nbytes();
  messages->codes = device->allocate(messages->nbytes);
  messages->means = device->allocate(messages->nbytes);
  if (enqueues) messages->means_before = device->allocate(messages->nbytes);
  return messages;
}

BucketRecordPtr make_record(const Bucket& bucket, const Engine& engine, const Place& place, c10::Device device,
                            const PassWeight* weight, Parameters* parameters) {
  const Gradients& gradients = *bucket.gradients;
  TORCH_CHECK(gradients.device() == device, "fusedcomm: ", bucket_name(bucket.index), " is on ", gradients.device(),
              ", and fusedcomm was attached for gradients on ", device, ": all gradients must be on that device");
  auto record = std::make_shared<BucketRecord>();
  record->dtype = gradients.dtype();
  record->factor = bucket.factor();
  record->has_heads = weight != nullptr;
  record->passthrough = !is_carried(gradients);
  record->in_one_run = gradients.in_one_run();
  record->has_rows = bucket.rows() != nullptr;
  if (record->has_rows) record->own_dtype = bucket.rows()->own.scalar_type();
  for (size_t i = 0; i < bucket.parameters.size(); ++i) {
    const at::Tensor& parameter = bucket.parameters[i];
    const SlicePlace& place_of_gradient = gradients.places()[i];
    BucketRecord::Member member{parameters->state_of(parameter), place_of_gradient.offset};
    const int64_t numel = member.state->numel();
    member.numel = numel / gradients.num_rows();
    TORCH_CHECK(record->passthrough || member.numel == place_of_gradient.numel,
                "fusedcomm: ", bucket_name(bucket.index), " has a gradient of ", place_of_gradient.numel,
                " elements for ", member.state->name, ", which has ", member.numel);
    record->numel += numel;
    record->parameters.push_back(parameter.unsafeGetTensorImpl());
    record->members.push_back(std::move(member));
  }
  // A row's plan is printed before its dtype is known.
  const auto element_nbytes = static_cast<double>(c10::elementSize(record->has_rows ? at::kFloat : record->dtype));
  record->label =
      make_label(bucket.index, record->parameter_names(), static_cast<double>(record->numel) * element_nbytes);
  if (record->passthrough) return record;
  if (bucket.of_pass() && bucket.of_pass()->check) bucket.of_pass()->check();
  TORCH_CHECK(!record->in_one_run || gradients.front().is_contiguous(), "fusedcomm: ", record->label->text,
              " has gaps in memory, which fusedcomm does not support. Please report it with your DDP options.");
  plan(engine, bucket, record.get());
  prepare(&engine.device(), parameters, gradients, record.get());
  move_residuals(engine, place, weight ? weight->of_residuals() : 1, record.get(), gradients);
  if (engine.config().keeps_messages) {
    record->messages = make_messages(record->plan, &engine.device(), /*enqueues=*/!device.is_cpu());
  }
  return record;
}

// A copy of the record, with tables of where the gradients lie now.
BucketRecordPtr moved_record(const BucketRecord& record, const Gradients& gradients, Device* device,
                             Parameters* parameters) {
  auto moved = std::make_shared<BucketRecord>(record);
  for (size_t i = 0; i < moved->members.size(); ++i) moved->members[i].offset = gradients.places()[i].offset;
  prepare(device, parameters, gradients, moved.get());
  return moved;
}

}  // namespace

std::shared_ptr<const BucketLabel> make_label(size_t index, const std::vector<std::string>& parameters, double nbytes) {
  const std::string name = bucket_name(index);
  std::ostringstream label;
  label << name << " (";
  if (!parameters.empty()) label << parameters.front();
  if (parameters.size() > 1) label << " … " << parameters.back();
  label << "; " << parameters.size() << " parameters, " << nbytes / (1 << 20) << " MiB)";
  return std::make_shared<const BucketLabel>(name, label.str());
}

std::vector<std::string> BucketRecord::parameter_names() const {
  std::vector<std::string> names;
  for (const Member& member : members) names.push_back(member.state->name);
  return names;
}

BucketRecordPtr BucketRecords::of(const Bucket& bucket, const PassWeight* weight, Parameters* parameters) {
  const size_t index = bucket.index;
  if (records_.size() <= index) records_.resize(index + 1);
  others_.resize(records_.size());
  BucketRecordPtr& record = records_[index];
  const bool is_new = !record || !is_of(*record, bucket, weight != nullptr) || !has_residuals(*record);
  if (is_new) {
    others_[index] = nullptr;
    record = make_record(bucket, engine_, place_, device_, weight, parameters);
    // Parameters may have come from records that are kept, whose residuals would only take memory.
    for (size_t i = 0; !bucket.of_pass() && i < records_.size(); ++i) {
      if (records_[i] && !has_residuals(*records_[i])) records_[i] = others_[i] = nullptr;
    }
  } else if (!lies_as(*record, *bucket.gradients)) {
    BucketRecordPtr& last = others_[index];
    last.swap(record);
    if (!record || !lies_as(*record, *bucket.gradients)) {
      record = moved_record(*last, *bucket.gradients, &engine_.device(), parameters);
    }
  }
  // Records past the last bucket are from before a rebuild.
  if (bucket.ends_pass()) records_.resize(index + 1);
  return records_[index];
}

void BucketRecords::make_stale() {
  others_.clear();
  for (BucketRecordPtr& record : records_) {
    if (!record) continue;
    const auto stale = std::make_shared<BucketRecord>(*record);
    stale->is_stale = true;
    for (BucketRecord::Kept& kept : stale->kept) kept.residual = nullptr;
    record = stale;
  }
}

void attribute_nonfinite(const BucketRecord& record, const Gradients& gradients, const BucketJob& job, int64_t chunk) {
  // Gradients that are summed in place have been scaled already.
  const float scale = job.plan->in_place ? 1.0F : job.pack_scale();
  for (size_t payload = 0; payload < record.kept.size(); ++payload) {
    const BucketLayout& layout = job.plan->encoded_layouts()[payload];
    for (const bool exact : {false, true}) {
      const BucketRecord::Kept& kept = record.kept[payload];
      const SlicePlaces slices = !record.has_rows      ? slices_of(record, gradients.places(), payload, exact)
                                 : record.plan.gathers ? (exact ? kept.own_exact : kept.own_lossy)
                                 : exact               ? kept.exact
                                                       : kept.lossy;
      const Range range = of_chunk(layout, chunk, exact);
      int64_t before = 0;  // elements before the slice
      for (size_t i = 0; i < slices.places.size(); ++i) {
        const SlicePlace& place = slices.places[i];
        const int64_t begin = std::max(range.begin, before), end = std::min(range.end, before + place.numel);
        if (begin < end && slices.states[i]) {
          slices.states[i]->num_nonfinite +=
              count_nonfinite(gradients, place.offset + begin - before, end - begin, scale);
        }
        before += place.numel;
      }
    }
  }
}

}  // namespace fusedcomm
