#include "grad_hook.h"

#include <ATen/ATen.h>
#include <pybind11/pybind11.h>

#include <algorithm>
#include <cmath>
#include <sstream>
#include <utility>

#include "foreign.h"
#include "grad_dtype.h"

namespace fusedcomm {
namespace {

constexpr size_t kMaxVerifications = 256;

bool carried_by_codec(const at::Tensor& buffer) {
  return buffer.layout() == at::kStrided && has_wire_format(buffer.scalar_type());
}

// Elements the parameter has in its bucket's buffer: complex buckets arrive as floats of twice the numel.
int64_t numel_in_bucket(const at::Tensor& parameter) { return parameter.numel() * (parameter.is_complex() ? 2 : 1); }

std::shared_ptr<const BucketLabel> make_label(size_t index, const BucketRecord& record, double nbytes) {
  const std::string name = "bucket " + std::to_string(index);
  std::ostringstream label;
  label << name << " (";
  if (!record.members.empty()) label << record.members.front().state->name;
  if (record.members.size() > 1) label << " … " << record.members.back().state->name;
  label << "; " << record.members.size() << " parameters, " << nbytes / (1 << 20) << " MiB)";
  return std::make_shared<const BucketLabel>(name, label.str());
}

std::vector<at::Tensor> storages_of(const at::Tensor& buffer) {
  if (buffer.is_sparse()) return {buffer._indices(), buffer._values()};
  return {buffer};
}

template <typename T>
int64_t count_nonfinite(const T* values, int64_t numel, float scale) {
  int64_t count = 0;
  for (int64_t i = 0; i < numel; ++i) count += !std::isfinite(static_cast<float>(values[i]) * scale);
  return count;
}

int64_t count_nonfinite(const at::Tensor& flat, int64_t begin, int64_t numel, float scale) {
  switch (flat.scalar_type()) {
    case at::kFloat:
      return count_nonfinite(flat.const_data_ptr<float>() + begin, numel, scale);
    case at::kBFloat16:
      return count_nonfinite(flat.const_data_ptr<at::BFloat16>() + begin, numel, scale);
    default:
      return count_nonfinite(flat.const_data_ptr<at::Half>() + begin, numel, scale);
  }
}

// Which parameters the chunk's non-finite elements belong to. Rare, so it reads the chunk a second time.
void attribute_nonfinite(const BucketRecord& record, const at::Tensor& flat, const BucketJob& job, int64_t chunk) {
  const BucketLayout& layout = job.plan.layout;
  const int64_t last_part = layout.num_parts - 1;
  Range lossy{layout.lossy_range(chunk, 0).begin, layout.lossy_range(chunk, last_part).end};
  const Range exact{layout.exact_range(chunk, 0).begin, layout.exact_range(chunk, last_part).end};
  if (job.plan.in_place) lossy = {0, flat.numel()};
  // In place they have been scaled already.
  const float scale = job.plan.in_place ? 1.0F : job.plan.pack_scale;
  int64_t lossy_seen = 0, exact_seen = 0;
  for (const BucketRecord::Member& member : record.members) {
    const bool in_exact = member.state->exempt && layout.exact_numel != 0;
    int64_t& seen = in_exact ? exact_seen : lossy_seen;
    const Range& range = in_exact ? exact : lossy;
    const int64_t begin = std::max(range.begin, seen);
    const int64_t end = std::min(range.end, seen + member.numel);
    if (begin < end) {
      member.state->num_nonfinite += count_nonfinite(flat, member.offset + begin - seen, end - begin, scale);
    }
    seen += member.numel;
  }
}

}  // namespace

GradHook::GradHook(std::shared_ptr<Engine> engine, std::shared_ptr<C10dTransport> transport,
                   const std::vector<Parameter>& parameters, bool exempt_1d, c10::Device device, int64_t verify_every)
    : engine_(std::move(engine)),
      transport_(std::move(transport)),
      exempt_1d_(exempt_1d),
      device_(device),
      verify_every_(verify_every) {
  for (const Parameter& parameter : parameters) {
    auto state = std::make_shared<ParameterState>();
    state->parameter = parameter.tensor;
    state->name = parameter.name;
    state->exempt = parameter.exempt;
    states_.emplace(parameter.tensor.unsafeGetTensorImpl(), std::move(state));
  }
}

GradHook::~GradHook() {
  // Both join threads, and those may be releasing a tensor that Python knows, which takes the GIL.
  const auto end = [this] {
    engine_.reset();
    transport_.reset();
  };
  if (PyGILState_Check()) {
    pybind11::gil_scoped_release no_gil;
    end();
  } else {
    end();
  }
}

c10::intrusive_ptr<c10::ivalue::Future> GradHook::run(c10d::GradBucket& bucket) {
  engine_->device().check_caller();
  const at::Tensor buffer = bucket.getBuffer();  // `bucket` lives on the reducer's stack; the tensor is shared
  auto record = record_of(bucket);
  // With its device, so that completing it records an event there and waiting for it waits for that.
  std::vector<c10::Device> devices;
  if (!buffer.is_cpu()) devices.push_back(buffer.device());
  auto future = c10::make_intrusive<c10::ivalue::Future>(c10::TensorType::get(), std::move(devices));

  for (const at::Tensor& part : storages_of(buffer)) engine_->device().will_use(part);
  auto job = std::make_shared<BucketJob>();
  auto result = std::make_shared<at::Tensor>(buffer);
  job->owner = result;
  job->label = record->label;
  job->is_last = bucket.isLast();
  job->on_done = [future, result](std::exception_ptr error) {
    if (error) {
      future->setError(std::move(error));
    } else {
      future->markCompleted(*result);
    }
  };

  if (record->foreign) {
    if (buffer.is_sparse()) {
      TORCH_WARN_ONCE("fusedcomm: ", job->label->text, " is sparse and travels exactly, uncompressed");
    }
    ForeignStages stages =
        buffer.is_sparse() ? sparse_stages(transport_, buffer, result) : dense_stages(transport_, buffer);
    // On streams, tensors made on the way are handed back to the stream that made them: so one stream makes and uses
    // all.
    if (!buffer.is_cpu()) stages = on_wire_lane(std::move(stages));
    engine_->submit_foreign(std::move(job), std::move(stages));
    return future;
  }

  job->grad_nbytes = static_cast<int64_t>(buffer.nbytes());
  job->plan = record->plan;
  job->on_nonfinite = [record, buffer](const BucketJob& packed, int64_t chunk) {
    attribute_nonfinite(*record, buffer, packed, chunk);
  };
  // Addresses are taken anew each time: the reducer may allocate its buckets at every backward pass.
  auto* data = static_cast<std::byte*>(buffer.data_ptr());
  job->streams.origin = data;
  job->streams.tables = record->tables;
  const GradDtype dtype = grad_dtype_of(record->dtype);
  for (const BucketRecord::Member& member : record->members) {
    Stream& stream =
        member.state->exempt && record->plan.layout.exact_numel != 0 ? job->streams.exact : job->streams.lossy;
    stream.append(data + member.offset * grad_nbytes(dtype), member.numel, dtype);
  }
  const bool due = is_due(bucket);
  if (due && !record->plan.in_place) {
    submit_verified(std::move(job), buffer);
  } else {
    engine_->submit(std::move(job));
  }
  return future;
}

bool GradHook::is_due(const c10d::GradBucket& bucket) {
  if (verify_every_ == 0) return false;
  std::lock_guard<std::mutex> lock(mutex_);
  const auto turn = static_cast<size_t>(step_ / verify_every_) % num_buckets_;
  const bool due = step_ % verify_every_ == 0 && bucket.getIndex() == turn;
  if (bucket.isLast()) {
    ++step_;
    num_buckets_ = bucket.getIndex() + 1;
  }
  return due;
}

void GradHook::submit_verified(std::shared_ptr<BucketJob> job, const at::Tensor& buffer) {
  at::NoGradGuard no_grad;
  const auto exact = buffer.to(at::kFloat, /*non_blocking=*/false, /*copy=*/true).mul_(1.0 / transport_->world_size());
  engine_->device().will_use(exact);
  auto check = std::make_shared<BucketJob>();
  check->owner = job->owner;
  check->counted = false;
  check->label = std::make_shared<const BucketLabel>(job->label->name + " verified",
                                                     "the exact sum that verifies " + job->label->text);
  check->on_done = std::move(job->on_done);
  // The engine fails all that follows a failure, so the check's end tells of both.
  job->on_done = [](std::exception_ptr) {};

  Verification verification;
  verification.label = job->label;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    verification.step = step_ - (job->is_last ? 1 : 0);
  }
  ForeignStages stages;
  stages.scatter = [transport = transport_, exact](Lane::Completion done) {
    transport->all_reduce_tensor(Channel::kScatter, exact, std::move(done));
  };
  // On the lane, and so after the end, of the bucket's own unpacking.
  stages.unpack = [this, verification, exact, buffer]() mutable {
    at::NoGradGuard inner_no_grad;
    verification.error_norm = at::linalg_vector_norm(at::sub(buffer.to(at::kFloat), exact), 2, {}, false, at::kDouble);
    verification.exact_norm = at::linalg_vector_norm(exact, 2, {}, false, at::kDouble);
    std::lock_guard<std::mutex> lock(mutex_);
    verifications_.push_back(std::move(verification));
    if (verifications_.size() > kMaxVerifications) verifications_.pop_front();
  };
  engine_->submit(std::move(job));
  engine_->submit_foreign(std::move(check), std::move(stages));
}

