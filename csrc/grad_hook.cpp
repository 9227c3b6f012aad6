#include "grad_hook.h"

#include <ATen/ATen.h>
#include <pybind11/pybind11.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <new>
#include <sstream>
#include <tuple>
#include <utility>

#include "foreign.h"
#include "grad_dtype.h"
#include "wire_names.h"

namespace fusedcomm {
namespace {

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

using FuturePtr = c10::intrusive_ptr<c10::ivalue::Future>;

// With its device, so that completing it records an event there and waiting for it waits for that.
FuturePtr make_future(c10::Device device) {
  std::vector<c10::Device> devices;
  if (!device.is_cpu()) devices.push_back(device);
  return c10::make_intrusive<c10::ivalue::Future>(c10::TensorType::get(), std::move(devices));
}

// `result` is read when the job is done: a sparse bucket's is another tensor then.
std::function<void(std::exception_ptr)> completing(FuturePtr future, std::shared_ptr<at::Tensor> result) {
  return [future = std::move(future), result = std::move(result)](std::exception_ptr error) {
    if (error) {
      future->setError(std::move(error));
    } else {
      future->markCompleted(*result);
    }
  };
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

// The elements of a chunk that one of its streams has.
Range of_chunk(const BucketLayout& layout, int64_t chunk, bool exact) {
  const int64_t last = layout.num_parts - 1;
  if (exact) return {layout.exact_range(chunk, 0).begin, layout.exact_range(chunk, last).end};
  return {layout.lossy_range(chunk, 0).begin, layout.lossy_range(chunk, last).end};
}

// Which parameters the chunk's non-finite elements belong to. Rare, so it reads the chunk a second time.
void attribute_nonfinite(const BucketRecord& record, const at::Tensor& flat, const BucketJob& job, int64_t chunk) {
  // In place they have been scaled already.
  const float scale = job.plan.in_place ? 1.0F : job.plan.pack_scale;
  std::vector<std::array<int64_t, 2>> seen(record.streams.size(), {0, 0});  // by payload, lossy and exact
  for (const BucketRecord::Member& member : record.members) {
    int64_t& before = seen[member.payload][member.exact];
    const Range range =
        job.plan.in_place ? Range{0, flat.numel()} : of_chunk(job.plan.layouts[member.payload], chunk, member.exact);
    const int64_t begin = std::max(range.begin, before);
    const int64_t end = std::min(range.end, before + member.numel);
    if (begin < end) {
      member.state->num_nonfinite += count_nonfinite(flat, member.offset + begin - before, end - begin, scale);
    }
    before += member.numel;
  }
}

// The encoder that error feedback and noise begin with: what is packed for ranks of the same host is neither.
Encoding& first_encoding(const BucketRecord& record, Payload* payload) {
  return record.plan.on_two_levels() ? payload->local_reduce : payload->pack;
}

// What a parameter has left out so far, fp32 [numel]; undefined if it is nothing.
at::Tensor left_out_of(const ParameterState& state, int64_t numel) {
  if (state.loaded.defined() || !state.residual) return state.loaded;
  return state.residual->values(state.residual_begin, numel);
}

}  // namespace

GradHook::GradHook(std::shared_ptr<Engine> engine, std::shared_ptr<C10dTransport> transport,
                   const std::vector<Parameter>& parameters, c10::Device device, const Options& options)
    : engine_(std::move(engine)),
      transport_(std::move(transport)),
      options_(options),
      device_(device),
      process_(getpid()),
      knows_parameters_(!parameters.empty()),
      guard_(options.guard, engine_.get(), transport_.get()) {
  for (const Parameter& parameter : parameters) {
    auto state = std::make_shared<ParameterState>();
    state->parameter = parameter.tensor;
    state->name = parameter.name;
    state->number = static_cast<uint32_t>(states_.size());
    state->wire = parameter.wire;
    states_.emplace(parameter.tensor.unsafeGetTensorImpl(), std::move(state));
  }
}

GradHook::~GradHook() {
  // Both join threads, and those may be releasing a tensor that Python knows, which takes the GIL.
  const auto end = [this] {
    if (getpid() != process_) {
      // A child of fork() has none of the threads that would be waited for.
      new auto(std::make_tuple(std::move(watch_), std::move(engine_), std::move(transport_)));
      return;
    }
    watch_.reset();
    if (engine_->has_failed()) transport_->give_up();
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

void GradHook::watch(const StorePtr& store, const WatchOptions& options) {
  TORCH_CHECK(!watch(), "fusedcomm: this engine is watched already");
  const auto watch = std::make_shared<Watch>(engine_->board(), engine_->shared_device(), store, options);
  // Transfers that outlive the engine may still fail.
  engine_->explain_failures_with([weak = std::weak_ptr<Watch>(watch)](const std::string& failure) {
    const auto alive = weak.lock();
    return alive ? alive->explain(failure) : std::string();
  });
  std::lock_guard<std::mutex> lock(watch_mutex_);
  watch_ = watch;
}

void GradHook::unwatch() {
  std::unique_lock<std::mutex> lock(watch_mutex_);
  const std::shared_ptr<Watch> watch = std::move(watch_);
  watch_ = nullptr;
  lock.unlock();
  if (watch) watch->stop();
}

std::shared_ptr<Watch> GradHook::watch() const {
  std::lock_guard<std::mutex> lock(watch_mutex_);
  return watch_;
}

void GradHook::stop(const std::string& reason) {
  // First: a failure may be waiting for what it finds.
  if (const auto watch = this->watch()) watch->stop();
  engine_->stop(reason);
}

void GradHook::leave(const std::string& reason) {
  transport_->give_up();
  stop(reason);
}

c10::intrusive_ptr<c10::ivalue::Future> GradHook::run(c10d::GradBucket& bucket) {
  engine_->device().check_caller();
  if (device_.is_cpu()) return hand_over(bucket);
  // What prepares a bucket waits for the device now and then, and so meets what failed there before.
  try {
    return hand_over(bucket);
  } catch (const c10::OutOfMemoryError&) {
    throw;  // which callers may know by its type
  } catch (const std::exception& error) {
    const auto* known = dynamic_cast<const c10::Error*>(&error);
    const std::string cause = known ? known->what_without_backtrace() : error.what();
    if (cause.rfind("fusedcomm: ", 0) == 0) throw;
    TORCH_CHECK(false, "fusedcomm: rank ", engine_->rank(), " of ", engine_->world_size(), ": the hand-over of ",
                text_of(bucket), " in step ", step(), " failed: ", cause);
  }
}

std::string GradHook::text_of(const c10d::GradBucket& bucket) {
  const std::vector<at::Tensor> parameters = bucket.getParameters();
  std::lock_guard<std::mutex> lock(mutex_);
  BucketRecord record;
  for (const at::Tensor& parameter : parameters) record.members.push_back({state_of(parameter)});
  return make_label(bucket.getIndex(), record, static_cast<double>(bucket.getBuffer().nbytes()))->text;
}

c10::intrusive_ptr<c10::ivalue::Future> GradHook::hand_over(c10d::GradBucket& bucket) {
  const at::Tensor buffer = bucket.getBuffer();  // `bucket` lives on the reducer's stack; the tensor is shared
  const size_t index = bucket.getIndex();
  if (index == 0) begin_pass();
  std::unique_lock<std::mutex> lock(mutex_);
  const auto record = record_of(bucket);
  check_order(bucket, *record);
  const int64_t step = step_, pass = num_passes_;
  const size_t num_buckets = num_buckets_;
  if (bucket.isLast()) {
    ++step_;
    ++num_passes_;
    num_buckets_ = index + 1;
    notice_what_still_waits();
  }
  lock.unlock();

  auto future = make_future(device_);
  for (const at::Tensor& part : storages_of(buffer)) engine_->device().will_use(part);
  auto job = make_job(record, buffer, step);
  auto result = std::make_shared<at::Tensor>(buffer);
  job->owner = result;
  job->is_last = bucket.isLast();
  job->on_done = completing(future, result);

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
  if (guard_.is_measured(pass)) measure(job.get(), record, buffer, pass);
  guard_.submit(std::move(job), buffer, pass, index, num_buckets, record);
  return future;
}

void GradHook::begin_pass() {
  std::unique_lock<std::mutex> lock(mutex_);
  const int64_t pass = num_passes_;
  lock.unlock();
  for (const Guard::Failing& failing : guard_.begin_pass(pass)) fall_back(failing);
}

void GradHook::fall_back(const Guard::Failing& failing) {
  const int to = options_.fallback_wire;
  const Wire wire = to == kExactWire ? Wire::kFp32 : stream_wire(engine_->config(), to).wire;
  std::lock_guard<std::mutex> lock(mutex_);
  for (auto& record : records_) {
    // If it has been rebuilt, its turn will come again.
    if (!record || record->parameters != failing.record->parameters) continue;
    bool changes = false;
    for (const BucketRecord::Member& member : record->members) {
      const int from = member.state->wire;
      if (from == kExactWire || exactness(stream_wire(engine_->config(), from).wire) >= exactness(wire)) continue;
      member.state->wire = to;
      changes = true;
    }
    if (!changes) continue;
    const auto label = record->label;
    record = nullptr;
    if (transport_->rank() != 0) continue;
    notices_.push_back(c10::str("fusedcomm: the mean of ", label->text, " was off by ", failing.relative_error,
                                " of the exact one in step ", failing.pass,
                                ", more than fallback_error=", options_.guard.fallback_error,
                                ": its parameters travel in ", wire_name(wire), " from now on, on every rank"));
  }
}

std::shared_ptr<BucketJob> GradHook::make_job(const std::shared_ptr<const BucketRecord>& record,
                                              const at::Tensor& buffer, int64_t step) const {
  auto job = std::make_shared<BucketJob>();
  job->label = record->label;
  if (record->foreign) return job;
  job->grad_nbytes = static_cast<int64_t>(buffer.nbytes());
  job->plan = record->plan;
  job->on_nonfinite = [record, buffer](const BucketJob& packed, int64_t chunk) {
    attribute_nonfinite(*record, buffer, packed, chunk);
  };
  const WireConfig& config = engine_->config();
  // Addresses are taken anew each time: the reducer may allocate its buckets at every backward pass.
  auto* data = static_cast<std::byte*>(buffer.data_ptr());
  job->payloads.reserve(record->streams.size());
  for (const BucketRecord::Stream& stream : record->streams) {
    Payload payload;
    payload.streams.origin = data;
    payload.streams.tables = stream.tables;
    if (record->plan.sums_codes() && config.stochastic) {
      const auto host = static_cast<uint32_t>(transport_->place().host);
      const NoiseKey noise{config.seed, stream.first_parameter, static_cast<uint32_t>(step), 0};
      Encoding& first = first_encoding(*record, &payload);
      first.stochastic = payload.reduce.stochastic = true;
      first.noise = payload.reduce.noise = noise;
      first.noise.source =
          record->plan.on_two_levels() ? kFirstHostSource + host : static_cast<uint32_t>(transport_->rank());
      payload.reduce.noise.source = kReducerSource;
    }
    if (stream.residual) {
      first_encoding(*record, &payload).residual = stream.residual->of_first();
      payload.reduce.residual = stream.residual->of_second();
    }
    job->payloads.push_back(std::move(payload));
  }
  const GradDtype dtype = grad_dtype_of(record->dtype);
  for (const BucketRecord::Member& member : record->members) {
    BucketStreams& streams = job->payloads[member.payload].streams;
    Stream& stream = member.exact ? streams.exact : streams.lossy;
    stream.append(data + member.offset * grad_nbytes(dtype), member.numel, dtype);
  }
  for (size_t i = 0; i < record->streams.size(); ++i) {
    if (!record->streams[i].unpack_tables) continue;
    job->payloads[i].unpacked = job->payloads[i].streams;
    job->payloads[i].unpacked->tables = record->streams[i].unpack_tables;
  }
  return job;
}

void GradHook::measure(BucketJob* job, const std::shared_ptr<const BucketRecord>& record, const at::Tensor& buffer,
                       int64_t step) {
  if (record->plan.sum == Sum::kExact) return;
  at::NoGradGuard no_grad;
  const BucketPlan& plan = record->plan;
  // Encoders say what they leave out if they are given a residual. -0 added to a value is that value.
  auto residuals = std::make_shared<std::vector<std::shared_ptr<StreamResidual>>>();
  std::vector<std::shared_ptr<StreamResidual>> temporary(record->streams.size());
  for (size_t i = 0; i < record->streams.size(); ++i) {
    if (plan.layouts[i].lossy_numel == 0 || plan.layouts[i].wire == Wire::kFp32) continue;
    std::shared_ptr<StreamResidual> residual = record->streams[i].residual;
    if (!residual) {
      try {
        residual = std::make_shared<StreamResidual>(plan.layouts[i], ResidualFormat::kFp32, plan.pack_scale,
                                                    plan.reduce_scale, transport_->place(), device_,
                                                    /*of_first_only=*/true);
      } catch (const c10::Error&) {
        return;  // no memory: a figure for the statistics is not worth a step
      } catch (const std::bad_alloc&) {
        return;
      }
      residual->fill_first(-0.0F);
      for (const at::Tensor& storage : residual->storages()) engine_->device().will_use(storage);
      temporary[i] = residual;
    }
    residuals->push_back(std::move(residual));
  }
  for (size_t i = 0; i < temporary.size(); ++i) {
    if (temporary[i]) first_encoding(*record, &job->payloads[i]).residual = temporary[i]->of_first();
  }
  auto measurement = std::make_shared<Measurement>();
  measurement->step = step;
  job->before_pack = [measurement, buffer] {
    at::NoGradGuard inner_no_grad;
    measurement->norm = at::linalg_vector_norm(buffer, 2, {}, false, at::kDouble);
  };
  job->after_first_encoder = [this, measurement, residuals, name = record->label->name] {
    at::NoGradGuard inner_no_grad;
    at::Tensor squares = at::zeros_like(measurement->norm);
    for (const auto& residual : *residuals) squares.add_(residual->first_norm().square_());
    measurement->error_norm = squares.sqrt_();
    guard_.add(name, std::move(*measurement));
  };
}

std::shared_ptr<const BucketRecord> GradHook::record_of(const c10d::GradBucket& bucket) {
  const at::Tensor& buffer = bucket.getBuffer();
  const std::vector<at::Tensor> parameters = bucket.getParameters();
  const size_t index = bucket.getIndex();
  if (records_.size() <= index) records_.resize(index + 1);
  auto& record = records_[index];
  const auto same = [&] {
    if (!record || record->is_stale || record->dtype != buffer.scalar_type()) return false;
    if (record->parameters.size() != parameters.size()) return false;
    if (!buffer.is_sparse() && record->numel != buffer.numel()) return false;
    for (size_t i = 0; i < parameters.size(); ++i) {
      if (record->parameters[i] != parameters[i].unsafeGetTensorImpl()) return false;
    }
    return record->foreign == !carried_by_codec(buffer);
  };
  if (!same()) {
    if (carried_by_codec(buffer)) check_gradients(bucket);
    record = make_record(buffer, parameters, index);
  }
  // An index past the last bucket is left over from before a rebuild.
  if (bucket.isLast()) records_.resize(index + 1);
  return records_[index];
}

void GradHook::check_order(const c10d::GradBucket& bucket, const BucketRecord& record) {
  const size_t index = bucket.getIndex();
  // The passes of a reducer that skips buckets cannot be told apart here, and their number numbers the noise.
  const char* const why =
      ": DDP leaves out buckets that no rank has used, as with skip_all_reduce_unused_params=True, and fusedcomm needs "
      "all of them: make the DDP module without that option. (Or backward passes were given up in their middle: make "
      "it anew.)";
  TORCH_CHECK(index <= next_index_, "fusedcomm: bucket ", index, " was handed over where bucket ", next_index_,
              " should have been", why);
  // All buckets of static_graph's first pass have the index 0, and none is the last: so once may be that.
  if (index == 0) {
    const bool is_again = next_index_ != 0 && first_of_pass_ == &record;
    num_unfinished_ = is_again ? num_unfinished_ + 1 : 0;
    TORCH_CHECK(num_unfinished_ < 2, "fusedcomm: bucket 0 was handed over again and again, without bucket ",
                next_index_, " and those after it", why);
    first_of_pass_ = &record;
  }
  next_index_ = bucket.isLast() ? 0 : index + 1;
}

void GradHook::check_gradients(const c10d::GradBucket& bucket) {
  const std::vector<at::Tensor> parameters = bucket.getParameters();
  // Of complex ones a bucket has the shapes of what it does not hold.
  if (std::any_of(parameters.begin(), parameters.end(), [](const at::Tensor& p) { return p.is_complex(); })) return;
  const std::vector<at::Tensor> gradients = bucket.getGradients();
  for (size_t i = 0; i < std::min(gradients.size(), parameters.size()); ++i) {
    TORCH_CHECK(gradients[i].sizes() == parameters[i].sizes(), "fusedcomm: bucket ", bucket.getIndex(),
                " has a gradient of shape ", gradients[i].sizes(), " and says that it is of a parameter of shape ",
                parameters[i].sizes(),
                ": torch has kept the list of parameters of buckets that it has cut anew since, as "
                "after _update_process_group with gradients in another order. Make a new DDP module instead");
  }
}

std::shared_ptr<const BucketRecord> GradHook::make_record(const at::Tensor& buffer,
                                                          const std::vector<at::Tensor>& parameters, size_t index) {
  TORCH_CHECK(buffer.device() == device_, "fusedcomm: bucket ", index, " is on ", buffer.device(),
              ", and fusedcomm was attached for gradients on ", device_, "; gradients on one device are supported");
  auto record = std::make_shared<BucketRecord>();
  record->dtype = buffer.scalar_type();
  record->foreign = !carried_by_codec(buffer);
  int64_t offset = 0;
  for (const at::Tensor& parameter : parameters) {
    BucketRecord::Member member{state_of(parameter), offset, numel_in_bucket(parameter)};
    offset += member.numel;
    record->parameters.push_back(parameter.unsafeGetTensorImpl());
    record->members.push_back(std::move(member));
  }
  record->numel = offset;
  record->label = make_label(index, *record, static_cast<double>(offset) * c10::elementSize(record->dtype));
  guard_.forget(record->label->name);
  if (!record->foreign) {
    TORCH_CHECK(buffer.is_contiguous() && buffer.numel() == offset, "fusedcomm: ", record->label->text, " holds ",
                buffer.numel(), " elements where its parameters have ", offset,
                ": this layout of buckets is not known. Please report it with your DDP options.");
    plan(record.get());
    prepare(record.get());
    move_residuals(record.get(), buffer);
  }
  return record;
}

void GradHook::plan(BucketRecord* record) {
  const WireConfig& config = engine_->config();
  int64_t exact_numel = 0;
  std::vector<int64_t> lossy_numels(config.others.size() + 1, 0);
  for (const BucketRecord::Member& member : record->members) {
    const int wire = member.state->wire;
    (wire == kExactWire ? exact_numel : lossy_numels[static_cast<size_t>(wire)]) += member.numel;
  }
  record->plan = plan_bucket(config, engine_->world_size(), grad_dtype_of(record->dtype), exact_numel, lossy_numels);
  record->streams.resize(record->plan.layouts.size());
  std::vector<bool> begun(record->streams.size(), false);
  for (BucketRecord::Member& member : record->members) {
    const std::vector<int>& wires = record->plan.wires;
    member.exact = member.state->wire == kExactWire && record->plan.exact_numel() != 0;
    if (member.exact) continue;
    if (member.numel == 0) continue;  // its wire need not be in the bucket; any stream will do
    if (!wires.empty()) {
      const auto found = std::find(wires.begin(), wires.end(), member.state->wire);
      member.payload = static_cast<size_t>(found - wires.begin());
    }
    if (!begun[member.payload]) record->streams[member.payload].first_parameter = member.state->number;
    begun[member.payload] = true;
  }
}

void GradHook::prepare(BucketRecord* record) {
  for (size_t payload = 0; payload < record->streams.size(); ++payload) {
    std::vector<SlicePlace> lossy, exact;
    Counted counted;
    std::vector<std::shared_ptr<ParameterState>> exact_states;
    for (const BucketRecord::Member& member : record->members) {
      if (member.payload != payload) continue;
      (member.exact ? exact : lossy).push_back({member.offset, member.numel});
      (member.exact ? exact_states : counted.states).push_back(member.state);
    }
    auto& tables = record->streams[payload].tables;
    tables = engine_->device().prepare(record->plan.packed_layouts()[payload], lossy, exact);
    if (!tables) continue;
    if (record->plan.on_two_levels()) {
      record->streams[payload].unpack_tables = engine_->device().prepare(record->plan.layouts[payload], lossy, exact);
    }
    counted.tables = tables;
    counted.states.insert(counted.states.end(), exact_states.begin(), exact_states.end());
    counted.taken.resize(counted.states.size());
    counted_.push_back(std::move(counted));
  }
}

void GradHook::move_residuals(BucketRecord* record, const at::Tensor& buffer) {
  const WireConfig& config = engine_->config();
  // Without error feedback there can still be what another wire has left out.
  const auto is_loaded = [](const BucketRecord::Member& member) { return member.state->loaded.defined(); };
  if (!config.feedback && std::none_of(record->members.begin(), record->members.end(), is_loaded)) return;
  at::NoGradGuard no_grad;
  const BucketPlan& plan = record->plan;
  const bool keeps = config.feedback && plan.sums_codes();
  for (size_t payload = 0; keeps && payload < record->streams.size(); ++payload) {
    const BucketLayout& layout = plan.layouts[payload];
    if (layout.wire == Wire::kFp32 || layout.lossy_numel == 0) continue;
    auto& residual = record->streams[payload].residual;
    residual = std::make_shared<StreamResidual>(layout, *config.feedback, plan.pack_scale, plan.reduce_scale,
                                                transport_->place(), device_,
                                                /*of_first_only=*/plan.sum == Sum::kOneShot);
    for (const at::Tensor& storage : residual->storages()) engine_->device().will_use(storage);
  }
  // Nothing is forgotten before all has its new place.
  std::vector<at::Tensor> values(record->streams.size());  // by payload; undefined while nothing is left out
  std::vector<int64_t> begins(record->streams.size(), 0);
  for (const BucketRecord::Member& member : record->members) {
    const at::Tensor left_out = left_out_of(*member.state, member.numel);
    const bool is_kept = !member.exact && record->streams[member.payload].residual;
    if (is_kept && left_out.defined()) {
      at::Tensor& all = values[member.payload];
      if (!all.defined()) all = at::zeros({plan.layouts[member.payload].lossy_numel}, left_out.options());
      all.narrow(0, begins[member.payload], member.numel).copy_(left_out);
    } else if (left_out.defined()) {
      buffer.narrow(0, member.offset, member.numel).add_(left_out);
    }
    if (!member.exact) begins[member.payload] += member.numel;
  }
  for (size_t payload = 0; payload < values.size(); ++payload) {
    if (values[payload].defined()) values[payload] = record->streams[payload].residual->set_values(values[payload]);
  }
  begins.assign(begins.size(), 0);
  for (const BucketRecord::Member& member : record->members) {
    const at::Tensor& rest = values[member.payload];
    int64_t& begin = begins[member.payload];
    if (rest.defined() && !member.exact) {
      buffer.narrow(0, member.offset, member.numel).add_(rest.narrow(0, begin, member.numel));
    }
    member.state->loaded = at::Tensor();
    member.state->residual = member.exact ? nullptr : record->streams[member.payload].residual;
    member.state->residual_begin = begin;
    if (!member.exact) begin += member.numel;
  }
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

double GradHook::max_over_ranks(double value, const std::string& what) const {
  at::NoGradGuard no_grad;
  // A sum, in which every rank has a place of its own.
  auto values = at::zeros({engine_->world_size()}, at::TensorOptions().dtype(at::kDouble).device(device_));
  values[engine_->rank()].fill_(value);
  engine_->device().will_use(values);
  const FuturePtr future = make_future(device_);
  auto job = std::make_shared<BucketJob>();
  job->counted = false;
  job->label = std::make_shared<const BucketLabel>(what, what);
  job->on_done = completing(future, std::make_shared<at::Tensor>(values));
  ForeignStages stages;
  stages.scatter = [transport = transport_, values](Lane::Completion done) {
    transport->all_reduce_tensor(Channel::kScatter, values, std::move(done));
  };
  engine_->submit_foreign(std::move(job), std::move(stages));
  future->waitAndThrow();
  return values.max().item<double>();
}

EngineStats GradHook::stats() const {
  EngineStats stats = engine_->stats();
  std::lock_guard<std::mutex> lock(mutex_);
  take_device_counts();
  stats.num_nonfinite += num_nonfinite_on_device_;
  return stats;
}

void GradHook::settle() const {
  std::lock_guard<std::mutex> lock(mutex_);
  take_device_counts();
}

int64_t GradHook::step() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return step_;
}

void GradHook::restore_step(int64_t step) {
  std::lock_guard<std::mutex> lock(mutex_);
  step_ = step;
}

std::vector<GradHook::ParameterResidual> GradHook::residuals() const {
  at::NoGradGuard no_grad;
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<ParameterResidual> residuals;
  for (const auto& [impl, state] : states_) {
    const at::Tensor left_out = left_out_of(*state, numel_in_bucket(state->parameter));
    if (left_out.defined()) residuals.push_back({state->name, left_out.clone()});
  }
  return residuals;
}

void GradHook::restore_residuals(const std::vector<ParameterResidual>& residuals) {
  std::lock_guard<std::mutex> lock(mutex_);
  std::unordered_map<std::string, ParameterState*> by_name;
  for (const auto& [impl, state] : states_) by_name.emplace(state->name, state.get());
  for (const ParameterResidual& residual : residuals) {
    const auto found = by_name.find(residual.name);
    if (found == by_name.end() && !knows_parameters_) continue;
    TORCH_CHECK_VALUE(found != by_name.end(), "fusedcomm: the state has a parameter '", residual.name,
                      "' which this model does not have");
    const int64_t numel = numel_in_bucket(found->second->parameter);
    TORCH_CHECK_VALUE(residual.values.numel() == numel, "fusedcomm: the state's residual of '", residual.name, "' has ",
                      residual.values.numel(), " elements, the parameter ", numel);
  }
  for (const auto& [impl, state] : states_) {
    state->loaded = at::Tensor();
    state->residual = nullptr;
  }
  waiting_residuals_.clear();
  for (const ParameterResidual& residual : residuals) {
    const auto found = by_name.find(residual.name);
    at::Tensor& loaded = found == by_name.end() ? waiting_residuals_[residual.name] : found->second->loaded;
    loaded = residual.values.detach().to(device_, at::kFloat, /*non_blocking=*/false, /*copy=*/true).reshape({-1});
  }
  // The next backward pass makes residuals of what has been loaded. The records themselves stay: a verdict that the
  // other ranks are about to follow, which have loaded nothing, is on one of them.
  for (auto& record : records_) {
    if (!record) continue;
    const auto stale = std::make_shared<BucketRecord>(*record);
    stale->is_stale = true;
    for (BucketRecord::Stream& stream : stale->streams) stream.residual = nullptr;
    record = stale;
  }
}

void GradHook::name_like(const GradHook& other) {
  std::vector<std::shared_ptr<ParameterState>> theirs;
  {
    std::lock_guard<std::mutex> lock(other.mutex_);
    for (const auto& [impl, state] : other.states_) theirs.push_back(state);
  }
  std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& state : theirs) {
    if (states_.count(state->parameter.unsafeGetTensorImpl()) == 0)
      add_state(state->parameter, state->name, state->number);
  }
}

std::vector<std::string> GradHook::take_notices() {
  std::lock_guard<std::mutex> lock(mutex_);
  return std::exchange(notices_, {});
}

void GradHook::notice_what_still_waits() {
  // By the end of a pass all parameters have turned up, and DDP's second pass may have them in other buckets at most.
  if (waiting_residuals_.empty()) return;
  notices_.push_back(c10::str("fusedcomm: the state that was loaded has residuals of ", waiting_residuals_.size(),
                              " parameters that this model does not have, of '", waiting_residuals_.begin()->first,
                              "' for example: they are forgotten. A CommState without module=model knows parameters "
                              "by their order and shapes only: give it the model to load what fusedcomm.attach, or a "
                              "CommState with the model, has saved"));
  waiting_residuals_.clear();
}

std::shared_ptr<ParameterState> GradHook::state_of(const at::Tensor& parameter) {
  const auto known = states_.find(parameter.unsafeGetTensorImpl());
  if (known != states_.end()) return known->second;
  const auto number = static_cast<uint32_t>(states_.size());
  const auto state = add_state(parameter, c10::str("parameter ", number, " of shape ", parameter.sizes()), number);
  const auto waiting = waiting_residuals_.find(state->name);
  if (waiting != waiting_residuals_.end() && waiting->second.numel() == numel_in_bucket(parameter)) {
    state->loaded = waiting->second;
    waiting_residuals_.erase(waiting);
  }
  const auto count = waiting_counts_.find(state->name);
  if (count != waiting_counts_.end()) {
    state->num_nonfinite = count->second;
    waiting_counts_.erase(count);
  }
  return state;
}

std::shared_ptr<ParameterState> GradHook::add_state(const at::Tensor& parameter, std::string name, uint32_t number) {
  auto state = std::make_shared<ParameterState>();
  state->parameter = parameter;
  state->name = std::move(name);
  state->number = number;
  state->wire = parameter.dim() <= 1 ? options_.wire_1d : 0;
  states_.emplace(parameter.unsafeGetTensorImpl(), state);
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
    TORCH_CHECK_VALUE(by_name.count(count.name) != 0 || !knows_parameters_, "fusedcomm: the state has a parameter '",
                      count.name, "' which this model does not have");
  }
  for (const ParameterCount& count : counts) {
    const auto found = by_name.find(count.name);
    if (found == by_name.end()) {
      waiting_counts_[count.name] = count.num_nonfinite;
    } else {
      found->second->num_nonfinite = count.num_nonfinite;
    }
  }
}

std::vector<std::shared_ptr<const BucketRecord>> GradHook::buckets() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return records_;
}

}  // namespace fusedcomm
