#include "gradients/bucket_record.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <sstream>

#include "gradients/grad_dtype.h"

namespace fusedcomm {
namespace {

bool is_carried(const Gradients& gradients) { return !gradients.is_sparse() && has_wire_format(gradients.dtype()); }

void plan(const Engine& engine, BucketRecord* record) {
  const WireConfig& config = engine.config();
  int64_t exact_numel = 0;
  std::vector<int64_t> lossy_numels(config.others.size() + 1, 0);
  for (const BucketRecord::Member& member : record->members) {
    const int wire = member.state->wire;
    (wire == kExactWire ? exact_numel : lossy_numels[static_cast<size_t>(wire)]) += member.numel;
  }
  record->plan = plan_bucket(config, engine.world_size(), grad_dtype_of(record->dtype), exact_numel, lossy_numels,
                             record->in_one_run, record->factor);
  record->streams.resize(record->plan.layouts.size());
  std::vector<bool> begun(record->streams.size(), false);
  for (BucketRecord::Member& member : record->members) {
    const std::vector<int>& wires = record->plan.wires;
    member.exact = member.state->wire == kExactWire && record->plan.exact_numel() != 0;
    if (member.exact) continue;
    if (member.numel == 0) continue;  // its wire need not be in the bucket, and any payload will do
    if (!wires.empty()) {
      const auto found = std::find(wires.begin(), wires.end(), member.state->wire);
      member.payload = static_cast<size_t>(found - wires.begin());
    }
    if (!begun[member.payload]) record->streams[member.payload].first_parameter = member.state->number;
    begun[member.payload] = true;
  }
}

// Makes the device's tables of the record's bucket.
void prepare(Device* device, Parameters* parameters, BucketRecord* record) {
  for (size_t payload = 0; payload < record->streams.size(); ++payload) {
    std::vector<SlicePlace> lossy, exact;
    std::vector<ParameterStatePtr> states, exact_states;
    for (const BucketRecord::Member& member : record->members) {
      if (member.payload != payload) continue;
      (member.exact ? exact : lossy).push_back({member.offset, member.numel});
      (member.exact ? exact_states : states).push_back(member.state);
    }
    BucketRecord::Payload& stream = record->streams[payload];
    stream.tables = device->prepare(record->plan.packed_layouts()[payload], lossy, exact);
    if (!stream.tables) continue;
    if (record->plan.on_two_levels()) {
      stream.unpack_tables = device->prepare(record->plan.layouts[payload], lossy, exact);
    }
    states.insert(states.end(), exact_states.begin(), exact_states.end());
    parameters->count_with(stream.tables, std::move(states));
  }
}

// Makes the record's residuals from those of its parameters. A residual that can no longer be kept is added to the
// gradients.
void move_residuals(const Engine& engine, const Place& place, BucketRecord* record, const Gradients& gradients) {
  const WireConfig& config = engine.config();
  // Without error feedback there may still be a loaded residual, which another wire has left.
  const auto is_loaded = [](const BucketRecord::Member& member) { return member.state->loaded.defined(); };
  if (!config.feedback && std::none_of(record->members.begin(), record->members.end(), is_loaded)) return;
  at::NoGradGuard no_grad;
  const BucketPlan& plan = record->plan;
  const bool keeps = config.feedback && plan.sums_codes();
  for (size_t payload = 0; keeps && payload < record->streams.size(); ++payload) {
    const BucketLayout& layout = plan.layouts[payload];
    if (layout.wire == Wire::kFp32 || layout.lossy_numel == 0) continue;
    auto& residual = record->streams[payload].residual;
    residual = std::make_shared<ResidualBuffer>(layout, *config.feedback, plan.pack_scale, plan.reduce_scale, place,
                                                gradients.device(),
                                                /*of_first_only=*/!plan.encodes_sums());
    for (const at::Tensor& storage : residual->storages()) engine.device().will_use(storage);
  }
  // No old residual is released before all of them have been copied.
  std::vector<at::Tensor> values(record->streams.size());  // by payload; undefined if there is no residual
  std::vector<int64_t> begins(record->streams.size(), 0);
  for (size_t i = 0; i < record->members.size(); ++i) {
    const BucketRecord::Member& member = record->members[i];
    const at::Tensor left_out = member.state->left_out();
    const bool is_kept = !member.exact && record->streams[member.payload].residual;
    if (is_kept && left_out.defined()) {
      at::Tensor& all = values[member.payload];
      if (!all.defined()) all = at::zeros({plan.layouts[member.payload].lossy_numel}, left_out.options());
      all.narrow(0, begins[member.payload], member.numel).copy_(left_out);
    } else if (left_out.defined()) {
      gradients.view(i).add_(left_out);
    }
    if (!member.exact) begins[member.payload] += member.numel;
  }
  for (size_t payload = 0; payload < values.size(); ++payload) {
    if (values[payload].defined()) values[payload] = record->streams[payload].residual->set_values(values[payload]);
  }
  begins.assign(begins.size(), 0);
  for (size_t i = 0; i < record->members.size(); ++i) {
    const BucketRecord::Member& member = record->members[i];
    const at::Tensor& rest = values[member.payload];
    int64_t& begin = begins[member.payload];
    if (rest.defined() && !member.exact) gradients.view(i).add_(rest.narrow(0, begin, member.numel));
    member.state->loaded = at::Tensor();
    member.state->residual = member.exact ? nullptr : record->streams[member.payload].residual;
    member.state->residual_begin = begin;
    if (!member.exact) begin += member.numel;
  }
}

template <typename T>
int64_t count_nonfinite(const T* values, int64_t numel, float scale) {
  int64_t count = 0;
  for (int64_t i = 0; i < numel; ++i) count += !std::isfinite(static_cast<float>(values[i]) * scale);
  return count;
}

// `begin`: elements from the gradients' origin.
int64_t count_nonfinite(const Gradients& gradients, int64_t begin, int64_t numel, float scale) {
  const std::byte* const data = gradients.origin() + begin * static_cast<int64_t>(c10::elementSize(gradients.dtype()));
  switch (gradients.dtype()) {
    case at::kFloat:
      return count_nonfinite(reinterpret_cast<const float*>(data), numel, scale);
    case at::kBFloat16:
      return count_nonfinite(reinterpret_cast<const at::BFloat16*>(data), numel, scale);
    default:
      return count_nonfinite(reinterpret_cast<const at::Half*>(data), numel, scale);
  }
}

// The range of the elements of a stream, exact or lossy, that are in a chunk.
Range of_chunk(const BucketLayout& layout, int64_t chunk, bool exact) {
  const int64_t last = layout.num_parts - 1;
  if (exact) return {layout.exact_range(chunk, 0).begin, layout.exact_range(chunk, last).end};
  return {layout.lossy_range(chunk, 0).begin, layout.lossy_range(chunk, last).end};
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

bool BucketRecord::is_of(const Bucket& bucket) const {
  const Gradients& gradients = *bucket.gradients;
  if (is_stale || factor != bucket.factor || dtype != gradients.dtype() || passthrough == is_carried(gradients))
    return false;
  if (in_one_run != gradients.in_one_run() || numel != gradients.numel()) return false;
  if (parameters.size() != bucket.parameters.size()) return false;
  return std::equal(
      parameters.begin(), parameters.end(), bucket.parameters.begin(), bucket.parameters.end(),
      [](c10::TensorImpl* known, const at::Tensor& parameter) { return known == parameter.unsafeGetTensorImpl(); });
}

bool BucketRecord::has_residuals() const {
  return passthrough || std::all_of(members.begin(), members.end(), [this](const Member& member) {
           return member.state->residual == (member.exact ? nullptr : streams[member.payload].residual);
         });
}

bool BucketRecord::lies_as(const Gradients& gradients) const {
  if (in_one_run || std::none_of(streams.begin(), streams.end(), [](const Payload& s) { return s.tables; }))
    return true;
  return std::equal(members.begin(), members.end(), gradients.places().begin(), gradients.places().end(),
                    [](const Member& member, const GradientPlace& place) { return member.offset == place.offset; });
}

std::shared_ptr<BucketRecord> make_record(const Bucket& bucket, const Engine& engine, const Place& place,
                                          c10::Device device, Parameters* parameters) {
  const Gradients& gradients = *bucket.gradients;
  TORCH_CHECK(gradients.device() == device, "fusedcomm: ", bucket_name(bucket.index), " is on ", gradients.device(),
              ", and fusedcomm was attached for gradients on ", device, ": all gradients must be on that device");
  auto record = std::make_shared<BucketRecord>();
  record->dtype = gradients.dtype();
  record->factor = bucket.factor;
  record->passthrough = !is_carried(gradients);
  record->in_one_run = gradients.in_one_run();
  for (size_t i = 0; i < bucket.parameters.size(); ++i) {
    const at::Tensor& parameter = bucket.parameters[i];
    const GradientPlace& place_of_gradient = gradients.places()[i];
    BucketRecord::Member member{parameters->state_of(parameter), place_of_gradient.offset};
    member.numel = member.state->numel();
    TORCH_CHECK(record->passthrough || member.numel == place_of_gradient.numel,
                "fusedcomm: ", bucket_name(bucket.index), " has a gradient of ", place_of_gradient.numel,
                " elements for ", member.state->name, ", which has ", member.numel);
    record->numel += member.numel;
    record->parameters.push_back(parameter.unsafeGetTensorImpl());
    record->members.push_back(std::move(member));
  }
  const double nbytes = static_cast<double>(record->numel) * c10::elementSize(record->dtype);
  record->label = make_label(bucket.index, record->parameter_names(), nbytes);
  if (record->passthrough) return record;
  if (bucket.check) bucket.check();
  TORCH_CHECK(!record->in_one_run || gradients.front().is_contiguous(), "fusedcomm: ", record->label->text,
              " has gaps in memory, which fusedcomm does not support. Please report it with your DDP options.");
  plan(engine, record.get());
  prepare(&engine.device(), parameters, record.get());
  move_residuals(engine, place, record.get(), gradients);
  return record;
}

std::shared_ptr<BucketRecord> moved_record(const BucketRecord& record, const Gradients& gradients, Device* device,
                                           Parameters* parameters) {
  auto moved = std::make_shared<BucketRecord>(record);
  for (size_t i = 0; i < moved->members.size(); ++i) moved->members[i].offset = gradients.places()[i].offset;
  prepare(device, parameters, moved.get());
  return moved;
}

void attribute_nonfinite(const BucketRecord& record, const Gradients& gradients, const BucketJob& job, int64_t chunk) {
  // Gradients that are summed in place have been scaled already.
  const float scale = job.plan->in_place ? 1.0F : job.plan->pack_scale;
  // Elements of the members so far, by payload: lossy and exact.
  std::vector<std::array<int64_t, 2>> seen(record.streams.size(), {0, 0});
  for (size_t i = 0; i < record.members.size(); ++i) {
    const BucketRecord::Member& member = record.members[i];
    int64_t& before = seen[member.payload][member.exact];
    const Range range = of_chunk(job.plan->layouts[member.payload], chunk, member.exact);
    const int64_t begin = std::max(range.begin, before);
    const int64_t end = std::min(range.end, before + member.numel);
    if (begin < end) {
      const int64_t from = gradients.places()[i].offset + begin - before;
      member.state->num_nonfinite += count_nonfinite(gradients, from, end - begin, scale);
    }
    before += member.numel;
  }
}

}  // namespace fusedcomm