std::vector<Verification> GradHook::verifications() const {
  std::lock_guard<std::mutex> lock(mutex_);
  take_device_counts();  // which waits for the streams that made the norms, too
  return {verifications_.begin(), verifications_.end()};
}

std::shared_ptr<const BucketRecord> GradHook::record_of(const c10d::GradBucket& bucket) {
  const at::Tensor& buffer = bucket.getBuffer();
  const std::vector<at::Tensor> parameters = bucket.getParameters();
  const size_t index = bucket.getIndex();
  std::lock_guard<std::mutex> lock(mutex_);
  if (records_.size() <= index) records_.resize(index + 1);
  auto& record = records_[index];
  const auto same = [&] {
    if (!record || record->dtype != buffer.scalar_type() || record->parameters.size() != parameters.size())
      return false;
    for (size_t i = 0; i < parameters.size(); ++i) {
      if (record->parameters[i] != parameters[i].unsafeGetTensorImpl()) return false;
    }
    return record->foreign == !carried_by_codec(buffer);
  };
  if (!same()) record = make_record(buffer, parameters, index);
  // An index past the last bucket is left over from before a rebuild.
  if (bucket.isLast()) records_.resize(index + 1);
  return records_[index];
}

std::shared_ptr<const BucketRecord> GradHook::make_record(const at::Tensor& buffer,
                                                          const std::vector<at::Tensor>& parameters, size_t index) {
  TORCH_CHECK(buffer.device() == device_, "fusedcomm: bucket ", index, " is on ", buffer.device(),
              ", and fusedcomm was attached for gradients on ", device_, "; gradients on one device are supported");
  auto record = std::make_shared<BucketRecord>();
  record->dtype = buffer.scalar_type();
  record->foreign = !carried_by_codec(buffer);
  int64_t offset = 0, exact_numel = 0;
  for (const at::Tensor& parameter : parameters) {
    BucketRecord::Member member{state_of(parameter), offset, numel_in_bucket(parameter)};
    offset += member.numel;
    if (member.state->exempt) exact_numel += member.numel;
    record->parameters.push_back(parameter.unsafeGetTensorImpl());
    record->members.push_back(std::move(member));
  }
  record->numel = offset;
  record->label = make_label(index, *record, static_cast<double>(offset) * c10::elementSize(record->dtype));
  if (!record->foreign) {
    TORCH_CHECK(buffer.is_contiguous() && buffer.numel() == offset, "fusedcomm: ", record->label->text, " holds ",
                buffer.numel(), " elements where its parameters have ", offset,
                ": this layout of buckets is not known. Please report it with your DDP options.");
    record->plan = plan_bucket(engine_->config(), engine_->world_size(), grad_dtype_of(record->dtype), exact_numel,
                               offset - exact_numel);
    prepare(record.get());
  }
  return record;
}

void GradHook::prepare(BucketRecord* record) {
  std::vector<SlicePlace> lossy, exact;
  Counted counted;
  std::vector<std::shared_ptr<ParameterState>> exact_states;
  for (const BucketRecord::Member& member : record->members) {
    const bool in_exact = member.state->exempt && record->plan.layout.exact_numel != 0;
    (in_exact ? exact : lossy).push_back({member.offset, member.numel});
    (in_exact ? exact_states : counted.states).push_back(member.state);
  }
  record->tables = engine_->device().prepare(record->plan.layout, lossy, exact);
  if (!record->tables) return;
  counted.tables = record->tables;
  counted.states.insert(counted.states.end(), exact_states.begin(), exact_states.end());
  counted.taken.resize(counted.states.size());
  counted_.push_back(std::move(counted));
}

void GradHook::take_device_counts() const {
  for (Counted& counted : counted_) {
    const std::vector<int64_t> now = counted.tables->nonfinite();
    for (size_t i = 0; i < now.size(); ++i) {
      counted.states[i]->num_nonfinite += now[i] - counted.taken[i];
      num_nonfinite_on_device_ += now[i] - counted.taken[i];
    }
    counted.taken = now;
  }
  // Nobody else holds the tables of a bucket that was rebuilt, and nothing more will be counted in them.
  counted_.erase(std::remove_if(counted_.begin(), counted_.end(),
                                [](const Counted& counted) { return counted.tables.use_count() == 1; }),
                 counted_.end());
}

EngineStats GradHook::stats() const {
  EngineStats stats = engine_->stats();
  std::lock_guard<std::mutex> lock(mutex_);
  take_device_counts();
  stats.num_nonfinite += num_nonfinite_on_device_;
  return stats;
}

std::shared_ptr<ParameterState> GradHook::state_of(const at::Tensor& parameter) {
  auto& state = states_[parameter.unsafeGetTensorImpl()];
  if (!state) {
    std::ostringstream name;
    name << "parameter " << states_.size() - 1 << " of shape " << parameter.sizes();
    state = std::make_shared<ParameterState>();
    state->parameter = parameter;
    state->name = name.str();
    state->exempt = exempt_1d_ && parameter.dim() <= 1;
  }
  return state;
}

std::vector<GradHook::ParameterCount> GradHook::nonfinite_by_parameter() const {
  std::lock_guard<std::mutex> lock(mutex_);
  take_device_counts();
  std::vector<ParameterCount> counts;
  for (const auto& [impl, state] : states_) {
    if (state->num_nonfinite != 0) counts.push_back({state->name, state->num_nonfinite});
  }
  return counts;
}

void GradHook::restore_nonfinite(const std::vector<ParameterCount>& counts) {
  std::lock_guard<std::mutex> lock(mutex_);
  take_device_counts();
  std::unordered_map<std::string, ParameterState*> by_name;
  for (const auto& [impl, state] : states_) by_name.emplace(state->name, state.get());
  for (const ParameterCount& count : counts) {
    TORCH_CHECK_VALUE(by_name.count(count.name) != 0, "fusedcomm: the state has a parameter '", count.name,
                      "' which this model does not have");
  }
  for (const ParameterCount& count : counts) by_name[count.name]->num_nonfinite = count.num_nonfinite;
}

std::vector<std::shared_ptr<const BucketRecord>> GradHook::buckets() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return records_;
}

}  // namespace fusedcomm
